//! The section `[reward]`: how the log of the hidden tests becomes a reward.

use crate::grading::{Judge, Rules, judge_as_r2e, judge_by_summary};
use orchestrate_settings::{setting_types, settings};
use orchestrate_tasks::swe::Harness;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

setting_types!(RewardCompat, HarnessVersion);

settings! {
    /// How the log of the hidden tests becomes a reward.
    #[derive(Copy, Eq)]
    [reward] pub RewardSection -> RewardSettings;

    /// Whose rules turn pytest's short summary into a reward.
    compat: RewardCompat = RewardCompat::default();
    /// Version of SWE-bench's harness whose rules grade SWE-bench tasks.
    harness: HarnessVersion = HarnessVersion::default();
}

impl RewardSettings {
    /// The rules by which a grader judges logs.
    pub fn rules(self) -> Rules {
        Rules {
            judge: self.compat.judge(),
            harness: self.harness.into(),
            tests_are_ours: self.compat == RewardCompat::Strict,
        }
    }
}

/// A version of SWE-bench's harness.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum HarnessVersion {
    /// The rules of published numbers up to 2026.
    #[default]
    #[serde(rename = "4.1.0")]
    V4_1_0,
    /// Skipped tests, forged results and truncated names no longer count as solved.
    #[serde(rename = "5.0.2")]
    V5_0_2,
}

impl From<HarnessVersion> for Harness {
    fn from(version: HarnessVersion) -> Self {
        match version {
            HarnessVersion::V4_1_0 => Self::V4_1_0,
            HarnessVersion::V5_0_2 => Self::V5_0_2,
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
    /// The function that applies these rules to a log.
    pub fn judge(self) -> Judge {
        match self {
            Self::Strict => judge_by_summary,
            Self::R2e => judge_as_r2e,
        }
    }
}
