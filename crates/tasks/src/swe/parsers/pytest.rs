//! Parses the test summary that pytest prints with `-rA`.

use super::{Harness, MissingName, ReadLines, pattern};
use crate::swe::status::{Status, StatusMap, WORDS};
use crate::text::tokens;
use regex::Regex;
use std::borrow::Cow;
use std::sync::LazyLock;

fn starts_with_status(line: &str) -> bool {
    WORDS.iter().any(|word| line.starts_with(word))
}

/// Whether a line is pytest's count of skipped tests, `SKIPPED [3] file:line: reason`, which is not
/// a test to version 5.
fn is_skip_count(harness: Harness, status: &str, name: &str) -> bool {
    let count = name.strip_prefix('[').and_then(|name| name.strip_suffix(']'));
    let is_count = |count: &str| !count.is_empty() && count.chars().all(char::is_numeric);
    harness == Harness::V5_0_2 && status == "SKIPPED" && count.is_some_and(is_count)
}

/// Parses lines that start with a status, followed by a test name.
#[derive(Debug)]
pub(super) struct Summary {
    harness: Harness,
    /// Whether test parameters that are paths are reduced to their last component.
    short_paths: bool,
    /// Whether names of mouse buttons are replaced by their numbers.
    mouse_buttons: bool,
}

impl Summary {
    pub(super) fn plain(harness: Harness) -> Self {
        Self { harness, short_paths: false, mouse_buttons: false }
    }

    pub(super) fn with_options(harness: Harness) -> Self {
        Self { short_paths: true, ..Self::plain(harness) }
    }

    pub(super) fn of_matplotlib(harness: Harness) -> Self {
        Self { mouse_buttons: true, ..Self::plain(harness) }
    }
}

impl ReadLines for Summary {
    fn line(&mut self, line: &str, map: &mut StatusMap) -> Result<(), MissingName> {
        let mut line = Cow::Borrowed(line);
        if self.mouse_buttons && line.contains("MouseButton.") {
            let named = line.replace("MouseButton.LEFT", "1").replace("MouseButton.RIGHT", "3");
            line = Cow::Owned(named);
        }
        if !starts_with_status(&line) {
            return Ok(());
        }
        if line.starts_with("FAILED") {
            line = Cow::Owned(line.replace(" - ", " "));
        }
        let mut words = tokens(&line);
        let (Some(status), Some(name)) = (words.next(), words.next()) else { return Ok(()) };
        if is_skip_count(self.harness, status, name) {
            return Ok(());
        }
        let name = if self.short_paths { with_short_path(name) } else { Cow::Borrowed(name) };
        map.insert(&name, Status::of(status));
        Ok(())
    }

    fn finish(&mut self, _: &mut StatusMap) {}
}

/// Shortens `test[/a/b/c]` to `test[/c]` and drops the text after the last bracket.
fn with_short_path(name: &str) -> Cow<'_, str> {
    let Some((test, rest)) = name.split_once('[') else { return Cow::Borrowed(name) };
    let Some((option, _)) = rest.rsplit_once(']') else { return Cow::Borrowed(name) };
    let is_path = option.starts_with('/') && !option.starts_with("//") && !option.contains('*');
    match option.rsplit_once('/').filter(|_| is_path) {
        Some((_, last)) => Cow::Owned(format!("{test}[/{last}]")),
        None => Cow::Owned(format!("{test}[{option}]")),
    }
}

/// Parses lines that start with a status or, for older versions of pytest, end with one. Colours
/// are removed.
#[derive(Debug)]
pub(super) struct Coloured {
    harness: Harness,
    /// Whether `FAILED [ 10%]` is read as `FAILED`, and a status without a name is an error.
    is_pydantic: bool,
}

impl Coloured {
    pub(super) fn new(harness: Harness) -> Self {
        Self { harness, is_pydantic: false }
    }

    /// SWE-Gym's own form, which has one version.
    pub(super) fn of_pydantic() -> Self {
        Self { harness: Harness::V4_1_0, is_pydantic: true }
    }
}

