//! Figures of the trainer's counts over the whole run: scatter of probabilities, histograms, expert load.
#![expect(clippy::disallowed_methods, reason = "positions and labels of a chart")]

use crate::plot::{Bars, Caption, Grid, Scale};
use crate::series::steps;
use orchestrate_handoff::protocol::{HalfDecades, ProbabilityGrid};
use orchestrate_metrics::{MetricsLine, StepLine};
use std::collections::BTreeMap;

/// Takes one histogram from a step's line; empty if it has none.
type Histogram = fn(&StepLine) -> Vec<f64>;

fn half_decades(histogram: Option<&HalfDecades>) -> Vec<f64> {
    let counts = histogram.map(HalfDecades::counts).unwrap_or_default();
    counts.iter().map(|&count| count as f64).collect()
}

fn numbers(histogram: Option<&Vec<f64>>) -> Vec<f64> {
    histogram.cloned().unwrap_or_default()
}

/// The histogram of the whole run: the sum over its steps.
fn sums(lines: &[MetricsLine], histogram: Histogram) -> Vec<f64> {
    let mut sum = Vec::new();
    for found in steps(lines).map(histogram) {
        sum.resize(sum.len().max(found.len()), 0.0);
        for (slot, value) in sum.iter_mut().zip(found) {
            *slot += value;
        }
    }
    sum
}

/// Like [`sums`], as shares of the total.
fn shares(lines: &[MetricsLine], histogram: Histogram) -> Vec<f64> {
    let mut sums = sums(lines, histogram);
    let all: f64 = sums.iter().sum();
    for n in &mut sums {
        *n /= all.max(f64::MIN_POSITIVE);
    }
    sums
}

/// Bars over half decades, from the first to the last bin in which any series has a value above 0.
fn half_decade_bars(
    caption: Caption<'_>,
    scale: Scale,
    mut series: Vec<(&str, Vec<f64>)>,
) -> String {
    let least = HalfDecades::EDGES.first().map(|edge| format!("<{edge:.0e}"));
    let edges = HalfDecades::EDGES.iter().map(|edge| format!("{edge:.0e}"));
    let mut bins: Vec<String> = least.into_iter().chain(edges).collect();
    let used = |bin: &usize| series.iter().any(|s| s.1.get(*bin).is_some_and(|v| *v > 0.0));
    let all = 0..bins.len();
    let (Some(first), Some(last)) = (all.clone().find(used), all.rev().find(used)) else {
        return String::new();
    };
    bins = bins.drain(first..=last).collect();
    for (_, values) in &mut series {
        *values = values.iter().skip(first).take(last + 1 - first).copied().collect();
    }
    Bars { caption, scale, bins, series }.draw()
}

/// Engine against trainer: scatter of probabilities, and sizes of `|ln ρ|`.
pub(super) fn probabilities(lines: &[MetricsLine]) -> Vec<String> {
    let sizes = |title, note, with: Histogram, without: Histogram| {
        let series =
            vec![("as trained", shares(lines, with)), ("without replay", shares(lines, without))];
        half_decade_bars(Caption { title, note }, Scale::Log, series)
    };
    vec![
        scatter(lines, "Probabilities, as trained", |l| l.probability_grid.as_ref()),
        scatter(lines, "Probabilities, without replay", |l| l.probability_grid_no_replay.as_ref()),
        sizes(
            "Tokens by |ln ρ|",
            "Share of tokens by how far trainer and engine are apart, in half decades. Further left \
             is better; ln 2 is 0.69.",
            |l| half_decades(l.logprob_diff_histogram.as_ref()),
            |l| half_decades(l.logprob_diff_histogram_no_replay.as_ref()),
        ),
        sizes(
            "Sequences by mean |ln ρ|",
            "Share of sequences.",
            |l| half_decades(l.sequence_logprob_diff_histogram.as_ref()),
            |l| half_decades(l.sequence_logprob_diff_histogram_no_replay.as_ref()),
        ),
    ]
}

fn scatter(
    lines: &[MetricsLine],
    title: &str,
    grid: fn(&StepLine) -> Option<&ProbabilityGrid>,
) -> String {
    let mut cells: BTreeMap<(u8, u8), f64> = BTreeMap::new();
    for grid in steps(lines).filter_map(grid) {
        for &(engine, trainer, tokens) in grid.entries() {
            *cells.entry((engine, trainer)).or_default() += tokens as f64;
        }
    }
    let bins = usize::from(ProbabilityGrid::BINS);
    let place = |bin: u8| bins.saturating_sub(usize::from(bin) + 1);
    let cells = cells.into_iter().map(|((e, t), n)| (place(e), place(t), n)).collect();
    let ticks: Vec<(f64, String)> = [1.0, 0.9, 0.5, 0.1, 0.01, 1e-4, 1e-6]
        .iter()
        .map(|p: &f64| (bins as f64 - (-p.ln()).max(0.0).sqrt() * 8.0, p.to_string()))
        .collect();
    let note = "Horizontal: probability of a token in the engine; vertical: in the trainer. All loss \
                tokens of the run; darker cells have more tokens. On the diagonal both agree.";
    let caption = Caption { title, note };
    let (below, left) = (ticks.clone(), ticks);
    Grid { caption, columns: bins, rows: bins, cells, below, left, density: true }.draw()
}

