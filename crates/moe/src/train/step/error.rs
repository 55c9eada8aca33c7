//! Why a step failed.

use crate::train::batch::BatchError;

/// Why a step failed. The caller restores the weights.
#[derive(Debug, thiserror::Error)]
pub enum StepError {
    /// The parts of the batch do not fit together, or do not fit the model.
    #[error("the batch does not fit the model")]
    Batch(#[from] BatchError),
    /// The batch was made for another model or cannot be read.
    #[error(transparent)]
    Files(#[from] orchestrate_handoff::BatchError),
    /// No token of the batch has a loss.
    #[error("the batch has no loss tokens")]
    Empty,
    /// A hyperparameter is invalid.
    #[error("hyperparameter {0}")]
    Setting(String),
    /// The loss requires a reference policy, and none is available.
    #[error(
        "the reference policy is missing: restore the trainer's first checkpoint, v000000, or set \
         kl_coefficient = 0"
    )]
    NoReference,
    /// The loss or the gradient is infinite or not a number.
    #[error("{what} of mini step {mini_step} is not finite")]
    NotFinite {
        /// `the loss` or `the gradient`.
        what: &'static str,
        /// Number of the mini step, from 1.
        mini_step: usize,
    },
    /// The trainer is shutting down.
    #[error("stopped before the step was applied: the trainer is shutting down")]
    Stopped,
}
