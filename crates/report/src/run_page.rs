//! `report.html`: one run as a page for people who would rather look than read.

mod distributions;

use crate::page::{Tile, document, escape, section, table, tiles};
use crate::plot::{Caption, Lines, Scale, Series};
use crate::series::{
    COST, LEARNING, MISMATCH, MISMATCH_DETAIL, Measure, OPTIMISER, number, points,
};
use crate::summary::{EvalPoint, Gain, RunReport};
use orchestrate_metrics::collapse::judge;
use serde_json::Value;
use std::fmt::Write;

/// Half width of a 95 % interval, in standard errors.
const INTERVAL: f64 = 1.96;
/// Warnings that are written out.
const WARNINGS: usize = 5;

/// A run as one self-contained page: verdict, numbers and charts, no script, no network. `lines` are
/// those of `metrics.jsonl`.
pub fn write_html(report: &RunReport, lines: &[Value]) -> String {
    let mut body = verdict(report, lines);
    body.push_str(&tiles(&headline(report)));
    let mark = report.collapse.as_ref();
    let mark = mark.map(|c| (f64::from(c.step), "collapse"));
    let charts = |measures: &[Measure]| -> Vec<String> {
        measures.iter().map(|measure| of_run(measure, lines, mark)).collect()
    };
    let mut learning = vec![evaluations(lines)];
    learning.extend(charts(LEARNING));
    body.push_str(&section("Learning", &learning));
    let mut mismatch = charts(MISMATCH);
    mismatch.extend(charts(MISMATCH_DETAIL));
    mismatch.extend(distributions::probabilities(lines));
    body.push_str(&section("Trainer against sampler", &mismatch));
    body.push_str(&section("Routing", &distributions::routing(lines)));
    body.push_str(&section("Optimiser", &charts(OPTIMISER)));
    body.push_str(&section("Time", &charts(COST)));
    body.push_str("<h2>Numbers</h2>\n");
    body.push_str(&table(&[], &numbers(report)));
    document(&format!("Run {}", report.run), &body)
}

fn verdict(report: &RunReport, lines: &[Value]) -> String {
    let mut out = match &report.collapse {
        None => "<p class=\"verdict good\">✓ no sign of collapse</p>\n".to_owned(),
        Some(collapse) => {
            let weights = match collapse.last_good {
                Some(version) => format!("the weights before are policy version {version}"),
                None => "the weights before are the starting policy".to_owned(),
            };
            let what = escape(&collapse.symptom.to_string());
            format!(
                "<p class=\"verdict bad\">✗ collapsed at step {}: {what}; {weights}</p>\n",
                collapse.step
            )
        }
    };
    let (_, warnings) = judge(lines);
    if !warnings.is_empty() {
        let shown: Vec<String> = warnings.iter().take(WARNINGS).map(|w| escape(w)).collect();
        let more = warnings.len().saturating_sub(WARNINGS);
        let rest = if more > 0 { format!("; and {more} more") } else { String::new() };
        let _ = writeln!(out, "<p class=\"lead\">Warnings: {}{rest}</p>", shown.join("; "));
    }
    out
}

fn percent(value: f64) -> String {
    format!("{:.1} %", value * 100.0)
}

fn points_of(gain: &Gain) -> String {
    format!("{:+.1} ± {:.1} points", gain.pass_at_1 * 100.0, gain.se * 100.0)
}

fn headline(report: &RunReport) -> Vec<Tile> {
    let mut out = Vec::new();
    let mut tile = |name, value, note: String| out.push(Tile { name, value, note });
    let at =
        |p: &EvalPoint| format!("± {:.1}, after step {}", p.pass_at_1_se * 100.0, p.global_step);
    if let Some(point) = &report.baseline {
        tile("Pass@1 before", percent(point.pass_at_1), at(point));
    }
    if let Some(point) = &report.last {
        tile("Pass@1 now", percent(point.pass_at_1), at(point));
    }
    if let Some(gain) = &report.gain {
        tile("Gain", points_of(gain), format!("paired over {} tasks", gain.tasks));
    }
    let steps = report.steps_applied + report.steps_skipped;
    tile("Steps", steps.to_string(), format!("{} without an update", report.steps_skipped));
    if let Some(kl) = report.kl_train_infer {
        let ratio = report.kl_ratio.map(|r| format!("{r:.2}× without replay"));
        tile("Train-inference KL", format!("{kl:.2e}"), ratio.unwrap_or_default());
    }
    if let Some(share) = report.means.router_disagreement {
        tile("Routers that differ", percent(share), "trainer's own choice".to_owned());
    }
    let each = report.means.step_seconds.map(|s| format!("{s:.1} s a step"));
    tile("Time", format!("{:.0} s", report.seconds), each.unwrap_or_default());
    out
}

