# Applies the diff .grading/patch as SWE-bench's harness does, trying commands in the order of
# version $1, and moves eval.sh to its place. Exits with 3 if no command applies the diff. For the
# version `strict`, the files may be in /tmp/grading, and the other arguments leave out paths.
set -u
[ -d .grading ] && staged=.grading || staged=/tmp/grading
mv $staged/patch /tmp/patch.diff && mv $staged/eval.sh /eval.sh || exit 1
rm -rf .grading
version=$1
shift
git config --global --add safe.directory '*'
attempt() {
  echo "$ $*"
  "$@" 2>&1
}
restore() {
  git checkout -- . 2>&1
  git clean -fd 2>&1
}
patch=/tmp/patch.diff
case $version in
  4)
    attempt git apply --verbose $patch && exit 0
    attempt git apply --verbose --reject $patch && exit 0
    attempt patch --batch --fuzz=5 -p1 -i $patch && exit 0
    ;;
  5)
    attempt git apply --verbose $patch && exit 0
    restore
    attempt git apply --verbose --3way $patch && exit 0
    restore
    attempt git apply --verbose --reject $patch && exit 0
    restore
    attempt patch --batch --forward --fuzz=5 -p1 -i $patch && exit 0
    attempt git apply --check --reverse $patch && exit 0
    ;;
  strict)
    # Every byte of a file counts, whatever the repository's own attributes say.
    attempt git --git-dir=/tmp/grading/git --work-tree=. apply --verbose "$@" $patch && exit 0
    ;;
  none) exit 0 ;;
esac
exit 3
