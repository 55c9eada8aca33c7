//! What lines of `metrics.jsonl` say over the steps: values, means, and the charts that a page of one
//! run and a page of many have in common.

use crate::plot::Scale;
use serde_json::Value;

/// Takes one value from a line; `None` where it has none.
pub(crate) type Read = fn(&Value) -> Option<f64>;

/// A number by its JSON pointer.
pub(crate) fn number(line: &Value, pointer: &str) -> Option<f64> {
    line.pointer(pointer).and_then(Value::as_f64)
}

/// `(step, value)` of every line that has one.
pub(crate) fn points(lines: &[Value], read: Read) -> Vec<(f64, f64)> {
    let point = |line: &Value| Some((number(line, "/global_step")?, read(line)?));
    lines.iter().filter_map(point).collect()
}

/// Mean over the lines that have a value.
pub(crate) fn mean(lines: &[Value], read: Read) -> Option<f64> {
    let values: Vec<f64> = lines.iter().filter_map(read).collect();
    (!values.is_empty()).then(|| values.iter().sum::<f64>() / values.len() as f64)
}

/// Share of the step's episodes that a limit cut short.
pub(crate) fn truncated(line: &Value) -> Option<f64> {
    let episodes = number(line, "/episodes").filter(|n| *n > 0.0)?;
    Some(number(line, "/truncated_episodes")? / episodes)
}

/// Wall time of a step, seconds.
pub(crate) fn step_seconds(line: &Value) -> Option<f64> {
    let part = |pointer| number(line, pointer).unwrap_or(0.0);
    Some(number(line, "/time_rollout_s")? + part("/time_train_s") + part("/time_sync_s"))
}

/// Something that is measured at every step, and how to look at it.
pub(crate) struct Measure {
    pub(crate) title: &'static str,
    pub(crate) note: &'static str,
    pub(crate) scale: Scale,
    /// Names and values; the first is the one that runs are compared by.
    pub(crate) series: &'static [(&'static str, Read)],
}

const fn measure(
    title: &'static str,
    note: &'static str,
    scale: Scale,
    series: &'static [(&'static str, Read)],
) -> Measure {
    Measure { title, note, scale, series }
}

/// How well the policy does.
pub(crate) const LEARNING: &[Measure] = &[
    measure(
        "Training reward",
        "Over all sampled episodes, dropped groups included.",
        Scale::FromZero,
        &[
            ("mean reward", |l| number(l, "/reward_mean")),
            ("solve rate", |l| number(l, "/solve_rate")),
        ],
    ),
    measure(
        "Entropy (nats per token)",
        "Falling: the policy grows sure of itself. Rising steeply: it falls apart.",
        Scale::FromZero,
        &[("entropy", |l| number(l, "/entropy"))],
    ),
    measure(
        "Tokens written per episode",
        "Response tokens, mean.",
        Scale::FromZero,
        &[("response tokens", |l| number(l, "/response_tokens_mean"))],
    ),
    measure(
        "Episodes cut short",
        "Share that ended at a limit of turns, tokens or time.",
        Scale::FromZero,
        &[("truncated", truncated)],
    ),
];

/// How far trainer and sampler are apart.
pub(crate) const MISMATCH: &[Measure] = &[
    measure(
        "Train-inference KL (k3, nats)",
        "Lower is better; what replay saves is the distance between the lines.",
        Scale::Log,
        &[
            ("as trained", |l| number(l, "/kl_train_infer")),
            ("without replay", |l| number(l, "/kl_train_infer_no_replay")),
        ],
    ),
    measure(
        "F(2): tokens with ρ above 2 or below 1/2",
        "Share of tokens that are twice as (un)likely in the trainer. Above 0.1 a run is lost. Zero \
         is not drawn.",
        Scale::Log,
        &[
            ("as trained", |l| number(l, "/extreme_token_fraction/2")),
            ("without replay", |l| number(l, "/extreme_token_fraction_no_replay/2")),
        ],
    ),
    measure(
        "Routers that choose other experts",
        "Share of (token, layer) pairs whose expert set differs from the engine's, without replay.",
        Scale::FromZero,
        &[
            ("routers", |l| number(l, "/router_disagreement")),
            ("tokens with any", |l| number(l, "/token_disagreement")),
        ],
    ),
];

