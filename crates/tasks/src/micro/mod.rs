//! The bundled `micro` environment: bug fixes small enough for a model of two million parameters to
//! learn.
//!
//! A task is one Python module with two functions, one line of which is wrong. The invariant: a
//! task depends only on (seed, split, index), so generating more tasks changes none of the earlier
//! ones, on any machine. The values in an issue are computed here, and the tests check them with a
//! real Python interpreter. Start reading at [`generate`]; the bug families are in `catalog`.

mod arguments;
mod catalog;
mod draw;
pub(crate) mod families;
mod instance;
pub(crate) mod value;
mod words;

pub use words::words;

pub(crate) use draw::Draw;

use crate::patch;
use crate::r2e::{
    ExecutionResult, FileDiff, HIDDEN_FOLDER, MicroColumns, ParsedCommit, R2eRow, WORKDIR,
};
use crate::task::{Origin, Split, Task, TestStatus};
use crate::task_file::TaskFile;
use families::{CATALOG, Family, fill};
use instance::{Case, Function, Instance};
use orchestrate_types::TaskId;
use std::collections::{BTreeMap, HashSet};
use std::fmt::Write as _;
use std::sync::LazyLock;
use std::time::Duration;
use value::Value;

/// Image of all micro tasks. It needs `python3`, a shell and coreutils.
pub const IMAGE: &str = "orchestrate-micro:1";
/// Shell command that runs the hidden tests; `runner.py` explains the interpreter's flags.
pub const TEST_COMMAND: &str = "exec python3 -I -S -B r2e_tests/runner.py";
/// Shell command that runs the visible tests and prints `ok`, or one line per failure.
pub const RUN_COMMAND: &str = "python3 run.py";

const RUNNER: &str = include_str!("runner.py");
const RUN: &str = include_str!("run.py");

/// A bug family, for lists and reports.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FamilyInfo {
    /// Name, as in [`Task::family`].
    pub name: &'static str,
    /// Whether it only occurs in [`Split::HeldOutFamilies`].
    pub held_out: bool,
    /// Number of expressions that an issue can ask for.
    pub variants: usize,
}

/// All bug families, those for training first.
pub static FAMILIES: LazyLock<Vec<FamilyInfo>> = LazyLock::new(|| {
    let info = |family: &Family| FamilyInfo {
        name: family.name,
        held_out: family.held_out,
        variants: family.phrased().count(),
    };
    CATALOG.iter().map(info).collect()
});

/// Number of tasks to generate for each split.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MicroCounts {
    /// Tasks of [`Split::Train`].
    pub train: usize,
    /// Tasks of [`Split::HeldOut`]: unseen function names, known families.
    pub held_out: usize,
    /// Tasks of [`Split::HeldOutFamilies`]: unseen function names and unseen families.
    pub held_out_families: usize,
}

impl Default for MicroCounts {
    fn default() -> Self {
        Self { train: 1000, held_out: 400, held_out_families: 100 }
    }
}

/// Generates the tasks of `seed` in the order of [`MicroCounts`]. No two of them are equal.
pub fn generate(seed: u64, counts: MicroCounts) -> Vec<Task> {
    instances(seed, counts).map(|(id, split, instance)| instance.task(&id, split)).collect()
}

/// Generates the same tasks as [`generate`], as rows of an R2E-Gym data set.
pub fn rows(seed: u64, counts: MicroCounts) -> Vec<R2eRow> {
    instances(seed, counts).map(|(id, split, instance)| instance.row(id, split)).collect()
}

/// Whether [`generate`] gives a task this id if it generates enough of them.
pub fn is_id(id: &str) -> bool {
    let is_index = |n: &str| n.parse().is_ok_and(|index: usize| format!("{index:06}") == n);
    let number = |name: &str| id.strip_prefix(&format!("micro__{name}_"));
    PARTS.iter().any(|(_, name)| number(name).is_some_and(is_index))
}

/// The parts, with their names in ids.
const PARTS: [(Split, &str); 3] = [
    (Split::Train, "train"),
    (Split::HeldOut, "held_out"),
    (Split::HeldOutFamilies, "held_out_families"),
];

fn instances(seed: u64, counts: MicroCounts) -> impl Iterator<Item = (String, Split, Instance)> {
    let counts = [counts.train, counts.held_out, counts.held_out_families];
    PARTS.into_iter().zip(counts).flat_map(move |((split, name), count)| {
        let mut rng = draw::generator(seed, name);
        let mut seen = HashSet::new();
        (0..count).map(move |n| {
            let mut draw = Draw::new(&mut rng);
            let instance = loop {
                if let Some(instance) = Instance::draw(&mut draw, split)
                    && seen.insert(blake3::hash(
                        (instance.module(false) + &instance.issue()).as_bytes(),
                    ))
                {
                    break instance;
                }
            };
            (format!("micro__{name}_{n:06}"), split, instance)
        })
    })
}

impl Instance {
    /// The broken function and its example.
    fn broken_function(&self) -> Option<(&Function, &Case)> {
        self.parts().find(|part| part.3).map(|(function, example, _, _)| (function, example))
    }

    /// The issue text: what the function should do, and one call that gives a wrong result.
    fn issue(&self) -> String {
        let Some((function, example)) = self.broken_function() else { return String::new() };
        let (name, file) = (&function.name, &self.file);
        let phrase = fill(function.choice.phrase, &function.params);
        let args = Value::join(&example.args);
        let (got, want) = (&self.got, &example.want);
        format!("{name} in {file} should {phrase}. {name}({args}) gives {got}, expected {want}.")
    }

