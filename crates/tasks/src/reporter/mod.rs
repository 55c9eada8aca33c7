//! Test runs whose results come from a trusted process, not from what the tests print.
//!
//! `reporter.py` runs in the grader's sandbox and starts the tests as its child. The invariant: a
//! [`Report`] exists only if the output ends with one line that contains the run's [`Nonce`], which
//! no process but the reporter has.

mod command;

pub use command::{Start, TestCommand};

use crate::finding::Finding;
use crate::task::{Task, TestStatus};
use crate::task_file::TaskFile;
use orchestrate_types::mended_json;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// Name of the environment variable in which the reporter receives the nonce.
pub const NONCE_VARIABLE: &str = "ORCHESTRATE_NONCE";
/// Exit status of the reporter if it cannot start the tests, before any code of the repository ran.
pub const NOT_STARTED: i32 = 97;
/// Size of everything that [`files`] writes for a run, at most, in bytes.
pub const FILE_BYTES: u64 = 4 << 20;

/// File names in the reporter's folder.
const REPORTER: &str = "reporter.py";
const CHILD: &str = "child.py";
const PLAN: &str = "plan.json";
/// First word of the last line of the output.
const PREFIX: &str = "orchestrate-report";
/// Paths of one list that are passed to the reporter; the rest is left out.
const MAX_PATHS: usize = 10_000;

/// Modules whose functions and classes must be the same after every test as at the start.
const WATCHED: &[&str] = &[
    "_pytest.assertion",
    "_pytest.assertion.rewrite",
    "_pytest.assertion.truncate",
    "_pytest.assertion.util",
    "_pytest.fixtures",
    "_pytest.outcomes",
    "_pytest.python",
    "_pytest.python_api",
    "_pytest.raises",
    "_pytest.recwarn",
    "_pytest.reports",
    "_pytest.runner",
    "_pytest.skipping",
    "_pytest.unittest",
    "pluggy",
    "pluggy._callers",
    "pluggy._hooks",
    "pluggy._manager",
    "pluggy._result",
    "unittest.case",
    "unittest.result",
];

/// Built-in names that no test replaces, and by which results could be changed.
const BUILTINS: &[&str] = &[
    "AssertionError",
    "BaseException",
    "Exception",
    "abs",
    "all",
    "any",
    "bool",
    "callable",
    "dict",
    "enumerate",
    "float",
    "getattr",
    "hasattr",
    "int",
    "isinstance",
    "issubclass",
    "len",
    "list",
    "max",
    "min",
    "range",
    "repr",
    "set",
    "sorted",
    "str",
    "sum",
    "tuple",
    "type",
    "zip",
];

/// A value that the tested code cannot know.
#[derive(Clone, PartialEq, Eq)]
pub struct Nonce(String);

impl Nonce {
    /// A new value of 128 random bits.
    pub fn generate() -> Self {
        Self(format!("{:032x}", rand::random::<u128>()))
    }

    /// The value, for the reporter's environment.
    pub fn reveal(&self) -> &str {
        &self.0
    }
}

impl std::fmt::Debug for Nonce {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        out.write_str("Nonce")
    }
}

/// What the reporter must know of one test run.
#[derive(Debug, Clone, Default)]
pub struct TestPlan {
    /// Files that the change touches, relative to the tree.
    pub touched: Vec<String>,
    /// Those of them that set trace functions without the change.
    pub tracing: Vec<String>,
    /// Files and folders of hidden tests, relative to the tree.
    pub hidden: Vec<String>,
    /// Prefixes of environment variables that the tests must not see, besides those of Python,
    /// pytest, coverage and the dynamic linker.
    pub unset: Vec<String>,
}

#[derive(Serialize)]
struct PlanFile<'a> {
    env: &'a BTreeMap<String, String>,
    wrapper: &'a [String],
    python: &'a str,
    flags: &'a [String],
    arguments: &'a [String],
    unset: &'a [String],
    wanted: Vec<&'a str>,
    spec: Spec<'a>,
}

#[derive(Serialize)]
struct Spec<'a> {
    script: Option<&'a str>,
    touched: &'a [String],
    tracing: &'a [String],
    hidden: &'a [String],
    watched: &'a [&'a str],
    builtins: &'a [&'a str],
}

