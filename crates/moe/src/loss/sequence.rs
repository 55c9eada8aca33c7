//! GSPO: one ratio per sequence, the geometric mean of its tokens' ratios.

use super::surrogate::clipped;
use super::{Token, TokenLoss};
use orchestrate_handoff::protocol::Hyperparameters;

/// The sequence's clipped loss on every token, in the token form: `∂/∂logp_t` of the token's own
/// term, so that a weight on one token scales its loss and its gradient alike.
pub(crate) fn losses(h: &Hyperparameters, live: &[Token]) -> Vec<TokenLoss> {
    let Some(first) = live.first() else { return Vec::new() };
    let sum: f64 = live.iter().map(|token| token.log_ratio + token.log_shift).sum();
    let ratio = (sum / live.len() as f64).exp();
    vec![clipped(h, first.advantage, ratio); live.len()]
}
