//! The parsed commit of a row and the gold patch rebuilt from it.

use crate::patch::{FilePatch, LineKind};
use serde::{Deserialize, Serialize};
use std::fmt::Write as _;

/// A commit as R2E-Gym stores it.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct ParsedCommit {
    /// Changed files.
    pub file_diffs: Vec<FileDiff>,
    /// An expression for the parent, e.g. `HASH^`.
    #[serde(default)]
    pub old_commit_hash: String,
    /// The commit.
    #[serde(default)]
    pub new_commit_hash: String,
    /// Its message.
    #[serde(default)]
    pub commit_message: String,
    /// Its date, ISO 8601.
    #[serde(default)]
    pub commit_date: String,
}

/// The change of one file.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct FileDiff {
    /// Text before; empty for a new file.
    #[serde(default)]
    pub old_file_content: String,
    /// Text after; empty for a deleted file.
    #[serde(default)]
    pub new_file_content: String,
    /// Name and extended header line.
    pub header: Header,
    /// Blob ids.
    #[serde(default)]
    pub index_line: Option<IndexLine>,
    /// Whether git calls it binary.
    #[serde(default)]
    pub is_binary_file: Option<bool>,
    /// git's line about that.
    #[serde(default)]
    pub binary_line: Option<String>,
    /// `a/PATH`, or the null device.
    #[serde(default)]
    pub minus_file: Option<FilePath>,
    /// `b/PATH`, or the null device.
    #[serde(default)]
    pub plus_file: Option<FilePath>,
    /// Changes.
    #[serde(default)]
    pub hunks: Vec<HunkRecord>,
}

/// First lines of a file's diff.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Header {
    /// The file.
    pub file: FilePath,
    /// `new file mode …`, `rename from …` and the like.
    #[serde(default)]
    pub misc_line: Option<String>,
}

/// A path.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct FilePath {
    /// The path.
    pub path: String,
}

/// Blob ids of a file's diff.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct IndexLine {
    /// Before.
    pub old_commit_hash: String,
    /// After.
    pub new_commit_hash: String,
    /// File mode; may be absent or empty.
    #[serde(default)]
    pub mode: Option<String>,
}

/// A hunk.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct HunkRecord {
    /// Its head.
    pub descriptor: Descriptor,
    /// Its lines.
    pub line_group: LineGroup,
}

/// The head of a hunk.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Descriptor {
    /// Lines before.
    pub old_range: LineRange,
    /// Lines after.
    pub new_range: LineRange,
    /// What stands after the second `@@`.
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

/// Lines of a hunk.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct LineGroup {
    /// In order.
    pub all_lines: Vec<LineRecord>,
}

/// One line of a hunk, without its end.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct LineRecord {
    /// Text.
    pub content: String,
    /// Kind.
    #[serde(rename = "type")]
    pub kind: LineRecordKind,
}

/// Kind of a line.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum LineRecordKind {
    /// On both sides.
    Context,
    /// New.
    Added,
    /// Old.
    Deleted,
    /// `No newline at end of file`.
    Note,
}

impl ParsedCommit {
    /// The solution as a unified diff: files that end in `.py` and are not tests.
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
    /// The record of one changed file.
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

    /// Its unified diff, line by line as R2E-Gym rebuilds it.
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
            let mut head = format!("@@ -{} +{} @@", old_range.shown(), new_range.shown());
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

impl LineRange {
    fn shown(self) -> String {
        let length = self.length.map(|length| format!(",{length}")).unwrap_or_default();
        format!("{}{length}", self.start)
    }
}

/// R2E-Gym's rule for what is a test file.
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
    fn tests_are_known_by_name_or_folder() {
        for path in ["a/x_test.py", "test_x.py", "tests/x.py", "a/Test/b/x.py"] {
            assert!(is_test(path), "{path}");
        }
        for path in ["a/testing/x.py", "latest.py", "tests.py", "contest/x.py"] {
            assert!(!is_test(path), "{path}");
        }
    }
}
