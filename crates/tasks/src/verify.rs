//! Building blocks for grading a patch and for checking a task: the files that the hidden tests run
//! on, and the scores of a sound task.
//!
//! The invariant: in a graded tree, the folders of the hidden tests contain only the task's hidden
//! files.

use crate::patch::{self, PatchError};
use crate::task::{Task, Verdict};
use crate::task_file::TaskFile;

/// The tree in which `task`'s hidden tests grade `patch`: the agent's files with the patch applied,
/// without anything in the folders of the hidden tests, plus the hidden files.
///
/// # Errors
/// If the patch does not apply to [`Task::agent_files`].
pub fn graded_tree(task: &Task, patch: &str) -> Result<Vec<TaskFile>, PatchError> {
    let patched = patch::apply(&task.agent_files, patch)?;
    Ok(with_hidden(task, patched))
}

/// `tree` with `task`'s hidden files as its only content in their folders.
pub fn with_hidden(task: &Task, mut tree: Vec<TaskFile>) -> Vec<TaskFile> {
    let is_replaced = |path: &str| {
        task.hidden_files.iter().any(|hidden| match hidden.path.split_once('/') {
            Some((folder, _)) => path.split('/').next() == Some(folder),
            None => path == hidden.path,
        })
    };
    tree.retain(|file| !is_replaced(&file.path));
    tree.extend(task.hidden_files.iter().cloned());
    tree
}

/// Maximum number of tests listed in a problem.
const NAMED: usize = 5;

/// Verdicts of the gold patch and of an empty patch.
#[derive(Debug, Clone, PartialEq)]
pub struct Check {
    /// With [`Task::gold_patch`].
    pub gold: Verdict,
    /// With an empty patch.
    pub noop: Verdict,
}

impl Check {
    /// Why the task should not be used; empty if it is healthy.
    pub fn problems(&self) -> Vec<String> {
        let mut problems = Vec::new();
        if self.gold.reward < 1.0 {
            let differing = &self.gold.differing;
            let tests: Vec<&str> = differing.iter().take(NAMED).map(String::as_str).collect();
            let more = match differing.len().saturating_sub(NAMED) {
                0 => String::new(),
                more => format!(" and {more} more"),
            };
            let tests = tests.join(", ");
            let found = self.gold.suspicious.iter().filter(|finding| finding.voids());
            let found: Vec<&str> = found.map(|finding| finding.name()).collect();
            let found =
                if found.is_empty() { String::new() } else { format!(" ({})", found.join(", ")) };
            let reward = self.gold.reward;
            problems.push(format!(
                "the gold patch scores {reward}{found}; tests that differ: {tests}{more}"
            ));
        }
        if self.noop.reward > 0.0 {
            problems.push(format!("doing nothing scores {}", self.noop.reward));
        }
        problems
    }
}

/// Result of repeated checks of a task.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Health {
    /// The gold patch scores 1 and an empty patch scores 0, each time.
    Sound,
    /// Not sound, in the same way each time; the problems.
    Unsound(Vec<String>),
    /// Checks of the same task differ; which ones.
    Flaky(Vec<String>),
}

impl Health {
    /// Health of a task from repeated checks of it.
    pub fn of(rounds: &[Check]) -> Self {
        let scores = |part: fn(&Check) -> &Verdict| -> Vec<f64> {
            rounds.iter().map(|check| part(check).reward).collect()
        };
        let parts = [
            ("the gold patch", scores(|check| &check.gold)),
            ("doing nothing", scores(|check| &check.noop)),
        ];
        let differs = |scores: &[f64]| scores.windows(2).any(|pair| pair.first() != pair.last());
        let flaky: Vec<String> = parts
            .iter()
            .filter(|(_, scores)| differs(scores))
            .map(|(patch, scores)| {
                let scores: Vec<String> = scores.iter().map(f64::to_string).collect();
                format!("{patch} scores {} in {} checks", scores.join(", "), scores.len())
            })
            .collect();
        if !flaky.is_empty() {
            return Self::Flaky(flaky);
        }
        match rounds.first().map(Check::problems).unwrap_or_default() {
            problems if problems.is_empty() => Self::Sound,
            problems => Self::Unsound(problems),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::micro::{MicroCounts, generate};

    fn task() -> Task {
        let counts = MicroCounts { train: 1, held_out: 0, held_out_families: 0 };
        generate(1, counts).remove(0)
    }

    #[test]
    fn other_files_in_the_folder_of_hidden_tests_are_removed() {
        let task = task();
        let mut tree = task.agent_files.clone();
        for path in ["r2e_tests/test_2.py", "r2e_tests/runner.py", "r2e_tests", "notes/r2e_tests"] {
            tree.push(TaskFile { path: path.into(), content: "x".into() });
        }
        let patch = patch::diff(&task.agent_files, &tree);
        let graded = graded_tree(&task, &patch).unwrap();
        let paths: Vec<_> = graded.iter().map(|file| file.path.as_str()).collect();
        assert_eq!(paths.iter().filter(|path| path.starts_with("r2e_tests")).count(), 2);
        assert!(paths.contains(&"notes/r2e_tests"));
        assert!(task.hidden_files.iter().all(|hidden| graded.contains(hidden)));
    }

    #[test]
    fn a_check_names_both_kinds_of_problem() {
        let task = task();
        let bad = Check {
            gold: crate::grade("", &task.expected),
            noop: crate::grade("", &task.expected),
        };
        assert_eq!(bad.problems().len(), 1);
        let log = "short test summary info\nPASSED x::a";
        let expected = [("a".to_owned(), crate::TestStatus::Passed)].into();
        let good = crate::grade(log, &expected);
        let solved = Check { gold: good.clone(), noop: good.clone() };
        assert_eq!(solved.problems(), ["doing nothing scores 1"]);

        let sound = Check { gold: good, noop: bad.noop.clone() };
        assert_eq!(Health::of(&[sound.clone(), sound.clone()]), Health::Sound);
        assert!(matches!(Health::of(&[bad.clone(), bad.clone()]), Health::Unsound(_)));
        let Health::Flaky(what) = Health::of(&[sound, bad]) else { unreachable!() };
        assert_eq!(what, ["the gold patch scores 1, 0 in 2 checks"]);
    }

    #[test]
    fn partial_rewards_are_named_and_never_sound_once_and_flaky_otherwise() {
        let with = |gold: f64, noop: f64| {
            let mut check = Check {
                gold: crate::grade("", &task().expected),
                noop: crate::grade("", &task().expected),
            };
            (check.gold.reward, check.noop.reward) = (gold, noop);
            check
        };
        let of = |rounds: &[Check]| match Health::of(rounds) {
            Health::Sound => Vec::new(),
            Health::Unsound(problems) | Health::Flaky(problems) => problems,
        };
        let problems = of(&[with(0.9, 0.2), with(0.9, 0.2)]);
        assert!(problems[0].starts_with("the gold patch scores 0.9; tests that differ: "));
        assert_eq!(problems[1], "doing nothing scores 0.2");
        assert_eq!(of(&[with(1.0, 0.0), with(1.0, 0.0)]), Vec::<String>::new());
        let problems = of(&[with(1.0, 0.0), with(0.9, 0.0)]);
        assert_eq!(problems, ["the gold patch scores 1, 0.9 in 2 checks"]);
        let problems = of(&[with(1.0, 0.0), with(1.0, 0.2)]);
        assert_eq!(problems, ["doing nothing scores 0, 0.2 in 2 checks"]);
    }
}
