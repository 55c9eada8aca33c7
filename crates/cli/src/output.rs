//! The one place that prints. Data goes to standard output, everything else to standard error.

use crate::args::LogArgs;
use std::io::{self, IsTerminal, Write};
use std::sync::OnceLock;
use tracing_subscriber::EnvFilter;

/// Starts logging to standard error.
pub fn init_logging(args: &LogArgs) {
    let level = match args.verbose {
        0 => "warn",
        1 => "debug",
        _ => "trace",
    };
    let default = format!("{level},hyper=warn,hyper_util=warn,bollard=warn,sqlx=warn");
    tracing_subscriber::fmt()
        .with_env_filter(EnvFilter::new(args.log_filter.as_ref().unwrap_or(&default)))
        .with_writer(std::io::stderr)
        .with_ansi(std::io::stderr().is_terminal())
        .with_target(args.verbose > 0)
        .init();
}

/// The first error of writing to standard output.
static DATA_LOST: OnceLock<io::Error> = OnceLock::new();

/// Prints a line of data to standard output. A closed pipe is not an error: the reader needs no more.
/// Any other error is kept for [`lost`].
pub fn data(line: impl std::fmt::Display) {
    let mut out = std::io::stdout().lock();
    if let Err(error) = writeln!(out, "{line}").and_then(|()| out.flush())
        && error.kind() != io::ErrorKind::BrokenPipe
    {
        let _ = DATA_LOST.set(error);
    }
}

/// Why some data did not reach standard output; `None` if all of it did.
pub fn lost() -> Option<&'static io::Error> {
    DATA_LOST.get()
}

/// Prints a line to standard error, for the person at the terminal.
pub fn say(line: impl std::fmt::Display) {
    let _ = writeln!(std::io::stderr().lock(), "{line}");
}

/// Prints a value as one JSON document to standard output.
///
/// # Errors
/// If the value cannot be written as JSON.
pub fn json(value: &impl serde::Serialize) -> anyhow::Result<()> {
    data(serde_json::to_string_pretty(value)?);
    Ok(())
}
