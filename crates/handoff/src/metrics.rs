//! Measurements of a trainer in one step. Fields that were added later have defaults, because results
//! that older versions stored in a journal are still read.

use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

const ROOT_OF_TEN: f64 = 3.162_277_660_168_379_5;

/// Histogram over half decades, of bounded size at any scale. It has 18 counts: values below 1e-7
/// (including zero), then one count between consecutive [`HalfDecades::EDGES`], then 10 and above.
/// Empty if the trainer does not count.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(transparent)]
pub struct HalfDecades(Vec<u64>);

impl HalfDecades {
    /// Boundaries between consecutive counts; a value equal to an edge belongs to the upper count.
    pub const EDGES: [f64; 17] = [
        1e-7,
        ROOT_OF_TEN * 1e-7,
        1e-6,
        ROOT_OF_TEN * 1e-6,
        1e-5,
        ROOT_OF_TEN * 1e-5,
        1e-4,
        ROOT_OF_TEN * 1e-4,
        1e-3,
        ROOT_OF_TEN * 1e-3,
        1e-2,
        ROOT_OF_TEN * 1e-2,
        1e-1,
        ROOT_OF_TEN * 1e-1,
        1.0,
        ROOT_OF_TEN,
        10.0,
    ];

    /// Counts a value, which must be at least 0.
    pub fn add(&mut self, value: f64) {
        self.0.resize(Self::EDGES.len() + 1, 0);
        if let Some(count) = self.0.get_mut(Self::EDGES.partition_point(|edge| *edge <= value)) {
            *count += 1;
        }
    }

    /// The 18 counts in ascending order, or none.
    pub fn counts(&self) -> &[u64] {
        &self.0
    }
}

/// Two-dimensional histogram of tokens by their probability under sampler and trainer.
///
/// Bin `b` of an axis holds `−ln p` from `(b / 8)²` to `((b + 1) / 8)²`, and the last of 32 bins
/// everything above: bins are finest at high probabilities, which most tokens have. Each entry is
/// (sampler's bin, trainer's bin, tokens); pairs of bins without a token are left out.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(transparent)]
pub struct ProbabilityGrid(Vec<(u8, u8, u64)>);

impl ProbabilityGrid {
    /// Number of bins per axis.
    pub const BINS: u8 = 32;

    /// Creates a grid from token counts by (sampler's bin, trainer's bin).
    pub fn new(counts: &BTreeMap<(u8, u8), u64>) -> Self {
        Self(
            counts
                .iter()
                .map(|(&(sampler, trainer), &tokens)| (sampler, trainer, tokens))
                .collect(),
        )
    }

    /// The bin, 0 to 31, of a log-prob in nats.
    pub fn bin(logprob: f64) -> u8 {
        let below = |bin: &u8| -logprob < (f64::from(*bin) / 8.0).powi(2);
        (1..Self::BINS).find(below).unwrap_or(Self::BINS) - 1
    }

    /// Non-empty entries as (sampler's bin, trainer's bin, tokens).
    pub fn entries(&self) -> &[(u8, u8, u64)] {
        &self.0
    }
}

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
    /// Number of tokens by `|ln ρ|`.
    #[serde(default)]
    pub token_histogram: HalfDecades,
    /// Number of sequences by their mean `|ln ρ|`.
    #[serde(default)]
    pub sequence_histogram: HalfDecades,
    /// Number of tokens by sampler and trainer probability.
    #[serde(default)]
    pub probability_grid: ProbabilityGrid,
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
    /// Share of tokens whose expert sets differ, per `MoE` layer.
    #[serde(default)]
    pub by_layer: Vec<f64>,
    /// Share of tokens by the number of their layers that differ, 0 to all.
    #[serde(default)]
    pub token_histogram: Vec<f64>,
    /// Sequences by the share of their (token, layer) pairs that differ.
    #[serde(default)]
    pub sequence_histogram: HalfDecades,
}

/// Probability ratio of the updated policy to the policy of the rollout, over the loss tokens of all
/// mini steps.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
pub struct PolicyRatio {
    /// Mean ratio.
    pub mean: f64,
    /// Largest ratio.
    pub max: f64,
    /// Share of loss tokens clipped from above (positive advantage).
    pub clipped_high: f64,
    /// Share of loss tokens clipped from below (negative advantage).
    pub clipped_low: f64,
}

