//! Lines of `metrics.jsonl` as series over global steps, and the charts that the page of a run and the
//! page of a comparison share.

use crate::plot::Scale;
use orchestrate_metrics::{ExtremeTokens, MetricsLine, StepLine, Threshold};
use orchestrate_types::counted;

/// Takes one value from a step's line; `None` if it has none.
pub(crate) type Read = fn(&StepLine) -> Option<f64>;

/// `(global step, value)` of every step that has the value.
pub(crate) fn points(lines: &[MetricsLine], read: Read) -> Vec<(f64, f64)> {
    let point = |line: &StepLine| Some((f64::from(line.global_step), read(line)?));
    steps(lines).filter_map(point).collect()
}

/// The lines of steps.
pub(crate) fn steps(lines: &[MetricsLine]) -> impl DoubleEndedIterator<Item = &StepLine> {
    lines.iter().filter_map(MetricsLine::step)
}

/// A mean over steps, and the number of steps that it covers.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct StepMean {
    pub(crate) mean: f64,
    /// Steps that have the value.
    pub(crate) steps: usize,
    /// All steps.
    pub(crate) of: usize,
}

impl StepMean {
    /// Computes the mean; `None` if no step has the value.
    pub(crate) fn new(lines: &[MetricsLine], read: Read) -> Option<Self> {
        let values: Vec<f64> = steps(lines).filter_map(read).collect();
        (!values.is_empty()).then(|| Self {
            mean: values.iter().sum::<f64>() / values.len() as f64,
            steps: values.len(),
            of: steps(lines).count(),
        })
    }

    /// The mean as formatted by `write`, with the number of steps if some have no value.
    pub(crate) fn text(self, write: impl Fn(f64) -> String) -> String {
        let text = write(self.mean);
        if self.steps == self.of {
            text
        } else {
            format!("{text} ({} of {})", self.steps, counted(self.of, "step"))
        }
    }
}

fn beyond(shares: Option<&ExtremeTokens>, threshold: Threshold) -> Option<f64> {
    shares.and_then(|shares| shares.beyond(threshold))
}

/// F(2) as trained.
pub(crate) fn extreme_tokens(line: &StepLine) -> Option<f64> {
    beyond(line.extreme_token_fraction.as_ref(), Threshold::T2)
}

/// F(2) without replay.
pub(crate) fn extreme_tokens_no_replay(line: &StepLine) -> Option<f64> {
    beyond(line.extreme_token_fraction_no_replay.as_ref(), Threshold::T2)
}

