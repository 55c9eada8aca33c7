//! Repair tasks made from a Python repository: one small fault each, that some of its tests see.
//!
//! The invariant: nothing of the repository runs here. A [`Repository`] is read, [`mutants`] are
//! found in its source, and a [`Bench`] turns each into the [`Task`] that a sandbox can run; what
//! its tests say there decides in [`Bench::judge`] whether a row comes of it.

mod issue;
mod mutate;
mod row;
mod tree;

pub use mutate::{Fault, Mutant, mutants};
pub use row::RepairColumns;
pub use tree::{Repository, TreeError, is_source, is_test};

use crate::log::grade_log;
use crate::r2e::{R2eRow, WORKDIR};
use crate::task::{Origin, Split, Task, TaskFile, TestStatus};
use rand::SeedableRng;
use rand::seq::SliceRandom;
use rand_chacha::ChaCha8Rng;
use serde::Deserialize;
use std::collections::{BTreeMap, VecDeque};
use std::fmt::Write as _;
use std::time::Duration;

/// Environment of made tasks, as [`Task::environment`] has it.
pub const ENVIRONMENT: &str = "repair";
const RUNNER: &str = include_str!("runner.py");
const RUNNER_PATH: &str = "r2e_tests/runner.py";
/// In front of a line of [`RUNNER`]'s.
const FAILURE: &str = "orchestrate-failure:";
/// A test run may take this many times what the untouched repository's takes; machines differ.
const PATIENCE: u32 = 10;
const SHORTEST_TIMEOUT: Duration = Duration::from_secs(30);
/// Time for the untouched repository.
const BASELINE_TIMEOUT: Duration = Duration::from_mins(15);

/// A failing test and what it says.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub(crate) struct Failure {
    /// Its id, as pytest has it.
    pub(crate) test: String,
    /// Why it fails.
    pub(crate) message: String,
}

/// Why a mutant makes no task, or a repository none at all.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Rejection {
    /// There is no summary in the log: it ran out of time or memory, or pytest did not start.
    #[error("its tests come to no end")]
    NoEnd,
    /// Every test passes.
    #[error("no test sees it")]
    Unseen,
    /// Over half of the tests break, as they do where something cannot be imported.
    #[error("{broken} of {total} tests break")]
    TooMuch {
        /// Tests that do not pass any more.
        broken: usize,
        /// Tests that passed.
        total: usize,
    },
}

/// A repository, its tests and how they run: everything that the tasks made of it have in common.
#[derive(Debug, Clone)]
pub struct Bench {
    repository: Repository,
    image: String,
    tests: Vec<String>,
    left_out: Vec<String>,
    expected: BTreeMap<String, TestStatus>,
    timeout: Duration,
}

impl Bench {
    /// The tests of `repository` in `image`: those below the paths `tests`, or all that pytest
    /// finds.
    pub fn new(repository: Repository, image: String, tests: Vec<String>) -> Self {
        let (left_out, expected) = (Vec::new(), BTreeMap::new());
        Self { repository, image, tests, left_out, expected, timeout: BASELINE_TIMEOUT }
    }

    /// The repository.
    pub fn repository(&self) -> &Repository {
        &self.repository
    }

    /// Tests that pass in the untouched repository, once that is known.
    pub fn expected(&self) -> &BTreeMap<String, TestStatus> {
        &self.expected
    }

    /// The task of the tree as it is, to run its tests.
    pub fn untouched(&self) -> Task {
        self.task(&self.repository.files, "untouched")
    }

