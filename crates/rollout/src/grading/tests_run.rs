//! Runs of hidden tests, and the verdicts on them.

use super::graded::{LOG_BYTES, check_started, log_bytes};
use super::rules::GradingRules;
use crate::collection::failed_here;
use crate::offload;
use orchestrate_sandbox::{Command, ExecResult, Exit, Sandbox, SandboxError};
use orchestrate_tasks::reporter::{self, NONCE_VARIABLE, NOT_STARTED, Nonce, TestCommand};
use orchestrate_tasks::{Finding, Task, TestStatus, Verdict, grade_reported, micro};
use std::collections::BTreeMap;
use std::time::Duration;

/// A run of the hidden tests.
pub(super) struct TestRun {
    pub(super) verdict: Verdict,
    /// What a reporter reported, by pytest's ids; empty without one.
    pub(super) results: Vec<(String, TestStatus)>,
    /// What the tests printed.
    pub(super) log: Vec<u8>,
    pub(super) elapsed: Duration,
}

/// Runs the tests through the reporter, whose files are in `folder`. `None` if it cannot start in
/// this image; no code of the repository has run then.
pub(super) async fn run_reported(
    sandbox: &mut dyn Sandbox,
    task: &Task,
    command: &TestCommand,
    folder: &str,
) -> Result<Option<TestRun>, SandboxError> {
    let nonce = Nonce::generate();
    let run = Command {
        argv: reporter::argv(command, folder),
        env: vec![(NONCE_VARIABLE.to_owned(), nonce.reveal().to_owned())],
        timeout: task.test_timeout,
        keep_bytes: LOG_BYTES,
    };
    let result = sandbox.exec(&run).await?;
    if matches!(result.exit, Exit::NotStarted | Exit::Code(NOT_STARTED)) {
        tracing::warn!(
            task_id = task.id.as_str(),
            output = result.text(),
            "the reporter cannot run in this image, so the verdict relies on the test log"
        );
        return Ok(None);
    }
    let (id, expected) = (task.id.to_string(), task.expected.clone());
    let judged = offload::run(move || judge_reported(&id, &expected, &result, &nonce)).await;
    judged.map(Some).map_err(|error| failed_here(sandbox, error))
}

/// The verdict on what a reporter printed.
fn judge_reported(
    task_id: &str,
    expected: &BTreeMap<String, TestStatus>,
    result: &ExecResult,
    nonce: &Nonce,
) -> TestRun {
    let (log, report) = reporter::split(&log_bytes(result), nonce);
    let text = String::from_utf8_lossy(&log);
    let mut findings: Vec<Finding> =
        if reporter::is_forged(&text) { vec![Finding::OutputForged] } else { Vec::new() };
    let mut results = Vec::new();
    let verdict = if let Some(report) = report.filter(|_| result.exit == Exit::Code(0)) {
        for (finding, reason) in &report.findings {
            tracing::info!(task_id, finding = finding.name(), reason, "noticed");
        }
        findings.extend(report.findings.keys());
        results = report.results;
        grade_reported(&results, &text, expected)
    } else {
        if result.exit != Exit::TimedOut {
            findings.push(Finding::ExitStatus);
        }
        Verdict { reward: 0.0, ..grade_reported(&[], &text, expected) }
    };
    let verdict = verdict.with_findings(findings);
    TestRun { verdict, results, elapsed: result.elapsed, log }
}

/// Runs the tests with `command` and grades what they print.
pub(super) async fn run_by_log(
    sandbox: &mut dyn Sandbox,
    task: &Task,
    command: &Command,
    rules: GradingRules,
) -> Result<TestRun, SandboxError> {
    let result = sandbox.exec(command).await?;
    check_started(sandbox, &result)?;
    let expected = task.expected.clone();
    // The runner of micro tasks keeps the tested code in a process of its own.
    let is_protected = task.test_command == micro::TEST_COMMAND;
    let judged = offload::run(move || {
        let text = result.text();
        let verdict = (rules.grade_log)(&expected, &text);
        let findings = if rules.is_strict() {
            log_findings(is_protected, &verdict, &result, &text)
        } else {
            Vec::new()
        };
        let verdict = verdict.with_findings(findings);
        TestRun { verdict, results: Vec::new(), log: log_bytes(&result), elapsed: result.elapsed }
    });
    judged.await.map_err(|error| failed_here(sandbox, error))
}

/// What a log shows that no reporter watched.
fn log_findings(
    is_protected: bool,
    verdict: &Verdict,
    result: &ExecResult,
    text: &str,
) -> Vec<Finding> {
    let mut findings = if is_protected { Vec::new() } else { vec![Finding::Unprotected] };
    let statuses = &verdict.statuses;
    let all_passed = statuses.values().all(|status| *status == TestStatus::Passed);
    if !statuses.is_empty() && all_passed && result.exit != Exit::Code(0) {
        findings.push(Finding::ExitStatus);
    }
    if reporter::is_forged(text) {
        findings.extend([Finding::OutputForged, Finding::Tampered]);
    }
    findings
}