    fn agent_files(&self) -> Vec<TaskFile> {
        let module = self.file.trim_end_matches(".py");
        let mut examples = String::from("CASES = [\n");
        for (function, example, _, _) in self.parts() {
            let args =
                example.args.iter().map(|arg| format!("{arg},")).collect::<Vec<_>>().join(" ");
            let _ = writeln!(
                examples,
                "    ('{module}', '{}', ({args}), {}),",
                function.name, example.want
            );
        }
        examples.push_str("]\n");
        let file = |path: &str, content: String| TaskFile { path: path.to_owned(), content };
        vec![
            file(&self.file, self.module(false)),
            file("examples.py", examples),
            file("run.py", RUN.to_owned()),
        ]
    }

    /// The content of the hidden test file, and for each of its tests whether it passes on the
    /// broken module.
    fn tests(&self) -> (String, Vec<(String, bool)>) {
        let module = self.file.trim_end_matches(".py");
        let mut names: Vec<_> =
            self.functions.iter().map(|function| function.name.as_str()).collect();
        names.sort_unstable();
        let mut code = format!("from {module} import {}\n", names.join(", "));
        let mut tests = Vec::new();
        for (function, _, hidden, broken) in self.parts() {
            for (n, case) in hidden.iter().enumerate() {
                let test = format!("test_{}_{}", function.name, n + 1);
                let args = Value::join(&case.args);
                let _ = write!(
                    code,
                    "\n\ndef {test}():\n    assert {}({args}) == {}\n",
                    function.name, case.want
                );
                let passes = !broken || (self.bug.run)(&case.args).as_ref() == Some(&case.want);
                tests.push((test, passes));
            }
        }
        (code, tests)
    }

    fn task(&self, id: &str, split: Split) -> Task {
        let (test_code, tests) = self.tests();
        let hidden = |name: &str, content: String| TaskFile {
            path: format!("{HIDDEN_FOLDER}/{name}"),
            content,
        };
        let (old, new) = (self.module(false), self.module(true));
        Task {
            id: TaskId::made_of(id),
            environment: "micro".to_owned(),
            family: self
                .broken_function()
                .map_or("", |(function, _)| function.family.name)
                .to_owned(),
            split,
            problem_statement: self.issue(),
            image: IMAGE.to_owned(),
            workdir: WORKDIR.to_owned(),
            agent_files: self.agent_files(),
            hidden_files: vec![
                hidden("test_1.py", test_code),
                hidden("runner.py", RUNNER.to_owned()),
            ],
            test_command: TEST_COMMAND.to_owned(),
            test_timeout: Duration::from_secs(20),
            expected: tests.into_iter().map(|(name, _)| (name, TestStatus::Passed)).collect(),
            gold_patch: patch::file_diff(&self.file, Some(&old), Some(&new)).to_string(),
            origin: Origin::Files,
        }
    }

    fn row(&self, id: String, split: Split) -> R2eRow {
        let (old, new) = (self.module(false), self.module(true));
        let (test_code, tests) = self.tests();
        let issue = self.issue();
        let agent_files = self.agent_files();
        let mut hasher = blake3::Hasher::new();
        for part in [&old, &new, &issue, &test_code] {
            hasher.update(&(part.len() as u64).to_le_bytes());
            hasher.update(part.as_bytes());
        }
        let commit_hash: String = hasher.finalize().to_hex().chars().take(40).collect();
        let patch = patch::file_diff(&self.file, Some(&old), Some(&new));
        let expected: BTreeMap<_, _> =
            tests.iter().map(|(name, _)| (name.clone(), TestStatus::Passed)).collect();
        R2eRow {
            repo_name: "micro".to_owned(),
            docker_image: IMAGE.to_owned(),
            commit_hash: commit_hash.clone(),
            parsed_commit_content: ParsedCommit {
                file_diffs: vec![FileDiff::of(&patch, &old, &new)],
                old_commit_hash: format!("{commit_hash}^"),
                new_commit_hash: commit_hash.clone(),
                commit_message: issue.clone(),
                commit_date: String::new(),
            },
            execution_result_content: ExecutionResult {
                repo_name: "micro".to_owned(),
                new_commit_hash: commit_hash,
                test_file_names: vec!["test_1.py".to_owned(), "runner.py".to_owned()],
                test_file_codes: vec![test_code, RUNNER.to_owned()],
                new_commit_res_stdout: summary(&tests, true),
                old_commit_res_stdout: summary(&tests, false),
            },
            modified_files: vec![self.file.clone()],
            relevant_files: vec![self.file.clone()],
            num_non_test_files: 1,
            num_non_test_func_methods: 1,
            num_non_test_lines: 2,
            problem_statement: format!("[ISSUE]\n{issue}\n[/ISSUE]"),
            expected_output_json: expected,
            micro: Some(MicroColumns {
                id,
                family: self
                    .broken_function()
                    .map_or("", |(function, _)| function.family.name)
                    .to_owned(),
                split,
                agent_files,
            }),
            repair: None,
        }
    }
}

/// The log that the hidden runner prints for the broken or the repaired module.
fn summary(tests: &[(String, bool)], repaired: bool) -> String {
    let mut out = format!("{0} short test summary info {0}=\n", "=".repeat(27));
    let mut failed = 0;
    for (name, passes) in tests {
        if *passes || repaired {
            let _ = writeln!(out, "PASSED {HIDDEN_FOLDER}/test_1.py::{name}");
        } else {
            failed += 1;
            let _ = writeln!(out, "FAILED {HIDDEN_FOLDER}/test_1.py::{name} - AssertionError");
        }
    }
    let _ = writeln!(out, "{failed} failed, {} passed", tests.len() - failed);
    out
}
