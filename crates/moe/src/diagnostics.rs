//! Differences between trainer and sampler: in probabilities ([`MismatchSum`]) and in routes
//! ([`DisagreementSum`]). Both accumulate sequence by sequence.

use orchestrate_handoff::protocol::{
    Disagreement, HalfDecades, Mismatch, ProbabilityGrid, RolloutRatio,
};
use std::collections::BTreeMap;

/// Thresholds τ on `max(ρ, 1/ρ)` for which the share of extreme tokens is reported.
pub const EXTREME_RATIOS: [f64; 6] = [1.05, 1.2, 1.5, 2.0, 5.0, 10.0];

/// The k3 estimator `ρ − 1 − ln ρ` with `ln ρ = trainer − sampler`, both in nats.
pub fn k3(trainer: f64, sampler: f64) -> f64 {
    let log_ratio = trainer - sampler;
    libm::exp(log_ratio) - 1.0 - log_ratio
}

/// Whether `max(ρ, 1/ρ) > τ` (strictly), compared in log space.
pub fn is_extreme(trainer: f64, sampler: f64, tau: f64) -> bool {
    (trainer - sampler).abs() > libm::log(tau)
}

/// Accumulates the probability mismatch over loss tokens.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct MismatchSum {
    tokens: u64,
    k3: f64,
    absolute: f64,
    probabilities: f64,
    extreme: [u64; EXTREME_RATIOS.len()],
    by_size: HalfDecades,
    grid: BTreeMap<(u8, u8), u64>,
    /// Number of tokens and sum of `|ln ρ|` of the current sequence.
    sequence: (u64, f64),
    sequences: HalfDecades,
}

impl MismatchSum {
    /// Adds one loss token: its log-probs under trainer and sampler, in nats.
    pub fn add(&mut self, trainer: f64, sampler: f64) {
        self.tokens += 1;
        self.k3 += k3(trainer, sampler);
        self.absolute += (trainer - sampler).abs();
        self.probabilities += (libm::exp(trainer) - libm::exp(sampler)).abs();
        for (count, tau) in self.extreme.iter_mut().zip(EXTREME_RATIOS) {
            *count += u64::from(is_extreme(trainer, sampler, tau));
        }
        self.by_size.add((trainer - sampler).abs());
        let bins = (ProbabilityGrid::bin(sampler), ProbabilityGrid::bin(trainer));
        *self.grid.entry(bins).or_default() += 1;
        self.sequence.0 += 1;
        self.sequence.1 += (trainer - sampler).abs();
    }

    /// Ends a sequence: the tokens added since the last call belong to it.
    pub fn end_sequence(&mut self) {
        let (tokens, absolute) = std::mem::take(&mut self.sequence);
        if tokens > 0 {
            self.sequences.add(absolute / tokens as f64);
        }
    }

    /// Means over the added tokens; zeros if none were added.
    pub fn finish(&self) -> Mismatch {
        let tokens = self.tokens.max(1) as f64;
        let shares = EXTREME_RATIOS.iter().zip(self.extreme);
        Mismatch {
            kl_k3: self.k3 / tokens,
            mean_abs_logprob_diff: self.absolute / tokens,
            mean_abs_prob_diff: self.probabilities / tokens,
            extreme_token_fraction: shares
                .map(|(tau, count)| (tau.to_string(), count as f64 / tokens))
                .collect::<BTreeMap<_, _>>(),
            token_histogram: self.by_size.clone(),
            sequence_histogram: self.sequences.clone(),
            probability_grid: ProbabilityGrid::new(&self.grid),
        }
    }
}

/// Number of experts that the sampler chose for one (token, layer) and the trainer did not. The
/// order within each slice does not matter.
pub fn differing_experts(sampler: &[u16], trainer: &[u16]) -> usize {
    sampler.iter().filter(|e| !trainer.contains(e)).count()
}

