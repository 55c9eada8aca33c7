//! Reverses a diff.

use super::{FilePatch, Hunk, HunkLine, LineKind, PatchError, PatchErrorKind, parse};
use std::fmt::Write as _;

/// The unified diff that undoes `patch`: applied to the new tree, it gives the old one.
///
/// # Errors
/// If the text is not a unified diff, or changes anything other than lines of files with mode 0644,
/// e.g. by a rename, a binary patch or a change of mode.
pub fn reversed(patch: &str) -> Result<String, PatchError> {
    if other_mode(patch) {
        return Err(PatchError::new("-", PatchErrorKind::Unsupported("a change of modes")));
    }
    let mut out = String::new();
    for file in parse(patch)? {
        let _ = write!(out, "{}", undone(file));
    }
    Ok(out)
}

/// Whether a header line of the diff names a mode that the reversed diff would lose.
fn other_mode(patch: &str) -> bool {
    let mode = |line: &str| {
        let known = ["new file mode ", "deleted file mode "];
        known.iter().find_map(|start| line.strip_prefix(start)).map(|mode| mode.trim() != "100644")
    };
    // Lines of hunks start with a space, `+`, `-` or a backslash.
    patch.lines().any(|line| mode(line).unwrap_or_else(|| line.starts_with("old mode ")))
}

fn undone(file: FilePatch) -> FilePatch {
    let FilePatch { old, new, hunks } = file;
    FilePatch { old: new, new: old, hunks: hunks.into_iter().map(undone_hunk).collect() }
}

fn undone_hunk(hunk: Hunk) -> Hunk {
    let Hunk { old_start, new_start, section, lines } = hunk;
    let mut undone = Vec::with_capacity(lines.len());
    // Of consecutive changes, the deleted lines come first.
    let mut added: Vec<HunkLine> = Vec::new();
    for line in lines {
        match line.kind {
            LineKind::Context => {
                undone.append(&mut added);
                undone.push(line);
            }
            LineKind::Added => undone.push(HunkLine { kind: LineKind::Deleted, ..line }),
            LineKind::Deleted => added.push(HunkLine { kind: LineKind::Added, ..line }),
        }
    }
    undone.append(&mut added);
    Hunk { old_start: new_start, new_start: old_start, section, lines: undone }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::patch::{apply, diff};
    use crate::task_file::TaskFile;
    use proptest::prelude::*;

    fn tree() -> impl Strategy<Value = Vec<TaskFile>> {
        let file = ("[ab]{1,2}", "([xyz]\n){0,8}[x]?")
            .prop_map(|(path, content)| TaskFile { path, content });
        prop::collection::btree_map("[ab]{1,2}", file, 0..4).prop_map(|files| {
            files.into_iter().map(|(path, file)| TaskFile { path, ..file }).collect()
        })
    }

    proptest! {
        #[test]
        fn prop_a_reversed_diff_undoes_the_diff(old in tree(), new in tree()) {
            let back = reversed(&diff(&old, &new)).unwrap();
            prop_assert_eq!(apply(&new, &back).unwrap(), old);
        }
    }

    #[test]
    fn diffs_that_change_more_than_lines_are_refused() {
        for patch in [
            "diff --git a/x b/x\nold mode 100644\nnew mode 100755\n",
            "diff --git a/x b/x\ndeleted file mode 100755\n--- a/x\n+++ /dev/null\n@@ -1 +0,0 @@\n-x\n",
            "diff --git a/x b/y\nsimilarity index 100%\nrename from x\nrename to y\n",
            "no diff\n",
        ] {
            let undone = reversed(patch);
            assert!(undone.is_err() || undone == Ok(String::new()), "{patch}");
        }
    }
}
