//! Grading in a task's own image, as R2E-Gym and as SWE-bench do it.

use super::change::{GradedPart, PatchListing, exclude_option};
use super::graded::{GradeError, GradedChange, LOG_BYTES, check_started, log_bytes};
use super::logs::APPLY_FAILED;
use super::rules::GradingRules;
use super::set_up::{self, SetUp};
use super::swe_reported::{SplitScript, log_of};
use super::tests_run::{TestRun, run_by_log, run_reported};
use crate::collection::failed_here;
use crate::offload;
use crate::repository;
use crate::sandboxes::{file_entry, refused};
use orchestrate_sandbox::{Command, ExecResult, Exit, FileEntry, Sandbox, SandboxError};
use orchestrate_tasks::patch;
use orchestrate_tasks::r2e::HIDDEN_FOLDER;
use orchestrate_tasks::reporter::{self, TestCommand, TestPlan};
use orchestrate_tasks::swe::{self, Harness, SweFamily, SweRow};
use orchestrate_tasks::{Finding, Task, TaskFile};
use std::time::Duration;

/// Folder, inside the task's, to which files are uploaded; the scripts move them from there.
const STAGING_FOLDER: &str = ".grading";

/// Moves an uploaded `eval.sh` to its place.
pub(super) const MOVE_SCRIPT: &str = "mv .grading/eval.sh /eval.sh && rm -rf .grading";

/// Timeout for applying a change to the tree.
const APPLY_TIMEOUT: Duration = Duration::from_mins(2);

/// Exit of the scripts when a change does not apply.
const NOT_APPLIED: Exit = Exit::Code(3);

const LIST_PATCH: &str = include_str!("list_patch.sh");
const PREPARE_R2E: &str = include_str!("prepare_r2e.sh");
const APPLY: &str = include_str!("apply.sh");

/// Paths whose changes in an R2E-Gym repository never count: the hidden tests and their runner.
const HIDDEN_PATHS: &[&str] = &["r2e_tests", "r2e_tests/*", "run_tests.sh"];

/// Paths that one command may leave out, in number and in bytes.
const MAX_EXCLUDED: usize = 2_000;
const MAX_EXCLUDED_BYTES: usize = 256 << 10;

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
    let listing = list_patch(sandbox).await?;
    let part =
        if rules.is_strict() { strict_part(&listing, patch)? } else { GradedPart::default() };
    let options = exclusions(&part.refused)?;
    let prepared = sandbox.exec(&script(PREPARE_R2E, &options)).await?;
    let apply_log = prepared.text();
    match prepared.exit {
        Exit::Code(0) => {}
        NOT_APPLIED => return Err(GradeError::NotApplied(apply_log.trim().to_owned())),
        _ => return Err(refused(sandbox, "prepare", apply_log).into()),
    }
    let run = run_r2e_tests(sandbox, task, &listing, &part, rules).await?;
    if (run.verdict.reward - run.verdict.official_reward).abs() > 0.5 {
        tracing::warn!(task_id = task.id.as_str(), "the strict rule and R2E-Gym's own disagree");
    }
    Ok(GradedChange {
        verdict: run.verdict.with_findings(part.findings),
        patch: patch.to_owned(),
        log: run.log,
        apply_log,
        eval_script: None,
        problem: None,
        test_time: run.elapsed,
    })
}

/// Moves the uploaded files out of the tree, and reads what the patch among them touches.
async fn list_patch(sandbox: &mut dyn Sandbox) -> Result<PatchListing, GradeError> {
    let mut command = script(LIST_PATCH, &[]);
    command.keep_bytes = LOG_BYTES;
    let listed = sandbox.exec(&command).await?;
    match listed.exit {
        Exit::Code(0) => {}
        NOT_APPLIED => {
            let text = listed.text();
            let message = text.rsplit('\u{1}').next().unwrap_or_default();
            let message = message.split_once('\n').map_or(message, |(_, message)| message);
            return Err(GradeError::NotApplied(message.trim().to_owned()));
        }
        _ => return Err(refused(sandbox, "list", listed.text()).into()),
    }
    PatchListing::read(&listed.text())
        .ok_or_else(|| GradeError::NotApplied("its list of files cannot be read".to_owned()))
}

