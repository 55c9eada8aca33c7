//! How requests to a chat server differ from the common form.

use crate::request::MessagePrompt;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use std::fmt;
use std::time::Duration;

/// Name of the field that limits the tokens of a reply.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum TokenLimitField {
    /// `max_tokens`, which most servers know.
    #[default]
    MaxTokens,
    /// `max_completion_tokens`, which some servers demand.
    MaxCompletionTokens,
}

impl fmt::Display for TokenLimitField {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::MaxTokens => "max_tokens",
            Self::MaxCompletionTokens => "max_completion_tokens",
        })
    }
}

/// How requests to a chat server differ from the common form, and what a run will send.
#[derive(Debug, Clone, PartialEq)]
pub struct ChatServerOptions {
    /// Name of the field that limits the tokens of a reply.
    pub token_limit_field: TokenLimitField,
    /// Whether `temperature` and `top_p` are sent. A server with fixed sampling refuses them.
    pub send_sampling: bool,
    /// Whether `seed` is sent.
    pub send_seed: bool,
    /// Whether the model's thinking is sent back with its turns.
    pub send_thinking: bool,
    /// Length of the model's context in tokens; `None` if only the server may know it.
    pub context: Option<usize>,
    /// Temperature of the run, for the probe.
    pub temperature: f32,
    /// Nucleus of the run, for the probe.
    pub top_p: f32,
    /// Maximum number of tokens of a reply of the run, for the probe.
    pub max_tokens: usize,
    /// An opening prompt of the run, with its tools, for the probe.
    pub prompt: MessagePrompt,
    /// Time for one reply of the run, for the probe.
    pub deadline: Duration,
}

impl Default for ChatServerOptions {
    fn default() -> Self {
        Self {
            token_limit_field: TokenLimitField::default(),
            send_sampling: true,
            send_seed: true,
            send_thinking: false,
            context: None,
            temperature: 1.0,
            top_p: 1.0,
            max_tokens: 16,
            prompt: MessagePrompt::default(),
            deadline: Duration::from_mins(2),
        }
    }
}

impl ChatServerOptions {
    /// Every other combination of settings, those with the fewest changes first, each with the settings to
    /// change.
    pub(crate) fn alternatives(&self) -> Vec<(Self, String)> {
        let mut all: Vec<(u32, Self, String)> = (1_u32..16)
            .map(|changes| {
                let (mut options, mut names) = (self.clone(), Vec::new());
                if changes & 1 != 0 {
                    options.token_limit_field = match self.token_limit_field {
                        TokenLimitField::MaxTokens => TokenLimitField::MaxCompletionTokens,
                        TokenLimitField::MaxCompletionTokens => TokenLimitField::MaxTokens,
                    };
                    names.push(format!(
                        "engine.token_limit_field = \"{}\"",
                        options.token_limit_field
                    ));
                }
                let flags = [
                    (2, "send_sampling", &mut options.send_sampling),
                    (4, "send_seed", &mut options.send_seed),
                    (8, "send_thinking", &mut options.send_thinking),
                ];
                for (bit, name, flag) in flags {
                    if changes & bit != 0 {
                        *flag = !*flag;
                        names.push(format!("engine.{name} = {flag}"));
                    }
                }
                (changes.count_ones(), options, names.join(", "))
            })
            .collect();
        all.sort_by_key(|(count, ..)| *count);
        all.into_iter().map(|(_, options, names)| (options, names)).collect()
    }
}
