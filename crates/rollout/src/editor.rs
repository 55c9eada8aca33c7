//! R2E-Gym's `file_editor` without I/O: a file's text and a command give the new text and the
//! observation.
//!
//! The invariant: the only state is the bounded memory of earlier texts, for `undo_edit`.
//! [`crate::toolbox`] reads and writes the files.

use crate::scaffold::{EditorCommand, Mistake};
use std::collections::VecDeque;
use tree_sitter::{Node, Parser};

/// Bytes of earlier texts that one episode keeps for `undo_edit`; the oldest are dropped first.
const HISTORY_BYTES: usize = 8 << 20;

/// Lines of context that the observation of an edit shows before and after it.
const SNIPPET_LINES: usize = 4;

/// Longer files, in lines, are viewed without the bodies of functions.
const MAX_WHOLE_LINES: usize = 110;

/// Maximum number of characters of one observation; the rest is clipped.
const CLIP_CHARS: usize = 10_000;

const CLIPPED_NOTE: &str = "<response clipped><NOTE>Only a part of this file has been shown. Look for line numbers with \
     `grep -n`, then view the lines that matter.</NOTE>";

/// The editor of one episode, with the texts that files had before they were edited.
#[derive(Debug, Default)]
pub(crate) struct Editor {
    /// File and earlier text, oldest first.
    earlier: VecDeque<(String, String)>,
}

/// A file after an edit.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Edited {
    /// The file's new text.
    pub(crate) text: String,
    /// The observation of the policy.
    pub(crate) observation: String,
}

impl Editor {
    /// Applies a command to a file's text. `content` is `None` if the file does not exist; `key`
    /// identifies the file and `path` is what the policy wrote.
    pub(crate) fn edit(
        &mut self,
        key: &str,
        path: &str,
        content: Option<&str>,
        command: &EditorCommand,
    ) -> Result<Edited, Mistake> {
        if let EditorCommand::Create { text } = command {
            if content.is_some() {
                return Err(Mistake::new(format!(
                    "File already exists at: {path}. Cannot overwrite with 'create'."
                )));
            }
            self.keep_earlier(key, String::new());
            let shown = numbered(text, path, 1);
            let observation =
                format!("File created at {path}. {shown}Review it, and edit it if needed.");
            return Ok(Edited { text: text.clone(), observation });
        }
        let content =
            content.ok_or_else(|| Mistake::new(format!("The path '{path}' does not exist.")))?;
        let (text, snippet, first) = match command {
            EditorCommand::Replace { old, new } => replace(content, path, old, new)?,
            EditorCommand::Insert { line, text } => insert(content, *line, text)?,
            EditorCommand::Undo => {
                let text = self.take_earlier(key).ok_or_else(|| {
                    Mistake::new(format!("No previous edits found for {path} to undo."))
                })?;
                let observation =
                    format!("Last edit to {path} undone. {}", numbered(&text, path, 1));
                return Ok(Edited { text, observation });
            }
            EditorCommand::View { .. } | EditorCommand::Create { .. } => {
                return Err(Mistake::new("not an edit of a file".to_owned()));
            }
        };
        self.keep_earlier(key, content.to_owned());
        let shown = numbered(&snippet, &format!("a snippet of {path}"), first);
        let observation = format!(
            "The file {path} has been edited. {shown}Review the change, and edit again if needed."
        );
        Ok(Edited { text, observation })
    }

    fn keep_earlier(&mut self, key: &str, text: String) {
        self.earlier.push_back((key.to_owned(), text));
        while self.earlier.iter().map(|(key, text)| key.len() + text.len()).sum::<usize>()
            > HISTORY_BYTES
        {
            self.earlier.pop_front();
        }
    }

    fn take_earlier(&mut self, key: &str) -> Option<String> {
        let newest = self.earlier.iter().rposition(|(of, _)| of == key)?;
        self.earlier.remove(newest).map(|(_, text)| text)
    }
}

