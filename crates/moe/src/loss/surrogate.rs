//! The clipped surrogate of PPO and GRPO, with Clip-Higher and dual clip.

use super::{Clip, Ratio, Token, TokenLoss};
use orchestrate_handoff::protocol::Hyperparameters;

/// `max(−A r, −A clip(r))`; for A < 0 at most `−A c`. The gradient is 0 if a bound is active.
pub(crate) fn token(h: &Hyperparameters, token: &Token) -> TokenLoss {
    let clipped = clipped(h, token.advantage, token.log_ratio + token.log_shift);
    match h.dual_clip {
        Some(limit) if token.advantage < 0.0 && clipped.loss > -token.advantage * limit => {
            TokenLoss { loss: -token.advantage * limit, gradient: 0.0, ..clipped }
        }
        Some(_) | None => clipped,
    }
}

/// The surrogate without dual clip, and its derivative with respect to the log-ratio.
pub(crate) fn clipped(h: &Hyperparameters, advantage: f64, log_ratio: f64) -> TokenLoss {
    let ratio = Ratio::exp(log_ratio);
    let bounded = ratio.value.clamp(1.0 - h.clip_low, 1.0 + h.clip_high);
    let (free, held) = (-advantage * ratio.value, -advantage * bounded);
    if held > free {
        let clip = if advantage > 0.0 { Clip::Above } else { Clip::Below };
        TokenLoss { loss: held, gradient: 0.0, clip }
    } else {
        TokenLoss { loss: free, gradient: -advantage * ratio.slope, clip: Clip::Inside }
    }
}
