//! Parses unified diffs.
//!
//! The invariant: the lengths in the `@@` line decide which lines belong to a hunk, so a changed
//! line that looks like a diff header remains a line of its hunk.

use super::{PatchError, PatchErrorKind};
use std::fmt::Write as _;

/// Kind of a line in a hunk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LineKind {
    /// In both files.
    Context,
    /// Only in the new file.
    Added,
    /// Only in the old file.
    Deleted,
}

impl LineKind {
    /// The first character of such a line in a patch.
    pub(crate) fn mark(self) -> char {
        match self {
            Self::Context => ' ',
            Self::Added => '+',
            Self::Deleted => '-',
        }
    }
}

/// One line of a hunk.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HunkLine {
    /// Kind of the line.
    pub kind: LineKind,
    /// The line with its `\n`, which only the last line of a file may lack.
    pub text: String,
}

impl HunkLine {
    pub(crate) fn new(kind: LineKind, text: &str) -> Self {
        Self { kind, text: text.to_owned() }
    }
}

/// Consecutive changes with their context.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Hunk {
    /// First line in the old file, from 1. A hunk without old lines has the line after which it
    /// inserts, which is 0 at the top of the file.
    pub old_start: usize,
    /// First line in the new file, by the same rule.
    pub new_start: usize,
    /// Text after the second `@@`, usually the enclosing function.
    pub section: String,
    /// Lines of the hunk, in order.
    pub lines: Vec<HunkLine>,
}

impl Hunk {
    /// Number of old and of new lines.
    pub fn lengths(&self) -> (usize, usize) {
        let count = |kind| self.lines.iter().filter(|line| line.kind != kind).count();
        (count(LineKind::Added), count(LineKind::Deleted))
    }
}

/// The change of one file. At least one path is present.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FilePatch {
    /// Path in the old tree; `None` for a new file.
    pub old: Option<String>,
    /// Path in the new tree; `None` for a deleted file.
    pub new: Option<String>,
    /// Hunks from top to bottom; empty if an empty file is added or deleted.
    pub hunks: Vec<Hunk>,
}

impl FilePatch {
    /// Path of the file in the new tree, or in the old one if it is deleted.
    pub fn path(&self) -> &str {
        self.new.as_deref().or(self.old.as_deref()).unwrap_or_default()
    }
}

/// Parses a unified diff, with or without git's extended header lines.
///
/// # Errors
/// If a line is not valid in a unified diff, or the patch renames or copies a file or contains a
/// binary file.
pub fn parse(patch: &str) -> Result<Vec<FilePatch>, PatchError> {
    let mut reader = Reader { lines: patch.split_inclusive('\n').collect(), at: 0 };
    let mut files = Vec::new();
    while let Some(line) = reader.peek() {
        if line.starts_with("diff --git ") || line.starts_with("--- ") {
            files.push(reader.file()?);
        } else if files.is_empty() || line.trim().is_empty() {
            // A mail header or a commit message may precede the first file.
            reader.at += 1;
        } else {
            return Err(reader.syntax());
        }
    }
    Ok(files)
}

struct Reader<'a> {
    lines: Vec<&'a str>,
    at: usize,
}

