//! The line of an evaluation.

use crate::metric::metrics_line;
use crate::score::{TaskScore, mean_and_se};

metrics_line! {
    /// The line of an evaluation in `metrics.jsonl`. Means are over the tasks that have at least one
    /// episode with a trusted outcome ([`TaskScore::rate`]).
    EvalLine {
        /// Pass@1 on held-out tasks of known families: mean over tasks of the share of solved episodes.
        eval_pass_at_1: f64, "share, 0 to 1", healthy: "rises over the run";
        /// Standard error of `eval_pass_at_1` over tasks.
        eval_pass_at_1_se: f64, "share, ≥ 0";
        /// Pass@k on the same tasks; null with a single sample per task.
        eval_pass_at_k: f64, "share, 0 to 1";
        /// Samples per task, the k of pass@k.
        eval_k: u64, "episodes per task";
        /// Held-out tasks that were evaluated.
        eval_tasks: u64, "tasks";
        /// Held-out tasks that Pass@1 and pass@k are means over: those with a trusted outcome. Missing
        /// in lines of older versions.
        eval_tasks_trusted: u64, "tasks", healthy: "`eval_tasks`";
        /// Pass@1 on tasks of unseen families.
        eval_held_out_families_pass_at_1: f64, "share, 0 to 1";
        /// Standard error of `eval_held_out_families_pass_at_1` over tasks.
        eval_held_out_families_pass_at_1_se: f64, "share, ≥ 0";
        /// Tasks of unseen families that were evaluated.
        eval_held_out_families_tasks: u64, "tasks";
        /// Episodes without a trusted outcome; they neither pass nor fail.
        eval_broken: u64, "episodes", healthy: "0";
        /// Wall time of the evaluation.
        time_eval_s: f64, "seconds";
    }
}

impl EvalLine {
    /// The numbers of an evaluation whose first `held_out` tasks are of known families and the others of
    /// unseen ones, with `samples` episodes per task. Step, version and times are left at their defaults.
    pub fn of_scores(scores: &[TaskScore], held_out: usize, samples: usize) -> Self {
        let (known, families) = scores.split_at_checked(held_out).unwrap_or((scores, &[]));
        let rates =
            |part: &[TaskScore]| -> Vec<f64> { part.iter().filter_map(TaskScore::rate).collect() };
        let known_rates = rates(known);
        let pass = mean_and_se(&known_rates);
        let family_pass = mean_and_se(&rates(families));
        let at_k: Vec<f64> = known.iter().filter_map(|score| score.pass_at(samples)).collect();
        Self {
            eval_pass_at_1: pass.map(|(mean, _)| mean),
            eval_pass_at_1_se: pass.map(|(_, se)| se),
            eval_pass_at_k: mean_and_se(&at_k).map(|(mean, _)| mean).filter(|_| samples > 1),
            eval_k: Some(samples as u64),
            eval_tasks: Some(known.len() as u64),
            eval_tasks_trusted: Some(known_rates.len() as u64),
            eval_held_out_families_pass_at_1: family_pass.map(|(mean, _)| mean),
            eval_held_out_families_pass_at_1_se: family_pass.map(|(_, se)| se),
            eval_held_out_families_tasks: Some(families.len() as u64),
            eval_broken: Some(scores.iter().map(|score| score.broken as u64).sum()),
            ..Self::default()
        }
    }

    /// Held-out tasks that Pass@1 is a mean over.
    pub fn counted_tasks(&self) -> Option<u64> {
        self.eval_tasks_trusted.or(self.eval_tasks)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn score(solved: usize, trusted: usize, broken: usize) -> TaskScore {
        TaskScore { solved, trusted, broken }
    }

    #[test]
    fn broken_episodes_neither_pass_nor_fail() {
        let line = EvalLine::of_scores(&[score(1, 1, 0), score(0, 1, 0), score(0, 0, 1)], 3, 1);
        assert_eq!((line.eval_pass_at_1, line.eval_broken), (Some(0.5), Some(1)));
        assert_eq!((line.eval_tasks, line.counted_tasks()), (Some(3), Some(2)));
        assert_eq!((line.eval_pass_at_k, line.eval_held_out_families_pass_at_1), (None, None));
    }

    #[test]
    fn unseen_families_are_reported_separately() {
        let line = EvalLine::of_scores(&[score(2, 2, 0), score(1, 2, 0)], 1, 2);
        assert_eq!(line.eval_pass_at_1, Some(1.0));
        assert_eq!(line.eval_held_out_families_pass_at_1, Some(0.5));
        assert_eq!(line.eval_pass_at_k, Some(1.0));
        assert_eq!((line.eval_tasks, line.eval_held_out_families_tasks), (Some(1), Some(1)));
    }

    #[test]
    fn pass_at_1_and_pass_at_k_are_over_the_same_tasks() {
        // The second task has lost a sample, the third all of them.
        let scores = [score(0, 2, 0), score(1, 1, 1), score(0, 0, 2)];
        let line = EvalLine::of_scores(&scores, 3, 2);
        assert_eq!((line.eval_pass_at_1, line.eval_pass_at_k), (Some(0.5), Some(0.5)));
        assert_eq!(line.eval_tasks_trusted, Some(2));
    }

    #[test]
    fn lines_without_trusted_tasks_count_all_tasks() {
        let line = EvalLine { eval_tasks: Some(4), ..EvalLine::default() };
        assert_eq!(line.counted_tasks(), Some(4));
    }
}
