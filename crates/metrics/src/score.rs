//! Solved episodes, Pass@1 and pass@k.

/// Rewards from here on count as solved: graders give exactly 0 or 1, or a share of passed tests.
const SOLVED: f64 = 1.0 - 1e-9;

/// Whether a reward (0 to 1) means that the task is solved: nothing less than the full reward does.
pub fn is_solved(reward: f64) -> bool {
    reward >= SOLVED
}

/// What the episodes of one evaluation task say.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TaskScore {
    /// Episodes that solved the task.
    pub solved: usize,
    /// Episodes with a trusted outcome.
    pub trusted: usize,
    /// Episodes without one.
    pub broken: usize,
}

impl TaskScore {
    /// Share of solved episodes; `None` when no episode has a trusted outcome.
    pub fn rate(&self) -> Option<f64> {
        (self.trusted > 0).then(|| self.solved as f64 / self.trusted as f64)
    }

    /// Unbiased estimate of the chance that one of `k` samples solves the task,
    /// `1 − C(n−c, k) / C(n, k)`; `None` with fewer than `k` trusted samples.
    pub fn pass_at(&self, k: usize) -> Option<f64> {
        let (n, failed) = (self.trusted, self.trusted - self.solved);
        if n < k {
            return None;
        }
        let missed: f64 =
            (0..k).map(|i| failed.saturating_sub(i) as f64 / (n - i) as f64).product();
        Some(1.0 - missed)
    }
}

/// Mean and standard error of the mean over tasks; `None` without values.
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

    #[test]
    fn pass_at_k_is_the_unbiased_estimate() {
        let score = |solved, trusted, broken| TaskScore { solved, trusted, broken };
        let near = |a: Option<f64>, b: f64| (a.unwrap() - b).abs() < 1e-12;
        assert!(near(score(1, 4, 0).pass_at(1), 0.25));
        assert!(near(score(1, 4, 0).pass_at(2), 0.5));
        assert!(near(score(2, 4, 0).pass_at(2), 1.0 - 1.0 / 6.0));
        assert!(near(score(4, 4, 0).pass_at(4), 1.0));
        assert!(near(score(0, 4, 0).pass_at(4), 0.0));
        assert_eq!(score(1, 3, 1).pass_at(4), None);
    }
}
