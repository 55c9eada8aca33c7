//! The results of a run and the course of its training, in numbers. `run_page.rs` draws them.

use crate::error::ReportError;
use crate::journal::{metrics_lines, task_scores};
use crate::series::{Read, StepMean, extreme_tokens, extreme_tokens_no_replay, steps};
use jiff::Timestamp;
use orchestrate_metrics::{
    Collapse, EvalLine, MetricsLine, SCHEMA_VERSION, StepLine, TaskScore, detect_collapse,
    mean_and_se,
};
use orchestrate_store::{Reader, StepState};
use orchestrate_types::{PolicyVersion, RunId};
use serde::{Deserialize, Serialize};

/// One evaluation.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct EvalPoint {
    /// Global step after which it ran; 0 = before training.
    pub global_step: u32,
    /// Version of the evaluated weights.
    pub policy_version: PolicyVersion,
    /// Pass@1 on held-out tasks, 0 to 1.
    pub pass_at_1: f64,
    /// Standard error of `pass_at_1` over tasks.
    pub pass_at_1_se: f64,
    /// Pass@k, 0 to 1; `None` with a single sample per task.
    pub pass_at_k: Option<f64>,
    /// Samples per task, the k of pass@k.
    pub k: u64,
    /// Held-out tasks that Pass@1 and pass@k are means over: those with a trusted outcome.
    pub tasks: u64,
    /// Pass@1 on unseen families, 0 to 1; `None` if none were evaluated.
    pub held_out_families_pass_at_1: Option<f64>,
    /// Episodes without a trusted outcome, left out of the numbers above.
    pub broken: u64,
}

/// The difference of two evaluations on the same tasks.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Gain {
    /// Last minus first Pass@1, −1 to 1.
    pub pass_at_1: f64,
    /// Standard error of that difference, paired by task.
    pub se: f64,
    /// Tasks with a trusted outcome in both.
    pub tasks: usize,
}

/// Means over those steps of a run that have the value.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
pub struct StepMeans {
    /// Train-inference KL without replay, nats.
    pub kl_train_infer_no_replay: Option<f64>,
    /// F(2): share of tokens with `max(ρ, 1/ρ) > 2`, 0 to 1.
    pub extreme_tokens: Option<f64>,
    /// F(2) without replay.
    pub extreme_tokens_no_replay: Option<f64>,
    /// Share of (token, layer) pairs with other experts than the engine's, 0 to 1.
    pub router_disagreement: Option<f64>,
    /// Entropy, nats per token.
    pub entropy: Option<f64>,
    /// Gradient norm before clipping.
    pub grad_norm: Option<f64>,
    /// The routers' part of the gradient norm.
    pub router_grad_norm: Option<f64>,
    /// Share of loss tokens that were clipped, 0 to 1.
    pub clip_fraction: Option<f64>,
    /// Response tokens of an episode.
    pub response_tokens: Option<f64>,
    /// Share of truncated episodes, 0 to 1.
    pub truncated: Option<f64>,
    /// Policy versions between the oldest token of an episode and the weights it trained.
    pub staleness: Option<f64>,
    /// Share of prompt tokens that were in the engine's prefix cache, 0 to 1.
    pub prefix_cache_hit_rate: Option<f64>,
    /// Wall time of a step, seconds.
    pub step_seconds: Option<f64>,
}

impl StepMeans {
    fn of(lines: &[MetricsLine]) -> Self {
        let of = |read: Read| StepMean::new(lines, read).map(|mean| mean.mean);
        Self {
            kl_train_infer_no_replay: of(|l| l.kl_train_infer_no_replay),
            extreme_tokens: of(extreme_tokens),
            extreme_tokens_no_replay: of(extreme_tokens_no_replay),
            router_disagreement: of(|l| l.router_disagreement),
            entropy: of(|l| l.entropy),
            grad_norm: of(|l| l.grad_norm),
            router_grad_norm: of(|l| l.router_grad_norm),
            clip_fraction: of(|l| l.clip_fraction),
            response_tokens: of(|l| l.response_tokens_mean),
            truncated: of(StepLine::truncated_share),
            staleness: of(|l| l.staleness_mean),
            prefix_cache_hit_rate: of(|l| l.prefix_cache_hit_rate),
            step_seconds: of(StepLine::seconds),
        }
    }
}

