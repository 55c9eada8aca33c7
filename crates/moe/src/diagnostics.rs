//! How far the trainer is from the sampler: probabilities ([`MismatchSum`]) and routes
//! ([`DisagreementSum`]). Both are sums that grow sequence by sequence.

use orchestrate_handoff::protocol::{
    Disagreement, HalfDecades, Mismatch, ProbabilityGrid, RolloutRatio,
};
use std::collections::BTreeMap;

/// Thresholds τ of the extreme-token share.
pub const EXTREME_RATIOS: [f64; 6] = [1.05, 1.2, 1.5, 2.0, 5.0, 10.0];

/// `ρ − 1 − ln ρ` with `ln ρ = trainer − sampler`.
pub fn k3(trainer: f64, sampler: f64) -> f64 {
    let log_ratio = trainer - sampler;
    log_ratio.exp() - 1.0 - log_ratio
}

/// Whether `max(ρ, 1/ρ) > τ`, strictly, decided in log space.
pub fn is_extreme(trainer: f64, sampler: f64, tau: f64) -> bool {
    (trainer - sampler).abs() > tau.ln()
}

/// Mismatch over loss tokens.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct MismatchSum {
    tokens: u64,
    k3: f64,
    absolute: f64,
    probabilities: f64,
    extreme: [u64; EXTREME_RATIOS.len()],
    by_size: HalfDecades,
    grid: BTreeMap<(u8, u8), u64>,
    /// Tokens and sum of `|ln ρ|` of the sequence under way.
    sequence: (u64, f64),
    sequences: HalfDecades,
}

impl MismatchSum {
    /// Adds one loss token: its log-prob under trainer and sampler, nats.
    pub fn add(&mut self, trainer: f64, sampler: f64) {
        self.tokens += 1;
        self.k3 += k3(trainer, sampler);
        self.absolute += (trainer - sampler).abs();
        self.probabilities += (trainer.exp() - sampler.exp()).abs();
        for (count, tau) in self.extreme.iter_mut().zip(EXTREME_RATIOS) {
            *count += u64::from(is_extreme(trainer, sampler, tau));
        }
        self.by_size.add((trainer - sampler).abs());
        let bins = (ProbabilityGrid::bin(sampler), ProbabilityGrid::bin(trainer));
        *self.grid.entry(bins).or_default() += 1;
        self.sequence.0 += 1;
        self.sequence.1 += (trainer - sampler).abs();
    }

    /// The tokens added since the last call are one sequence.
    pub fn end_sequence(&mut self) {
        let (tokens, absolute) = std::mem::take(&mut self.sequence);
        if tokens > 0 {
            self.sequences.add(absolute / tokens as f64);
        }
    }

    /// Means over the tokens added; zeros if there were none.
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

/// Number of chosen experts of one (token, layer) that the other side did not choose; the order
/// does not matter.
pub fn differing_experts(sampler: &[u16], trainer: &[u16]) -> usize {
    sampler.iter().filter(|e| !trainer.contains(e)).count()
}

/// Route disagreement over tokens that have a row.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct DisagreementSum {
    routers: u64,
    routers_differing: u64,
    tokens: u64,
    tokens_differing: u64,
    sequences: u64,
    sequence_means: f64,
    sequence_expert_means: f64,
    /// (token, layer) pairs by the number of experts that differ.
    histogram: Vec<u64>,
    /// Tokens that differ, by layer.
    by_layer: Vec<u64>,
    /// Tokens by the number of layers that differ.
    token_histogram: Vec<u64>,
    sequence_histogram: HalfDecades,
}

impl DisagreementSum {
    /// Adds one sequence: for each token with a row, its ids `[layers · top_k]` under sampler and
    /// trainer.
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

    /// Shares and means over what was added; zeros if there was nothing.
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

/// Most values of [`ExpertLoad::curves`] per layer.
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

    /// Entropy of the experts' shares of all assignments, per layer, over `ln experts`: 1 = evenly
    /// used.
    pub fn entropy(&self) -> Vec<f64> {
        let entropy = |counts: &Vec<u64>| {
            let all = counts.iter().sum::<u64>().max(1) as f64;
            let shares = counts.iter().filter(|&&n| n > 0).map(|&n| n as f64 / all);
            let nats: f64 = shares.map(|p| -p * p.ln()).sum();
            nats / (counts.len().max(2) as f64).ln()
        };
        self.0.iter().map(entropy).collect()
    }

