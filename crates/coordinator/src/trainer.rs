//! The interface to the trainer.

use orchestrate_handoff::protocol::{StepRequest, StepResult, StepState, TrainerInfo};
use orchestrate_handoff::{TrainerClient, TrainerError};
use std::time::Duration;

/// Called with each state of a step that the trainer reports.
pub type StepProgress = dyn Fn(&StepState) + Send + Sync;

/// A trainer. A step may be submitted any number of times; it takes effect once.
#[async_trait::async_trait]
pub trait TrainerSink: Send + Sync + std::fmt::Debug {
    /// Describes the trainer and the weights it holds.
    async fn info(&self) -> Result<TrainerInfo, TrainerError>;

    /// Applies a step, or returns the stored result if it was applied before. Calls `progress` with the
    /// states in between.
    async fn apply(
        &self,
        request: &StepRequest,
        progress: &StepProgress,
    ) -> Result<StepResult, TrainerError>;
}

/// A trainer that is reached over HTTP; the embedded trainer is one, too.
#[derive(Debug, Clone)]
pub struct HttpTrainer {
    /// Client of the trainer protocol.
    pub client: TrainerClient,
    /// Maximum time for one step.
    pub step_timeout: Duration,
}

#[async_trait::async_trait]
impl TrainerSink for HttpTrainer {
    async fn info(&self) -> Result<TrainerInfo, TrainerError> {
        self.client.info().await
    }

    async fn apply(
        &self,
        request: &StepRequest,
        progress: &StepProgress,
    ) -> Result<StepResult, TrainerError> {
        self.client.apply_step(request, self.step_timeout, |state| progress(state)).await
    }
}
