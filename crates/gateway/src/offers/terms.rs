//! What an attempt offers, and how an offer ends.

use crate::sampler::Sampler;
use orchestrate_types::AttemptId;
use serde_json::Value;
use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

/// Begins an episode: the sampler that answers its requests.
pub(super) type Begin = Box<dyn FnOnce() -> Arc<dyn Sampler> + Send>;

/// An attempt as it is offered to workers.
pub struct Terms {
    /// The attempt.
    pub attempt: AttemptId,
    /// What the worker gets to see of its task: a JSON object.
    pub task: Value,
    /// Time from the moment at which it is taken to its return.
    pub time: Duration,
    /// Called when a worker takes it; answers its requests from then on.
    pub begin: Begin,
}

impl fmt::Debug for Terms {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.debug_struct("Terms").field("attempt", &self.attempt).finish_non_exhaustive()
    }
}

/// Whose doing a failure is, as the worker sees it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FailureKind {
    /// The environment's: the attempt is void and repeated.
    Environment,
    /// The policy's: what it did made it impossible to continue the episode.
    Agent,
    /// The episode took longer than its environment allows.
    TimeOut,
}

/// How an offer ended.
#[derive(Debug, Clone, PartialEq)]
pub enum OfferEnd {
    /// The worker returned a reward.
    Returned {
        /// From 0 to 1.
        reward: f64,
        /// Further numbers by name, all finite.
        metrics: BTreeMap<String, f64>,
    },
    /// The worker reported a failure.
    Failed {
        /// Whose doing it is.
        kind: FailureKind,
        /// What failed, for a person.
        message: String,
    },
    /// The worker gave the episode back.
    Abandoned {
        /// Name of the worker.
        worker: String,
    },
    /// The worker's heartbeats stopped.
    Lost {
        /// Name of the worker.
        worker: String,
        /// Time without a heartbeat after which the lease ended.
        silent: Duration,
    },
    /// The worker did not return the episode in time.
    TimeUp {
        /// Name of the worker.
        worker: String,
    },
}

/// What a worker returned.
#[derive(Debug)]
pub(super) struct Returned {
    pub(super) end: OfferEnd,
    /// Of the content, so that a repeated result is known as such.
    pub(super) digest: [u8; 32],
}
