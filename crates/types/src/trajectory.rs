//! The tokens of one episode, exactly as the engine processed and sampled them.

use crate::{PolicyVersion, TokenId};
use serde::{Deserialize, Serialize};

/// The arrays of a trajectory differ in length, or a turn ends after the last token.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("trajectory array `{array}` has length {found}, expected {expected}")]
pub struct LengthMismatch {
    array: &'static str,
    found: usize,
    expected: usize,
}

/// The position of one turn in a trajectory: tokens `prompt_end..output_end` were sampled.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct TurnSpan {
    /// Number of tokens in the prompt of this turn, which is the index of its first sampled token.
    pub prompt_end: usize,
    /// Index one past the last sampled token.
    pub output_end: usize,
    /// Policy version of the turn's first token.
    pub policy_version: PolicyVersion,
    /// Number of prompt tokens that the engine took from its prefix cache.
    pub cached_tokens: usize,
    /// Why the engine stopped: `stop`, `length` or `abort`.
    pub finish: String,
}

/// A multi-turn trajectory of `T` tokens: prompt, responses and observations.
///
/// Token ids are those that the engine processed and sampled; no text was rendered or tokenized
/// again.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Trajectory {
    token_ids: Vec<TokenId>,
    loss_mask: Vec<u8>,
    rollout_logprobs: Vec<f32>,
    policy_versions: Vec<i64>,
    turns: Vec<TurnSpan>,
}

impl Trajectory {
    /// Builds a trajectory after checking that all arrays have `token_ids.len()` entries and that
    /// no turn ends after the last token.
    ///
    /// * `token_ids` `[T]`
    /// * `loss_mask` `[T]`, 1 = sampled by the policy and part of the loss
    /// * `rollout_logprobs` `[T]`, nats, ≤ 0; 0.0 where the mask is 0 (must not be read there)
    /// * `policy_versions` `[T]`, the version that first processed the token
    ///
    /// # Errors
    /// [`LengthMismatch`] names the first array with a different length, or `turns`.
    pub fn new(
        token_ids: Vec<TokenId>,
        loss_mask: Vec<u8>,
        rollout_logprobs: Vec<f32>,
        policy_versions: Vec<i64>,
        turns: Vec<TurnSpan>,
    ) -> Result<Self, LengthMismatch> {
        let expected = token_ids.len();
        let lengths = [
            ("loss_mask", loss_mask.len()),
            ("rollout_logprobs", rollout_logprobs.len()),
            ("policy_versions", policy_versions.len()),
        ];
        for (array, found) in lengths {
            if found != expected {
                return Err(LengthMismatch { array, found, expected });
            }
        }
        if let Some(turn) = turns.iter().find(|t| t.output_end > expected) {
            return Err(LengthMismatch { array: "turns", found: turn.output_end, expected });
        }
        Ok(Self { token_ids, loss_mask, rollout_logprobs, policy_versions, turns })
    }

    /// Token ids, `[T]`.
    pub fn token_ids(&self) -> &[TokenId] {
        &self.token_ids
    }

    /// Loss mask, `[T]`: 1 for tokens that the policy sampled, else 0.
    pub fn loss_mask(&self) -> &[u8] {
        &self.loss_mask
    }

    /// Log-probabilities under the sampling engine, `[T]`, in nats; valid only where the mask is 1.
    pub fn rollout_logprobs(&self) -> &[f32] {
        &self.rollout_logprobs
    }

    /// Policy version per token, `[T]`.
    pub fn policy_versions(&self) -> &[i64] {
        &self.policy_versions
    }

    /// The turns, in order.
    pub fn turns(&self) -> &[TurnSpan] {
        &self.turns
    }

    /// Number of tokens, `T`.
    pub fn len(&self) -> usize {
        self.token_ids.len()
    }

    /// Whether there are no tokens.
    pub fn is_empty(&self) -> bool {
        self.token_ids.is_empty()
    }

    /// Number of tokens in the loss: those with mask 1.
    pub fn response_tokens(&self) -> usize {
        self.loss_mask.iter().map(|&m| usize::from(m == 1)).sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn arrays_of_different_length_are_rejected() {
        let error = Trajectory::new(vec![1, 2], vec![0], vec![0.0; 2], vec![0; 2], vec![]);
        assert_eq!(
            error.unwrap_err().to_string(),
            "trajectory array `loss_mask` has length 1, expected 2"
        );
    }
}
