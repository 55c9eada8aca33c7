//! Prepares the container before a step: its files, its log folders, and the task's health check.

use crate::sandboxes::refused;
use orchestrate_sandbox::{Command, Exit, FileEntry, Sandbox, SandboxError};
use orchestrate_tasks::harbor::{HarborFile, HarborRow, HarborStep, Healthcheck, seconds};
use std::time::Duration;
use tokio::time::Instant;

/// Time limit of helper commands.
pub(super) const HELPER_TIMEOUT: Duration = Duration::from_mins(1);

/// Maximum pause between two tries of a health check, in seconds.
const MAX_PAUSE_S: f64 = 86_400.0;

const PREPARE: &str = "mkdir -p /logs/agent /logs/verifier /logs/artifacts && \
     chmod 777 /logs/agent /logs/verifier /logs/artifacts || exit 1; \
     if [ -e /tests ]; then echo tests; fi";

/// Facts about the container before the agent starts.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Prepared {
    /// Whether the image has a folder `/tests`; if so, the task's tests are added to it.
    pub(super) has_tests: bool,
}

/// Prepares the container of the task's agent.
pub(crate) async fn prepare(
    sandbox: &mut dyn Sandbox,
    row: &HarborRow,
) -> Result<Prepared, SandboxError> {
    let prepared = sandbox.exec(&shell(row, PREPARE, HELPER_TIMEOUT)).await?;
    if !prepared.success() {
        let message = format!("image {}: {}", row.image.name, prepared.text().trim());
        return Err(refused(sandbox, "prepare", message));
    }
    write(sandbox, &row.image.uploads).await?;
    if let Some(check) = &row.healthcheck {
        run_healthcheck(sandbox, row, check).await?;
    }
    Ok(Prepared { has_tests: prepared.text().trim() == "tests" })
}

/// Prepares the container for a step: its files, its `setup.sh` and its health check. `Err` with a
/// message if one of these fails.
pub(super) async fn prepare_step(
    sandbox: &mut dyn Sandbox,
    row: &HarborRow,
    step: &HarborStep,
) -> Result<Result<(), String>, SandboxError> {
    if !step.files.is_empty() {
        set_root(sandbox, row).await?;
        write(sandbox, &step.files).await?;
    }
    if step.files.iter().any(|file| file.path == "setup.sh") {
        let limit = row.image.build_timeout_s;
        let set_up = sandbox.exec(&shell(row, "bash ./setup.sh", seconds(limit))).await?;
        if !set_up.success() {
            return Ok(Err(format!("setup.sh of step `{}` failed: {}", step.name, set_up.text())));
        }
    }
    if let Some(check) = &step.healthcheck {
        match run_healthcheck(sandbox, row, check).await {
            Err(error) if error.is_agents_doing() => return Err(error),
            Err(error) => return Ok(Err(error.to_string())),
            Ok(()) => {}
        }
    }
    Ok(Ok(()))
}

/// Makes the agent's working directory the root of files.
async fn set_root(sandbox: &mut dyn Sandbox, row: &HarborRow) -> Result<(), SandboxError> {
    sandbox.set_root(row.image.workdir.as_deref().unwrap_or("/")).await
}

/// Writes files below the root of files.
pub(super) async fn write(
    sandbox: &mut dyn Sandbox,
    files: &[HarborFile],
) -> Result<(), SandboxError> {
    let files: Vec<FileEntry> = entries(files, "").collect();
    if files.is_empty() { Ok(()) } else { sandbox.write_files(&files).await }
}

/// The files below `folder`, which ends with `/` or is empty. Folders are created with their files.
pub(super) fn entries<'a>(
    files: &'a [HarborFile],
    folder: &'a str,
) -> impl Iterator<Item = FileEntry> + 'a {
    files.iter().filter(|file| !file.is_folder()).map(move |file| FileEntry {
        path: format!("{folder}{}", file.path),
        mode: file.mode,
        content: file.content.clone(),
    })
}

/// A command with the task's variables, run by bash as Harbor runs it.
pub(super) fn shell(row: &HarborRow, script: &str, timeout: Duration) -> Command {
    let mut command = Command::shell(script, timeout);
    command.argv = ["bash", "-c", script].map(ToOwned::to_owned).to_vec();
    command.env = row.image.env.iter().map(|(k, v)| (k.clone(), v.clone())).collect();
    command
}

/// Repeats the check as Harbor does: failures in the start period do not count.
async fn run_healthcheck(
    sandbox: &mut dyn Sandbox,
    row: &HarborRow,
    check: &Healthcheck,
) -> Result<(), SandboxError> {
    let pause = |time: f64| Duration::try_from_secs_f64(time.min(MAX_PAUSE_S)).unwrap_or_default();
    let start_period_end = Instant::now() + pause(check.start_period_s);
    let mut failures = 0;
    loop {
        let in_start_period = Instant::now() < start_period_end;
        let result = sandbox.exec(&shell(row, &check.command, seconds(check.timeout_s))).await?;
        if result.exit == Exit::Code(0) {
            return Ok(());
        }
        if in_start_period {
            tokio::time::sleep(pause(check.start_interval_s)).await;
            continue;
        }
        failures += 1;
        if failures >= check.retries {
            let message =
                format!("the health check failed {failures} times: {}", result.text().trim());
            return Err(refused(sandbox, "health check", message));
        }
        tokio::time::sleep(pause(check.interval_s)).await;
    }
}
