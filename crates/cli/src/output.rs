//! The one place that prints. Data goes to standard output, everything else to standard error.
//!
//! The invariant: what agents, tasks and servers wrote never acts on the terminal. Everything that is
//! printed, logs included, passes [`printable_lines`], JSON passes an equal that keeps its meaning;
//! [`raw`] is for scripts alone. Messages and logs never contain the password of a URL.

use crate::args::LogArgs;
use crate::spans;
use orchestrate_tasks::{printable, printable_lines};
pub(crate) use orchestrate_types::counted;
use orchestrate_types::{is_unprintable, without_credentials};
use std::fmt::Write as _;
use std::io::{self, IsTerminal, Write};
use std::sync::OnceLock;
use tracing_subscriber::layer::SubscriberExt as _;
use tracing_subscriber::util::SubscriberInitExt as _;
use tracing_subscriber::{EnvFilter, Layer as _};

/// Maximum number of characters of one message.
const MESSAGE_CHARS: usize = 200_000;
/// Maximum number of characters of one line of the log.
const LOG_CHARS: usize = 20_000;

/// Starts logging to standard error and, `with_status`, keeps the open spans for the status of a run.
pub fn init_logging(args: &LogArgs, with_status: bool) {
    let level = match args.verbose {
        0 => "warn",
        1 => "debug",
        _ => "trace",
    };
    let default = format!("{level},hyper=warn,hyper_util=warn,bollard=warn,sqlx=warn");
    let log = tracing_subscriber::fmt::layer()
        .with_writer(EscapedLog::default)
        .with_ansi(std::io::stderr().is_terminal())
        .with_target(args.verbose > 0)
        .with_filter(EnvFilter::new(args.log_filter.as_ref().unwrap_or(&default)));
    tracing_subscriber::registry().with(log).with(with_status.then(spans::layer)).init();
}

/// The first error of writing to standard output.
static DATA_LOST: OnceLock<io::Error> = OnceLock::new();

/// Prints data for people to standard output, escaped. A closed pipe is not an error: the reader needs
/// no more. Any other error is kept for [`lost`].
pub fn data(lines: impl std::fmt::Display) {
    raw(printable_lines(&lines.to_string()));
}

/// As [`data`], byte for byte: for scripts.
pub fn raw(line: impl std::fmt::Display) {
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

/// Prints a message to standard error, for the person at the terminal: escaped, without passwords of
/// URLs, and limited in length.
pub fn say(message: impl std::fmt::Display) {
    let mut message = message.to_string();
    if let Some((end, _)) = message.char_indices().nth(MESSAGE_CHARS) {
        message.truncate(end);
        message.push('…');
    }
    let shown = printable_lines(&without_credentials(&message));
    let _ = writeln!(std::io::stderr().lock(), "{shown}");
}

/// A message in one line of at most `limit` characters, as [`say`] would print it.
pub(crate) fn one_line(message: &str, limit: usize) -> String {
    printable(&without_credentials(message), limit)
}

/// Prints a value as one JSON document to standard output.
///
/// # Errors
/// If the value cannot be written as JSON.
pub fn json(value: &impl serde::Serialize) -> anyhow::Result<()> {
    raw(printable_json(&serde_json::to_string_pretty(value)?));
    Ok(())
}

/// Prints a value as one line of JSON to standard output.
///
/// # Errors
/// If the value cannot be written as JSON.
pub fn json_line(value: &impl serde::Serialize) -> anyhow::Result<()> {
    raw(printable_json(&serde_json::to_string(value)?));
    Ok(())
}

/// JSON with the same meaning, in which characters that a terminal would act on are escaped. Outside of
/// its strings JSON has none but line feeds.
fn printable_json(text: &str) -> String {
    let mut escaped = String::with_capacity(text.len());
    for c in text.chars() {
        if c == '\n' || !is_unprintable(c) {
            escaped.push(c);
            continue;
        }
        for unit in c.encode_utf16(&mut [0; 2]) {
            let _ = write!(escaped, "\\u{unit:04x}");
        }
    }
    escaped
}

/// Standard error for logs. An event is one line; whatever it contains, only the formatter's own
/// colours act on the terminal: it has escaped those of others before.
#[derive(Debug, Default)]
struct EscapedLog;

impl Write for EscapedLog {
    fn write(&mut self, event: &[u8]) -> io::Result<usize> {
        let text = String::from_utf8_lossy(event);
        let mut line = log_line(text.trim_end_matches('\n'));
        line.push('\n');
        std::io::stderr().lock().write_all(line.as_bytes())?;
        Ok(event.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        std::io::stderr().lock().flush()
    }
}

fn log_line(event: &str) -> String {
    let event = without_credentials(event);
    let (mut line, mut rest) = (String::with_capacity(event.len()), event.as_ref());
    while !rest.is_empty() && line.len() < LOG_CHARS {
        let colour = colour(rest);
        line.push_str(colour);
        rest = rest.get(colour.len()..).unwrap_or_default();
        let end =
            rest.find('\u{1b}').map_or(rest.len(), |at| at.max(usize::from(colour.is_empty())));
        let (plain, after) = rest.split_at_checked(end).unwrap_or((rest, ""));
        line.push_str(&printable(plain, LOG_CHARS));
        rest = after;
    }
    line
}

/// The escape sequence for a colour that `text` starts with; empty if it starts with none.
fn colour(text: &str) -> &str {
    let length = text.strip_prefix("\u{1b}[").and_then(|rest| {
        let end = rest.find(|c: char| !c.is_ascii_digit() && c != ';')?;
        rest.get(end..)?.starts_with('m').then_some(2 + end + 1)
    });
    length.and_then(|length| text.get(..length)).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    const HOSTILE: &str =
        "a\u{1b}]0;title\u{7}b\u{1b}[2Jc\rd\u{202e}e\u{200b}f\u{9b}31mg\u{feff}\u{7f}";

    #[test]
    fn json_keeps_its_meaning_and_has_nothing_that_acts() {
        let value = serde_json::json!({ HOSTILE: [HOSTILE, "é\u{e0041}\n"] });
        let text = printable_json(&serde_json::to_string_pretty(&value).unwrap());
        assert!(!text.contains(|c: char| c != '\n' && is_unprintable(c)), "{text:?}");
        assert_eq!(serde_json::from_str::<serde_json::Value>(&text).unwrap(), value);
    }

    #[test]
    fn log_lines_keep_colours_and_escape_the_rest() {
        let line =
            log_line(&format!("\u{1b}[2m12:00\u{1b}[0m \u{1b}[33m WARN\u{1b}[0m {HOSTILE}\nb"));
        assert!(
            line.starts_with("\u{1b}[2m12:00\u{1b}[0m \u{1b}[33m WARN\u{1b}[0m a\\u{1b}]0;"),
            "{line}"
        );
        assert!(line.ends_with("\\nb"), "{line}");
        let plain =
            line.replace("\u{1b}[2m", "").replace("\u{1b}[0m", "").replace("\u{1b}[33m", "");
        assert!(!plain.contains(is_unprintable), "{plain:?}");
        let long = log_line(&"é\u{1b}".repeat(100_000));
        assert!(long.len() < 2 * LOG_CHARS, "{}", long.len());
        assert_eq!(log_line("at http://u:p@h/"), "at http://(not shown)@h/");
    }

    #[test]
    fn messages_in_one_line_are_escaped_and_short() {
        let line = one_line(&HOSTILE.repeat(5000), 300);
        assert!(line.len() < 4000 && !line.contains(is_unprintable), "{line:?}");
    }
}
