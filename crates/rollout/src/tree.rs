//! The agent's change as files for a grader and as a diff.
//!
//! The diff is made here, against files that the agent never touched: the task's own, or those in a
//! fresh grader's sandbox. The invariant: the grader receives this change and nothing else from the
//! agent's container.

use crate::collection::{CollectedChange, MAX_CHANGE, failed_here, is_binary};
use crate::offload::{self, OffloadError};
use crate::sandboxes::file_entry;
use orchestrate_sandbox::{FileEntry, Sandbox, SandboxError, SandboxErrorKind};
use orchestrate_tasks::patch::{
    DiffLimits, FileChange, FileMode, FileVersion, bounded_diff, link_target,
};
use orchestrate_tasks::{Finding, Task};
use orchestrate_types::ByteSize;
use std::collections::{BTreeMap, BTreeSet};

/// Limit of the originals of all changed files together.
const MAX_ORIGINALS: ByteSize = ByteSize::mib(8);

/// The difference between the tree that the agent was given and the tree that it left.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct TreeChange {
    /// Text files (in any encoding) and symbolic links with new content or mode, sorted by path.
    pub written: Vec<FileEntry>,
    /// Paths of deleted text files and links, sorted.
    pub removed: Vec<String>,
    /// Diff in git's format, in its binary form where a file is not UTF-8.
    pub patch: String,
    /// What was noticed about files that are left out.
    pub findings: BTreeSet<Finding>,
}

/// The change to a task that brings its own files; `None` if its diff is too large.
pub(crate) async fn change_of_files(
    task: &Task,
    collected: CollectedChange,
) -> Result<Option<TreeChange>, OffloadError> {
    let changed = |path: &str| {
        let written = collected.written.binary_search_by(|file| file.path.as_str().cmp(path));
        written.is_ok() || collected.removed.iter().any(|removed| removed == path)
    };
    let originals =
        task.agent_files.iter().filter(|file| changed(&file.path)).map(file_entry).collect();
    offload::run(move || compare(originals, collected, DiffLimits::default())).await
}

/// The change to the tree in a fresh sandbox, from which the originals are read.
///
/// Fails with [`SandboxErrorKind::TooLarge`] if the originals or the diff are too large.
pub(crate) async fn change_in(
    sandbox: &mut dyn Sandbox,
    collected: &CollectedChange,
) -> Result<TreeChange, SandboxError> {
    // Held from here, because from here on the originals are in memory.
    let permit = offload::permit().await.map_err(|error| failed_here(sandbox, error))?;
    let written = collected.written.iter().map(|file| file.path.clone());
    let paths: Vec<String> = written.chain(collected.removed.iter().cloned()).collect();
    let mut originals = sandbox.read_files(&paths, MAX_ORIGINALS).await?;
    // A file with which the agent replaced a folder is a new one.
    originals.retain(|file| !file.is_special());
    let collected = collected.clone();
    let work = move || compare(originals, collected, DiffLimits::default());
    let change = offload::run_with(permit, work).await;
    change.map_err(|error| failed_here(sandbox, error))?.ok_or_else(|| SandboxError {
        sandbox: sandbox.name().to_owned(),
        kind: SandboxErrorKind::TooLarge {
            what: "the diff of the change".to_owned(),
            cap: MAX_CHANGE,
        },
    })
}

/// Compares the change with the original files; `None` if its diff exceeds `limits`. A binary
/// original keeps its content, and so does a path that has become a link out of the tree.
fn compare(
    originals: Vec<FileEntry>,
    collected: CollectedChange,
    limits: DiffLimits,
) -> Option<TreeChange> {
    let originals: BTreeMap<String, FileEntry> =
        originals.into_iter().map(|file| (file.path.clone(), file)).collect();
    let is_text = |path: &str| originals.get(path).is_none_or(|file| !is_binary(file));
    let mut findings = BTreeSet::new();
    let CollectedChange { mut written, mut removed, has_binary } = collected;
    let touches_binary = |file: &FileEntry| is_binary(file) || !is_text(&file.path);
    let removes_binary = |path: &String| !is_text(path);
    if has_binary || written.iter().any(touches_binary) || removed.iter().any(removes_binary) {
        findings.insert(Finding::BinaryLeftOut);
    }
    written.retain(|file| {
        !is_binary(file)
            && is_text(&file.path)
            && originals.get(&file.path).is_none_or(|old| version(old) != version(file))
            && check_target(file).map_err(|finding| findings.insert(finding)).is_ok()
    });
    removed.retain(|path| is_text(path) && originals.contains_key(path));
    let new: BTreeMap<&str, &FileEntry> = written.iter().map(|f| (f.path.as_str(), f)).collect();
    let paths: BTreeSet<&str> =
        new.keys().copied().chain(removed.iter().map(String::as_str)).collect();
    let changes = paths.into_iter().map(|path| FileChange {
        path,
        old: originals.get(path).map(version),
        new: new.get(path).copied().map(version),
    });
    let patch = bounded_diff(changes, limits)?;
    Some(TreeChange { written, removed, patch, findings })
}

