//! Unified diffs between two trees, in git's format, and strict application of them.
//!
//! The invariant: `apply(old, &diff(old, new)) == new` for any two trees of text files. Hunks are
//! applied without fuzz or offset: every context line must be exactly where the hunk says.

mod binary;
mod bounded;
mod links;
mod parse;
mod reverse;
pub mod rules;

pub use bounded::{DiffLimits, FileChange, FileMode, FileVersion, bounded_diff};
pub use links::{check_link, created_links, link_target};
pub use parse::{FilePatch, Hunk, HunkLine, LineKind, parse};
pub use reverse::reversed;

use crate::task_file::TaskFile;
use similar::{Algorithm, DiffTag, capture_diff_slices_deadline, group_diff_ops};
use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::time::Instant;

/// Number of context lines around a change, as in git.
const CONTEXT: usize = 3;

/// Why a patch was refused.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum PatchErrorKind {
    /// The text is not a unified diff.
    #[error("line {line} of the patch is not valid in a unified diff: {text:?}")]
    Syntax {
        /// Line of the patch, from 1.
        line: usize,
        /// The first 80 characters of that line.
        text: String,
    },
    /// The patch contains a change that is not supported.
    #[error("{0} is not supported; only additions, changes and deletions of text files are")]
    Unsupported(&'static str),
    /// A path is absolute, empty or leaves the tree.
    #[error("the path is not a relative path inside the tree")]
    Path,
    /// The file to change does not exist.
    #[error("no such file")]
    Missing,
    /// The file to create already exists.
    #[error("the file already exists")]
    Exists,
    /// A line of the file differs from the hunk.
    #[error("line {line} of the file differs from the hunk")]
    Context {
        /// Line of the old file, from 1.
        line: usize,
    },
    /// A deletion does not remove all lines of the file.
    #[error("the deletion does not cover the whole file")]
    Leftover,
}

/// A patch that cannot be applied, with the file and the reason.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("patch of `{path}`: {kind}")]
pub struct PatchError {
    /// Path of the file; `-` if the patch cannot be parsed.
    pub path: String,
    /// Why it cannot be applied.
    pub kind: PatchErrorKind,
}

impl PatchError {
    fn new(path: &str, kind: PatchErrorKind) -> Self {
        Self { path: path.to_owned(), kind }
    }
}

/// Lines with their line feeds. Only `\n` ends a line, so `\r` is preserved.
fn lines(text: &str) -> Vec<&str> {
    text.split_inclusive('\n').collect()
}

/// The unified diff that turns `old` into `new`; empty if they are equal. Files are sorted by path.
/// If a path occurs twice in a tree, the last file counts.
pub fn diff(old: &[TaskFile], new: &[TaskFile]) -> String {
    let index = |tree: &[TaskFile]| -> BTreeMap<String, String> {
        tree.iter().map(|file| (file.path.clone(), file.content.clone())).collect()
    };
    let (old, new) = (index(old), index(new));
    let paths: std::collections::BTreeSet<&String> = old.keys().chain(new.keys()).collect();
    let mut out = String::new();
    for path in paths {
        let sides = (old.get(path).map(String::as_str), new.get(path).map(String::as_str));
        if sides.0 != sides.1 {
            out.push_str(&file_diff(path, sides.0, sides.1).to_string());
        }
    }
    out
}

/// The change of one file; `None` means that the file does not exist on that side.
pub fn file_diff(path: &str, old: Option<&str>, new: Option<&str>) -> FilePatch {
    file_diff_until(path, old, new, None)
}

/// As [`file_diff`]. After `deadline` the comparison ends, and the result is valid but not minimal.
fn file_diff_until(
    path: &str,
    old: Option<&str>,
    new: Option<&str>,
    deadline: Option<Instant>,
) -> FilePatch {
    let (before, after) = (lines(old.unwrap_or_default()), lines(new.unwrap_or_default()));
    let ops = capture_diff_slices_deadline(Algorithm::Myers, &before, &after, deadline);
    let hunks = group_diff_ops(ops, CONTEXT)
        .into_iter()
        .filter_map(|group| {
            let (first, last) = (group.first()?, group.last()?);
            let old_range = first.old_range().start..last.old_range().end;
            let new_range = first.new_range().start..last.new_range().end;
            let mut body = Vec::new();
            for op in &group {
                let (tag, from, to) = op.as_tag_tuple();
                let mut push = |kind, side: &[&str], range| {
                    let part: &[&str] =
                        side.get::<std::ops::Range<usize>>(range).unwrap_or_default();
                    body.extend(part.iter().map(|line| HunkLine::new(kind, line)));
                };
                match tag {
                    DiffTag::Equal => push(LineKind::Context, &before, from),
                    DiffTag::Delete => push(LineKind::Deleted, &before, from),
                    DiffTag::Insert => push(LineKind::Added, &after, to),
                    DiffTag::Replace => {
                        push(LineKind::Deleted, &before, from);
                        push(LineKind::Added, &after, to);
                    }
                }
            }
            Some(Hunk {
                old_start: old_range.start + usize::from(!old_range.is_empty()),
                new_start: new_range.start + usize::from(!new_range.is_empty()),
                section: String::new(),
                lines: body,
            })
        })
        .collect();
    FilePatch { old: old.map(|_| path.to_owned()), new: new.map(|_| path.to_owned()), hunks }
}

