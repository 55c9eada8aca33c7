//! A task of any family.

use crate::finding::Finding;
use crate::harbor::HarborRow;
use crate::swe::{Report, SweFamily, SweRow};
use crate::task_file::TaskFile;
use orchestrate_types::TaskId;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::time::Duration;

/// Which part of a family a task belongs to.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Split {
    /// Used for training.
    Train,
    /// Not trained on: unseen identifiers, known bug families.
    HeldOut,
    /// Not trained on: unseen bug families.
    HeldOutFamilies,
}

/// Result of one test, with R2E-Gym's names.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "UPPERCASE")]
pub enum TestStatus {
    /// The test passed.
    Passed,
    /// An assertion failed.
    Failed,
    /// The test could not run.
    Error,
}

impl TestStatus {
    /// The status as people read it, e.g. `passed`.
    pub fn name(self) -> &'static str {
        match self {
            Self::Passed => "passed",
            Self::Failed => "failed",
            Self::Error => "error",
        }
    }
}

/// Where a task's tree comes from, which decides how a change is extracted and graded.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Origin {
    /// [`Task::agent_files`], in an otherwise empty folder.
    #[default]
    Files,
    /// A git repository in an R2E-Gym image, with its hidden tests.
    R2e,
    /// A git repository in an image of the SWE-bench family; the row defines how it is tested.
    SweBench(Box<SweRow>),
    /// An external worker provides the environment and returns the reward; these are the row's
    /// columns, which it gets.
    #[serde(alias = "outside")]
    External(Box<serde_json::Map<String, serde_json::Value>>),
    /// The container of a Harbor task; the row contains its tests and defines how they run.
    Harbor(Box<HarborRow>),
}

impl Origin {
    fn is_files(&self) -> bool {
        *self == Self::Files
    }
}

/// One problem, with its environment and its hidden tests.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Task {
    /// Unique within its family, e.g. `micro__000123` or `aiohttp__<commit>`.
    pub id: TaskId,
    /// Task family, e.g. `micro`.
    pub environment: String,
    /// Bug family inside the environment, for reports.
    pub family: String,
    /// Training or held-out part of the family.
    pub split: Split,
    /// The issue text that the agent reads.
    pub problem_statement: String,
    /// Container image.
    pub image: String,
    /// Folder of the repository in the container.
    pub workdir: String,
    /// Files the agent finds in `workdir`.
    pub agent_files: Vec<TaskFile>,
    /// Files that only the grader gets; they are written over the patched tree.
    pub hidden_files: Vec<TaskFile>,
    /// Shell command that runs the hidden tests in `workdir`.
    pub test_command: String,
    /// Time limit of [`Task::test_command`].
    pub test_timeout: Duration,
    /// Every hidden test with the status it must have.
    pub expected: BTreeMap<String, TestStatus>,
    /// A unified diff that solves the task. Never shown to the agent.
    pub gold_patch: String,
    /// Where the tree comes from.
    #[serde(default, skip_serializing_if = "Origin::is_files")]
    pub origin: Origin,
}

impl Task {
    /// Whether all files of its starting tree come with the task. Its sandbox starts from an empty folder,
    /// which a reset can empty again; a tree in the image needs a fresh container each time.
    pub fn brings_all_files(&self) -> bool {
        self.origin == Origin::Files && !self.agent_files.is_empty()
    }

    /// Folder of the repository's own programs, which is put first in the `PATH` of commands;
    /// `None` if the image does not need it.
    pub fn programs(&self) -> Option<&'static str> {
        match self.origin {
            Origin::Files | Origin::External(_) | Origin::Harbor(_) => None,
            Origin::R2e => Some("/testbed/.venv/bin"),
            Origin::SweBench(_) => Some("/opt/miniconda3/envs/testbed/bin"),
        }
    }

    /// How the task's starting tree is made from the image's tree; `None` if they are the same.
    pub fn start(&self) -> Option<TaskStart> {
        match &self.origin {
            Origin::SweBench(row) if row.family() == SweFamily::SweSmith => {
                let (withheld, restored) = row.smith_test_files();
                Some(TaskStart { patch: row.patch.clone(), withheld, restored })
            }
            Origin::Files
            | Origin::R2e
            | Origin::SweBench(_)
            | Origin::External(_)
            | Origin::Harbor(_) => None,
        }
    }

    /// Environment variables that the task sets for every command, in addition to its image's.
    pub fn variables(&self) -> impl Iterator<Item = (&str, &str)> {
        let of_row = match &self.origin {
            Origin::Harbor(row) => Some(&row.image.env),
            Origin::Files | Origin::R2e | Origin::SweBench(_) | Origin::External(_) => None,
        };
        of_row.into_iter().flatten().map(|(name, value)| (name.as_str(), value.as_str()))
    }
}

/// How a task's starting tree is made from the image's tree. In that case the repository's history
/// contains the solution.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TaskStart {
    /// Unified diff that is applied to the image's tree. Never shown to the agent.
    pub patch: String,
    /// Test files that the agent does not get, relative to the tree.
    pub withheld: Vec<String>,
    /// Test files that are restored before the tests run, relative to the tree.
    pub restored: Vec<String>,
}

/// Result of grading one log.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Verdict {
    /// 1.0 if the whole status map is as expected, else 0.0 (the strict rule).
    pub reward: f64,
    /// R2E-Gym's own rule on the same log.
    pub official_reward: f64,
    /// Parsed test statuses.
    pub statuses: BTreeMap<String, TestStatus>,
    /// Tests whose status differs from what was expected (missing ones included).
    pub differing: Vec<String>,
    /// SWE-bench's entry of `report.json`; `None` for other families, and where its harness leaves
    /// no report (no command applies the patch, the tests ran out of time, the log cannot be read).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub report: Option<Report>,
    /// What the grader noticed besides the results; empty in records of older versions.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub suspicious: Vec<Finding>,
}

impl Verdict {
    /// The verdict with these findings in addition. Some of them set the reward to 0, see
    /// [`Finding::voids`].
    #[must_use]
    pub fn with_findings(mut self, findings: impl IntoIterator<Item = Finding>) -> Self {
        self.suspicious.extend(findings);
        self.suspicious.sort_unstable();
        self.suspicious.dedup();
        if self.suspicious.iter().any(|finding| finding.voids()) {
            self.reward = 0.0;
        }
        self
    }
}
