//! Test logs: the verdict agrees with a naive parse of the whole log, in bounded memory.
#![no_main]

use libfuzzer_sys::arbitrary::{self, Arbitrary};
use libfuzzer_sys::fuzz_target;
use orchestrate_fuzz::heap::bounded;
use orchestrate_fuzz::input::{self, Change};
use orchestrate_tasks::swe::{Harness, LogParser, SPECS, Status, StatusMap, SweRow, grade};
use orchestrate_tasks::{TestStatus, grade_log};
use std::io::BufReader;

const START: &str = ">>>>> Start Test Output";
const END: &str = ">>>>> End Test Output";
const PIECES: [&str; 32] = [
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
    "\x1b[31m",
    "\r",
    "\n",
    " ",
    ">>>>> Tests Errored",
    START,
    END,
];

#[derive(Debug, Arbitrary)]
struct Input {
    pieces: Vec<u8>,
    changes: Vec<Change>,
    spec: u8,
    buffer: u8,
}

/// The status map of the whole text; `None` if the log is not graded.
fn plain(parser: LogParser, log: &str) -> Option<Result<StatusMap, ()>> {
    let log = log.replace("\r\n", "\n").replace('\r', "\n");
    let bad = ["Patch Apply Failed", "Reset Failed", "Tests Errored", "Tests Timed Out"];
    if bad.iter().any(|code| log.contains(&format!(">>>>> {code}"))) || !log.contains(END) {
        return None;
    }
    let slice = log.split(START).nth(1)?.split(END).next()?;
    let parse = |text: &str| parser.parse(Harness::V4_1_0, text.as_bytes()).map_err(|_| ());
    Some(parse(slice).and_then(|map| if map.is_empty() { parse(&log) } else { Ok(map) }))
}

fuzz_target!(|input: Input| {
    let pieces = input.pieces.iter().map(|&piece| PIECES[usize::from(piece) % PIECES.len()]);
    let mut log = pieces.collect::<String>().into_bytes();
    input::change(&mut log, &input.changes);
    let spec = &SPECS[usize::from(input.spec) % SPECS.len()];
    let row =
        SweRow { repo: spec.repo.into(), fail_to_pass: vec!["test_a".into()], ..SweRow::default() };
    let read = || BufReader::with_capacity(1 + usize::from(input.buffer), &log[..]);
    // Includes compiled patterns and their caches, which are created once and kept.
    let found = bounded((8 << 20) + 16 * log.len(), || grade(&row, Harness::V4_1_0, read()));
    let _ = grade(&row, Harness::V5_0_2, read());
    let expected = [("a".to_owned(), TestStatus::Passed)].into();
    let verdict = grade_log(read(), &expected).expect("memory can be read");
    let text = String::from_utf8_lossy(&log);
    assert_eq!(verdict, orchestrate_tasks::grade(&text, &expected));

    let Ok(text) = std::str::from_utf8(&log) else {
        assert!(found.is_err());
        return;
    };
    match plain(spec.parser, text) {
        None => assert!(!found.expect("is read").patch_successfully_applied),
        Some(Err(())) => assert!(found.is_err()),
        Some(Ok(map)) => {
            let report = found.expect("is read");
            let skipped = matches!(map.get("test_a"), Some(Status::Skipped | Status::Other(_)));
            let passed = map.get("test_a").is_some_and(Status::is_success);
            assert_eq!(report.resolved, passed || skipped, "{map:?}");
        }
    }
});