/// The text after a replacement, the lines around it, and the number of the first of those.
fn replace(
    content: &str,
    path: &str,
    old: &str,
    new: &str,
) -> Result<(String, String, usize), Mistake> {
    // An empty text would be found everywhere.
    let count = if old.is_empty() { 0 } else { content.matches(old).count() };
    match (count, content.split_once(old)) {
        (1, Some((before, after))) => {
            let text = format!("{before}{new}{after}");
            let line = before.matches('\n').count();
            let first = line.saturating_sub(SNIPPET_LINES);
            let last = line + SNIPPET_LINES + new.matches('\n').count();
            let snippet = lines_between(&text, first, last + 1);
            Ok((text, snippet, first + 1))
        }
        (0 | 1, _) => {
            Err(Mistake::new(format!("No occurrences of '{old}' found in {path} for replacement.")))
        }
        (_, _) => Err(Mistake::new(format!(
            "Multiple occurrences of '{old}' found in {path}. Make it unique before using \
             str_replace."
        ))),
    }
}

/// The text after an insertion, the lines around it, and the number of the first of those.
fn insert(content: &str, line: i64, new: &str) -> Result<(String, String, usize), Mistake> {
    let lines: Vec<&str> = content.split('\n').collect();
    let at = usize::try_from(line).ok().filter(|at| *at <= lines.len()).ok_or_else(|| {
        Mistake::new(format!("Invalid insert_line {line}. Must be in [0, {}].", lines.len()))
    })?;
    let (before, after) = lines.split_at(at);
    let text = [before, &[new], after].concat().join("\n");
    let first = at.saturating_sub(SNIPPET_LINES);
    let snippet = lines_between(&text, first, at + new.matches('\n').count() + 1 + SNIPPET_LINES);
    Ok((text, snippet, first + 1))
}

fn lines_between(text: &str, first: usize, end: usize) -> String {
    let lines = text.split('\n').skip(first).take(end.saturating_sub(first));
    lines.collect::<Vec<_>>().join("\n")
}

/// Text as `cat -n` shows it, tabs expanded.
fn numbered(text: &str, what: &str, first: usize) -> String {
    let text = clip(text.to_owned());
    let lines = text.split('\n').enumerate();
    let lines: Vec<String> = lines
        .map(|(index, line)| format!("{:6}\t{}\n", index + first, expand_tabs(line)))
        .collect();
    format!("Here's the result of running `cat -n` on {what}:\n{}", lines.concat())
}

/// A line with each tab replaced by spaces up to the next multiple of 8 columns.
fn expand_tabs(line: &str) -> String {
    let mut text = String::with_capacity(line.len());
    let mut column = 0;
    for character in line.chars() {
        if character == '\t' {
            let width = 8 - column % 8;
            text.extend(std::iter::repeat_n(' ', width));
            column += width;
        } else {
            text.push(character);
            column += 1;
        }
    }
    text
}

/// The start of a text with a note, if it is too long for one observation.
pub(crate) fn clip(mut text: String) -> String {
    if let Some((end, _)) = text.char_indices().nth(CLIP_CHARS) {
        text.truncate(end);
        text.push_str(CLIPPED_NOTE);
    }
    text
}

/// Only Python files are shown: the mistake if `path` is another file.
pub(crate) fn check_viewable(path: &str) -> Result<(), Mistake> {
    let name = path.rsplit('/').next().unwrap_or(path);
    let is_python = name.strip_suffix(".py").is_some_and(|stem| !stem.is_empty());
    if is_python {
        return Ok(());
    }
    Err(Mistake::new(format!(
        "Only Python files can be viewed, to save context. '{name}' is not a .py file."
    )))
}

