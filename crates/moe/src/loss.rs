//! Policy losses without a tensor library: log-probs in, loss and `dL/dlogp` out, in closed form.
//!
//! Losses are minimised. Each function handles one sequence; denominators are those of the whole
//! optimizer step ([`Totals`]), so splitting a step into micro batches changes nothing.

use crate::train::real::Real;
use orchestrate_handoff::protocol::LossAggregation;

/// Differences of log-probs are clamped to this before they are exponentiated.
const LOG_RATIO_LIMIT: f64 = 20.0;

/// Constants of the clipped surrogate.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Surrogate {
    /// Lower clip ε.
    pub clip_low: f64,
    /// Upper clip ε.
    pub clip_high: f64,
    /// Dual-clip constant for negative advantages, > 1; `None` = off.
    pub dual_clip: Option<f64>,
    /// How token losses become one number.
    pub aggregation: LossAggregation,
    /// Constant of `token-sum-norm`, in tokens.
    pub norm_tokens: f64,
}

/// Size of the whole optimizer step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Totals {
    /// Sequences.
    pub sequences: usize,
    /// Tokens with a loss, over all sequences.
    pub loss_tokens: usize,
}

/// Log-probs of one sequence of `T` tokens.
#[derive(Debug, Clone, Copy)]
pub struct TokenLogprobs<'a, T> {
    /// Under the policy that is updated, nats. `[T]`
    pub new: &'a [T],
    /// Under the trainer at the weights of the rollout, nats; a constant. `[T]`
    pub old: &'a [T],
    /// Which tokens have a loss. `[T]`
    pub mask: &'a [bool],
}

/// A sequence's share of the loss.
#[derive(Debug, Clone, PartialEq)]
pub struct SequenceLoss<T> {
    /// Its summand of the step's loss.
    pub value: f64,
    /// `dL/dlogp`, 0 where there is no loss. `[T]`
    pub gradient: Vec<T>,
    /// Tokens on the clipped branch.
    pub clipped: usize,
}

impl Surrogate {
    /// Factor on each token's loss of a sequence with `loss_tokens` of them.
    fn token_weight(&self, totals: Totals, loss_tokens: usize) -> f64 {
        let sequences = totals.sequences.max(1) as f64;
        match self.aggregation {
            LossAggregation::TokenMean => 1.0 / totals.loss_tokens.max(1) as f64,
            LossAggregation::SeqMeanTokenMean => 1.0 / (sequences * loss_tokens.max(1) as f64),
            LossAggregation::SeqMeanTokenSum => 1.0 / sequences,
            LossAggregation::TokenSumNorm => 1.0 / (sequences * self.norm_tokens),
        }
    }

    /// Clipped surrogate of one sequence with one advantage for all its tokens.
    pub fn sequence<T: Real>(
        &self,
        totals: Totals,
        tokens: TokenLogprobs<'_, T>,
        advantage: f64,
    ) -> SequenceLoss<T> {
        let count = tokens.mask.iter().filter(|&&m| m).count();
        let weight = self.token_weight(totals, count);
        let (mut value, mut clipped) = (0.0, 0);
        let pairs = tokens.new.iter().zip(tokens.old).zip(tokens.mask);
        let gradient = pairs
            .map(|((new, old), &masked)| {
                if !masked {
                    return T::ZERO;
                }
                let token = self.token(new.to_f64() - old.to_f64(), advantage);
                value += weight * token.loss;
                clipped += usize::from(token.clipped);
                T::from_f64(weight * token.gradient)
            })
            .collect();
        SequenceLoss { value, gradient, clipped }
    }

    fn token(&self, log_ratio: f64, advantage: f64) -> TokenLoss {
        let log_ratio = log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT);
        let ratio = log_ratio.exp();
        let bounded = ratio.clamp(1.0 - self.clip_low, 1.0 + self.clip_high);
        let (free, held) = (-advantage * ratio, -advantage * bounded);
        let clipped = held > free;
        let loss = free.max(held);
        let gradient = if clipped { 0.0 } else { free };
        match self.dual_clip {
            Some(limit) if advantage < 0.0 && loss > -advantage * limit => {
                TokenLoss { loss: -advantage * limit, gradient: 0.0, clipped }
            }
            Some(_) | None => TokenLoss { loss, gradient, clipped },
        }
    }
}

