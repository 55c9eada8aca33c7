//! The supervisor: process 1 inside each sandbox, a small static binary without dependencies.
//!
//! The container's stdin and stdout carry framed requests and replies ([`protocol`]). Every command
//! runs in its own session, and the supervisor reads its output. The invariant: when the end of a
//! command is reported, the supervisor is the only process alive in the container. Read
//! [`protocol`] first, then `serve.rs`.

mod changes;
mod deadline;
mod disk;
mod files;
mod forward;
mod job;
mod log;
mod options;
mod protection;
pub mod protocol;
mod reset;
mod serve;
mod sys;
mod tree;
mod wire;

pub use disk::FreeSpace;
pub use options::{Options, OptionsError};

use std::error::Error;
use std::process::ExitCode;
use std::{fmt, io};

/// Path of the supervisor's binary in a container.
pub const INSTALL_PATH: &str = "/orchestrate-supervisor";

/// Why the supervisor ended with an error.
#[derive(Debug)]
enum RunError {
    NotProcessOne,
    Options(OptionsError),
    Serve(io::Error),
}

impl fmt::Display for RunError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NotProcessOne => f.write_str("must be process 1 of a container"),
            Self::Options(error) => error.fmt(f),
            Self::Serve(error) => error.fmt(f),
        }
    }
}

impl Error for RunError {
    fn source(&self) -> Option<&(dyn Error + 'static)> {
        match self {
            Self::NotProcessOne => None,
            Self::Options(error) => error.source(),
            Self::Serve(error) => error.source(),
        }
    }
}

/// Serves requests until the stream ends or the deadline passes.
///
/// Refuses to run as any process but the first of a pid namespace, because it kills every process
/// it can see. The error, if any, is written to stderr, where the host reads it.
pub fn run(args: impl Iterator<Item = String>) -> ExitCode {
    match try_run(args) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            log::line(&error.to_string());
            ExitCode::FAILURE
        }
    }
}

fn try_run(args: impl Iterator<Item = String>) -> Result<(), RunError> {
    let mut args = args.peekable();
    if args.peek().is_some_and(|arg| arg == protection::CHECK) {
        return protection::check_from_command().map_err(RunError::Serve);
    }
    if std::process::id() != 1 {
        return Err(RunError::NotProcessOne);
    }
    let options = Options::parse(args).map_err(RunError::Options)?;
    serve::serve(options).map_err(RunError::Serve)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn run_refuses_to_start_outside_a_container() {
        assert_eq!(run(std::iter::empty()), ExitCode::FAILURE);
    }
}
