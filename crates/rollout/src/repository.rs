//! Repositories that come in an image, prepared for the agent.
//!
//! Git runs only here, before the agent gets control. What the agent does to the repository's
//! history, index or settings, or to git itself, has no effect on what is collected.

use crate::sandboxes::refused;
use orchestrate_sandbox::{Command, Sandbox, SandboxError};
use orchestrate_tasks::Task;
use std::collections::BTreeSet;
use std::time::Duration;

/// Timeout for git reading every file of a repository.
const GIT_TIMEOUT: Duration = Duration::from_mins(5);

/// Bytes of the list of tracked files that an ignore file names.
const TRACKED_BYTES: usize = 1 << 20;

const TRACKED: &str = "git -c safe.directory='*' ls-files -z -c -i --exclude-standard 2>/dev/null";
const RESET: &str = include_str!("repository/reset.sh");

/// Removes the hidden tests and, with `hide_history`, the repository's history. Returns the files
/// that git tracks although an ignore file names them.
pub(crate) async fn reset(
    sandbox: &mut dyn Sandbox,
    task: &Task,
    hide_history: bool,
) -> Result<BTreeSet<String>, SandboxError> {
    let mut list = Command::shell(TRACKED, GIT_TIMEOUT);
    list.keep_bytes = TRACKED_BYTES;
    let listed = sandbox.exec(&list).await?;
    let hide = if hide_history { "true" } else { "false" };
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
