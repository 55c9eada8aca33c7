//! Exit codes, and the last words of a failed command.

use crate::config::ConfigError;
use crate::output;
use orchestrate_engine::{EngineError, EngineErrorKind};
use orchestrate_moe::CheckpointError;
use orchestrate_sandbox::{SandboxError, SandboxErrorKind};
use std::process::ExitCode;

/// 1: a bug, or something nobody foresaw.
const BUG: u8 = 1;
/// 2: the command line is wrong.
const USAGE: u8 = 2;
/// 3: settings, plan or checkpoint are wrong.
const CONFIG: u8 = 3;
/// 4: the inference engine.
const ENGINE: u8 = 4;
/// 5: Docker or a sandbox.
const SANDBOX: u8 = 5;
/// 6: run folder, journal or blobs.
const STORE: u8 = 6;
/// 7: the trainer.
const TRAINER: u8 = 7;
/// 130: stopped by a signal; the run can be resumed.
pub(crate) const STOPPED: u8 = 130;

/// Prints clap's message; help and version are no failure.
pub(crate) fn usage(error: &clap::Error) -> ExitCode {
    let _ = error.print();
    if error.use_stderr() { ExitCode::from(USAGE) } else { ExitCode::SUCCESS }
}
