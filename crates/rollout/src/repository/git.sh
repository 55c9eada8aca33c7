# Sets up git inside a sandbox: our own repository ($1) over the task's tree, without any settings
# of the image or the agent.
export GIT_DIR=$1 GIT_WORK_TREE=$PWD HOME=/nonexistent XDG_CONFIG_HOME=/nonexistent
export GIT_CONFIG_NOSYSTEM=1 GIT_CONFIG_SYSTEM=/dev/null GIT_CONFIG_GLOBAL=/dev/null
unset GIT_INDEX_FILE GIT_OBJECT_DIRECTORY GIT_ALTERNATE_OBJECT_DIRECTORIES GIT_EXTERNAL_DIFF GIT_NAMESPACE

# Prints every file and folder that git would read; and their size in KiB, or 0 if it is unknown.
entries() { find . -name .git -prune -o -print 2>/dev/null; }
kib() {
  size=$(du -sk --apparent-size --exclude=.git . 2>/dev/null | cut -f1)
  echo "${size:-0}"
}

# Prints the id of the tree of all current files. Files that Python and the graders create are left
# out, whatever an ignore file says.
current_tree() {
  rm -f "$GIT_DIR/index.lock"
  git add -A >/dev/null 2>&1
  git rm -r -q -f --cached --ignore-unmatch -- \
    .venv r2e_tests run_tests.sh '*.pyc' '*/__pycache__/*' '__pycache__/*' >/dev/null
  git write-tree
}
