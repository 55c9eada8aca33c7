//! The set-up of a SWE-bench tree before its tests, and the check of what it left.
//!
//! The harness installs the changed tree as root. The supervisor marks the container's file system
//! before and lists it afterwards; what an installation of the project does not write makes the verdict
//! void. The hidden tests are written after that check, by the image's own programs.

use super::installation::{InstallationRules, Installed, JudgedChanges};
use super::swe_reported::{PYTHON, SplitScript};
use super::{
    graded::LOG_BYTES,
    image::{MOVE_SCRIPT, test_command},
};
use crate::sandboxes::{file_entry, refused};
use orchestrate_sandbox::{Command, ExecResult, Exit, Sandbox, SandboxError, SandboxErrorKind};
use orchestrate_tasks::{Task, TaskFile};
use std::time::Duration;

/// Timeout for looking at what is installed.
const LOOK_TIMEOUT: Duration = Duration::from_mins(1);
const INSTALLED: &str = include_str!("installed.py");

/// Paths, relative to the root, in which nothing is loaded by the programs that run after the set-up.
const SKIPPED: &[&str] = &["proc", "sys", "dev", "run", "tmp", "var/tmp", "root/.cache"];

/// Bytes of paths in one command.
const ARGUMENT_BYTES: usize = 64 << 10;

/// Keeps git's index before the set-up, and puts it back after it: a changed one makes git leave files
/// as they are.
const KEEP_INDEX: &str = "cp .git/index .git/index.kept 2> /dev/null";
const RESTORE_INDEX: &str = "rm -f .git/index.lock\n\
    [ ! -f .git/index.kept ] || mv -f .git/index.kept .git/index\n";

/// How the set-up ended.
#[derive(Debug)]
pub(super) struct SetUp {
    /// What its commands printed, and how the last one ended.
    pub(super) result: ExecResult,
    /// What it changed that an installation may not change.
    pub(super) refused: Option<String>,
    /// Whether what it changed was looked at, where that was asked for.
    pub(super) is_checked: bool,
}

/// Sets the tree up and writes the hidden tests. `install` is in `/eval.sh` already. `existed` says
/// which paths the tree had before; `None` leaves out the check, for a tree without a change.
pub(super) async fn run(
    sandbox: &mut dyn Sandbox,
    task: &Task,
    repo: &str,
    split: &SplitScript,
    existed: Option<&(dyn Fn(&str) -> bool + Sync)>,
) -> Result<SetUp, SandboxError> {
    if !split.prelude.is_empty() {
        sandbox.exec(&test_command(task, &split.prelude)).await?;
    }
    let before = match existed {
        Some(_) => look(sandbox, task, KEEP_INDEX, &[]).await?,
        None => None,
    };
    if before.is_some() {
        let skip: Vec<String> = SKIPPED.iter().map(|&path| path.to_owned()).collect();
        sandbox.mark_system(&skip).await?;
    }
    let is_checked = existed.is_none() || before.is_some();
    let result = sandbox.exec(&test_command(task, &task.test_command)).await?;
    if let (Some(before), Some(existed)) = (&before, existed) {
        let rules = InstallationRules::new(&task.workdir, repo, &split.install, before, existed);
        if let Some(what) = check(sandbox, task, &rules).await? {
            return Ok(SetUp { result, refused: Some(what), is_checked });
        }
    }
    if result.exit == Exit::TimedOut {
        return Ok(SetUp { result, refused: None, is_checked });
    }
    let result = write_tests(sandbox, task, split, result).await?;
    Ok(SetUp { result, refused: None, is_checked })
}

/// Runs `first`, and reads what is installed, with the text of `more`; `None` if this image's
/// interpreter cannot tell.
async fn look(
    sandbox: &mut dyn Sandbox,
    task: &Task,
    first: &str,
    more: &[String],
) -> Result<Option<Installed>, SandboxError> {
    let script = format!("{first}\nexec {PYTHON} -I -S -B -c \"$0\" \"$@\"");
    let mut command = Command::shell(script, LOOK_TIMEOUT);
    command.argv.extend([INSTALLED.to_owned(), task.workdir.clone()]);
    command.argv.extend_from_slice(more);
    command.keep_bytes = LOG_BYTES;
    let found = sandbox.exec(&command).await?;
    let is_complete = found.exit == Exit::Code(0);
    Ok(serde_json::from_str(&found.text()).ok().filter(|_| is_complete))
}

/// Checks what the set-up changed, and removes what it compiled. `Some` with the first thing that it may
/// not change.
async fn check(
    sandbox: &mut dyn Sandbox,
    task: &Task,
    rules: &InstallationRules<'_>,
) -> Result<Option<String>, SandboxError> {
    let changes = match sandbox.list_system_changes().await {
        Ok(changes) => changes,
        Err(SandboxError { kind: SandboxErrorKind::TooLarge { what, .. }, .. }) => {
            return Ok(Some(what));
        }
        Err(error) => return Err(error),
    };
    let JudgedChanges { refused, compiled, entry_points } = rules.judge(&changes);
    if refused.is_some() {
        return Ok(refused);
    }
    for part in parts(&compiled) {
        let mut argv = ["rm", "-f", "--"].map(ToOwned::to_owned).to_vec();
        argv.extend_from_slice(part);
        let remove = Command { argv, env: Vec::new(), timeout: LOOK_TIMEOUT, keep_bytes: 4096 };
        if sandbox.exec(&remove).await?.exit != Exit::Code(0) {
            return Ok(Some("compiled files that cannot be removed".to_owned()));
        }
    }
    // So many lists of entry points cannot come from one project.
    let first = parts(&entry_points).next().unwrap_or_default();
    if first.len() < entry_points.len() {
        return Ok(entry_points.into_iter().next());
    }
    let unreadable = || Some("installed files that cannot be read".to_owned());
    let after = look(sandbox, task, "", first).await?;
    Ok(after.map_or_else(unreadable, |after| rules.new_hook(&after)))
}

/// Parts of a list of paths that fit into one command each.
fn parts(paths: &[String]) -> impl Iterator<Item = &[String]> {
    let mut bytes = 0;
    paths.chunk_by(move |path, _| {
        bytes += path.len() + 1;
        let fits = bytes <= ARGUMENT_BYTES;
        bytes = if fits { bytes } else { 0 };
        fits
    })
}

/// Writes the hidden tests, as the harness does it, and adds what that prints to the log.
async fn write_tests(
    sandbox: &mut dyn Sandbox,
    task: &Task,
    split: &SplitScript,
    mut result: ExecResult,
) -> Result<ExecResult, SandboxError> {
    let content =
        split.patch.replacen("cd /testbed\n", &format!("cd /testbed\n{RESTORE_INDEX}"), 1);
    let file = TaskFile { path: ".grading/eval.sh".to_owned(), content };
    sandbox.write_files(&[file_entry(&file)]).await?;
    let written =
        sandbox.exec(&test_command(task, &format!("{MOVE_SCRIPT}\n{}", task.test_command))).await?;
    if written.exit == Exit::NotStarted {
        return Err(refused(sandbox, "test patch", written.text()));
    }
    result.tail.extend(written.head);
    result.tail.extend(written.tail);
    result.total_bytes = result.total_bytes.saturating_add(written.total_bytes);
    result.elapsed = result.elapsed.saturating_add(written.elapsed);
    Ok(result)
}