/// Ratio ρ of trainer to sampler at the weights of the rollout, over the loss tokens.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
pub struct RolloutRatio {
    /// Mean ratio.
    pub mean: f64,
    /// Largest ratio.
    pub max: f64,
    /// Effective share of samples: `1 / mean((ρ / mean)²)`, 0 to 1.
    pub effective_share: f64,
    /// Mean weight of the importance correction; 1 without one.
    pub weight_mean: f64,
    /// Share of loss tokens that the correction truncated or masked.
    pub corrected: f64,
}

/// Router-shift weights of the mini steps after the first.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
pub struct RouterShiftStats {
    /// Mean of γ after applying the lower bound.
    pub mean: f64,
    /// Share of loss tokens at the lower bound.
    pub floored: f64,
}

/// Measurements of the value head.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
pub struct ValueStats {
    /// Mean value loss over mini steps.
    pub loss: f64,
    /// Share of the returns' variance that the old values explain; negative = worse than the mean.
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
    /// Ratio of the updated policy to the rollout's.
    #[serde(default)]
    pub ratio: PolicyRatio,
    /// Ratio of trainer to sampler at the weights of the rollout.
    #[serde(default)]
    pub rollout_ratio: RolloutRatio,
    /// Mean divergence from the reference policy, if one is configured.
    #[serde(default)]
    pub kl_reference: Option<f64>,
    /// Router-shift weights, if they are used.
    #[serde(default)]
    pub router_shift: Option<RouterShiftStats>,
    /// Mean loss of PR2's predictor, if it was trained.
    #[serde(default)]
    pub predictor_loss: Option<f64>,
    /// Measurements of the value head, if there is one.
    #[serde(default)]
    pub value: Option<ValueStats>,
    /// Entropy of the executed experts' shares per MoE layer, 1 = all experts equally used.
    #[serde(default)]
    pub expert_load_entropy: Vec<f64>,
    /// Use of the experts per `MoE` layer, from the busiest to the idlest; 1 = even. Each value is the
    /// mean of one of at most 16 groups of equal size.
    #[serde(default)]
    pub expert_load: Vec<Vec<f64>>,
    /// Share of (token, layer) pairs of the last mini step in which the router's own choice differs
    /// from the replayed one; absent if nothing is replayed.
    #[serde(default)]
    pub route_drift: Option<f64>,
    /// Mismatch under the run's replay setting.
    pub mismatch: Mismatch,
    /// Mismatch in a forward pass without replay, if one was requested.
    pub mismatch_no_replay: Option<Mismatch>,
    /// Route disagreement, if there was a forward pass without replay.
    pub disagreement: Option<Disagreement>,
    /// (token, layer) pairs that had no row and fell back to the trainer's own choice.
    pub routing_missing: u64,
    /// `routing_missing` as a share of all pairs that could have a row; above 1e-3 is alarming.
    #[serde(default)]
    pub routing_missing_fraction: f64,
    /// Number of loss tokens.
    pub loss_tokens: u64,
    /// Number of tokens, including those outside the loss mask.
    pub tokens: u64,
    /// Seconds for recompute, update and checkpoint together.
    pub seconds: f64,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_fall_into_half_decades() {
        let mut sizes = HalfDecades::default();
        assert!(sizes.counts().is_empty());
        for value in [0.0, 9e-8, 1e-7, 3e-3, 3.2e-3, 9.9, 10.0, 1e9] {
            sizes.add(value);
        }
        let mut expected = [0; 18];
        for bin in [0, 0, 1, 9, 10, 16, 17, 17] {
            expected[bin] += 1;
        }
        assert_eq!(sizes.counts(), expected);
    }

    #[test]
    fn probabilities_fall_into_bins_that_are_finest_near_one() {
        let bins = [0.0, -0.015, -0.016, -1.0, -4.0, -15.5, -1e9, f64::NEG_INFINITY];
        assert_eq!(bins.map(ProbabilityGrid::bin), [0, 0, 1, 8, 16, 31, 31, 31]);
        let grid = ProbabilityGrid::new(&BTreeMap::from([((0, 1), 7), ((31, 0), 2)]));
        assert_eq!(serde_json::to_string(&grid).unwrap(), "[[0,1,7],[31,0,2]]");
    }

    #[test]
    fn results_without_histograms_are_read() {
        let old = r#"{"kl_k3": 1e-3, "mean_abs_logprob_diff": 0.1, "extreme_token_fraction": {}}"#;
        let read: Mismatch = serde_json::from_str(old).unwrap();
        assert!(read.probability_grid.entries().is_empty());
    }
}