/// The part of the patch that strict grading accepts.
fn strict_part(listing: &PatchListing, patch: &str) -> Result<GradedPart, GradeError> {
    let links = patch::created_links(patch).ok_or_else(|| {
        GradeError::NotApplied("the name of a symbolic link in it cannot be read".to_owned())
    })?;
    Ok(listing.strict_part(&links))
}

/// Options of `git apply` that leave out the hidden tests and these paths.
fn exclusions(refused: &[String]) -> Result<Vec<String>, GradeError> {
    let bytes: usize = refused.iter().map(String::len).sum();
    if refused.len() > MAX_EXCLUDED || bytes > MAX_EXCLUDED_BYTES {
        let message = format!("{} of its files may not be part of a change", refused.len());
        return Err(GradeError::NotApplied(message));
    }
    let hidden = HIDDEN_PATHS.iter().map(|glob| format!("--exclude={glob}"));
    Ok(hidden.chain(refused.iter().map(|path| exclude_option(path))).collect())
}

/// Runs the image's own tests, through the reporter if it knows their command.
async fn run_r2e_tests(
    sandbox: &mut dyn Sandbox,
    task: &Task,
    listing: &PatchListing,
    part: &GradedPart,
    rules: GradingRules,
) -> Result<TestRun, GradeError> {
    let runner = if listing.runner.is_empty() { &task.test_command } else { &listing.runner };
    let command = rules.is_strict().then(|| TestCommand::parse(runner)).flatten();
    if let Some(mut command) = command {
        command.env.insert("PIP_RETRIES".to_owned(), "0".to_owned());
        let plan = TestPlan {
            touched: part.touched.clone(),
            tracing: listing.tracing.clone(),
            hidden: vec![HIDDEN_FOLDER.to_owned()],
            unset: ["PAGER", "GIT_PAGER", "LANG"].map(ToOwned::to_owned).to_vec(),
        };
        let files = reporter::files(task, &command, &plan, STAGING_FOLDER)
            .map_err(|error| refused(sandbox, "plan", error.to_string()))?;
        let files: Vec<FileEntry> = files.iter().map(file_entry).collect();
        sandbox.write_files(&files).await?;
        if let Some(run) = run_reported(sandbox, task, &command, STAGING_FOLDER).await? {
            return Ok(run);
        }
    }
    let script = format!(
        "rm -rf {STAGING_FOLDER}\n\
         if [ -f /root/run_tests.sh ]; then exec bash /root/run_tests.sh; fi\n{}",
        task.test_command
    );
    Ok(run_by_log(sandbox, task, &test_command(task, &script), rules).await?)
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
    let is_strict = rules.strict_swe_bench;
    let write = if is_strict { swe::strict_eval_script } else { swe::eval_script };
    let eval = write(row, rules.harness);
    let eval = eval.map_err(|error| refused(sandbox, "eval.sh", error.to_string()))?;
    let split = if is_strict { SplitScript::of(&eval, row, rules.harness) } else { None };
    let script_to_run = split.as_ref().map_or(&eval, |split| &split.install);
    sandbox.write_files(&[staged("patch", patch), staged("eval.sh", script_to_run)]).await?;
    let mut graded = GradedChange {
        verdict: row.verdict(None),
        patch: patch.to_owned(),
        log: Vec::new(),
        apply_log: String::new(),
        eval_script: Some(eval),
        problem: None,
        test_time: Duration::ZERO,
    };
    let (mut part, mut listing) = (GradedPart::default(), None);
    if is_strict && !patch.is_empty() {
        let listed = list_patch(sandbox).await;
        match listed.and_then(|listing| Ok((strict_part(&listing, patch)?, listing))) {
            Ok((accepted, found)) => {
                part = accepted;
                listing = Some(found);
            }
            Err(GradeError::NotApplied(message)) => {
                graded.apply_log = message;
                graded.problem = Some(APPLY_FAILED.to_owned());
                return Ok(graded);
            }
            Err(error) => return Err(error),
        }
    }
    // The harness skips empty patches. Here the tests run, to show their result without a change.
    let order = match (patch.is_empty(), is_strict, rules.harness) {
        (true, ..) => "none",
        (false, true, _) => "strict",
        // The other harnesses are forks of version 4.
        (false, false, _) if row.family() != SweFamily::SweBench => "4",
        (false, false, Harness::V4_1_0) => "4",
        (false, false, Harness::V5_0_2) => "5",
    };
    let mut arguments = vec![order.to_owned()];
    if is_strict {
        arguments.extend(exclusions(&part.refused)?);
    }
    let applied = sandbox.exec(&script(APPLY, &arguments)).await?;
    graded.apply_log = applied.text();
    match applied.exit {
        Exit::Code(0) => {}
        NOT_APPLIED => {
            graded.problem = Some(APPLY_FAILED.to_owned());
            return Ok(graded);
        }
        _ => return Err(refused(sandbox, "apply", graded.apply_log).into()),
    }
    if let Some(start) = task.start() {
        repository::restore_tests(sandbox, &start).await?;
    }
    let set_up = set_up_tree(sandbox, task, row, split.as_ref(), listing.as_ref()).await?;
    if let Some(what) = set_up.refused {
        return Ok(refused_set_up(task, graded, part, &what, &set_up.result));
    }
    if is_strict && !set_up.is_checked {
        part.findings.insert(Finding::Unprotected);
    }
    let mut result = set_up.result;
    let tracing = listing.map(|listing| listing.tracing).unwrap_or_default();
    if let Some(split) = &split
        && result.exit != Exit::TimedOut
    {
        let folder = STAGING_FOLDER;
        if let Some(run) = split.run(sandbox, task, &part.touched, &tracing, folder).await? {
            graded.log = [log_bytes(&result), run.log].concat();
            graded.test_time = result.elapsed.saturating_add(run.elapsed);
            match swe::grade(
                row,
                rules.harness,
                log_of(&run.results, row, rules.harness).as_bytes(),
            ) {
                Ok(report) => graded.verdict = row.verdict(Some(report)),
                Err(error) => graded.problem = Some(error.to_string()),
            }
            let findings = run.verdict.suspicious.into_iter().chain(part.findings);
            graded.verdict = graded.verdict.with_findings(findings);
            return Ok(graded);
        }
        sandbox.write_files(&[staged("eval.sh", &split.tests)]).await?;
        let start = format!("{MOVE_SCRIPT}\n{}", task.test_command);
        result = sandbox.exec(&test_command(task, &start)).await?;
    }
    check_started(sandbox, &result)?;
    graded.log = log_bytes(&result);
    graded.test_time = result.elapsed;
    if result.exit == Exit::TimedOut {
        let seconds = task.test_timeout.as_secs();
        graded.log.extend(format!("\n\nTimeout error: {seconds} seconds exceeded.").into_bytes());
        graded.problem = Some(format!("Test timed out after {seconds} seconds."));
        return Ok(graded);
    }
    judge_log(sandbox, row, rules, graded, part, result.exit).await
}

