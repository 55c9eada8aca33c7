//! A task that any episode solves by submitting.

use orchestrate_tasks::{Origin, Split, Task, TaskFile, TestStatus, Verdict};
use orchestrate_types::TaskId;
use std::collections::BTreeMap;
use std::time::Duration;

/// Task number `index`, with a problem statement of `words` words (at least one) that no other task
/// has. Tasks differ from their first word on, so that only the episodes of a group share a prompt.
pub fn task(index: usize, words: usize) -> Task {
    let statement: Vec<String> = (0..words.max(1)).map(|word| format!("w{index}x{word}")).collect();
    Task {
        id: TaskId::made_of(&format!("synthetic__{index:06}")),
        environment: "synthetic".to_owned(),
        family: "synthetic".to_owned(),
        split: Split::Train,
        problem_statement: statement.join(" "),
        image: "none".to_owned(),
        workdir: "/testbed".to_owned(),
        agent_files: vec![TaskFile { path: "a.py".to_owned(), content: "pass\n".to_owned() }],
        hidden_files: Vec::new(),
        test_command: "true".to_owned(),
        test_timeout: Duration::from_mins(1),
        expected: BTreeMap::new(),
        gold_patch: String::new(),
        origin: Origin::Files,
    }
}

/// Grades any log with reward 1: an episode that submits has solved its task.
pub fn grade(_expected: &BTreeMap<String, TestStatus>, _log: &str) -> Verdict {
    Verdict {
        reward: 1.0,
        official_reward: 1.0,
        statuses: BTreeMap::new(),
        differing: Vec::new(),
        report: None,
        suspicious: Vec::new(),
    }
}
