//! What the agent reads: which behaviour fails, in the words of the tests that see it.
//!
//! The invariant: the text is made of names and messages of failing tests alone, and of no message
//! that holds a line of the repaired code.

use super::Failure;
use std::collections::BTreeMap;
use std::fmt::Write as _;

/// Failures that an issue tells of.
const TOLD: usize = 4;
/// Characters of one message.
const MESSAGE_CHARS: usize = 500;
/// Shorter lines of code are in many a message by chance.
const TELLING_CHARS: usize = 8;

/// The issue of a repository whose tests `failures` began to fail. `solution` holds the lines that
/// the gold patch brings back.
pub(super) fn write(repository: &str, failures: &[Failure], solution: &[String]) -> String {
    // Parameters of one test fail alike: the first stands for all of them.
    let mut behaviours: BTreeMap<&str, (&Failure, usize)> = BTreeMap::new();
    for failure in failures {
        let name = failure.test.split('[').next().unwrap_or_default();
        behaviours.entry(name).or_insert((failure, 0)).1 += 1;
    }
    let mut told: Vec<(&Failure, usize)> = behaviours.into_values().collect();
    told.sort_by_key(|(failure, _)| failure.message.len());
    let more = told.len().saturating_sub(TOLD);
    told.truncate(TOLD);
    let title = told.first().map(|(failure, _)| words(&failure.test)).unwrap_or_default();
    let mut text = format!("{repository}: {title} does not work\n\nWhat fails:\n");
    for (failure, times) in told {
        let _ = write!(text, "\n* {}", words(&failure.test));
        if times > 1 {
            let _ = write!(text, " ({times} cases)");
        }
        if let Some(message) = shown(&failure.message, solution) {
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

/// What a test is about: `tests/test_x.py::TestSort::test_keeps_order[a]` is `sort keeps order`.
fn words(test: &str) -> String {
    let (path, names) = test.split_once("::").unwrap_or((test, ""));
    let names = names.split('[').next().unwrap_or_default();
    let file = path.rsplit('/').next().unwrap_or_default().trim_end_matches(".py");
    let mut parts: Vec<String> = names.split("::").map(plain).collect();
    parts.retain(|part| !part.is_empty());
    if parts.is_empty() {
        parts.push(plain(file));
    }
    parts.join(" ")
}

/// `test_keepsOrder_of` as words: `keeps order of`.
fn plain(name: &str) -> String {
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

/// A message, indented and of bearable length; none where it would tell the solution.
fn shown(message: &str, solution: &[String]) -> Option<String> {
    let tells = |line: &String| line.len() >= TELLING_CHARS && message.contains(line.as_str());
    if message.trim().is_empty() || solution.iter().any(tells) {
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
    fn names_of_tests_become_words() {
        assert_eq!(words("tests/test_x.py::TestSort::test_keepsOrder[a::b]"), "sort keeps order");
        assert_eq!(words("tests/test_dates.py::test_1"), "1");
        assert_eq!(words("tests/test_dates.py"), "dates");
        assert_eq!(words("t.py::testing_ground"), "testing ground");
    }

    #[test]
    fn an_issue_tells_behaviour_and_never_the_solution() {
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
    fn long_messages_and_lists_are_cut() {
        let failures: Vec<Failure> =
            (0..9).map(|n| failure(&format!("t.py::test_n{n}"), &"é".repeat(2000))).collect();
        let text = write("calc", &failures, &[]);
        assert!(text.contains("And 5 more."), "{text}");
        assert!(text.chars().count() < 3000);
    }
}