    /// Per layer, use of the experts from the busiest to the idlest, 1 = even: at most 16 groups of
    /// equal size, the mean of each, to three decimals.
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

/// Ratio of trainer to sampler over the loss tokens of a batch.
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
    /// Adds the loss tokens of one sequence: their ln ρ, their importance weights, and how many of
    /// them the correction changed.
    pub fn add(&mut self, log_ratios: &[f64], weights: &[f64], corrected: usize) {
        for log in log_ratios {
            let ratio = log.exp();
            self.sum += ratio;
            self.squares += ratio * ratio;
            self.max = self.max.max(ratio);
        }
        self.tokens += log_ratios.len() as u64;
        self.weights += weights.iter().sum::<f64>();
        self.corrected += corrected as u64;
    }

    /// Statistics over what was added; zeros if there was nothing.
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
    use crate::golden::{cases, close, ids, numbers, typed};

    #[test]
    fn mismatch_matches_the_golden_file() {
        for case in cases("kl_and_extreme_tokens") {
            let (inputs, expected) = (&case["inputs"], &case["expected"]);
            match case["name"].as_str().unwrap() {
                "token_estimators" => {
                    let sampler = numbers(&inputs["logp_infer"]);
                    let trainer = numbers(&inputs["logp_train"]);
                    let mask = numbers(&inputs["mask"]);
                    let pairs: Vec<(f64, f64)> = trainer.into_iter().zip(sampler).collect();
                    let all: Vec<f64> = pairs.iter().map(|&(t, s)| k3(t, s)).collect();
                    let k3_tokens = numbers(&expected["k3_tokens"]);
                    close(&all[..k3_tokens.len()], &k3_tokens, 1e-9);
                    let live: Vec<(f64, f64)> = pairs
                        .into_iter()
                        .zip(mask)
                        .filter_map(|(pair, m)| (m > 0.5).then_some(pair))
                        .collect();
                    let mut sum = MismatchSum::default();
                    for &(trainer, sampler) in &live {
                        sum.add(trainer, sampler);
                    }
                    sum.end_sequence();
                    let mismatch = sum.finish();
                    let tokens = live.len() as u64;
                    assert_eq!(mismatch.token_histogram.counts().iter().sum::<u64>(), tokens);
                    let grid = mismatch.probability_grid.entries();
                    assert_eq!(grid.iter().map(|cell| cell.2).sum::<u64>(), tokens);
                    let mut one = HalfDecades::default();
                    one.add(typed(&expected["mean_abs_logp_diff"]));
                    assert_eq!(mismatch.sequence_histogram, one);
                    close(&[mismatch.kl_k3], &[typed(&expected["kl_k3"])], 1e-9);
                    let absolute = typed(&expected["mean_abs_logp_diff"]);
                    close(&[mismatch.mean_abs_logprob_diff], &[absolute], 1e-9);
                    let probabilities = typed(&expected["mean_abs_prob_diff"]);
                    close(&[mismatch.mean_abs_prob_diff], &[probabilities], 1e-9);
                    let shares: Vec<f64> = numbers(&inputs["taus"])
                        .into_iter()
                        .map(|tau| {
                            let above = live.iter().filter(|(t, s)| is_extreme(*t, *s, tau));
                            above.count() as f64 / live.len() as f64
                        })
                        .collect();
                    close(&shares, &numbers(&expected["F_tau"]), 1e-9);
                    assert!((mismatch.extreme_token_fraction["2"] - shares[4]).abs() < 1e-12);
                    assert!((mismatch.extreme_token_fraction["1.2"] - shares[3]).abs() < 1e-12);
                }
                "expectation_identity" => {
                    let q = numbers(&inputs["q_infer"]);
                    let p = numbers(&inputs["p_train"]);
                    let mean: f64 = q.iter().zip(&p).map(|(q, p)| q * k3(p.ln(), q.ln())).sum();
                    close(&[mean], &[typed(&expected["KL_q_p"])], 1e-9);
                }
                _ => {}
            }
        }
    }