/// The results of a run so far.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct RunReport {
    /// Version of this format, the same as that of metrics lines; 0 in reports of versions that did not
    /// record it.
    #[serde(default)]
    pub schema_version: u32,
    /// When the newest of its metrics lines was written, UTC; `None` if no line has a time.
    pub time: Option<Timestamp>,
    /// The run.
    pub run: RunId,
    /// Global steps that updated the weights.
    pub steps_applied: usize,
    /// Global steps that had nothing to train on.
    pub steps_skipped: usize,
    /// First evaluation.
    pub baseline: Option<EvalPoint>,
    /// Last evaluation; `None` if there is only one.
    pub last: Option<EvalPoint>,
    /// The evaluation with the highest Pass@1, the first of equals. The highest of many evaluations
    /// overstates what the same weights would score again.
    pub best: Option<EvalPoint>,
    /// Gain of Pass@1 on held-out tasks from the first to the last evaluation.
    pub gain: Option<Gain>,
    /// Gain of Pass@1 on unseen families from the first to the last evaluation.
    pub held_out_families_gain: Option<Gain>,
    /// Training episodes with a trusted outcome.
    pub episodes: u64,
    /// Tokens that the trainer processed.
    pub train_tokens: u64,
    /// Train-inference KL, nats, mean over steps.
    pub kl_train_infer: Option<f64>,
    /// KL without replay divided by KL as trained, over the steps where both were measured.
    pub kl_ratio: Option<f64>,
    /// Wall time of rollouts, training and weight syncs together, seconds.
    pub seconds: f64,
    /// The collapse that started first, if the run collapsed. It is serialized as text; a reader detects
    /// it again from the metrics lines.
    #[serde(skip_deserializing)]
    pub collapse: Option<Collapse>,
    /// Means over the steps.
    pub means: StepMeans,
    /// Containers that could not be removed by the end, each with the reason.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub quarantined: Vec<String>,
}

impl RunReport {
    /// Computes the report of a run from its journal.
    ///
    /// # Errors
    /// Store errors, and a stored metrics line that this version cannot read.
    pub async fn from_journal(reader: &Reader) -> Result<Self, ReportError> {
        let rows = reader.steps().await?;
        let lines = metrics_lines(reader).await?;
        let evaluations: Vec<&EvalLine> =
            lines.iter().filter_map(MetricsLine::evaluation).collect();
        let (first, last) = match evaluations.as_slice() {
            [] => (None, None),
            [only] => (Some(*only), None),
            [first, .., last] => (Some(*first), Some(*last)),
        };
        let (mut gain, mut held_out_families_gain) = (None, None);
        if let (Some(first), Some(last)) = (first, last) {
            let before = task_scores(reader, first.global_step).await?;
            let after = task_scores(reader, last.global_step).await?;
            let known =
                first.eval_tasks.map_or(usize::MAX, |n| usize::try_from(n).unwrap_or(usize::MAX));
            let parts = |scores: &[TaskScore]| {
                let (known, families) = scores.split_at(known.min(scores.len()));
                (known.to_vec(), families.to_vec())
            };
            let ((known_a, families_a), (known_b, families_b)) = (parts(&before), parts(&after));
            gain = paired_gain(&known_a, &known_b);
            held_out_families_gain = paired_gain(&families_a, &families_b);
        }
        let total = |read: fn(&StepLine) -> Option<u64>| steps(&lines).filter_map(read).sum();
        let count = |state| rows.iter().filter(|row| row.state == state).count();
        let best = evaluations
            .iter()
            .filter_map(|line| eval_point(line))
            .reduce(|best, point| if point.pass_at_1 > best.pass_at_1 { point } else { best });
        Ok(Self {
            schema_version: SCHEMA_VERSION,
            time: lines.iter().filter_map(MetricsLine::time).max(),
            quarantined: Vec::new(),
            run: reader.run().await?.run,
            steps_applied: count(StepState::Applied),
            steps_skipped: count(StepState::Skipped),
            baseline: first.and_then(eval_point),
            last: last.and_then(eval_point),
            best,
            gain,
            held_out_families_gain,
            episodes: total(|line| line.episodes),
            train_tokens: total(|line| line.train_tokens),
            kl_train_infer: StepMean::new(&lines, |line| line.kl_train_infer).map(|mean| mean.mean),
            kl_ratio: kl_ratio(&lines),
            // Starts from 0.0, because `sum` of no numbers is -0.0.
            seconds: steps(&lines).filter_map(StepLine::seconds).fold(0.0, |all, step| all + step),
            collapse: detect_collapse(&lines).0,
            means: StepMeans::of(&lines),
        })
    }