/// Accumulates the route disagreement over tokens that have a routing row.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct DisagreementSum {
    routers: u64,
    routers_differing: u64,
    tokens: u64,
    tokens_differing: u64,
    sequences: u64,
    sequence_means: f64,
    sequence_expert_means: f64,
    /// Number of (token, layer) pairs, indexed by how many experts differ.
    histogram: Vec<u64>,
    /// Number of tokens whose experts differ, indexed by layer.
    by_layer: Vec<u64>,
    /// Number of tokens, indexed by how many layers differ.
    token_histogram: Vec<u64>,
    sequence_histogram: HalfDecades,
}

impl DisagreementSum {
    /// Adds one sequence: for each token with a routing row, its expert ids `[layers · top_k]`
    /// under sampler and trainer.
    pub fn add_sequence<'a>(
        &mut self,
        rows: impl Iterator<Item = (&'a [u16], &'a [u16])>,
        top_k: usize,
    ) {
        self.histogram.resize(top_k + 1, 0);
        let (mut tokens, mut differing_in_sequence, mut experts) = (0, 0, 0);
        let before = self.routers;
        for (sampler, trainer) in rows {
            let layers = sampler.chunks_exact(top_k).zip(trainer.chunks_exact(top_k));
            self.by_layer.resize(layers.len(), 0);
            self.token_histogram.resize(layers.len() + 1, 0);
            let mut differing = 0;
            for ((s, t), of_layer) in layers.zip(&mut self.by_layer) {
                let count = differing_experts(s, t);
                self.routers += 1;
                differing += usize::from(count > 0);
                *of_layer += u64::from(count > 0);
                experts += count;
                if let Some(pairs) = self.histogram.get_mut(count) {
                    *pairs += 1;
                }
            }
            self.tokens_differing += u64::from(differing > 0);
            if let Some(tokens) = self.token_histogram.get_mut(differing) {
                *tokens += 1;
            }
            differing_in_sequence += differing as u64;
            tokens += 1;
        }
        self.tokens += tokens;
        self.routers_differing += differing_in_sequence;
        if tokens > 0 {
            self.sequences += 1;
            let pairs = self.routers - before;
            self.sequence_histogram.add(differing_in_sequence as f64 / pairs.max(1) as f64);
            self.sequence_means += differing_in_sequence as f64 / tokens as f64;
            self.sequence_expert_means += experts as f64 / tokens as f64;
        }
    }

    /// Shares and means over the added sequences; zeros if none were added.
    pub fn finish(&self) -> Disagreement {
        let share = |part: u64, whole: u64| part as f64 / whole.max(1) as f64;
        Disagreement {
            router: share(self.routers_differing, self.routers),
            token: share(self.tokens_differing, self.tokens),
            sequence_mean: self.sequence_means / self.sequences.max(1) as f64,
            sequence_mean_experts: self.sequence_expert_means / self.sequences.max(1) as f64,
            histogram: self.histogram.iter().map(|&n| share(n, self.routers)).collect(),
            by_layer: self.by_layer.iter().map(|&n| share(n, self.tokens)).collect(),
            token_histogram: self.token_histogram.iter().map(|&n| share(n, self.tokens)).collect(),
            sequence_histogram: self.sequence_histogram.clone(),
        }
    }
}

/// Maximum number of values of [`ExpertLoad::curves`] per layer.
const CURVE_POINTS: usize = 16;

/// How often the experts of each layer were executed. `[layers][experts]`
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ExpertLoad(Vec<Vec<u64>>);

