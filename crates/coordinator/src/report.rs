//! What a run achieved: the numbers of the final table, and `report.html`.

use crate::error::RunError;
use crate::evaluation::{TaskScore, mean_and_se, scores};
use crate::svg::{Series, chart};
use orchestrate_store::{Reader, StepState};
use orchestrate_types::{PolicyVersion, RunId};
use serde::Serialize;
use serde_json::Value;
use std::fmt::Write;

/// One evaluation.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
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
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Gain {
    /// Last minus first Pass@1.
    pub pass_at_1: f64,
    /// Standard error of that difference, paired by task.
    pub se: f64,
    /// Tasks with a trusted outcome in both.
    pub tasks: usize,
}

/// The result of a run so far.
#[derive(Debug, Clone, PartialEq, Serialize)]
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
}

impl RunReport {
    /// Reads it from the journal.
    ///
    /// # Errors
    /// Store errors.
    pub async fn from_journal(reader: &Reader) -> Result<Self, RunError> {
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
            let before = scores(reader, first.global_step).await?;
            let after = scores(reader, last.global_step).await?;
            let border = usize::try_from(first.tasks).unwrap_or(usize::MAX);
            let halves = |s: &[TaskScore]| {
                let (known, families) = s.split_at(border.min(s.len()));
                (known.to_vec(), families.to_vec())
            };
            let ((known_a, families_a), (known_b, families_b)) = (halves(&before), halves(&after));
            gain = paired_gain(&known_a, &known_b);
            held_out_families_gain = paired_gain(&families_a, &families_b);
        }
        let lines: Vec<&Value> = steps.iter().filter_map(|s| s.metrics.as_ref()).collect();
        let both: Vec<(f64, f64)> = lines
            .iter()
            .filter_map(|l| {
                Some((number(l, "kl_train_infer")?, number(l, "kl_train_infer_no_replay")?))
            })
            .collect();
        let (with, without) =
            both.iter().fold((0.0, 0.0), |(a, b), (with, without)| (a + with, b + without));
        let kls: Vec<f64> = lines.iter().filter_map(|l| number(l, "kl_train_infer")).collect();
        let total = |key: &str| lines.iter().filter_map(|l| l.get(key)?.as_u64()).sum();
        let seconds = |key: &str| lines.iter().filter_map(|l| number(l, key)).sum::<f64>();
        let count = |state| steps.iter().filter(|s| s.state == state).count();
        Ok(Self {
            run: reader.run().await?.run,
            steps_applied: count(StepState::Applied),
            steps_skipped: count(StepState::Skipped),
            baseline,
            last,
            gain,
            held_out_families_gain,
            episodes: total("episodes"),
            train_tokens: total("train_tokens"),
            kl_train_infer: mean_and_se(&kls).map(|(mean, _)| mean),
            kl_ratio: (with > 0.0).then(|| without / with),
            seconds: seconds("time_rollout_s") + seconds("time_train_s") + seconds("time_sync_s"),
        })
    }
}

