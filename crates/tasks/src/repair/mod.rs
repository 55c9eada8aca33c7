//! Repair tasks made from a Python repository, each with one small fault that some of its tests
//! detect.
//!
//! The invariant: no code of the repository runs in this process. A [`Repository`] is read,
//! [`mutants`] are found in its source, and a [`TaskGenerator`] turns each into a [`Task`] that a
//! sandbox runs. From the resulting test log, [`TaskGenerator::make_row`] decides whether the
//! mutant becomes a row.

mod issue;
mod mutate;
mod row;
mod tree;

pub use crate::r2e::RepairColumns;
pub use mutate::{Fault, Mutant, mutants};
pub use tree::{Repository, TreeError, is_source, is_test};

use crate::log::grade_log;
use crate::r2e::{R2eRow, WORKDIR};
use crate::task::{Origin, Split, Task, TestStatus};
use crate::task_file::TaskFile;
use issue::Failure;
use orchestrate_types::{TaskId, mended_json};
use rand::SeedableRng;
use rand::seq::SliceRandom;
use rand_chacha::ChaCha8Rng;
use std::collections::{BTreeMap, VecDeque};
use std::fmt::Write as _;
use std::time::Duration;

/// [`Task::environment`] of these tasks.
pub const ENVIRONMENT: &str = "repair";
const RUNNER: &str = include_str!("runner.py");
const RUNNER_PATH: &str = "r2e_tests/runner.py";
/// Prefix of the lines in which [`RUNNER`] reports failures.
const FAILURE_PREFIX: &str = "orchestrate-failure:";
/// Time limit of a test run as a multiple of the unmodified repository's time, because machines
/// differ in speed.
const TIMEOUT_FACTOR: u32 = 10;
const MIN_TIMEOUT: Duration = Duration::from_secs(30);
/// Time limit of a test run of the unmodified repository.
const BASELINE_TIMEOUT: Duration = Duration::from_mins(15);

/// Why a mutant does not become a task, or no task can be made from a repository.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Rejection {
    /// The log has no summary: the tests ran out of time or memory, or pytest did not start.
    #[error("the test log has no summary")]
    NoSummary,
    /// Every test passes with the fault, or no test passes without one.
    #[error("no test detects the fault")]
    Undetected,
    /// All or more than half of the tests fail, as they do if a module cannot be imported.
    #[error("{failed} of {total} tests fail")]
    TooManyFailures {
        /// Number of tests that do not pass any more.
        failed: usize,
        /// Number of tests that pass in the unmodified repository.
        total: usize,
    },
    /// Failures are reported in a form that cannot be read.
    #[error("{unreadable} reported failures cannot be read")]
    UnreadableFailures {
        /// Number of reports that are not as the runner writes them.
        unreadable: usize,
    },
}

/// Makes tasks from one repository. It contains what all of them share: the files, the image, and
/// how the tests are run.
#[derive(Debug, Clone)]
pub struct TaskGenerator {
    repository: Repository,
    image: String,
    tests: Vec<String>,
    left_out: Vec<String>,
    expected: BTreeMap<String, TestStatus>,
    timeout: Duration,
}

impl TaskGenerator {
    /// A generator for `repository` whose tests run in `image`. `tests` are the files and folders
    /// of tests to run; if it is empty, pytest runs all that it finds.
    pub fn new(repository: Repository, image: String, tests: Vec<String>) -> Self {
        let (left_out, expected) = (Vec::new(), BTreeMap::new());
        Self { repository, image, tests, left_out, expected, timeout: BASELINE_TIMEOUT }
    }

    /// The repository that tasks are made from.
    pub fn repository(&self) -> &Repository {
        &self.repository
    }

    /// Tests that pass in the unmodified repository; empty before
    /// [`TaskGenerator::record_baseline`].
    pub fn expected(&self) -> &BTreeMap<String, TestStatus> {
        &self.expected
    }

    /// A task with the unmodified tree, to find out which of its tests pass.
    pub fn baseline_task(&self) -> Task {
        self.task(&self.repository.files, "untouched")
    }

    /// Derives the expected results and the time limit from the logs of two runs of
    /// [`TaskGenerator::baseline_task`]. Returns the tests that do not pass in both, sorted; tasks
    /// do not run them.
    ///
    /// # Errors
    /// [`Rejection::NoSummary`] if a log has no summary, [`Rejection::Undetected`] if no test
    /// passes.
    pub fn record_baseline(
        &mut self,
        logs: [&[u8]; 2],
        elapsed: Duration,
    ) -> Result<Vec<String>, Rejection> {
        let [first, second] = logs.map(parse_results);
        let (first, second) =
            (first.ok_or(Rejection::NoSummary)?, second.ok_or(Rejection::NoSummary)?);
        let passes = |test: &&String| {
            first.get(*test) == Some(&TestStatus::Passed)
                && second.get(*test) == Some(&TestStatus::Passed)
        };
        let mut left_out: Vec<String> =
            first.keys().chain(second.keys()).filter(|test| !passes(test)).cloned().collect();
        left_out.sort_unstable();
        left_out.dedup();
        // pytest's `--deselect` matches prefixes of ids.
        let is_run = |test: &&String| !left_out.iter().any(|id| test.starts_with(id.as_str()));
        let passing = first.keys().filter(passes).filter(is_run);
        // Expected results are keyed without the file's path, so a test can share its key with one
        // that is left out. Only tests that run contribute.
        let log: Vec<String> = passing.map(|test| format!("PASSED {test}")).collect();
        if log.is_empty() {
            return Err(Rejection::Undetected);
        }
        let log = format!("short test summary info\n{}\n", log.join("\n"));
        self.expected = crate::grade(&log, &BTreeMap::new()).statuses;
        self.left_out.clone_from(&left_out);
        let rounded = Duration::from_secs(elapsed.as_secs() / 10 * 10 + 10);
        self.timeout = (TIMEOUT_FACTOR * rounded).clamp(MIN_TIMEOUT, BASELINE_TIMEOUT);
        Ok(left_out)
    }

