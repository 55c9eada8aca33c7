//! The `[reward]` section: how the log of the hidden tests becomes a reward.

use crate::grading::{GradingRules, LogGrader, grade_as_r2e, grade_by_summary};
use orchestrate_tasks::swe::Harness;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// How test logs are judged. Every field may be left out.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct RewardSection {
    /// Whose rule gives the reward on pytest's short summary. Default "strict".
    pub compat: RewardCompat,
    /// Which version of SWE-bench's harness judges SWE-bench tasks. Default "4.1.0".
    pub harness: Harness,
}

impl RewardSection {
    /// The rules.
    pub fn rules(self) -> GradingRules {
        GradingRules {
            grade_log: self.compat.log_grader(),
            harness: self.harness,
            exclude_test_changes: self.compat == RewardCompat::Strict,
        }
    }
}

/// Whose rule gives the reward.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum RewardCompat {
    /// Every expected test with its status and nothing else, by the last summary of the log; changes
    /// that an agent makes to tests or to pytest's own files do not reach them.
    #[default]
    Strict,
    /// R2E-Gym's own, to the letter: the first summary counts, which a test may print, and a
    /// result without a test's name counts as any test. For comparison with published numbers.
    R2e,
}

impl RewardCompat {
    /// The rule.
    pub fn log_grader(self) -> LogGrader {
        match self {
            Self::Strict => grade_by_summary,
            Self::R2e => grade_as_r2e,
        }
    }
}
