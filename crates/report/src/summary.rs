//! What a run achieved and how its training went, in numbers. How they look is in `run_page.rs`.

use crate::scores::task_scores;
use crate::series::{Read, mean, number, step_seconds, truncated};
use orchestrate_metrics::collapse::{Collapse, judge};
use orchestrate_metrics::{TaskScore, mean_and_se};
use orchestrate_store::{Reader, StepState, StoreError};
use orchestrate_types::{PolicyVersion, RunId};
use serde::{Deserialize, Serialize};
use serde_json::Value;

/// One evaluation.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct EvalPoint {
    /// Global step after which it ran; 0 = before training.
    pub global_step: u32,
    /// Evaluated version.
    pub policy_version: PolicyVersion,
    /// Pass@1 on held-out tasks, 0 to 1.
    pub pass_at_1: f64,
    /// Its standard error over tasks.
    pub pass_at_1_se: f64,
    /// Pass@k, where several samples were taken.
    pub pass_at_k: Option<f64>,
    /// Samples per task, k.
    pub k: u64,
    /// Held-out tasks.
    pub tasks: u64,
    /// Pass@1 on unseen families.
    pub held_out_families_pass_at_1: Option<f64>,
    /// Episodes that failed for reasons of ours, left out of the numbers above.
    pub broken: u64,
}

/// A difference of two evaluations on the same tasks.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Gain {
    /// Last minus first Pass@1.
    pub pass_at_1: f64,
    /// Standard error of that difference, paired by task.
    pub se: f64,
    /// Tasks with a trusted outcome in both.
    pub tasks: usize,
}

/// Means over the steps of a run that have the value.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
pub struct StepMeans {
    /// Train-inference KL without replay, nats.
    pub kl_train_infer_no_replay: Option<f64>,
    /// F(2): share of tokens with `max(ρ, 1/ρ) > 2`.
    pub extreme_tokens: Option<f64>,
    /// F(2) without replay.
    pub extreme_tokens_no_replay: Option<f64>,
    /// Share of (token, layer) pairs with other experts than the engine's.
    pub router_disagreement: Option<f64>,
    /// Entropy, nats per token.
    pub entropy: Option<f64>,
    /// Gradient norm before clipping.
    pub grad_norm: Option<f64>,
    /// The routers' part of it.
    pub router_grad_norm: Option<f64>,
    /// Share of loss tokens that were clipped.
    pub clip_fraction: Option<f64>,
    /// Response tokens of an episode.
    pub response_tokens: Option<f64>,
    /// Share of episodes that a limit cut short.
    pub truncated: Option<f64>,
    /// Policy versions between the oldest token of an episode and the weights it trained.
    pub staleness: Option<f64>,
    /// Share of prompt tokens found in the engine's prefix cache.
    pub prefix_cache_hit_rate: Option<f64>,
    /// Wall time of a step.
    pub step_seconds: Option<f64>,
}

impl StepMeans {
    fn of(lines: &[Value]) -> Self {
        let of = |read: Read| mean(lines, read);
        Self {
            kl_train_infer_no_replay: of(|l| number(l, "/kl_train_infer_no_replay")),
            extreme_tokens: of(|l| number(l, "/extreme_token_fraction/2")),
            extreme_tokens_no_replay: of(|l| number(l, "/extreme_token_fraction_no_replay/2")),
            router_disagreement: of(|l| number(l, "/router_disagreement")),
            entropy: of(|l| number(l, "/entropy")),
            grad_norm: of(|l| number(l, "/grad_norm")),
            router_grad_norm: of(|l| number(l, "/router_grad_norm")),
            clip_fraction: of(|l| number(l, "/clip_fraction")),
            response_tokens: of(|l| number(l, "/response_tokens_mean")),
            truncated: of(truncated),
            staleness: of(|l| number(l, "/staleness_mean")),
            prefix_cache_hit_rate: of(|l| number(l, "/prefix_cache_hit_rate")),
            step_seconds: of(step_seconds),
        }
    }
}

/// The result of a run so far.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct RunReport {
    /// The run.
    pub run: RunId,
    /// Global steps with an update.
    pub steps_applied: usize,
    /// Global steps without one.
    pub steps_skipped: usize,
    /// First evaluation.
    pub baseline: Option<EvalPoint>,
    /// Last evaluation, if it is another one.
    pub last: Option<EvalPoint>,
    /// The evaluation with the highest Pass@1, the first of equals. The highest of many is
    /// above what it would be if measured again.
    pub best: Option<EvalPoint>,
    /// What training gained on held-out tasks.
    pub gain: Option<Gain>,
    /// What it gained on unseen families.
    pub held_out_families_gain: Option<Gain>,
    /// Episodes sampled for training.
    pub episodes: u64,
    /// Tokens the trainer processed.
    pub train_tokens: u64,
    /// Train-inference KL, mean over steps.
    pub kl_train_infer: Option<f64>,
    /// KL without replay divided by KL with it, over the steps where both were measured.
    pub kl_ratio: Option<f64>,
    /// Seconds spent in rollouts, training and weight updates together.
    pub seconds: f64,
    /// The first step from which on training had collapsed. Written in words, so it is not read back
    /// but judged again.
    #[serde(skip_deserializing)]
    pub collapse: Option<Collapse>,
    /// How training went on average.
    pub means: StepMeans,
    /// Containers that could not be removed by the end, each with the reason.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub quarantined: Vec<String>,
}

