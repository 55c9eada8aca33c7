//! Diffs of untrusted files, within limits of time and size.
//!
//! The invariant: the time and memory for a diff are bounded by [`DiffLimits`], whatever the contents
//! are, and the result is always a valid diff that git accepts, and [`super::apply`] if all files are UTF-8. A file that is too
//! expensive to compare is replaced as a whole.

use super::parse::quoted;
use super::{FilePatch, binary, file_diff_until, range};
use std::fmt::Write as _;
use std::time::{Duration, Instant};

/// Kind of a file, as git knows it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FileMode {
    /// A regular file.
    Regular,
    /// A regular file that its owner may execute.
    Executable,
    /// A symbolic link.
    Link,
}

impl FileMode {
    fn as_git(self) -> &'static str {
        match self {
            Self::Regular => "100644",
            Self::Executable => "100755",
            Self::Link => "120000",
        }
    }
}

/// One side of a change.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FileVersion<'a> {
    /// The whole content; the target of a link.
    pub content: &'a [u8],
    /// Kind of the file.
    pub mode: FileMode,
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
/// Files with equal content and mode do not appear. A file that is not UTF-8 on one side has git's binary
/// form, which [`super::apply`] does not accept. A link is deleted and created.
pub fn bounded_diff<'a>(
    files: impl IntoIterator<Item = FileChange<'a>>,
    limits: DiffLimits,
) -> Option<String> {
    let deadline = Instant::now() + limits.time;
    let mut out = String::new();
    for file in files.into_iter().filter(|file| file.old != file.new).flat_map(parts) {
        write_header(&mut out, &file);
        let contents = [file.old, file.new].map(|version| version.map(|v| v.content));
        if contents[0].unwrap_or_default() != contents[1].unwrap_or_default() {
            match contents.map(|content| std::str::from_utf8(content.unwrap_or_default())) {
                [Ok(old), Ok(new)] => write_text(&mut out, &file, [old, new], limits, deadline)?,
                [_, _] => binary::write_contents(&mut out, contents[0], contents[1]),
            }
        }
        if out.len() > limits.patch_bytes {
            return None;
        }
    }
    Some(out)
}

