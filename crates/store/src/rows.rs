//! Rows of the journal as typed structs.

use camino::Utf8PathBuf;
use orchestrate_types::{AttemptId, EpisodeId, GroupId, Outcome, PolicyVersion};

macro_rules! state_enum {
    ($(#[$doc:meta])* $name:ident { $($(#[$vdoc:meta])* $variant:ident = $text:literal,)* }) => {
        $(#[$doc])*
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
        pub enum $name { $($(#[$vdoc])* $variant,)* }

        impl $name {
            /// Its name in the journal.
            pub const fn name(self) -> &'static str {
                match self { $(Self::$variant => $text,)* }
            }

            pub(crate) fn parse(text: &str) -> Option<Self> {
                match text { $($text => Some(Self::$variant),)* _ => None }
            }
        }
    };
}

state_enum! {
    /// What a run folder holds.
    RunKind {
        /// A run that trains a policy.
        Training = "training",
        /// A run that evaluates one policy.
        Evaluation = "evaluation",
    }
}
state_enum! {
    /// State of a group: `Filling ▶ Kept | Dropped`.
    GroupState {
        /// Episodes are still open.
        Filling = "filling",
        /// Its episodes may be trained on (or, for an evaluation, are counted).
        Kept = "kept",
        /// Excluded from training or evaluation; the row has the reason.
        Dropped = "dropped",
    }
}
state_enum! {
    /// State of an episode: `Open ▶ Sealed | Quarantined`.
    EpisodeState {
        /// No attempt has a trusted outcome yet.
        Open = "open",
        /// One attempt has a trusted outcome.
        Sealed = "sealed",
        /// Too many attempts broke. The next start of the run reopens it while its group is filling.
        Quarantined = "quarantined",
    }
}
state_enum! {
    /// State of an attempt: `Intended ▶ Sealed | Superseded | Broken | Aborted | Lost`.
    AttemptState {
        /// Recorded, and possibly started.
        Intended = "intended",
        /// Its outcome is the outcome of the episode.
        Sealed = "sealed",
        /// Finished after another attempt was sealed; kept as evidence.
        Superseded = "superseded",
        /// Failed because of the infrastructure (sandbox, engine, grader).
        Broken = "broken",
        /// Cancelled before it finished.
        Aborted = "aborted",
        /// Still running when its coordinator died.
        Lost = "lost",
    }
}
state_enum! {
    /// State of a global step: `Sampling ▶ Training ▶ Trained ▶ Applied`, or `Skipped`.
    StepState {
        /// Episodes are being sampled.
        Sampling = "sampling",
        /// The batch is published; the trainer has received it or will.
        Training = "training",
        /// The trainer's result is recorded; engines may not have the weights yet.
        Trained = "trained",
        /// The engines serve the new weights; metrics are recorded.
        Applied = "applied",
        /// Closed without training because no group was usable.
        Skipped = "skipped",
    }
}
state_enum! {
    /// State of a batch: `Assembling ▶ Published ▶ Applied ▶ Retired`.
    BatchState {
        /// Members are recorded; files may be half written.
        Assembling = "assembling",
        /// The folder is complete and never changes.
        Published = "published",
        /// Trained on, and part of a trainer checkpoint.
        Applied = "applied",
        /// Its folder may be deleted.
        Retired = "retired",
    }
}

impl StepState {
    /// Whether the step's batch is published and the step is still open.
    pub fn is_in_training(self) -> bool {
        match self {
            Self::Training | Self::Trained => true,
            Self::Sampling | Self::Applied | Self::Skipped => false,
        }
    }
}

/// A group of episodes of one task.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GroupRow {
    /// Id of the group.
    pub id: GroupId,
    /// Global step (training) or round (evaluation) it belongs to.
    pub step: u32,
    /// Id of its task.
    pub task_id: String,
    /// Number of episodes in the group.
    pub size: u16,
    /// Whether the group is filling, kept or dropped.
    pub state: GroupState,
    /// Why the group was dropped; `None` in any other state.
    pub reason: Option<String>,
}

/// An episode of a group.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EpisodeRow {
    /// Id of the episode.
    pub id: EpisodeId,
    /// Whether the episode is open, sealed or quarantined.
    pub state: EpisodeState,
    /// Id of its task.
    pub task_id: String,
    /// Number of attempts so far.
    pub attempts: u32,
}

/// One attempt to run an episode.
#[derive(Debug, Clone, PartialEq)]
pub struct AttemptRow {
    /// Id of the attempt.
    pub id: AttemptId,
    /// Whether the attempt is running, or how it ended.
    pub state: AttemptState,
    /// How it ended; `None` while it is running, or if it was aborted or lost.
    pub outcome: Option<Outcome>,
    /// JSON object with the numbers that metrics are computed from.
    pub summary: serde_json::Value,
    /// BLAKE3 digest of the stored trajectory, hexadecimal; `None` if nothing was stored.
    pub blob: Option<String>,
    /// Size of the stored trajectory in bytes; 0 if nothing was stored.
    pub blob_bytes: u64,
    /// When it was recorded, µs since the Unix epoch.
    pub opened_us: i64,
    /// When it ended, µs since the Unix epoch.
    pub closed_us: Option<i64>,
}

/// A global step of training.
#[derive(Debug, Clone, PartialEq)]
pub struct StepRow {
    /// Number of the step, from 1.
    pub step: u32,
    /// Idempotency key of the step in the trainer protocol.
    pub step_id: String,
    /// How far the step has come.
    pub state: StepState,
    /// Version of the weights it trains. Until its batch is assembled, the version that was live
    /// when the step was opened.
    pub base_version: PolicyVersion,
    /// The trainer's result as JSON; present from [`StepState::Trained`] on.
    pub result: Option<serde_json::Value>,
    /// The step's line of `metrics.jsonl`; present once the step is closed.
    pub metrics: Option<serde_json::Value>,
    /// Why the step was skipped; `None` in any other state.
    pub reason: Option<String>,
}

/// An evaluation round.
#[derive(Debug, Clone, PartialEq)]
pub struct EvalRow {
    /// Global step after which it ran; 0 = before training.
    pub round: u32,
    /// Policy version that was evaluated.
    pub policy_version: PolicyVersion,
    /// The round's line of `metrics.jsonl`; present once done.
    pub metrics: Option<serde_json::Value>,
}

/// The batch of a global step.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BatchRow {
    /// Global step the batch belongs to.
    pub step: u32,
    /// How far the batch has come.
    pub state: BatchState,
    /// Folder of the batch, relative to the run folder.
    pub folder: Utf8PathBuf,
    /// Digest of the batch manifest; present once published.
    pub digest: Option<String>,
}

/// Weights known to the run.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct VersionRow {
    /// Policy version of the weights.
    pub version: PolicyVersion,
    /// Lineage of the trainer that made them; it changes when an older checkpoint is restored.
    pub lineage: u64,
    /// Folder with the weights, in Hugging Face layout.
    pub checkpoint: Utf8PathBuf,
    /// Whether every engine serves these weights, or has served them.
    pub live: bool,
}
