//! What a trainer measures in one step. Fields that came later have defaults: results stored in a
//! journal are read by later versions.

use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// Mismatch between sampler and trainer on the loss tokens of one batch, at the weights the
/// batch was sampled with.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
pub struct Mismatch {
    /// k3 estimate: mean of `ρ − 1 − ln ρ`, `ρ = p_train / p_infer`.
    pub kl_k3: f64,
    /// Mean `|ln ρ|`.
    pub mean_abs_logprob_diff: f64,
    /// Mean `|p_train − p_infer|`; below 0.005 is healthy, above 0.01 points to the engine.
    #[serde(default)]
    pub mean_abs_prob_diff: f64,
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
    /// Mean over sequences of the mean number of differing experts per token.
    #[serde(default)]
    pub sequence_mean_experts: f64,
    /// Share of (token, layer) pairs by the number of experts that differ, 0 to `top_k`.
    #[serde(default)]
    pub histogram: Vec<f64>,
}

/// Ratio of the updated policy to the one at the weights of the rollout, over the loss tokens of
/// all mini steps.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
pub struct PolicyRatio {
    /// Mean.
    pub mean: f64,
    /// Largest.
    pub max: f64,
    /// Share of loss tokens clipped from above (positive advantage).
    pub clipped_high: f64,
    /// Share of loss tokens clipped from below (negative advantage).
    pub clipped_low: f64,
}

/// Ratio ρ of trainer to sampler at the weights of the rollout, over the loss tokens.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
pub struct RolloutRatio {
    /// Mean.
    pub mean: f64,
    /// Largest.
    pub max: f64,
    /// Effective share of samples: `1 / mean((ρ / mean)²)`, 0 to 1.
    pub effective_share: f64,
    /// Mean weight of the importance correction; 1 without one.
    pub weight_mean: f64,
    /// Share of loss tokens it truncated or left out.
    pub corrected: f64,
}

/// Router-shift weights of the mini steps after the first.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
pub struct RouterShiftStats {
    /// Mean of γ, floored.
    pub mean: f64,
    /// Share of loss tokens at the floor.
    pub floored: f64,
}

/// The value head's part.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
pub struct ValueStats {
    /// Mean value loss over mini steps.
    pub loss: f64,
    /// Share of the returns' variance that the old values explain; negative = worse than a mean.
    pub explained_variance: f64,
}

/// Measurements of one applied step.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
pub struct StepMetrics {
    /// Mean loss over mini steps.
    pub loss: f64,
    /// Mean global gradient norm before clipping.
    pub grad_norm: f64,
    /// Mean norm of the routers' part of the gradient before clipping.
    #[serde(default)]
    pub router_grad_norm: f64,
    /// Mean entropy at the loss tokens, nats, at the rollout temperature.
    pub entropy: f64,
    /// Share of loss tokens whose update was clipped.
    pub clip_fraction: f64,
    /// Learning rate of the last mini step.
    #[serde(default)]
    pub learning_rate: f64,
    /// Ratio of new to old policy.
    #[serde(default)]
    pub ratio: PolicyRatio,
    /// Ratio of trainer to sampler.
    #[serde(default)]
    pub rollout_ratio: RolloutRatio,
    /// Mean divergence from the reference policy, where one is asked for.
    #[serde(default)]
    pub kl_reference: Option<f64>,
    /// Router-shift weights, where they are used.
    #[serde(default)]
    pub router_shift: Option<RouterShiftStats>,
    /// Mean loss of PR2's predictor, where it learned.
    #[serde(default)]
    pub predictor_loss: Option<f64>,
    /// The value head, where there is one.
    #[serde(default)]
    pub value: Option<ValueStats>,
    /// Entropy of the executed experts' shares per MoE layer, 1 = all experts equally used.
    #[serde(default)]
    pub expert_load_entropy: Vec<f64>,
    /// Share of (token, layer) pairs of the last mini step whose own choice has left the replayed
    /// one; absent where nothing is replayed.
    #[serde(default)]
    pub route_drift: Option<f64>,
    /// Mismatch with the run's replay.
    pub mismatch: Mismatch,
    /// Mismatch in a forward without replay, when asked for.
    pub mismatch_no_replay: Option<Mismatch>,
    /// Route disagreement, when a forward without replay was made.
    pub disagreement: Option<Disagreement>,
    /// (token, layer) pairs that had no row and fell back to the trainer's own choice.
    pub routing_missing: u64,
    /// Their share of all pairs a row could have; above 1e-3 is alarming.
    #[serde(default)]
    pub routing_missing_fraction: f64,
    /// Loss tokens.
    pub loss_tokens: u64,
    /// All tokens.
    pub tokens: u64,
    /// Seconds for recompute, update and checkpoint together.
    pub seconds: f64,
}
