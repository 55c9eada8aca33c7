//! `report.html`: one run as a page, for people who would rather look than read.

mod distributions;

use crate::page::{Tile, document, escape, section, table, tiles};
use crate::plot::{Caption, Lines, Scale, Series};
use crate::series::{
    COST, LEARNING, MISMATCH, MISMATCH_DETAIL, Measure, OPTIMIZER, Read, StepMean, extreme_tokens,
    extreme_tokens_no_replay, points,
};
use crate::summary::{EvalPoint, Gain, RunReport};
use orchestrate_metrics::{EvalLine, MetricsLine, StepLine, detect_collapse};
use orchestrate_types::counted;
use std::fmt::Write;

/// Half width of a 95 % interval, in standard errors.
const INTERVAL: f64 = 1.96;
/// Warnings that are written out; of the others only the number is.
const WARNINGS: usize = 5;

/// A run as one self-contained page: verdict, numbers and charts, without scripts or network. `lines`
/// are those of its `metrics.jsonl`.
pub fn run_page(report: &RunReport, lines: &[MetricsLine]) -> String {
    let mut body = verdict(report, lines);
    body.push_str(&tiles(&headline(report)));
    let mark = report.collapse.as_ref();
    let mark = mark.map(|c| (f64::from(c.step), "collapse"));
    let charts = |measures: &[Measure]| -> Vec<String> {
        measures.iter().map(|measure| measure_chart(measure, lines, mark)).collect()
    };
    let mut learning = vec![evaluation_chart(lines)];
    learning.extend(charts(LEARNING));
    body.push_str(&section("Learning", &learning));
    let mut mismatch = charts(MISMATCH);
    mismatch.extend(charts(MISMATCH_DETAIL));
    mismatch.extend(distributions::probabilities(lines));
    body.push_str(&section("Trainer against engine", &mismatch));
    body.push_str(&section("Routing", &distributions::routing(lines)));
    body.push_str(&section("Optimizer", &charts(OPTIMIZER)));
    body.push_str(&section("Time", &charts(COST)));
    body.push_str("<h2>Numbers</h2>\n");
    body.push_str(&table(&[], &numbers(report, lines)));
    document(&format!("Run {}", report.run), &body)
}

fn verdict(report: &RunReport, lines: &[MetricsLine]) -> String {
    let mut out = match &report.collapse {
        None => {
            let (class, mark) = if report.steps() == 0 { ("", "") } else { (" good", "✓ ") };
            format!("<p class=\"verdict{class}\">{mark}{}</p>\n", report.without_collapse())
        }
        Some(collapse) => {
            let weights = match collapse.last_good {
                Some(version) => format!("the weights before are policy version {version}"),
                None => "the weights before are the starting policy".to_owned(),
            };
            let symptom = escape(&collapse.symptom.to_string());
            format!(
                "<p class=\"verdict bad\">✗ collapsed at step {}: {symptom}; {weights}</p>\n",
                collapse.step
            )
        }
    };
    let (_, warnings) = detect_collapse(lines);
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

fn gain_in_points(gain: &Gain) -> String {
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
        tile("Gain", gain_in_points(gain), format!("paired over {}", counted(gain.tasks, "task")));
    }
    let steps = report.steps();
    tile("Steps", steps.to_string(), format!("{} without an update", report.steps_skipped));
    if let Some(kl) = report.kl_train_infer {
        let ratio = report.kl_ratio.map(|r| format!("{r:.2}× without replay"));
        tile("Train-inference KL", format!("{kl:.2e}"), ratio.unwrap_or_default());
    }
    if let Some(share) = report.means.router_disagreement {
        tile("Routers that differ", percent(share), "in the trainer's own choice".to_owned());
    }
    let each = report.means.step_seconds.map(|s| format!("{s:.1} s per step"));
    tile("Time", format!("{:.0} s", report.seconds), each.unwrap_or_default());
    out
}

fn measure_chart(measure: &Measure, lines: &[MetricsLine], mark: Option<(f64, &str)>) -> String {
    let series = measure.series.iter().enumerate().map(|(style, (name, read))| {
        let points = points(lines, *read).into_iter().map(|(x, y)| (x, y, 0.0)).collect();
        Series { name: (*name).to_owned(), style, faint: false, points }
    });
    let caption = Caption { title: measure.title, note: measure.note };
    Lines { caption, scale: measure.scale, series: series.collect(), mark }.draw()
}

