//! The section `[reward]`: how the log of the hidden tests becomes a reward.

use crate::grading::{GradingRules, LogGrader, grade_as_r2e, grade_by_summary};
use orchestrate_settings::{setting_types, settings};
use orchestrate_tasks::swe::Harness;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

setting_types!(RewardCompat);

settings! {
    /// How the log of the hidden tests becomes a reward.
    #[derive(Copy, Eq)]
    [reward] pub RewardSection -> RewardSettings;

    /// Whose rules turn pytest's short summary into a reward.
    compat: RewardCompat = RewardCompat::default();
    /// Version of SWE-bench's harness whose rules grade SWE-bench tasks.
    harness: Harness = Harness::default();
    /// Whether training episodes of SWE-bench tasks are graded strictly: changes to tests, and to
    /// settings of pytest and Python, are left out, and the tests' exit status must agree with their
    /// results. Evaluation always follows the official harness, which applies every change.
    strict: bool = true;
}

impl RewardSettings {
    /// The rules by which a grader judges logs.
    pub fn rules(self) -> GradingRules {
        GradingRules {
            grade_log: self.compat.log_grader(),
            harness: self.harness,
            exclude_test_changes: self.compat == RewardCompat::Strict,
            strict_swe_bench: self.strict,
        }
    }
}

/// Whose rules give the reward.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum RewardCompat {
    /// Every expected test must have its expected status in the last summary of the log, and no
    /// other result may appear. Changes that an agent makes to tests or to pytest's own files are
    /// not part of the graded tree.
    #[default]
    Strict,
    /// R2E-Gym's own rules, to the letter: the first summary counts, which a test may print, and a
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
