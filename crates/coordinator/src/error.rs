//! Why a run ends before its last step.

use camino::Utf8PathBuf;
use orchestrate_engine::EngineError;
use orchestrate_handoff::{BatchError, TrainerError};
use orchestrate_metrics::collapse::Symptom;
use orchestrate_sandbox::SandboxError;
use orchestrate_store::StoreError;
use orchestrate_types::{PolicyVersion, Stage};

/// Which part a failure belongs to; the command line maps it to an exit code.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FailureClass {
    /// The plan cannot work.
    Config,
    /// The inference engine.
    Engine,
    /// Sandboxes.
    Sandbox,
    /// The journal or the run folder.
    Store,
    /// The trainer.
    Trainer,
    /// Our own mistake.
    Bug,
}

/// A run that cannot go on. Everything finished before is in the journal.
#[derive(Debug, thiserror::Error)]
pub enum RunError {
    /// The journal.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// The engine.
    #[error(transparent)]
    Engine(#[from] EngineError),
    /// The trainer.
    #[error(transparent)]
    Trainer(#[from] TrainerError),
    /// Sandboxes.
    #[error(transparent)]
    Sandbox(#[from] SandboxError),
    /// Batch files.
    #[error(transparent)]
    Batch(#[from] BatchError),
    /// A file of the run folder.
    #[error("failed to write {path}")]
    File {
        /// Which.
        path: Utf8PathBuf,
        /// The system's word.
        source: std::io::Error,
    },
    /// Too many episodes failed in all their attempts.
    #[error(
        "{given_up} of {planned} episodes failed in every attempt, more than run.max_broken_share \
         allows; the last one in stage {stage}: {error} (put that right, then continue with \
         --resume)"
    )]
    TooManyBroken {
        /// Episodes given up.
        given_up: usize,
        /// Episodes the stage was to make.
        planned: usize,
        /// Where the last one broke.
        stage: Stage,
        /// How.
        error: String,
    },
    /// Engine and trainer hold different models.
    #[error(
        "engine and trainer disagree about the model: {what} (give both the same model folder)"
    )]
    ModelMismatch {
        /// What differs, with both values.
        what: String,
    },
    /// The trainer does not know the configured loss.
    #[error(
        "the trainer does not know policy loss `{loss}`; it knows {known} (set algorithm.policy_loss)"
    )]
    UnknownLoss {
        /// Configured.
        loss: String,
        /// Offered.
        known: String,
    },
    /// The trainer's weights are not those the journal ends with.
    #[error(
        "the trainer is at policy version {trainer}, the run at {journal} (start the trainer from \
         the checkpoint {checkpoint}, or begin a new run)"
    )]
    TrainerElsewhere {
        /// The trainer's version.
        trainer: PolicyVersion,
        /// The journal's version.
        journal: PolicyVersion,
        /// Folder of the journal's version.
        checkpoint: String,
    },
    /// The trainer's result does not follow its base.
    #[error("the trainer answered step {step} with policy version {found} after {base}")]
    BadResult {
        /// Global step.
        step: u32,
        /// Version before.
        base: PolicyVersion,
        /// Version answered.
        found: PolicyVersion,
    },
    /// Training has collapsed.
    #[error(
        "training collapsed at step {step}: {symptom} (the last weights before are {good}: begin a \
         new run with engine.model set to them and a gentler [algorithm], or continue as it is \
         with --resume)"
    )]
    Collapsed {
        /// First step that shows it.
        step: u32,
        /// How it shows.
        symptom: Symptom,
        /// The last weights before, in words.
        good: String,
    },
    /// There is nothing to train or evaluate on.
    #[error("the task set has no {part} tasks (check the [tasks] section)")]
    NoTasks {
        /// Which part.
        part: &'static str,
    },
    /// A stored value is not what this program writes.
    #[error("stored {what} cannot be used: {detail}")]
    Stored {
        /// What.
        what: String,
        /// Why.
        detail: String,
    },
    /// One of our tasks panicked.
    #[error("internal error in {task}: {detail} (please report it)")]
    Panicked {
        /// Which.
        task: &'static str,
        /// The panic.
        detail: String,
    },
    /// An evaluation was asked for in the folder of a training run.
    #[error(
        "the folder holds a training run, not an evaluation (resume it with orchestrate run, or \
         choose another --run-dir)"
    )]
    HoldsTrainingRun,
    /// Stopped on request; the run can be resumed.
    #[error("stopped on request")]
    Stopped,
}

impl RunError {
    /// Which part is to blame.
    pub fn class(&self) -> FailureClass {
        match self {
            Self::Store(_) | Self::Batch(_) | Self::File { .. } | Self::Stored { .. } => {
                FailureClass::Store
            }
            Self::Engine(_) => FailureClass::Engine,
            Self::Trainer(_)
            | Self::TrainerElsewhere { .. }
            | Self::BadResult { .. }
            | Self::Collapsed { .. } => FailureClass::Trainer,
            Self::Sandbox(_) => FailureClass::Sandbox,
            Self::TooManyBroken { stage, .. } => match stage {
                Stage::Generate => FailureClass::Engine,
                Stage::Setup | Stage::Exec | Stage::Collect | Stage::Grade => FailureClass::Sandbox,
                Stage::Record => FailureClass::Store,
            },
            Self::ModelMismatch { .. }
            | Self::UnknownLoss { .. }
            | Self::NoTasks { .. }
            | Self::HoldsTrainingRun => FailureClass::Config,
            Self::Panicked { .. } | Self::Stopped => FailureClass::Bug,
        }
    }

    pub(crate) fn stored(what: impl Into<String>, detail: impl std::fmt::Display) -> Self {
        Self::Stored { what: what.into(), detail: detail.to_string() }
    }
}