    #[test]
    fn route_disagreement_matches_the_golden_file() {
        for case in cases("routing_discrepancy") {
            let (inputs, expected) = (&case["inputs"], &case["expected"]);
            let tokens: Vec<(Vec<u16>, Vec<u16>)> = (0..4)
                .map(|t| (ids(&inputs["idx_infer"][t]), ids(&inputs["idx_train"][t])))
                .collect();
            let d: Vec<usize> = tokens
                .iter()
                .flat_map(|(s, t)| s.chunks(2).zip(t.chunks(2)))
                .map(|(s, t)| differing_experts(s, t))
                .collect();
            assert_eq!(d, typed::<Vec<Vec<usize>>>(&expected["d"]).concat());
            let mut sum = DisagreementSum::default();
            for sequence in tokens.chunks(2) {
                sum.add_sequence(sequence.iter().map(|(s, t)| (&s[..], &t[..])), 2);
            }
            let found = sum.finish();
            close(&[found.router], &[typed(&expected["router_mismatch_fraction"])], 1e-9);
            close(&[found.token], &[typed(&expected["token_any_mismatch_fraction"])], 1e-9);
            let means = numbers(&expected["sequence_mean_routers"]);
            close(&[found.sequence_mean], &[means.iter().sum::<f64>() / 2.0], 1e-9);
            let experts = numbers(&expected["sequence_mean_experts"]);
            close(&[found.sequence_mean_experts], &[experts.iter().sum::<f64>() / 2.0], 1e-9);
            let histogram = numbers(&expected["router_histogram_0..K"]);
            let shares: Vec<f64> = histogram.iter().map(|n| n / 12.0).collect();
            close(&found.histogram, &shares, 1e-9);
            let per_layer: Vec<f64> = (0..3)
                .map(|layer| {
                    d.iter().skip(layer).step_by(3).filter(|&&d| d > 0).count() as f64 / 4.0
                })
                .collect();
            close(&found.by_layer, &per_layer, 1e-9);
            let differing = |t: &[usize]| t.iter().filter(|&&d| d > 0).count();
            let per_token: Vec<f64> = (0..=3)
                .map(|n| d.chunks(3).filter(|t| differing(t) == n).count() as f64 / 4.0)
                .collect();
            close(&found.token_histogram, &per_token, 1e-9);
            assert_eq!(found.sequence_histogram.counts().iter().sum::<u64>(), 2);
        }
    }

    #[test]
    fn evenly_used_experts_have_entropy_one_and_a_flat_curve() {
        let rows: [[u16; 4]; 2] = [[0, 1, 0, 1], [2, 3, 0, 1]];
        let load = ExpertLoad::count(rows.iter().map(|r| &r[..]), 2, 4);
        close(&load.entropy(), &[1.0, 0.5], 1e-12);
        assert_eq!(load.curves(), [[1.0; 4], [2.0, 2.0, 0.0, 0.0]]);
    }

    #[test]
    fn the_curve_of_many_experts_is_one_of_few_groups() {
        let row: Vec<u16> = (0..64).collect();
        let load = ExpertLoad::count(std::iter::once(&row[..]), 1, 128);
        let expected: Vec<f64> = [[2.0; 8], [0.0; 8]].concat();
        assert_eq!(load.curves(), [expected]);
    }

    #[test]
    fn equal_ratios_are_worth_all_their_tokens_and_one_large_one_is_not() {
        let mut even = RolloutRatioSum::default();
        even.add(&[0.1; 4], &[1.0; 4], 0);
        close(&[even.finish().effective_share], &[1.0], 1e-12);
        let mut odd = RolloutRatioSum::default();
        odd.add(&[0.0, 0.0, 0.0, 3.0_f64.ln()], &[1.0, 1.0, 1.0, 2.0], 1);
        let found = odd.finish();
        // Mean 1.5, mean square 3: 1.5² / 3.
        let all =
            [found.mean, found.max, found.effective_share, found.weight_mean, found.corrected];
        close(&all, &[1.5, 3.0, 0.75, 1.25, 0.25], 1e-12);
    }
}