/// The verdict by the log of the tests.
async fn judge_log(
    sandbox: &mut dyn Sandbox,
    row: &SweRow,
    rules: GradingRules,
    mut graded: GradedChange,
    mut part: GradedPart,
    exit: Exit,
) -> Result<GradedChange, GradeError> {
    let row = row.clone();
    let judged = offload::run(move || {
        match swe::grade(&row, rules.harness, graded.log.as_slice()) {
            Ok(report) => graded.verdict = row.verdict(Some(report)),
            Err(error) => graded.problem = Some(error.to_string()),
        }
        if rules.strict_swe_bench {
            part.findings.extend(strict_findings(&graded, exit));
        }
        graded.verdict = graded.verdict.with_findings(part.findings);
        graded
    });
    judged.await.map_err(|error| failed_here(sandbox, error).into())
}

/// Sets the tree up, with a check of what that changes if the tree has a change. A script of another
/// form than the harness's runs as a whole.
async fn set_up_tree(
    sandbox: &mut dyn Sandbox,
    task: &Task,
    row: &SweRow,
    split: Option<&SplitScript>,
    listing: Option<&PatchListing>,
) -> Result<SetUp, SandboxError> {
    let Some(split) = split else {
        let result = sandbox.exec(&test_command(task, &task.test_command)).await?;
        return Ok(SetUp { result, refused: None, is_checked: false });
    };
    let listing = listing.filter(|_| split.installs);
    let existed = listing.map(|listing| |path: &str| listing.existed(path));
    let existed = existed.as_ref().map(|existed| existed as &(dyn Fn(&str) -> bool + Sync));
    set_up::run(sandbox, task, &row.repo, split, existed).await
}

