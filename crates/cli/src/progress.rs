//! Live progress on standard error: a bar on a terminal, plain lines elsewhere.

use crate::output;
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use std::io::IsTerminal;
use std::time::Duration;

/// Maximum number of characters of a status message, and of a line.
const STATUS_CHARS: usize = 400;
const LINE_CHARS: usize = 4000;

/// A progress bar for work of known length, with permanent lines above it.
#[derive(Debug, Clone)]
pub struct Progress {
    bar: ProgressBar,
    terminal: bool,
}

impl Progress {
    /// Shows a bar for `total` units of work.
    pub fn new(total: u64) -> Self {
        let terminal = std::io::stderr().is_terminal();
        let target =
            if terminal { ProgressDrawTarget::stderr() } else { ProgressDrawTarget::hidden() };
        let bar = ProgressBar::with_draw_target(Some(total), target);
        let template = "{elapsed_precise} [{bar:24}] {pos}/{len} {wide_msg}";
        if let Ok(style) = ProgressStyle::with_template(template) {
            bar.set_style(style.progress_chars("=> "));
        }
        if terminal {
            bar.enable_steady_tick(Duration::from_millis(500));
        }
        Self { bar, terminal }
    }

    /// Sets the units of work that are done, their total, and a status message, which is escaped.
    pub fn update(&self, done: u64, total: u64, message: &str) {
        self.bar.set_length(total);
        self.bar.set_position(done);
        self.bar.set_message(output::one_line(message, STATUS_CHARS));
    }

    /// Prints a permanent line, above the bar, escaped.
    pub fn line(&self, text: &str) {
        let text = output::one_line(text, LINE_CHARS);
        if self.terminal {
            self.bar.println(text);
        } else {
            output::say(text);
        }
    }

    /// Removes the bar.
    pub fn finish(&self) {
        self.bar.finish_and_clear();
    }
}