/// Applies the unified diff `patch` to `tree`. The result is sorted by path.
///
/// # Errors
/// If the text is not a patch, a path leaves the tree, a file is missing or already exists, or any
/// line differs from the patch. Nothing is applied in that case.
pub fn apply(tree: &[TaskFile], patch: &str) -> Result<Vec<TaskFile>, PatchError> {
    let mut files: BTreeMap<String, String> =
        tree.iter().map(|file| (file.path.clone(), file.content.clone())).collect();
    for file in parse(patch)? {
        let path = file.path();
        let fail = |kind| Err(PatchError::new(path, kind));
        if !is_inside(path) {
            return fail(PatchErrorKind::Path);
        }
        let before = match (&file.old, files.get(path)) {
            (Some(_), Some(content)) => content.as_str(),
            (Some(_), None) => return fail(PatchErrorKind::Missing),
            (None, Some(_)) => return fail(PatchErrorKind::Exists),
            (None, None) => "",
        };
        let after = apply_hunks(before, &file.hunks).map_err(|kind| PatchError::new(path, kind))?;
        if file.new.is_some() {
            files.insert(path.to_owned(), after);
        } else if after.is_empty() {
            files.remove(path);
        } else {
            return fail(PatchErrorKind::Leftover);
        }
    }
    Ok(files.into_iter().map(|(path, content)| TaskFile { path, content }).collect())
}

fn apply_hunks(before: &str, hunks: &[Hunk]) -> Result<String, PatchErrorKind> {
    let old = lines(before);
    let mut out = String::with_capacity(before.len());
    let mut at = 0;
    for hunk in hunks {
        // A hunk without old lines gives the line *after which* it inserts.
        let (old_len, _) = hunk.lengths();
        let start = if old_len == 0 { hunk.old_start } else { hunk.old_start.saturating_sub(1) };
        let kept = old.get(at..start).ok_or(PatchErrorKind::Context { line: hunk.old_start })?;
        out.extend(kept.iter().copied());
        at = start;
        for line in &hunk.lines {
            if line.kind != LineKind::Added {
                if old.get(at) != Some(&line.text.as_str()) {
                    return Err(PatchErrorKind::Context { line: at + 1 });
                }
                at += 1;
            }
            if line.kind != LineKind::Deleted {
                out.push_str(&line.text);
            }
        }
    }
    out.extend(old.get(at..).unwrap_or_default().iter().copied());
    Ok(out)
}

/// Whether `path` is a relative path that stays inside its tree.
pub(crate) fn is_inside(path: &str) -> bool {
    !path.contains('\0') && path.split('/').all(|part| !matches!(part, "" | "." | ".."))
}

impl std::fmt::Display for FilePatch {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let path = self.path();
        writeln!(f, "diff --git {} {}", parse::quoted("a/", path), parse::quoted("b/", path))?;
        if self.old.is_none() {
            f.write_str("new file mode 100644\n")?;
        } else if self.new.is_none() {
            f.write_str("deleted file mode 100644\n")?;
        }
        if self.hunks.is_empty() {
            return Ok(());
        }
        // After a name with a space, a tab keeps other tools from reading the rest as a date.
        let tab = if path.contains(' ') { "\t" } else { "" };
        let name = |prefix, path: &Option<String>| match path {
            Some(path) => format!("{}{tab}", parse::quoted(prefix, path)),
            None => "/dev/null".to_owned(),
        };
        writeln!(f, "--- {}", name("a/", &self.old))?;
        writeln!(f, "+++ {}", name("b/", &self.new))?;
        for hunk in &self.hunks {
            let (old_len, new_len) = hunk.lengths();
            let mut head = format!("@@ -{}", range(hunk.old_start, old_len));
            let _ = write!(head, " +{} @@", range(hunk.new_start, new_len));
            if !hunk.section.is_empty() {
                let _ = write!(head, " {}", hunk.section);
            }
            writeln!(f, "{head}")?;
            for line in &hunk.lines {
                write!(f, "{}{}", line.kind.mark(), line.text)?;
                if !line.text.ends_with('\n') {
                    f.write_str("\n\\ No newline at end of file\n")?;
                }
            }
        }
        Ok(())
    }
}

