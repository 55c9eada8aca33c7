//! Exit codes, and the last words of a failed command.

use crate::config::ConfigError;
use crate::output;
use clap::error::{ContextKind, ContextValue};
use orchestrate_coordinator::{FailureClass, RunError};
use orchestrate_engine::{EngineError, EngineErrorKind};
use orchestrate_handoff::TrainerError;
use orchestrate_moe::CheckpointError;
use orchestrate_moe::infer::EngineServeError;
use orchestrate_moe::train::ServeTrainerError;
use orchestrate_rollout::ChatError;
use orchestrate_sandbox::{SandboxError, SandboxErrorKind};
use orchestrate_store::StoreError;
use orchestrate_tasks::load::LoadError;
use std::process::ExitCode;

/// 1: a bug, or something nobody foresaw.
const BUG: u8 = 1;
/// 2: the command line is wrong.
const USAGE: u8 = 2;
/// 3: settings, plan, checkpoint or task file are wrong.
const CONFIG: u8 = 3;
/// 4: the inference engine.
const ENGINE: u8 = 4;
/// 5: Docker or a sandbox.
const SANDBOX: u8 = 5;
/// 6: run folder, journal or blobs.
const STORE: u8 = 6;
/// 7: the trainer.
pub(crate) const TRAINER: u8 = 7;
/// 130: stopped by a signal; the run can be resumed.
pub(crate) const STOPPED: u8 = 130;

/// Prints clap's message and returns the exit code: 0 for help and version, else 2.
pub fn usage(error: &clap::Error) -> ExitCode {
    let _ = error.print();
    if error.get(ContextKind::InvalidSubcommand) == Some(&ContextValue::String("bench".into())) {
        output::say("hint: benchmarks are a program of their own: orchestrate-bench");
    }
    if error.use_stderr() { ExitCode::from(USAGE) } else { ExitCode::SUCCESS }
}

/// Prints the error with its causes and, where there is one, a hint; answers its exit code.
pub(crate) fn report(error: &anyhow::Error) -> ExitCode {
    output::say(format!("error: {}", with_causes(error)));
    if let Some(hint) = hint(error) {
        output::say(format!("hint: {hint}"));
    }
    ExitCode::from(code(error))
}

/// The message and its causes, each once.
fn with_causes(error: &anyhow::Error) -> String {
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

/// The system's words for a full disk, wherever in the program (or in a trainer's answer) it was met.
const DISK_FULL: &str = "No space left on device";

fn code(error: &anyhow::Error) -> u8 {
    if with_causes(error).contains(DISK_FULL) {
        return STORE;
    }
    // A server that could not load its model failed by the model, not by serving.
    let by_settings = |cause: &(dyn std::error::Error + 'static)| {
        cause.is::<ConfigError>()
            || cause.is::<CheckpointError>()
            || cause.is::<ChatError>()
            || cause.is::<LoadError>()
    };
    if error.chain().any(by_settings) {
        return CONFIG;
    }
    for cause in error.chain() {
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
        if cause.is::<EngineError>() || cause.is::<EngineServeError>() {
            return ENGINE;
        }
        if cause.is::<SandboxError>() {
            return SANDBOX;
        }
        if cause.is::<StoreError>() {
            return STORE;
        }
        if cause.is::<TrainerError>() || cause.is::<ServeTrainerError>() {
            return TRAINER;
        }
    }
    BUG
}

fn hint(error: &anyhow::Error) -> Option<&'static str> {
    if with_causes(error).contains(DISK_FULL) {
        return Some("free some space there, then go on with --resume: nothing finished is lost");
    }
    for cause in error.chain() {
        if let Some(sandbox) = cause.downcast_ref::<SandboxError>() {
            return match &sandbox.kind {
                SandboxErrorKind::NoDaemon(_) => Some(
                    "start Docker (scripts/quickstart does), or set DOCKER_HOST or sandbox.hosts",
                ),
                SandboxErrorKind::ImageMissing(_) => {
                    Some("build the sandbox image: scripts/quickstart does, or docker pull it")
                }
                SandboxErrorKind::NotPulled { .. } => Some(
                    "images of this project are built by scripts/quickstart; others can be loaded \
                     (docker load), or come from the registry that sandbox.mirror names",
                ),
                // Both say themselves what to do.
                SandboxErrorKind::ImageChanged { .. } | SandboxErrorKind::NotRecorded { .. } => {
                    None
                }
                SandboxErrorKind::DiskFull(_) => Some(
                    "free some space on the Docker host, or bound what is kept there by sandbox.image_cache",
                ),
                SandboxErrorKind::Unfit(_) => {
                    Some("orchestrate doctor --battery says which outcome differs, and how")
                }
                SandboxErrorKind::TimedOut { .. }
                | SandboxErrorKind::Refused { .. }
                | SandboxErrorKind::Gone(_)
                | SandboxErrorKind::Protocol(_)
                | SandboxErrorKind::NotClean(_)
                | SandboxErrorKind::TooLarge { .. } => Some("orchestrate doctor checks the daemon"),
            };
        }
        if let Some(engine) = cause.downcast_ref::<EngineError>() {
            return match &engine.kind {
                EngineErrorKind::Unreachable(_) | EngineErrorKind::TimedOut(_) => Some(
                    "is the server up? check engine.url; orchestrate doctor --engine URL probes it",
                ),
                EngineErrorKind::Refused { .. }
                | EngineErrorKind::InvalidReply(_)
                | EngineErrorKind::Unfit(_) => None,
            };
        }
        if let Some(StoreError::Exists { .. }) = cause.downcast_ref::<StoreError>() {
            return Some("add --resume to go on with it, or choose another --run-dir");
        }
    }
    None
}
