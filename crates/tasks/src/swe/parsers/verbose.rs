//! Parses logs of SWE-smith's profiles, most of which are output of `pytest --verbose`.
//!
//! The resulting map has the same keys and statuses as that of the profile's own parser.

use super::{MissingName, ReadLines, pattern};
use crate::swe::status::{Status, StatusMap, WORDS};
use crate::text::{is_space, tokens};
use regex::Regex;
use std::sync::LazyLock;

/// The position of the test's name and status in a line.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Verbose {
    /// `NAME STATUS`, followed by anything.
    NameFirst,
    /// `STATUS NAME`.
    StatusFirst,
    /// `[gwN] STATUS NAME`, as parallel workers report it.
    Workers,
}

impl ReadLines for Verbose {
    fn line(&mut self, line: &str, map: &mut StatusMap) -> Result<(), MissingName> {
        let found = match self {
            Self::NameFirst => name_first(line),
            Self::StatusFirst => status_first(line),
            Self::Workers => worker(line).and_then(status_first),
        };
        if let Some((name, word)) = found {
            map.insert(name, Status::of(word));
        }
        Ok(())
    }

    fn finish(&mut self, _: &mut StatusMap) {}
}

fn name_first(line: &str) -> Option<(&str, &'static str)> {
    let (name, rest) = line.split_at_checked(line.find(is_space)?)?;
    let rest = rest.trim_start_matches(is_space);
    let word = WORDS.into_iter().find(|word| rest.starts_with(word))?;
    (!name.is_empty()).then_some((name, word))
}

fn status_first(line: &str) -> Option<(&str, &'static str)> {
    let word = WORDS.into_iter().find(|word| line.starts_with(word))?;
    let name = line.strip_prefix(word)?.strip_prefix(is_space)?;
    let name = name.split(is_space).next()?;
    (!name.is_empty()).then_some((name, word))
}

/// The part of a line after `[gwN] `, with one digit.
fn worker(line: &str) -> Option<&str> {
    let rest = line.strip_prefix("[gw")?.strip_prefix(char::is_numeric)?;
    rest.strip_prefix(']')?.strip_prefix(is_space)
}

/// Parses the lines of `python -m tornado.test --verbose`.
#[derive(Debug)]
pub(super) struct Tornado;

impl ReadLines for Tornado {
    fn line(&mut self, line: &str, map: &mut StatusMap) -> Result<(), MissingName> {
        let name = line.split(" ... ").next().unwrap_or(line);
        if line.ends_with("... ok") {
            map.insert(name, Status::Passed);
        } else if line.contains(" ... skipped ") {
            map.insert(name, Status::Skipped);
        } else if line.starts_with("ERROR:") || line.starts_with("FAIL:") {
            let name = tokens(line).skip(1).take(2).collect::<Vec<_>>().join(" ");
            map.insert(&name, Status::Failed);
        }
        Ok(())
    }

    fn finish(&mut self, _: &mut StatusMap) {}
}

/// Parses the lines `NAME ... RESULT` of `unittest`.
#[derive(Debug)]
pub(super) struct Unittest;

impl ReadLines for Unittest {
    fn line(&mut self, line: &str, map: &mut StatusMap) -> Result<(), MissingName> {
        static RESULT: LazyLock<Regex> = LazyLock::new(|| {
            pattern(
                r"^([a-zA-Z0-9_\-,.\s\x1c-\x1f()']+)[\s\x1c-\x1f]\.{3}[\s\x1c-\x1f](ok|FAIL|ERROR)$",
            )
        });
        let Some(found) = RESULT.captures(line) else { return Ok(()) };
        let part = |group| found.get(group).map_or("", |text| text.as_str());
        let status = match part(2) {
            "ok" => Status::Passed,
            "FAIL" => Status::Failed,
            _ => Status::Error,
        };
        map.insert(part(1), status);
        Ok(())
    }

    fn finish(&mut self, _: &mut StatusMap) {}
}

#[cfg(test)]
mod tests {
    use super::*;

    fn map(mut parser: impl ReadLines, log: &str) -> Vec<(String, String)> {
        let mut map = StatusMap::new();
        for line in log.split('\n') {
            parser.line(line, &mut map).unwrap();
        }
        map.iter().map(|(name, status)| (name.to_owned(), status.as_str().to_owned())).collect()
    }

    fn pairs(pairs: &[(&str, &str)]) -> Vec<(String, String)> {
        pairs.iter().map(|&(name, status)| (name.to_owned(), status.to_owned())).collect()
    }

    #[test]
    fn lines_of_pytest_are_read_where_their_status_is() {
        let log = "a.py::t PASSED   [ 10%]\na.py::u[x y] PASSED\n b PASSED\nb::t  FAILED\n\
            c PASSEDx\nd\x1cXFAIL\nPASSED e extra\n[gw0] FAILED f [1%]\n[gw10] PASSED g\nERROR\n";
        assert_eq!(
            map(Verbose::NameFirst, log),
            pairs(&[
                ("a.py::t", "PASSED"),
                ("b::t", "FAILED"),
                ("c", "PASSED"),
                ("d", "XFAIL"),
                ("[gw0]", "FAILED"),
                ("[gw10]", "PASSED")
            ])
        );
        assert_eq!(map(Verbose::StatusFirst, log), pairs(&[("e", "PASSED")]));
        assert_eq!(map(Verbose::Workers, log), pairs(&[("f", "FAILED")]));
    }

    #[test]
    fn lines_of_unittest_are_read() {
        let log = "test_a (t.A) ... ok\ntest_b (t.A) ... skipped 'x'\nFAIL: test_c (t.A)\nERROR: t\n\
            test_d (t.A) ... FAIL\ntest_e (t.A) ... ERROR\ntest_f! ... ok\nodd... ok";
        assert_eq!(
            map(Tornado, log),
            pairs(&[
                ("test_a (t.A)", "PASSED"),
                ("test_b (t.A)", "SKIPPED"),
                ("test_c (t.A)", "FAILED"),
                ("t", "FAILED"),
                ("test_f!", "PASSED"),
                ("odd... ok", "PASSED")
            ])
        );
        assert_eq!(
            map(Unittest, log),
            pairs(&[
                ("test_a (t.A)", "PASSED"),
                ("test_d (t.A)", "FAILED"),
                ("test_e (t.A)", "ERROR")
            ])
        );
    }
}