fn evaluation_chart(lines: &[MetricsLine]) -> String {
    // Pass@1, and its standard error if it has one.
    type Value = fn(&EvalLine) -> (Option<f64>, Option<f64>);
    let series = |style, name: &str, value: Value| {
        let point = |line: &EvalLine| {
            let (pass, error) = value(line);
            Some((f64::from(line.global_step), pass?, error.unwrap_or(0.0) * INTERVAL))
        };
        let points = lines.iter().filter_map(MetricsLine::evaluation).filter_map(point).collect();
        Series { name: name.to_owned(), style, faint: false, points }
    };
    let all = vec![
        series(0, "held out", |l| (l.eval_pass_at_1, l.eval_pass_at_1_se)),
        series(1, "unseen families", |l| {
            (l.eval_held_out_families_pass_at_1, l.eval_held_out_families_pass_at_1_se)
        }),
        series(2, "pass@k", |l| (l.eval_pass_at_k, None)),
    ];
    let note = "Bars are 95 % intervals over tasks. Every evaluation uses the same seeds, so the \
                difference of two is known better than each of them.";
    let caption = Caption { title: "Evaluation Pass@1", note };
    Lines { caption, scale: Scale::FromZero, series: all, mark: None }.draw()
}

fn numbers(report: &RunReport, lines: &[MetricsLine]) -> Vec<Vec<String>> {
    let mut rows = Vec::new();
    let mut row = |name: &str, value: Option<String>| {
        rows.extend(value.map(|value| vec![name.to_owned(), value]));
    };
    let point = |p: &EvalPoint| {
        let (pass, se) = (percent(p.pass_at_1), p.pass_at_1_se * 100.0);
        format!("{pass} ± {se:.1} ({}, after step {})", counted(p.tasks, "task"), p.global_step)
    };
    let gain = |g: &Gain| format!("{} ({})", gain_in_points(g), counted(g.tasks, "task"));
    let small = |v: f64| format!("{v:.2e}");
    let four = |v: f64| format!("{v:.4}");
    let mean = |read: Read, write: fn(f64) -> String| {
        StepMean::new(lines, read).map(|mean| mean.text(write))
    };
    row("Pass@1 before", report.baseline.as_ref().map(point));
    row("Pass@1 after", report.last.as_ref().map(point));
    row("Highest Pass@1", report.best.as_ref().map(point));
    row("Gain", report.gain.as_ref().map(gain));
    row("Gain on unseen families", report.held_out_families_gain.as_ref().map(gain));
    row("Steps applied", Some(report.steps_applied.to_string()));
    row("Steps skipped", Some(report.steps_skipped.to_string()));
    row("Training episodes", Some(report.episodes.to_string()));
    row("Tokens trained on", Some(report.train_tokens.to_string()));
    row("Train-inference KL", mean(|l| l.kl_train_infer, small));
    row("Train-inference KL without replay", mean(|l| l.kl_train_infer_no_replay, small));
    row("KL without replay / with", report.kl_ratio.map(|r| format!("{r:.2}×")));
    row("F(2)", mean(extreme_tokens, small));
    row("F(2) without replay", mean(extreme_tokens_no_replay, small));
    row("Entropy (nats)", mean(|l| l.entropy, four));
    row("Gradient norm", mean(|l| l.grad_norm, four));
    row("Gradient norm of the routers", mean(|l| l.router_grad_norm, four));
    row("Truncated episodes", mean(StepLine::truncated_share, percent));
    row("Staleness (versions)", mean(|l| l.staleness_mean, |v| format!("{v:.2}")));
    row("Prefix cache hits", mean(|l| l.prefix_cache_hit_rate, percent));
    row("Time", Some(format!("{:.0} s", report.seconds)));
    rows
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::summary::StepMeans;
    use orchestrate_handoff::protocol::{HalfDecades, ProbabilityGrid};
    use orchestrate_metrics::{Collapse, Symptom};
    use orchestrate_types::RunId;
    use std::collections::BTreeMap;

    fn report() -> RunReport {
        RunReport {
            schema_version: 1,
            time: None,
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

    fn lines() -> Vec<MetricsLine> {
        let evaluation = EvalLine {
            eval_pass_at_1: Some(0.1),
            eval_pass_at_1_se: Some(0.06),
            ..EvalLine::default()
        };
        let step = StepLine {
            global_step: 1,
            reward_mean: Some(0.2),
            solve_rate: Some(0.2),
            loss: Some(0.0),
            loss_tokens: Some(9),
            grad_norm: Some(1.0),
            kl_train_infer: Some(1e-3),
            extreme_token_fraction: Some(BTreeMap::from([("2".to_owned(), 0.0)]).into()),
            time_rollout_s: Some(3.0),
            ..StepLine::default()
        };
        vec![evaluation.into(), step.into()]
    }

    /// A step with everything that a trainer counts.
    fn step_with_counts() -> MetricsLine {
        let mut sizes = HalfDecades::default();
        sizes.add(1e-3);
        let grid = ProbabilityGrid::new(&BTreeMap::from([((0, 0), 90), ((3, 4), 10)]));
        MetricsLine::from(StepLine {
            global_step: 2,
            logprob_diff_histogram: Some(sizes.clone()),
            sequence_logprob_diff_histogram: Some(sizes.clone()),
            probability_grid: Some(grid.clone()),
            probability_grid_no_replay: Some(grid),
            router_disagreement_histogram: Some(vec![0.9, 0.1]),
            router_disagreement_by_layer: Some(vec![0.1, 0.2]),
            token_disagreement_histogram: Some(vec![0.8, 0.2]),
            sequence_disagreement_histogram: Some(sizes),
            expert_load: Some(vec![vec![1.5, 0.5], vec![1.0, 1.0]]),
            ..StepLine::default()
        })
    }

    #[test]
    fn page_is_self_contained_and_has_every_chart_with_data() {
        let page = run_page(&report(), &lines());
        // One figure each for Pass@1, reward, KL, gradient and seconds.
        assert_eq!(page.matches("<figure>").count(), 5);
        assert!(page.contains("+20.0 ± 4.0 points") && page.contains("2.00×"));
        assert!(page.contains("prefers-color-scheme:dark"));
        assert!(!page.contains("http") && !page.contains("<script") && !page.contains("NaN"));
        assert!(page.contains("no sign of collapse") && !page.contains("Warnings"));
    }

    #[test]
    fn histograms_and_maps_are_drawn_where_the_trainer_counts() {
        let mut lines = lines();
        lines.push(step_with_counts());
        let page = run_page(&report(), &lines);
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
        // The second step has no KL: the mean says so.
        assert!(page.contains("1.00e-3 (1 of 2 steps)"), "{page}");
    }

    #[test]
    fn collapse_is_named_with_its_step_and_marked_in_the_charts() {
        let mut report = report();
        let symptom = Symptom::LowReward { best: 0.5 };
        report.collapse = Some(Collapse { step: 1, symptom, last_good: Some(7) });
        let page = run_page(&report, &lines());
        assert!(page.contains("collapsed at step 1") && page.contains("policy version 7"));
        assert!(page.contains("class=\"mark\""));
    }

    #[test]
    fn a_run_without_steps_is_not_said_to_be_free_of_collapse() {
        let evaluated = RunReport { steps_applied: 0, steps_skipped: 0, ..report() };
        let page = run_page(&evaluated, &lines()[..1]);
        assert!(
            page.contains(
                "<p class=\"verdict\">no step has ended, so there is no training to judge"
            )
        );
        assert!(!page.contains("no sign of collapse") && !page.contains('✓'));
        for (applied, skipped) in [(1, 0), (0, 1)] {
            let run = RunReport { steps_applied: applied, steps_skipped: skipped, ..report() };
            assert_eq!(run.without_collapse(), "no sign of collapse");
        }
    }

    #[test]
    fn step_that_collapse_detection_cannot_judge_is_a_warning() {
        let mut lines = lines();
        if let Some(MetricsLine::Step(step)) = lines.get_mut(1) {
            step.extreme_token_fraction = None;
        }
        let page = run_page(&report(), &lines);
        assert!(page.contains("Warnings: step 1: no extreme_token_fraction at 2"), "{page}");
    }
}
