//! What the journal's rows say, in our words.

use camino::Utf8PathBuf;
use orchestrate_types::{AttemptId, EpisodeId, GroupId, Outcome, PolicyVersion};

macro_rules! state_enum {
    ($(#[$doc:meta])* $name:ident { $($(#[$vdoc:meta])* $variant:ident = $text:literal,)* }) => {
        $(#[$doc])*
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
        pub enum $name { $($(#[$vdoc])* $variant,)* }

        impl $name {
            /// The word in the journal.
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
    /// Where a group stands: `Filling ▶ Kept | Dropped`.
    GroupState {
        /// Episodes are still open.
        Filling = "filling",
        /// Its episodes may be trained on (or, for an evaluation, are counted).
        Kept = "kept",
        /// Left out, with a reason.
        Dropped = "dropped",
    }
}
state_enum! {
    /// Where an episode stands: `Open ▶ Sealed | Quarantined`.
    EpisodeState {
        /// Not finished.
        Open = "open",
        /// One attempt has a trusted outcome.
        Sealed = "sealed",
        /// Every attempt broke; a new start of the run opens it again while its group is filling.
        Quarantined = "quarantined",
    }
}
state_enum! {
    /// Where an attempt stands: `Intended ▶ Sealed | Superseded | Broken | Aborted | Lost`.
    AttemptState {
        /// Decided, perhaps started.
        Intended = "intended",
        /// Its outcome is the episode's.
        Sealed = "sealed",
        /// Ended well after another attempt was sealed; kept as evidence.
        Superseded = "superseded",
        /// Our machinery failed.
        Broken = "broken",
        /// Ended from outside.
        Aborted = "aborted",
        /// Under way when its coordinator died.
        Lost = "lost",
    }
}
state_enum! {
    /// Where a global step stands: `Sampling ▶ Training ▶ Trained ▶ Applied`, or `Skipped`.
    StepState {
        /// Episodes are made.
        Sampling = "sampling",
        /// The batch is published; the trainer has it or will get it.
        Training = "training",
        /// The trainer's result is recorded; engines may not have the weights yet.
        Trained = "trained",
        /// The weights are live; metrics are recorded.
        Applied = "applied",
        /// Nothing to train on.
        Skipped = "skipped",
    }
}
state_enum! {
    /// Where a batch stands: `Assembling ▶ Published ▶ Applied ▶ Retired`.
    BatchState {
        /// Members are decided; files may be half written.
        Assembling = "assembling",
        /// The folder is complete and never changes.
        Published = "published",
        /// Part of a trainer checkpoint.
        Applied = "applied",
        /// Its folder may be deleted.
        Retired = "retired",
    }
}

impl StepState {
    /// Whether the trainer has, or gets, its batch, and the step is not closed.
    pub fn is_in_training(self) -> bool {
        match self {
            Self::Training | Self::Trained => true,
            Self::Sampling | Self::Applied | Self::Skipped => false,
        }
    }
}

/// A group.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GroupRow {
    /// Which.
    pub id: GroupId,
    /// Global step (training) or round (evaluation) it belongs to.
    pub step: u32,
    /// Its task.
    pub task_id: String,
    /// Episodes in it.
    pub size: u16,
    /// State.
    pub state: GroupState,
    /// Why it was dropped.
    pub reason: Option<String>,
}

/// An episode.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EpisodeRow {
    /// Which.
    pub id: EpisodeId,
    /// State.
    pub state: EpisodeState,
    /// Its task.
    pub task_id: String,
    /// Attempts so far.
    pub attempts: u32,
}

/// An attempt.
#[derive(Debug, Clone, PartialEq)]
pub struct AttemptRow {
    /// Which.
    pub id: AttemptId,
    /// State.
    pub state: AttemptState,
    /// How it ended; absent while under way, or lost.
    pub outcome: Option<Outcome>,
    /// Numbers that metrics are computed from.
    pub summary: serde_json::Value,
    /// Digest of the stored trajectory.
    pub blob: Option<String>,
    /// Its size in bytes.
    pub blob_bytes: u64,
    /// When it was decided, µs UTC.
    pub opened_us: i64,
    /// When it ended, µs UTC.
    pub closed_us: Option<i64>,
}

/// A global step.
#[derive(Debug, Clone, PartialEq)]
pub struct StepRow {
    /// Counts from 1.
    pub step: u32,
    /// Idempotency key at the trainer.
    pub step_id: String,
    /// State.
    pub state: StepState,
    /// Version whose weights it trains; until its batch is assembled, the one that was live when
    /// it was opened.
    pub base_version: PolicyVersion,
    /// The trainer's result, JSON.
    pub result: Option<serde_json::Value>,
    /// The step's line of `metrics.jsonl`.
    pub metrics: Option<serde_json::Value>,
    /// Why it was skipped.
    pub reason: Option<String>,
}

/// An evaluation round.
#[derive(Debug, Clone, PartialEq)]
pub struct EvalRow {
    /// Global step after which it ran; 0 = before training.
    pub round: u32,
    /// Evaluated version.
    pub policy_version: PolicyVersion,
    /// The round's line of `metrics.jsonl`; present once done.
    pub metrics: Option<serde_json::Value>,
}

/// A batch.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BatchRow {
    /// Global step it is for.
    pub step: u32,
    /// State.
    pub state: BatchState,
    /// Its folder, relative to the run folder.
    pub folder: Utf8PathBuf,
    /// Digest of its manifest, once published.
    pub digest: Option<String>,
}

/// Weights known to the run.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct VersionRow {
    /// Version.
    pub version: PolicyVersion,
    /// The trainer's lineage.
    pub lineage: u64,
    /// Folder (Hugging Face layout).
    pub checkpoint: Utf8PathBuf,
    /// Whether every engine serves, or served, it.
    pub live: bool,
}