impl ExpertLoad {
    /// Counts `rows` of executed experts, each `[layers · top_k]`.
    pub fn count<'a>(rows: impl Iterator<Item = &'a [u16]>, layers: usize, experts: usize) -> Self {
        let mut counts = vec![vec![0u64; experts]; layers];
        for row in rows {
            let top_k = row.len() / layers.max(1);
            for (counts, ids) in counts.iter_mut().zip(row.chunks_exact(top_k.max(1))) {
                for &id in ids {
                    if let Some(count) = counts.get_mut(usize::from(id)) {
                        *count += 1;
                    }
                }
            }
        }
        Self(counts)
    }

    /// Entropy of the experts' shares of all assignments, per layer, divided by `ln experts`; 1
    /// means evenly used.
    pub fn entropy(&self) -> Vec<f64> {
        let entropy = |counts: &Vec<u64>| {
            let all = counts.iter().sum::<u64>().max(1) as f64;
            let shares = counts.iter().filter(|&&n| n > 0).map(|&n| n as f64 / all);
            let nats: f64 = shares.map(|p| -p * libm::log(p)).sum();
            nats / libm::log(counts.len().max(2) as f64)
        };
        self.0.iter().map(entropy).collect()
    }

    /// Load of the experts per layer, from the most to the least used, where 1 is the even share.
    /// The experts are averaged in at most 16 groups of equal size, rounded to three decimals.
    pub fn curves(&self) -> Vec<Vec<f64>> {
        let curve = |counts: &Vec<u64>| {
            let even = counts.iter().sum::<u64>().max(1) as f64 / counts.len().max(1) as f64;
            let mut sorted = counts.clone();
            sorted.sort_unstable_by(|a, b| b.cmp(a));
            let groups = sorted.chunks(counts.len().div_ceil(CURVE_POINTS).max(1));
            let mean = |group: &[u64]| group.iter().sum::<u64>() as f64 / group.len() as f64;
            groups.map(|group| (mean(group) / even * 1e3).round() / 1e3).collect()
        };
        self.0.iter().map(curve).collect()
    }
}

/// Accumulates the probability ratio ρ of trainer to sampler over the loss tokens of a batch.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct RolloutRatioSum {
    tokens: u64,
    sum: f64,
    squares: f64,
    max: f64,
    weights: f64,
    corrected: u64,
}

impl RolloutRatioSum {
    /// Adds the loss tokens of one sequence: their ln ρ, their importance weights, and the number
    /// of weights that the correction changed.
    pub fn add(&mut self, log_ratios: &[f64], weights: &[f64], corrected: usize) {
        for log in log_ratios {
            let ratio = libm::exp(*log);
            self.sum += ratio;
            self.squares += ratio * ratio;
            self.max = self.max.max(ratio);
        }
        self.tokens += log_ratios.len() as u64;
        self.weights += weights.iter().sum::<f64>();
        self.corrected += corrected as u64;
    }

