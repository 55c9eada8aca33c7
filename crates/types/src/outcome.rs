//! How an episode can end.
//!
//! The invariant: a failure of the infrastructure is [`Outcome::Broken`] and never a reward of 0.

use serde::{Deserialize, Serialize};
use std::fmt;
use std::time::Duration;

/// The limit that truncated an episode.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Limit {
    /// `rollout.max_turns` generations were used.
    Turns,
    /// Prompt, responses and observations together reached `rollout.max_sequence_tokens` tokens.
    SequenceTokens,
    /// One response reached `rollout.max_response_tokens` tokens without ending its turn.
    ResponseTokens,
    /// The episode ran for `rollout.episode_timeout`.
    EpisodeTime,
    /// The agent's change is too large for a grader, or the agent made it unreadable. It is not
    /// graded, and its reward is 0.
    ChangeSize,
    /// The agent's commands, or the tests of its change, made a sandbox unusable. Nothing is graded,
    /// and the reward is 0, so that breaking a sandbox never earns another attempt.
    SandboxDamage,
    /// The external worker reported that the agent failed. Nothing is graded, and the reward is 0.
    AgentFailure,
}

/// The stage of an episode at which the infrastructure failed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Stage {
    /// Starting or resetting the sandbox, uploading the task.
    Setup,
    /// Calling the inference server, or validating its reply.
    Generate,
    /// Running a command in the sandbox.
    Exec,
    /// Collecting the agent's change.
    Collect,
    /// Running the hidden tests.
    Grade,
    /// Recording the result.
    Record,
}

/// Why an episode was ended from outside, without a failure.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum AbortCause {
    /// The run is shutting down.
    Shutdown,
}

/// How an episode ended.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub enum Outcome {
    /// The agent submitted, and its change was graded.
    Scored {
        /// The grader's reward, 0.0 to 1.0.
        reward: f64,
    },
    /// A limit ended the episode; the change until then was graded.
    Truncated {
        /// The limit that was reached.
        limit: Limit,
        /// The grader's reward, 0.0 to 1.0.
        reward: f64,
    },
    /// The episode was ended from outside. There is no verdict and nothing to train on.
    Aborted {
        /// Why it was ended.
        by: AbortCause,
    },
    /// The infrastructure failed. Retried, then reported; never rewarded, never trained on.
    Broken {
        /// The stage that failed.
        stage: Stage,
        /// The error message, for a person.
        error: String,
    },
}

impl Outcome {
    /// The grader's reward; `None` if the episode was not graded.
    pub fn trusted_reward(&self) -> Option<f64> {
        match self {
            Self::Scored { reward } | Self::Truncated { reward, .. } => Some(*reward),
            Self::Aborted { .. } | Self::Broken { .. } => None,
        }
    }

    /// The name for tables and metrics: `scored`, `truncated`, `aborted` or `broken`.
    pub fn name(&self) -> &'static str {
        match self {
            Self::Scored { .. } => "scored",
            Self::Truncated { .. } => "truncated",
            Self::Aborted { .. } => "aborted",
            Self::Broken { .. } => "broken",
        }
    }
}

impl fmt::Display for Stage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Setup => "setup",
            Self::Generate => "generate",
            Self::Exec => "exec",
            Self::Collect => "collect",
            Self::Grade => "grade",
            Self::Record => "record",
        })
    }
}

/// Who caused a refused request or the end of a conversation. It decides the outcome, and it
/// always follows from a typed code: never from an HTTP status or from the text of a message.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Attribution {
    /// The policy's: its turns, tokens or time are used up, or its reply cannot be read. The reward counts.
    Policy,
    /// The environment's, or that of the agent's program: it sent a request that cannot be answered.
    Environment,
    /// Ours: the gateway, an engine or a machine failed.
    Infrastructure,
}

impl Attribution {
    /// The name in tables: `policy`, `environment` or `infrastructure`.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Policy => "policy",
            Self::Environment => "environment",
            Self::Infrastructure => "infrastructure",
        }
    }
}

/// Whether and when retrying a call after an external error may help.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Retry {
    /// The same call would fail again.
    Never,
    /// A retry may succeed at once, elsewhere or on a new connection.
    Now,
    /// A retry may succeed after this pause.
    After(Duration),
}
