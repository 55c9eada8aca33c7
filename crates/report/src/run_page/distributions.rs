//! What the trainer counted, over the whole run: scatter, histograms, expert load.

use crate::plot::{Bars, Caption, Grid, Scale};
use orchestrate_handoff::protocol::{HalfDecades, ProbabilityGrid};
use serde_json::Value;
use std::collections::BTreeMap;

/// Histograms of the whole run: counts of its steps added up.
fn counts(lines: &[Value], pointer: &str) -> Vec<f64> {
    let mut sum = Vec::new();
    for found in lines.iter().filter_map(|l| l.pointer(pointer)?.as_array()) {
        sum.resize(sum.len().max(found.len()), 0.0);
        for (slot, value) in sum.iter_mut().zip(found) {
            *slot += value.as_f64().unwrap_or(0.0);
        }
    }
    sum
}

/// Counts as shares of their sum.
fn shares(lines: &[Value], pointer: &str) -> Vec<f64> {
    let mut counts = counts(lines, pointer);
    let all: f64 = counts.iter().sum();
    for n in &mut counts {
        *n /= all.max(f64::MIN_POSITIVE);
    }
    counts
}

/// Bars over half decades, from the first place to the last that any series has something in.
fn by_size(caption: Caption<'_>, scale: Scale, mut series: Vec<(&str, Vec<f64>)>) -> String {
    let least = HalfDecades::EDGES.first().map(|edge| format!("<{edge:.0e}"));
    let edges = HalfDecades::EDGES.iter().map(|edge| format!("{edge:.0e}"));
    let mut places: Vec<String> = least.into_iter().chain(edges).collect();
    let used = |place: &usize| series.iter().any(|s| s.1.get(*place).is_some_and(|v| *v > 0.0));
    let all = 0..places.len();
    let (Some(first), Some(last)) = (all.clone().find(used), all.rev().find(used)) else {
        return String::new();
    };
    places = places.drain(first..=last).collect();
    for (_, values) in &mut series {
        *values = values.iter().skip(first).take(last + 1 - first).copied().collect();
    }
    Bars { caption, scale, places, series }.draw()
}

pub(super) fn probabilities(lines: &[Value]) -> Vec<String> {
    let scatter = |title, pointer| {
        let mut cells: BTreeMap<(u8, u8), f64> = BTreeMap::new();
        for value in lines.iter().filter_map(|l| l.get(pointer)) {
            let grid: ProbabilityGrid = serde_json::from_value(value.clone()).unwrap_or_default();
            for &(sampler, trainer, tokens) in grid.entries() {
                *cells.entry((sampler, trainer)).or_default() += tokens as f64;
            }
        }
        let bins = usize::from(ProbabilityGrid::BINS);
        let place = |bin: u8| bins.saturating_sub(usize::from(bin) + 1);
        let cells = cells.into_iter().map(|((s, t), n)| (place(s), place(t), n)).collect();
        let ticks: Vec<(f64, String)> = [1.0, 0.9, 0.5, 0.1, 0.01, 1e-4, 1e-6]
            .iter()
            .map(|p: &f64| (bins as f64 - (-p.ln()).max(0.0).sqrt() * 8.0, p.to_string()))
            .collect();
        let note = "Across: probability of a token in the engine; up: in the trainer. All of the \
                    run's loss tokens; the darker, the more. On the line both agree.";
        let caption = Caption { title, note };
        let (below, beside) = (ticks.clone(), ticks);
        Grid { caption, columns: bins, rows: bins, cells, below, beside, density: true }.draw()
    };
    let sizes = |title, note, pair: [&str; 2]| {
        let [with, without] = pair.map(|pointer| shares(lines, pointer));
        let series = vec![("as trained", with), ("without replay", without)];
        by_size(Caption { title, note }, Scale::Log, series)
    };
    vec![
        scatter("Probabilities, as trained", "probability_grid"),
        scatter("Probabilities, without replay", "probability_grid_no_replay"),
        sizes(
            "Tokens by |ln ρ|",
            "Share of tokens by how far trainer and engine are apart, in half decades. Further left \
             is better; ln 2 is 0.69.",
            ["/logprob_diff_histogram", "/logprob_diff_histogram_no_replay"],
        ),
        sizes(
            "Sequences by mean |ln ρ|",
            "Share of sequences.",
            ["/sequence_logprob_diff_histogram", "/sequence_logprob_diff_histogram_no_replay"],
        ),
    ]
}

