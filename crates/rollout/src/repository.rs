//! Repositories that come in an image: prepared for the agent, and compared when it is done.
//!
//! The invariant: the agent's change is the difference between the tree that it was given and the
//! tree that it left. What it did to the repository's history, index or settings has no effect, and
//! changes that came with the image are not part of it.

use crate::sandboxes::refused;
use orchestrate_sandbox::{Command, ExecResult, Exit, Sandbox, SandboxError};
use orchestrate_tasks::Task;
use std::time::Duration;

/// Folder of our own git repository over the tree, in the agent's container.
const SHADOW_GIT_DIR: &str = "/opt/.orchestrate.git";

/// Timeout for git reading every file of a repository.
const GIT_TIMEOUT: Duration = Duration::from_mins(5);

/// Largest change that is graded, in bytes; supervisors keep no more of one output.
const MAX_PATCH_BYTES: usize = 16 << 20;

const GIT: &str = include_str!("repository/git.sh");
const RESET: &str = include_str!("repository/reset.sh");
const COLLECT: &str = include_str!("repository/collect.sh");

/// Files and folders that an agent may add, so that git can read them in time.
const MAX_ADDED_FILES: u64 = 500_000;

/// Size that an agent may add, in KiB.
const MAX_ADDED_KIB: u64 = 4 << 20;

/// A timeout of git is the agent's doing, and not a slow machine's, if [`GIT_TIMEOUT`] is more than
/// this many times what git took for the given tree.
const MIN_SLOWDOWN: u32 = 20;

/// Exit code of the script for a tree that grew by more than that.
const GREW_TOO_MUCH: i32 = 75;

/// The tree that an agent was given, with which its own tree is compared.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct RepositoryBaseline {
    /// Git's id of the tree.
    tree: String,
    /// Number of files and folders.
    files: u64,
    /// Size in KiB.
    kib: u64,
    /// How long git took to read it.
    took: Duration,
}

/// Removes the hidden tests and, with `hide_history`, the repository's history, and records the
/// tree that is left.
pub(crate) async fn reset(
    sandbox: &mut dyn Sandbox,
    task: &Task,
    hide_history: bool,
) -> Result<RepositoryBaseline, SandboxError> {
    let hide = if hide_history { "true" } else { "false" };
    let command = script(RESET, &[SHADOW_GIT_DIR, &task.environment, hide]);
    let result = sandbox.exec(&command).await?;
    let text = result.text();
    let mut fields = text.lines().next_back().unwrap_or_default().split(' ');
    let tree = fields.next().unwrap_or_default().to_owned();
    let is_tree_id = tree.len() >= 40 && tree.bytes().all(|byte| byte.is_ascii_hexdigit());
    let mut number = || fields.next().and_then(|field| field.parse().ok());
    if let (true, true, Some(files), Some(kib)) = (result.success(), is_tree_id, number(), number())
    {
        return Ok(RepositoryBaseline { tree, files, kib, took: result.elapsed });
    }
    Err(refused(sandbox, "reset", format!("image {}: {}", task.image, text.trim())))
}

/// The agent's change, as a diff that `git apply` accepts; `None` if it is too large to be graded.
///
/// If git no longer works in the repository, that is the agent's doing: nothing can be graded, and
/// the diff is empty.
pub(crate) async fn collect(
    sandbox: &mut dyn Sandbox,
    baseline: &RepositoryBaseline,
) -> Result<Option<String>, SandboxError> {
    let files = (baseline.files + MAX_ADDED_FILES).to_string();
    let kib = (baseline.kib + MAX_ADDED_KIB).to_string();
    for form in ["text", "binary"] {
        let mut command = script(COLLECT, &[SHADOW_GIT_DIR, &baseline.tree, form, &files, &kib]);
        command.keep_bytes = MAX_PATCH_BYTES;
        let result = sandbox.exec(&command).await?;
        if is_too_large(&result, baseline) {
            let (exit, bytes) = (result.exit, result.total_bytes);
            tracing::warn!(?exit, bytes, "the agent's change is too large to grade");
            return Ok(None);
        }
        match result.exit {
            Exit::Code(0) => {}
            Exit::Code(_) | Exit::NotStarted => {
                tracing::warn!(output = result.text(), "the agent's change cannot be read");
                return Ok(Some(String::new()));
            }
            exit @ (Exit::Signal(_) | Exit::TimedOut) => {
                return Err(refused(sandbox, "diff", format!("git ended with {exit:?}")));
            }
        }
        if let Ok(patch) = String::from_utf8(result.head) {
            return Ok(Some(patch));
        }
    }
    Err(refused(sandbox, "diff", "git's format for binary files is not ASCII".to_owned()))
}

/// Whether the agent made the tree too large for git: with the given tree, in the same container
/// and within the same limits, git had finished.
fn is_too_large(result: &ExecResult, baseline: &RepositoryBaseline) -> bool {
    let is_slow = result.exit == Exit::TimedOut && baseline.took * MIN_SLOWDOWN < GIT_TIMEOUT;
    result.total_bytes > MAX_PATCH_BYTES as u64
        || result.exit == Exit::Code(GREW_TOO_MUCH)
        || result.oom_kills > 0
        || is_slow
}

/// A command that runs the script `text` in the task's folder.
fn script(text: &str, arguments: &[&str]) -> Command {
    let mut command = Command::shell(text.replace("@GIT@", GIT), GIT_TIMEOUT);
    command.argv.push("sh".to_owned());
    command.argv.extend(arguments.iter().map(|&argument| argument.to_owned()));
    command
}
