//! Grading of tasks that bring their own files.

use super::change::{GradedPart, strict_change};
use super::graded::{GradeError, GradedChange, LOG_BYTES};
use super::rules::GradingRules;
use super::tests_run::{TestRun, run_by_log, run_reported};
use crate::sandboxes::{file_entry, refused};
use crate::tree::TreeChange;
use orchestrate_sandbox::{Command, FileEntry, LINK_MODE, Sandbox, SandboxError};
use orchestrate_tasks::Task;
use orchestrate_tasks::patch::{self, PatchError};
use orchestrate_tasks::reporter::{self, TestCommand, TestPlan};
use orchestrate_types::ByteSize;
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

/// Timeout for removing files.
const HELPER_TIMEOUT: Duration = Duration::from_mins(1);

/// Folder, inside the task's, to which the reporter's files are uploaded. It removes them.
const STAGING_FOLDER: &str = ".grading";

/// Page size of the kernels that containers run on, in bytes. Where it is larger, files take more.
const PAGE: u64 = 4096;

/// The change that a text patch makes to the task's files.
pub(super) fn apply_patch(task: &Task, patch: &str) -> Result<TreeChange, PatchError> {
    let patched = patch::apply(&task.agent_files, patch)?;
    let paths: BTreeSet<&str> = patched.iter().map(|file| file.path.as_str()).collect();
    let removed = task.agent_files.iter().map(|file| &file.path);
    let removed = removed.filter(|path| !paths.contains(path.as_str())).cloned().collect();
    let written = patched.iter().filter(|file| !task.agent_files.contains(file)).map(file_entry);
    let mut written: Vec<FileEntry> = written.collect();
    let links = patch::created_links(patch).unwrap_or_default();
    for file in written.iter_mut().filter(|file| links.contains_key(&file.path)) {
        file.mode = LINK_MODE | 0o777;
    }
    Ok(TreeChange { written, removed, patch: patch.to_owned(), ..TreeChange::default() })
}

/// Writes the task's files, the change over them and the hidden files over both, then runs the
/// tests.
pub(super) async fn grade(
    sandbox: &mut dyn Sandbox,
    task: &Task,
    change: &TreeChange,
    rules: GradingRules,
) -> Result<GradedChange, GradeError> {
    let (change, part) = if rules.is_strict() {
        strict_change(task, change)
    } else {
        (change.clone(), GradedPart::default())
    };
    let run = run_tests(sandbox, task, &change, &part, rules).await?;
    Ok(GradedChange {
        verdict: run.verdict.with_findings(part.findings),
        patch: change.patch,
        log: run.log,
        apply_log: String::new(),
        eval_script: None,
        problem: None,
        test_time: run.elapsed,
    })
}

async fn run_tests(
    sandbox: &mut dyn Sandbox,
    task: &Task,
    change: &TreeChange,
    part: &GradedPart,
    rules: GradingRules,
) -> Result<TestRun, SandboxError> {
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
    let mut files = graded_files(task, change);
    let command = reported_command(task, rules);
    if let Some(command) = &command {
        let plan = TestPlan {
            touched: part.touched.clone(),
            tracing: tracing_files(task),
            hidden: task.hidden_files.iter().map(|file| file.path.clone()).collect(),
            unset: Vec::new(),
        };
        let reporter = reporter::files(task, command, &plan, STAGING_FOLDER)
            .map_err(|error| refused(sandbox, "plan", error.to_string()))?;
        files.extend(reporter.iter().map(file_entry));
    }
    sandbox.write_files(&files).await?;
    if let Some(command) = &command
        && let Some(run) = run_reported(sandbox, task, command, STAGING_FOLDER).await?
    {
        return Ok(run);
    }
    let mut tests = Command::shell(task.test_command.as_str(), task.test_timeout);
    tests.keep_bytes = LOG_BYTES;
    run_by_log(sandbox, task, &tests, rules).await
}

/// The tests' command, if the reporter runs them.
fn reported_command(task: &Task, rules: GradingRules) -> Option<TestCommand> {
    rules.is_strict().then(|| TestCommand::parse(&task.test_command)).flatten()
}

/// Files that set trace functions before the change.
fn tracing_files(task: &Task) -> Vec<String> {
    let words = ["settrace", "setprofile", "sys.monitoring"];
    let sets = |content: &str| words.iter().any(|word| content.contains(word));
    let files = task.agent_files.iter().filter(|file| sets(&file.content));
    files.map(|file| file.path.clone()).collect()
}

/// Rejects a change with which the task's files no longer fit into a grader's folder. If they do
/// not fit without it either, that is not the agent's doing and the change passes.
pub(super) fn check_room(
    task: &Task,
    change: &TreeChange,
    room: ByteSize,
) -> Result<(), GradeError> {
    let own = match TestCommand::parse(&task.test_command) {
        Some(_) => reporter::FILE_BYTES,
        None => 0,
    };
    let needed = ByteSize(footprint(&graded_files(task, change)).0 + own);
    let without = ByteSize(footprint(&graded_files(task, &TreeChange::default())).0 + own);
    if needed > room && without <= room {
        return Err(GradeError::TooLarge { needed, room });
    }
    Ok(())
}

/// Size of files in a folder in memory, which stores whole pages.
fn footprint(files: &[FileEntry]) -> ByteSize {
    let pages = files.iter().map(|file| (file.content.len() as u64).div_ceil(PAGE));
    ByteSize(pages.sum::<u64>() * PAGE)
}

