//! Grading in a task's own image: R2E-Gym's way and SWE-bench's.

use super::logs::APPLY_FAILED;
use super::{GradeError, Graded, LOG_BYTES, Rules, entry, finished, log_bytes, refused};
use orchestrate_sandbox::{Command, ExecResult, Exit, FileEntry, Sandbox, SandboxError};
use orchestrate_tasks::swe::{self, Harness, SweRow};
use orchestrate_tasks::{Task, TaskFile};
use std::time::Duration;

/// Where files are brought to, in the task's folder; the scripts move them on.
const STAGE: &str = ".grading";

/// Time for putting a change into the tree.
const APPLY_TIMEOUT: Duration = Duration::from_mins(2);

/// What the scripts say when a change does not apply.
const NOT_APPLIED: Exit = Exit::Code(3);

const PREPARE_R2E: &str = include_str!("prepare_r2e.sh");
const APPLY: &str = include_str!("apply.sh");

/// What of a change to an R2E-Gym repository never counts: the hidden tests and their runner.
const HIDDEN: &[&str] = &["r2e_tests", "r2e_tests/*", "run_tests.sh"];

/// And what does not count where tests are ours: tests, by the rule that keeps them out of the gold
/// patches, and files that pytest and Python read by themselves.
const TESTS: &[&str] = &[
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

/// Grades as R2E-Gym does, but in a container that the agent never saw.
pub(super) async fn r2e(
    sandbox: &mut dyn Sandbox,
    task: &Task,
    patch: &str,
    rules: Rules,
) -> Result<Graded, GradeError> {
    let mut files = vec![staged("patch", patch)];
    files.extend(task.hidden_files.iter().map(|file| {
        let path = format!("{STAGE}/{}", file.path);
        entry(&TaskFile { path, content: file.content.clone() })
    }));
    sandbox.write_files(&files).await?;
    let left_out = HIDDEN.iter().chain(if rules.tests_are_ours { TESTS } else { &[] });
    let excludes: Vec<String> = left_out.map(|glob| format!("--exclude={glob}")).collect();
    let excludes: Vec<&str> = excludes.iter().map(String::as_str).collect();
    let prepared = sandbox.exec(&script(PREPARE_R2E, &excludes)).await?;
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
    let result = run(sandbox, task, &runner).await?;
    let verdict = (rules.judge)(task, &finished(sandbox, &result)?);
    if (verdict.reward - verdict.official_reward).abs() > 0.5 {
        tracing::warn!(task_id = task.id, "the strict rule and R2E-Gym's own disagree");
    }
    Ok(Graded {
        verdict,
        patch: patch.to_owned(),
        log: log_bytes(&result),
        apply_log,
        eval_script: None,
        problem: None,
        test_time: result.elapsed,
    })
}

/// Grades as SWE-bench's harness does. What to it is an error of the instance is a verdict, too:
/// nothing passed.
pub(super) async fn swe_bench(
    sandbox: &mut dyn Sandbox,
    task: &Task,
    row: &SweRow,
    patch: &str,
    rules: Rules,
) -> Result<Graded, GradeError> {
    let eval = swe::eval_script(row, rules.harness)
        .map_err(|error| refused(sandbox, "eval.sh", error.to_string()))?;
    sandbox.write_files(&[staged("patch", patch), staged("eval.sh", &eval)]).await?;
    let mut graded = Graded {
        verdict: row.verdict(None),
        patch: patch.to_owned(),
        log: Vec::new(),
        apply_log: String::new(),
        eval_script: Some(eval),
        problem: None,
        test_time: Duration::ZERO,
    };
    // The harness gives up an empty patch unseen; here it shows what the tests say without one.
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
    let result = run(sandbox, task, &task.test_command).await?;
    finished(sandbox, &result)?;
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
    entry(&TaskFile { path: format!("{STAGE}/{name}"), content: content.to_owned() })
}

fn script(text: &str, arguments: &[&str]) -> Command {
    let mut command = Command::shell(text, APPLY_TIMEOUT);
    command.argv.push("sh".to_owned());
    command.argv.extend(arguments.iter().map(|&argument| argument.to_owned()));
    command
}

/// Runs the tests in the environment that the image makes, without the settings that make an
/// agent's commands readable: tests may notice those.
async fn run(
    sandbox: &mut dyn Sandbox,
    task: &Task,
    runner: &str,
) -> Result<ExecResult, SandboxError> {
    // Without a network, pip would ask again and again for minutes and find nothing all the same.
    let ours = "unset PYTHONDONTWRITEBYTECODE PYTHONUNBUFFERED PAGER GIT_PAGER LANG\n\
        export PIP_RETRIES=0";
    let mut tests = Command::shell(format!("{ours}\n{runner}"), task.test_timeout);
    tests.keep_bytes = LOG_BYTES;
    sandbox.exec(&tests).await
}
