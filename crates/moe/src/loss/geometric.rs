//! GMPO and RSPO: the geometric mean of ratios that are clipped token by token, in log space.

use super::{Clip, Ratio, Token, TokenLoss};
use orchestrate_handoff::protocol::{Hyperparameters, RouterShift};

/// `−A exp(mean k)` on every token, where `k` is the log-ratio, clipped in the direction that the
/// advantage rewards. Clipped tokens have gradient 0.
pub(crate) fn losses(h: &Hyperparameters, live: &[Token]) -> Vec<TokenLoss> {
    let Some(first) = live.first() else { return Vec::new() };
    let advantage = first.advantage;
    let (before, after) = match h.router_shift {
        RouterShift::None => (0.0, 0.0),
        RouterShift::BeforeClip => (1.0, 0.0),
        RouterShift::AfterClip => (0.0, 1.0),
    };
    let held: Vec<(f64, Clip)> = live
        .iter()
        .map(|token| {
            let free = token.log_ratio + before * token.log_shift;
            let (k, clip) = if advantage > 0.0 && free > h.clip_high {
                (h.clip_high, Clip::Above)
            } else if advantage < 0.0 && free < -h.clip_low {
                (-h.clip_low, Clip::Below)
            } else {
                (free, Clip::Inside)
            };
            (k + after * token.log_shift, clip)
        })
        .collect();
    let sum: f64 = held.iter().map(|(k, _)| k).sum();
    let mean = Ratio::exp(sum / live.len() as f64);
    held.into_iter()
        .map(|(_, clip)| {
            let gradient = if clip == Clip::Inside { -advantage * mean.slope } else { 0.0 };
            TokenLoss { loss: -advantage * mean.value, gradient, clip }
        })
        .collect()
}
