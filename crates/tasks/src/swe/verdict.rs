//! Turns test statuses into a verdict, in the format of the harness's `report.json`.

use super::reading::{self, Reading};
use super::status::{Status, StatusMap};
use super::{EvalType, Harness, LogError, SweRow};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use std::io::BufRead;

/// Tests of one list, by outcome, in the list's order. A test may be in neither.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Outcomes {
    /// Tests that count as passed.
    pub success: Vec<String>,
    /// Tests that count as failed.
    pub failure: Vec<String>,
}

impl Outcomes {
    /// Whether no test failed; true for an empty list.
    fn all(&self) -> bool {
        self.failure.is_empty()
    }
}

/// Outcomes of all lists.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "SCREAMING_SNAKE_CASE")]
pub struct TestsStatus {
    /// Tests that the patch must make pass.
    pub fail_to_pass: Outcomes,
    /// Tests that must keep passing.
    pub pass_to_pass: Outcomes,
    /// Always empty: the harness writes it.
    pub fail_to_fail: Outcomes,
    /// Always empty: the harness writes it.
    pub pass_to_fail: Outcomes,
}

/// The harness's verdict on a task.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Resolution {
    /// Every test has the required outcome.
    Full,
    /// Some tests of `FAIL_TO_PASS` pass, and no test of `PASS_TO_PASS` broke.
    Partial,
    /// Anything else.
    No,
}

impl TestsStatus {
    /// The verdict.
    pub fn resolution(&self) -> Resolution {
        match (&self.fail_to_pass, &self.pass_to_pass) {
            (_, kept) if !kept.all() => Resolution::No,
            (fixed, _) if fixed.all() => Resolution::Full,
            (fixed, _) if !fixed.success.is_empty() => Resolution::Partial,
            _ => Resolution::No,
        }
    }
}

/// One instance's entry in `report.json`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[expect(clippy::struct_excessive_bools, reason = "the harness's own format")]
pub struct Report {
    /// Version whose rules were applied, such as `swebench-4.1.0`. The harness itself neither
    /// writes nor reads this key.
    #[serde(with = "super::reported")]
    pub harness: Harness,
    /// Whether the prediction has no patch.
    #[serde(rename = "patch_is_None")]
    pub patch_is_none: bool,
    /// Whether the prediction has a patch.
    pub patch_exists: bool,
    /// Whether the log can be graded.
    pub patch_successfully_applied: bool,
    /// Whether the task is solved.
    pub resolved: bool,
    /// Whether the environment, not the patch, is the reason why it was not graded. Version 5 only.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub infra_failure: Option<bool>,
    /// The suspected problem of the environment. Version 5 only.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub infra_failure_reason: Option<String>,
    /// Why the log was not graded. The harness itself neither writes nor reads this key.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub not_graded: Option<String>,
    /// Outcome of each test, if the log was graded.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tests_status: Option<TestsStatus>,
}

impl Report {
    /// The report of an instance for which there is no patch.
    pub fn without_patch(harness: Harness) -> Self {
        Self { patch_is_none: true, patch_exists: false, ..Self::ungraded(harness) }
    }

    fn ungraded(harness: Harness) -> Self {
        Self {
            harness,
            patch_is_none: false,
            patch_exists: true,
            patch_successfully_applied: false,
            resolved: false,
            infra_failure: (harness == Harness::V5_0_2).then_some(false),
            infra_failure_reason: None,
            not_graded: None,
            tests_status: None,
        }
    }

    /// The content of `report.json`: an object with this entry under `instance_id`.
    ///
    /// # Errors
    /// Never in practice: everything in a report can be written.
    pub fn file(&self, instance_id: &str) -> serde_json::Result<Value> {
        Ok(Value::Object(Map::from_iter([(instance_id.to_owned(), serde_json::to_value(self)?)])))
    }
}

/// Grades the log of one run of `row`'s evaluation script by the rules of `harness`.
///
/// # Errors
/// If reading fails, no log parser is known for the repository, or the harness itself would raise
/// an exception. The harness counts all of these as errors of the instance and writes no report.
pub fn grade(row: &SweRow, harness: Harness, log: impl BufRead) -> Result<Report, LogError> {
    let parser = row.log_parser(harness).ok_or_else(|| LogError::Parser(row.repo.clone()))?;
    let tests = row.fail_to_pass.iter().chain(&row.pass_to_pass);
    let wanted = StatusMap::for_tests(tests.map(String::as_str));
    let mut report = Report::ungraded(harness);
    let falls_back = row.family().reads_whole_log();
    match reading::read(parser, harness, falls_back, log, &wanted)? {
        Reading::DidNotRun(why) => {
            if harness == Harness::V5_0_2 {
                report.infra_failure = Some(why.infra.is_some_and(|infra| infra.certain));
                report.infra_failure_reason = why.infra.map(|infra| infra.reason.to_owned());
            }
            report.not_graded = Some(why.reason);
        }
        Reading::Ran(statuses) => {
            let rules = Rules { harness, eval_type: row.eval_type(harness), statuses };
            let status = TestsStatus {
                fail_to_pass: rules.outcomes(&row.fail_to_pass, List::FailToPass),
                pass_to_pass: rules.outcomes(&row.pass_to_pass, List::PassToPass),
                ..TestsStatus::default()
            };
            report.patch_successfully_applied = true;
            report.resolved = status.resolution() == Resolution::Full;
            report.tests_status = Some(status);
        }
    }
    Ok(report)
}

/// The two lists of a row, which version 5 treats differently.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum List {
    FailToPass,
    PassToPass,
}