/// A Python file with line numbers, or the mistake in the range. Takes milliseconds for a large
/// file, because it parses the text to find the bodies of functions.
pub(crate) fn view(
    path: &str,
    content: &str,
    range: Option<(i64, i64)>,
    concise: bool,
) -> Result<String, Mistake> {
    let concise = concise || (range.is_none() && content.lines().count() > MAX_WHOLE_LINES);
    let folded = if concise { foldable_lines(content) } else { Vec::new() };
    let mut lines: Vec<(usize, String)> = Vec::new();
    for (index, line) in content.lines().enumerate() {
        match folded.iter().find(|(first, last)| (*first..=*last).contains(&index)) {
            Some((first, last)) if *first == index => {
                lines.push((index, format!("... eliding lines {}-{} ...", first + 1, last + 1)));
            }
            Some(_) => {}
            None => lines.push((index, line.to_owned())),
        }
    }
    if let Some((first, last)) = range {
        let total = i64::try_from(lines.len()).unwrap_or(i64::MAX);
        if !(1..=total).contains(&first) {
            return Err(Mistake::new(format!(
                "Invalid view_range [{first}, {last}]: start line must be in [1, {total}]"
            )));
        }
        if last != -1 && !(first..=total).contains(&last) {
            return Err(Mistake::new(format!(
                "Invalid view_range [{first}, {last}]: end must be >= start and <= {total}, or -1 \
                 to view until end."
            )));
        }
        lines.retain(|(index, _)| {
            let number = i64::try_from(index + 1).unwrap_or(i64::MAX);
            number >= first && (last == -1 || number <= last)
        });
    }
    let mut shown = if concise {
        format!(
            "Here is a condensed view for file: {path}; [Note: bodies of functions are left out. \
             Use view_range to see them.]\n"
        )
    } else {
        format!("Here's the result of running `cat -n` on the file: {path}:\n")
    };
    let lines: Vec<String> =
        lines.into_iter().map(|(index, line)| format!("{:6} {line}", index + 1)).collect();
    shown.push_str(&lines.join("\n"));
    Ok(clip(shown))
}

/// First and last line (from 0) of the parts that a condensed view leaves out: function bodies of
/// at least four lines and the inside of long class docstrings. Empty if the text is not valid
/// Python.
fn foldable_lines(content: &str) -> Vec<(usize, usize)> {
    let mut parser = Parser::new();
    if parser.set_language(&tree_sitter_python::LANGUAGE.into()).is_err() {
        return Vec::new();
    }
    let Some(tree) = parser.parse(content, None) else { return Vec::new() };
    if tree.root_node().has_error() {
        return Vec::new();
    }
    let mut found = Vec::new();
    // Not recursive, because a policy may write code of any depth.
    let mut pending = vec![tree.root_node()];
    while let Some(node) = pending.pop() {
        let body = node.child_by_field_name("body");
        if node.kind() == "function_definition"
            && let Some((first, last)) = body.map(line_range)
            && last - first >= 3
        {
            found.push((first, last));
            continue;
        }
        if node.kind() == "class_definition"
            && let Some(docstring) = body.and_then(docstring)
            && let (first, last) = line_range(docstring)
            && last - first >= 4
        {
            found.push((first + 1, last - 1));
        }
        let mut cursor = node.walk();
        pending.extend(node.named_children(&mut cursor));
    }
    found
}

fn line_range(node: Node<'_>) -> (usize, usize) {
    (node.start_position().row, node.end_position().row)
}

