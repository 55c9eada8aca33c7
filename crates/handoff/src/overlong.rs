//! A soft penalty on long episodes, added to their reward.

use serde::{Deserialize, Serialize};

/// Range over which the penalty grows, in tokens written by the policy.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Overlong {
    /// Longer episodes get the full penalty of −1.
    pub max_tokens: u64,
    /// Number of tokens before `max_tokens` over which the penalty grows from 0 to −1; 1 to
    /// `max_tokens`.
    pub cache_tokens: u64,
}

impl Overlong {
    /// Penalty, −1 to 0, added to the reward of an episode with `tokens` response tokens.
    pub fn penalty(&self, tokens: u64) -> f64 {
        let free = self.max_tokens.saturating_sub(self.cache_tokens);
        if tokens > self.max_tokens {
            return -1.0;
        }
        -(tokens.saturating_sub(free) as f64 / self.cache_tokens.max(1) as f64)
    }
}
