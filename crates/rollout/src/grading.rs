//! Judging a change in a fresh sandbox that the agent never touched.

use crate::tree::TreeChange;
use orchestrate_sandbox::{
    Command, Exit, FileEntry, Sandbox, SandboxError, SandboxErrorKind, SandboxProvider, SandboxSpec,
};
use orchestrate_tasks::patch::{self, PatchError};
use orchestrate_tasks::{Task, TaskFile, Verdict};
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

/// Bytes of the test log kept at its head and at its tail.
const LOG_BYTES: usize = 1 << 20;

/// Time for removing files.
const HELPER_TIMEOUT: Duration = Duration::from_mins(1);

/// Turns a test log into a verdict. [`judge_by_summary`] fits all families that print pytest's
/// short test summary.
pub type Judge = fn(&Task, &str) -> Verdict;

/// The strict rule on pytest's short test summary: every expected test with its expected status.
pub fn judge_by_summary(task: &Task, log: &str) -> Verdict {
    orchestrate_tasks::grade(log, &task.expected)
}

/// R2E-Gym's own rule on the same summary, known defects and all.
pub fn judge_as_r2e(task: &Task, log: &str) -> Verdict {
    let verdict = judge_by_summary(task, log);
    Verdict { reward: verdict.official_reward, ..verdict }
}

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

/// Grades a text patch against a task that brings its own files, as an episode's change is graded.
///
/// # Errors
/// [`GradeError::Patch`] if the patch does not apply to the task's files, [`GradeError::Sandbox`]
/// if the sandbox fails.
pub async fn grade_patch(
    provider: &dyn SandboxProvider,
    spec: &SandboxSpec,
    task: &Task,
    patch: &str,
    judge: Judge,
) -> Result<Verdict, GradeError> {
    let patched = patch::apply(&task.agent_files, patch)?;
    let paths: BTreeSet<&str> = patched.iter().map(|file| file.path.as_str()).collect();
    let removed = task.agent_files.iter().map(|file| &file.path);
    let removed = removed.filter(|path| !paths.contains(path.as_str())).cloned().collect();
    let written = patched.iter().filter(|file| !task.agent_files.contains(file)).map(entry);
    let change = TreeChange { written: written.collect(), removed, ..TreeChange::default() };
    Ok(grade(provider, spec, task, &change, judge).await?)
}

/// A patch that was not graded.
#[derive(Debug, thiserror::Error)]
pub enum GradeError {
    /// It does not apply.
    #[error("the patch does not apply")]
    Patch(#[from] PatchError),
    /// The sandbox failed.
    #[error(transparent)]
    Sandbox(#[from] SandboxError),
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
/// Where a folder of tests holds hidden files, nothing that the agent wrote there is kept: it
/// could change what the tests do.
fn graded_files(task: &Task, change: &TreeChange) -> Vec<FileEntry> {
    let mut files: BTreeMap<String, FileEntry> = BTreeMap::new();
    let mut put = |file: FileEntry| files.insert(file.path.clone(), file);
    let removed: BTreeSet<&str> = change.removed.iter().map(String::as_str).collect();
    for file in task.agent_files.iter().filter(|f| !removed.contains(f.path.as_str())) {
        put(entry(file));
    }
    let test_folders: BTreeSet<&str> =
        task.hidden_files.iter().filter_map(|file| test_folder(&file.path)).collect();
    let planted = |path: &str| {
        let inside = |folder: &&str| path.strip_prefix(*folder).is_some_and(|p| p.starts_with('/'));
        test_folders.iter().any(inside)
    };
    for file in change.written.iter().filter(|file| !planted(&file.path)) {
        put(file.clone());
    }
    for file in &task.hidden_files {
        put(entry(file));
    }
    files.into_values().collect()
}

/// The outermost folder of `path` that is called after tests; sources live elsewhere, even where
/// tests stand beside them.
fn test_folder(path: &str) -> Option<&str> {
    let slashes = path.match_indices('/').map(|(at, _)| at);
    let folders = slashes.filter_map(|at| path.get(..at));
    folders.into_iter().find(|f| f.rsplit('/').next().is_some_and(|name| name.contains("test")))
}

/// A task's text file as the sandbox takes it.
pub(crate) fn entry(file: &TaskFile) -> FileEntry {
    FileEntry { path: file.path.clone(), mode: 0o644, content: file.content.clone().into_bytes() }
}

#[cfg(test)]
mod tests {
    use super::*;
    use orchestrate_testkit::toy_task;

    fn file(path: &str) -> FileEntry {
        FileEntry { path: path.to_owned(), mode: 0o755, content: b"agent".to_vec() }
    }

    #[test]
    fn hidden_files_win_and_their_test_folder_takes_nothing_of_the_agent() {
        let mut task = toy_task();
        let mut beside = task.hidden_files[0].clone();
        beside.path = "src/check.py".to_owned();
        task.hidden_files.push(beside);
        let written = [
            "total.py",
            "r2e_tests/deep/x.py",
            "r2e_tests/test_1.py",
            "src/new.py",
            "src/check.py",
        ];
        let change = TreeChange {
            written: written.map(file).to_vec(),
            removed: vec!["README".to_owned()],
            ..TreeChange::default()
        };
        let files = graded_files(&task, &change);
        let found: Vec<(&str, bool)> =
            files.iter().map(|f| (f.path.as_str(), f.content == b"agent")).collect();
        let expected = [
            ("r2e_tests/test_1.py", false),
            ("src/check.py", false),
            ("src/new.py", true),
            ("total.py", true),
        ];
        assert_eq!(found, expected);
    }

    #[test]
    fn known_defects_count_where_they_are_asked_for() {
        let mut task = toy_task();
        task.expected = [("a".to_owned(), orchestrate_tasks::TestStatus::Passed)].into();
        let forged = "short test summary info\nPASSED t::a\nshort test summary info\nFAILED t::a";
        let nameless = "short test summary info\nERROR t.py - ImportError";
        for log in [forged, nameless] {
            let reward = |compat: crate::RewardCompat| compat.judge()(&task, log).reward;
            assert!(reward(crate::RewardCompat::Strict) < 0.5, "{log}");
            assert!(reward(crate::RewardCompat::R2e) > 0.5, "{log}");
        }
    }

    #[test]
    fn only_folders_named_after_tests_are_test_folders() {
        assert_eq!(test_folder("sympy/core/tests/deep/test_x.py"), Some("sympy/core/tests"));
        assert_eq!(test_folder("pkg/test_x.py"), None);
        assert_eq!(test_folder("test_x.py"), None);
    }
}
