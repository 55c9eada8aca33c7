//! SWE-bench and its family: rows, evaluation scripts, log parsers and verdicts.
//!
//! The invariant: for the same row and log, script, status map, test lists and verdict are those
//! of the official harness, in the version that [`Harness`] names.
//!
//! [`SweRow`] is a row; [`eval_script`] writes what a grading container runs; [`grade`] turns its
//! log into a [`Report`].

mod evidence;
mod parsers;
mod reading;
mod row;
mod script;
mod spec;
mod status;
mod verdict;

pub use parsers::LogParser;
pub use reading::{DidNotRun, InfraFailure, Reading};
pub use row::{EvalType, SweRow};
pub use script::{eval_script, test_directives, test_files};
pub use spec::{SPECS, Spec, SpecError, spec};
pub use status::{OTHER_NAMES_BYTES, Status, StatusMap};
pub use verdict::{Outcomes, Report, Resolution, TestsStatus, grade};

use serde::{Deserialize, Serialize};

/// Which version of the official harness is reproduced.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default, Serialize, Deserialize)]
pub enum Harness {
    /// What published numbers up to 2026 were made with.
    #[default]
    #[serde(rename = "swebench-4.1.0")]
    V4_1_0,
    /// Closes holes: skipped tests, forged results, truncated names.
    #[serde(rename = "swebench-5.0.2")]
    V5_0_2,
}

/// A log that cannot be graded at all.
#[derive(Debug, thiserror::Error)]
pub enum LogError {
    /// Reading failed, or a byte is not UTF-8 where version 4 insists on it.
    #[error("cannot read the test log")]
    Io(#[from] std::io::Error),
    /// A status with nothing after it.
    #[error("a line of the log is a status without a test, on which this version's parser fails")]
    Bare,
    /// A repository of no known data set.
    #[error("no log parser for repository `{0}`: the row's `log_parser` column could name one")]
    Parser(String),
}
