# Git as we use it inside a sandbox: our own repository over the task's tree ($1), and none of the
# settings that the image or the agent may have made.
export GIT_DIR=$1 GIT_WORK_TREE=$PWD HOME=/nonexistent XDG_CONFIG_HOME=/nonexistent
export GIT_CONFIG_NOSYSTEM=1 GIT_CONFIG_SYSTEM=/dev/null GIT_CONFIG_GLOBAL=/dev/null
unset GIT_INDEX_FILE GIT_OBJECT_DIRECTORY GIT_ALTERNATE_OBJECT_DIRECTORIES GIT_EXTERNAL_DIFF GIT_NAMESPACE

# What git would have to look at, line by line, and how many KiB that is; 0 where it cannot be told.
entries() { find . -name .git -prune -o -print 2>/dev/null; }
kib() {
  size=$(du -sk --apparent-size --exclude=.git . 2>/dev/null | cut -f1)
  echo "${size:-0}"
}

# Prints the tree of all files as they are now. What Python and the graders put into the
# repository is no part of it, whatever an ignore file says.
current_tree() {
  rm -f "$GIT_DIR/index.lock"
  git add -A >/dev/null 2>&1
  git rm -r -q -f --cached --ignore-unmatch -- \
    .venv r2e_tests run_tests.sh '*.pyc' '*/__pycache__/*' '__pycache__/*' >/dev/null
  git write-tree
}
