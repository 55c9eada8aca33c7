//! SAPO: a sigmoid around ratio 1 in place of a clip.

use super::{Clip, Ratio, Token, TokenLoss};
use orchestrate_handoff::protocol::Hyperparameters;

/// `−A · 4/τ · σ(τ (r − 1))`, of slope `−A` at r = 1.
pub(crate) fn token(h: &Hyperparameters, token: &Token) -> TokenLoss {
    let tau = if token.advantage > 0.0 { h.sapo_tau.0 } else { h.sapo_tau.1 };
    let ratio = Ratio::exp(token.log_ratio);
    let gate = 1.0 / (1.0 + libm::exp(-tau * (ratio.value - 1.0)));
    TokenLoss {
        loss: -token.advantage * gate * 4.0 / tau,
        gradient: -token.advantage * 4.0 * gate * (1.0 - gate) * ratio.slope,
        clip: Clip::Inside,
    }
}
