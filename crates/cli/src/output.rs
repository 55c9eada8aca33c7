//! The one place that prints. Data goes to standard output, everything else to standard error.

use std::io::{IsTerminal, Write};
use tracing_subscriber::EnvFilter;

/// Starts logging to standard error.
pub(crate) fn init_logging(verbose: u8, filter: Option<&str>) {
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

/// A line of data. A closed pipe is not our problem: the reader has seen enough.
pub(crate) fn data(line: impl std::fmt::Display) {
    let _ = writeln!(std::io::stdout().lock(), "{line}");
}

/// A line for the person at the terminal.
pub(crate) fn say(line: impl std::fmt::Display) {
    let _ = writeln!(std::io::stderr().lock(), "{line}");
}

/// A value as one JSON document on standard output.
pub(crate) fn json(value: &impl serde::Serialize) -> anyhow::Result<()> {
    data(serde_json::to_string_pretty(value)?);
    Ok(())
}