    /// Learns from the logs of two runs of [`Bench::untouched`] which tests can be relied on, and
    /// how long they may take. Says which are left out.
    ///
    /// # Errors
    /// [`Rejection::NoEnd`] where there is no summary, [`Rejection::Unseen`] where no test passes.
    pub fn learn(&mut self, logs: [&[u8]; 2], elapsed: Duration) -> Result<Vec<String>, Rejection> {
        let [first, second] = logs.map(results);
        let (first, second) = (first.ok_or(Rejection::NoEnd)?, second.ok_or(Rejection::NoEnd)?);
        let passes = |test: &&String| {
            first.get(*test) == Some(&TestStatus::Passed)
                && second.get(*test) == Some(&TestStatus::Passed)
        };
        let mut left_out: Vec<String> =
            first.keys().chain(second.keys()).filter(|test| !passes(test)).cloned().collect();
        left_out.sort_unstable();
        left_out.dedup();
        // pytest takes what it is not to run as the beginning of an id.
        let is_run = |test: &&String| !left_out.iter().any(|id| test.starts_with(id.as_str()));
        let passing = first.keys().filter(passes).filter(is_run);
        // A key is what follows the file's name, so that a test may share its key with one that
        // is left out.
        let log: Vec<String> = passing.map(|test| format!("PASSED {test}")).collect();
        if log.is_empty() {
            return Err(Rejection::Unseen);
        }
        let log = format!("short test summary info\n{}\n", log.join("\n"));
        self.expected = crate::grade(&log, &BTreeMap::new()).statuses;
        self.left_out.clone_from(&left_out);
        let whole = Duration::from_secs(elapsed.as_secs() / 10 * 10 + 10);
        self.timeout = (PATIENCE * whole).clamp(SHORTEST_TIMEOUT, BASELINE_TIMEOUT);
        Ok(left_out)
    }

    /// Every mutant of the sources with the file it is in, in the order in which `seed` tries them:
    /// faults take turns, so that a few tasks already have many kinds.
    pub fn mutants(&self, seed: u64) -> Vec<(&str, Mutant)> {
        let mut kinds: BTreeMap<Fault, Vec<(&str, Mutant)>> = BTreeMap::new();
        for file in self.repository.files.iter().filter(|file| is_source(&file.path)) {
            for mutant in mutants(&file.content) {
                kinds.entry(mutant.fault).or_default().push((&file.path, mutant));
            }
        }
        let mut queues: Vec<VecDeque<(&str, Mutant)>> = kinds
            .into_iter()
            .map(|(fault, mut found)| {
                found.shuffle(&mut generator(seed, fault.name()));
                found.into()
            })
            .collect();
        let mut order = Vec::new();
        while queues.iter().any(|queue| !queue.is_empty()) {
            order.extend(queues.iter_mut().filter_map(VecDeque::pop_front));
        }
        order
    }

    /// The task of one mutant before anything is known of it; `None` if it is of another text.
    pub fn candidate(&self, path: &str, mutant: &Mutant) -> Option<Task> {
        Some(self.task(&self.broken(path, mutant)?.0, "candidate"))
    }

    /// The row of a mutant whose tests gave `log`.
    ///
    /// # Errors
    /// Why it makes no task.
    pub fn judge(&self, path: &str, mutant: &Mutant, log: &[u8]) -> Result<R2eRow, Rejection> {
        results(log).ok_or(Rejection::NoEnd)?;
        let verdict = grade_log(log, &self.expected).map_err(|_| Rejection::NoEnd)?;
        let (broken, total) = (verdict.differing.len(), self.expected.len());
        if broken == 0 {
            return Err(Rejection::Unseen);
        }
        if broken > total.div_ceil(2) || broken == total {
            return Err(Rejection::TooMuch { broken, total });
        }
        let (tree, solved, faulty) = self.broken(path, mutant).ok_or(Rejection::Unseen)?;
        let failures = failures(log);
        Ok(row::of(self, path, mutant, row::Broken { tree, solved, faulty, failures, log }))
    }

    /// The tree with the fault, and the file without and with it.
    fn broken(&self, path: &str, mutant: &Mutant) -> Option<(Vec<TaskFile>, String, String)> {
        let mut tree = self.repository.files.clone();
        let file = tree.iter_mut().find(|file| file.path == path)?;
        let faulty = mutant.apply(&file.content)?;
        let solved = std::mem::replace(&mut file.content, faulty.clone());
        Some((tree, solved, faulty))
    }

    /// Everything that decides what the tests do: tests, what they read besides, pytest's settings
    /// where there could be some, and the runner.
    fn hidden_files(&self) -> Vec<TaskFile> {
        let files = self.repository.files.iter();
        let mut hidden: Vec<TaskFile> = files
            .filter(|file| is_test(&file.path) || tree::is_pytest_config(&file.path))
            .cloned()
            .collect();
        let mut put = |path: &str, content: &str| {
            if hidden.iter().all(|file| file.path != path) {
                hidden.push(TaskFile { path: path.to_owned(), content: content.to_owned() });
            }
        };
        // An empty one where there is none: an agent's would be read.
        put("conftest.py", "");
        put(RUNNER_PATH, RUNNER);
        hidden.sort_by(|a, b| a.path.cmp(&b.path));
        hidden
    }

