//! Turns a test log into a verdict, by R2E-Gym's own rule and by a strict one.
//!
//! The invariant: [`Verdict::official_reward`] equals R2E-Gym's reward for the same log, including
//! its known defects; [`Verdict::reward`] is 1.0 only if the log has exactly the expected tests,
//! each with its expected status.

use crate::task::{TestStatus, Verdict};
use crate::text::{Decoding, Ends, Lines, strip};
use std::collections::BTreeMap;
use std::io::BufRead;

/// The line that pytest and R2E-Gym's runners print before the results.
const SUMMARY: &str = "short test summary info";

/// Statuses by test key.
type Statuses = BTreeMap<String, TestStatus>;

/// Maximum number of bytes of the keys in one block. A log with more scores 0, because no task
/// expects so many tests.
const KEY_BYTES: usize = 64 << 20;

/// Which rule decides [`Verdict::reward`], and which summary block its statuses are from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SummaryRule {
    /// The last block, compared in full.
    Strict,
    /// R2E-Gym's own rule: the first block, with its defects.
    R2e,
}

/// Grades the merged stdout and stderr of the hidden tests against `expected`.
///
/// The official reward reads the first summary block and skips an empty key when it compares. The
/// strict one reads the last block (what a test prints cannot replace the real results), treats an
/// empty key like any other, and gives 0.0 where there is no block at all.
pub fn grade(log: &str, expected: &BTreeMap<String, TestStatus>) -> Verdict {
    grade_by(SummaryRule::Strict, log, expected)
}

/// As [`grade`], with reward, statuses and differing tests by `rule`.
pub fn grade_by(rule: SummaryRule, log: &str, expected: &BTreeMap<String, TestStatus>) -> Verdict {
    let mut blocks = Blocks::default();
    log.split('\n').for_each(|line| blocks.line(line));
    blocks.verdict(rule, expected)
}

/// As [`grade`], for a log of any size; see [`grade_log_by`].
///
/// # Errors
/// If reading fails.
pub fn grade_log(
    log: impl BufRead,
    expected: &BTreeMap<String, TestStatus>,
) -> std::io::Result<Verdict> {
    grade_log_by(SummaryRule::Strict, log, expected)
}

/// As [`grade_by`], for a log of any size, which is read once and not held in memory. Bytes that
/// are not UTF-8 become U+FFFD; lines over [`crate::LINE_BYTES`] are shortened.
///
/// # Errors
/// If reading fails.
pub fn grade_log_by(
    rule: SummaryRule,
    log: impl BufRead,
    expected: &BTreeMap<String, TestStatus>,
) -> std::io::Result<Verdict> {
    let mut blocks = Blocks::default();
    let mut lines = Lines::new(log, Ends::Feed, Decoding::Replace);
    while let Some(line) = lines.next()? {
        blocks.line(&line);
    }
    Ok(blocks.verdict(rule, expected))
}

/// Grades results that do not come from a log, by pytest's id of each test. The official reward is
/// that of `log`.
pub fn grade_reported(
    results: &[(String, TestStatus)],
    log: &str,
    expected: &BTreeMap<String, TestStatus>,
) -> Verdict {
    let official = grade_by(SummaryRule::R2e, log, expected).official_reward;
    let expected = normalised(expected.clone());
    let mut statuses = Statuses::new();
    for (id, status) in results {
        let tail = id.split("::").skip(1).collect::<Vec<_>>().join(".");
        let key = before_reason(&without_colour(&tail.replace('\r', ""), false));
        // Of two tests with one key, the failure counts.
        let known = statuses.entry(key).or_insert(*status);
        if *known == TestStatus::Passed {
            *known = *status;
        }
    }
    Verdict {
        reward: f64::from(u8::from(statuses == expected)),
        official_reward: official,
        differing: differing(&expected, &statuses),
        statuses,
        report: None,
        suspicious: Vec::new(),
    }
}

/// The first summary block and the last one so far.
#[derive(Debug, Default)]
struct Blocks {
    first: Option<Block>,
    last: Option<Block>,
}

impl Blocks {
    fn line(&mut self, line: &str) {
        let line = without_colour(line, true).replace('\r', "");
        let mut parts = line.split(SUMMARY);
        if let (Some(block), Some(part)) = (&mut self.last, parts.next()) {
            block.line(part);
        }
        for part in parts {
            let ended = self.last.replace(Block::default());
            self.first = self.first.take().or(ended.map(Block::ended));
            if let Some(block) = &mut self.last {
                block.line(part);
            }
        }
    }

