//! Trainer protocol, version 1: control by HTTP, data by batch folders.
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

/// Version of this protocol.
pub const PROTOCOL_VERSION: u32 = 1;

/// What a trainer is and where it stands.
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
    /// Restoring an older checkpoint opens a new lineage.
    pub lineage: u64,
    /// Last step that is part of its newest checkpoint.
    pub last_step_id: Option<String>,
    /// Folder of its newest checkpoint (Hugging Face layout).
    pub checkpoint: Utf8PathBuf,
    /// Processes that train together.
    pub world_size: u32,
    /// Devices, for people.
    pub devices: Vec<String>,
}

/// `POST /v1/steps`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct StepRequest {
    /// Idempotency key; a step already applied answers with its stored result.
    pub step_id: String,
    /// The version the weights must have before this step.
    pub base_version: PolicyVersion,
    /// Path of the batch folder's `manifest.json`, readable by the trainer.
    pub manifest: Utf8PathBuf,
    /// Settings.
    pub hyperparameters: Hyperparameters,
}

/// Where a step stands.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "state", rename_all = "snake_case")]
pub enum StepState {
    /// Accepted, not begun.
    Queued,
    /// Under way.
    Running {
        /// `recompute`, `update` or `checkpoint`.
        phase: String,
        /// Share done, 0 to 1.
        progress: f64,
    },
    /// Applied, and part of a checkpoint on disk.
    Done {
        /// What it did.
        result: Box<StepResult>,
    },
    /// Refused or failed; weights are as before.
    Failed {
        /// Why.
        error: String,
    },
}

/// Answer to both step calls.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct StepStatus {
    /// The step asked about.
    pub step_id: String,
    /// Where it stands.
    #[serde(flatten)]
    pub state: StepState,
}

/// What an applied step did.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct StepResult {
    /// Version of the new weights.
    pub policy_version: PolicyVersion,
    /// Folder of the new weights (Hugging Face layout).
    pub checkpoint: Utf8PathBuf,
    /// Measurements.
    pub metrics: StepMetrics,
}

/// `POST /v1/logprobs`: forward only, nothing changes.
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
    /// Route disagreement of a forward without replay; absent when `replay` was set.
    pub disagreement: Option<Disagreement>,
}

/// Answer to `POST /v1/checkpoints`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct CheckpointReply {
    /// Its folder.
    pub checkpoint: Utf8PathBuf,
    /// Its weights' version.
    pub policy_version: PolicyVersion,
}

/// Error body.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ErrorBody {
    /// The error.
    pub error: ErrorDetail,
}

/// Inside of [`ErrorBody`].
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ErrorDetail {
    /// One word a program can match on.
    pub code: String,
    /// For a person.
    pub message: String,
}
