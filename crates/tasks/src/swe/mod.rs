//! SWE-bench and its family: rows, evaluation scripts, log parsers and verdicts.
//!
//! The invariant: for the same row and log of SWE-bench, the script, status map, test lists and
//! verdict equal those of the official harness in the version that [`Harness`] names. Rows of other
//! data sets ([`SweFamily`]) are run by the commands, and their logs parsed by the parsers, of
//! those data sets' own harnesses, which are forks of SWE-bench's. A row for which these are
//! unknown is refused.
//!
//! [`SweRow`] is a row, [`eval_script`] writes the script that a grading container runs, and
//! [`grade`] turns the log of that script into a [`Report`].

mod evidence;
mod family;
mod gym;
mod parsers;
mod reading;
mod rebench;
mod row;
mod script;
mod smith;
mod spec;
mod status;
mod task;
mod verdict;

pub use evidence::infra_failure;
pub use family::SweFamily;
pub use parsers::LogParser;
pub use reading::{DidNotRun, InfraFailure, Reading};
pub use rebench::{Commands, InstallConfig};
pub use row::{EvalType, SweRow};
pub use script::{eval_script, strict_eval_script, test_directives, test_files};
pub use spec::{SPECS, Spec, SpecError};
pub use status::{OTHER_NAMES_BYTES, Status, StatusMap};
pub use verdict::{Outcomes, Report, Resolution, TestsStatus, grade};

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use std::str::FromStr;

/// A version of SWE-bench's harness.
#[derive(
    Debug,
    Clone,
    Copy,
    PartialEq,
    Eq,
    PartialOrd,
    Ord,
    Hash,
    Default,
    Serialize,
    Deserialize,
    JsonSchema,
)]
#[schemars(rename = "HarnessVersion")]
pub enum Harness {
    /// The rules of published numbers up to 2026.
    #[default]
    #[serde(rename = "4.1.0")]
    V4_1_0,
    /// Skipped tests, forged results and truncated names no longer count as solved.
    #[serde(rename = "5.0.2")]
    V5_0_2,
}

orchestrate_settings::setting_types!(Harness);

/// The text is not a version of the harness that this crate reproduces.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("`{0}` is not a known version of the harness (4.1.0 or 5.0.2)")]
pub struct UnknownHarness(String);

impl Harness {
    /// All versions, oldest first.
    pub const ALL: [Self; 2] = [Self::V4_1_0, Self::V5_0_2];

    /// The version, as settings and the command line spell it.
    pub fn version(self) -> &'static str {
        match self {
            Self::V4_1_0 => "4.1.0",
            Self::V5_0_2 => "5.0.2",
        }
    }

    /// One line about the version's rules, for help texts.
    pub fn summary(self) -> &'static str {
        match self {
            Self::V4_1_0 => "The rules of published numbers up to 2026",
            Self::V5_0_2 => {
                "Skipped tests, forged results and truncated names no longer count as solved"
            }
        }
    }
}

impl FromStr for Harness {
    type Err = UnknownHarness;

    fn from_str(version: &str) -> Result<Self, UnknownHarness> {
        let known = Self::ALL.into_iter().find(|harness| harness.version() == version);
        known.ok_or_else(|| UnknownHarness(version.to_owned()))
    }
}

/// Serialises a version as reports contain it: `swebench-4.1.0`.
mod reported {
    use super::Harness;
    use serde::{Deserialize, Deserializer, Serializer, de::Error};

    const PREFIX: &str = "swebench-";

    #[expect(clippy::trivially_copy_pass_by_ref, reason = "serde passes fields by reference")]
    pub(super) fn serialize<S: Serializer>(harness: &Harness, to: S) -> Result<S::Ok, S::Error> {
        to.collect_str(&format_args!("{PREFIX}{}", harness.version()))
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<Harness, D::Error> {
        let name = String::deserialize(from)?;
        name.strip_prefix(PREFIX).unwrap_or(&name).parse().map_err(D::Error::custom)
    }
}

/// A log that cannot be graded.
#[derive(Debug, thiserror::Error)]
pub enum LogError {
    /// Reading failed, or the log is not UTF-8, which is an error in version 4.
    #[error("cannot read the test log")]
    Io(#[from] std::io::Error),
    /// A line has a status but no test name, for which the harness raises an exception.
    #[error(
        "the log has a status without a test name, which this version of the harness cannot parse"
    )]
    MissingName,
    /// The repository is not in the harness's table, and the row does not name a parser.
    #[error("no log parser for repository `{0}`; name one in the row's `log_parser` column")]
    Parser(String),
}
