//! F(τ): how many tokens are far more, or far less, likely in the trainer than in the engine.

use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// Share of loss tokens with `max(ρ, 1/ρ) > τ`, `ρ = p_train / p_infer`, by τ. Shares are 0 to 1 and
/// fall with τ. Serialized as an object whose keys are τ as text.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
#[serde(transparent)]
pub struct ExtremeTokens(BTreeMap<String, f64>);

/// Values of τ for which both trainers report a share.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Threshold {
    /// τ = 1.05.
    T1_05,
    /// τ = 1.2.
    T1_2,
    /// τ = 1.5.
    T1_5,
    /// τ = 2: the one that collapse detection watches.
    T2,
    /// τ = 5.
    T5,
    /// τ = 10.
    T10,
}

impl Threshold {
    const fn key(self) -> &'static str {
        match self {
            Self::T1_05 => "1.05",
            Self::T1_2 => "1.2",
            Self::T1_5 => "1.5",
            Self::T2 => "2",
            Self::T5 => "5",
            Self::T10 => "10",
        }
    }
}

impl ExtremeTokens {
    /// The share of tokens beyond a threshold; `None` where the trainer did not report it.
    pub fn beyond(&self, threshold: Threshold) -> Option<f64> {
        self.0.get(threshold.key()).copied()
    }
}

impl From<BTreeMap<String, f64>> for ExtremeTokens {
    fn from(shares: BTreeMap<String, f64>) -> Self {
        Self(shares)
    }
}