    fn verdict(self, rule: SummaryRule, expected: &BTreeMap<String, TestStatus>) -> Verdict {
        let last = self.last.map(Block::ended);
        let any = last.is_some();
        let first = self.first.or_else(|| last.clone()).unwrap_or_default();
        let last = last.unwrap_or_default();
        let complete = !first.is_cut && !last.is_cut;
        let expected = normalised(expected.clone());
        let (first, last) = (normalised(first.statuses), normalised(last.statuses));

        let fits = |(key, status): (&String, &TestStatus)| {
            key.is_empty() || expected.get(key) == Some(status)
        };
        let official = complete && first.len() == expected.len() && first.iter().all(fits);
        let strict = complete && last == expected && any;
        let (solved, statuses) = match rule {
            SummaryRule::Strict => (strict, last),
            SummaryRule::R2e => (official, first),
        };
        // The official rule accepts some blocks that differ from what was expected.
        let accepted = rule == SummaryRule::R2e && official;
        let differing = if accepted { Vec::new() } else { differing(&expected, &statuses) };
        Verdict {
            reward: f64::from(u8::from(solved)),
            official_reward: f64::from(u8::from(official)),
            statuses,
            differing,
            report: None,
            suspicious: Vec::new(),
        }
    }
}

/// Sorted keys whose status is not the expected one, including missing and unexpected tests.
fn differing(expected: &Statuses, found: &Statuses) -> Vec<String> {
    let mut keys: Vec<String> = expected
        .iter()
        .filter(|(key, status)| found.get(*key) != Some(*status))
        .map(|(key, _)| key.clone())
        .chain(found.keys().filter(|key| !expected.contains_key(*key)).cloned())
        .collect();
    keys.sort_unstable();
    keys
}

/// The results that follow one heading.
#[derive(Debug, Clone, Default)]
struct Block {
    statuses: Statuses,
    /// The last line that is not blank: white space at the end of a block is not part of a key.
    pending: Option<String>,
    key_bytes: usize,
    /// Whether results were dropped because of [`KEY_BYTES`].
    is_cut: bool,
}

impl Block {
    fn line(&mut self, line: &str) {
        if strip(line).is_empty() {
            return;
        }
        if let Some(pending) = self.pending.replace(line.to_owned()) {
            self.add_result(&pending);
        }
    }

    fn ended(mut self) -> Self {
        if let Some(pending) = self.pending.take() {
            self.add_result(strip(&pending));
        }
        self
    }

    /// Records the result on `line`, if it has one. As in R2E-Gym, the three words are searched for
    /// anywhere in the line and in this order, so a failing test whose name contains `PASSED`
    /// counts as passed.
    fn add_result(&mut self, line: &str) {
        let tail = || line.split("::").skip(1).collect::<Vec<_>>().join(".");
        let (key, status) = if line.contains("PASSED") {
            (tail(), TestStatus::Passed)
        } else if line.contains("FAILED") {
            (before_reason(&tail()), TestStatus::Failed)
        } else if line.contains("ERROR") {
            (before_reason(&tail()), TestStatus::Error)
        } else {
            return;
        };
        if self.key_bytes + key.len() > KEY_BYTES {
            self.is_cut = true;
            return;
        }
        let bytes = key.len() + size_of::<(String, TestStatus)>();
        if self.statuses.insert(key, status).is_none() {
            self.key_bytes += bytes;
        }
    }
}

/// Removes colours and ` - reason` from keys. If two keys become equal, the later one in key order
/// wins, as in R2E-Gym.
fn normalised(statuses: Statuses) -> Statuses {
    let plain: Statuses =
        statuses.into_iter().map(|(key, status)| (without_colour(&key, false), status)).collect();
    plain.into_iter().map(|(key, status)| (before_reason(&key), status)).collect()
}

fn before_reason(key: &str) -> String {
    key.split(" - ").next().unwrap_or_default().to_owned()
}