/// The changes of which git makes this one up: a link is never changed, but deleted and created.
fn parts(file: FileChange<'_>) -> impl Iterator<Item = FileChange<'_>> {
    let is_link = |version: FileVersion<'_>| version.mode == FileMode::Link;
    let is_replaced = file.old.is_some()
        && file.new.is_some()
        && [file.old, file.new].into_iter().flatten().any(is_link);
    let [old, new] = [FileChange { new: None, ..file }, FileChange { old: None, ..file }];
    let parts = if is_replaced { [Some(old), Some(new)] } else { [Some(file), None] };
    parts.into_iter().flatten()
}

/// Writes the hunks for two texts; `None` if they take too much space.
fn write_text(
    out: &mut String,
    file: &FileChange<'_>,
    [old, new]: [&str; 2],
    limits: DiffLimits,
    deadline: Instant,
) -> Option<()> {
    let bytes = old.len() + new.len();
    let is_comparable = bytes <= limits.compared_bytes
        && line_feeds(old) + line_feeds(new) <= limits.compared_lines
        && Instant::now() < deadline;
    if is_comparable {
        let sides = (file.old.map(|_| old), file.new.map(|_| new));
        write_hunks(out, &file_diff_until(file.path, sides.0, sides.1, Some(deadline)));
    } else {
        let room = limits.patch_bytes.saturating_sub(out.len());
        // Every line takes one more byte than in the file.
        if bytes > room || bytes + line_feeds(old) + line_feeds(new) > room {
            return None;
        }
        write_replacement(out, file, old, new);
    }
    Some(())
}

fn line_feeds(text: &str) -> usize {
    text.bytes().filter(|&byte| byte == b'\n').count()
}

fn write_header(out: &mut String, file: &FileChange<'_>) {
    let mode = |version: FileVersion<'_>| version.mode.as_git();
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
    use crate::task_file::TaskFile;
    use proptest::prelude::*;

    fn version(text: &str) -> FileVersion<'_> {
        FileVersion { content: text.as_bytes(), mode: FileMode::Regular }
    }

    fn tree(path: &str, text: Option<&str>) -> Vec<TaskFile> {
        let file = |text: &str| TaskFile { path: path.to_owned(), content: text.to_owned() };
        text.map(file).into_iter().collect()
    }

    #[test]
    fn modes_are_part_of_the_header() {
        let run = |text: &'static str, executable| {
            let mode = if executable { FileMode::Executable } else { FileMode::Regular };
            Some(FileVersion { content: text.as_bytes(), mode })
        };
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

    /// Runs git in a folder, as the grader does.
    fn git(folder: &std::path::Path, args: &[&str]) {
        let git = std::process::Command::new("git").current_dir(folder).args(args).output();
        let output = git.unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    }

    #[test]
    fn git_applies_links_and_contents_that_are_not_utf_8() {
        use std::os::unix::fs::{PermissionsExt, symlink};
        let whole: Vec<u8> = (1..=255).cycle().take(70_000).collect();
        let of = |content: &'static [u8], mode| Some(FileVersion { content, mode });
        let link = |target: &'static str| of(target.as_bytes(), FileMode::Link);
        let file = |content: &'static [u8]| of(content, FileMode::Regular);
        let run = |content: &'static [u8]| of(content, FileMode::Executable);
        let large = FileVersion { content: &whole, mode: FileMode::Regular };
        let changes = [
            ("a to file", link("x"), file(b"text\n")),
            ("b to link", file(b"text\n"), link("a b/c")),
            ("c moved", link("x"), link("y")),
            ("d new", None, link("../x")),
            ("e gone", link("x"), None),
            ("f latin", file(b"caf\xe9\nx\n"), run(b"th\xe9\nx\n")),
            ("g latin", None, file(b"caf\xe9")),
            ("h latin", file(b"caf\xe9"), None),
            ("i decoded", file(b"caf\xe9\r\n"), file(b"cafe\n")),
            ("j large", None, Some(large)),
            ("k/x", file(b"below\n"), None),
            ("k", None, link("a b")),
            ("l", link("k"), None),
            ("l/x", None, file(b"below\n")),
            ("m mode", file(b"caf\xe9"), run(b"caf\xe9")),
        ];
        let folder = tempfile::tempdir().unwrap();
        let tree = folder.path().join("tree");
        let put = |path: &str, version: Option<FileVersion<'_>>| {
            let (place, Some(FileVersion { content, mode })) = (tree.join(path), version) else {
                return;
            };
            std::fs::create_dir_all(place.parent().unwrap()).unwrap();
            if mode == FileMode::Link {
                symlink(std::str::from_utf8(content).unwrap(), place).unwrap();
            } else {
                let bits = if mode == FileMode::Executable { 0o755 } else { 0o644 };
                std::fs::write(&place, content).unwrap();
                std::fs::set_permissions(&place, PermissionsExt::from_mode(bits)).unwrap();
            }
        };
        for (path, old, _) in &changes {
            put(path, *old);
        }
        let files = changes.iter().map(|&(path, old, new)| FileChange { path, old, new });
        let patch = bounded_diff(files, DiffLimits::default()).unwrap();
        std::fs::write(folder.path().join("patch"), &patch).unwrap();
        git(&tree, &["init", "-q", "."]);
        git(&tree, &["apply", "--whitespace=nowarn", "../patch"]);
        for (path, _, new) in &changes {
            let place = tree.join(path);
            let found = std::fs::symlink_metadata(&place).ok().map(|meta| {
                if meta.is_symlink() {
                    let target = std::fs::read_link(&place).unwrap().into_os_string();
                    return (target.into_encoded_bytes(), FileMode::Link);
                }
                let executable = meta.permissions().mode() & 0o100 != 0;
                let mode = if executable { FileMode::Executable } else { FileMode::Regular };
                (std::fs::read(&place).unwrap_or_default(), mode)
            });
            let new = new.map(|version| (version.content.to_vec(), version.mode));
            if !matches!(*path, "k/x" | "l") {
                assert_eq!(found, new, "{path}");
            }
        }
        git(&tree, &["apply", "--whitespace=nowarn", "-R", "../patch"]);
        assert_eq!(std::fs::read(tree.join("f latin")).unwrap(), b"caf\xe9\nx\n");
        assert_eq!(std::fs::read(tree.join("k/x")).unwrap(), b"below\n");
    }

    #[test]
    fn hostile_contents_take_bounded_time_and_space() {
        let limits = DiffLimits::default();
        // Processor time, which other programs do not move.
        let used = || orchestrate_e2e::thread_cpu_time().unwrap();
        let began = used();
        let newlines = "\n".repeat(120 << 20);
        let change =
            FileChange { path: "a", old: Some(version("x\n")), new: Some(version(&newlines)) };
        assert_eq!(bounded_diff([change], limits), None);
        let time = used().saturating_sub(began);
        assert!(time < Duration::from_secs(5), "{time:?}");
        // Lines without any order, which are the worst case of the algorithm.
        let lines = |factor: usize| {
            let numbers = (0..19_000).map(|n| (n * factor % 19_001).to_string());
            numbers.collect::<Vec<_>>().join("\n")
        };
        let (old, new) = (lines(7), lines(12_345));
        let began = used();
        let change = FileChange { path: "a", old: Some(version(&old)), new: Some(version(&new)) };
        let patch = bounded_diff([change], limits).unwrap();
        let time = used().saturating_sub(began);
        assert!(time < limits.time * 3, "{time:?}");
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