pub(super) fn routing(lines: &[Value]) -> Vec<String> {
    let by_number = |title, note, pointer| {
        let values = shares(lines, pointer);
        let places = (0..values.len()).map(|n| n.to_string()).collect();
        let caption = Caption { title, note };
        Bars { caption, scale: Scale::Log, places, series: vec![("share", values)] }.draw()
    };
    let measured = lines.iter().filter(|l| l.pointer("/router_disagreement_by_layer/0").is_some());
    let steps = measured.count().max(1) as f64;
    let mut by_layer = counts(lines, "/router_disagreement_by_layer");
    for sum in &mut by_layer {
        *sum /= steps;
    }
    let layers = Bars {
        caption: Caption {
            title: "Disagreement by layer",
            note: "Share of tokens whose experts differ, per MoE layer; mean over the run.",
        },
        scale: Scale::FromZero,
        places: (0..by_layer.len()).map(|layer| layer.to_string()).collect(),
        series: vec![("share of tokens", by_layer)],
    };
    vec![
        layers.draw(),
        by_number(
            "Routers by experts that differ",
            "Share of (token, layer) pairs by how many of their experts are others; 0 = all agree.",
            "/router_disagreement_histogram",
        ),
        by_number(
            "Tokens by routers that differ",
            "Share of tokens by how many of their layers choose otherwise.",
            "/token_disagreement_histogram",
        ),
        by_size(
            Caption {
                title: "Sequences by share of routers that differ",
                note: "Share of sequences, in half decades; the first place holds those where none does.",
            },
            Scale::FromZero,
            vec![("share", shares(lines, "/sequence_disagreement_histogram"))],
        ),
        expert_load(lines),
    ]
}

/// Of the newest step that has it.
fn expert_load(lines: &[Value]) -> String {
    let newest = lines.iter().rev().find_map(|l| {
        let load: Vec<Vec<f64>> = serde_json::from_value(l.get("expert_load")?.clone()).ok()?;
        (!load.is_empty()).then_some(load)
    });
    let load = newest.unwrap_or_default();
    let columns = load.iter().map(Vec::len).max().unwrap_or(0);
    let rows = load.len();
    let cells = load.iter().enumerate().flat_map(|(layer, groups)| {
        // The first layer is on top.
        groups.iter().enumerate().map(move |(group, use_)| (group, rows - 1 - layer, *use_))
    });
    let last = columns.saturating_sub(1) as f64;
    let title = "Expert load";
    let note = "Experts from the busiest to the idlest, layers from the first (top) to the last; at \
                the newest step. The more even the shade, the better; 1 is even use.";
    Grid {
        caption: Caption { title, note },
        columns,
        rows,
        cells: cells.collect(),
        below: vec![(0.5, "busiest".to_owned()), (last + 0.5, "idlest".to_owned())],
        beside: vec![(rows as f64 - 0.5, "first".to_owned()), (0.5, "last".to_owned())],
        density: false,
    }
    .draw()
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn histograms_of_steps_add_up() {
        let lines = [json!({"h": [1, 3]}), json!({"h": null}), json!({"h": [1, 1, 2]})];
        assert_eq!(shares(&lines, "/h"), [0.25, 0.5, 0.25]);
        assert_eq!(shares(&lines, "/none"), [] as [f64; 0]);
    }

    #[test]
    fn sizes_are_shown_from_the_first_to_the_last_there_are() {
        let caption = Caption { title: "sizes", note: "" };
        let mut values = vec![0.0; 18];
        (values[3], values[5]) = (0.5, 0.5);
        let svg = by_size(caption, Scale::Log, vec![("a", values), ("b", vec![])]);
        // Half decades from 1e-6 to 1e-5.
        assert!(svg.contains(">1e-6</text>") && svg.contains(">1e-5</text>"), "{svg}");
        assert_eq!(svg.matches("text-anchor=\"middle\"").count(), 3, "{svg}");
        assert_eq!(by_size(caption, Scale::Log, vec![("b", vec![])]), "");
    }
}
