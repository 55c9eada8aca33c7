//! A soft punishment of long episodes, added to their reward.

use serde::{Deserialize, Serialize};

/// Where the punishment begins and where it is whole, in tokens the policy wrote.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Overlong {
    /// Longer than this costs 1.
    pub max_tokens: u64,
    /// Over so many tokens before, the cost rises from 0 to 1; 1 to `max_tokens`.
    pub cache_tokens: u64,
}

impl Overlong {
    /// What is added to the reward of an episode of `tokens` response tokens: −1 to 0.
    pub fn penalty(&self, tokens: u64) -> f64 {
        let free = self.max_tokens.saturating_sub(self.cache_tokens);
        if tokens > self.max_tokens {
            return -1.0;
        }
        -(tokens.saturating_sub(free) as f64 / self.cache_tokens.max(1) as f64)
    }
}