    /// Global steps that ended.
    pub fn steps(&self) -> usize {
        self.steps_applied + self.steps_skipped
    }

    /// What there is to say about a run in which no collapse was found.
    pub fn without_collapse(&self) -> &'static str {
        match self.steps() {
            0 => "no step has ended, so there is no training to judge",
            _ => "no sign of collapse",
        }
    }

    /// The newest evaluation.
    pub fn newest(&self) -> Option<&EvalPoint> {
        self.last.as_ref().or(self.baseline.as_ref())
    }
}

/// KL without replay divided by KL as trained, over the steps where both were measured.
fn kl_ratio(lines: &[MetricsLine]) -> Option<f64> {
    let both = |line: &StepLine| Some((line.kl_train_infer?, line.kl_train_infer_no_replay?));
    let (with, without) = steps(lines)
        .filter_map(both)
        .fold((0.0, 0.0), |(a, b), (with, without)| (a + with, b + without));
    (with > 0.0).then(|| without / with)
}

fn eval_point(line: &EvalLine) -> Option<EvalPoint> {
    Some(EvalPoint {
        global_step: line.global_step,
        policy_version: line.policy_version,
        pass_at_1: line.eval_pass_at_1?,
        pass_at_1_se: line.eval_pass_at_1_se.unwrap_or(0.0),
        pass_at_k: line.eval_pass_at_k,
        k: line.eval_k.unwrap_or(1),
        tasks: line.counted_tasks().unwrap_or(0),
        held_out_families_pass_at_1: line.eval_held_out_families_pass_at_1,
        broken: line.eval_broken.unwrap_or(0),
    })
}

/// Mean change of the solve rate over tasks. Pairing by task keeps tasks that are always or never solved
/// from adding noise.
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

    #[test]
    fn kl_ratio_is_over_the_steps_that_measured_both() {
        let line = |kl_train_infer, kl_train_infer_no_replay| {
            MetricsLine::from(StepLine {
                kl_train_infer,
                kl_train_infer_no_replay,
                ..StepLine::default()
            })
        };
        let lines = [line(Some(1.0), Some(3.0)), line(Some(7.0), None), line(None, None)];
        assert_eq!(kl_ratio(&lines), Some(3.0));
        assert_eq!(kl_ratio(&lines[1..]), None);
    }

    #[test]
    fn reports_without_schema_version_are_read() {
        let old = r#"{"run":"01a20504-cb20-7561-9d1a-a733901976f4","steps_applied":40,
            "steps_skipped":0,"baseline":{"global_step":0,"policy_version":0,"pass_at_1":0.3075,
            "pass_at_1_se":0.0257,"pass_at_k":0.47,"k":2,"tasks":200,
            "held_out_families_pass_at_1":null,"broken":0},"last":null,"best":null,"gain":null,
            "held_out_families_gain":null,"episodes":3328,"train_tokens":865597,
            "kl_train_infer":0.00031,"kl_ratio":1.0,"seconds":213.7,"collapse":null,
            "means":{"kl_train_infer_no_replay":0.00022}}"#;
        let report: RunReport = serde_json::from_str(old).unwrap();
        assert_eq!((report.schema_version, report.time), (0, None));
        assert_eq!(report.newest().unwrap().tasks, 200);
        assert_eq!(report.means.kl_train_infer_no_replay, Some(0.00022));
    }
}
