//! Grading a change in a fresh sandbox that the agent never touched.
//!
//! The invariant: the grader's sandbox receives the change and nothing else from the agent's; the
//! tests that grade it are ours or the image's. With the strict rules, the verdict comes from a
//! process that the tested code cannot reach ([`orchestrate_tasks::reporter`]).

mod change;
mod files;
mod graded;
mod image;
mod installation;
mod logs;
mod record;
mod rules;
mod set_up;
mod swe_reported;
mod tests_run;

pub use graded::{GradeError, GradedChange};
pub use logs::{GradeLogs, READABLE, log_files, replace_file, write_log_folder};
pub use record::{GradingInputs, KnownVerdict, known_verdict, record_verdict, remove_verdict};
pub use rules::{GradingRules, LogGrader, grade_as_r2e, grade_by_summary};

use crate::collection::CollectedChange;
use crate::repository;
use crate::sandboxes::close;
use crate::tree::{self, TreeChange};
use orchestrate_sandbox::{Sandbox, SandboxProvider, SandboxSpec};
use orchestrate_tasks::{Origin, Task};
use std::borrow::Cow;

/// What is graded.
#[derive(Debug, Clone, Copy)]
pub(crate) enum GradedInput<'a> {
    /// A change with its diff.
    Change(&'a TreeChange),
    /// Files that are compared with those in the grader's sandbox first.
    Files(&'a CollectedChange),
}

/// Opens a grader sandbox, applies the change, runs the hidden tests and grades their log.
///
/// Tests that run out of time or memory are graded by the output they had until then, because that
/// is the agent's doing. The sandbox is always closed.
pub(crate) async fn grade(
    provider: &dyn SandboxProvider,
    spec: &SandboxSpec,
    task: &Task,
    input: GradedInput<'_>,
    rules: GradingRules,
) -> Result<GradedChange, GradeError> {
    if let GradedInput::Change(change) = input
        && spec.reusable
    {
        files::check_room(task, change, spec.limits.tmpfs)?;
    }
    let mut sandbox = provider.open(spec).await?;
    let graded = grade_in(sandbox.as_mut(), task, input, rules).await;
    close(sandbox).await;
    graded
}

async fn grade_in(
    sandbox: &mut dyn Sandbox,
    task: &Task,
    input: GradedInput<'_>,
    rules: GradingRules,
) -> Result<GradedChange, GradeError> {
    if let Some(start) = task.start() {
        repository::start(sandbox, task, &start, &[]).await?;
    }
    let change = match input {
        GradedInput::Change(change) => Cow::Borrowed(change),
        GradedInput::Files(files) => Cow::Owned(tree::change_in(sandbox, files).await?),
    };
    let mut graded = match &task.origin {
        Origin::Files | Origin::External(_) => files::grade(sandbox, task, &change, rules).await,
        Origin::R2e => image::grade_r2e(sandbox, task, &change.patch, rules).await,
        Origin::SweBench(row) => {
            image::grade_swe_bench(sandbox, task, row, &change.patch, rules).await
        }
        Origin::Harbor(_) => Err(not_by_patch()),
    }?;
    graded.verdict = graded.verdict.with_findings(change.findings.iter().copied());
    Ok(graded)
}

fn not_by_patch() -> GradeError {
    let reason = "a Harbor task is graded by the state of its container, not by a patch";
    GradeError::NotApplied(reason.to_owned())
}

/// Grades a text patch in the same way as an episode's change.
///
/// # Errors
/// [`GradeError::Patch`] or [`GradeError::NotApplied`] if the patch does not apply to the task's
/// tree (for SWE-bench this is a verdict instead, as in its harness), and [`GradeError::Sandbox`]
/// if the sandbox fails.
pub async fn grade_patch(
    provider: &dyn SandboxProvider,
    spec: &SandboxSpec,
    task: &Task,
    patch: &str,
    rules: GradingRules,
) -> Result<GradedChange, GradeError> {
    let change = match task.origin {
        Origin::Files | Origin::External(_) => files::apply_patch(task, patch)?,
        Origin::R2e | Origin::SweBench(_) => {
            TreeChange { patch: patch.to_owned(), ..TreeChange::default() }
        }
        Origin::Harbor(_) => return Err(not_by_patch()),
    };
    let rules = rules.for_evaluation();
    grade(provider, spec, task, GradedInput::Change(&change), rules).await
}
