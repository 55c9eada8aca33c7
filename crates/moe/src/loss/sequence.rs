//! GSPO: one ratio per sequence, the geometric mean of its tokens' ratios.

use super::surrogate::clipped;
use super::{Token, TokenLoss};
use orchestrate_handoff::protocol::Hyperparameters;

/// The sequence's clipped loss on every token, with the gradient of the token's own term
/// `sg[s] π(y_t) / sg[π(y_t)]` (GSPO-token): a weight on one token scales its loss and its gradient
/// alike, so a token that a correction masks has no gradient.
pub(crate) fn losses(h: &Hyperparameters, live: &[Token]) -> Vec<TokenLoss> {
    let Some(first) = live.first() else { return Vec::new() };
    let sum: f64 = live.iter().map(|token| token.log_ratio + token.log_shift).sum();
    vec![clipped(h, first.advantage, sum / live.len() as f64); live.len()]
}
