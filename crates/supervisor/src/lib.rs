//! The supervisor: process 1 inside each sandbox, a small static binary without dependencies.
//!
//! The container's stdin and stdout carry framed requests and replies ([`protocol`]); every command
//! runs in its own session with its output read here. The invariant: when a command's end is
//! reported, no process but this one is alive in the container. Read [`protocol`], then `serve.rs`.

mod disk;
mod files;
mod job;
pub mod protocol;
mod reset;
mod serve;
mod sys;
mod tree;
mod wire;

pub use disk::Free;

use std::io::Write as _;
use std::process::ExitCode;
use std::time::Duration;

/// Where the supervisor lies in a container.
pub const INSTALL_PATH: &str = "/orchestrate-supervisor";

/// What the command line of the supervisor says.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Options {
    /// Working directory of every command; files are written and read below it.
    pub workdir: String,
    /// Process 1 ends after this time, and the container with it.
    pub lifetime: Duration,
    /// Whether a reset may be asked for: the root must then be read-only.
    pub reusable: bool,
}

impl Options {
    /// The arguments that [`Options::parse`] reads back.
    pub fn to_args(&self) -> Vec<String> {
        let mut args = vec![
            format!("--workdir={}", self.workdir),
            format!("--lifetime-ms={}", self.lifetime.as_millis()),
        ];
        if self.reusable {
            args.push("--reusable".to_owned());
        }
        args
    }

    /// Reads the arguments.
    ///
    /// # Errors
    /// The offending argument, or the name of the missing one.
    pub fn parse(args: impl Iterator<Item = String>) -> Result<Self, String> {
        let (mut workdir, mut lifetime, mut reusable) = (None, None, false);
        for arg in args {
            if let Some(value) = arg.strip_prefix("--workdir=") {
                workdir = Some(value.to_owned());
            } else if let Some(value) = arg.strip_prefix("--lifetime-ms=") {
                lifetime = Some(value.parse().map(Duration::from_millis).map_err(|_| arg.clone())?);
            } else if arg == "--reusable" {
                reusable = true;
            } else {
                return Err(arg);
            }
        }
        Ok(Self {
            workdir: workdir.ok_or("--workdir")?,
            lifetime: lifetime.ok_or("--lifetime-ms")?,
            reusable,
        })
    }
}

/// Serves requests until the stream ends or the deadline passes. Refuses to run as any process but
/// the first of a pid namespace: it kills every process it can see.
pub fn run(args: impl Iterator<Item = String>) -> ExitCode {
    let outcome = if std::process::id() == 1 {
        Options::parse(args)
            .map_err(|arg| format!("bad or missing argument: {arg}"))
            .and_then(|options| serve::serve(options).map_err(|error| error.to_string()))
    } else {
        Err("must be process 1 of a container".to_owned())
    };
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(text) => {
            say(&text);
            ExitCode::FAILURE
        }
    }
}

/// A line on stderr, which the host reads to say why a container ended.
fn say(text: &str) {
    // Nobody may be listening, and there is nowhere else to complain.
    let _ = writeln!(std::io::stderr(), "supervisor: {text}");
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn arguments_parse_back() {
        let options = Options {
            workdir: "/work space".to_owned(),
            lifetime: Duration::from_secs(90),
            reusable: true,
        };
        assert_eq!(Options::parse(options.to_args().into_iter()), Ok(options));
        assert_eq!(Options::parse(["--x".to_owned()].into_iter()), Err("--x".to_owned()));
        assert!(Options::parse(std::iter::empty()).is_err());
    }

    #[test]
    fn refuses_to_run_outside_a_container() {
        assert_eq!(run(std::iter::empty()), ExitCode::FAILURE);
    }
}
