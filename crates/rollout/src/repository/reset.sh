# Prepares an image's repository for an agent, in its folder: removes the hidden tests and keeps the
# tree as it is (images come with changes that are needed). $1: environment; $2: whether to replace
# the repository's history by one commit of the tree.
set -eu
command -v git >/dev/null || { echo "the image has no git" >&2; exit 1; }
case $1 in
  r2e) rm -rf /r2e_tests /root/r2e_tests r2e_tests /run_tests.sh /root/run_tests.sh run_tests.sh ;;
  swe-*) rm -f /run_tests.sh /eval.sh /root/eval.sh ;;
esac
[ -e .git ] || { echo "$PWD is not a git repository" >&2; exit 1; }
git config --global --add safe.directory '*'
[ "$2" = true ] || exit 0
# `git add` would skip tracked files that an ignore file names.
tracked=$(mktemp)
git ls-files -z -c -i --exclude-standard >"$tracked"
exclude=$(git rev-parse --git-path info/exclude)
made=$(mktemp -d)
(
  # Without any settings of the image.
  export GIT_DIR=$made/git GIT_WORK_TREE=$PWD HOME=/nonexistent XDG_CONFIG_HOME=/nonexistent
  export GIT_CONFIG_NOSYSTEM=1 GIT_CONFIG_SYSTEM=/dev/null GIT_CONFIG_GLOBAL=/dev/null
  unset GIT_INDEX_FILE GIT_OBJECT_DIRECTORY GIT_ALTERNATE_OBJECT_DIRECTORIES GIT_EXTERNAL_DIFF GIT_NAMESPACE
  git init -q --template=
  git config core.looseCompression 0
  git config gc.auto 0
  git config core.autocrlf false
  mkdir -p "$GIT_DIR/info"
  [ ! -f "$exclude" ] || cat "$exclude" >"$GIT_DIR/info/exclude"
  printf '\n/.venv/\n/r2e_tests\n/run_tests.sh\n__pycache__/\n*.pyc\n' >>"$GIT_DIR/info/exclude"
  # Every byte of a file counts, whatever the repository's own attributes say.
  echo '* -text -filter -ident -working-tree-encoding' >"$GIT_DIR/info/attributes"
  git update-index --add --remove -z --stdin <"$tracked"
  git add -A >/dev/null 2>&1
  git rm -r -q -f --cached --ignore-unmatch -- \
    .venv r2e_tests run_tests.sh '*.pyc' '*/__pycache__/*' '__pycache__/*' >/dev/null
  git config user.name agent
  git config user.email agent@localhost
  git update-ref HEAD "$(git commit-tree -m 'The repository as it is given' "$(git write-tree)")"
  git config --unset core.worktree || true
  rm "$GIT_DIR/info/attributes"
)
rm -rf .git "$tracked"
mv "$made/git" .git
rmdir "$made"
