//! The toy task: one file, one bug, one test.

use crate::sandbox::{FakeExec, FakeTree};
use orchestrate_tasks::{Origin, Split, Task, TaskFile, TestStatus, Verdict};
use orchestrate_types::TaskId;
use std::collections::BTreeMap;
use std::time::Duration;

/// The line that solves the toy task: line 2 of `total.py`.
pub const TOY_FIX: &str = "    return sum(items)";

const TEST: &str = "test_total";

/// The toy task: `total.py` forgets the last item. `run-tests` needs the hidden file, and passes if
/// [`TOY_FIX`] is in place.
pub fn toy_task() -> Task {
    let file =
        |path: &str, content: &str| TaskFile { path: path.to_owned(), content: content.to_owned() };
    Task {
        id: TaskId::made_of("toy__000000"),
        environment: "toy".to_owned(),
        family: "slice".to_owned(),
        split: Split::Train,
        problem_statement: "total in total.py should include the last item.".to_owned(),
        image: "toy".to_owned(),
        workdir: "/testbed".to_owned(),
        agent_files: vec![
            file("README", "toy\n"),
            file("total.py", "def total(items):\n    return sum(items[:-1])\n"),
        ],
        hidden_files: vec![file("r2e_tests/test_1.py", "hidden\n")],
        test_command: "run-tests".to_owned(),
        test_timeout: Duration::from_secs(30),
        expected: BTreeMap::from([(TEST.to_owned(), TestStatus::Passed)]),
        gold_patch: String::new(),
        origin: Origin::Files,
    }
}

/// A shell with the commands `cat F`, `echo TEXT`, `rm F`, `plant F`, `false`, `hang` and
/// `run-tests`.
pub fn toy_shell(tree: &mut FakeTree, script: &str) -> FakeExec {
    let (program, argument) = script.split_once(' ').unwrap_or((script, ""));
    match program {
        "cat" => match tree.get(argument) {
            Some((_, content)) => FakeExec::new(0, String::from_utf8_lossy(content)),
            None => FakeExec::new(1, format!("cat: {argument}: No such file or directory\n")),
        },
        "echo" => FakeExec::new(0, format!("{argument}\n")),
        "rm" => {
            tree.remove(argument);
            FakeExec::new(0, "")
        }
        "plant" => {
            tree.insert(argument.to_owned(), (0o644, b"planted\n".to_vec()));
            FakeExec::new(0, "")
        }
        "false" => FakeExec::new(1, ""),
        "hang" => FakeExec { takes: Duration::MAX, ..FakeExec::new(0, "") },
        "run-tests" => {
            let fixed = tree
                .get("total.py")
                .is_some_and(|(_, content)| String::from_utf8_lossy(content).contains(TOY_FIX));
            match (tree.contains_key("r2e_tests/test_1.py"), fixed) {
                (true, true) => FakeExec::new(0, format!("PASSED {TEST}\n")),
                (true, false) => FakeExec::new(1, format!("FAILED {TEST}\n")),
                (false, _) => FakeExec::new(2, "no tests\n"),
            }
        }
        _ => FakeExec::new(127, format!("sh: {program}: not found\n")),
    }
}

/// Grades the log of the toy task's `run-tests`.
pub fn grade_toy(expected: &BTreeMap<String, TestStatus>, log: &str) -> Verdict {
    let status = |line: &str| match line.split_once(' ') {
        Some(("PASSED", name)) => Some((name.to_owned(), TestStatus::Passed)),
        Some(("FAILED", name)) => Some((name.to_owned(), TestStatus::Failed)),
        Some(_) | None => None,
    };
    let statuses: BTreeMap<String, TestStatus> = log.lines().filter_map(status).collect();
    let differing: Vec<String> = expected
        .iter()
        .filter(|(name, status)| statuses.get(*name) != Some(status))
        .map(|(name, _)| name.clone())
        .collect();
    let reward = if differing.is_empty() { 1.0 } else { 0.0 };
    Verdict {
        reward,
        official_reward: reward,
        statuses,
        differing,
        report: None,
        suspicious: Vec::new(),
    }
}