fn of_run(measure: &Measure, lines: &[Value], mark: Option<(f64, &str)>) -> String {
    let series = measure.series.iter().enumerate().map(|(style, (name, read))| {
        let points = points(lines, *read).into_iter().map(|(x, y)| (x, y, 0.0)).collect();
        Series { name: (*name).to_owned(), style, faint: false, points }
    });
    let caption = Caption { title: measure.title, note: measure.note };
    Lines { caption, scale: measure.scale, series: series.collect(), mark }.draw()
}

fn evaluations(lines: &[Value]) -> String {
    let series = |style, name: &str, pass: &str, error: &str| {
        let point = |line: &Value| {
            let bar = number(line, error).unwrap_or(0.0) * INTERVAL;
            Some((number(line, "/global_step")?, number(line, pass)?, bar))
        };
        let points = lines.iter().filter_map(point).collect();
        Series { name: name.to_owned(), style, faint: false, points }
    };
    let all = vec![
        series(0, "held out", "/eval_pass_at_1", "/eval_pass_at_1_se"),
        series(
            1,
            "unseen families",
            "/eval_held_out_families_pass_at_1",
            "/eval_held_out_families_pass_at_1_se",
        ),
        series(2, "pass@k", "/eval_pass_at_k", "/none"),
    ];
    let note = "Bars are 95 % intervals over tasks. Each evaluation uses the same seeds, so the \
                difference of two is known better than each of them.";
    let caption = Caption { title: "Evaluation Pass@1", note };
    Lines { caption, scale: Scale::FromZero, series: all, mark: None }.draw()
}

