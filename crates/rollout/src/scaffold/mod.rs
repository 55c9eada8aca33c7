//! Scaffolds: how a policy's text becomes tool calls, and how their results become messages.
//!
//! A [`Scaffold`] defines one convention between policy and environment: the opening messages, the
//! syntax of calls, and the text of observations. [`Scaffold::parse`] reads the calls of a turn,
//! `crate::toolbox` performs them in the sandbox, and [`Scaffold`] turns each result into the
//! observation that the policy reads. `tools`, `r2e` and `mini` each implement one convention;
//! episodes look the same to the rest of the program.
//!
//! The invariant: parsing is pure, and a mistake of the policy is always an observation
//! ([`Mistake`]) that follows what was sampled, never an error of the episode.

mod call;
mod mini;
mod r2e;
mod tools;
mod truncate;

use crate::api::{Action, Message, opening_messages};
use crate::reply::split_thinking;
use crate::tool_format::ToolFormat;
pub use call::{Call, Change, EditorCommand, Mistake};
pub(crate) use call::{STDERR_MARKER, ToolLimits, ToolResult};
use orchestrate_engine::ToolCall;
use orchestrate_tasks::Task;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
pub(crate) use tools::call_text;
pub(crate) use truncate::truncate_middle;

/// The convention by which a policy acts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum Scaffold {
    /// Tool calls in the model's own format: `bash`, `edit` and `submit`, any number per turn.
    #[default]
    Tools,
    /// R2E-Gym's functions in XML, one per turn: `file_editor`, `execute_bash`, `search`, `finish`.
    R2eXml,
    /// mini-swe-agent's protocol: one bash block per turn, and a command that submits.
    Mini,
    /// An agent with its own loop, which runs in the sandbox and samples through the gateway: see the
    /// section `[agent]`.
    Command,
    /// An external agent or environment: a worker takes the episode from the gateway and returns the
    /// reward. See the section `[gateway]`.
    External,
}

/// Prompts of a run that replace those of its scaffold.
#[derive(Debug, Clone, Copy, Default)]
pub struct Prompts<'a> {
    /// Text of the system message.
    pub system: Option<&'a str>,
    /// Text of the task's message, with `{problem_statement}` and `{workdir}`.
    pub task: Option<&'a str>,
}

/// A turn as the policy wrote it.
#[derive(Debug, Clone, Copy)]
pub struct WrittenTurn<'a> {
    /// Its thinking, its text, and the calls in the text.
    pub text: &'a str,
    /// Whether the prompt opened the thinking.
    pub opens_thinking: bool,
    /// The format of the calls in the text.
    pub format: ToolFormat,
    /// Calls that a chat server separated from the text; they come after those in the text.
    pub separate: &'a [ToolCall],
}

impl<'a> WrittenTurn<'a> {
    /// A turn in text alone, after a prompt that opened no thinking.
    pub fn new(format: ToolFormat, text: &'a str) -> Self {
        Self { text, opens_thinking: false, format, separate: &[] }
    }
}

impl Scaffold {
    /// The opening messages of a task, for a policy that has `turns` turns.
    pub fn opening(self, prompts: Prompts<'_>, task: &Task, turns: u32) -> Vec<Message> {
        let (system, prompt) = match self {
            Self::Tools | Self::Command | Self::External => (None, "{problem_statement}"),
            Self::R2eXml => (Some(r2e::SYSTEM.trim_end()), r2e::TASK.trim_end()),
            Self::Mini => (Some(mini::SYSTEM.trim_end()), mini::TASK.trim_end()),
        };
        let system = prompts.system.or(system).map(|text| text.replace("{workdir}", &task.workdir));
        // The issue is inserted last, so that nothing in its text is replaced.
        let prompt = prompts.task.unwrap_or(prompt).replace("{workdir}", &task.workdir);
        let prompt = prompt.replace("{problem_statement}", &task.problem_statement);
        opening_messages(system.as_deref(), &self.message_text(prompt, turns))
    }

    /// The calls of one turn, in order: each a parsed call, or the mistake in it. `server_tools` are
    /// the JSON schemas of the tools of tool servers; only [`Self::Tools`], [`Self::Command`] and
    /// [`Self::External`] use them.
    ///
    /// Never empty, because a text without a call is a mistake; more than one only for
    /// [`Self::Tools`]. Calls inside the thinking do not count. Where the text of one call cannot be read,
    /// no call of the turn is performed.
    pub fn parse(
        self,
        turn: WrittenTurn<'_>,
        server_tools: &[serde_json::Value],
    ) -> Vec<Result<(Action, Call), Mistake>> {
        let (_, text) = split_thinking(turn.opens_thinking, turn.text);
        match self {
            Self::Tools | Self::Command | Self::External => {
                tools::parse(turn.format, &text, turn.separate, server_tools)
            }
            Self::R2eXml => vec![r2e::parse(&text)],
            Self::Mini => vec![mini::parse(&text)],
        }
    }

    /// Its name in the configuration.
    pub fn name(self) -> &'static str {
        match self {
            Self::Tools => "tools",
            Self::R2eXml => "r2e-xml",
            Self::Mini => "mini",
            Self::Command => "command",
            Self::External => "external",
        }
    }

    /// Whether this program performs the policy's calls, and not an agent with its own loop.
    pub fn performs_calls(self) -> bool {
        match self {
            Self::Tools | Self::R2eXml | Self::Mini => true,
            Self::Command | Self::External => false,
        }
    }

    /// Role of the messages that carry observations.
    pub fn observation_role(self) -> &'static str {
        match self {
            Self::Tools | Self::Command | Self::External => "tool",
            Self::R2eXml | Self::Mini => "user",
        }
    }

    /// JSON schemas of the tools, for chat templates that show them. Empty for scaffolds whose
    /// prompts describe the tools.
    pub fn tool_schemas(self) -> Vec<serde_json::Value> {
        match self {
            Self::Tools => tools::schemas(),
            // An agent sends its own tools with its requests.
            Self::R2eXml | Self::Mini | Self::Command | Self::External => Vec::new(),
        }
    }

    /// Environment variables of the policy's commands, in addition to the image's.
    pub(crate) fn environment(self) -> &'static [(&'static str, &'static str)] {
        match self {
            Self::Tools | Self::R2eXml | Self::Command | Self::External => &[],
            Self::Mini => &mini::ENVIRONMENT,
        }
    }

    /// The observation of a performed call; `None` if the call submitted.
    pub(crate) fn observation(
        self,
        call: &Call,
        result: ToolResult,
        limits: ToolLimits,
    ) -> Option<String> {
        match (self, result) {
            (_, ToolResult::Submitted) => None,
            (Self::Tools | Self::Command | Self::External, ToolResult::Command(result)) => {
                let text = tools::bash_observation(&result, limits.command_timeout);
                Some(truncate_middle(text, limits.observation_chars))
            }
            (Self::Tools | Self::Mini | Self::Command | Self::External, ToolResult::Text(text)) => {
                Some(truncate_middle(text, limits.observation_chars))
            }
            (Self::R2eXml, result) => Some(r2e::observation(call, result, limits)),
            (Self::Mini, ToolResult::Command(result)) => mini::observation(&result, limits),
        }
    }

    /// The text of the message for an observation or a prompt, with what the scaffold adds to it.
    pub(crate) fn message_text(self, text: String, turns_left: u32) -> String {
        match self {
            Self::Tools | Self::Mini | Self::Command | Self::External => text,
            Self::R2eXml => r2e::with_turns_left(&text, turns_left),
        }
    }
}

#[cfg(test)]
mod tests;
