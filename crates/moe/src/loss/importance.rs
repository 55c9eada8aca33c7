//! Constant weights against the mismatch of sampler and trainer, from ρ = trainer / sampler at
//! the weights of the rollout. They change no denominator.

use super::{LOG_RATIO_LIMIT, Token};
use orchestrate_handoff::protocol::{Hyperparameters, ImportanceCorrection, ImportanceLevel};

/// Weight of each loss token of a sequence from its ln ρ, and how many of them the correction
/// truncated or left out.
pub fn weights(h: &Hyperparameters, log_ratios: &[f64]) -> (Vec<f64>, usize) {
    let ratio = |log: f64| log.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp();
    let sum: f64 = log_ratios.iter().sum();
    let weigh = |ratio: f64| {
        let weight = match h.importance_correction {
            ImportanceCorrection::None => ratio,
            ImportanceCorrection::Tis => ratio.min(h.importance_high),
            ImportanceCorrection::Mis => kept(ratio, f64::NEG_INFINITY, h.importance_high),
            ImportanceCorrection::Icepop | ImportanceCorrection::GeometricMask => {
                kept(ratio, h.importance_low, h.importance_high)
            }
        };
        (weight, weight < ratio)
    };
    let pairs: Vec<(f64, bool)> = match (h.importance_correction, h.importance_level) {
        (ImportanceCorrection::None, _) => vec![(1.0, false); log_ratios.len()],
        (ImportanceCorrection::GeometricMask, _) => {
            let (weight, out) = weigh(ratio(sum / log_ratios.len().max(1) as f64));
            vec![(if weight > 0.0 { 1.0 } else { 0.0 }, out); log_ratios.len()]
        }
        (_, ImportanceLevel::Sequence) => vec![weigh(ratio(sum)); log_ratios.len()],
        (_, ImportanceLevel::Token) => log_ratios.iter().map(|&log| weigh(ratio(log))).collect(),
    };
    let corrected = pairs.iter().filter(|(_, corrected)| *corrected).count();
    (pairs.into_iter().map(|(weight, _)| weight).collect(), corrected)
}

fn kept(ratio: f64, low: f64, high: f64) -> f64 {
    if (low..=high).contains(&ratio) { ratio } else { 0.0 }
}

/// Whether a sequence with a negative advantage has been left behind by the policy: the mean of
/// `old − new` exceeds `delta`.
pub(crate) fn is_off_policy(delta: Option<f64>, live: &[Token]) -> bool {
    let (Some(delta), Some(first)) = (delta, live.first()) else { return false };
    let left: f64 = live.iter().map(|token| -token.log_ratio).sum();
    first.advantage < 0.0 && left / live.len() as f64 > delta
}