impl<'a> Reader<'a> {
    /// The current line without its line feed.
    fn peek(&self) -> Option<&'a str> {
        self.lines.get(self.at).map(|line| line.strip_suffix('\n').unwrap_or(line))
    }

    fn syntax(&self) -> PatchError {
        let text = self.peek().unwrap_or_default().chars().take(80).collect();
        PatchError::new("-", PatchErrorKind::Syntax { line: self.at + 1, text })
    }

    fn file(&mut self) -> Result<FilePatch, PatchError> {
        let mut path = None;
        let (mut created, mut deleted) = (false, false);
        if let Some(names) = self.peek().and_then(|line| line.strip_prefix("diff --git ")) {
            path = Some(header_path(names).ok_or_else(|| self.syntax())?);
            self.at += 1;
            while let Some(line) = self.peek() {
                let unsupported =
                    |what| Err(PatchError::new("-", PatchErrorKind::Unsupported(what)));
                if line.starts_with("new file mode ") {
                    created = true;
                } else if line.starts_with("deleted file mode ") {
                    deleted = true;
                } else if line.starts_with("rename ") || line.starts_with("copy ") {
                    return unsupported("a rename or copy");
                } else if line.starts_with("Binary files ") || line == "GIT binary patch" {
                    return unsupported("a binary file");
                } else if !["index ", "old mode ", "new mode ", "similarity ", "dissimilarity "]
                    .iter()
                    .any(|known| line.starts_with(known))
                {
                    break;
                }
                self.at += 1;
            }
        }
        let (mut old, mut new) = (path.clone(), path);
        if let Some(name) = self.peek().and_then(|line| line.strip_prefix("--- ")) {
            old = self.file_path(name, "a/")?;
            let Some(name) = self.peek().and_then(|line| line.strip_prefix("+++ ")) else {
                return Err(self.syntax());
            };
            new = self.file_path(name, "b/")?;
            if old.is_none() && new.is_none() {
                return Err(self.syntax());
            }
            if old.is_some() && new.is_some() && old != new {
                return Err(PatchError::new("-", PatchErrorKind::Unsupported("a rename or copy")));
            }
        }
        let mut hunks = Vec::new();
        while self.peek().is_some_and(|line| line.starts_with("@@ ")) {
            hunks.push(self.hunk()?);
        }
        Ok(FilePatch {
            old: if created { None } else { old },
            new: if deleted { None } else { new },
            hunks,
        })
    }

    /// Parses the path of a `---` or `+++` line; `None` for `/dev/null`.
    fn file_path(&mut self, name: &str, prefix: &str) -> Result<Option<String>, PatchError> {
        let path = if name.starts_with('"') {
            unquoted(name).filter(|(_, rest)| rest.trim().is_empty()).map(|(path, _)| path)
        } else {
            name.split('\t').next().map(str::to_owned)
        };
        let path = path.ok_or_else(|| self.syntax())?;
        self.at += 1;
        if path == "/dev/null" {
            return Ok(None);
        }
        Ok(Some(path.strip_prefix(prefix).unwrap_or(&path).to_owned()))
    }

    fn hunk(&mut self) -> Result<Hunk, PatchError> {
        let head = self.peek().and_then(hunk_head).ok_or_else(|| self.syntax())?;
        let (mut hunk, (mut old_left, mut new_left)) = head;
        self.at += 1;
        while old_left > 0 || new_left > 0 {
            let Some(line) = self.lines.get(self.at) else { return Err(self.syntax()) };
            let kind = match line.chars().next() {
                // Some tools strip the space of a blank context line.
                Some(' ' | '\n') => LineKind::Context,
                Some('+') => LineKind::Added,
                Some('-') => LineKind::Deleted,
                Some(_) | None => return Err(self.syntax()),
            };
            let (takes_old, takes_new) = (kind != LineKind::Added, kind != LineKind::Deleted);
            if takes_old && old_left == 0 || takes_new && new_left == 0 {
                return Err(self.syntax());
            }
            old_left -= usize::from(takes_old);
            new_left -= usize::from(takes_new);
            let mut text = line.strip_prefix(kind.mark()).unwrap_or(line).to_owned();
            if !text.ends_with('\n') {
                text.push('\n');
            }
            self.at += 1;
            if self.peek().is_some_and(|next| next.starts_with("\\ ")) {
                text.pop();
                self.at += 1;
            }
            hunk.lines.push(HunkLine { kind, text });
        }
        Ok(hunk)
    }
}

