//! Judging a change in a fresh sandbox that the agent never touched.
//!
//! The invariant: the grader's container gets the change and nothing else of the agent's; the
//! tests that judge it are ours or the image's.

mod files;
mod image;
mod logs;

pub use logs::{GradeLogs, write_log_folder};

use crate::tree::TreeChange;
use orchestrate_sandbox::{
    ExecResult, Exit, FileEntry, Sandbox, SandboxError, SandboxErrorKind, SandboxProvider,
    SandboxSpec,
};
use orchestrate_tasks::patch::PatchError;
use orchestrate_tasks::swe::Harness;
use orchestrate_tasks::{Origin, Task, TaskFile, Verdict};
use orchestrate_types::ByteSize;
use std::time::Duration;

/// Bytes of the test log kept at its head and at its tail; supervisors keep no more.
const LOG_BYTES: usize = 16 << 20;

/// Turns a test log into a verdict. [`judge_by_summary`] fits all families that print pytest's
/// short test summary.
pub type Judge = fn(&Task, &str) -> Verdict;

/// Whose rules turn a log into a verdict.
#[derive(Debug, Clone, Copy)]
pub struct Rules {
    /// For logs with pytest's short summary.
    pub judge: Judge,
    /// For SWE-bench.
    pub harness: Harness,
    /// Whether an agent's changes to tests, and to files that pytest reads by itself, stay out of
    /// the graded tree of an R2E-Gym task. The hidden tests import such files.
    pub tests_are_ours: bool,
}

impl Rules {
    /// The strict rules, with `judge` for logs with a summary.
    pub fn new(judge: Judge) -> Self {
        Self { judge, harness: Harness::default(), tests_are_ours: true }
    }
}

/// The strict rule on pytest's short test summary: every expected test with its expected status.
pub fn judge_by_summary(task: &Task, log: &str) -> Verdict {
    orchestrate_tasks::grade(log, &task.expected)
}

/// R2E-Gym's own rule on the same summary, known defects and all.
pub fn judge_as_r2e(task: &Task, log: &str) -> Verdict {
    let verdict = judge_by_summary(task, log);
    Verdict { reward: verdict.official_reward, ..verdict }
}

/// A graded change, with what proves the verdict.
#[derive(Debug, Clone)]
pub struct Graded {
    /// The verdict.
    pub verdict: Verdict,
    /// The change as a diff.
    pub patch: String,
    /// What the tests printed; of over 32 MiB both ends.
    pub log: Vec<u8>,
    /// Which commands tried to apply the diff, and what they printed; empty where files are
    /// written instead.
    pub apply_log: String,
    /// The script that ran the tests, where the family has one.
    pub eval_script: Option<String>,
    /// Why there is no report, where the harness calls this an error of the instance.
    pub problem: Option<String>,
    /// How long the tests ran.
    pub test_time: Duration,
}

