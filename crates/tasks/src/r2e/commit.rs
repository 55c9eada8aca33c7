//! The parsed commit of a row and the gold patch rebuilt from it.

use crate::patch::{FilePatch, LineKind};
use serde::{Deserialize, Serialize};
use std::fmt::Write as _;

/// The changes of a commit, in R2E-Gym's format.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct ParsedCommit {
    /// Changed files.
    pub file_diffs: Vec<FileDiff>,
    /// Revision of the parent, e.g. `HASH^`.
    #[serde(default)]
    pub old_commit_hash: String,
    /// Hash of the commit.
    #[serde(default)]
    pub new_commit_hash: String,
    /// Message of the commit.
    #[serde(default)]
    pub commit_message: String,
    /// Date of the commit, in ISO 8601; may be empty.
    #[serde(default)]
    pub commit_date: String,
}

/// The changes of one file.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct FileDiff {
    /// Content before the commit; empty for a new file.
    #[serde(default)]
    pub old_file_content: String,
    /// Content after the commit; empty for a deleted file.
    #[serde(default)]
    pub new_file_content: String,
    /// Path and extended header line.
    pub header: Header,
    /// The `index` line, which names the file's blobs.
    #[serde(default)]
    pub index_line: Option<IndexLine>,
    /// Whether git treats the file as binary.
    #[serde(default)]
    pub is_binary_file: Option<bool>,
    /// The line that git prints for a binary file.
    #[serde(default)]
    pub binary_line: Option<String>,
    /// `a/PATH`, or `/dev/null` for a new file.
    #[serde(default)]
    pub minus_file: Option<FilePath>,
    /// `b/PATH`, or `/dev/null` for a deleted file.
    #[serde(default)]
    pub plus_file: Option<FilePath>,
    /// Hunks from top to bottom.
    #[serde(default)]
    pub hunks: Vec<HunkRecord>,
}

/// The first lines of a file's diff.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Header {
    /// Path of the file.
    pub file: FilePath,
    /// An extended header line, such as `new file mode 100644` or `rename from PATH`.
    #[serde(default)]
    pub misc_line: Option<String>,
}

/// A path, stored as an object.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct FilePath {
    /// Path relative to the repository, in `minus_file` and `plus_file` with its prefix.
    pub path: String,
}

/// The `index` line of a file's diff. Its hashes are those of blobs.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct IndexLine {
    /// Blob before the commit.
    pub old_commit_hash: String,
    /// Blob after the commit.
    pub new_commit_hash: String,
    /// File mode; may be absent or empty.
    #[serde(default)]
    pub mode: Option<String>,
}

/// A hunk, in R2E-Gym's format.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct HunkRecord {
    /// The `@@` line.
    pub descriptor: Descriptor,
    /// The lines of the hunk.
    pub line_group: LineGroup,
}

/// The `@@` line of a hunk.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Descriptor {
    /// Range of the old file.
    pub old_range: LineRange,
    /// Range of the new file.
    pub new_range: LineRange,
    /// Text after the second `@@`, usually the enclosing function.
    #[serde(default)]
    pub section: Option<String>,
}

/// A range of lines.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct LineRange {
    /// First line, from 1.
    pub start: usize,
    /// Number of lines; absent means 1.
    #[serde(default)]
    pub length: Option<usize>,
}

/// The lines of a hunk, stored as an object.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct LineGroup {
    /// All lines, in order.
    pub all_lines: Vec<LineRecord>,
}

/// One line of a hunk, without its line feed.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct LineRecord {
    /// The line without its first character, which `kind` stands for.
    pub content: String,
    /// Kind of the line.
    #[serde(rename = "type")]
    pub kind: LineRecordKind,
}

/// Kind of a line in a hunk.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum LineRecordKind {
    /// In both files.
    Context,
    /// Only in the new file.
    Added,
    /// Only in the old file.
    Deleted,
    /// The note `No newline at end of file`.
    Note,
}

impl ParsedCommit {
    /// The gold patch as a unified diff: the changes of files that end in `.py` and are not tests.
    pub fn gold_patch(&self) -> String {
        let is_gold = |path: &str| path.strip_suffix(".py").is_some() && !is_test(path);
        self.file_diffs
            .iter()
            .filter(|file| is_gold(&file.header.file.path))
            .map(FileDiff::patch)
            .collect()
    }
}

