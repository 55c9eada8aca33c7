//! How an episode can end. Complete on purpose: a failed sandbox is never a reward of 0.

use serde::{Deserialize, Serialize};
use std::fmt;
use std::time::Duration;

/// Which limit cut an episode short.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Limit {
    /// `rollout.max_turns` generations were used.
    Turns,
    /// Prompt, responses and observations together reached `rollout.max_sequence_tokens`.
    SequenceTokens,
    /// One response reached `rollout.max_response_tokens` without ending its turn.
    ResponseTokens,
    /// The episode ran for `rollout.episode_timeout`.
    EpisodeTime,
    /// What the agent left behind is more than a grader can be given, or its doing made it
    /// unreadable. It is not graded, and its reward is 0.
    ChangeSize,
}

/// Where in an episode our own machinery failed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Stage {
    /// Starting or resetting the sandbox, uploading the task.
    Setup,
    /// Calling the inference server, or a reply that failed validation.
    Generate,
    /// Running a command in the sandbox.
    Exec,
    /// Reading the agent's tree back.
    Collect,
    /// Running the hidden tests.
    Grade,
    /// Writing the result down.
    Record,
}

/// Who ended an episode before it was done, without a fault.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum AbortCause {
    /// The run is shutting down.
    Shutdown,
    /// The policy that wrote its tokens is older than the staleness limit.
    StalePolicy,
}

/// The end of an episode.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub enum Outcome {
    /// The agent ended by itself and the verifier gave a verdict.
    Scored {
        /// Verifier's reward, 0.0 to 1.0.
        reward: f64,
    },
    /// A limit ended it; what was there was graded all the same.
    Truncated {
        /// Which limit.
        limit: Limit,
        /// Verifier's reward, 0.0 to 1.0.
        reward: f64,
    },
    /// Ended from outside; no verdict, nothing to train on.
    Aborted {
        /// By whom.
        by: AbortCause,
    },
    /// Our fault. Retried, then reported; never given a reward, never trained on.
    Broken {
        /// Where.
        stage: Stage,
        /// What happened, for a person.
        error: String,
    },
}

impl Outcome {
    /// The verifier's reward where there is a trusted one.
    pub fn trusted_reward(&self) -> Option<f64> {
        match self {
            Self::Scored { reward } | Self::Truncated { reward, .. } => Some(*reward),
            Self::Aborted { .. } | Self::Broken { .. } => None,
        }
    }

    /// One word for tables and metrics: `scored`, `truncated`, `aborted` or `broken`.
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

/// What a caller may do about an external error.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Retry {
    /// The same call will fail again.
    Never,
    /// Another try may succeed at once (elsewhere, or on a fresh connection).
    Now,
    /// Another try may succeed after a pause.
    After(Duration),
}
