//! The agent's change to a task that brings its own files: the difference between two trees, as
//! files for the grader and as a diff for people.
//!
//! The invariant: the grader receives this change and nothing else from the agent's container.

use orchestrate_sandbox::FileEntry;
use std::collections::BTreeMap;

/// The difference between the tree that the agent was given and the tree that it left.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct TreeChange {
    /// Files with new content or mode, sorted by path.
    pub written: Vec<FileEntry>,
    /// Paths of deleted files, sorted.
    pub removed: Vec<String>,
    /// Unified diff in git's format; binary files appear only by name.
    pub patch: String,
}

/// Compares two trees. The `.git` folder is left out, because it is not part of the agent's work.
pub fn compare_trees(before: &[FileEntry], after: &[FileEntry]) -> TreeChange {
    let index = |files: &'_ [FileEntry]| -> BTreeMap<String, FileEntry> {
        let kept = files.iter().filter(|f| f.path != ".git" && !f.path.starts_with(".git/"));
        kept.map(|f| (f.path.clone(), f.clone())).collect()
    };
    let (before, after) = (index(before), index(after));
    let mut change = TreeChange::default();
    let mut paths: Vec<&String> = before.keys().chain(after.keys()).collect();
    paths.sort_unstable();
    paths.dedup();
    for path in paths {
        let (old, new) = (before.get(path), after.get(path));
        if old == new {
            continue;
        }
        change.patch.push_str(&diff_of_file(path, old, new));
        match new {
            Some(file) => change.written.push(file.clone()),
            None => change.removed.push(path.clone()),
        }
    }
    change
}

fn diff_of_file(path: &str, old: Option<&FileEntry>, new: Option<&FileEntry>) -> String {
    let text = |file: Option<&FileEntry>| -> Option<String> {
        let content = file.map_or(&[][..], |f| f.content.as_slice());
        let text = std::str::from_utf8(content).ok()?;
        (!text.contains('\0')).then(|| text.to_owned())
    };
    let mode = match (old.map(git_mode), new.map(git_mode)) {
        (None, Some(mode)) => format!("new file mode 100{mode:o}\n"),
        (Some(mode), None) => format!("deleted file mode 100{mode:o}\n"),
        (Some(old), Some(new)) if old != new => {
            format!("old mode 100{old:o}\nnew mode 100{new:o}\n")
        }
        (Some(_) | None, Some(_) | None) => String::new(),
    };
    let name = |file: Option<&FileEntry>, side: &str| {
        file.map_or_else(|| "/dev/null".to_owned(), |_| format!("{side}/{path}"))
    };
    let (from, to) = (name(old, "a"), name(new, "b"));
    let content = match (text(old), text(new)) {
        (Some(before), Some(after)) if before == after => String::new(),
        (Some(before), Some(after)) => {
            let diff = similar::TextDiff::from_lines(before.as_str(), after.as_str());
            diff.unified_diff().header(&from, &to).to_string()
        }
        (None, Some(_) | None) | (Some(_), None) => {
            format!("Binary files {from} and {to} differ\n")
        }
    };
    format!("diff --git a/{path} b/{path}\n{mode}{content}")
}

/// The mode that git records for a regular file: executable or not.
fn git_mode(file: &FileEntry) -> u32 {
    if file.mode & 0o100 == 0 { 0o644 } else { 0o755 }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn file(path: &str, mode: u32, content: &[u8]) -> FileEntry {
        FileEntry { path: path.to_owned(), mode, content: content.to_vec() }
    }

    #[test]
    fn change_has_written_files_removed_files_and_a_diff() {
        let before = [
            file("a.py", 0o644, b"one\ntwo\n"),
            file("gone.py", 0o644, b"x\n"),
            file("same.py", 0o644, b"s"),
        ];
        let after = [
            file(".git/index", 0o644, b"noise"),
            file("a.py", 0o755, b"one\n2\n"),
            file("blob", 0o644, b"\0\xff"),
            file("same.py", 0o644, b"s"),
        ];
        let change = compare_trees(&before, &after);
        let written: Vec<&str> = change.written.iter().map(|f| f.path.as_str()).collect();
        assert_eq!(written, ["a.py", "blob"]);
        assert_eq!(change.removed, ["gone.py"]);
        assert!(change.patch.starts_with(
            "diff --git a/a.py b/a.py\nold mode 100644\nnew mode 100755\n--- a/a.py\n+++ b/a.py\n"
        ), "{}", change.patch);
        assert!(change.patch.contains("-two\n+2\n"));
        assert!(change.patch.contains("Binary files /dev/null and b/blob differ"));
        assert!(change.patch.contains("--- a/gone.py\n+++ /dev/null\n"));
    }

    #[test]
    fn equal_trees_have_an_empty_patch() {
        let tree = [file("a.py", 0o644, b"one\n")];
        assert_eq!(compare_trees(&tree, &tree), TreeChange::default());
    }
}