/// The verdict on a change whose set-up changed `what`, which an installation may not change.
fn refused_set_up(
    task: &Task,
    mut graded: GradedChange,
    part: GradedPart,
    what: &str,
    result: &ExecResult,
) -> GradedChange {
    tracing::info!(task_id = task.id.as_str(), what, "the set-up changed the system");
    graded.log = log_bytes(result);
    graded.test_time = result.elapsed;
    graded.problem = Some(format!("the set-up of the changed tree changed {what}"));
    let findings = part.findings.into_iter().chain([Finding::SystemTouched]);
    graded.verdict = graded.verdict.with_findings(findings);
    graded
}

/// What a strictly graded SWE-bench log shows besides its results. No reporter runs these tests.
fn strict_findings(graded: &GradedChange, exit: Exit) -> Vec<Finding> {
    let mut findings = vec![Finding::Unprotected];
    let text = String::from_utf8_lossy(&graded.log);
    if reporter::is_forged(&text) {
        findings.extend([Finding::OutputForged, Finding::Tampered]);
    }
    // pytest's own exit status tells apart the end of a run with failures from any other failure.
    let failed = text.lines().any(shows_failure);
    let agrees = match exit {
        Exit::Code(0) => !failed,
        Exit::Code(1) => failed || graded.verdict.reward < 0.5,
        _ => false,
    };
    if !agrees {
        findings.push(Finding::ExitStatus);
    }
    findings
}

/// Whether a line is pytest's result of a failed test, in the summary or with the test's name
/// first.
fn shows_failure(line: &str) -> bool {
    let is_failure = |word: &str| matches!(word, "FAILED" | "ERROR");
    line.starts_with("FAILED ")
        || line.starts_with("ERROR ")
        || line.split_whitespace().nth(1).is_some_and(is_failure) && line.contains("::")
}

fn staged(name: &str, content: &str) -> FileEntry {
    file_entry(&TaskFile { path: format!("{STAGING_FOLDER}/{name}"), content: content.to_owned() })
}

fn script(text: &str, arguments: &[String]) -> Command {
    let mut command = Command::shell(text, APPLY_TIMEOUT);
    command.argv.push("sh".to_owned());
    command.argv.extend_from_slice(arguments);
    command
}

/// The command that runs the tests in the image's own environment, without the variables that make
/// the output of an agent's commands readable, because tests may notice those.
pub(super) fn test_command(task: &Task, runner: &str) -> Command {
    // Without a network, pip would retry for minutes in vain.
    let environment = "unset PYTHONDONTWRITEBYTECODE PYTHONUNBUFFERED PAGER GIT_PAGER LANG\n\
        export PIP_RETRIES=0";
    let mut tests = Command::shell(format!("{environment}\n{runner}"), task.test_timeout);
    tests.keep_bytes = LOG_BYTES;
    tests
}
