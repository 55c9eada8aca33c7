//! Judging a change in a fresh sandbox that the agent never touched.

use crate::tree::TreeChange;
use orchestrate_sandbox::{
    Command, Exit, FileEntry, Sandbox, SandboxError, SandboxErrorKind, SandboxProvider, SandboxSpec,
};
use orchestrate_tasks::{Task, TaskFile, Verdict};
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

/// Bytes of the test log kept at its head and at its tail.
const LOG_BYTES: usize = 1 << 20;

/// Time for removing files.
const HELPER_TIMEOUT: Duration = Duration::from_mins(1);

/// Turns a test log into a verdict.
pub type Judge = fn(&Task, &str) -> Verdict;

/// Opens a grader sandbox, lays the change and then the hidden files over the task's tree, runs
/// the tests and judges their log. Tests that run out of time or memory are judged by what they
/// had printed: that is the agent's doing. The sandbox is closed whatever happens.
pub(crate) async fn grade(
    provider: &dyn SandboxProvider,
    spec: &SandboxSpec,
    task: &Task,
    change: &TreeChange,
    judge: Judge,
) -> Result<Verdict, SandboxError> {
    let mut sandbox = provider.open(spec).await?;
    let log = run_tests(sandbox.as_mut(), task, change).await;
    close(sandbox).await;
    Ok(judge(task, &log?))
}

/// Closes a sandbox. A failure is the sandbox room's own to clean up, and no reason to lose a
/// result; it is only reported.
pub(crate) async fn close(sandbox: Box<dyn Sandbox>) {
    if let Err(error) = sandbox.close().await {
        tracing::warn!(%error, "sandbox was not closed cleanly");
    }
}

async fn run_tests(
    sandbox: &mut dyn Sandbox,
    task: &Task,
    change: &TreeChange,
) -> Result<String, SandboxError> {
    let given: BTreeSet<&str> = task.agent_files.iter().map(|file| file.path.as_str()).collect();
    let in_image: Vec<&String> =
        change.removed.iter().filter(|path| !given.contains(path.as_str())).collect();
    if !in_image.is_empty() {
        let mut argv = ["rm", "-f", "--"].map(ToOwned::to_owned).to_vec();
        argv.extend(in_image.into_iter().cloned());
        let remove = Command { argv, env: Vec::new(), timeout: HELPER_TIMEOUT, keep_bytes: 4096 };
        let removed = sandbox.exec(&remove).await?;
        if !removed.success() {
            return Err(refused(sandbox, "rm", removed.text()));
        }
    }
    sandbox.write_files(&graded_files(task, change)).await?;
    let mut tests = Command::shell(task.test_command.as_str(), task.test_timeout);
    tests.keep_bytes = LOG_BYTES;
    let result = sandbox.exec(&tests).await?;
    match result.exit {
        Exit::Code(_) | Exit::Signal(_) | Exit::TimedOut => Ok(result.text()),
        Exit::NotStarted => {
            Err(refused(sandbox, "test command", "the shell could not be started".to_owned()))
        }
    }
}

fn refused(sandbox: &dyn Sandbox, call: &'static str, message: String) -> SandboxError {
    SandboxError {
        sandbox: sandbox.name().to_owned(),
        kind: SandboxErrorKind::Refused { call, message },
    }
}

/// All files to write, by path: the task's own, the agent's over them, the hidden ones over all.
/// A folder of hidden files gets nothing that the agent added there.
fn graded_files(task: &Task, change: &TreeChange) -> Vec<FileEntry> {
    let mut files: BTreeMap<String, FileEntry> = BTreeMap::new();
    let mut put = |file: FileEntry| files.insert(file.path.clone(), file);
    let removed: BTreeSet<&str> = change.removed.iter().map(String::as_str).collect();
    for file in task.agent_files.iter().filter(|f| !removed.contains(f.path.as_str())) {
        put(entry(file));
    }
    let folder = |path: &str| path.rsplit_once('/').map(|(folder, _)| folder.to_owned());
    let hidden: BTreeSet<String> =
        task.hidden_files.iter().filter_map(|file| folder(&file.path)).collect();
    for file in &change.written {
        let planted = change.added.contains(&file.path)
            && folder(&file.path).is_some_and(|f| hidden.contains(&f));
        if !planted {
            put(file.clone());
        }
    }
    for file in &task.hidden_files {
        put(entry(file));
    }
    files.into_values().collect()
}

/// A task's text file as the sandbox takes it.
pub(crate) fn entry(file: &TaskFile) -> FileEntry {
    FileEntry { path: file.path.clone(), mode: 0o644, content: file.content.clone().into_bytes() }
}