impl FileDiff {
    /// Converts `patch`, which turns `old` into `new`, to R2E-Gym's format.
    pub(crate) fn of(patch: &FilePatch, old: &str, new: &str) -> Self {
        let side = |prefix: &str, path: &Option<String>| {
            let path = path
                .as_ref()
                .map_or_else(|| "/dev/null".to_owned(), |path| format!("{prefix}{path}"));
            Some(FilePath { path })
        };
        let hunks = patch.hunks.iter().map(|hunk| {
            let (old_len, new_len) = hunk.lengths();
            let range = |start, len| LineRange { start, length: (len != 1).then_some(len) };
            let mut all_lines = Vec::new();
            for line in &hunk.lines {
                let kind = match line.kind {
                    LineKind::Context => LineRecordKind::Context,
                    LineKind::Added => LineRecordKind::Added,
                    LineKind::Deleted => LineRecordKind::Deleted,
                };
                let whole = line.text.strip_suffix('\n');
                all_lines
                    .push(LineRecord { content: whole.unwrap_or(&line.text).to_owned(), kind });
                if whole.is_none() {
                    let content = "No newline at end of file".to_owned();
                    all_lines.push(LineRecord { content, kind: LineRecordKind::Note });
                }
            }
            HunkRecord {
                descriptor: Descriptor {
                    old_range: range(hunk.old_start, old_len),
                    new_range: range(hunk.new_start, new_len),
                    section: Some(hunk.section.clone()),
                },
                line_group: LineGroup { all_lines },
            }
        });
        Self {
            old_file_content: old.to_owned(),
            new_file_content: new.to_owned(),
            header: Header { file: FilePath { path: patch.path().to_owned() }, misc_line: None },
            index_line: None,
            is_binary_file: Some(false),
            binary_line: None,
            minus_file: side("a/", &patch.old),
            plus_file: side("b/", &patch.new),
            hunks: hunks.collect(),
        }
    }

    /// The file's unified diff, exactly as R2E-Gym rebuilds it.
    pub fn patch(&self) -> String {
        let path = &self.header.file.path;
        let mut out = format!("diff --git a/{path} b/{path}\n");
        let mut line = |text: &str| {
            out.push_str(text);
            out.push('\n');
        };
        if let Some(misc) = self.header.misc_line.as_deref().filter(|misc| !misc.is_empty()) {
            line(misc);
        }
        if let Some(index) = &self.index_line {
            let mode = index.mode.as_deref().filter(|mode| !mode.is_empty());
            let mode = mode.map(|mode| format!(" {mode}")).unwrap_or_default();
            line(&format!("index {}..{}{mode}", index.old_commit_hash, index.new_commit_hash));
        }
        if let (Some(true), Some(binary)) = (self.is_binary_file, &self.binary_line) {
            line(binary);
        }
        if let (Some(minus), Some(plus)) = (&self.minus_file, &self.plus_file) {
            line(&format!("--- {}", minus.path));
            line(&format!("+++ {}", plus.path));
        }
        for hunk in &self.hunks {
            let Descriptor { old_range, new_range, section } = &hunk.descriptor;
            let mut head = format!("@@ -{old_range} +{new_range} @@");
            if let Some(section) = section.as_deref().filter(|section| !section.is_empty()) {
                let _ = write!(head, " {section}");
            }
            line(&head);
            for record in &hunk.line_group.all_lines {
                let mark = match record.kind {
                    LineRecordKind::Context => " ",
                    LineRecordKind::Added => "+",
                    LineRecordKind::Deleted => "-",
                    LineRecordKind::Note => "\\ ",
                };
                line(&format!("{mark}{}", record.content));
            }
        }
        out
    }
}

impl std::fmt::Display for LineRange {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}", self.start)?;
        self.length.map_or(Ok(()), |length| write!(f, ",{length}"))
    }
}

/// Whether `path` is a test file by R2E-Gym's rule.
fn is_test(path: &str) -> bool {
    let (folders, name) = path.rsplit_once('/').unwrap_or(("", path));
    name.ends_with("_test.py")
        || name.starts_with("test_")
        || folders.split('/').any(|folder| matches!(folder, "tests" | "Tests" | "test" | "Test"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn test_files_are_recognised_by_name_or_folder() {
        for path in ["a/x_test.py", "test_x.py", "tests/x.py", "a/Test/b/x.py"] {
            assert!(is_test(path), "{path}");
        }
        for path in ["a/testing/x.py", "latest.py", "tests.py", "contest/x.py"] {
            assert!(!is_test(path), "{path}");
        }
    }
}
