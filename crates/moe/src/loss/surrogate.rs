//! The clipped surrogate of PPO and GRPO, with Clip-Higher and dual clip.

use super::{Clip, Token, TokenLoss};
use orchestrate_handoff::protocol::Hyperparameters;

/// `max(−A r, −A clip(r))`; for A < 0 at most `−A c`. No gradient flows where a bound holds.
pub(crate) fn token(h: &Hyperparameters, token: &Token) -> TokenLoss {
    let clipped = clipped(h, token.advantage, (token.log_ratio + token.log_shift).exp());
    match h.dual_clip {
        Some(limit) if token.advantage < 0.0 && clipped.loss > -token.advantage * limit => {
            TokenLoss { loss: -token.advantage * limit, gradient: 0.0, ..clipped }
        }
        Some(_) | None => clipped,
    }
}

/// The surrogate without dual clip; its derivative by the logarithm of the ratio.
pub(crate) fn clipped(h: &Hyperparameters, advantage: f64, ratio: f64) -> TokenLoss {
    let bounded = ratio.clamp(1.0 - h.clip_low, 1.0 + h.clip_high);
    let (free, held) = (-advantage * ratio, -advantage * bounded);
    if held > free {
        let clip = if advantage > 0.0 { Clip::Above } else { Clip::Below };
        TokenLoss { loss: held, gradient: 0.0, clip }
    } else {
        TokenLoss { loss: free, gradient: free, clip: Clip::Inside }
    }
}
