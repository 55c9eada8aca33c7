//! Which tasks break their attempts: an attempt that breaks is tried again, so whatever a policy can
//! do to break one is worth a second try to it.

use std::collections::HashMap;
use std::sync::{Mutex, PoisonError};

/// Broken attempts of a task below which nothing is reported.
const MIN_BROKEN: u32 = 3;

/// How many times the run's share of broken attempts a task's share must be to be reported.
const FACTOR: f64 = 5.0;

/// Counts the attempts of each task since the start of the program.
#[derive(Debug, Default)]
pub(crate) struct RetryWatch(Mutex<HashMap<String, TaskAttempts>>);

#[derive(Debug, Default, Clone, Copy)]
struct TaskAttempts {
    attempts: u32,
    broken: u32,
    is_reported: bool,
}

impl RetryWatch {
    /// Counts an attempt of `task`. Returns a warning, once for each task, if the task breaks its
    /// attempts much more often than the others.
    pub(crate) fn count(&self, task: &str, is_broken: bool) -> Option<String> {
        let mut tasks = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let counted = tasks.entry(task.to_owned()).or_default();
        counted.attempts += 1;
        counted.broken += u32::from(is_broken);
        let counted = *counted;
        if !is_broken || counted.is_reported || counted.broken < MIN_BROKEN {
            return None;
        }
        let (attempts, broken) = tasks.values().fold((0, 0), |(attempts, broken), task| {
            (attempts + u64::from(task.attempts), broken + u64::from(task.broken))
        });
        let share = f64::from(counted.broken) / f64::from(counted.attempts);
        if share <= FACTOR * broken as f64 / attempts as f64 {
            return None;
        }
        tasks.entry(task.to_owned()).or_default().is_reported = true;
        let TaskAttempts { attempts: own, broken: own_broken, .. } = counted;
        Some(format!(
            "task {task} broke {own_broken} of its {own} attempts, and all tasks together {broken} \
             of {attempts}; look at its episodes: what breaks them may come from the policy"
        ))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn task_that_breaks_its_attempts_is_reported_once() {
        let watch = RetryWatch::default();
        for n in 0..60 {
            assert_eq!(watch.count(&format!("good-{}", n % 10), n == 7), None);
        }
        assert_eq!(watch.count("bad", true), None);
        assert_eq!(watch.count("bad", true), None);
        let warning = watch.count("bad", true).unwrap();
        assert!(warning.contains("task bad broke 3 of its 3 attempts"), "{warning}");
        assert!(warning.contains("4 of 63"), "{warning}");
        assert_eq!(watch.count("bad", true), None);
    }

    #[test]
    fn failures_of_all_tasks_alike_are_not_reported() {
        let watch = RetryWatch::default();
        for n in 0..60 {
            assert_eq!(watch.count(&format!("task-{}", n % 6), n % 2 == 0), None);
        }
    }
}