/// Refuses a link that leaves the tree.
fn check_target(file: &FileEntry) -> Result<(), Finding> {
    if !file.is_link() {
        return Ok(());
    }
    link_target(&file.path, &file.content).map(drop).inspect_err(|finding| {
        tracing::info!(path = file.path, finding = finding.name(), "a link is left out");
    })
}

fn version(file: &FileEntry) -> FileVersion<'_> {
    let mode = match (file.is_link(), file.mode & 0o100 != 0) {
        (true, _) => FileMode::Link,
        (false, true) => FileMode::Executable,
        (false, false) => FileMode::Regular,
    };
    FileVersion { content: &file.content, mode }
}

#[cfg(test)]
mod tests {
    use super::*;
    use orchestrate_sandbox::LINK_MODE;

    fn file(path: &str, mode: u32, content: &[u8]) -> FileEntry {
        FileEntry { path: path.to_owned(), mode, content: content.to_vec() }
    }

    #[test]
    fn change_has_written_files_removed_files_and_a_diff() {
        let before = vec![
            file("a.py", 0o644, b"one\ntwo\n"),
            file("gone.py", 0o644, b"x\n"),
            file("image", 0o644, b"\0\x01"),
            file("old", 0o644, b"\0\x01"),
            file("same.py", 0o600, b"s"),
        ];
        let collected = CollectedChange {
            written: vec![
                file("a.py", 0o755, b"one\n2\n"),
                file("image", 0o644, b"text"),
                file("new.py", 0o644, b"n\n"),
                file("same.py", 0o644, b"s"),
            ],
            removed: ["gone.py", "never", "old"].map(str::to_owned).to_vec(),
            has_binary: false,
        };
        let change = compare(before, collected, DiffLimits::default()).unwrap();
        assert_eq!(change.findings, BTreeSet::from([Finding::BinaryLeftOut]));
        let written: Vec<&str> = change.written.iter().map(|f| f.path.as_str()).collect();
        assert_eq!(written, ["a.py", "new.py"]);
        assert_eq!(change.removed, ["gone.py"]);
        let want = "diff --git a/a.py b/a.py\nold mode 100644\nnew mode 100755\n--- a/a.py\n+++ b/a.py\n\
            @@ -1,2 +1,2 @@\n one\n-two\n+2\ndiff --git a/gone.py b/gone.py\ndeleted file mode 100644\n\
            --- a/gone.py\n+++ /dev/null\n@@ -1 +0,0 @@\n-x\ndiff --git a/new.py b/new.py\n\
            new file mode 100644\n--- /dev/null\n+++ b/new.py\n@@ -0,0 +1 @@\n+n\n";
        assert_eq!(change.patch, want);
    }

    #[test]
    fn text_in_any_encoding_and_links_inside_the_tree_are_part_of_a_change() {
        let link = |path: &str, target: &str| file(path, LINK_MODE | 0o777, target.as_bytes());
        let before = vec![
            link("a", "x"),
            file("b", 0o644, b"text\n"),
            link("c", "x"),
            file("d", 0o644, b"text\n"),
            link("kept", "/etc"),
            file("latin", 0o644, b"caf\xe9\n"),
        ];
        let written = vec![
            file("a", 0o644, b"text\n"),
            link("b", "x"),
            link("d", "../x"),
            link("kept", "/etc"),
            file("latin", 0o644, b"th\xe9\n"),
            file("utf-16", 0o644, b"t\0"),
            link("venv", ".venv/bin"),
        ];
        let collected =
            CollectedChange { written, removed: vec!["c".to_owned()], has_binary: false };
        let change = compare(before, collected, DiffLimits::default()).unwrap();
        let written: Vec<&str> = change.written.iter().map(|f| f.path.as_str()).collect();
        assert_eq!(written, ["a", "b", "latin"]);
        assert_eq!(change.removed, ["c"]);
        let findings: Vec<Finding> = change.findings.iter().copied().collect();
        assert_eq!(
            findings,
            [Finding::EnvironmentTouched, Finding::LinkOutside, Finding::BinaryLeftOut]
        );
        let headers = change.patch.lines().filter(|line| line.contains(" mode "));
        let expected = [
            "deleted file mode 120000",
            "new file mode 100644",
            "deleted file mode 100644",
            "new file mode 120000",
            "deleted file mode 120000",
        ];
        assert_eq!(headers.collect::<Vec<_>>(), expected);
        assert!(change.patch.contains("\nGIT binary patch\nliteral 4\n"), "{}", change.patch);
    }

    #[test]
    fn nothing_changed_gives_an_empty_patch() {
        let empty = compare(Vec::new(), CollectedChange::default(), DiffLimits::default());
        assert_eq!(empty, Some(TreeChange::default()));
    }
}
