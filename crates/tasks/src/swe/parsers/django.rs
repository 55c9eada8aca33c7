//! Parses the log of Django's test runner.

use super::{MissingName, ReadLines, pattern};
use crate::swe::status::{Status, StatusMap};
use crate::text::{strip, tokens};
use regex::Regex;
use std::collections::VecDeque;
use std::sync::LazyLock;

/// A pattern for a test's name followed by `$rest`. Python's `\s` also matches the four ASCII
/// separators.
macro_rules! after_name {
    ($rest:literal) => {
        concat!(r"(?m)^(.*?)[\s\x1c-\x1f]\.\.\.[\s\x1c-\x1f]", $rest)
    };
}

const TESTING: &str = "Testing against Django installed in ";
static OPENING: LazyLock<Regex> =
    LazyLock::new(|| pattern(after_name!("Testing against Django installed in ")));
static SERVER_ERROR: LazyLock<Regex> =
    LazyLock::new(|| pattern(after_name!(r"Internal Server Error: /(.*)/\nok\z")));
static SYSTEM_CHECK: LazyLock<Regex> = LazyLock::new(|| {
    pattern(after_name!(r"System check identified no issues \(0 silenced\)\nok\z"))
});

/// Number of earlier lines that a match can include: the name, the dots and the message before `ok`
/// may each be on a line of their own.
const LINES_BACK: usize = 3;

/// Finds results on one line, and results that a message separates from their test's name.
///
/// The harness finds the latter with patterns over the whole log, and they take precedence. Here
/// they are found line by line, and are added to the map at the end.
#[derive(Debug, Default)]
pub(super) struct Django {
    /// Name of the test on the last line with ` ... `.
    last_name: Option<String>,
    /// Up to [`LINES_BACK`] lines before this one, newest last.
    before: VecDeque<String>,
    /// Number of this line, from 0.
    line: usize,
    /// First line that the next match of each pattern can include, because matches do not overlap.
    opening_from: usize,
    server_error_from: usize,
    system_check_from: usize,
    /// A test whose result is separated by [`TESTING`], and whether the previous line ended the
    /// message.
    open: Option<(String, bool)>,
    /// Tests with separated results.
    separated: Option<StatusMap>,
}

impl ReadLines for Django {
    fn line(&mut self, line: &str, map: &mut StatusMap) -> Result<(), MissingName> {
        let result = self.parse_results_on_line(strip(line), map);
        for name in self.find_separated_results(line) {
            self.separated.get_or_insert_with(|| map.fresh()).insert(&name, Status::Passed);
        }
        self.remember(line);
        result
    }

    fn finish(&mut self, map: &mut StatusMap) {
        for (name, _) in self.separated.iter().flat_map(StatusMap::iter) {
            map.insert(name, Status::Passed);
        }
    }
}

impl Django {
    /// Records the results on this line; several rules may apply.
    fn parse_results_on_line(
        &mut self,
        mut line: &str,
        map: &mut StatusMap,
    ) -> Result<(), MissingName> {
        const VERSION: &str = "--version is equivalent to version";
        if line.contains(VERSION) {
            map.insert(VERSION, Status::Passed);
        }
        if let Some((name, _)) = line.split_once(" ... ") {
            name.clone_into(self.last_name.get_or_insert_default());
        }
        if let Some(end) =
            [" ... ok", " ... OK", " ...  OK"].iter().find(|end| line.ends_with(*end))
        {
            // In one instance, a migration is printed before the test's name.
            if line.starts_with("Applying sites.0002_alter_domain_unique...test_no_migrations")
                && let Some((_, test)) = line.split_once("...")
            {
                line = strip(test);
            }
            let name = line.rsplit_once(*end).map_or(line, |(name, _)| name);
            map.insert(name, Status::Passed);
        }
        if let Some((name, _)) = line.split_once(" ... skipped") {
            map.insert(name, Status::Skipped);
        }
        for (end, heading, status) in
            [(" ... FAIL", "FAIL:", Status::Failed), (" ... ERROR", "ERROR:", Status::Error)]
        {
            if line.ends_with(end)
                && let Some((name, _)) = line.split_once(end)
            {
                map.insert(name, status.clone());
            }
            if line.starts_with(heading) {
                map.insert(tokens(line).nth(1).ok_or(MissingName)?, status);
            }
        }
        if line.starts_with("ok")
            && let Some(name) = &self.last_name
        {
            map.insert(name, Status::Passed);
        }
        Ok(())
    }

    /// Names of the tests whose separated results end on this line.
    fn find_separated_results(&mut self, line: &str) -> Vec<String> {
        let mut passed = Vec::new();
        if line == "ok" {
            if let Some((name, _)) = self.open.take_if(|(_, ends)| *ends) {
                self.opening_from = self.line + 1;
                passed.push(name);
            }
            let last = self.before.back().map(String::as_str).unwrap_or_default();
            if last.ends_with('/') {
                let found = self.find_name(&SERVER_ERROR, self.server_error_from, line);
                if let Some((name, _)) = found {
                    self.server_error_from = self.line + 1;
                    passed.push(name);
                }
            }
            if last.ends_with("System check identified no issues (0 silenced)") {
                let found = self.find_name(&SYSTEM_CHECK, self.system_check_from, line);
                if let Some((name, _)) = found {
                    self.system_check_from = self.line + 1;
                    passed.push(name);
                }
            }
        }
        let ends = |message: &str| message.ends_with(" silenced).");
        if let Some((_, message_ends)) = &mut self.open {
            *message_ends = ends(line);
        } else if line.contains(TESTING) {
            let found = self.find_name(&OPENING, self.opening_from, line);
            self.open = found.map(|(name, message)| (name, ends(&message)));
        }
        passed
    }

    /// Searches for `pattern` in this line and those before it, starting at line `from`. Returns
    /// the test's name and the text after the match.
    fn find_name(&self, pattern: &Regex, from: usize, line: &str) -> Option<(String, String)> {
        let back = (self.line - from.min(self.line)).min(self.before.len());
        let mut text = String::new();
        for before in self.before.iter().skip(self.before.len() - back) {
            text.push_str(before);
            text.push('\n');
        }
        text.push_str(line);
        let found = pattern.captures(&text)?;
        let name = found.get(1)?.as_str().to_owned();
        let rest = text.get(found.get(0)?.end()..)?.to_owned();
        Some((name, rest))
    }

    fn remember(&mut self, line: &str) {
        let full = self.before.len() == LINES_BACK;
        let mut slot = if full { self.before.pop_front() } else { None }.unwrap_or_default();
        line.clone_into(&mut slot);
        self.before.push_back(slot);
        self.line += 1;
    }
}