impl RunReport {
    /// Reads it from the journal.
    ///
    /// # Errors
    /// Store errors.
    pub async fn from_journal(reader: &Reader) -> Result<Self, StoreError> {
        let steps = reader.steps().await?;
        let evals = reader.evals().await?;
        let done: Vec<&Value> = evals.iter().filter_map(|e| e.metrics.as_ref()).collect();
        let baseline = done.first().and_then(|line| eval_point(line));
        let last = match done.as_slice() {
            [_, .., last] => eval_point(last),
            [] | [_] => None,
        };
        let (mut gain, mut held_out_families_gain) = (None, None);
        if let (Some(first), Some(last)) = (baseline, last) {
            let before = task_scores(reader, first.global_step).await?;
            let after = task_scores(reader, last.global_step).await?;
            let border = usize::try_from(first.tasks).unwrap_or(usize::MAX);
            let halves = |s: &[TaskScore]| {
                let (known, families) = s.split_at(border.min(s.len()));
                (known.to_vec(), families.to_vec())
            };
            let ((known_a, families_a), (known_b, families_b)) = (halves(&before), halves(&after));
            gain = paired_gain(&known_a, &known_b);
            held_out_families_gain = paired_gain(&families_a, &families_b);
        }
        let lines: Vec<Value> = steps.iter().filter_map(|s| s.metrics.clone()).collect();
        let both: Vec<(f64, f64)> = lines
            .iter()
            .filter_map(|l| {
                Some((number(l, "/kl_train_infer")?, number(l, "/kl_train_infer_no_replay")?))
            })
            .collect();
        let (with, without) =
            both.iter().fold((0.0, 0.0), |(a, b), (with, without)| (a + with, b + without));
        let total = |key: &str| lines.iter().filter_map(|l| l.get(key)?.as_u64()).sum();
        let count = |state| steps.iter().filter(|s| s.state == state).count();
        let best = done
            .iter()
            .filter_map(|line| eval_point(line))
            .reduce(|best, point| if point.pass_at_1 > best.pass_at_1 { point } else { best });
        Ok(Self {
            quarantined: Vec::new(),
            run: reader.run().await?.run,
            steps_applied: count(StepState::Applied),
            steps_skipped: count(StepState::Skipped),
            baseline,
            last,
            best,
            gain,
            held_out_families_gain,
            episodes: total("episodes"),
            train_tokens: total("train_tokens"),
            kl_train_infer: mean(&lines, |l| number(l, "/kl_train_infer")),
            kl_ratio: (with > 0.0).then(|| without / with),
            // From 0.0: the sum of no numbers is -0.0.
            seconds: lines.iter().filter_map(step_seconds).fold(0.0, |all, step| all + step),
            collapse: judge(&lines).0,
            means: StepMeans::of(&lines),
        })
    }

    /// The evaluation that is closest to the end of the run.
    pub fn newest(&self) -> Option<&EvalPoint> {
        self.last.as_ref().or(self.baseline.as_ref())
    }
}

fn eval_point(line: &Value) -> Option<EvalPoint> {
    let count = |key: &str| line.get(key).and_then(Value::as_u64);
    Some(EvalPoint {
        global_step: u32::try_from(count("global_step")?).ok()?,
        policy_version: PolicyVersion(count("policy_version")?),
        pass_at_1: number(line, "/eval_pass_at_1")?,
        pass_at_1_se: number(line, "/eval_pass_at_1_se").unwrap_or(0.0),
        pass_at_k: number(line, "/eval_pass_at_k"),
        k: count("eval_k").unwrap_or(1),
        tasks: count("eval_tasks").unwrap_or(0),
        held_out_families_pass_at_1: number(line, "/eval_held_out_families_pass_at_1"),
        broken: count("eval_broken").unwrap_or(0),
    })
}

/// Task by task, so that tasks which are always or never solved add no noise.
fn paired_gain(before: &[TaskScore], after: &[TaskScore]) -> Option<Gain> {
    let differences: Vec<f64> = before
        .iter()
        .zip(after)
        .filter_map(|(before, after)| Some(after.rate()? - before.rate()?))
        .collect();
    let (pass_at_1, se) = mean_and_se(&differences)?;
    Some(Gain { pass_at_1, se, tasks: differences.len() })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn gains_are_paired_by_task() {
        let score = |solved| TaskScore { solved, trusted: 1, broken: 0 };
        let broken = TaskScore { solved: 0, trusted: 0, broken: 1 };
        let before = [score(0), score(1), score(0), score(0)];
        let after = [score(1), score(1), score(0), broken];
        let gain = paired_gain(&before, &after).unwrap();
        assert_eq!(gain.tasks, 3);
        assert!((gain.pass_at_1 - 1.0 / 3.0).abs() < 1e-12);
        assert!((gain.se - 1.0 / 3.0).abs() < 1e-12);
        assert_eq!(paired_gain(&[], &[]), None);
    }
}