impl ReadLines for Coloured {
    fn line(&mut self, line: &str, map: &mut StatusMap) -> Result<(), MissingName> {
        static PROGRESS: LazyLock<Regex> =
            LazyLock::new(|| pattern(r"FAILED[\s\x1c-\x1f]*\[.*?\]"));
        let mut line = without_colour(line);
        if self.is_pydantic && line.contains("FAILED") {
            line = Cow::Owned(PROGRESS.replace_all(&line, "FAILED").into_owned());
        }
        let (starts, ends) = (starts_with_status(&line), WORDS.iter().any(|w| line.ends_with(w)));
        if self.is_pydantic && (starts || ends) && tokens(&line).nth(1).is_none() {
            return Err(MissingName);
        }
        if starts {
            self.parse_leading_status(&line, map);
        } else if ends {
            self.parse_trailing_status(&line, map);
        }
        Ok(())
    }

    fn finish(&mut self, _: &mut StatusMap) {}
}

impl Coloured {
    fn parse_leading_status(&self, line: &str, map: &mut StatusMap) {
        let failed = line.starts_with("FAILED");
        match self.harness {
            Harness::V4_1_0 => {
                let line = if failed { Cow::Owned(line.replace(" - ", " ")) } else { line.into() };
                let mut words = tokens(&line);
                if let (Some(status), Some(name)) = (words.next(), words.next()) {
                    map.insert(name, Status::of(status));
                }
            }
            Harness::V5_0_2 => {
                let reason = if failed { line.split_once(" - ") } else { None };
                let mut words = tokens(reason.map_or(line, |(line, _)| line));
                let (Some(status), Some(name)) = (words.next(), words.next()) else { return };
                if !is_skip_count(self.harness, status, name) {
                    let name = words.fold(name.to_owned(), |name, word| name + " " + word);
                    map.insert(&name, Status::of(status));
                }
            }
        }
    }

    fn parse_trailing_status(&self, line: &str, map: &mut StatusMap) {
        let mut words = tokens(line);
        let (Some(first), Some(second)) = (words.next(), words.next()) else { return };
        match self.harness {
            Harness::V4_1_0 => map.insert(first, Status::of(second)),
            Harness::V5_0_2 => {
                let (mut name, mut last) = (first.to_owned(), second);
                for word in words {
                    name = name + " " + std::mem::replace(&mut last, word);
                }
                map.insert(&name, Status::of(last));
            }
        }
    }
}

/// `line` without colour codes like `[31m` and without control characters, which removes the escape
/// character before the bracket, but also tabs.
fn without_colour(line: &str) -> Cow<'_, str> {
    static COLOUR: LazyLock<Regex> = LazyLock::new(|| pattern(r"\[\d+m"));
    let plain = if line.contains('[') { COLOUR.replace_all(line, "") } else { line.into() };
    let is_control = |c: char| ('\x01'..='\x1f').contains(&c);
    if plain.contains(is_control) {
        return Cow::Owned(plain.replace(is_control, ""));
    }
    plain
}

/// Parses seaborn's logs, in which `FAILED` or `PASSED` starts a line, or ` PASSED ` is within it.
#[derive(Debug)]
pub(super) struct Seaborn(pub(super) Harness);

impl ReadLines for Seaborn {
    fn line(&mut self, line: &str, map: &mut StatusMap) -> Result<(), MissingName> {
        let mut words = tokens(line);
        let (first, second) = (words.next(), words.next());
        let failed = line.starts_with("FAILED");
        let inside = !failed && line.contains(" PASSED ");
        if !failed && !inside && !line.starts_with("PASSED") {
            return Ok(());
        }
        let (Some(first), Some(second)) = (first, second) else {
            return if self.0 == Harness::V4_1_0 { Err(MissingName) } else { Ok(()) };
        };
        if failed {
            map.insert(second, Status::Failed);
        } else if !inside {
            map.insert(second, Status::Passed);
        } else if second == "PASSED" {
            map.insert(first, Status::Passed);
        }
        Ok(())
    }

    fn finish(&mut self, _: &mut StatusMap) {}
}
