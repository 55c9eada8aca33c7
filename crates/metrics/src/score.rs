//! Solved episodes, Pass@1 and pass@k.

/// Lowest reward that counts as solved. Graders give 0 or 1, or the share of passed tests, which
/// rounding may bring slightly below 1.
const SOLVED: f64 = 1.0 - 1e-9;

/// Whether a reward (0 to 1) means that the task is solved. Only the full reward does.
pub fn is_solved(reward: f64) -> bool {
    reward >= SOLVED
}

/// How the episodes of one evaluation task ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TaskScore {
    /// Episodes that solved the task.
    pub solved: usize,
    /// Episodes with a trusted outcome, including the solved ones.
    pub trusted: usize,
    /// Episodes without a trusted outcome.
    pub broken: usize,
}

impl TaskScore {
    /// The score of a group of `size` episodes whose trusted rewards are `rewards`.
    pub fn new(size: usize, rewards: &[f64]) -> Self {
        Self {
            solved: rewards.iter().filter(|&&reward| is_solved(reward)).count(),
            trusted: rewards.len(),
            broken: size.saturating_sub(rewards.len()),
        }
    }

    /// Share of solved episodes among those with a trusted outcome; `None` if there are none. Such a task
    /// is left out of every number of the evaluation.
    pub fn rate(&self) -> Option<f64> {
        (self.trusted > 0).then(|| self.solved as f64 / self.trusted as f64)
    }

    /// Unbiased estimate of the chance that one of `k` samples solves the task,
    /// `1 − C(n−c, k) / C(n, k)`, with `n` trusted samples of which `c` solved it. A task that lost
    /// samples so that `n < k` is estimated at `n`, which can only understate it. `None` exactly when
    /// [`rate`](Self::rate) is `None`.
    pub fn pass_at(&self, k: usize) -> Option<f64> {
        let (n, failed) = (self.trusted, self.trusted - self.solved);
        if n == 0 {
            return None;
        }
        let missed: f64 =
            (0..k.min(n)).map(|i| failed.saturating_sub(i) as f64 / (n - i) as f64).product();
        Some(1.0 - missed)
    }
}

/// Mean and standard error of the mean; `None` without values. The error of a single value is 0.
pub fn mean_and_se(values: &[f64]) -> Option<(f64, f64)> {
    if values.is_empty() {
        return None;
    }
    let n = values.len() as f64;
    let mean = values.iter().sum::<f64>() / n;
    let squares: f64 = values.iter().map(|v| (v - mean).powi(2)).sum();
    let se = if values.len() < 2 { 0.0 } else { (squares / (n - 1.0) / n).sqrt() };
    Some((mean, se))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn score(solved: usize, trusted: usize, broken: usize) -> TaskScore {
        TaskScore { solved, trusted, broken }
    }

    #[test]
    fn only_the_full_reward_is_solved() {
        for (reward, solved) in [(0.0, false), (0.6, false), (0.999, false), (1.0, true)] {
            assert_eq!(is_solved(reward), solved, "{reward}");
        }
        // Sums of shares may miss 1 by rounding.
        assert!(is_solved((0..10).map(|_| 0.1).sum()));
        assert_eq!(TaskScore::new(4, &[1.0, 0.6, 0.0]), score(1, 3, 1));
    }

    #[test]
    fn pass_at_k_is_the_unbiased_estimate() {
        let near = |a: Option<f64>, b: f64| (a.unwrap() - b).abs() < 1e-12;
        assert!(near(score(1, 4, 0).pass_at(1), 0.25));
        assert!(near(score(1, 4, 0).pass_at(2), 0.5));
        assert!(near(score(2, 4, 0).pass_at(2), 1.0 - 1.0 / 6.0));
        assert!(near(score(4, 4, 0).pass_at(4), 1.0));
        assert!(near(score(0, 4, 0).pass_at(4), 0.0));
    }

    #[test]
    fn a_task_counts_for_pass_at_k_exactly_if_it_counts_for_pass_at_1() {
        for (solved, trusted, broken) in [(0, 0, 4), (0, 1, 3), (1, 1, 3), (1, 3, 1), (2, 4, 0)] {
            let score = score(solved, trusted, broken);
            assert_eq!(score.rate().is_some(), score.pass_at(4).is_some(), "{score:?}");
            assert!(score.pass_at(4) >= score.rate(), "{score:?}");
        }
        assert_eq!(score(1, 3, 1).pass_at(4), Some(1.0));
        assert_eq!(score(0, 3, 1).pass_at(4), Some(0.0));
    }
}