fn docstring(body: Node<'_>) -> Option<Node<'_>> {
    let first = body.named_child(0)?;
    let text = first.named_child(0).filter(|_| first.kind() == "expression_statement")?;
    (text.kind() == "string").then_some(text)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn replace_command(old: &str, new: &str) -> EditorCommand {
        EditorCommand::Replace { old: old.to_owned(), new: new.to_owned() }
    }

    #[test]
    fn edits_show_their_surroundings_and_can_be_undone() {
        let mut editor = Editor::default();
        let create = EditorCommand::Create { text: "a\n\tb".to_owned() };
        let created = editor.edit("x.py", "/t/x.py", None, &create).unwrap();
        assert_eq!(
            created.observation,
            "File created at /t/x.py. Here's the result of running `cat -n` on /t/x.py:\n     1\ta\n     \
             2\t        b\nReview it, and edit it if needed."
        );
        assert!(
            editor
                .edit("x.py", "x.py", Some(""), &create)
                .unwrap_err()
                .text
                .contains("already exists")
        );
        let before = "1\n2\n3\n4\n5\n6\n7\n8\n9\n10\n11\n12\n";
        let edited =
            editor.edit("x.py", "x.py", Some(before), &replace_command("7", "seven\n7b")).unwrap();
        assert_eq!(edited.text, before.replace("\n7\n", "\nseven\n7b\n"));
        assert!(
            edited.observation.contains("a snippet of x.py:\n     3\t3\n"),
            "{}",
            edited.observation
        );
        assert!(edited.observation.contains("\n    12\t11\nReview"), "{}", edited.observation);
        let undone = editor.edit("x.py", "x.py", Some(&edited.text), &EditorCommand::Undo).unwrap();
        assert_eq!(undone.text, before);
        let first = editor.edit("x.py", "x.py", Some(before), &EditorCommand::Undo).unwrap();
        assert_eq!(first.text, "", "undoing a creation leaves an empty file");
        let error = editor.edit("x.py", "x.py", Some(""), &EditorCommand::Undo).unwrap_err();
        assert_eq!(error.text, "No previous edits found for x.py to undo.");
    }

    #[test]
    fn text_is_replaced_only_if_found_exactly_once() {
        let mut editor = Editor::default();
        let mut error = |old: &str, content| {
            editor.edit("x", "x", content, &replace_command(old, "")).unwrap_err().text
        };
        assert!(error("b", Some("a")).starts_with("No occurrences of 'b' found in x"));
        assert!(error("", Some("a")).starts_with("No occurrences"));
        assert!(error("a", Some("a a")).starts_with("Multiple occurrences of 'a' found in x"));
        assert_eq!(error("a", None), "The path 'x' does not exist.");
    }

    #[test]
    fn text_is_inserted_after_the_given_line() {
        let mut editor = Editor::default();
        let mut insert = |line, content: &str| {
            let command = EditorCommand::Insert { line, text: "X\nY".to_owned() };
            editor.edit("x", "x", Some(content), &command).map(|edited| edited.text)
        };
        assert_eq!(insert(0, "a\nb\n").unwrap(), "X\nY\na\nb\n");
        assert_eq!(insert(1, "a\nb\n").unwrap(), "a\nX\nY\nb\n");
        assert_eq!(insert(3, "a\nb\n").unwrap(), "a\nb\n\nX\nY");
        for line in [-1, 4, i64::MAX] {
            assert!(
                insert(line, "a\nb\n").unwrap_err().text.ends_with("Must be in [0, 3]."),
                "{line}"
            );
        }
    }

    #[test]
    fn memory_for_undo_is_bounded() {
        let mut editor = Editor::default();
        let large = "x".repeat(1 << 20);
        for _ in 0..20 {
            let insert = EditorCommand::Insert { line: 0, text: "y".to_owned() };
            editor.edit("x", "x", Some(&large), &insert).unwrap();
        }
        assert!(editor.earlier.len() < 8 && !editor.earlier.is_empty());
    }

    #[test]
    fn long_files_are_viewed_without_function_bodies() {
        let body = "    a = 1\n    b = 2\n    c = 3\n    return a\n";
        let short = "def short():\n    return 1\n";
        let class = "class C:\n    \"\"\"One.\n\n    Two.\n\n    \"\"\"\n";
        let text = format!("import x\n\n\ndef long():\n{body}\n\n{short}\n\n{class}");
        let shown = view("x.py", &text, None, true).unwrap();
        assert!(
            shown.contains("     4 def long():\n     5 ... eliding lines 5-8 ...\n     9 \n"),
            "{shown}"
        );
        assert!(shown.contains("    12     return 1"), "{shown}");
        assert!(
            shown.contains("    \"\"\"One.\n    17 ... eliding lines 17-19 ...\n    20     \"\"\""),
            "{shown}"
        );
        assert!(view("x.py", &text, None, false).unwrap().contains("     5     a = 1"));
        let padded = format!("{text}{}", "x = 1\n".repeat(100));
        assert!(view("x.py", &padded, None, false).unwrap().contains("eliding lines 5-8"));
        let lines = view("x.py", &padded, Some((5, 6)), false).unwrap();
        assert!(lines.ends_with("file: x.py:\n     5     a = 1\n     6     b = 2"), "{lines}");
        assert!(view("x.py", &padded, Some((119, -1)), false).unwrap().lines().count() > 1);
        for range in [(0, 1), (900, -1), (5, 4), (5, 900), (-3, -1)] {
            assert!(view("x.py", &padded, Some(range), false).is_err(), "{range:?}");
        }
        let broken = format!("def (:\n{padded}");
        assert!(!view("x.py", &broken, None, false).unwrap().contains("eliding"));
        assert!(view("x.py", &"x".repeat(20_000), None, false).unwrap().ends_with(CLIPPED_NOTE));
    }

    #[test]
    fn only_python_files_are_viewed() {
        assert_eq!(check_viewable("/t/a.b/x.py"), Ok(()));
        for path in ["x.txt", "x.py/y", ".py", "x", ""] {
            assert!(check_viewable(path).is_err(), "{path}");
        }
    }
}
