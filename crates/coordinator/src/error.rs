//! The errors that end a run before its last step.

use camino::Utf8PathBuf;
use orchestrate_engine::EngineError;
use orchestrate_handoff::{BatchError, TrainerError};
use orchestrate_metrics::Symptom;
use orchestrate_report::ReportError;
use orchestrate_sandbox::SandboxError;
use orchestrate_store::StoreError;
use orchestrate_types::{PolicyVersion, Stage, counted};

/// The part of the system that failed; the command line maps it to an exit code.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FailureClass {
    /// The settings.
    Config,
    /// The inference engine.
    Engine,
    /// Sandboxes.
    Sandbox,
    /// The journal or the run folder.
    Store,
    /// The trainer.
    Trainer,
    /// A bug in this program.
    Bug,
}

/// A run that cannot continue. Everything that finished before is in the journal.
#[derive(Debug, thiserror::Error)]
pub enum RunError {
    /// The journal failed.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// The inference engine failed.
    #[error(transparent)]
    Engine(#[from] EngineError),
    /// The trainer failed.
    #[error(transparent)]
    Trainer(#[from] TrainerError),
    /// Sandboxes could not be opened or removed.
    #[error(transparent)]
    Sandbox(#[from] SandboxError),
    /// Batch files could not be written or read.
    #[error(transparent)]
    Batch(#[from] BatchError),
    /// A file in the run folder could not be written.
    #[error("failed to write {path}")]
    File {
        /// The file.
        path: Utf8PathBuf,
        /// The error of the operating system.
        source: std::io::Error,
    },
    /// More episodes failed in all their attempts than `run.max_broken_share` allows.
    #[error(
        "{given_up} of {} failed in every attempt, more than run.max_broken_share allows; the last one \
         failed in stage {stage}: {error} (fix the cause, then run again with --resume)",
        counted(*planned, "episode")
    )]
    TooManyBroken {
        /// Episodes that failed in all their attempts.
        given_up: usize,
        /// Episodes that the stage was to make.
        planned: usize,
        /// Stage in which the last one failed.
        stage: Stage,
        /// Error of the last one.
        error: String,
    },
    /// Engine and trainer have different models.
    #[error(
        "engine and trainer disagree about the model: {what} (give both the same model folder)"
    )]
    ModelMismatch {
        /// The property that differs, with both values.
        what: String,
    },
    /// The trainer does not have the configured policy loss.
    #[error("algorithm.policy_loss = {loss:?}: must be one that the trainer has: {known}")]
    UnknownLoss {
        /// The configured loss.
        loss: String,
        /// The losses that the trainer has, separated by commas.
        known: String,
    },
    /// The trainer's weights are not those that the journal ends with.
    #[error(
        "the trainer is at policy version {trainer}, the run at {journal} (start the trainer from \
         the checkpoint {checkpoint}, or start a new run)"
    )]
    TrainerElsewhere {
        /// The trainer's version.
        trainer: PolicyVersion,
        /// The journal's version.
        journal: PolicyVersion,
        /// Folder of the journal's version.
        checkpoint: String,
    },
    /// The trainer's result does not have a newer version than the weights it started from.
    #[error("the trainer returned policy version {found} for step {step}; it must be above {base}")]
    BadResult {
        /// Global step.
        step: u32,
        /// Version of the weights before the step.
        base: PolicyVersion,
        /// Version in the result.
        found: PolicyVersion,
    },
    /// Training has collapsed.
    #[error(
        "training collapsed at step {step}: {symptom} (the last weights before are {good}: start a \
         new run with engine.model set to them and a gentler [algorithm], or continue unchanged with \
         --resume)"
    )]
    Collapsed {
        /// First step that shows it.
        step: u32,
        /// How it shows.
        symptom: Symptom,
        /// The last weights before, as text.
        good: String,
    },
    /// There are no tasks to train or to evaluate on.
    #[error("the task set has no {part} tasks (check the [tasks] section)")]
    NoTasks {
        /// The part without tasks: `training` or `held-out`.
        part: &'static str,
    },
    /// A stored value is not one that this version of the program writes.
    #[error("stored {what} is invalid: {detail}")]
    Stored {
        /// The value.
        what: String,
        /// Why it is invalid.
        detail: String,
    },
    /// A task of this program panicked.
    #[error("internal error in {task}: {detail} (please report it)")]
    Panicked {
        /// The task.
        task: &'static str,
        /// The message of the panic.
        detail: String,
    },
    /// An evaluation was asked for in the folder of a training run.
    #[error(
        "the folder holds a training run, not an evaluation (resume it with orchestrate run, or \
         choose another --run-dir)"
    )]
    HoldsTrainingRun,
    /// Training was asked for in the folder of an evaluation.
    #[error(
        "the folder holds an evaluation, not a training run (resume it with orchestrate eval, or \
         orchestrate gateway, or choose another --run-dir)"
    )]
    HoldsEvaluation,
    /// Stopped on request; the run can be resumed.
    #[error("stopped on request")]
    Stopped,
}

impl RunError {
    /// The part of the system that failed.
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
            | Self::HoldsTrainingRun
            | Self::HoldsEvaluation => FailureClass::Config,
            Self::Panicked { .. } | Self::Stopped => FailureClass::Bug,
        }
    }

    /// A stored value that is invalid.
    pub(crate) fn stored(what: impl Into<String>, detail: impl std::fmt::Display) -> Self {
        Self::Stored { what: what.into(), detail: detail.to_string() }
    }
}

impl From<ReportError> for RunError {
    fn from(error: ReportError) -> Self {
        match error {
            ReportError::Store(error) => Self::Store(error),
            ReportError::Line { number, source } => {
                Self::stored(format!("line {number} of the metrics"), source)
            }
        }
    }
}
