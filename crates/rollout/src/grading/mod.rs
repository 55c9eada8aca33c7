//! Grading a change in a fresh sandbox that the agent never touched.
//!
//! The invariant: the grader's sandbox receives the change and nothing else from the agent's; the
//! tests that grade it are ours or the image's. With the strict rules, the verdict comes from a
//! process that the tested code cannot reach ([`orchestrate_tasks::reporter`]).

mod change;
mod files;
mod graded;
mod image;
mod logs;
mod rules;
mod tests_run;

pub use graded::{GradeError, GradedChange};
pub use logs::{GradeLogs, write_log_folder};
pub use rules::{GradingRules, LogGrader, grade_as_r2e, grade_by_summary};

use crate::sandboxes::close;
use crate::tree::TreeChange;
use orchestrate_sandbox::{SandboxProvider, SandboxSpec};
use orchestrate_tasks::{Origin, Task};

/// Opens a grader sandbox, applies the change, runs the hidden tests and grades their log.
///
/// Tests that run out of time or memory are graded by the output they had until then, because that
/// is the agent's doing. The sandbox is always closed.
pub(crate) async fn grade(
    provider: &dyn SandboxProvider,
    spec: &SandboxSpec,
    task: &Task,
    change: &TreeChange,
    rules: GradingRules,
) -> Result<GradedChange, GradeError> {
    if spec.reusable && task.origin == Origin::Files {
        files::check_room(task, change, spec.limits.tmpfs)?;
    }
    let mut sandbox = provider.open(spec).await?;
    let graded = match &task.origin {
        Origin::Files => files::grade(sandbox.as_mut(), task, change, rules).await,
        Origin::R2e => image::grade_r2e(sandbox.as_mut(), task, &change.patch, rules).await,
        Origin::SweBench(row) => {
            image::grade_swe_bench(sandbox.as_mut(), task, row, &change.patch, rules).await
        }
    };
    close(sandbox).await;
    graded
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
        Origin::Files => files::apply_patch(task, patch)?,
        Origin::R2e | Origin::SweBench(_) => {
            TreeChange { patch: patch.to_owned(), ..TreeChange::default() }
        }
    };
    grade(provider, spec, task, &change, rules.for_evaluation()).await
}
