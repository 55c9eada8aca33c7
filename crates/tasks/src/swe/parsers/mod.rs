//! The harness's log parsers: one per test runner, each reading a log line by line.
//!
//! The invariant: for the same text, a parser returns the status map of SWE-bench's own parser of
//! that version (or of the data set's fork of it), key by key, including its defects; the memory of
//! a parser does not grow with the log.

mod django;
mod pytest;
mod sympy;
mod verbose;

use super::status::StatusMap;
use super::{Harness, LogError};
use crate::text::{Decoding, Ends, Lines};
use serde::{Deserialize, Serialize};
use std::io::BufRead;

/// A log parser of the harness.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum LogParser {
    /// pytest's summary: lines that start with a status.
    Pytest,
    /// As `Pytest`, with paths in test parameters shortened.
    PytestOptions,
    /// As `Pytest`, for matplotlib, whose test ids contained unstable names.
    Matplotlib,
    /// pytest's summary with colours, or a status at the end of lines.
    PytestV2,
    /// seaborn's own choice of lines.
    Seaborn,
    /// sympy's test runner.
    Sympy,
    /// Django's test runner.
    Django,
    /// As `PytestV2`, for pydantic in SWE-Gym: a failure may be followed by its progress.
    Pydantic,
    /// SWE-smith's default: the lines of `pytest --verbose`, with the name first.
    PytestVerbose,
    /// Lines with the status first, in SWE-smith.
    PytestStatus,
    /// Lines of pytest's parallel workers, in SWE-smith.
    PytestWorkers,
    /// Tornado's test runner, in SWE-smith.
    Tornado,
    /// Lines `NAME ... ok` of unittest, in SWE-smith.
    Unittest,
}

/// Parses one log, whose lines are passed in order and without their ends.
pub(super) trait ReadLines: std::fmt::Debug {
    /// Parses the next line and records its statuses in `map`.
    ///
    /// # Errors
    /// If the harness would raise an exception.
    fn line(&mut self, line: &str, map: &mut StatusMap) -> Result<(), MissingName>;

    /// Called after the last line.
    fn finish(&mut self, map: &mut StatusMap);
}

/// A line has a status but no test name, for which the harness raises an exception.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct MissingName;

impl LogParser {
    /// The parser called `name` in a row's `log_parser` column, like `parse_log_pytest_v2`; some
    /// repositories' names are aliases.
    pub fn named(name: &str) -> Option<Self> {
        Some(match name.strip_prefix("parse_log_").unwrap_or(name) {
            "pytest" | "astroid" | "flask" | "marshmallow" | "pvlib" | "pyvista" | "sqlfluff"
            | "xarray" => Self::Pytest,
            "pytest_options" | "pydicom" | "requests" | "pylint" => Self::PytestOptions,
            "matplotlib" => Self::Matplotlib,
            "pytest_v2" | "astropy" | "scikit" | "sphinx" => Self::PytestV2,
            "seaborn" => Self::Seaborn,
            "sympy" => Self::Sympy,
            "django" => Self::Django,
            _ => return None,
        })
    }

    /// The line that reports `status` for `test` in a log of this parser; `None` if such lines have
    /// no fixed form.
    pub fn line(self, test: &str, status: &str) -> Option<String> {
        // Keep a name on one line, so that it cannot forge another result.
        let test = test.replace(['\n', '\r'], " ");
        match self {
            Self::Sympy | Self::Django | Self::Tornado | Self::Unittest => None,
            Self::PytestVerbose => Some(format!("{test} {status}")),
            Self::PytestWorkers => Some(format!("[gw0] {status} {test}")),
            _ => Some(format!("{status} {test}")),
        }
    }

    /// A parser for one log.
    pub(super) fn start(self, harness: Harness) -> Box<dyn ReadLines> {
        match self {
            Self::Pytest => Box::new(pytest::Summary::plain(harness)),
            Self::PytestOptions => Box::new(pytest::Summary::with_options(harness)),
            Self::Matplotlib => Box::new(pytest::Summary::of_matplotlib(harness)),
            Self::PytestV2 => Box::new(pytest::Coloured::new(harness)),
            Self::Pydantic => Box::new(pytest::Coloured::of_pydantic()),
            Self::Seaborn => Box::new(pytest::Seaborn(harness)),
            Self::Sympy => Box::<sympy::Sympy>::default(),
            Self::Django => Box::<django::Django>::default(),
            Self::PytestVerbose => Box::new(verbose::Verbose::NameFirst),
            Self::PytestStatus => Box::new(verbose::Verbose::StatusFirst),
            Self::PytestWorkers => Box::new(verbose::Verbose::Workers),
            Self::Tornado => Box::new(verbose::Tornado),
            Self::Unittest => Box::new(verbose::Unittest),
        }
    }

    /// Parses all of `log`; the statuses equal those of the harness's parser.
    ///
    /// # Errors
    /// If reading fails, or the harness's parser would raise an exception.
    pub fn parse(self, harness: Harness, log: impl BufRead) -> Result<StatusMap, LogError> {
        let mut map = StatusMap::new();
        let mut parser = self.start(harness);
        let mut lines = Lines::new(log, Ends::Universal, harness.decoding());
        while let Some(line) = lines.next()? {
            parser.line(&line, &mut map).map_err(|MissingName| LogError::MissingName)?;
        }
        parser.finish(&mut map);
        Ok(map)
    }
}

impl Harness {
    /// How this version decodes a container's output.
    pub(super) fn decoding(self) -> Decoding {
        match self {
            Self::V4_1_0 => Decoding::Strict,
            Self::V5_0_2 => Decoding::Replace,
        }
    }
}

/// Compiles a constant pattern.
#[expect(clippy::expect_used, reason = "patterns are constants, and each is used by a test")]
pub(super) fn pattern(text: &str) -> regex::Regex {
    regex::Regex::new(text).expect("a pattern of this crate")
}
