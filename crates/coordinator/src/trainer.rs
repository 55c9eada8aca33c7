//! The seam to the trainer.

use orchestrate_handoff::protocol::{StepRequest, StepResult, StepState, TrainerInfo};
use orchestrate_handoff::{TrainerClient, TrainerError};
use std::time::Duration;

/// Sees the states of a step on its way.
pub type StepProgress = dyn Fn(&StepState) + Send + Sync;

/// Applies steps. A step may be handed over any number of times; it takes effect once.
#[async_trait::async_trait]
pub trait TrainerSink: Send + Sync + std::fmt::Debug {
    /// What the trainer is and where it stands.
    async fn info(&self) -> Result<TrainerInfo, TrainerError>;

    /// Applies a step, or answers with the stored result of one applied before. `progress` sees
    /// its states on the way.
    async fn apply(
        &self,
        request: &StepRequest,
        progress: &StepProgress,
    ) -> Result<StepResult, TrainerError>;
}

/// A trainer behind the HTTP protocol; the embedded one is served the same way.
#[derive(Debug, Clone)]
pub struct HttpTrainer {
    /// Its client.
    pub client: TrainerClient,
    /// Longest time one step may take.
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
