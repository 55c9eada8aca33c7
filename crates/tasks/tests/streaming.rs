//! Logs of any size and content are read once, in bounded memory, without a panic.

#![expect(clippy::unwrap_used, clippy::indexing_slicing, reason = "a failed step fails the test")]

use orchestrate_tasks::swe::{Harness, LogParser, SPECS, SweRow, grade};
use orchestrate_tasks::{LINE_BYTES, TestStatus, grade_log};
use proptest::prelude::*;
use std::collections::{BTreeMap, HashSet};
use std::io::{BufReader, Read};

const HARNESSES: [Harness; 2] = [Harness::V4_1_0, Harness::V5_0_2];

/// A log that is generated as it is read: a head, `lines` results, and a tail.
struct Generated {
    /// Bytes that are generated but not all read yet.
    ready: Vec<u8>,
    /// Number of bytes of `ready` that have been read.
    at: usize,
    /// Number of results that have been generated.
    next: u64,
    lines: u64,
    tail: &'static str,
    /// Number of bytes that have been read in total.
    given: u64,
}

impl Generated {
    fn new(head: &str, lines: u64, tail: &'static str) -> Self {
        Self { ready: head.as_bytes().to_vec(), at: 0, next: 0, lines, tail, given: 0 }
    }
}

impl Read for Generated {
    fn read(&mut self, into: &mut [u8]) -> std::io::Result<usize> {
        if self.at == self.ready.len() {
            self.ready.clear();
            self.at = 0;
            for _ in 0..1000.min(self.lines - self.next) {
                let name = self.next % 5000;
                self.next += 1;
                let line = format!("PASSED tests/test_a.py::test_number[{name}] and more words\n");
                self.ready.extend_from_slice(line.as_bytes());
            }
            if self.ready.is_empty() {
                self.ready.extend_from_slice(std::mem::take(&mut self.tail).as_bytes());
            }
        }
        let read = (&self.ready[self.at..]).read(into)?;
        self.at += read;
        self.given += read as u64;
        Ok(read)
    }
}

/// Peak memory of this process, in bytes.
fn peak_bytes() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).unwrap();
    line.trim().strip_suffix(" kB").unwrap().trim().parse::<u64>().unwrap() << 10
}

fn row(repo: &str, test: &str) -> SweRow {
    SweRow { repo: repo.into(), fail_to_pass: vec![test.into()], ..SweRow::default() }
}

#[test]
fn a_large_log_is_graded_in_bounded_memory_by_every_parser() {
    const LINES: u64 = 40_000;
    let long = "x".repeat(12 * LINE_BYTES);
    let head = format!("{long}\n+ : '>>>>> Start Test Output'\n{long}\n");
    let tail = "PASSED t::wanted\n+ : '>>>>> End Test Output'\n";
    let (mut parsers, mut most) = (HashSet::new(), 0);
    for spec in SPECS.iter().filter(|spec| parsers.insert(spec.parser)) {
        for harness in HARNESSES {
            let mut log = Generated::new(&head, LINES, tail);
            let before = peak_bytes();
            let report = grade(
                &row(spec.repo, "t::wanted"),
                harness,
                BufReader::with_capacity(1 << 16, &mut log),
            );
            let grown = peak_bytes() - before;
            assert!(grown < 16 << 20, "{}: {grown} bytes", spec.repo);
            most = most.max(log.given);
            assert_eq!(log.at, log.ready.len(), "all of the log was read");
            let finds = !matches!(spec.parser, LogParser::Sympy | LogParser::Django);
            assert_eq!(report.unwrap().resolved, finds, "{}", spec.repo);
        }
    }
    assert!(most > 24 << 20 && parsers.len() == 7);
}

#[test]
fn a_large_r2e_log_is_graded_in_bounded_memory() {
    let expected: BTreeMap<_, _> = (0..5000)
        .map(|n| (format!("test_number[{n}] and more words"), TestStatus::Passed))
        .collect();
    let head = format!("{}\n== short test summary info ==\n", "x".repeat(8 * LINE_BYTES));
    let mut log = Generated::new(&head, 200_000, "== 1 passed ==\n");
    let before = peak_bytes();
    let verdict = grade_log(BufReader::new(&mut log), &expected).unwrap();
    let grown = peak_bytes() - before;
    assert!(grown < 24 << 20, "{grown} bytes");
    assert!(verdict.reward > 0.5 && verdict.official_reward > 0.5, "{:?}", verdict.differing);
}

/// Pieces of logs that have a meaning to some parser.
const PIECES: [&str; 40] = [
    "PASSED",
    "FAILED",
    "SKIPPED",
    "ERROR",
    "XFAIL",
    " - ",
    " ... ",
    "ok",
    " ... ok",
    "\nok\n",
    " ...  OK",
    " ... skipped",
    " ... FAIL",
    "FAIL:",
    "ERROR:",
    "test_a",
    " E",
    " F",
    "a.py:b",
    "____ ",
    "Testing against Django installed in ",
    " silenced).",
    "Internal Server Error: /",
    "/",
    "System check identified no issues (0 silenced)",
    "[1]",
    "[31m",
    "\x1b",
    "\t",
    "\r",
    "\n",
    " ",
    "é\u{1f}",
    "MouseButton.LEFT",
    ">>>>> Start Test Output",
    ">>>>> End Test Output",
    ">>>>> Test Exit Code:",
    "Tests:",
    "--version is equivalent to version",
    "...",
];

#[test]
fn a_marker_in_the_middle_of_a_long_line_counts() {
    let half = "x".repeat(LINE_BYTES);
    let log = |bad: &str| {
        let start = ">>>>> Start Test Output\nPASSED t::a\n";
        format!("{start}{half}{bad}{half}\n>>>>> End Test Output\n")
    };
    for harness in HARNESSES {
        let resolved = |log: &str| {
            grade(&row("pallets/flask", "t::a"), harness, log.as_bytes()).unwrap().resolved
        };
        assert!(resolved(&log("")));
        assert!(!resolved(&log(">>>>> Tests Timed Out")));
    }
}

proptest! {
    #[test]
    fn prop_parsers_never_panic_and_ignore_buffer_sizes(
        pieces in prop::collection::vec(0..PIECES.len(), 0..60),
        noise in prop::collection::vec(any::<u8>(), 0..8),
        at in 0.0..1.0_f64,
        buffer in 1_usize..40,
    ) {
        let mut log = pieces.iter().map(|&piece| PIECES[piece]).collect::<String>().into_bytes();
        #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "a place")]
        let place = (at * log.len() as f64) as usize;
        log.splice(place..place, noise);
        let expected = [("a".to_owned(), TestStatus::Passed)].into();
        let verdict = grade_log(BufReader::with_capacity(buffer, &log[..]), &expected).unwrap();
        let text = String::from_utf8_lossy(&log);
        prop_assert_eq!(verdict, orchestrate_tasks::grade(&text, &expected));
        for spec in SPECS {
            for harness in HARNESSES {
                let parse = |buffer| {
                    let reader = BufReader::with_capacity(buffer, &log[..]);
                    spec.parser.parse(harness, reader).map_err(|error| error.to_string())
                };
                let pairs = |map: orchestrate_tasks::swe::StatusMap| {
                    map.iter().map(|(name, s)| (name.to_owned(), s.clone())).collect::<Vec<_>>()
                };
                prop_assert_eq!(parse(buffer).map(pairs), parse(8192).map(pairs));
                let graded = grade(&row(spec.repo, "test_a"), harness, &log[..]);
                prop_assert!(graded.is_err() || !graded.unwrap().patch_is_none);
            }
        }
    }
}
