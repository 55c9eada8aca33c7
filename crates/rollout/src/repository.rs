//! A repository that is in an image: prepared for the agent, and read when the agent is done.
//!
//! The invariant: the change is taken between two trees, the one that the agent was given and the
//! one that it left. What it did to the repository's history, index or settings does not matter,
//! and changes that came with the image are no part of it.

use crate::grading::refused;
use orchestrate_sandbox::{Command, ExecResult, Exit, Sandbox, SandboxError};
use orchestrate_tasks::Task;
use std::time::Duration;

/// Where our own repository over the tree lies in the agent's container.
const SHADOW: &str = "/opt/.orchestrate.git";

/// Longest time for looking at every file of a repository.
const GIT_TIMEOUT: Duration = Duration::from_mins(5);

/// Largest change that is graded, in bytes; supervisors keep no more of one output.
const PATCH_BYTES: usize = 16 << 20;

const GIT: &str = include_str!("repository/git.sh");
const RESET: &str = include_str!("repository/reset.sh");
const COLLECT: &str = include_str!("repository/collect.sh");

/// Files and folders that an agent may add, for git to look at in its time.
const MORE_FILES: u64 = 500_000;

/// KiB that an agent may add.
const MORE_KIB: u64 = 4 << 20;

/// How much longer than with the tree as it was given git must take, until that is the agent's
/// doing and not a slow machine's.
const TIMES_SLOWER: u32 = 20;

/// What the script says of a tree that grew by more than that.
const GREW: i32 = 75;

/// The tree that an agent was given.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Given {
    /// The name git has for it.
    tree: String,
    files: u64,
    kib: u64,
    /// How long git needed for it.
    took: Duration,
}

/// Takes the hidden tests (and, if asked, the history) out of the agent's reach, and remembers the
/// tree as it then is.
pub(crate) async fn reset(
    sandbox: &mut dyn Sandbox,
    task: &Task,
    hide_history: bool,
) -> Result<Given, SandboxError> {
    let hide = if hide_history { "true" } else { "false" };
    let command = script(RESET, &[SHADOW, &task.environment, hide]);
    let result = sandbox.exec(&command).await?;
    let text = result.text();
    let mut words = text.lines().next_back().unwrap_or_default().split(' ');
    let tree = words.next().unwrap_or_default().to_owned();
    let is_name = tree.len() >= 40 && tree.bytes().all(|byte| byte.is_ascii_hexdigit());
    let mut number = || words.next().and_then(|word| word.parse().ok());
    if let (true, true, Some(files), Some(kib)) = (result.success(), is_name, number(), number()) {
        return Ok(Given { tree, files, kib, took: result.elapsed });
    }
    Err(refused(sandbox, "reset", format!("image {}: {}", task.image, text.trim())))
}

/// What the agent changed, as a diff that `git apply` takes; `None` where it is more than can be
/// graded. A repository in which git does not work any more is the agent's doing: there is nothing
/// to grade then, and the diff is empty.
pub(crate) async fn collect(
    sandbox: &mut dyn Sandbox,
    given: &Given,
) -> Result<Option<String>, SandboxError> {
    let files = (given.files + MORE_FILES).to_string();
    let kib = (given.kib + MORE_KIB).to_string();
    for form in ["text", "binary"] {
        let mut command = script(COLLECT, &[SHADOW, &given.tree, form, &files, &kib]);
        command.keep_bytes = PATCH_BYTES;
        let result = sandbox.exec(&command).await?;
        if is_too_much(&result, given) {
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
    Err(refused(sandbox, "diff", "git's own form of binary files is not ASCII".to_owned()))
}

/// Whether what git met there can only be what the agent put there: with the tree as it was given,
/// in the same container and within the same limits, it had come to its end.
fn is_too_much(result: &ExecResult, given: &Given) -> bool {
    let slowed = result.exit == Exit::TimedOut && given.took * TIMES_SLOWER < GIT_TIMEOUT;
    result.total_bytes > PATCH_BYTES as u64
        || result.exit == Exit::Code(GREW)
        || result.oom_kills > 0
        || slowed
}

/// A command that runs `text` in the task's folder.
fn script(text: &str, arguments: &[&str]) -> Command {
    let mut command = Command::shell(text.replace("@GIT@", GIT), GIT_TIMEOUT);
    command.argv.push("sh".to_owned());
    command.argv.extend(arguments.iter().map(|&argument| argument.to_owned()));
    command
}