/// Engine's routes against the trainer's own, and the load of experts.
pub(super) fn routing(lines: &[MetricsLine]) -> Vec<String> {
    let by_number = |title, note, histogram: Histogram| {
        let values = shares(lines, histogram);
        let bins = (0..values.len()).map(|n| n.to_string()).collect();
        let caption = Caption { title, note };
        Bars { caption, scale: Scale::Log, bins, series: vec![("share", values)] }.draw()
    };
    vec![
        disagreement_by_layer(lines),
        by_number(
            "Routers by experts that differ",
            "Share of (token, layer) pairs by how many of their experts differ; 0 = all agree.",
            |l| numbers(l.router_disagreement_histogram.as_ref()),
        ),
        by_number(
            "Tokens by routers that differ",
            "Share of tokens by how many of their layers choose different experts.",
            |l| numbers(l.token_disagreement_histogram.as_ref()),
        ),
        half_decade_bars(
            Caption {
                title: "Sequences by share of routers that differ",
                note: "Share of sequences, in half decades; the first bin has those that do not differ.",
            },
            Scale::FromZero,
            vec![(
                "share",
                shares(lines, |l| half_decades(l.sequence_disagreement_histogram.as_ref())),
            )],
        ),
        expert_load(lines),
    ]
}

fn disagreement_by_layer(lines: &[MetricsLine]) -> String {
    let by_layer: Histogram = |l| numbers(l.router_disagreement_by_layer.as_ref());
    let measured = steps(lines).filter(|line| !by_layer(line).is_empty()).count().max(1);
    let means: Vec<f64> =
        sums(lines, by_layer).into_iter().map(|sum| sum / measured as f64).collect();
    Bars {
        caption: Caption {
            title: "Disagreement by layer",
            note: "Share of tokens whose experts differ, per MoE layer; mean over the run.",
        },
        scale: Scale::FromZero,
        bins: (0..means.len()).map(|layer| layer.to_string()).collect(),
        series: vec![("share of tokens", means)],
    }
    .draw()
}

/// The expert load of the newest step that has it.
fn expert_load(lines: &[MetricsLine]) -> String {
    let newest = steps(lines)
        .rev()
        .find_map(|line| line.expert_load.as_ref().filter(|load| !load.is_empty()));
    let Some(load) = newest else { return String::new() };
    let columns = load.iter().map(Vec::len).max().unwrap_or(0);
    let rows = load.len();
    let cells = load.iter().enumerate().flat_map(|(layer, groups)| {
        // The first layer is at the top.
        groups.iter().enumerate().map(move |(group, use_)| (group, rows - 1 - layer, *use_))
    });
    let last = columns.saturating_sub(1) as f64;
    let title = "Expert load";
    let note = "Experts from the busiest to the idlest, layers from the first (top) to the last, at \
                the newest step. An even shade is best; 1 means even use.";
    Grid {
        caption: Caption { title, note },
        columns,
        rows,
        cells: cells.collect(),
        below: vec![(0.5, "busiest".to_owned()), (last + 0.5, "idlest".to_owned())],
        left: vec![(rows as f64 - 0.5, "first".to_owned()), (0.5, "last".to_owned())],
        density: false,
    }
    .draw()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn histograms_of_steps_add_up() {
        let line = |histogram| {
            let router_disagreement_histogram = histogram;
            MetricsLine::from(StepLine { router_disagreement_histogram, ..StepLine::default() })
        };
        let lines = [line(Some(vec![1.0, 3.0])), line(None), line(Some(vec![1.0, 1.0, 2.0]))];
        let found = shares(&lines, |l| numbers(l.router_disagreement_histogram.as_ref()));
        assert_eq!(found, [0.25, 0.5, 0.25]);
        let none = shares(&lines, |l| half_decades(l.logprob_diff_histogram.as_ref()));
        assert_eq!(none, [] as [f64; 0]);
    }

    #[test]
    fn half_decades_are_shown_from_the_first_used_bin_to_the_last() {
        let caption = Caption { title: "sizes", note: "" };
        let mut values = vec![0.0; 18];
        (values[3], values[5]) = (0.5, 0.5);
        let svg = half_decade_bars(caption, Scale::Log, vec![("a", values), ("b", vec![])]);
        // Half decades from 1e-6 to 1e-5.
        assert!(svg.contains(">1e-6</text>") && svg.contains(">1e-5</text>"), "{svg}");
        assert_eq!(svg.matches("text-anchor=\"middle\"").count(), 3, "{svg}");
        assert_eq!(half_decade_bars(caption, Scale::Log, vec![("b", vec![])]), "");
    }
}