/// Parses `@@ -s[,l] +s[,l] @@[ section]` into a hunk without lines and its old and new lengths.
fn hunk_head(line: &str) -> Option<(Hunk, (usize, usize))> {
    let (ranges, section) = line.strip_prefix("@@ -")?.split_once(" @@")?;
    let (old, new) = ranges.split_once(" +")?;
    let range = |text: &str| -> Option<(usize, usize)> {
        let (start, len) = text.split_once(',').unwrap_or((text, "1"));
        let small = |n: usize| n < usize::MAX / 4;
        let (start, len) = (start.parse().ok().filter(|n| small(*n))?, len.parse().ok()?);
        (small(len)).then_some((start, len))
    };
    let (old, new) = (range(old)?, range(new)?);
    let section = section.strip_prefix(' ').unwrap_or(section).to_owned();
    let hunk = Hunk { old_start: old.0, new_start: new.0, section, lines: Vec::new() };
    Some((hunk, (old.1, new.1)))
}

/// The path in `a/PATH b/PATH`. Both paths are equal, because a rename has lines of its own, so the
/// text can be split in the middle even if the path contains spaces.
pub(super) fn header_path(names: &str) -> Option<String> {
    if names.starts_with('"') {
        return unquoted(names)
            .map(|(path, _)| path.strip_prefix("a/").unwrap_or(&path).to_owned());
    }
    let (head, tail) = names.split_at_checked(names.len() / 2)?;
    let (path, other) = (head.strip_prefix("a/")?, tail.strip_prefix(" b/")?);
    (path == other).then(|| path.to_owned())
}

/// `prefix` and `path`, quoted like git does if the path contains a quote, a backslash or a control
/// character.
pub(super) fn quoted(prefix: &str, path: &str) -> String {
    if !path.chars().any(|c| c == '"' || c == '\\' || c.is_ascii_control()) {
        return format!("{prefix}{path}");
    }
    let mut out = format!("\"{prefix}");
    for c in path.chars() {
        match c {
            '"' | '\\' => out.extend(['\\', c]),
            '\n' => out.push_str("\\n"),
            '\t' => out.push_str("\\t"),
            c if c.is_ascii_control() => {
                let _ = write!(out, "\\{:03o}", u32::from(c));
            }
            c => out.push(c),
        }
    }
    out.push('"');
    out
}

/// Parses a path that git quoted; also returns the text after the closing quote.
fn unquoted(text: &str) -> Option<(String, &str)> {
    let mut bytes = Vec::new();
    let mut chars = text.strip_prefix('"')?.char_indices();
    while let Some((at, c)) = chars.next() {
        let mut utf8 = [0; 4];
        match c {
            '"' => {
                let rest = text.get(at + 2..)?;
                return String::from_utf8(bytes).ok().map(|path| (path, rest));
            }
            '\\' => match chars.next()?.1 {
                'n' => bytes.push(b'\n'),
                't' => bytes.push(b'\t'),
                'r' => bytes.push(b'\r'),
                c @ ('"' | '\\') => bytes.extend(c.encode_utf8(&mut utf8).bytes()),
                c @ '0'..='3' => {
                    let code = [c, chars.next()?.1, chars.next()?.1];
                    let code: String = code.into_iter().collect();
                    bytes.push(u8::from_str_radix(&code, 8).ok()?);
                }
                _ => return None,
            },
            c => bytes.extend(c.encode_utf8(&mut utf8).bytes()),
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_diff_without_git_headers_is_parsed() {
        let files =
            parse("--- a/x.py\t2024-01-01\n+++ b/x.py\n@@ -1 +1 @@ def f():\n-a\n+b\n").unwrap();
        assert_eq!(files[0].path(), "x.py");
        assert_eq!(files[0].hunks[0].section, "def f():");
    }

    #[test]
    fn unsupported_and_malformed_patches_are_refused() {
        for patch in [
            "diff --git a/x b/x\nsimilarity index 90%\nrename from x\nrename to y\n",
            "diff --git a/x b/x\nBinary files a/x and b/x differ\n",
            "--- a/x\n+++ b/y\n@@ -1 +1 @@\n-a\n+b\n",
            "--- a/x\n+++ b/x\n@@ -1,2 +1 @@\n-a\n+b\n",
            "--- a/x\n+++ b/x\n@@ -1 +1 @@\n-a\n+b\njunk\n",
            "--- a/x\n@@ -1 +1 @@\n-a\n+b\n",
        ] {
            assert!(parse(patch).is_err(), "{patch}");
        }
    }
}
