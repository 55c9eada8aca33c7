//! One episode's tokens, exactly as the engine saw and sampled them.

use crate::{PolicyVersion, TokenId};
use serde::{Deserialize, Serialize};

/// Arrays of one trajectory that should have the same length, but do not.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("trajectory array `{array}` has length {found}, expected {expected}")]
pub struct LengthMismatch {
    array: &'static str,
    found: usize,
    expected: usize,
}

/// Where one turn lies in the token buffer: `prompt_end..output_end` was sampled.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct TurnSpan {
    /// Tokens sent as the prompt of this generation (all before it included).
    pub prompt_end: usize,
    /// Tokens after the sampled ones were appended.
    pub output_end: usize,
    /// Policy version that sampled this turn.
    pub policy_version: PolicyVersion,
    /// Prompt tokens the engine answered from its prefix cache.
    pub cached_tokens: usize,
    /// Why the engine stopped: `stop`, `length` or `abort`.
    pub finish: String,
}

/// One whole multi-turn trajectory of `T` tokens: prompt, responses, observations.
///
/// Built by appending; token ids are never re-rendered or re-tokenised.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Trajectory {
    token_ids: Vec<TokenId>,
    loss_mask: Vec<u8>,
    rollout_logprobs: Vec<f32>,
    policy_versions: Vec<i64>,
    turns: Vec<TurnSpan>,
}

impl Trajectory {
    /// Checks that all arrays have `token_ids.len()` entries and that turns lie inside.
    ///
    /// * `token_ids` `[T]`
    /// * `loss_mask` `[T]`, 1 = sampled by the policy
    /// * `rollout_logprobs` `[T]`, nats, ≤ 0, 0.0 where the mask is 0 (not to be read there)
    /// * `policy_versions` `[T]`, the version that processed the token first
    ///
    /// # Errors
    /// [`LengthMismatch`] names the first array that disagrees.
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

    /// Token ids `[T]`.
    pub fn token_ids(&self) -> &[TokenId] {
        &self.token_ids
    }

    /// Loss mask `[T]`: 1 where the policy wrote the token.
    pub fn loss_mask(&self) -> &[u8] {
        &self.loss_mask
    }

    /// Log-probabilities under the sampling engine `[T]`, nats; read only where the mask is 1.
    pub fn rollout_logprobs(&self) -> &[f32] {
        &self.rollout_logprobs
    }

    /// Policy version per token `[T]`.
    pub fn policy_versions(&self) -> &[i64] {
        &self.policy_versions
    }

    /// The turns, in order.
    pub fn turns(&self) -> &[TurnSpan] {
        &self.turns
    }

    /// Number of tokens `T`.
    pub fn len(&self) -> usize {
        self.token_ids.len()
    }

    /// Whether there are no tokens at all.
    pub fn is_empty(&self) -> bool {
        self.token_ids.is_empty()
    }

    /// Number of tokens the policy wrote.
    pub fn response_tokens(&self) -> usize {
        self.loss_mask.iter().map(|&m| usize::from(m == 1)).sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn arrays_of_unequal_length_are_refused() {
        let error = Trajectory::new(vec![1, 2], vec![0], vec![0.0; 2], vec![0; 2], vec![]);
        assert_eq!(
            error.unwrap_err().to_string(),
            "trajectory array `loss_mask` has length 1, expected 2"
        );
    }
}