/// A chart of a measurement at every step.
pub(crate) struct Measure {
    pub(crate) title: &'static str,
    pub(crate) note: &'static str,
    pub(crate) scale: Scale,
    /// Names and values. A comparison shows the first series only.
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

/// Charts of how well the policy does.
pub(crate) const LEARNING: &[Measure] = &[
    measure(
        "Training reward",
        "Over all sampled episodes, including dropped groups.",
        Scale::FromZero,
        &[("mean reward", |l| l.reward_mean), ("solve rate", |l| l.solve_rate)],
    ),
    measure(
        "Entropy (nats per token)",
        "Falls as the policy becomes certain. A steep rise precedes a collapse.",
        Scale::FromZero,
        &[("entropy", |l| l.entropy)],
    ),
    measure(
        "Tokens written per episode",
        "Response tokens, mean.",
        Scale::FromZero,
        &[("response tokens", |l| l.response_tokens_mean)],
    ),
    measure(
        "Truncated episodes",
        "Share that was ended by a limit of turns, tokens, time or size.",
        Scale::FromZero,
        &[("truncated", StepLine::truncated_share)],
    ),
];

/// Charts of how far trainer and engine are apart.
pub(crate) const MISMATCH: &[Measure] = &[
    measure(
        "Train-inference KL (k3, nats)",
        "Lower is better. The distance between the lines is what replay saves.",
        Scale::Log,
        &[("as trained", |l| l.kl_train_infer), ("without replay", |l| l.kl_train_infer_no_replay)],
    ),
    measure(
        "F(2): tokens with ρ above 2 or below 1/2",
        "Share of tokens that are twice as (un)likely in the trainer as in the engine. Above 0.1 a \
         run has collapsed. Zero is not drawn.",
        Scale::Log,
        &[("as trained", extreme_tokens), ("without replay", extreme_tokens_no_replay)],
    ),
    measure(
        "Routers that choose different experts",
        "Share of (token, layer) pairs whose expert set differs from the engine's, without replay.",
        Scale::FromZero,
        &[("routers", |l| l.router_disagreement), ("tokens with any", |l| l.token_disagreement)],
    ),
];

/// Charts of mismatch that only the page of one run has.
pub(crate) const MISMATCH_DETAIL: &[Measure] = &[
    measure(
        "F(τ): share of extreme tokens, as trained",
        "Share of tokens with max(ρ, 1/ρ) above τ. Zero is not drawn.",
        Scale::Log,
        &[
            ("τ = 1.05", |l| beyond(l.extreme_token_fraction.as_ref(), Threshold::T1_05)),
            ("τ = 1.2", |l| beyond(l.extreme_token_fraction.as_ref(), Threshold::T1_2)),
            ("τ = 1.5", |l| beyond(l.extreme_token_fraction.as_ref(), Threshold::T1_5)),
            ("τ = 2", extreme_tokens),
            ("τ = 5", |l| beyond(l.extreme_token_fraction.as_ref(), Threshold::T5)),
            ("τ = 10", |l| beyond(l.extreme_token_fraction.as_ref(), Threshold::T10)),
        ],
    ),
    measure(
        "Mean difference of probabilities",
        "Below 0.005 is healthy, above 0.01 points to the engine.",
        Scale::FromZero,
        &[("as trained", |l| l.prob_diff_mean), ("without replay", |l| l.prob_diff_mean_no_replay)],
    ),
    measure(
        "Routes that left the replayed ones",
        "Share of (token, layer) pairs in which the router's own choice differs from the replayed \
         one at the last mini step.",
        Scale::FromZero,
        &[("drift", |l| l.route_drift)],
    ),
];

/// Charts of the optimizer.
pub(crate) const OPTIMIZER: &[Measure] = &[
    measure(
        "Gradient norm",
        "Before clipping. The routers' part is also drawn separately.",
        Scale::FromZero,
        &[("all weights", |l| l.grad_norm), ("routers", |l| l.router_grad_norm)],
    ),
    measure(
        "Clipped tokens",
        "Share of loss tokens whose update the loss clipped.",
        Scale::FromZero,
        &[
            ("clipped", |l| l.clip_fraction),
            ("by the correction", |l| Some(l.rollout_ratio.as_ref()?.corrected)),
        ],
    ),
    measure(
        "Staleness (policy versions)",
        "Weight updates between the oldest token of a trained episode and the weights it trained.",
        Scale::FromZero,
        &[
            ("mean", |l| l.staleness_mean),
            ("largest", |l| l.staleness_max.map(|versions| versions as f64)),
        ],
    ),
];

/// Charts of what a step costs.
pub(crate) const COST: &[Measure] = &[
    measure(
        "Seconds per step",
        "Wall time.",
        Scale::FromZero,
        &[
            ("all", StepLine::seconds),
            ("rollout", |l| l.time_rollout_s),
            ("training", |l| l.time_train_s),
            ("weight sync", |l| l.time_sync_s),
        ],
    ),
    measure(
        "Prefix cache hits",
        "Share of prompt tokens that were in the engine's cache, and that could have been.",
        Scale::FromZero,
        &[
            ("hits", |l| l.prefix_cache_hit_rate),
            ("possible", |l| l.prefix_cache_hit_rate_possible),
        ],
    ),
];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn means_show_the_number_of_steps_they_cover() {
        let line = |entropy| MetricsLine::from(StepLine { entropy, ..StepLine::default() });
        let lines = [line(Some(1.0)), line(None), line(Some(3.0))];
        let mean = StepMean::new(&lines, |l| l.entropy).unwrap();
        assert_eq!(mean, StepMean { mean: 2.0, steps: 2, of: 3 });
        assert_eq!(mean.text(|v| v.to_string()), "2 (2 of 3 steps)");
        let whole = StepMean::new(&lines[..1], |l| l.entropy).unwrap();
        assert_eq!(whole.text(|v| v.to_string()), "1");
        assert_eq!(StepMean::new(&lines, |l| l.loss), None);
    }
}
