//! Trainer protocol, version 1: control over HTTP, data in batch folders.
//!
//! | Call | Body → answer |
//! |---|---|
//! | `GET /v1/info` | → [`TrainerInfo`] |
//! | `POST /v1/steps` | [`StepRequest`] → [`StepStatus`]; `step_id` is the idempotency key |
//! | `GET /v1/steps/{step_id}` | → [`StepStatus`] |
//! | `POST /v1/logprobs` | [`LogprobsRequest`] → [`LogprobsReply`] |
//! | `POST /v1/checkpoints` | → [`CheckpointReply`] |
//!
//! Errors are `{"error": {"code", "message"}}` with a 4xx or 5xx status.

pub use crate::algorithm::{
    Hyperparameters, ImportanceCorrection, ImportanceLevel, KlEstimator, LossAggregation,
    PolicyLoss, RouterShift, RoutingReplay,
};
pub use crate::metrics::{
    Disagreement, HalfDecades, Mismatch, PolicyRatio, ProbabilityGrid, RolloutRatio,
    RouterShiftStats, StepMetrics, ValueStats,
};
use camino::Utf8PathBuf;
use orchestrate_types::{ModelShape, PolicyVersion};
use serde::{Deserialize, Serialize};

/// Version of the protocol in this module.
pub const PROTOCOL_VERSION: u32 = 1;

/// Identity and current state of a trainer.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct TrainerInfo {
    /// [`PROTOCOL_VERSION`] it speaks.
    pub protocol_version: u32,
    /// Name and version, for people.
    pub trainer: String,
    /// Shape of the model it trains.
    pub model: ModelShape,
    /// Names of the policy losses it knows.
    pub algorithms: Vec<String>,
    /// Weights it holds now.
    pub policy_version: PolicyVersion,
    /// Counts restored checkpoints: restoring an older one starts a new lineage.
    pub lineage: u64,
    /// Last step that is part of its newest checkpoint.
    pub last_step_id: Option<String>,
    /// Folder of its newest checkpoint (Hugging Face layout).
    pub checkpoint: Utf8PathBuf,
    /// Number of processes that train together.
    pub world_size: u32,
    /// Devices, for people.
    pub devices: Vec<String>,
}

/// Body of `POST /v1/steps`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct StepRequest {
    /// Idempotency key; a step already applied answers with its stored result.
    pub step_id: String,
    /// The version the weights must have before this step.
    pub base_version: PolicyVersion,
    /// Path of the batch folder's `manifest.json`, readable by the trainer.
    pub manifest: Utf8PathBuf,
    /// Settings of the update.
    pub hyperparameters: Hyperparameters,
}

/// State of a step.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "state", rename_all = "snake_case")]
pub enum StepState {
    /// Accepted, but not started.
    Queued,
    /// Being processed.
    Running {
        /// `recompute`, `update` or `checkpoint`.
        phase: String,
        /// Share done, 0 to 1.
        progress: f64,
    },
    /// Applied, and part of a checkpoint on disk.
    Done {
        /// New weights and measurements.
        result: Box<StepResult>,
    },
    /// Refused or failed; weights are as before.
    Failed {
        /// Why the step failed, for people.
        error: String,
    },
}

/// Answer to both step calls.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct StepStatus {
    /// Id of the requested step.
    pub step_id: String,
    /// Current state of that step.
    #[serde(flatten)]
    pub state: StepState,
}

/// Result of an applied step.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct StepResult {
    /// Version of the new weights.
    pub policy_version: PolicyVersion,
    /// Folder of the new weights (Hugging Face layout).
    pub checkpoint: Utf8PathBuf,
    /// Measurements of the step.
    pub metrics: StepMetrics,
}

/// Body of `POST /v1/logprobs`: forward pass only, nothing changes.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct LogprobsRequest {
    /// Path of a batch's `manifest.json`.
    pub manifest: Utf8PathBuf,
    /// Whether the batch's rows are replayed.
    pub replay: bool,
    /// Temperature of the log-probs.
    pub temperature: f64,
}

/// Answer to [`LogprobsRequest`].
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct LogprobsReply {
    /// Weights it was computed with.
    pub policy_version: PolicyVersion,
    /// Per sequence `[T]`: log-prob of token `t` given those before, nats; 0.0 at `t = 0`.
    pub logprobs: Vec<Vec<f32>>,
    /// Mismatch against the batch's rollout log-probs.
    pub mismatch: Mismatch,
    /// Route disagreement of a forward pass without replay; null if `replay` was set.
    pub disagreement: Option<Disagreement>,
}

/// Answer to `POST /v1/checkpoints`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct CheckpointReply {
    /// Folder of the checkpoint.
    pub checkpoint: Utf8PathBuf,
    /// Version of its weights.
    pub policy_version: PolicyVersion,
}

/// Body of an error response.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ErrorBody {
    /// Code and message.
    pub error: ErrorDetail,
}

/// The error in an [`ErrorBody`].
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ErrorDetail {
    /// Identifier that a program can match on.
    pub code: String,
    /// Text for people.
    pub message: String,
}
