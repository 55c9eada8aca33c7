//! The rules that turn a test log into a verdict.

use orchestrate_tasks::swe::Harness;
use orchestrate_tasks::{SummaryRule, TestStatus, Verdict, grade_by};
use std::collections::BTreeMap;

/// Turns the log of a task's hidden tests into a verdict, given the status that each test must have.
/// [`grade_by_summary`] fits every family
/// that prints pytest's short test summary.
pub type LogGrader = fn(&BTreeMap<String, TestStatus>, &str) -> Verdict;

/// The rules by which changes are graded.
#[derive(Debug, Clone, Copy)]
pub struct GradingRules {
    /// Grades logs with pytest's short test summary.
    pub grade_log: LogGrader,
    /// Version of SWE-bench's harness whose rules apply to SWE-bench tasks.
    pub harness: Harness,
    /// Whether changes to tests, and to files that pytest and Python read by themselves, are left
    /// out of the graded tree, and results come from the reporter instead of the log.
    pub exclude_test_changes: bool,
    /// Whether SWE-bench tasks too are graded strictly: false for evaluation, which follows the
    /// harness to the letter.
    pub strict_swe_bench: bool,
}

impl GradingRules {
    /// The strict rules, with `grade_log` for logs with a summary.
    pub fn new(grade_log: LogGrader) -> Self {
        Self {
            grade_log,
            harness: Harness::default(),
            exclude_test_changes: true,
            strict_swe_bench: true,
        }
    }

    /// Whether the strict rules hold for micro, repair and R2E-Gym tasks.
    pub(crate) fn is_strict(self) -> bool {
        self.exclude_test_changes
    }

    /// The rules for evaluation, which grades SWE-bench tasks as the official harness does.
    #[must_use]
    pub fn for_evaluation(self) -> Self {
        Self { strict_swe_bench: false, ..self }
    }
}

/// The strict rule for pytest's short test summary: every expected test must have its expected
/// status.
pub fn grade_by_summary(expected: &BTreeMap<String, TestStatus>, log: &str) -> Verdict {
    orchestrate_tasks::grade(log, expected)
}

/// R2E-Gym's own rule for pytest's short test summary, including its known defects.
pub fn grade_as_r2e(expected: &BTreeMap<String, TestStatus>, log: &str) -> Verdict {
    grade_by(SummaryRule::R2e, log, expected)
}

#[cfg(test)]
mod tests {
    use orchestrate_tasks::TestStatus;

    #[test]
    fn official_rule_has_known_defects_and_strict_rule_does_not() {
        let expected = [("a".to_owned(), TestStatus::Passed)].into();
        let forged = "short test summary info\nPASSED t::a\nshort test summary info\nFAILED t::a";
        let nameless = "short test summary info\nERROR t.py - ImportError";
        for log in [forged, nameless] {
            let reward = |compat: crate::RewardCompat| (compat.log_grader())(&expected, log).reward;
            assert!(reward(crate::RewardCompat::Strict) < 0.5, "{log}");
            assert!(reward(crate::RewardCompat::R2e) > 0.5, "{log}");
        }
    }
}
