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

use camino::Utf8PathBuf;
use orchestrate_types::{ModelShape, PolicyVersion};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

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

/// Which loss the update minimises.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum PolicyLoss {
    /// Clipped surrogate with group-relative advantages.
    Grpo,
}

/// How token losses become one number.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum LossAggregation {
    /// Sum over all tokens / number of loss tokens.
    TokenMean,
    /// Mean over sequences of their token mean.
    SeqMeanTokenMean,
    /// Mean over sequences of their token sum.
    SeqMeanTokenSum,
    /// Sum over all tokens / (sequences × `loss_norm_tokens`).
    TokenSumNorm,
}

/// Whose routes the trainer's forward passes use.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum RoutingReplay {
    /// Its own, in every pass.
    None,
    /// Its own of the recompute pass, in the update passes (R2).
    Recompute,
    /// The inference engine's, in recompute and update (R3).
    Rollout,
}

/// Everything the update depends on beside the batch.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Hyperparameters {
    /// The loss.
    pub policy_loss: PolicyLoss,
    /// Lower clip ε: ratios below `1 - clip_low` stop pushing down.
    pub clip_low: f64,
    /// Upper clip ε (Clip-Higher when above `clip_low`).
    pub clip_high: f64,
    /// Dual-clip constant `c` for negative advantages; `None` = off.
    pub dual_clip: Option<f64>,
    /// Aggregation.
    pub aggregation: LossAggregation,
    /// Constant `C` of `token-sum-norm`, in tokens.
    pub loss_norm_tokens: f64,
    /// Routes.
    pub routing_replay: RoutingReplay,
    /// Optimizer steps this batch is split into.
    pub mini_steps: u32,
    /// Most tokens in one forward and backward pass; gradients accumulate beyond.
    pub micro_batch_tokens: usize,
    /// AdamW learning rate.
    pub learning_rate: f64,
    /// AdamW decay rates.
    pub betas: (f64, f64),
    /// AdamW ε.
    pub adam_eps: f64,
    /// Decoupled weight decay.
    pub weight_decay: f64,
    /// Global L2 norm the gradient is clipped to.
    pub max_grad_norm: f64,
    /// Sampling temperature of the rollouts; log-probs are taken at it.
    pub temperature: f64,
    /// Also measure the mismatch in a forward without replay.
    pub measure_no_replay: bool,
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
        result: StepResult,
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

/// Mismatch between sampler and trainer on the loss tokens of one batch, at the weights the
/// batch was sampled with.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
pub struct Mismatch {
    /// k3 estimate: mean of `ρ − 1 − ln ρ`, `ρ = p_train / p_infer`.
    pub kl_k3: f64,
    /// Mean `|ln ρ|`.
    pub mean_abs_logprob_diff: f64,
    /// F(τ): share of tokens with `max(ρ, 1/ρ) > τ`, by τ as text.
    pub extreme_token_fraction: BTreeMap<String, f64>,
}

/// How far the trainer's own routes are from the engine's; measured without replay, over all
/// tokens that have a row.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
pub struct Disagreement {
    /// Share of (token, layer) pairs whose expert sets differ.
    pub router: f64,
    /// Share of tokens with at least one differing layer.
    pub token: f64,
    /// Mean over sequences of the mean number of differing routers per token.
    pub sequence_mean: f64,
}

/// Measurements of one applied step.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
pub struct StepMetrics {
    /// Mean loss over mini steps.
    pub loss: f64,
    /// Mean global gradient norm before clipping.
    pub grad_norm: f64,
    /// Mean entropy at the loss tokens, nats, at the rollout temperature.
    pub entropy: f64,
    /// Share of loss tokens whose update was clipped.
    pub clip_fraction: f64,
    /// Mismatch with the run's replay.
    pub mismatch: Mismatch,
    /// Mismatch in a forward without replay, when asked for.
    pub mismatch_no_replay: Option<Mismatch>,
    /// Route disagreement, when a forward without replay was made.
    pub disagreement: Option<Disagreement>,
    /// (token, layer) pairs that had no row and fell back to the trainer's own choice.
    pub routing_missing: u64,
    /// Loss tokens.
    pub loss_tokens: u64,
    /// All tokens.
    pub tokens: u64,
    /// Seconds for recompute, update and checkpoint together.
    pub seconds: f64,
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
