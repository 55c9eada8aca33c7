# Prepares an image's repository for an agent, in its folder: removes the hidden tests, keeps the
# tree as it is (images come with changes that are needed) and records it in the git folder $1. $2:
# environment; $3: whether to remove the repository's history too. Prints the id of the tree, its
# number of files and folders, and its size in KiB.
set -eu
command -v git >/dev/null || { echo "the image has no git" >&2; exit 1; }
case $2 in
  r2e) rm -rf /r2e_tests /root/r2e_tests r2e_tests /run_tests.sh /root/run_tests.sh run_tests.sh ;;
  swe-bench) rm -f /run_tests.sh /eval.sh /root/eval.sh ;;
esac
[ -e .git ] || { echo "$PWD is not a git repository" >&2; exit 1; }
git config --global --add safe.directory '*'
# `git add` would skip tracked files that an ignore file names.
tracked=$(mktemp)
git ls-files -z -c -i --exclude-standard >"$tracked"
exclude=$(git rev-parse --git-path info/exclude)
(
  @GIT@
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
  tree=$(current_tree)
  git config user.name agent
  git config user.email agent@localhost
  git update-ref HEAD "$(git commit-tree -m 'The repository as it is given' "$tree")"
  echo "$tree $(entries | wc -l) $(kib)"
)
rm -f "$tracked"
if [ "$3" = true ]; then
  rm -rf .git
  cp -a "$1" .git
  git config --unset core.worktree
  rm .git/info/attributes
fi
