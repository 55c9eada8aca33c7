//! Repositories that come in an image, prepared for the agent.
//!
//! Git runs only here, before the agent gets control. What the agent does to the repository's
//! history, index or settings, or to git itself, has no effect on what is collected.

use crate::sandboxes::{file_entry, refused};
use orchestrate_sandbox::{Command, Sandbox, SandboxError};
use orchestrate_tasks::{Task, TaskFile, TaskStart};
use std::collections::BTreeSet;
use std::time::Duration;

/// Timeout for git reading every file of a repository.
const GIT_TIMEOUT: Duration = Duration::from_mins(5);

/// Bytes of the list of tracked files that an ignore file names.
const TRACKED_BYTES: usize = 1 << 20;

const TRACKED: &str = "git -c safe.directory='*' ls-files -z -c -i --exclude-standard 2>/dev/null";
const RESET: &str = include_str!("repository/reset.sh");
const START: &str = include_str!("repository/start.sh");
/// Restores files from HEAD. Files that are not in HEAD are left alone.
const RESTORE: &str = "for file; do git checkout -q HEAD -- \"$file\" || true; done";

/// Creates the task's starting tree from the image's tree, commits it as HEAD of the repository,
/// and then removes the withheld files.
pub(crate) async fn start(
    sandbox: &mut dyn Sandbox,
    task: &Task,
    start: &TaskStart,
    withheld: &[String],
) -> Result<(), SandboxError> {
    let path = ".grading/start".to_owned();
    let file = TaskFile { path, content: start.patch.clone() };
    sandbox.write_files(&[file_entry(&file)]).await?;
    let result = sandbox.exec(&script(START, withheld)).await?;
    if result.success() {
        return Ok(());
    }
    let text = result.text();
    let problem = format!("image {}: the task's start: {}", task.image, text.trim());
    Err(refused(sandbox, "start", problem))
}

/// Restores the test files of a task whose starting tree is HEAD, whatever the change did to them.
pub(crate) async fn restore_tests(
    sandbox: &mut dyn Sandbox,
    start: &TaskStart,
) -> Result<(), SandboxError> {
    let result = sandbox.exec(&script(RESTORE, &start.restored)).await?;
    if result.success() {
        return Ok(());
    }
    let text = result.text();
    Err(refused(sandbox, "restore tests", text.trim().to_owned()))
}

fn script(text: &str, arguments: &[String]) -> Command {
    let mut command = Command::shell(text, GIT_TIMEOUT);
    command.argv.push("sh".to_owned());
    command.argv.extend_from_slice(arguments);
    command
}

/// Creates the tree that the agent starts from: removes the hidden tests and, with `hide_history`,
/// the repository's history. Returns the files that git tracks although an ignore file names them.
///
/// A history that contains the solution is always hidden.
pub(crate) async fn reset(
    sandbox: &mut dyn Sandbox,
    task: &Task,
    hide_history: bool,
) -> Result<BTreeSet<String>, SandboxError> {
    let starts = task.start();
    if let Some(starts) = &starts {
        start(sandbox, task, starts, &starts.withheld).await?;
    }
    let mut list = Command::shell(TRACKED, GIT_TIMEOUT);
    list.keep_bytes = TRACKED_BYTES;
    let listed = sandbox.exec(&list).await?;
    let hide = if hide_history || starts.is_some() { "true" } else { "false" };
    let mut reset = Command::shell(RESET, GIT_TIMEOUT);
    reset.argv.extend(["sh", &task.environment, hide].map(ToOwned::to_owned));
    let result = sandbox.exec(&reset).await?;
    let problem = if !result.success() {
        result.text()
    } else if listed.total_bytes > TRACKED_BYTES as u64 {
        "git tracks too many files that it also ignores".to_owned()
    } else {
        let names = listed.head.split(|&byte| byte == 0).filter(|name| !name.is_empty());
        return Ok(names.map(|name| String::from_utf8_lossy(name).into_owned()).collect());
    };
    Err(refused(sandbox, "reset", format!("image {}: {}", task.image, problem.trim())))
}
