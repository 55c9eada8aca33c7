# Moves the uploaded files to /tmp/grading and prints what the diff in it touches, in sections. Exits
# with 3 if git cannot read the diff.
set -eu
mkdir /tmp/grading
mv .grading/* /tmp/grading/
rmdir .grading
section() { printf '\001%s\n' "$1"; }
section entries
for entry in * .[!.]* src/* lib/* python/*; do
  [ ! -e "$entry" ] || printf '%s\n' "$entry"
done
section runner
for runner in /root/run_tests.sh run_tests.sh /run_tests.sh; do
  [ ! -f "$runner" ] || { cat "$runner"; break; }
done
patch=/tmp/grading/patch
git init -q --bare --template= /tmp/grading/git
mkdir -p /tmp/grading/git/info
# Every byte of a file counts, whatever the repository's own attributes say.
echo '* -text -filter -ident -working-tree-encoding' >/tmp/grading/git/info/attributes
read_patch() {
  git --git-dir=/tmp/grading/git --work-tree=. apply "$@" "$patch" 2>/tmp/grading/error || {
    cat /tmp/grading/error
    exit 3
  }
}
if [ -s "$patch" ]; then
  section new
  read_patch --numstat -z
  section old
  read_patch -R --numstat -z
  section deleted
  read_patch --summary | grep '^ delete mode' || true
  section tracing
  read_patch --numstat -z | tr '\0' '\n' | cut -f 3- | tr '\n' '\0' |
    xargs -0 -r grep -lsE 'settrace|setprofile|sys.monitoring' -- || true
fi
section end