/// A patch that was not graded.
#[derive(Debug, thiserror::Error)]
pub enum GradeError {
    /// It does not apply.
    #[error("the patch does not apply")]
    Patch(#[from] PatchError),
    /// It does not apply to the tree in the image; git's words.
    #[error("the patch does not apply: {0}")]
    NotApplied(String),
    /// With it the task's files need more room than a grader has.
    #[error("the change needs {needed} for the task's files, and a grader has {room}")]
    TooLarge {
        /// What all files take.
        needed: ByteSize,
        /// What there is.
        room: ByteSize,
    },
    /// The sandbox failed.
    #[error(transparent)]
    Sandbox(#[from] SandboxError),
}

/// Opens a grader sandbox, brings in the change and the hidden tests, runs them and judges their
/// log. Tests that run out of time or memory are judged by what they had printed: that is the
/// agent's doing. The sandbox is closed whatever happens.
pub(crate) async fn grade(
    provider: &dyn SandboxProvider,
    spec: &SandboxSpec,
    task: &Task,
    change: &TreeChange,
    rules: Rules,
) -> Result<Graded, GradeError> {
    if spec.reusable && task.origin == Origin::Files {
        files::check_room(task, change, spec.limits.tmpfs)?;
    }
    let mut sandbox = provider.open(spec).await?;
    let graded = match &task.origin {
        Origin::Files => by_files(sandbox.as_mut(), task, change, rules).await,
        Origin::R2e => image::r2e(sandbox.as_mut(), task, &change.patch, rules).await,
        Origin::SweBench(row) => {
            image::swe_bench(sandbox.as_mut(), task, row, &change.patch, rules).await
        }
    };
    close(sandbox).await;
    graded
}

/// Grades a text patch as an episode's change is graded.
///
/// # Errors
/// [`GradeError::Patch`] or [`GradeError::NotApplied`] if the patch does not apply to the task's
/// tree (for SWE-bench that is a verdict instead, as for its harness), [`GradeError::Sandbox`] if
/// the sandbox fails.
pub async fn grade_patch(
    provider: &dyn SandboxProvider,
    spec: &SandboxSpec,
    task: &Task,
    patch: &str,
    rules: Rules,
) -> Result<Graded, GradeError> {
    let change = match task.origin {
        Origin::Files => files::change(task, patch)?,
        Origin::R2e | Origin::SweBench(_) => {
            TreeChange { patch: patch.to_owned(), ..TreeChange::default() }
        }
    };
    grade(provider, spec, task, &change, rules).await
}

async fn by_files(
    sandbox: &mut dyn Sandbox,
    task: &Task,
    change: &TreeChange,
    rules: Rules,
) -> Result<Graded, GradeError> {
    let result = files::run_tests(sandbox, task, change).await?;
    Ok(Graded {
        verdict: (rules.judge)(task, &finished(sandbox, &result)?),
        patch: change.patch.clone(),
        log: log_bytes(&result),
        apply_log: String::new(),
        eval_script: None,
        problem: None,
        test_time: result.elapsed,
    })
}

/// The text of a test command that ran.
fn finished(sandbox: &dyn Sandbox, result: &ExecResult) -> Result<String, SandboxError> {
    match result.exit {
        Exit::Code(_) | Exit::Signal(_) | Exit::TimedOut => Ok(result.text()),
        Exit::NotStarted => Err(refused(
            sandbox,
            "test command",
            format!("it cannot be started: {}", result.text()),
        )),
    }
}

/// Every kept byte of an output; where some are missing in the middle a line says so.
fn log_bytes(result: &ExecResult) -> Vec<u8> {
    let kept = (result.head.len() + result.tail.len()) as u64;
    if result.total_bytes > kept {
        return result.text().into_bytes();
    }
    [result.head.as_slice(), result.tail.as_slice()].concat()
}

/// Closes a sandbox. A failure is the sandbox room's own to clean up, and no reason to lose a
/// result; it is only reported.
pub(crate) async fn close(sandbox: Box<dyn Sandbox>) {
    if let Err(error) = sandbox.close().await {
        tracing::warn!(%error, "sandbox was not closed cleanly");
    }
}

pub(crate) fn refused(sandbox: &dyn Sandbox, call: &'static str, message: String) -> SandboxError {
    SandboxError {
        sandbox: sandbox.name().to_owned(),
        kind: SandboxErrorKind::Refused { call, message },
    }
}

/// A task's text file as the sandbox takes it.
pub(crate) fn entry(file: &TaskFile) -> FileEntry {
    FileEntry { path: file.path.clone(), mode: 0o644, content: file.content.clone().into_bytes() }
}

#[cfg(test)]
mod tests {
    use orchestrate_testkit::toy_task;

    #[test]
    fn known_defects_count_where_they_are_asked_for() {
        let mut task = toy_task();
        task.expected = [("a".to_owned(), orchestrate_tasks::TestStatus::Passed)].into();
        let forged = "short test summary info\nPASSED t::a\nshort test summary info\nFAILED t::a";
        let nameless = "short test summary info\nERROR t.py - ImportError";
        for log in [forged, nameless] {
            let reward = |compat: crate::RewardCompat| (compat.judge())(&task, log).reward;
            assert!(reward(crate::RewardCompat::Strict) < 0.5, "{log}");
            assert!(reward(crate::RewardCompat::R2e) > 0.5, "{log}");
        }
    }
}