fn numbers(report: &RunReport) -> Vec<Vec<String>> {
    let mut rows = Vec::new();
    let mut row = |name: &str, value: Option<String>| {
        rows.extend(value.map(|value| vec![name.to_owned(), value]));
    };
    let point = |p: &EvalPoint| {
        let (pass, se) = (percent(p.pass_at_1), p.pass_at_1_se * 100.0);
        format!("{pass} ± {se:.1} ({} tasks, after step {})", p.tasks, p.global_step)
    };
    let gain = |g: &Gain| format!("{} ({} tasks)", points_of(g), g.tasks);
    let small = |v: f64| format!("{v:.2e}");
    row("Pass@1 before", report.baseline.as_ref().map(point));
    row("Pass@1 after", report.last.as_ref().map(point));
    row("Highest Pass@1", report.best.as_ref().map(point));
    row("Gain", report.gain.as_ref().map(gain));
    row("Gain on unseen families", report.held_out_families_gain.as_ref().map(gain));
    row("Steps applied", Some(report.steps_applied.to_string()));
    row("Steps skipped", Some(report.steps_skipped.to_string()));
    row("Training episodes", Some(report.episodes.to_string()));
    row("Tokens trained on", Some(report.train_tokens.to_string()));
    row("Train-inference KL", report.kl_train_infer.map(small));
    row("Train-inference KL without replay", report.means.kl_train_infer_no_replay.map(small));
    row("KL without replay / with", report.kl_ratio.map(|r| format!("{r:.2}×")));
    row("F(2)", report.means.extreme_tokens.map(small));
    row("F(2) without replay", report.means.extreme_tokens_no_replay.map(small));
    row("Entropy (nats)", report.means.entropy.map(|v| format!("{v:.4}")));
    row("Gradient norm", report.means.grad_norm.map(|v| format!("{v:.4}")));
    row("Gradient norm of the routers", report.means.router_grad_norm.map(|v| format!("{v:.4}")));
    row("Episodes cut short", report.means.truncated.map(percent));
    row("Staleness (versions)", report.means.staleness.map(|v| format!("{v:.2}")));
    row("Prefix cache hits", report.means.prefix_cache_hit_rate.map(percent));
    row("Time", Some(format!("{:.0} s", report.seconds)));
    rows
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::summary::StepMeans;
    use orchestrate_handoff::protocol::{HalfDecades, ProbabilityGrid};
    use orchestrate_metrics::collapse::{Collapse, Symptom};
    use orchestrate_types::RunId;
    use serde_json::json;
    use std::collections::BTreeMap;

    fn report() -> RunReport {
        RunReport {
            quarantined: Vec::new(),
            run: RunId::generate(),
            steps_applied: 2,
            steps_skipped: 1,
            baseline: None,
            last: None,
            best: None,
            gain: Some(Gain { pass_at_1: 0.2, se: 0.04, tasks: 50 }),
            held_out_families_gain: None,
            episodes: 64,
            train_tokens: 1000,
            kl_train_infer: Some(1e-3),
            kl_ratio: Some(2.0),
            seconds: 12.0,
            collapse: None,
            means: StepMeans::default(),
        }
    }

    fn lines() -> Vec<Value> {
        vec![
            json!({"global_step": 0, "eval_pass_at_1": 0.1, "eval_pass_at_1_se": 0.03}),
            json!({"global_step": 1, "reward_mean": 0.2, "solve_rate": 0.2, "grad_norm": 1.0,
                   "kl_train_infer": 1e-3, "kl_train_infer_no_replay": null,
                   "time_rollout_s": 3.0}),
        ]
    }

    /// What a step of this version's trainer adds.
    fn measured() -> Value {
        let mut sizes = HalfDecades::default();
        sizes.add(1e-3);
        let grid = ProbabilityGrid::new(&BTreeMap::from([((0, 0), 90), ((3, 4), 10)]));
        json!({"global_step": 2, "logprob_diff_histogram": sizes,
               "sequence_logprob_diff_histogram": sizes, "probability_grid": grid,
               "probability_grid_no_replay": grid, "router_disagreement_histogram": [0.9, 0.1],
               "router_disagreement_by_layer": [0.1, 0.2], "token_disagreement_histogram": [0.8, 0.2],
               "sequence_disagreement_histogram": sizes, "expert_load": [[1.5, 0.5], [1.0, 1.0]]})
    }

    #[test]
    fn the_page_stands_alone_and_has_every_chart_with_data() {
        let page = write_html(&report(), &lines());
        // Pass@1, reward, KL, gradient, seconds: a figure each.
        assert_eq!(page.matches("<figure>").count(), 5);
        assert!(page.contains("+20.0 ± 4.0 points") && page.contains("2.00×"));
        assert!(page.contains("prefers-color-scheme:dark"));
        assert!(!page.contains("http") && !page.contains("<script") && !page.contains("NaN"));
        assert!(page.contains("no sign of collapse"));
    }

    #[test]
    fn histograms_and_maps_are_drawn_where_the_trainer_counts() {
        let mut lines = lines();
        lines.push(measured());
        let page = write_html(&report(), &lines);
        for title in [
            "Probabilities, as trained",
            "Probabilities, without replay",
            "Tokens by |ln ρ|",
            "Sequences by mean |ln ρ|",
            "Disagreement by layer",
            "Routers by experts that differ",
            "Tokens by routers that differ",
            "Sequences by share of routers",
            "Expert load",
        ] {
            assert!(page.contains(&format!("<figcaption>{title}")), "{title}");
        }
        assert!(!page.contains("NaN") && !page.contains("inf\""));
    }

    #[test]
    fn a_collapse_is_named_with_its_step_and_marked_in_the_charts() {
        let mut report = report();
        let symptom = Symptom::LowReward { best: 0.5 };
        report.collapse = Some(Collapse { step: 1, symptom, last_good: Some(7) });
        let page = write_html(&report, &lines());
        assert!(page.contains("collapsed at step 1") && page.contains("policy version 7"));
        assert!(page.contains("class=\"mark\""));
    }
}