/// The files that the reporter needs, below `folder`, and its arguments, the program first.
///
/// # Errors
/// If the plan cannot be written as JSON.
pub fn files(
    task: &Task,
    command: &TestCommand,
    plan: &TestPlan,
    folder: &str,
) -> serde_json::Result<[TaskFile; 3]> {
    let passed = task.expected.iter().filter(|(_, status)| **status == TestStatus::Passed);
    let name = |key: &'_ String| key.split('[').next().map(str::len).unwrap_or_default();
    let mut wanted: Vec<&str> = passed.filter_map(|(key, _)| key.get(..name(key))).collect();
    wanted.truncate(MAX_PATHS);
    let first = |paths: &'_ [String]| paths.len().min(MAX_PATHS);
    let plan = PlanFile {
        env: &command.env,
        wrapper: &command.wrapper,
        python: &command.python,
        flags: &command.flags,
        arguments: &command.arguments,
        unset: &plan.unset,
        wanted,
        spec: Spec {
            script: match &command.start {
                Start::Pytest => None,
                Start::Script(path) => Some(path),
            },
            touched: plan.touched.get(..first(&plan.touched)).unwrap_or_default(),
            tracing: plan.tracing.get(..first(&plan.tracing)).unwrap_or_default(),
            hidden: plan.hidden.get(..first(&plan.hidden)).unwrap_or_default(),
            watched: WATCHED,
            builtins: BUILTINS,
        },
    };
    let file = |name: &str, content: String| TaskFile { path: format!("{folder}/{name}"), content };
    Ok([
        file(REPORTER, include_str!("reporter.py").to_owned()),
        file(CHILD, concat!(include_str!("alter.py"), include_str!("child.py")).to_owned()),
        file(PLAN, serde_json::to_string(&plan)?),
    ])
}

/// The program and arguments that start the reporter from `folder`, in the task's folder.
pub fn argv(command: &TestCommand, folder: &str) -> Vec<String> {
    let mut argv = vec![command.python.clone()];
    argv.extend(["-I", "-S", "-B"].map(ToOwned::to_owned));
    argv.push(format!("{folder}/{REPORTER}"));
    argv
}

/// What the reporter found.
#[derive(Debug, Clone, PartialEq, Eq, Default, Deserialize)]
pub struct Report {
    /// Status of each test by pytest's id, and of each file that could not be collected.
    pub results: Vec<(String, TestStatus)>,
    /// What it noticed, with the reason.
    pub findings: BTreeMap<Finding, String>,
    /// How often a test was made to fail.
    #[serde(default)]
    pub canaries: u32,
}

/// Separates the output of a reporter into what the tests printed and the report. There is none if
/// the output does not end with a complete report for `nonce`, or if the nonce occurs elsewhere.
pub fn split(output: &[u8], nonce: &Nonce) -> (Vec<u8>, Option<Report>) {
    let ended = output.strip_suffix(b"\n").unwrap_or(output);
    let at = ended.iter().rposition(|byte| *byte == b'\n').map_or(0, |at| at + 1);
    let (log, line) = ended.split_at_checked(at).unwrap_or((ended, &[]));
    // The name of a test may be text that is not Unicode, which Python writes as halves of pairs.
    let line = mended_json(line);
    let report = std::str::from_utf8(&line).ok().and_then(|line| {
        let line = line.strip_prefix(PREFIX)?.strip_prefix(' ')?;
        let json = line.strip_prefix(nonce.reveal())?.strip_prefix(' ')?;
        // One that cannot be read is as good as none, which is a finding of its own: nothing is passed.
        serde_json::from_str(json).ok()
    });
    let elsewhere = memchr::memmem::find(log, nonce.reveal().as_bytes()).is_some();
    match report {
        Some(report) if !elsewhere => {
            (log.strip_suffix(b"\n").unwrap_or(log).to_vec(), Some(report))
        }
        Some(_) | None => (output.to_vec(), None),
    }
}

/// Whether tests printed something that looks like a report or like a second summary.
pub fn is_forged(log: &str) -> bool {
    log.matches("short test summary info").nth(1).is_some()
        || log.split(['\n', '\r']).any(|line| line.starts_with(PREFIX))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn report(nonce: &Nonce) -> String {
        format!(
            "{PREFIX} {} {}\n",
            nonce.reveal(),
            r#"{"results": [["t.py::a", "PASSED"]], "findings": {"tampered": "x"}, "canaries": 2, "exit": 0}"#
        )
    }

    #[test]
    fn the_report_is_the_last_line_with_the_nonce_and_the_rest_is_log() {
        let nonce = Nonce::generate();
        let (log, found) = split(format!("a\nb\n\n{}", report(&nonce)).as_bytes(), &nonce);
        assert_eq!(log, b"a\nb\n");
        let found = found.unwrap();
        assert_eq!(found.results, [("t.py::a".to_owned(), TestStatus::Passed)]);
        assert_eq!(found.findings[&Finding::Tampered], "x");
        assert_eq!(found.canaries, 2);
    }

    #[test]
    fn the_name_of_a_test_that_is_not_unicode_costs_no_report() {
        let nonce = Nonce::generate();
        let whole = report(&nonce).replace("t.py::a", "t.py::a[\\udce9]");
        let found = split(whole.as_bytes(), &nonce).1.unwrap();
        assert_eq!(found.results, [("t.py::a[\u{fffd}]".to_owned(), TestStatus::Passed)]);
    }

    #[test]
    fn a_report_that_is_forged_or_incomplete_or_not_last_does_not_count() {
        let nonce = Nonce::generate();
        let whole = report(&nonce);
        for output in [
            report(&Nonce::generate()),
            format!("{whole}more\n"),
            whole.get(..whole.len() - 3).unwrap().to_owned(),
            format!("{} seen\n{whole}", nonce.reveal()),
            format!("x{whole}"),
            String::new(),
        ] {
            let (log, found) = split(output.as_bytes(), &nonce);
            assert_eq!(found, None, "{output}");
            assert_eq!(log, output.as_bytes());
        }
    }

    #[test]
    fn nonces_differ_and_are_not_printed() {
        let nonce = Nonce::generate();
        assert_ne!(nonce, Nonce::generate());
        assert_eq!(nonce.reveal().len(), 32);
        assert!(!format!("{nonce:?}").contains(nonce.reveal()));
    }

    #[test]
    fn second_summaries_and_imitated_reports_are_noticed() {
        assert!(!is_forged("== short test summary info ==\nPASSED a"));
        assert!(is_forged("short test summary info\nshort test summary info\n"));
        assert!(is_forged("x\rorchestrate-report 0 {}"));
    }
}
