//! Composes the issue text of a repair task from the names and messages of the failing tests.
//!
//! The invariant: the text contains nothing else of the repository, and omits every message that
//! contains a line of the gold patch.

use serde::Deserialize;
use std::collections::BTreeMap;
use std::fmt::Write as _;

/// Maximum number of behaviours that an issue describes.
const MAX_BEHAVIOURS: usize = 4;
/// Maximum number of characters of one message.
const MESSAGE_CHARS: usize = 500;
/// Minimum length of a line of the solution that a message must not contain, in bytes. Shorter
/// lines occur in messages by chance.
const MIN_LEAK_BYTES: usize = 8;

/// A failing test and its message.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub(crate) struct Failure {
    /// Id of the test in pytest, `FILE::NAME`.
    pub(crate) test: String,
    /// The message of the exception, as pytest reports it.
    pub(crate) message: String,
}

/// The issue text for the test failures `failures`. `solution` contains the lines that the gold
/// patch adds.
pub(super) fn write(repository: &str, failures: &[Failure], solution: &[String]) -> String {
    // A parametrised test usually fails for the same reason with all parameters, so only its first
    // failure is described.
    let mut behaviours: BTreeMap<&str, (&Failure, usize)> = BTreeMap::new();
    for failure in failures {
        let name = failure.test.split('[').next().unwrap_or_default();
        behaviours.entry(name).or_insert((failure, 0)).1 += 1;
    }
    let mut described: Vec<(&Failure, usize)> = behaviours.into_values().collect();
    described.sort_by_key(|(failure, _)| failure.message.len());
    let more = described.len().saturating_sub(MAX_BEHAVIOURS);
    described.truncate(MAX_BEHAVIOURS);
    let title = described.first().map(|(failure, _)| words(&failure.test)).unwrap_or_default();
    let mut text = format!("{repository}: {title} does not work\n\nWhat fails:\n");
    for (failure, times) in described {
        let _ = write!(text, "\n* {}", words(&failure.test));
        if times > 1 {
            let _ = write!(text, " ({times} cases)");
        }
        if let Some(message) = indented_message(&failure.message, solution) {
            let _ = write!(text, ":\n\n{message}");
        }
        text.push('\n');
    }
    if more > 0 {
        let _ = writeln!(text, "\nAnd {more} more.");
    }
    text.push_str(
        "\nIt worked before. Find the cause in the code and repair it; tests stay as they are.",
    );
    text
}

/// The behaviour that a test checks: `sort keeps order` for
/// `tests/test_x.py::TestSort::test_keeps_order[a]`.
fn words(test: &str) -> String {
    let (path, names) = test.split_once("::").unwrap_or((test, ""));
    let names = names.split('[').next().unwrap_or_default();
    let file = path.rsplit('/').next().unwrap_or_default().trim_end_matches(".py");
    let mut parts: Vec<String> = names.split("::").map(identifier_words).collect();
    parts.retain(|part| !part.is_empty());
    if parts.is_empty() {
        parts.push(identifier_words(file));
    }
    parts.join(" ")
}

/// The words of an identifier without a leading `test`: `keeps order of` for `test_keepsOrder_of`.
fn identifier_words(name: &str) -> String {
    let mut out = String::new();
    for (n, part) in name.split('_').filter(|part| !part.is_empty()).enumerate() {
        if n > 0 {
            out.push(' ');
        }
        let mut last = ' ';
        for c in part.chars() {
            if c.is_uppercase() && last.is_lowercase() {
                out.push(' ');
            }
            out.extend(c.to_lowercase());
            last = c;
        }
    }
    let rest = out.strip_prefix("test").filter(|rest| !rest.starts_with(char::is_alphanumeric));
    rest.unwrap_or(&out).trim().to_owned()
}

/// `message`, shortened and indented; `None` if it is blank or reveals the solution.
fn indented_message(message: &str, solution: &[String]) -> Option<String> {
    let reveals = |line: &String| line.len() >= MIN_LEAK_BYTES && message.contains(line.as_str());
    if message.trim().is_empty() || solution.iter().any(reveals) {
        return None;
    }
    let mut cut: String = message.chars().take(MESSAGE_CHARS).collect();
    if cut.len() < message.len() {
        cut.push_str(" …");
    }
    let lines: Vec<String> = cut.trim_end().lines().map(|line| format!("    {line}")).collect();
    Some(lines.join("\n"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn failure(test: &str, message: &str) -> Failure {
        Failure { test: test.into(), message: message.into() }
    }

    #[test]
    fn test_names_become_words() {
        assert_eq!(words("tests/test_x.py::TestSort::test_keepsOrder[a::b]"), "sort keeps order");
        assert_eq!(words("tests/test_dates.py::test_1"), "1");
        assert_eq!(words("tests/test_dates.py"), "dates");
        assert_eq!(words("t.py::testing_ground"), "testing ground");
    }

    #[test]
    fn an_issue_describes_behaviour_and_never_the_solution() {
        let solution = ["return first + second".to_owned()];
        let failures = [
            failure("t.py::test_sum[1]", "assert 3 == 4"),
            failure("t.py::test_sum[2]", "assert 5 == 6"),
            failure("t.py::test_leak", "see: return first + second"),
        ];
        let text = write("calc", &failures, &solution);
        assert!(text.starts_with("calc: sum does not work\n"), "{text}");
        assert!(text.contains("* sum (2 cases):\n\n    assert 3 == 4\n"), "{text}");
        assert!(text.contains("* leak\n"), "{text}");
        assert!(!text.contains("first + second"), "{text}");
    }

    #[test]
    fn long_messages_and_lists_are_shortened() {
        let failures: Vec<Failure> =
            (0..9).map(|n| failure(&format!("t.py::test_n{n}"), &"é".repeat(2000))).collect();
        let text = write("calc", &failures, &[]);
        assert!(text.contains("And 5 more."), "{text}");
        assert!(text.chars().count() < 3000);
    }
}
