//! Constant weights against the mismatch of engine and trainer, from ρ = trainer / engine at the
//! weights of the rollout. They change no denominator.

use super::{Ratio, Token};
use orchestrate_handoff::protocol::{Hyperparameters, ImportanceCorrection, ImportanceLevel};

/// Weight of each loss token of a sequence from its `ln ρ`, and how many of them the correction
/// truncated or masked.
pub fn weights(h: &Hyperparameters, log_ratios: &[f64]) -> (Vec<f64>, usize) {
    let sum: f64 = log_ratios.iter().sum();
    let weigh = |log_ratio: f64| {
        let ratio = Ratio::exp(log_ratio).value;
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
            let (weight, out) = weigh(sum / log_ratios.len().max(1) as f64);
            vec![(if weight > 0.0 { 1.0 } else { 0.0 }, out); log_ratios.len()]
        }
        (_, ImportanceLevel::Sequence) => vec![weigh(sum); log_ratios.len()],
        (_, ImportanceLevel::Token) => log_ratios.iter().map(|&log| weigh(log)).collect(),
    };
    let corrected = pairs.iter().filter(|(_, corrected)| *corrected).count();
    (pairs.into_iter().map(|(weight, _)| weight).collect(), corrected)
}

fn kept(ratio: f64, low: f64, high: f64) -> f64 {
    if (low..=high).contains(&ratio) { ratio } else { 0.0 }
}

/// Whether the policy has moved away from a sequence with a negative advantage: the mean of
/// `old − new` exceeds `delta`.
pub(crate) fn is_off_policy(delta: Option<f64>, live: &[Token]) -> bool {
    let (Some(delta), Some(first)) = (delta, live.first()) else { return false };
    let moved: f64 = live.iter().map(|token| -token.log_ratio).sum();
    first.advantage < 0.0 && moved / live.len() as f64 > delta
}