fn range(start: usize, len: usize) -> String {
    if len == 1 { start.to_string() } else { format!("{start},{len}") }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn file(path: &str, content: &str) -> TaskFile {
        TaskFile { path: path.into(), content: content.into() }
    }

    fn kind(tree: &[TaskFile], patch: &str) -> PatchErrorKind {
        apply(tree, patch).unwrap_err().kind
    }

    #[test]
    fn a_diff_has_the_format_of_git() {
        let old = [file("a.py", "1\n2\n3\n4\n5\n6\n7\n8\n"), file("gone.py", "x\n")];
        let new = [file("a.py", "1\n2\n3\n4\nfive\n6\n7\n8"), file("new dir/b.py", "")];
        let patch = diff(&old, &new);
        let want = "diff --git a/a.py b/a.py\n--- a/a.py\n+++ b/a.py\n@@ -2,7 +2,7 @@\n 2\n 3\n 4\n-5\n+five\n 6\n 7\n\
                    -8\n+8\n\\ No newline at end of file\n\
                    diff --git a/gone.py b/gone.py\ndeleted file mode 100644\n--- a/gone.py\n+++ /dev/null\n@@ -1 +0,0 @@\n-x\n\
                    diff --git a/new dir/b.py b/new dir/b.py\nnew file mode 100644\n";
        assert_eq!(patch, want);
        assert_eq!(apply(&old, &patch).unwrap(), new);
    }

    #[test]
    fn equal_trees_have_an_empty_diff() {
        let tree = [file("a", "x")];
        assert_eq!(diff(&tree, &tree), "");
        assert_eq!(apply(&tree, "").unwrap(), tree);
    }

    #[test]
    fn a_shifted_context_is_refused() {
        let patch = diff(&[file("a", "1\n2\n3\n")], &[file("a", "1\n2\n4\n")]);
        assert_eq!(kind(&[file("a", "0\n1\n2\n3\n")], &patch), PatchErrorKind::Context { line: 1 });
        assert_eq!(kind(&[], &patch), PatchErrorKind::Missing);
    }

    #[test]
    fn a_new_file_never_replaces_one() {
        let patch = diff(&[], &[file("a", "1\n")]);
        assert_eq!(kind(&[file("a", "")], &patch), PatchErrorKind::Exists);
    }

    #[test]
    fn a_deletion_must_cover_the_file() {
        let patch = diff(&[file("a", "1\n")], &[]);
        assert_eq!(kind(&[file("a", "1\n2\n")], &patch), PatchErrorKind::Leftover);
    }

    #[test]
    fn paths_outside_the_tree_are_refused() {
        for path in ["/etc/passwd", "../x", "a/../../x", "a//b", "./a", ""] {
            let patch = file_diff(path, None, Some("x\n")).to_string();
            assert!(apply(&[], &patch).is_err(), "{path}");
        }
    }

    fn content() -> impl Strategy<Value = String> {
        let line = prop_oneof![
            Just("a\n"),
            Just("b\n"),
            Just("\n"),
            Just("-- a/x\n"),
            Just("++ b\n"),
            Just("@@ -1 +1 @@\n"),
            Just("\\ No newline at end of file\n"),
            Just("c\r\n"),
            Just("\r"),
            Just("diff --git a/x b/x\n"),
            Just("ü")
        ];
        proptest::collection::vec(line, 0..24).prop_map(|lines| lines.concat())
    }

    fn tree() -> impl Strategy<Value = Vec<TaskFile>> {
        let path = prop_oneof![
            Just("a"),
            Just("b.py"),
            Just("dir/c d.py"),
            Just("q\"uote\\"),
            Just("tab\tx"),
            Just("new\nline"),
            Just("ü b/ü"),
            Just("x b/x")
        ];
        proptest::collection::btree_map(path, content(), 0..6).prop_map(|files| {
            files.into_iter().map(|(path, content)| file(path, &content)).collect()
        })
    }

    proptest! {
        #[test]
        fn prop_apply_of_diff_is_identity(old in tree(), new in tree()) {
            let mut want = new.clone();
            want.sort_by(|a, b| a.path.cmp(&b.path));
            prop_assert_eq!(apply(&old, &diff(&old, &new)).unwrap(), want);
        }

        #[test]
        fn prop_parse_never_panics(text in "[-+ @\\\\a/b0-9,\n\"]{0,80}") {
            let _ = parse(&format!("--- a/x\n+++ b/x\n{text}"));
            let _ = parse(&text);
        }
    }
}