/// How a version of the harness judges a test.
#[derive(Debug)]
struct Rules {
    harness: Harness,
    eval_type: EvalType,
    statuses: StatusMap,
}

impl Rules {
    fn outcomes(&self, tests: &[String], list: List) -> Outcomes {
        let mut outcomes = Outcomes::default();
        for test in tests {
            match self.outcome(test, list) {
                Some(true) => outcomes.success.push(test.clone()),
                Some(false) => outcomes.failure.push(test.clone()),
                None => {}
            }
        }
        outcomes
    }

    /// Whether `test` counts as a success, as a failure, or not at all.
    fn outcome(&self, test: &str, list: List) -> Option<bool> {
        if self.eval_type == EvalType::FailOnly {
            return Some(self.statuses.get(test) != Some(&Status::Failed));
        }
        let status = match self.harness {
            Harness::V4_1_0 => self.statuses.get(test),
            Harness::V5_0_2 => self.statuses.get(test).or_else(|| self.of_truncated(test)),
        };
        match (status, self.harness) {
            (Some(Status::Passed | Status::Xfail), _) => Some(true),
            (None | Some(Status::Failed | Status::Error), _) => Some(false),
            (Some(Status::Skipped), Harness::V5_0_2) => Some(list == List::PassToPass),
            // To version 4 a skipped test is not a result, so that skipping all of them resolves.
            (Some(Status::Skipped), Harness::V4_1_0) | (Some(Status::Other(_)), _) => None,
        }
    }

    /// The status of a test whose name is truncated inside its parameters, as 676 names of Verified
    /// are: that of the first test that starts with it, if all such tests agree on success.
    fn of_truncated(&self, test: &str) -> Option<&Status> {
        if test.matches('[').count() <= test.matches(']').count() {
            return None;
        }
        let mut candidates =
            self.statuses.iter().filter(|(name, _)| name.starts_with(test)).map(|(_, s)| s);
        let first = candidates.next()?;
        candidates.all(|other| other.is_success() == first.is_success()).then_some(first)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rules(harness: Harness, statuses: &[(&str, &str)]) -> Rules {
        let mut map = StatusMap::new();
        for (name, word) in statuses {
            map.insert(name, Status::of(word));
        }
        Rules { harness, eval_type: EvalType::PassAndFail, statuses: map }
    }

    #[test]
    fn each_status_counts_by_the_rules_of_the_version() {
        let (yes, no) = (Some(true), Some(false));
        for (word, v4, fixed, kept) in [
            ("PASSED", yes, yes, yes),
            ("XFAIL", yes, yes, yes),
            ("FAILED", no, no, no),
            ("ERROR", no, no, no),
            ("SKIPPED", None, no, yes),
            ("ERROR:", None, None, None),
        ] {
            for list in [List::FailToPass, List::PassToPass] {
                assert_eq!(rules(Harness::V4_1_0, &[("t", word)]).outcome("t", list), v4, "{word}");
            }
            let v5 = rules(Harness::V5_0_2, &[("t", word)]);
            assert_eq!(v5.outcome("t", List::FailToPass), fixed, "{word}");
            assert_eq!(v5.outcome("t", List::PassToPass), kept, "{word}");
        }
        for harness in [Harness::V4_1_0, Harness::V5_0_2] {
            assert_eq!(rules(harness, &[]).outcome("t", List::PassToPass), no);
        }
    }

    #[test]
    fn a_truncated_name_stands_for_tests_that_agree() {
        let same = [("t[a b]", "PASSED"), ("t[a c]", "XFAIL"), ("t[x]", "FAILED")];
        let differ = [("t[a b]", "PASSED"), ("t[a c]", "SKIPPED")];
        let v5 = |statuses| rules(Harness::V5_0_2, statuses).outcome("t[a", List::FailToPass);
        assert_eq!(v5(&same), Some(true));
        assert_eq!(v5(&differ), Some(false));
        let v4 = rules(Harness::V4_1_0, &same);
        assert_eq!(v4.outcome("t[a", List::FailToPass), Some(false));
        let whole = rules(Harness::V5_0_2, &same).outcome("t", List::FailToPass);
        assert_eq!(whole, Some(false));
    }

    #[test]
    fn an_unreported_test_passes_if_only_failures_are_reported() {
        let rules = Rules {
            eval_type: EvalType::FailOnly,
            ..rules(Harness::V5_0_2, &[("a", "FAILED"), ("b", "ERROR")])
        };
        let outcomes = rules.outcomes(&["a".into(), "b".into(), "c".into()], List::FailToPass);
        assert_eq!(
            (outcomes.success, outcomes.failure),
            (vec!["b".into(), "c".into()], vec!["a".into()])
        );
    }

    #[test]
    fn resolution_depends_on_both_lists() {
        let list = |success: usize, failure: usize| Outcomes {
            success: vec![String::new(); success],
            failure: vec![String::new(); failure],
        };
        for (fixed, kept, want) in [
            (list(1, 0), list(1, 0), Resolution::Full),
            (list(0, 0), list(0, 0), Resolution::Full),
            (list(1, 1), list(1, 0), Resolution::Partial),
            (list(0, 1), list(1, 0), Resolution::No),
            (list(1, 0), list(1, 1), Resolution::No),
            (list(1, 1), list(1, 1), Resolution::No),
        ] {
            let status =
                TestsStatus { fail_to_pass: fixed, pass_to_pass: kept, ..TestsStatus::default() };
            assert_eq!(status.resolution(), want);
        }
    }
}
