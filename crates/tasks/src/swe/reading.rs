//! Reads from a test log the statuses that count.
//!
//! The invariant: the log is read once, in order, and memory does not grow with it (see
//! [`crate::LINE_BYTES`] and [`super::OTHER_NAMES_BYTES`]).

use super::evidence::Evidence;
use super::parsers::{LogParser, MissingName, ReadLines};
use super::status::StatusMap;
use super::{Harness, LogError};
use crate::text::{Ends, Lines};
use std::io::BufRead;

const START: &str = ">>>>> Start Test Output";
const END: &str = ">>>>> End Test Output";
/// A log that contains one of these is not graded, whatever else it contains.
const BAD: [&str; 4] = [
    ">>>>> Patch Apply Failed",
    ">>>>> Reset Failed",
    ">>>>> Tests Errored",
    ">>>>> Tests Timed Out",
];

/// Result of reading a log.
#[derive(Debug)]
pub enum Reading {
    /// The tests ran; the status of each.
    Ran(StatusMap),
    /// They did not run, or the log is incomplete. The harness reports that the patch did not
    /// apply.
    DidNotRun(DidNotRun),
}

/// Why a log is not graded.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DidNotRun {
    /// The problems of the log.
    pub reason: String,
    /// The cause that version 5 recognises, if any.
    pub infra: Option<InfraFailure>,
}

/// A problem of the environment that a log shows. Advisory: it changes no verdict.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct InfraFailure {
    /// The harness's name for it, such as `out_of_memory`.
    pub reason: &'static str,
    /// Whether it cannot have been caused by a patch.
    pub certain: bool,
}

/// A parser and the statuses it has found so far. Its failure matters only if its statuses are
/// used.
#[derive(Debug)]
struct Parse {
    parser: Box<dyn ReadLines>,
    map: StatusMap,
    /// Whether a line had a status without a test name.
    missing_name: bool,
}

impl Parse {
    fn line(&mut self, line: &str) {
        self.missing_name |=
            !self.missing_name && self.parser.line(line, &mut self.map) == Err(MissingName);
    }

    fn finish(mut self) -> Result<StatusMap, LogError> {
        self.parser.finish(&mut self.map);
        if self.missing_name { Err(LogError::MissingName) } else { Ok(self.map) }
    }
}

/// Position in the log relative to its markers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Part {
    Before,
    Tests,
    After,
}

/// Reads `log` into a fresh copy of `map`. Only the part between the markers counts. If it has no
/// result (for example because output streams were interleaved), the whole log counts if
/// `falls_back` is set.
///
/// # Errors
/// If reading fails, or the harness would raise an exception.
pub(super) fn read(
    parser: LogParser,
    harness: Harness,
    falls_back: bool,
    log: impl BufRead,
    map: &StatusMap,
) -> Result<Reading, LogError> {
    let start = || Parse { parser: parser.start(harness), map: map.fresh(), missing_name: false };
    let mut slice = start();
    // Dropped as soon as it is known not to count.
    let mut whole = falls_back.then(start);
    let mut part = Part::Before;
    let (mut bad, mut ended) = (None, false);
    let mut evidence = (harness == Harness::V5_0_2).then(Evidence::default);

    let mut lines = Lines::new(log, Ends::Universal, harness.decoding());
    while let Some(line) = lines.next()? {
        let line: &str = &line;
        if let Some(evidence) = &mut evidence {
            evidence.line(line);
        }
        if line.contains(">>>>> ") {
            bad = bad.or_else(|| BAD.into_iter().find(|code| line.contains(code)));
            ended |= line.contains(END);
        }
        let mut rest = line;
        if part == Part::Before
            && let Some((_, tests)) = line.split_once(START)
        {
            part = Part::Tests;
            rest = tests;
        }
        if part == Part::Tests {
            let cut = [START, END].into_iter().filter_map(|marker| rest.find(marker)).min();
            slice.line(cut.and_then(|cut| rest.get(..cut)).unwrap_or(rest));
            if cut.is_some() {
                part = Part::After;
            }
        }
        if let Some(all) = &mut whole {
            all.line(line);
            whole.take_if(|_| !slice.map.is_empty());
        }
    }

    let did_not_run = |reason: String| {
        let infra = evidence.as_ref().and_then(Evidence::infra_failure);
        Ok(Reading::DidNotRun(DidNotRun { reason, infra }))
    };
    if let Some(code) = bad {
        return did_not_run(format!("the log says `{code}`"));
    }
    for (marker, found) in [(START, part != Part::Before), (END, ended)] {
        if !found {
            return did_not_run(format!("the log has no `{marker}`"));
        }
    }
    let mut statuses = slice.finish()?;
    if statuses.is_empty()
        && let Some(whole) = whole
    {
        statuses = whole.finish()?;
    }
    if let Some(evidence) = &evidence {
        if statuses.is_empty() && !evidence.suite_ran() {
            return did_not_run("the log has no results and no sign that tests ran".to_owned());
        }
        if evidence.exit_code_failed() && !statuses.is_empty() && !statuses.any_failure() {
            let reason = "the test command failed, but no test of the log did".to_owned();
            return did_not_run(reason);
        }
    }
    Ok(Reading::Ran(statuses))
}
