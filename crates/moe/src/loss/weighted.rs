//! Log-prob times a constant weight: CISPO and `MiniRL`.

use super::surrogate::clipped;
use super::{Clip, Ratio, Token, TokenLoss};
use orchestrate_handoff::protocol::Hyperparameters;

/// CISPO: the clipped ratio is the weight, so a clipped token keeps a gradient. With `clip_low = 1`
/// there is no lower bound.
pub(crate) fn cispo(h: &Hyperparameters, token: &Token) -> TokenLoss {
    let ratio = Ratio::exp(token.log_ratio).value;
    let weight = ratio.clamp(1.0 - h.clip_low, 1.0 + h.clip_high);
    let clip = if ratio > weight {
        Clip::Above
    } else if ratio < weight {
        Clip::Below
    } else {
        Clip::Inside
    };
    weighted(token, weight, clip)
}

/// `MiniRL`: the capped ratio to the engine is the weight; tokens that PPO would clip have weight 0.
pub(crate) fn minirl(h: &Hyperparameters, token: &Token) -> TokenLoss {
    let clip = clipped(h, token.advantage, token.log_ratio).clip;
    let weight = match clip {
        Clip::Inside => Ratio::exp(token.log_sampler_ratio).value.min(h.importance_high),
        Clip::Below | Clip::Above => 0.0,
    };
    weighted(token, weight, clip)
}

fn weighted(token: &Token, weight: f64, clip: Clip) -> TokenLoss {
    let slope = -token.advantage * weight;
    TokenLoss { loss: slope * token.new, gradient: slope, clip }
}
