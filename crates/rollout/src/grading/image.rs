//! Grading in a task's own image, as R2E-Gym and as SWE-bench do it.

use super::graded::{GradeError, GradedChange, LOG_BYTES, log_bytes, test_output};
use super::logs::APPLY_FAILED;
use super::rules::GradingRules;
use crate::sandboxes::{file_entry, refused};
use orchestrate_sandbox::{Command, ExecResult, Exit, FileEntry, Sandbox, SandboxError};
use orchestrate_tasks::swe::{self, Harness, SweRow};
use orchestrate_tasks::{Task, TaskFile};
use std::time::Duration;

/// Folder, inside the task's, to which files are uploaded; the scripts move them from there.
const STAGING_FOLDER: &str = ".grading";

/// Timeout for applying a change to the tree.
const APPLY_TIMEOUT: Duration = Duration::from_mins(2);

/// Exit of the scripts when a change does not apply.
const NOT_APPLIED: Exit = Exit::Code(3);

const PREPARE_R2E: &str = include_str!("prepare_r2e.sh");
const APPLY: &str = include_str!("apply.sh");

/// Paths whose changes in an R2E-Gym repository never count: the hidden tests and their runner.
const HIDDEN_PATHS: &[&str] = &["r2e_tests", "r2e_tests/*", "run_tests.sh"];

/// Paths whose changes do not count with [`GradingRules::exclude_test_changes`]: tests, by the rule
/// that keeps them out of gold patches, and files that pytest and Python read by themselves.
const TEST_PATHS: &[&str] = &[
    "tests/*",
    "*/tests/*",
    "Tests/*",
    "*/Tests/*",
    "test/*",
    "*/test/*",
    "Test/*",
    "*/Test/*",
    "test_*.py",
    "*/test_*.py",
    "*_test.py",
    "conftest.py",
    "*/conftest.py",
    "sitecustomize.py",
    "*/sitecustomize.py",
    "usercustomize.py",
    "*/usercustomize.py",
    "pytest.ini",
    ".pytest.ini",
];

/// Grades as R2E-Gym does, but in a container that the agent never touched.
pub(super) async fn grade_r2e(
    sandbox: &mut dyn Sandbox,
    task: &Task,
    patch: &str,
    rules: GradingRules,
) -> Result<GradedChange, GradeError> {
    let mut files = vec![staged("patch", patch)];
    files.extend(task.hidden_files.iter().map(|file| {
        let path = format!("{STAGING_FOLDER}/{}", file.path);
        file_entry(&TaskFile { path, content: file.content.clone() })
    }));
    sandbox.write_files(&files).await?;
    let test_paths: &[&str] = if rules.exclude_test_changes { TEST_PATHS } else { &[] };
    let excluded = HIDDEN_PATHS.iter().chain(test_paths);
    let options: Vec<String> = excluded.map(|glob| format!("--exclude={glob}")).collect();
    let options: Vec<&str> = options.iter().map(String::as_str).collect();
    let prepared = sandbox.exec(&script(PREPARE_R2E, &options)).await?;
    let apply_log = prepared.text();
    match prepared.exit {
        Exit::Code(0) => {}
        NOT_APPLIED => return Err(GradeError::NotApplied(apply_log.trim().to_owned())),
        _ => return Err(refused(sandbox, "prepare", apply_log).into()),
    }
    let runner = format!(
        "if [ -f /root/run_tests.sh ]; then exec bash /root/run_tests.sh; fi\n{}",
        task.test_command
    );
    let result = run_tests(sandbox, task, &runner).await?;
    let verdict = (rules.grade_log)(task, &test_output(sandbox, &result)?);
    if (verdict.reward - verdict.official_reward).abs() > 0.5 {
        tracing::warn!(task_id = task.id.as_str(), "the strict rule and R2E-Gym's own disagree");
    }
    Ok(GradedChange {
        verdict,
        patch: patch.to_owned(),
        log: log_bytes(&result),
        apply_log,
        eval_script: None,
        problem: None,
        test_time: result.elapsed,
    })
}

/// Grades as SWE-bench's harness does. What the harness calls an error of the instance is a verdict
/// too: no test passed.
pub(super) async fn grade_swe_bench(
    sandbox: &mut dyn Sandbox,
    task: &Task,
    row: &SweRow,
    patch: &str,
    rules: GradingRules,
) -> Result<GradedChange, GradeError> {
    let eval = swe::eval_script(row, rules.harness)
        .map_err(|error| refused(sandbox, "eval.sh", error.to_string()))?;
    sandbox.write_files(&[staged("patch", patch), staged("eval.sh", &eval)]).await?;
    let mut graded = GradedChange {
        verdict: row.verdict(None),
        patch: patch.to_owned(),
        log: Vec::new(),
        apply_log: String::new(),
        eval_script: Some(eval),
        problem: None,
        test_time: Duration::ZERO,
    };
    // The harness skips empty patches. Here the tests run, to show their result without a change.
    let order = match (patch.is_empty(), rules.harness) {
        (true, _) => "none",
        (false, Harness::V4_1_0) => "4",
        (false, Harness::V5_0_2) => "5",
    };
    let applied = sandbox.exec(&script(APPLY, &[order])).await?;
    graded.apply_log = applied.text();
    match applied.exit {
        Exit::Code(0) => {}
        NOT_APPLIED => {
            graded.problem = Some(APPLY_FAILED.to_owned());
            return Ok(graded);
        }
        _ => return Err(refused(sandbox, "apply", graded.apply_log).into()),
    }
    let result = run_tests(sandbox, task, &task.test_command).await?;
    test_output(sandbox, &result)?;
    graded.log = log_bytes(&result);
    graded.test_time = result.elapsed;
    if result.exit == Exit::TimedOut {
        let seconds = task.test_timeout.as_secs();
        graded.log.extend(format!("\n\nTimeout error: {seconds} seconds exceeded.").into_bytes());
        graded.problem = Some(format!("Test timed out after {seconds} seconds."));
        return Ok(graded);
    }
    match swe::grade(row, rules.harness, graded.log.as_slice()) {
        Ok(report) => graded.verdict = row.verdict(Some(report)),
        Err(error) => graded.problem = Some(error.to_string()),
    }
    Ok(graded)
}

fn staged(name: &str, content: &str) -> FileEntry {
    file_entry(&TaskFile { path: format!("{STAGING_FOLDER}/{name}"), content: content.to_owned() })
}

fn script(text: &str, arguments: &[&str]) -> Command {
    let mut command = Command::shell(text, APPLY_TIMEOUT);
    command.argv.push("sh".to_owned());
    command.argv.extend(arguments.iter().map(|&argument| argument.to_owned()));
    command
}

/// Runs the tests in the image's own environment, without the variables that make the output of an
/// agent's commands readable, because tests may notice those.
async fn run_tests(
    sandbox: &mut dyn Sandbox,
    task: &Task,
    runner: &str,
) -> Result<ExecResult, SandboxError> {
    // Without a network, pip would retry for minutes in vain.
    let environment = "unset PYTHONDONTWRITEBYTECODE PYTHONUNBUFFERED PAGER GIT_PAGER LANG\n\
        export PIP_RETRIES=0";
    let mut tests = Command::shell(format!("{environment}\n{runner}"), task.test_timeout);
    tests.keep_bytes = LOG_BYTES;
    sandbox.exec(&tests).await
}
