//! A policy's calls, their limits and their results: what scaffolds and tools exchange.

use crate::api::Action;
use orchestrate_sandbox::ExecResult;
use serde_json::{Map, Value, json};
use std::time::Duration;

/// Separates a command's stdout from its stderr, for scaffolds that show the streams separately.
pub(crate) const STDERR_MARKER: &str = "\n[orchestrate: stderr]\n";

/// A call of the policy, with its arguments checked.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Call {
    /// Runs a shell command.
    Bash {
        /// The command line.
        command: String,
    },
    /// Changes or creates a file with the `edit` tool.
    Edit {
        /// Path as the policy wrote it.
        path: String,
        /// The change to make.
        change: Change,
    },
    /// Uses R2E-Gym's `file_editor`.
    Editor {
        /// Path as the policy wrote it.
        path: String,
        /// The editor's command.
        command: EditorCommand,
    },
    /// Searches a file, or the Python files of a folder, for a text.
    Search {
        /// The text.
        term: String,
        /// Path as the policy wrote it.
        path: String,
    },
    /// Uses a tool of a tool server.
    Remote {
        /// The name by which the policy calls it.
        tool: String,
        /// The arguments as the policy wrote them, for the server to check.
        arguments: Map<String, Value>,
    },
    /// Ends the episode and hands in the repository.
    Submit,
}

/// The change that an `edit` call makes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Change {
    /// Replaces the only occurrence of `old` with `new`; an empty `old` creates the file.
    Replace {
        /// Text to find.
        old: String,
        /// Text to put in its place.
        new: String,
    },
    /// Replaces one line.
    Line {
        /// Line number, from 1.
        line: usize,
        /// The line's new text, without its line end.
        new: String,
    },
}

/// A command of R2E-Gym's `file_editor`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum EditorCommand {
    /// Shows a Python file with line numbers, or a folder two levels deep.
    View {
        /// First and last line, from 1; −1 stands for the last line of the file.
        range: Option<(i64, i64)>,
        /// Whether to leave out the bodies of functions.
        concise: bool,
    },
    /// Creates a file.
    Create {
        /// The file's content.
        text: String,
    },
    /// Replaces the only occurrence of a text.
    Replace {
        /// Text to find.
        old: String,
        /// Text to put in its place.
        new: String,
    },
    /// Inserts text after a line.
    Insert {
        /// Line number, from 1; 0 inserts at the start of the file.
        line: i64,
        /// The text, without its last line end.
        text: String,
    },
    /// Undoes the last edit of a file.
    Undo,
}

impl Call {
    /// The call in the form that all scaffolds share: `bash`, `view`, `edit`, `search`, `submit` or a
    /// tool of a tool server.
    pub(crate) fn action(&self) -> Action {
        let action = |name: &str, arguments| Action { name: name.to_owned(), arguments };
        match self {
            Self::Bash { command } => action("bash", json!({"command": command})),
            Self::Edit { path, change: Change::Replace { old, new } } => {
                action("edit", json!({"path": path, "old_str": old, "new_str": new}))
            }
            Self::Edit { path, change: Change::Line { line, new } } => {
                action("edit", json!({"path": path, "line": line, "new": new}))
            }
            Self::Editor { path, command } => match command {
                EditorCommand::View { range, concise } => {
                    action("view", json!({"path": path, "view_range": range, "concise": concise}))
                }
                EditorCommand::Create { text } => {
                    action("edit", json!({"path": path, "old_str": "", "new_str": text}))
                }
                EditorCommand::Replace { old, new } => {
                    action("edit", json!({"path": path, "old_str": old, "new_str": new}))
                }
                EditorCommand::Insert { line, text } => {
                    action("edit", json!({"path": path, "insert_line": line, "new_str": text}))
                }
                EditorCommand::Undo => action("edit", json!({"path": path, "undo": true})),
            },
            Self::Search { term, path } => {
                action("search", json!({"search_term": term, "path": path}))
            }
            Self::Remote { tool, arguments } => action(tool, arguments.clone().into()),
            Self::Submit => action("submit", json!({})),
        }
    }
}

/// A mistake of the policy, as the observation that explains it. Never a failure of the
/// infrastructure.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{text}")]
pub struct Mistake {
    /// The observation.
    pub text: String,
    /// Whether the text looks like calls that cannot be read, so that none of the turn is performed.
    pub is_unread: bool,
}

impl Mistake {
    pub(crate) fn new(text: String) -> Self {
        Self { text, is_unread: false }
    }

    /// Of a text that looks like calls, and cannot be read as calls.
    pub(super) fn unread(text: String) -> Self {
        Self { text, is_unread: true }
    }
}

/// Limits of one tool call.
#[derive(Debug, Clone, Copy)]
pub(crate) struct ToolLimits {
    /// Maximum time for one command.
    pub(crate) command_timeout: Duration,
    /// Maximum number of characters of one observation.
    pub(crate) observation_chars: usize,
}

/// The result of a call.
#[derive(Debug)]
pub(crate) enum ToolResult {
    /// A command of the policy ended.
    Command(ExecResult),
    /// A built-in tool returned this text.
    Text(String),
    /// The policy ended the episode.
    Submitted,
}
