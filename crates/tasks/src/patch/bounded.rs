//! Diffs of untrusted files, within limits of time and size.
//!
//! The invariant: the time and memory for a diff are bounded by [`DiffLimits`], whatever the contents
//! are, and the result is always a valid diff that [`super::apply`] and git accept. A file that is too
//! expensive to compare is replaced as a whole.

use super::parse::quoted;
use super::{FilePatch, file_diff_until, range};
use std::fmt::Write as _;
use std::time::{Duration, Instant};

/// One side of a change.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FileVersion<'a> {
    /// The whole content.
    pub text: &'a str,
    /// Whether the owner may execute the file.
    pub executable: bool,
}

/// A file before and after a change; `None` = it does not exist on that side.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FileChange<'a> {
    /// Path relative to the tree.
    pub path: &'a str,
    /// Before the change.
    pub old: Option<FileVersion<'a>>,
    /// After the change.
    pub new: Option<FileVersion<'a>>,
}

/// Limits of a diff.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DiffLimits {
    /// Size of both sides of one file together, in bytes, above which it is replaced as a whole.
    pub compared_bytes: usize,
    /// Lines of both sides of one file together, above which it is replaced as a whole.
    pub compared_lines: usize,
    /// Time for all comparisons together. Files that are left are replaced as a whole.
    pub time: Duration,
    /// Size of the diff, in bytes.
    pub patch_bytes: usize,
}

impl Default for DiffLimits {
    fn default() -> Self {
        Self {
            compared_bytes: 1 << 20,
            compared_lines: 40_000,
            time: Duration::from_secs(2),
            patch_bytes: 4 << 20,
        }
    }
}

/// The unified diff of `files`, in git's format and in this order; `None` if it exceeds
/// [`DiffLimits::patch_bytes`].
///
/// Files with equal content and mode do not appear.
pub fn bounded_diff<'a>(
    files: impl IntoIterator<Item = FileChange<'a>>,
    limits: DiffLimits,
) -> Option<String> {
    let deadline = Instant::now() + limits.time;
    let mut out = String::new();
    for file in files.into_iter().filter(|file| file.old != file.new) {
        write_header(&mut out, &file);
        let (old, new) = (text(file.old), text(file.new));
        if old != new {
            let bytes = old.len() + new.len();
            let is_comparable = bytes <= limits.compared_bytes
                && line_feeds(old) + line_feeds(new) <= limits.compared_lines
                && Instant::now() < deadline;
            if is_comparable {
                let sides = (file.old.map(|v| v.text), file.new.map(|v| v.text));
                write_hunks(
                    &mut out,
                    &file_diff_until(file.path, sides.0, sides.1, Some(deadline)),
                );
            } else {
                let room = limits.patch_bytes.saturating_sub(out.len());
                // Every line takes one more byte than in the file.
                if bytes > room || bytes + line_feeds(old) + line_feeds(new) > room {
                    return None;
                }
                write_replacement(&mut out, &file, old, new);
            }
        }
        if out.len() > limits.patch_bytes {
            return None;
        }
    }
    Some(out)
}

fn text(version: Option<FileVersion<'_>>) -> &str {
    version.map_or("", |version| version.text)
}

fn line_feeds(text: &str) -> usize {
    text.bytes().filter(|&byte| byte == b'\n').count()
}

fn write_header(out: &mut String, file: &FileChange<'_>) {
    let mode = |version: FileVersion<'_>| if version.executable { "100755" } else { "100644" };
    let _ = writeln!(out, "diff --git {} {}", quoted("a/", file.path), quoted("b/", file.path));
    let _ = match (file.old.map(mode), file.new.map(mode)) {
        (None, Some(new)) => writeln!(out, "new file mode {new}"),
        (Some(old), None) => writeln!(out, "deleted file mode {old}"),
        (Some(old), Some(new)) if old != new => writeln!(out, "old mode {old}\nnew mode {new}"),
        (Some(_) | None, Some(_) | None) => Ok(()),
    };
}

/// Writes the part of a file's diff after its extended header.
fn write_hunks(out: &mut String, patch: &FilePatch) {
    let text = patch.to_string();
    let names = text.split_inclusive('\n').skip_while(|line| !line.starts_with("--- "));
    out.extend(names);
}