fn eval_point(line: &Value) -> Option<EvalPoint> {
    let count = |key: &str| line.get(key).and_then(Value::as_u64);
    Some(EvalPoint {
        global_step: u32::try_from(count("global_step")?).ok()?,
        policy_version: PolicyVersion(count("policy_version")?),
        pass_at_1: number(line, "eval_pass_at_1")?,
        pass_at_1_se: number(line, "eval_pass_at_1_se").unwrap_or(0.0),
        pass_at_k: number(line, "eval_pass_at_k"),
        k: count("eval_k").unwrap_or(1),
        tasks: count("eval_tasks").unwrap_or(0),
        held_out_families_pass_at_1: number(line, "eval_held_out_families_pass_at_1"),
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

fn number(line: &Value, key: &str) -> Option<f64> {
    line.get(key).and_then(Value::as_f64)
}

const STYLE: &str = "body{font:15px/1.5 system-ui,sans-serif;margin:2rem auto;max-width:62rem;\
padding:0 1rem;color:#1c1c1c;background:#fff}h1{font-size:1.4rem}table{border-collapse:collapse}\
td,th{padding:.25rem .9rem .25rem 0;text-align:left;border-bottom:1px solid #ddd;\
font-weight:normal}th{color:#555}.charts{display:grid;gap:1.2rem;margin-top:1.5rem;\
grid-template-columns:repeat(auto-fit,minmax(26rem,1fr))}figure{margin:0}\
figcaption{font-weight:600}svg{width:100%;height:auto}svg text{font-size:10px;fill:#444}\
.grid{stroke:#e4e4e4}";

/// `report.html` as one self-contained page: the table and the charts, no script, no network.
/// `lines` are those of `metrics.jsonl`.
pub fn write_html(report: &RunReport, lines: &[Value]) -> String {
    let mut page = format!(
        "<!doctype html>\n<html lang=\"en\"><head><meta charset=\"utf-8\">\
         <meta name=\"viewport\" content=\"width=device-width\">\
         <title>Run {0}</title><style>{STYLE}</style></head><body>\n<h1>Run {0}</h1>\n<table>\n",
        report.run
    );
    for (name, value) in table(report) {
        let _ = writeln!(page, "<tr><th>{name}</th><td>{value}</td></tr>");
    }
    page.push_str("</table>\n<div class=\"charts\">\n");
    let series = |name, key| Series { name, points: points(lines, key, None) };
    let evals = [
        Series {
            name: "held out",
            points: points(lines, "eval_pass_at_1", Some("eval_pass_at_1_se")),
        },
        Series {
            name: "unseen families",
            points: points(
                lines,
                "eval_held_out_families_pass_at_1",
                Some("eval_held_out_families_pass_at_1_se"),
            ),
        },
    ];
    page.push_str(&chart("Evaluation Pass@1 (bars: one standard error)", &evals, true));
    let training = [series("mean reward", "reward_mean"), series("solve rate", "solve_rate")];
    page.push_str(&chart("Training reward", &training, true));
    let kl = [
        series("with replay", "kl_train_infer"),
        series("without replay", "kl_train_infer_no_replay"),
    ];
    page.push_str(&chart("Train-inference KL (k3, nats)", &kl, true));
    let disagreement = [series("routers", "router_disagreement")];
    page.push_str(&chart("Routers that choose other experts (share)", &disagreement, true));
    page.push_str(&chart("Gradient norm", &[series("before clipping", "grad_norm")], true));
    page.push_str(&chart("Entropy (nats)", &[series("policy", "entropy")], true));
    let tokens = [series("response tokens", "response_tokens_mean")];
    page.push_str(&chart("Tokens written per episode", &tokens, true));
    let times = [
        series("rollout", "time_rollout_s"),
        series("training", "time_train_s"),
        series("weight update", "time_sync_s"),
    ];
    page.push_str(&chart("Seconds per step", &times, true));
    page.push_str("</div>\n</body></html>\n");
    page
}

fn points(lines: &[Value], key: &str, bar: Option<&str>) -> Vec<(f64, f64, f64)> {
    lines
        .iter()
        .filter_map(|line| {
            let bar = bar.and_then(|key| number(line, key)).unwrap_or(0.0);
            Some((number(line, "global_step")?, number(line, key)?, bar))
        })
        .collect()
}

fn table(report: &RunReport) -> Vec<(&'static str, String)> {
    let percent = |v: f64| format!("{:.1} %", v * 100.0);
    let point = |p: &EvalPoint| {
        let (pass, se) = (percent(p.pass_at_1), p.pass_at_1_se * 100.0);
        format!("{pass} ± {se:.1} ({} tasks, after step {})", p.tasks, p.global_step)
    };
    let gain = |g: &Gain| {
        format!("{:+.1} ± {:.1} points ({} tasks)", g.pass_at_1 * 100.0, g.se * 100.0, g.tasks)
    };
    let mut rows = vec![("Steps applied", report.steps_applied.to_string())];
    if report.steps_skipped > 0 {
        rows.push(("Steps skipped", report.steps_skipped.to_string()));
    }
    rows.extend(report.baseline.as_ref().map(|p| ("Pass@1 before", point(p))));
    rows.extend(report.last.as_ref().map(|p| ("Pass@1 after", point(p))));
    rows.extend(report.gain.as_ref().map(|g| ("Gain", gain(g))));
    let families = report.held_out_families_gain.as_ref();
    rows.extend(families.map(|g| ("Gain on unseen families", gain(g))));
    rows.push(("Training episodes", report.episodes.to_string()));
    rows.push(("Tokens trained on", report.train_tokens.to_string()));
    rows.extend(report.kl_train_infer.map(|kl| ("Train-inference KL", format!("{kl:.2e}"))));
    let ratio = report.kl_ratio.map(|r| ("KL without replay / with", format!("{r:.2}×")));
    rows.extend(ratio);
    rows.push(("Time", format!("{:.0} s", report.seconds)));
    rows
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

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
    fn the_page_stands_alone_and_has_every_chart_with_data() {
        let report = RunReport {
            run: RunId::generate(),
            steps_applied: 2,
            steps_skipped: 1,
            baseline: None,
            last: None,
            gain: Some(Gain { pass_at_1: 0.2, se: 0.04, tasks: 50 }),
            held_out_families_gain: None,
            episodes: 64,
            train_tokens: 1000,
            kl_train_infer: Some(1e-3),
            kl_ratio: Some(2.0),
            seconds: 12.0,
        };
        let lines = [
            json!({"global_step": 0, "eval_pass_at_1": 0.1, "eval_pass_at_1_se": 0.03}),
            json!({"global_step": 1, "reward_mean": 0.2, "solve_rate": 0.2, "grad_norm": 1.0,
                   "kl_train_infer": 1e-3, "kl_train_infer_no_replay": null,
                   "time_rollout_s": 3.0}),
        ];
        let page = write_html(&report, &lines);
        assert_eq!(page.matches("<svg").count(), 5);
        assert!(page.contains("+20.0 ± 4.0 points") && page.contains("2.00×"));
        assert!(!page.contains("http") && !page.contains("<script"));
    }
}