/// `text` without colour escapes `ESC [ digits m`. In a log (`is_log`), the digits may also be
/// absent or contain `;`.
fn without_colour(text: &str, is_log: bool) -> String {
    let mut out = String::with_capacity(text.len());
    let mut rest = text;
    while let Some((head, tail)) = rest.split_once("\x1b[") {
        out.push_str(head);
        let end = tail.find(|c: char| !(c.is_ascii_digit() || is_log && c == ';'));
        let code = end.and_then(|end| tail.split_at_checked(end));
        match code.and_then(|(digits, after)| Some((digits, after.strip_prefix('m')?))) {
            Some((digits, after)) if is_log || !digits.is_empty() => rest = after,
            Some(_) | None => {
                out.push_str("\x1b[");
                rest = tail;
            }
        }
    }
    out.push_str(rest);
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    fn map(pairs: &[(&str, TestStatus)]) -> Statuses {
        pairs.iter().map(|(key, status)| ((*key).to_owned(), *status)).collect()
    }

    fn rewards(log: &str, expected: &[(&str, TestStatus)]) -> (bool, bool) {
        let verdict = grade(log, &map(expected));
        (verdict.reward > 0.5, verdict.official_reward > 0.5)
    }

    #[test]
    fn the_file_path_is_dropped_and_classes_are_joined_by_dots() {
        let verdict = grade(
            "x\n== short test summary info ==\nPASSED a/t.py::C::test_a\nFAILED t.py::test_b - assert 1\r\n\
             ERROR \x1b[1mt.py\x1b[0m::test_c - boom - bang\nSKIPPED [1] t.py:3: no\n1 passed",
            &map(&[]),
        );
        let want = [
            ("C.test_a", TestStatus::Passed),
            ("test_b", TestStatus::Failed),
            ("test_c", TestStatus::Error),
        ];
        assert_eq!(verdict.statuses, map(&want));
        assert_eq!(verdict.differing, ["C.test_a", "test_b", "test_c"]);
    }

    #[test]
    fn expected_failures_count_like_any_status() {
        let log = "short test summary info\nPASSED t::a\nFAILED t::b - x";
        assert_eq!(
            rewards(log, &[("a", TestStatus::Passed), ("b", TestStatus::Failed)]),
            (true, true)
        );
        assert_eq!(
            rewards(log, &[("a", TestStatus::Passed), ("b", TestStatus::Passed)]),
            (false, false)
        );
    }

    #[test]
    fn an_empty_key_scores_only_by_the_official_rule() {
        let log = "short test summary info\nERROR t.py - ImportError";
        assert_eq!(rewards(log, &[("a", TestStatus::Passed)]), (false, true));
    }

    #[test]
    fn a_forged_first_block_scores_only_by_the_official_rule() {
        let log = "short test summary info\nPASSED t::a\nshort test summary info\nFAILED t::a";
        let want = map(&[("a", TestStatus::Passed)]);
        assert_eq!(rewards(log, &[("a", TestStatus::Passed)]), (false, true));
        let official = grade_by(SummaryRule::R2e, log, &want);
        assert!(official.reward > 0.5 && official.differing.is_empty());
        assert_eq!(official.statuses, want);
        let failed = "short test summary info\nFAILED t::a\nshort test summary info\nPASSED t::a";
        let official = grade_by(SummaryRule::R2e, failed, &want);
        assert_eq!((official.reward, official.differing), (0.0, vec!["a".to_owned()]));
        assert!(grade(failed, &want).reward > 0.5);
    }

    #[test]
    fn white_space_at_the_end_of_a_block_is_not_part_of_a_key() {
        let log = "short test summary info\nPASSED t::a \nPASSED t::b \x1d\n \n";
        let want = map(&[("a ", TestStatus::Passed), ("b", TestStatus::Passed)]);
        assert_eq!(grade(log, &want).statuses, want);
        let verdict = grade_log(log.as_bytes(), &want).unwrap();
        assert_eq!(verdict, grade(log, &want));
        assert!(verdict.reward > 0.5);
    }

    #[test]
    fn reported_results_are_graded_by_the_keys_of_logs() {
        let results = [
            ("r2e_tests/t.py::C::test_a[x]", TestStatus::Passed),
            ("r2e_tests/t.py::test_b", TestStatus::Failed),
            ("r2e_tests/u.py", TestStatus::Error),
        ]
        .map(|(id, status)| (id.to_owned(), status));
        let expected = map(&[
            ("C.test_a[x]", TestStatus::Passed),
            ("test_b", TestStatus::Failed),
            ("", TestStatus::Error),
        ]);
        let log = "short test summary info\nPASSED r2e_tests/t.py::C::test_a[x]\n\
            ERROR r2e_tests/u.py\nFAILED r2e_tests/t.py::test_b - x\n";
        let verdict = grade_reported(&results, log, &expected);
        assert_eq!(verdict, grade(log, &expected));
        assert!(verdict.reward > 0.5);
        // The text of an exception can contain any word.
        let log = "short test summary info\nFAILED t.py::a - Exception: PASSED";
        let failed = [("t.py::a".to_owned(), TestStatus::Failed)];
        let expected = map(&[("a", TestStatus::Passed)]);
        assert!(grade(log, &expected).reward > 0.5);
        assert!(grade_reported(&failed, log, &expected).reward < 0.5);
    }

    #[test]
    fn a_log_without_summary_never_scores() {
        assert_eq!(rewards("PASSED t::a", &[("a", TestStatus::Passed)]), (false, false));
        assert_eq!(rewards("", &[]), (false, true));
    }

    #[test]
    fn extra_tests_do_not_score() {
        let log = "short test summary info\nPASSED t::a\nPASSED t::b";
        assert_eq!(rewards(log, &[("a", TestStatus::Passed)]), (false, false));
    }

    #[test]
    fn coloured_keys_match_on_both_sides() {
        let log = "short test summary info\nPASSED t::a[\x1b[31mx\x1b[0m]";
        assert_eq!(rewards(log, &[("a[\x1b[31mx\x1b[0m]", TestStatus::Passed)]), (true, true));
        assert_eq!(without_colour("a\x1b[1;2mb\x1b[mc\x1b[Kd", true), "abc\x1b[Kd");
        assert_eq!(without_colour("a\x1b[mc\x1b[1;2md\x1b[3me", false), "a\x1b[mc\x1b[1;2mde");
    }
}