/// Writes a hunk that removes all lines and adds all new ones.
fn write_replacement(out: &mut String, file: &FileChange<'_>, old: &str, new: &str) {
    let tab = if file.path.contains(' ') { "\t" } else { "" };
    let name = |prefix: &str, version: Option<FileVersion<'_>>| match version {
        Some(_) => format!("{}{tab}", quoted(prefix, file.path)),
        None => "/dev/null".to_owned(),
    };
    let lines = |text: &str| {
        let count = text.split_inclusive('\n').count();
        range(count.min(1), count)
    };
    let (from, to) = (name("a/", file.old), name("b/", file.new));
    let _ = writeln!(out, "--- {from}\n+++ {to}\n@@ -{} +{} @@", lines(old), lines(new));
    for (mark, text) in [('-', old), ('+', new)] {
        for line in text.split_inclusive('\n') {
            out.push(mark);
            out.push_str(line);
            if !line.ends_with('\n') {
                out.push_str("\n\\ No newline at end of file\n");
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::apply;
    use super::*;
    use crate::task::TaskFile;
    use proptest::prelude::*;

    fn version(text: &str) -> FileVersion<'_> {
        FileVersion { text, executable: false }
    }

    fn tree(path: &str, text: Option<&str>) -> Vec<TaskFile> {
        let file = |text: &str| TaskFile { path: path.to_owned(), content: text.to_owned() };
        text.map(file).into_iter().collect()
    }

    #[test]
    fn modes_are_part_of_the_header() {
        let run = |text, executable| Some(FileVersion { text, executable });
        let files = [
            FileChange { path: "a", old: run("x\n", false), new: run("x\n", true) },
            FileChange { path: "b", old: None, new: run("y", true) },
            FileChange { path: "c", old: run("", true), new: None },
            FileChange { path: "same", old: run("z", true), new: run("z", true) },
        ];
        let want = "diff --git a/a b/a\nold mode 100644\nnew mode 100755\n\
            diff --git a/b b/b\nnew file mode 100755\n--- /dev/null\n+++ b/b\n@@ -0,0 +1 @@\n+y\n\
            \\ No newline at end of file\ndiff --git a/c b/c\ndeleted file mode 100755\n";
        assert_eq!(bounded_diff(files, DiffLimits::default()).unwrap(), want);
    }

    #[test]
    fn hostile_contents_take_bounded_time_and_space() {
        let limits = DiffLimits::default();
        let began = Instant::now();
        let newlines = "\n".repeat(120 << 20);
        let change =
            FileChange { path: "a", old: Some(version("x\n")), new: Some(version(&newlines)) };
        assert_eq!(bounded_diff([change], limits), None);
        assert!(began.elapsed() < Duration::from_secs(5), "{:?}", began.elapsed());
        // Lines without any order, which are the worst case of the algorithm.
        let lines = |factor: usize| {
            let numbers = (0..19_000).map(|n| (n * factor % 19_001).to_string());
            numbers.collect::<Vec<_>>().join("\n")
        };
        let (old, new) = (lines(7), lines(12_345));
        let began = Instant::now();
        let change = FileChange { path: "a", old: Some(version(&old)), new: Some(version(&new)) };
        let patch = bounded_diff([change], limits).unwrap();
        assert!(began.elapsed() < limits.time * 3, "{:?}", began.elapsed());
        assert_eq!(apply(&tree("a", Some(&old)), &patch).unwrap(), tree("a", Some(&new)));
    }

    proptest! {
        #[test]
        fn prop_every_limit_gives_a_diff_that_applies(
            old in proptest::option::of("[ab\n]{0,30}"),
            new in proptest::option::of("[ab\n]{0,30}"),
            compared_lines in 0_usize..40,
        ) {
            let limits = DiffLimits { compared_lines, ..DiffLimits::default() };
            let change = FileChange {
                path: "d/x y",
                old: old.as_deref().map(version),
                new: new.as_deref().map(version),
            };
            let patch = bounded_diff([change], limits).unwrap();
            let applied = apply(&tree("d/x y", old.as_deref()), &patch).unwrap();
            prop_assert_eq!(applied, tree("d/x y", new.as_deref()));
        }
    }
}
