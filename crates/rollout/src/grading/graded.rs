//! The result of grading one change, and the output that it keeps.

use crate::sandboxes::refused;
use orchestrate_sandbox::{ExecResult, Exit, Sandbox, SandboxError};
use orchestrate_tasks::Verdict;
use orchestrate_tasks::patch::PatchError;
use orchestrate_types::ByteSize;
use std::time::Duration;

/// Bytes of a test log that are kept from its start, and as many from its end; supervisors keep no
/// more.
pub(super) const LOG_BYTES: usize = 4 << 20;

/// A graded change, with the evidence for its verdict.
#[derive(Debug, Clone)]
pub struct GradedChange {
    /// The verdict.
    pub verdict: Verdict,
    /// The change as a unified diff.
    pub patch: String,
    /// Output of the tests; of more than 8 MiB, the start and the end.
    pub log: Vec<u8>,
    /// The commands that tried to apply the diff, and their output; empty if files were written
    /// instead.
    pub apply_log: String,
    /// The script that ran the tests, if the family has one.
    pub eval_script: Option<String>,
    /// Why there is no report, if the harness calls this an error of the instance.
    pub problem: Option<String>,
    /// How long the tests ran.
    pub test_time: Duration,
}

/// Why a change was not graded.
#[derive(Debug, thiserror::Error)]
pub enum GradeError {
    /// The patch does not apply to the task's files.
    #[error("the patch does not apply")]
    Patch(#[from] PatchError),
    /// The patch does not apply to the tree in the image; with git's message.
    #[error("the patch does not apply: {0}")]
    NotApplied(String),
    /// The task's files with the change do not fit into a grader's folder.
    #[error(
        "the task's files take {needed} with the change, and a grader's folder has only {room}"
    )]
    TooLarge {
        /// Size of all files.
        needed: ByteSize,
        /// Size of the folder.
        room: ByteSize,
    },
    /// The task's own tests gave no reward that can be used, for which the change is not the reason.
    #[error("{0}")]
    NoReward(String),
    /// The sandbox failed.
    #[error(transparent)]
    Sandbox(#[from] SandboxError),
}

/// Fails if a test command did not run. How it ended does not matter.
pub(super) fn check_started(
    sandbox: &dyn Sandbox,
    result: &ExecResult,
) -> Result<(), SandboxError> {
    match result.exit {
        Exit::Code(_) | Exit::Signal(_) | Exit::TimedOut | Exit::Stopped => Ok(()),
        Exit::NotStarted => Err(refused(
            sandbox,
            "test command",
            format!("it could not be started: {}", result.text()),
        )),
    }
}

/// Every kept byte of an output. If its middle is missing, a line says so.
pub(super) fn log_bytes(result: &ExecResult) -> Vec<u8> {
    let kept = (result.head.len() + result.tail.len()) as u64;
    if result.total_bytes > kept {
        return result.text().into_bytes();
    }
    [result.head.as_slice(), result.tail.as_slice()].concat()
}
