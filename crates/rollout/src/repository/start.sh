# Creates a task's starting tree from the clean tree of its image, in the working directory: applies the
# diff in .grading/start and commits it, so that HEAD is that tree. "$@": files to remove afterwards.
set -eu
command -v git >/dev/null || { echo "the image has no git" >&2; exit 1; }
[ -e .git ] || { echo "$PWD is not a git repository" >&2; exit 1; }
patch=$(mktemp)
mv .grading/start "$patch"
rmdir .grading
git config --global --add safe.directory '*'
git update-index -q --refresh || true
git apply --index --whitespace=nowarn "$patch"
rm "$patch"
git -c user.name=orchestrate -c user.email=orchestrate@localhost -c commit.gpgsign=false \
  commit -q --no-verify -m 'The repository as it is given'
for file; do rm -f -- "$file"; done
