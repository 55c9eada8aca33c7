//! What an attempt offers, and how an offer ends.

use crate::sampler::Sampler;
use crate::secret::SecretDigest;
use orchestrate_types::AttemptId;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

/// Begins an episode under a lease: returns the sampler that answers its requests, or `None` if the
/// attempt cannot begin.
pub(super) type Begin = Box<dyn FnOnce(&LeaseRecord) -> Option<Arc<dyn Sampler>> + Send>;

/// What is kept of a lease so that a later process can restore it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct LeaseRecord {
    pub(super) lease: SecretDigest,
    pub(super) key: SecretDigest,
    /// Name of the worker that holds it.
    pub(super) worker: String,
}

impl LeaseRecord {
    pub(super) fn secrets(&self) -> [SecretDigest; 2] {
        [self.lease, self.key]
    }
}

/// An episode that a worker took from an earlier process of the run.
pub struct RestoredLease {
    /// The attempt.
    pub attempt: AttemptId,
    /// The lease, as it was given.
    pub record: LeaseRecord,
    /// Time limit from taking the episode to returning it.
    pub time: Duration,
    /// What is left of that time.
    pub left: Duration,
    /// Answers the episode's requests.
    pub sampler: Arc<dyn Sampler>,
}

impl fmt::Debug for RestoredLease {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.debug_struct("RestoredLease").field("attempt", &self.attempt).finish_non_exhaustive()
    }
}

/// An attempt as it is offered to workers.
pub struct OfferedAttempt {
    /// The attempt.
    pub attempt: AttemptId,
    /// The part of its task that the worker sees: a JSON object.
    pub task: Value,
    /// Time limit from taking the episode to returning it.
    pub time: Duration,
    /// Called when a worker takes it; answers its requests from then on.
    pub begin: Begin,
}

impl fmt::Debug for OfferedAttempt {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.debug_struct("OfferedAttempt").field("attempt", &self.attempt).finish_non_exhaustive()
    }
}

/// The cause of a failure, as reported by the worker.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FailureKind {
    /// The environment failed: the attempt is void and is retried.
    Environment,
    /// The policy made it impossible to continue the episode.
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
        /// The reported cause.
        kind: FailureKind,
        /// Human-readable description, as the worker sent it.
        message: String,
    },
    /// The worker abandoned the episode.
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
    /// Digest of the content, by which a repeated result is recognised.
    pub(super) digest: [u8; 32],
}
