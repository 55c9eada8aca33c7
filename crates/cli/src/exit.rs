//! Exit codes, and the message of a failed command.

use crate::config::ConfigError;
use crate::error::{BrokenMeasurement, InputError, OutputError, StoppedAtStart, UsageError};
use crate::output;
use clap::error::{ContextKind, ContextValue};
use orchestrate_coordinator::{FailureClass, RunError};
use orchestrate_engine::{EngineError, EngineErrorKind};
use orchestrate_handoff::batch::BatchErrorKind;
use orchestrate_handoff::{TrainerError, TrainerErrorKind};
use orchestrate_http_server::HttpSetupError;
use orchestrate_moe::CheckpointError;
use orchestrate_moe::infer::EngineServeError;
use orchestrate_moe::train::ServeTrainerError;
use orchestrate_rollout::{ChatError, ToolServerError};
use orchestrate_sandbox::{SandboxError, SandboxErrorKind};
use orchestrate_store::StoreError;
use orchestrate_tasks::load::{LoadError, Refused};
use orchestrate_tasks::repair::TreeError;
use std::error::Error;
use std::io;
use std::process::ExitCode;

/// 1: a bug, or a failure that this program does not foresee.
const BUG: u8 = 1;
/// 2: the command line is malformed, or names something that does not exist or is already in use.
const USAGE: u8 = 2;
/// 3: settings, plan, checkpoint or an input file (task rows, predictions, a test log) are missing,
/// unreadable, invalid, or without a usable entry.
const CONFIG: u8 = 3;
/// 4: the inference engine.
const ENGINE: u8 = 4;
/// 5: Docker, a sandbox, a tool server, or broken episodes.
const SANDBOX: u8 = 5;
/// 6: run folder, journal, blobs or another output file; a full disk.
const STORE: u8 = 6;
/// 7: the trainer.
pub(crate) const TRAINER: u8 = 7;
/// 130: stopped by a signal; the run can be resumed.
pub(crate) const STOPPED: u8 = 130;

/// Prints clap's message and returns the exit code: 0 for help and version, else 2.
pub fn usage(error: &clap::Error) -> ExitCode {
    let _ = error.print();
    if error.get(ContextKind::InvalidSubcommand) == Some(&ContextValue::String("bench".into())) {
        output::say("hint: benchmarks are a separate program, orchestrate-bench");
    }
    if error.use_stderr() { ExitCode::from(USAGE) } else { ExitCode::SUCCESS }
}

/// Prints the error with its causes and a hint, if there is one. Returns the exit code.
pub(crate) fn report(error: &anyhow::Error) -> ExitCode {
    output::say(format!("error: {}", with_causes(error)));
    if let Some(hint) = hint(error) {
        output::say(format!("hint: {hint}"));
    }
    ExitCode::from(code(error))
}

/// The error message and those of its causes, without repetitions.
pub(crate) fn with_causes(error: &anyhow::Error) -> String {
    let mut text = String::new();
    for cause in error.chain().map(ToString::to_string) {
        if text.is_empty() {
            text = cause;
        } else if !text.contains(&cause) {
            text = format!("{text}: {cause}");
        }
    }
    text
}