    fn test_command(&self) -> String {
        let settings = ["pytest.ini", ".pytest.ini", "pyproject.toml", "tox.ini", "setup.cfg"];
        let has_settings = |path: &&&str| {
            let file = self.repository.files.iter().find(|file| file.path == **path);
            file.is_some_and(|file| path.ends_with("pytest.ini") || file.content.contains("pytest"))
        };
        let settings = settings.iter().find(has_settings).unwrap_or(&"/dev/null");
        let mut command = format!(
            "PYTHONHASHSEED=0 exec python3 -s -B {RUNNER_PATH} -rpfE --tb=no -q -c {settings} \
             --rootdir=. -o addopts= -p no:cacheprovider"
        );
        for left_out in &self.left_out {
            let option = if left_out.contains("::") { "--deselect" } else { "--ignore" };
            let _ = write!(command, " {option} {}", quoted(left_out));
        }
        for path in &self.tests {
            let _ = write!(command, " {}", quoted(path));
        }
        command
    }

    fn task(&self, tree: &[TaskFile], id: &str) -> Task {
        Task {
            id: format!("{}__{id}", self.repository.name),
            environment: ENVIRONMENT.to_owned(),
            family: String::new(),
            split: Split::Train,
            problem_statement: String::new(),
            image: self.image.clone(),
            workdir: WORKDIR.to_owned(),
            agent_files: tree.to_vec(),
            hidden_files: self.hidden_files(),
            test_command: self.test_command(),
            test_timeout: self.timeout,
            expected: self.expected.clone(),
            gold_patch: String::new(),
            origin: Origin::Files,
        }
    }
}

/// A word for a shell.
fn quoted(word: &str) -> String {
    format!("'{}'", word.replace('\'', r"'\''"))
}

fn generator(seed: u64, purpose: &str) -> ChaCha8Rng {
    let mut hasher = blake3::Hasher::new_derive_key("orchestrate repair tasks 1");
    hasher.update(&seed.to_le_bytes());
    hasher.update(purpose.as_bytes());
    ChaCha8Rng::from_seed(*hasher.finalize().as_bytes())
}

/// Whether `share` of all functions, of which this is one, are held out with it. Tasks of one
/// function are never in both parts: who has repaired it once knows it.
pub fn is_held_out(seed: u64, path: &str, function: &str, share: f64) -> bool {
    let mut hasher = blake3::Hasher::new_derive_key("orchestrate repair tasks held out 1");
    hasher.update(&seed.to_le_bytes());
    hasher.update(path.as_bytes());
    hasher.update(&[0]);
    hasher.update(function.as_bytes());
    let [a, b, c, d, ..] = *hasher.finalize().as_bytes();
    f64::from(u32::from_le_bytes([a, b, c, d])) < share * (f64::from(u32::MAX) + 1.0)
}

/// Lines of the last summary: tests (or files) by their id, with their results. None without one.
fn results(log: &[u8]) -> Option<BTreeMap<String, TestStatus>> {
    let text = String::from_utf8_lossy(log);
    let (_, summary) = text.rsplit_once("short test summary info")?;
    let mut results = BTreeMap::new();
    for line in summary.lines() {
        let known = [
            ("PASSED ", TestStatus::Passed),
            ("FAILED ", TestStatus::Failed),
            ("ERROR ", TestStatus::Error),
        ];
        let found =
            known.iter().find_map(|(word, status)| Some((line.strip_prefix(word)?, status)));
        if let Some((test, status)) = found {
            let test = test.split(" - ").next().unwrap_or(test).trim();
            // A test that passes and then breaks on its way out is named twice; the worse counts.
            let worse = results.get(test).is_none_or(|known| *known == TestStatus::Passed);
            if worse {
                results.insert(test.to_owned(), *status);
            }
        }
    }
    Some(results)
}

/// What the runner says of each failure.
fn failures(log: &[u8]) -> Vec<Failure> {
    let text = String::from_utf8_lossy(log);
    let lines = text.lines().filter_map(|line| line.strip_prefix(FAILURE));
    lines.filter_map(|line| serde_json::from_str(line).ok()).collect()
}

#[cfg(test)]
mod tests;
