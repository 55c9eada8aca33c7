//! Scaffolds: the form in which a policy acts, and in which its sandbox answers.
//!
//! The invariants: a mistake of the policy is an observation, never an error of ours; an
//! observation is new text after what was sampled, and never a reason to write that again. Parsing
//! is pure; [`crate::toolbox`] performs the calls.

mod mini;
mod r2e;
mod tools;

use crate::api::{Action, Message, opening_messages};
use crate::toolbox::Done;
use orchestrate_tasks::Task;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::json;
use std::time::Duration;
pub(crate) use tools::call_text;

/// In which form a policy acts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum Scaffold {
    /// Tool calls in the model's own format: `bash`, `edit` and `submit`, any number in a turn.
    #[default]
    Tools,
    /// R2E-Gym's functions in XML, one in a turn: `file_editor`, `execute_bash`, `search`, `finish`.
    R2eXml,
    /// mini-swe-agent's protocol: one bash block in a turn, and a command that submits.
    Mini,
}

/// A call the policy made, with its arguments checked.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Call {
    /// Runs a shell command.
    Bash {
        /// The command line.
        command: String,
    },
    /// Changes or creates a file.
    Edit {
        /// Path as written by the policy.
        path: String,
        /// What to change.
        change: Change,
    },
    /// Uses R2E-Gym's editor.
    Editor {
        /// Path as written by the policy.
        path: String,
        /// What to do there.
        command: EditorCommand,
    },
    /// Looks for a text in a file, or in the Python files of a folder.
    Search {
        /// The text.
        term: String,
        /// Path as written by the policy.
        path: String,
    },
    /// Ends the episode.
    Submit,
}

/// What an `edit` call changes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Change {
    /// The only occurrence of `old` becomes `new`; with an empty `old` the file is created.
    Replace {
        /// Text to find.
        old: String,
        /// Text in its place.
        new: String,
    },
    /// Line number `line` (from 1) becomes `new`.
    Line {
        /// Line number, from 1.
        line: usize,
        /// The line's new text, without its line end.
        new: String,
    },
}

/// A command of R2E-Gym's editor.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum EditorCommand {
    /// Shows a Python file with line numbers, or a folder two levels deep.
    View {
        /// First and last line, from 1; −1 is the last of the file.
        range: Option<(i64, i64)>,
        /// Whether the bodies of functions are left out.
        concise: bool,
    },
    /// Makes a new file.
    Create {
        /// Its content.
        text: String,
    },
    /// Replaces the only occurrence of a text.
    Replace {
        /// Text to find.
        old: String,
        /// Text in its place.
        new: String,
    },
    /// Inserts text after a line.
    Insert {
        /// Line number; 0 is the begin of the file.
        line: i64,
        /// The text, without its last line end.
        text: String,
    },
    /// Takes the last edit of a file back.
    Undo,
}

impl Call {
    /// The call in words that all scaffolds share: `bash`, `view`, `edit`, `search` or `submit`.
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
            Self::Submit => action("submit", json!({})),
        }
    }
}

/// What an observation depends on besides the call and its result.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Terms {
    /// Time for one command.
    pub(crate) command_timeout: Duration,
    /// Characters of one observation.
    pub(crate) observation_chars: usize,
}

/// Words of a run that take the place of a scaffold's own.
#[derive(Debug, Clone, Copy, Default)]
pub struct Prompts<'a> {
    /// Text of the system message.
    pub system: Option<&'a str>,
    /// Text of the task's message, with `{problem_statement}` and `{workdir}`.
    pub task: Option<&'a str>,
}

impl Scaffold {
    /// The opening messages of a task for a policy that has `turns` turns.
    pub fn opening(self, prompts: Prompts<'_>, task: &Task, turns: u32) -> Vec<Message> {
        let (system, words) = match self {
            Self::Tools => (None, "{problem_statement}"),
            Self::R2eXml => (Some(r2e::SYSTEM.trim_end()), r2e::TASK.trim_end()),
            Self::Mini => (Some(mini::SYSTEM.trim_end()), mini::TASK.trim_end()),
        };
        let system = prompts.system.or(system).map(|text| text.replace("{workdir}", &task.workdir));
        // The issue comes last: nothing is looked for in its text.
        let words = prompts.task.unwrap_or(words).replace("{workdir}", &task.workdir);
        let words = words.replacen("{problem_statement}", &task.problem_statement, 1);
        opening_messages(system.as_deref(), &self.framed(words, turns))
    }

    /// The calls of one assistant text, in order: each a parsed action, or the observation that
    /// tells the policy why its text is not one. Never empty; one alone but for [`Self::Tools`].
    /// Calls inside a `<think>` part do not count.
    pub fn parse(self, text: &str) -> Vec<Result<(Action, Call), String>> {
        let text = text.rsplit_once("</think>").map_or(text, |(_, after)| after);
        match self {
            Self::Tools => tools::parse(text),
            Self::R2eXml => vec![r2e::parse(text)],
            Self::Mini => vec![mini::parse(text)],
        }
    }

    /// Role of the messages that hold observations.
    pub fn observation_role(self) -> &'static str {
        match self {
            Self::Tools => "tool",
            Self::R2eXml | Self::Mini => "user",
        }
    }

    /// JSON schemas of the tools, for chat templates that show them; the other scaffolds say in
    /// their prompts what there is.
    pub fn tool_schemas(self) -> Vec<serde_json::Value> {
        match self {
            Self::Tools => tools::schemas(),
            Self::R2eXml | Self::Mini => Vec::new(),
        }
    }

    /// Environment of the policy's commands, besides the image's.
    pub(crate) fn environment(self) -> &'static [(&'static str, &'static str)] {
        match self {
            Self::Tools | Self::R2eXml => &[],
            Self::Mini => &mini::ENVIRONMENT,
        }
    }

    /// What the policy is told about a call that was performed; `None` if it was the last one.
    pub(crate) fn observation(self, call: &Call, done: Done, terms: Terms) -> Option<String> {
        match (self, done) {
            (_, Done::Submitted) => None,
            (Self::Tools, Done::Ran(result)) => {
                let text = tools::bash_observation(&result, terms.command_timeout);
                Some(capped(text, terms.observation_chars))
            }
            (Self::Tools | Self::Mini, Done::Said(text)) => {
                Some(capped(text, terms.observation_chars))
            }
            (Self::R2eXml, done) => Some(r2e::observation(call, done, terms)),
            (Self::Mini, Done::Ran(result)) => mini::observation(&result, terms),
        }
    }

    /// An observation, or the answer to a mistake, as the message that the policy reads.
    pub(crate) fn framed(self, text: String, turns_left: u32) -> String {
        match self {
            Self::Tools | Self::Mini => text,
            Self::R2eXml => r2e::with_turns_left(&text, turns_left),
        }
    }
}

/// `text`, with its middle cut out if it has more than `cap` characters.
pub(crate) fn capped(text: String, cap: usize) -> String {
    let count = text.chars().count();
    if count <= cap {
        return text;
    }
    let (head, tail) = ends(&text, count, cap);
    format!("{head}\n[{} characters cut]\n{tail}", count - cap)
}

/// The first and the last characters of a text of `count`, `cap` together.
fn ends(text: &str, count: usize, cap: usize) -> (String, String) {
    let head = text.chars().take(cap.div_ceil(2)).collect();
    let tail = text.chars().skip(count.saturating_sub(cap / 2)).collect();
    (head, tail)
}

#[cfg(test)]
mod tests;
