//! A repository that is in an image: prepared for the agent, and read when the agent is done.
//!
//! The invariant: the change is taken between two trees, the one that the agent was given and the
//! one that it left. What it did to the repository's history, index or settings does not matter,
//! and changes that came with the image are no part of it.

use crate::grading::refused;
use orchestrate_sandbox::{Command, Exit, Sandbox, SandboxError};
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

/// The tree that an agent was given: the name git has for it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Given {
    tree: String,
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
    let tree = text.lines().next_back().unwrap_or_default().trim();
    let is_name = tree.len() >= 40 && tree.bytes().all(|byte| byte.is_ascii_hexdigit());
    if result.success() && is_name {
        return Ok(Given { tree: tree.to_owned() });
    }
    Err(refused(sandbox, "reset", format!("image {}: {}", task.image, text.trim())))
}

/// What the agent changed, as a diff that `git apply` takes. A repository in which git does not
/// work any more, or a change of over 16 MiB, is the agent's doing: there is nothing to grade then,
/// and the diff is empty.
pub(crate) async fn collect(
    sandbox: &mut dyn Sandbox,
    given: &Given,
) -> Result<String, SandboxError> {
    for form in ["text", "binary"] {
        let mut command = script(COLLECT, &[SHADOW, &given.tree, form]);
        command.keep_bytes = PATCH_BYTES;
        let result = sandbox.exec(&command).await?;
        match result.exit {
            Exit::Code(0) => {}
            Exit::Code(_) | Exit::NotStarted if result.oom_kills == 0 => {
                tracing::warn!(output = result.text(), "the agent's change cannot be read");
                return Ok(String::new());
            }
            exit => {
                let why =
                    format!("git ended with {exit:?}, {} killed for memory", result.oom_kills);
                return Err(refused(sandbox, "diff", why));
            }
        }
        if result.total_bytes > PATCH_BYTES as u64 {
            tracing::warn!(bytes = result.total_bytes, "the agent's change is too large to grade");
            return Ok(String::new());
        }
        if let Ok(patch) = String::from_utf8(result.head) {
            return Ok(patch);
        }
    }
    Err(refused(sandbox, "diff", "git's own form of binary files is not ASCII".to_owned()))
}

/// A command that runs `text` in the task's folder.
fn script(text: &str, arguments: &[&str]) -> Command {
    let mut command = Command::shell(text.replace("@GIT@", GIT), GIT_TIMEOUT);
    command.argv.push("sh".to_owned());
    command.argv.extend(arguments.iter().map(|&argument| argument.to_owned()));
    command
}
