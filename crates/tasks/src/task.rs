//! One task, whatever family it comes from.

use crate::swe::{Report, SweRow};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::time::Duration;

/// Which part of a family a task belongs to.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Split {
    /// Trained on.
    Train,
    /// Unseen identifiers, known bug families.
    HeldOut,
    /// Unseen bug families.
    HeldOutFamilies,
}

/// A text file of a task, relative to the task's folder.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct TaskFile {
    /// Relative path.
    pub path: String,
    /// Content.
    pub content: String,
}

/// Result of one test, in R2E-Gym's words.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "UPPERCASE")]
pub enum TestStatus {
    /// It passed.
    Passed,
    /// An assertion failed.
    Failed,
    /// It could not run.
    Error,
}

/// Where a task's tree comes from, and with it how a change to it is taken and judged.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Origin {
    /// [`Task::agent_files`], in a folder that is empty otherwise.
    #[default]
    Files,
    /// A git repository in an image of R2E-Gym's, with its hidden tests.
    R2e,
    /// A git repository in an image of SWE-bench's; the row says how it is tested.
    SweBench(Box<SweRow>),
}

impl Origin {
    fn is_files(&self) -> bool {
        *self == Self::Files
    }
}

/// One problem with its environment and its judge.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Task {
    /// Unique within its family, e.g. `micro__000123` or `aiohttp__<commit>`.
    pub id: String,
    /// Task family, e.g. `micro`.
    pub environment: String,
    /// Bug family inside the environment, for reports.
    pub family: String,
    /// Part.
    pub split: Split,
    /// What the agent reads.
    pub problem_statement: String,
    /// Container image.
    pub image: String,
    /// Folder of the repository in the container.
    pub workdir: String,
    /// Files the agent finds in `workdir`.
    pub agent_files: Vec<TaskFile>,
    /// Files only the grader gets, laid over the patched tree.
    pub hidden_files: Vec<TaskFile>,
    /// Shell command that runs the hidden tests in `workdir`.
    pub test_command: String,
    /// Longest time for it.
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
    /// Folder of the repository's own programs, which come first in a command's `PATH`; `None`
    /// where the image needs no such help.
    pub fn programs(&self) -> Option<&'static str> {
        match self.origin {
            Origin::Files => None,
            Origin::R2e => Some("/testbed/.venv/bin"),
            Origin::SweBench(_) => Some("/opt/miniconda3/envs/testbed/bin"),
        }
    }
}

/// What the judge says about one log.
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
    /// none (no command applies the patch, the tests ran out of time, the log cannot be read).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub report: Option<Report>,
}