/// All files to write, sorted by path: the task's own, the agent's over them, the hidden ones over
/// both.
///
/// If a test folder has hidden files, nothing that the agent wrote there is kept, because it could
/// change what the tests do. A file of the agent that takes the place of a folder of other files, or
/// the reverse, is left out too: it would break the grading as if the infrastructure had failed, and
/// so let an agent escape its verdict.
fn graded_files(task: &Task, change: &TreeChange) -> Vec<FileEntry> {
    let mut files: BTreeMap<String, FileEntry> = BTreeMap::new();
    let removed: BTreeSet<&str> = change.removed.iter().map(String::as_str).collect();
    for file in task.agent_files.iter().filter(|f| !removed.contains(f.path.as_str())) {
        files.insert(file.path.clone(), file_entry(file));
    }
    for file in &task.hidden_files {
        files.insert(file.path.clone(), file_entry(file));
    }
    let test_folders: BTreeSet<&str> =
        task.hidden_files.iter().filter_map(|file| test_folder(&file.path)).collect();
    let contains = |folder: &str, path: &str| {
        path.strip_prefix(folder).is_some_and(|rest| rest.starts_with('/'))
    };
    let hidden: BTreeSet<&str> = task.hidden_files.iter().map(|file| file.path.as_str()).collect();
    let is_planted = |path: &str| {
        hidden.contains(path) || test_folders.iter().any(|folder| contains(folder, path))
    };
    let kept: BTreeSet<String> = files.keys().cloned().collect();
    let conflicts = |path: &str| {
        let below = format!("{path}/");
        path.match_indices('/').any(|(at, _)| path.get(..at).is_some_and(|up| kept.contains(up)))
            || kept.range(below.clone()..).next().is_some_and(|next| next.starts_with(&below))
    };
    for file in &change.written {
        if !is_planted(&file.path) && !conflicts(&file.path) {
            files.insert(file.path.clone(), file.clone());
        }
    }
    files.into_values().collect()
}

/// The outermost folder of `path` whose name contains `test`.
fn test_folder(path: &str) -> Option<&str> {
    let slashes = path.match_indices('/').map(|(at, _)| at);
    let folders = slashes.filter_map(|at| path.get(..at));
    folders.into_iter().find(|f| f.rsplit('/').next().is_some_and(|name| name.contains("test")))
}

#[cfg(test)]
mod tests {
    use super::*;
    use orchestrate_tasks::{Origin, TaskFile};
    use orchestrate_testkit::toy_task;

    fn file(path: &str) -> FileEntry {
        FileEntry { path: path.to_owned(), mode: 0o755, content: b"agent".to_vec() }
    }

    #[test]
    fn hidden_files_replace_the_agents_and_everything_in_their_test_folder() {
        let mut task = toy_task();
        let mut check = task.hidden_files[0].clone();
        check.path = "src/check.py".to_owned();
        task.hidden_files.push(check);
        let written = [
            "total.py",
            "r2e_tests/deep/x.py",
            "r2e_tests/test_1.py",
            "r2e_tests",
            "src",
            "src/new.py",
            "src/check.py",
            "src/check.py/x",
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
    fn files_of_the_agent_never_take_the_place_of_a_folder_of_kept_files_or_the_reverse() {
        let mut task = toy_task();
        let kept = ["pkg/conftest.py", "setup.cfg"];
        task.agent_files = kept
            .iter()
            .map(|path| TaskFile { path: (*path).to_owned(), content: String::new() })
            .collect();
        let written = ["pkg", "pkg.py", "setup.cfg/x.py", "setup/x.py"].map(file).to_vec();
        let change = TreeChange { written, ..TreeChange::default() };
        let files = graded_files(&task, &change);
        let found: Vec<&str> = files.iter().map(|file| file.path.as_str()).collect();
        let expected =
            ["pkg.py", "pkg/conftest.py", "r2e_tests/test_1.py", "setup.cfg", "setup/x.py"];
        assert_eq!(found, expected);
    }

    #[test]
    fn change_that_leaves_no_room_for_the_tests_is_rejected() {
        let task = toy_task();
        let own = footprint(&graded_files(&task, &TreeChange::default()));
        let filler = FileEntry { content: vec![0; 4097], ..file("filler") };
        let change = TreeChange { written: vec![filler], ..TreeChange::default() };
        let needed = ByteSize(own.0 + 2 * PAGE);
        assert!(check_room(&task, &change, needed).is_ok());
        let error = check_room(&task, &change, ByteSize(needed.0 - 1)).unwrap_err();
        assert!(matches!(error, GradeError::TooLarge { needed: n, .. } if n == needed), "{error}");
        // A task that does not fit by itself is not the agent's fault.
        assert!(check_room(&task, &change, ByteSize(own.0 - 1)).is_ok());
    }

    #[test]
    fn only_a_task_that_brings_all_its_files_uses_a_sandbox_again() {
        assert!(toy_task().brings_all_files());
        // The tree is the image's: a reset would empty it.
        assert!(!Task { agent_files: Vec::new(), ..toy_task() }.brings_all_files());
        assert!(!Task { origin: Origin::R2e, ..toy_task() }.brings_all_files());
    }

    #[test]
    fn only_folders_with_test_in_their_name_are_test_folders() {
        assert_eq!(test_folder("sympy/core/tests/deep/test_x.py"), Some("sympy/core/tests"));
        assert_eq!(test_folder("pkg/test_x.py"), None);
        assert_eq!(test_folder("test_x.py"), None);
    }
}