struct TokenLoss {
    loss: f64,
    gradient: f64,
    clipped: bool,
}

/// Estimators of the divergence from a reference policy, as a penalty on tokens the policy drew.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum KlEstimator {
    /// `k`: unbiased value, useless as a loss (its gradient is 1 everywhere).
    K1,
    /// `k² / 2`: unbiased gradient.
    K2,
    /// `e^−k − 1 + k`: never negative, low variance.
    K3,
}

impl KlEstimator {
    /// Value and derivative by `logp`, with `k = logp − reference` clamped to ±20.
    pub fn penalty(self, logp: f64, reference: f64) -> (f64, f64) {
        let k = (logp - reference).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT);
        match self {
            Self::K1 => (k, 1.0),
            Self::K2 => (k * k / 2.0, k),
            Self::K3 => ((-k).exp() - 1.0 + k, 1.0 - (-k).exp()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::golden::{cases, close, numbers, typed};

    #[test]
    fn clipped_surrogate_matches_the_golden_file() {
        for case in cases("grpo_loss") {
            let (inputs, expected) = (&case["inputs"], &case["expected"]);
            let surrogate = Surrogate {
                clip_low: typed(&inputs["eps_low"]),
                clip_high: typed(&inputs["eps_high"]),
                dual_clip: typed(&inputs["dual_clip_c"]),
                aggregation: typed(&inputs["agg"]),
                norm_tokens: typed(&inputs["norm_constant"]),
            };
            let masks: Vec<Vec<f64>> = typed(&inputs["mask"]);
            let masks: Vec<Vec<bool>> =
                masks.iter().map(|row| row.iter().map(|&m| m > 0.5).collect()).collect();
            let totals = Totals {
                sequences: masks.len(),
                loss_tokens: masks.iter().flatten().filter(|&&m| m).count(),
            };
            let advantages = numbers(&inputs["advantage_per_sequence"]);
            let (mut value, mut gradient, mut clipped) = (0.0, Vec::new(), 0);
            for (i, mask) in masks.iter().enumerate() {
                let new = numbers(&inputs["logp"][i]);
                let old = numbers(&inputs["logp_old"][i]);
                let tokens = TokenLogprobs { new: &new, old: &old, mask };
                let part = surrogate.sequence(totals, tokens, advantages[i]);
                value += part.value;
                gradient.extend(part.gradient);
                clipped += part.clipped;
            }
            close(&[value], &[typed(&expected["loss"])], 1e-9);
            close(&gradient, &numbers(&expected["dloss_dlogp"]), 1e-9);
            let fraction = clipped as f64 / totals.loss_tokens as f64;
            close(&[fraction], &[typed(&expected["clip_fraction"])], 1e-9);
        }
    }

    #[test]
    fn kl_penalties_match_the_golden_file() {
        for case in cases("kl_and_extreme_tokens") {
            if case["name"] != "penalty_to_reference" {
                continue;
            }
            let logp = numbers(&case["inputs"]["logp"]);
            let reference = numbers(&case["inputs"]["logp_ref"]);
            let named = [(KlEstimator::K1, "k1"), (KlEstimator::K2, "k2"), (KlEstimator::K3, "k3")];
            for (estimator, name) in named {
                let pairs = logp.iter().zip(&reference);
                let (values, grads): (Vec<f64>, Vec<f64>) =
                    pairs.map(|(&l, &r)| estimator.penalty(l, r)).unzip();
                close(&values, &numbers(&case["expected"][format!("{name}_value")]), 1e-9);
                close(&grads, &numbers(&case["expected"][format!("{name}_grad")]), 1e-9);
            }
        }
    }
}