    /// Statistics over the added tokens; zeros if none were added.
    pub fn finish(&self) -> RolloutRatio {
        let tokens = self.tokens.max(1) as f64;
        let spread = self.squares * tokens;
        RolloutRatio {
            mean: self.sum / tokens,
            max: self.max,
            effective_share: if spread > 0.0 { self.sum * self.sum / spread } else { 0.0 },
            weight_mean: self.weights / tokens,
            corrected: self.corrected as f64 / tokens,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::golden::{close, ids, numbers, typed, vectors};
    use serde_json::{Value, json};

    /// Asserts equality up to rounding, key by key.
    fn same(found: &Value, expected: &Value, name: &str) {
        match (found, expected) {
            (Value::Object(found), Value::Object(expected)) => {
                assert_eq!(found.len(), expected.len(), "{name}: {found:?}");
                for (key, value) in found {
                    let wanted = expected.get(key).unwrap();
                    same(value, wanted, &format!("{name}.{key}"));
                }
            }
            _ => close(&numbers(found), &numbers(expected), 1e-12),
        }
    }

    #[test]
    fn mismatch_matches_golden_vectors() {
        let file = vectors("measures");
        let [trainer, sampler]: [Vec<Vec<f64>>; 2] =
            ["train", "engine"].map(|key| typed(&file[key]));
        let mut sum = MismatchSum::default();
        let mut ratios = RolloutRatioSum::default();
        for (trainer, sampler) in trainer.iter().zip(&sampler) {
            for (&t, &s) in trainer.iter().zip(sampler) {
                sum.add(t, s);
            }
            sum.end_sequence();
            let logs: Vec<f64> = trainer.iter().zip(sampler).map(|(t, s)| t - s).collect();
            ratios.add(&logs, &vec![1.0; logs.len()], 0);
        }
        let expected = &file["expected"];
        let found = serde_json::to_value(sum.finish()).unwrap();
        same(&found, &expected["mismatch"], "mismatch");
        let found = ratios.finish();
        let moments = json!({"mean": found.mean, "max": found.max,
            "effective_share": found.effective_share});
        same(&moments, &expected["rollout_ratio"], "rollout_ratio");
    }

    #[test]
    fn mean_k3_over_sampled_tokens_is_the_kl_divergence() {
        let (q, p) = ([0.5_f64, 0.3, 0.15, 0.05], [0.4_f64, 0.35, 0.05, 0.2]);
        let mean: f64 = q.iter().zip(&p).map(|(q, p)| q * k3(libm::log(*p), libm::log(*q))).sum();
        let divergence: f64 = q.iter().zip(&p).map(|(q, p)| q * libm::log(q / p)).sum();
        close(&[mean], &[divergence], 1e-12);
    }

    #[test]
    fn disagreement_and_expert_load_match_golden_vectors() {
        let file = vectors("measures");
        let rows = |key: &str| -> Vec<Vec<Vec<u16>>> {
            let sequences = file[key].as_array().unwrap().iter();
            sequences.map(|s| s.as_array().unwrap().iter().map(ids).collect()).collect()
        };
        let (sampler, trainer) = (rows("engine_routes"), rows("train_routes"));
        let mut sum = DisagreementSum::default();
        for (sampler, trainer) in sampler.iter().zip(&trainer) {
            let pairs = sampler.iter().zip(trainer).map(|(s, t)| (&s[..], &t[..]));
            sum.add_sequence(pairs, 2);
        }
        let expected = &file["expected"];
        let found = serde_json::to_value(sum.finish()).unwrap();
        same(&found, &expected["disagreement"], "disagreement");
        let load = ExpertLoad::count(sampler.iter().flatten().map(|row| &row[..]), 3, 6);
        let found = json!({"entropy": load.entropy(), "curve": load.curves()});
        same(&found, &expected["expert_load"], "expert_load");
    }

    #[test]
    fn even_expert_load_has_entropy_one_and_flat_curve() {
        let rows: [[u16; 4]; 2] = [[0, 1, 0, 1], [2, 3, 0, 1]];
        let load = ExpertLoad::count(rows.iter().map(|r| &r[..]), 2, 4);
        close(&load.entropy(), &[1.0, 0.5], 1e-12);
        assert_eq!(load.curves(), [[1.0; 4], [2.0, 2.0, 0.0, 0.0]]);
    }

    #[test]
    fn curve_of_many_experts_is_grouped() {
        let row: Vec<u16> = (0..64).collect();
        let load = ExpertLoad::count(std::iter::once(&row[..]), 1, 128);
        let expected: Vec<f64> = [[2.0; 8], [0.0; 8]].concat();
        assert_eq!(load.curves(), [expected]);
    }

    #[test]
    fn effective_share_is_one_for_equal_ratios_and_lower_with_an_outlier() {
        let mut even = RolloutRatioSum::default();
        even.add(&[0.1; 4], &[1.0; 4], 0);
        close(&[even.finish().effective_share], &[1.0], 1e-12);
        let mut odd = RolloutRatioSum::default();
        odd.add(&[0.0, 0.0, 0.0, libm::log(3.0)], &[1.0, 1.0, 1.0, 2.0], 1);
        let found = odd.finish();
        // Mean 1.5, mean square 3: 1.5² / 3.
        let all =
            [found.mean, found.max, found.effective_share, found.weight_mean, found.corrected];
        close(&all, &[1.5, 3.0, 0.75, 1.25, 0.25], 1e-12);
    }
}