/// The error and its causes. An error that a [`RunError`] wraps transparently follows it.
fn causes(error: &anyhow::Error) -> impl Iterator<Item = &(dyn Error + 'static)> {
    error.chain().flat_map(|cause| {
        let inner = cause.downcast_ref::<RunError>().and_then(|run| match run {
            RunError::Store(inner) => Some(inner as &(dyn Error + 'static)),
            RunError::Engine(inner) => Some(inner),
            RunError::Trainer(inner) => Some(inner),
            RunError::Sandbox(inner) => Some(inner),
            RunError::Batch(inner) => Some(inner),
            _ => None,
        });
        std::iter::once(cause).chain(inner)
    })
}

/// Whether an error was caused by a full disk or an exceeded quota, on this machine or on the trainer's.
pub(crate) fn is_disk_full(error: &anyhow::Error) -> bool {
    causes(error).any(is_full)
}

/// Whether this cause is a full disk or an exceeded quota.
fn is_full(cause: &(dyn Error + 'static)) -> bool {
    if let Some(error) = cause.downcast_ref::<io::Error>() {
        return matches!(error.kind(), io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded);
    }
    if let Some(error) = cause.downcast_ref::<CheckpointError>() {
        return error.is_disk_full();
    }
    if let Some(error) = cause.downcast_ref::<TrainerError>() {
        // The protocol transfers only the text of the operating system's error.
        return match &error.kind {
            TrainerErrorKind::StepFailed { error, .. } => error.contains(NO_SPACE),
            TrainerErrorKind::Refused { message, .. } => message.contains(NO_SPACE),
            TrainerErrorKind::Unreachable(_)
            | TrainerErrorKind::TimedOut(_)
            | TrainerErrorKind::InvalidReply(_)
            | TrainerErrorKind::Protocol(_) => false,
        };
    }
    matches!(cause.downcast_ref(), Some(BatchErrorKind::Full(_)))
        || matches!(cause.downcast_ref(), Some(StoreError::Full { .. }))
}

/// Text of `ENOSPC` in a trainer's error message.
const NO_SPACE: &str = "No space left on device";

fn code(error: &anyhow::Error) -> u8 {
    if is_disk_full(error) {
        return STORE;
    }
    // A server that cannot load its model fails because of the model, not because of serving.
    let is_config = |cause: &(dyn Error + 'static)| {
        cause.is::<ConfigError>()
            || cause.is::<InputError>()
            || cause.is::<CheckpointError>()
            || cause.is::<ChatError>()
            || cause.is::<LoadError>()
            || cause.is::<Refused>()
            || cause.is::<TreeError>()
            || matches!(cause.downcast_ref(), Some(HttpSetupError::TlsFile { .. }))
    };
    if causes(error).any(is_config) {
        return CONFIG;
    }
    for cause in causes(error) {
        if cause.is::<StoppedAtStart>() {
            return STOPPED;
        }
        if let Some(run) = cause.downcast_ref::<RunError>() {
            return match run.class() {
                FailureClass::Config => CONFIG,
                FailureClass::Engine => ENGINE,
                FailureClass::Sandbox => SANDBOX,
                FailureClass::Store => STORE,
                FailureClass::Trainer => TRAINER,
                FailureClass::Bug => BUG,
            };
        }
        if cause.is::<UsageError>()
            || matches!(cause.downcast_ref(), Some(StoreError::Missing { .. }))
        {
            return USAGE;
        }
        if cause.is::<EngineError>() || cause.is::<EngineServeError>() {
            return ENGINE;
        }
        let is_tool_server = cause.is::<ToolServerError>();
        if is_tool_server || cause.is::<SandboxError>() || cause.is::<BrokenMeasurement>() {
            return SANDBOX;
        }
        if cause.is::<StoreError>() || cause.is::<OutputError>() {
            return STORE;
        }
        if cause.is::<TrainerError>() || cause.is::<ServeTrainerError>() {
            return TRAINER;
        }
    }
    BUG
}

fn hint(error: &anyhow::Error) -> Option<&'static str> {
    if is_disk_full(error) {
        return Some(
            "free some space, then repeat the command (a run: with --resume); nothing finished is lost",
        );
    }
    for cause in causes(error) {
        if let Some(sandbox) = cause.downcast_ref::<SandboxError>() {
            return sandbox_hint(&sandbox.kind);
        }
        if let Some(engine) = cause.downcast_ref::<EngineError>() {
            return match &engine.kind {
                EngineErrorKind::Unreachable(_) | EngineErrorKind::TimedOut(_) => Some(
                    "is the server up? check engine.url; orchestrate doctor --engine URL probes it",
                ),
                EngineErrorKind::Refused { .. }
                | EngineErrorKind::ContextFull(_)
                | EngineErrorKind::InvalidReply(_)
                | EngineErrorKind::GenerationFailed(_)
                | EngineErrorKind::Unsupported(_) => None,
            };
        }
    }
    None
}

fn sandbox_hint(kind: &SandboxErrorKind) -> Option<&'static str> {
    match kind {
        SandboxErrorKind::NoDaemon(_) => {
            Some("start Docker (scripts/quickstart does that), or set DOCKER_HOST or sandbox.hosts")
        }
        SandboxErrorKind::ImageMissing(_) => {
            Some("build the sandbox image (scripts/quickstart does that), or docker pull it")
        }
        SandboxErrorKind::NotPulled { .. } => Some(
            "images of this project are built by scripts/quickstart; others can be loaded \
             (docker load), or come from the registry that sandbox.mirror names",
        ),
        // Their messages say what to do, and commands that damage their sandbox need nothing.
        SandboxErrorKind::ImageChanged { .. }
        | SandboxErrorKind::NotRecorded { .. }
        | SandboxErrorKind::Damaged { .. } => None,
        SandboxErrorKind::DiskFull(_) => Some(
            "free some space on the Docker host, or limit the images kept there with \
             sandbox.image_cache",
        ),
        SandboxErrorKind::SelfTestFailed(_) => {
            Some("orchestrate doctor --self-test reports which outcome differs, and how")
        }
        SandboxErrorKind::TimedOut { .. }
        | SandboxErrorKind::Refused { .. }
        | SandboxErrorKind::Failed { .. }
        | SandboxErrorKind::Gone(_)
        | SandboxErrorKind::Protocol(_)
        | SandboxErrorKind::NotClean(_)
        | SandboxErrorKind::TooLarge { .. } => Some("orchestrate doctor checks the daemon"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn full_disk_is_found_by_its_kind_anywhere_in_the_chain() {
        let full = || io::Error::from_raw_os_error(28);
        let file = RunError::File { path: "/run/x".into(), source: full() };
        let output = OutputError { file: "/out/x".into(), source: full() };
        let store = RunError::Store(StoreError::Full { folder: "/run".into() });
        let failed = TrainerErrorKind::StepFailed {
            step_id: "1".into(),
            error: "[Errno 28] No space left on device".into(),
        };
        let trainer = TrainerError { trainer: "t".into(), call: "apply", kind: failed };
        for error in [
            anyhow::Error::from(file),
            anyhow::Error::from(output).context("more"),
            store.into(),
            RunError::Trainer(trainer).into(),
        ] {
            assert_eq!(code(&error), STORE, "{error:#}");
            assert!(hint(&error).is_some_and(|hint| hint.contains("--resume")), "{error:#}");
        }
    }

    #[test]
    fn message_that_mentions_a_full_disk_is_not_a_full_disk() {
        let text = "`echo No space left on device` is not an episode";
        assert_eq!(code(&anyhow::anyhow!(text)), BUG);
    }
}