/// What only a page of one run shows of the same.
pub(crate) const MISMATCH_DETAIL: &[Measure] = &[
    measure(
        "F(τ): share of extreme tokens, as trained",
        "Share of tokens with max(ρ, 1/ρ) above τ. Zero is not drawn.",
        Scale::Log,
        &[
            ("τ = 1.05", |l| number(l, "/extreme_token_fraction/1.05")),
            ("τ = 1.2", |l| number(l, "/extreme_token_fraction/1.2")),
            ("τ = 1.5", |l| number(l, "/extreme_token_fraction/1.5")),
            ("τ = 2", |l| number(l, "/extreme_token_fraction/2")),
            ("τ = 5", |l| number(l, "/extreme_token_fraction/5")),
            ("τ = 10", |l| number(l, "/extreme_token_fraction/10")),
        ],
    ),
    measure(
        "Difference of probabilities, mean",
        "Below 0.005 is healthy, above 0.01 points to the engine.",
        Scale::FromZero,
        &[
            ("as trained", |l| number(l, "/prob_diff_mean")),
            ("without replay", |l| number(l, "/prob_diff_mean_no_replay")),
        ],
    ),
    measure(
        "Routes that left the replayed ones",
        "Share of (token, layer) pairs whose own choice has changed by the last mini step.",
        Scale::FromZero,
        &[("drift", |l| number(l, "/route_drift"))],
    ),
];

/// What the optimizer does.
pub(crate) const OPTIMISER: &[Measure] = &[
    measure(
        "Gradient norm",
        "Before clipping. The routers' part is drawn apart.",
        Scale::FromZero,
        &[
            ("all weights", |l| number(l, "/grad_norm")),
            ("routers", |l| number(l, "/router_grad_norm")),
        ],
    ),
    measure(
        "Clipped tokens",
        "Share of loss tokens whose update the loss clipped.",
        Scale::FromZero,
        &[
            ("clipped", |l| number(l, "/clip_fraction")),
            ("by the correction", |l| number(l, "/rollout_ratio/corrected")),
        ],
    ),
    measure(
        "Staleness (policy versions)",
        "By how many updates the oldest token of a trained episode is behind.",
        Scale::FromZero,
        &[("mean", |l| number(l, "/staleness_mean")), ("largest", |l| number(l, "/staleness_max"))],
    ),
];

/// What it costs.
pub(crate) const COST: &[Measure] = &[
    measure(
        "Seconds per step",
        "Wall time.",
        Scale::FromZero,
        &[
            ("all", step_seconds),
            ("rollout", |l| number(l, "/time_rollout_s")),
            ("training", |l| number(l, "/time_train_s")),
            ("weight update", |l| number(l, "/time_sync_s")),
        ],
    ),
    measure(
        "Prefix cache hits",
        "Share of prompt tokens that the engine had in its cache, and of those it could have had.",
        Scale::FromZero,
        &[
            ("hits", |l| number(l, "/prefix_cache_hit_rate")),
            ("possible", |l| number(l, "/prefix_cache_hit_rate_possible")),
        ],
    ),
];

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn shares_and_sums_need_their_parts() {
        let line = json!({"episodes": 8, "truncated_episodes": 2, "time_rollout_s": 3.0,
                          "time_train_s": 1.5, "time_sync_s": null});
        assert_eq!(truncated(&line), Some(0.25));
        assert_eq!(step_seconds(&line), Some(4.5));
        let evaluation = json!({"global_step": 3, "episodes": 0, "truncated_episodes": 0});
        assert_eq!((truncated(&evaluation), step_seconds(&evaluation)), (None, None));
    }

    #[test]
    fn means_are_over_the_lines_that_have_a_value() {
        let lines = [json!({"entropy": 1.0}), json!({"entropy": null}), json!({"entropy": 3.0})];
        assert_eq!(mean(&lines, |l| number(l, "/entropy")), Some(2.0));
        assert_eq!(mean(&lines, |l| number(l, "/loss")), None);
    }
}
