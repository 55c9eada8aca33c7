# Prints the agent's change: the complete diff from tree $2 to the current files. $3 = binary: files
# that are not UTF-8 are printed in git's format for binary files. Exits with 75 if there are $4
# files or more, or more than $5 KiB.
set -eu
@GIT@
[ "$(entries | head -n "$4" | wc -l)" -lt "$4" ] && [ "$(kib)" -le "$5" ] || exit 75
[ "$3" = text ] || echo '* -text -filter -ident -working-tree-encoding -diff' >"$GIT_DIR/info/attributes"
git diff-tree -r -p --binary --full-index --no-renames --no-color --no-ext-diff --no-textconv \
  "$2" "$(current_tree)" >"$GIT_DIR/patch"
cat "$GIT_DIR/patch"