    /// All mutants of the sources, each with the path of its file, in the order in which `seed`
    /// tries them. Kinds of faults alternate, so that even a few tasks have many of them.
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
                found.shuffle(&mut seeded_rng(seed, fault.name()));
                found.into()
            })
            .collect();
        let mut order = Vec::new();
        while queues.iter().any(|queue| !queue.is_empty()) {
            order.extend(queues.iter_mut().filter_map(VecDeque::pop_front));
        }
        order
    }

    /// A task with the fault of `mutant`, to find out which tests detect it; `None` if the mutant
    /// is not of this file.
    pub fn candidate_task(&self, path: &str, mutant: &Mutant) -> Option<Task> {
        Some(self.task(&self.apply_mutant(path, mutant)?.0, "candidate"))
    }

    /// The row of a mutant, from the test log of its [`TaskGenerator::candidate_task`].
    ///
    /// # Errors
    /// If the mutant does not become a task.
    pub fn make_row(&self, path: &str, mutant: &Mutant, log: &[u8]) -> Result<R2eRow, Rejection> {
        parse_results(log).ok_or(Rejection::NoSummary)?;
        let verdict = grade_log(log, &self.expected).map_err(|_| Rejection::NoSummary)?;
        let (failed, total) = (verdict.differing.len(), self.expected.len());
        if failed == 0 {
            return Err(Rejection::Undetected);
        }
        if failed > total.div_ceil(2) || failed == total {
            return Err(Rejection::TooManyFailures { failed, total });
        }
        let (tree, solved, faulty) =
            self.apply_mutant(path, mutant).ok_or(Rejection::Undetected)?;
        let failures = parse_failures(log)?;
        let detected = row::DetectedMutant { tree, solved, faulty, failures, log };
        Ok(row::build(self, path, mutant, detected))
    }

    /// The tree with the fault, and the content of the changed file without and with it.
    fn apply_mutant(&self, path: &str, mutant: &Mutant) -> Option<(Vec<TaskFile>, String, String)> {
        let mut tree = self.repository.files.clone();
        let file = tree.iter_mut().find(|file| file.path == path)?;
        let faulty = mutant.apply(&file.content)?;
        let solved = std::mem::replace(&mut file.content, faulty.clone());
        Some((tree, solved, faulty))
    }

    /// Everything that determines the results of the tests: the tests with their data, every file
    /// that can contain pytest's settings, and the runner.
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
        // If the repository has none, an empty one replaces any that an agent adds.
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
            id: TaskId::made_of(&format!("{}__{id}", self.repository.name)),
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

/// `word` quoted for a POSIX shell.
fn quoted(word: &str) -> String {
    format!("'{}'", word.replace('\'', r"'\''"))
}

/// The random-number generator for `seed` and `purpose`.
fn seeded_rng(seed: u64, purpose: &str) -> ChaCha8Rng {
    let mut hasher = blake3::Hasher::new_derive_key("orchestrate repair tasks 1");
    hasher.update(&seed.to_le_bytes());
    hasher.update(purpose.as_bytes());
    ChaCha8Rng::from_seed(*hasher.finalize().as_bytes())
}

/// Whether the tasks of `function` in the file `path` are held out: a fraction `share` (between
/// 0 and 1) of all functions is. All tasks of a function are in the same split, because a policy that has
/// repaired it once knows its code.
pub fn is_held_out(seed: u64, path: &str, function: &str, share: f64) -> bool {
    let mut hasher = blake3::Hasher::new_derive_key("orchestrate repair tasks held out 1");
    hasher.update(&seed.to_le_bytes());
    hasher.update(path.as_bytes());
    hasher.update(&[0]);
    hasher.update(function.as_bytes());
    let [a, b, c, d, ..] = *hasher.finalize().as_bytes();
    f64::from(u32::from_le_bytes([a, b, c, d])) < share * (f64::from(u32::MAX) + 1.0)
}

/// The results in the last summary of `log`, by id of the test (or file); `None` if it has no
/// summary.
fn parse_results(log: &[u8]) -> Option<BTreeMap<String, TestStatus>> {
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
            // A test that passes and then fails in its teardown is listed twice; the failure
            // counts.
            let worse = results.get(test).is_none_or(|known| *known == TestStatus::Passed);
            if worse {
                results.insert(test.to_owned(), *status);
            }
        }
    }
    Some(results)
}

/// The failures that the runner reports in `log`.
///
/// # Errors
/// If a report cannot be read, because output of the tree is mixed with it: the issue would be written
/// without that failure.
fn parse_failures(log: &[u8]) -> Result<Vec<Failure>, Rejection> {
    let text = String::from_utf8_lossy(log);
    let lines = text.lines().filter_map(|line| line.strip_prefix(FAILURE_PREFIX));
    let read = |line: &str| {
        serde_json::from_str(line)
            .or_else(|_| serde_json::from_slice(&mended_json(line.as_bytes())))
    };
    let failures: Vec<serde_json::Result<Failure>> = lines.map(read).collect();
    match failures.iter().filter(|failure| failure.is_err()).count() {
        0 => Ok(failures.into_iter().flatten().collect()),
        unreadable => Err(Rejection::UnreadableFailures { unreadable }),
    }
}

#[cfg(test)]
mod tests;
