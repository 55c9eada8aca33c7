# Prints what an agent changed: the diff from the tree $2 to the files as they are now, with every
# byte. $3 = binary: files that hold other texts than UTF-8 are written as git writes binary ones.
# Ends with 75 where there are $4 files or more, or over $5 KiB.
set -eu
@GIT@
[ "$(entries | head -n "$4" | wc -l)" -lt "$4" ] && [ "$(kib)" -le "$5" ] || exit 75
[ "$3" = text ] || echo '* -text -filter -ident -working-tree-encoding -diff' >"$GIT_DIR/info/attributes"
git diff-tree -r -p --binary --full-index --no-renames --no-color --no-ext-diff --no-textconv \
  "$2" "$(current_tree)" >"$GIT_DIR/patch"
cat "$GIT_DIR/patch"
