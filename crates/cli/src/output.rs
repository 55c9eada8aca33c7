//! The one place that prints. Data goes to standard output, everything else to standard error.

use std::io::{IsTerminal, Write};
use tracing_subscriber::EnvFilter;

/// Starts logging to standard error. `verbose` counts `-v` (0: warnings, 1: debug, 2: trace); `filter`
/// replaces it, in the syntax of `tracing_subscriber`'s `EnvFilter`.
pub fn init_logging(verbose: u8, filter: Option<&str>) {
    let level = match verbose {
        0 => "warn",
        1 => "debug",
        _ => "trace",
    };
    let default = format!("{level},hyper=warn,hyper_util=warn,bollard=warn,sqlx=warn");
    let filter = EnvFilter::try_new(filter.unwrap_or(&default))
        .unwrap_or_else(|_| EnvFilter::new(default.clone()));
    tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(std::io::stderr)
        .with_ansi(std::io::stderr().is_terminal())
        .with_target(verbose > 0)
        .init();
}

/// Prints a line of data to standard output. A closed pipe is not an error: its reader has enough.
pub fn data(line: impl std::fmt::Display) {
    let _ = writeln!(std::io::stdout().lock(), "{line}");
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
