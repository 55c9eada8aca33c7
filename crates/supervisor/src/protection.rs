//! Checks at the start that commands cannot reach process 1: its input and output carry the results
//! of commands, so a command that can write there can forge them.
//!
//! On Linux a process that is not dumpable is protected. Another kernel may not do that, like old
//! releases of gVisor.

use crate::INSTALL_PATH;
use std::fs::OpenOptions;
use std::io;
use std::process::{Command, Stdio};

/// The argument with which this program checks as a command would, instead of serving.
pub(crate) const CHECK: &str = "--check-protection";
/// What belongs to process 1 alone.
const PROTECTED: [&str; 3] = ["/proc/1/fd/0", "/proc/1/fd/1", "/proc/1/mem"];

/// Fails if a command could read or write what belongs to process 1.
pub(crate) fn check() -> io::Result<()> {
    let checked = Command::new(INSTALL_PATH)
        .arg(CHECK)
        .env_clear()
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .status()?;
    if checked.success() {
        return Ok(());
    }
    Err(io::Error::other(
        "the container runtime does not protect process 1 from commands, which could forge their \
         results; use another sandbox.runtime, or another version of it",
    ))
}

/// The check itself, in a process that is as unprivileged as a command.
pub(crate) fn check_from_command() -> io::Result<()> {
    let is_open = |path: &&str| {
        OpenOptions::new().read(true).open(path).is_ok()
            || OpenOptions::new().write(true).open(path).is_ok()
    };
    match PROTECTED.iter().find(|path| is_open(path)) {
        Some(path) => Err(io::Error::other(format!("a command can open {path}"))),
        None => Ok(()),
    }
}
