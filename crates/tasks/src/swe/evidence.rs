//! What version 5 of the harness searches for in a log besides test results.

use super::Harness;
use super::parsers::pattern;
use super::reading::InfraFailure;
use crate::text::{Ends, Lines, strip};
use regex::{Regex, RegexSet};
use std::io::{self, BufRead};
use std::sync::LazyLock;

/// Summaries of test runners that ran at least one test.
static SUITE_RAN: LazyLock<Regex> = LazyLock::new(|| {
    pattern(
        r"(?x) Executed\ [1-9]\d*\ of\ \d+
        | TOTAL:\ [1-9]\d*\ (?:SUCCESS|FAILED)
        | [1-9]\d*\ passing
        | Tests:[\s\x1c-\x1f]+[1-9]\d*
        | Test\ Suites:[\s\x1c-\x1f]+(?:\d+\ \w+,\ )*[1-9]\d*\ total
        | ^\#\ tests\ [1-9]\d*
        | [1-9]\d*\ specs?,\ \d+\ failures?
        | ':\ ok$",
    )
});
static EXIT_CODE: LazyLock<Regex> =
    LazyLock::new(|| pattern(r">>>>> Test Exit Code:[\s\x1c-\x1f]*(-?\d+)"));
/// The start of a match that may continue on the next line that is not blank.
static UNFINISHED: LazyLock<Regex> =
    LazyLock::new(|| pattern(r"(?:Tests|Test Suites|>>>>> Test Exit Code):[\s\x1c-\x1f]*$"));

/// Problems of the environment: name, whether it cannot have been caused by a patch, pattern. The
/// first one of the list that occurs anywhere in the log counts.
const TROUBLES: [(&str, bool, &str); 8] = [
    ("browser_launch_failed", true, "Failed to launch|Failed to connect to the bus"),
    ("display_unavailable", true, "cannot open display|Missing X server|unable to open X display"),
    ("out_of_memory", true, "Cannot allocate memory|OutOfMemoryError|^Killed$"),
    (
        "container_unavailable",
        true,
        "Error response from daemon|Cannot connect to the Docker daemon",
    ),
    ("network_unreachable", true, "Could not resolve host|Temporary failure in name resolution"),
    ("missing_module", false, "Cannot find module|MODULE_NOT_FOUND|ModuleNotFoundError"),
    ("no_tests_collected", false, "no tests ran|collected 0 items"),
    ("tests_timed_out", false, r"Timeout error: \d+ seconds exceeded"),
];
#[expect(clippy::expect_used, reason = "the patterns are constants, and a test uses each")]
static SIGNS: LazyLock<RegexSet> = LazyLock::new(|| {
    RegexSet::new(TROUBLES.map(|(_, _, sign)| sign)).expect("patterns of this file")
});

/// Evidence found in one log.
#[derive(Debug, Default)]
pub(super) struct Evidence {
    suite_ran: bool,
    exit_code: Option<String>,
    troubles: [bool; TROUBLES.len()],
    /// The start of a match that may continue after white space and line ends.
    unfinished: Option<String>,
}

impl Evidence {
    pub(super) fn line(&mut self, line: &str) {
        for sign in &SIGNS.matches(line) {
            if let Some(seen) = self.troubles.get_mut(sign) {
                *seen = true;
            }
        }
        match self.unfinished.take() {
            Some(begun) if strip(line).is_empty() => self.unfinished = Some(begun),
            Some(begun) => self.numbers(&format!("{begun} {line}")),
            None => {}
        }
        self.numbers(line);
        if let Some(begun) = line.contains(':').then(|| UNFINISHED.find(line)).flatten() {
            self.unfinished = Some(begun.as_str().to_owned());
        }
    }

    fn numbers(&mut self, text: &str) {
        self.suite_ran |= SUITE_RAN.is_match(text);
        if self.exit_code.is_none() && text.contains(">>>>> Test Exit Code:") {
            let code = EXIT_CODE.captures(text).and_then(|found| found.get(1));
            self.exit_code = code.map(|code| code.as_str().to_owned());
        }
    }

    /// Whether a runner's summary is in the log.
    pub(super) fn suite_ran(&self) -> bool {
        self.suite_ran
    }

    /// Whether the test command's own exit code is in the log, and is not 0.
    pub(super) fn exit_code_failed(&self) -> bool {
        let is_zero = |code: &str| code.trim_start_matches('-').chars().all(|digit| digit == '0');
        self.exit_code.as_deref().is_some_and(|code| !is_zero(code))
    }

    /// The first problem of the list that occurs in the log.
    pub(super) fn infra_failure(&self) -> Option<InfraFailure> {
        let mut seen = TROUBLES.iter().zip(self.troubles).filter(|(_, seen)| *seen);
        let ((reason, certain, _), _) = seen.next()?;
        Some(InfraFailure { reason, certain: *certain })
    }
}

/// The problem of the environment that a log shows, as version 5 searches it for the report on a run:
/// in the log of every instance that is not resolved, whether or not its tests ran. Advisory: a
/// resolved instance may show one, too.
///
/// # Errors
/// If reading fails.
pub fn infra_failure(log: impl BufRead) -> io::Result<Option<InfraFailure>> {
    let mut evidence = Evidence::default();
    let mut lines = Lines::new(log, Ends::Universal, Harness::V5_0_2.decoding());
    while let Some(line) = lines.next()? {
        evidence.line(&line);
    }
    Ok(evidence.infra_failure())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn evidence(log: &str) -> Evidence {
        let mut evidence = Evidence::default();
        log.split('\n').for_each(|line| evidence.line(line));
        evidence
    }

    #[test]
    fn a_suite_that_ran_no_test_did_not_run() {
        for ran in [
            "Executed 3 of 3",
            "TOTAL: 12 SUCCESS",
            "  5 passing (3s)",
            "Tests:  4 passed",
            "Tests:\n\n 4 passed",
            "Test Suites: 1 failed, 2 passed, 3 total",
            "# tests 8",
            "9 specs, 0 failures",
            "a case': ok",
        ] {
            assert!(evidence(&format!("x\n{ran}\ny")).suite_ran(), "{ran}");
            let none = ran.replace(|c: char| c.is_ascii_digit(), "0").replace("': ok", "': ok.");
            assert!(!evidence(&none).suite_ran(), "{none}");
        }
    }

    #[test]
    fn the_first_exit_code_counts() {
        let code = ">>>>> Test Exit Code:";
        assert!(evidence(&format!("{code} 1\n{code} 0")).exit_code_failed());
        assert!(evidence(&format!("{code}\n\n -2")).exit_code_failed());
        assert!(!evidence(&format!("{code} 0\n{code} 1")).exit_code_failed());
        assert!(!evidence(&format!("{code} x")).exit_code_failed());
    }

    #[test]
    fn the_first_problem_of_the_list_is_reported() {
        let log = "collected 0 items\nKilled\nnot Killed";
        let found = evidence(log).infra_failure().unwrap();
        assert_eq!((found.reason, found.certain), ("out_of_memory", true));
        assert_eq!(evidence("was Killed").infra_failure(), None);
        let streamed = super::infra_failure(log.as_bytes()).unwrap();
        assert_eq!(streamed, Some(found));
        let log = "Timeout error: 1800 seconds exceeded.";
        assert_eq!(evidence(log).infra_failure().map(|i| i.reason), Some("tests_timed_out"));
    }
}
