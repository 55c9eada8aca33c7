//! How far the trainer is from the sampler: probabilities ([`MismatchSum`]) and routes
//! ([`DisagreementSum`]). Both are sums that grow sequence by sequence.

use orchestrate_handoff::protocol::{Disagreement, Mismatch};
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
    extreme: [u64; EXTREME_RATIOS.len()],
}

impl MismatchSum {
    /// Adds one loss token: its log-prob under trainer and sampler, nats.
    pub fn add(&mut self, trainer: f64, sampler: f64) {
        self.tokens += 1;
        self.k3 += k3(trainer, sampler);
        self.absolute += (trainer - sampler).abs();
        for (count, tau) in self.extreme.iter_mut().zip(EXTREME_RATIOS) {
            *count += u64::from(is_extreme(trainer, sampler, tau));
        }
    }

    /// Means over the tokens added; zeros if there were none.
    pub fn finish(&self) -> Mismatch {
        let tokens = self.tokens.max(1) as f64;
        let shares = EXTREME_RATIOS.iter().zip(self.extreme);
        Mismatch {
            kl_k3: self.k3 / tokens,
            mean_abs_logprob_diff: self.absolute / tokens,
            extreme_token_fraction: shares
                .map(|(tau, count)| (tau.to_string(), count as f64 / tokens))
                .collect::<BTreeMap<_, _>>(),
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
}

impl DisagreementSum {
    /// Adds one sequence: for each token with a row, its ids `[layers · top_k]` under sampler and
    /// trainer.
    pub fn add_sequence<'a>(
        &mut self,
        rows: impl Iterator<Item = (&'a [u16], &'a [u16])>,
        top_k: usize,
    ) {
        let (mut tokens, mut differing_in_sequence) = (0, 0);
        for (sampler, trainer) in rows {
            let layers = sampler.chunks_exact(top_k).zip(trainer.chunks_exact(top_k));
            self.routers += sampler.len().checked_div(top_k).unwrap_or(0) as u64;
            let differing = layers.filter(|(s, t)| differing_experts(s, t) > 0).count() as u64;
            self.routers_differing += differing;
            self.tokens_differing += u64::from(differing > 0);
            differing_in_sequence += differing;
            tokens += 1;
        }
        self.tokens += tokens;
        if tokens > 0 {
            self.sequences += 1;
            self.sequence_means += differing_in_sequence as f64 / tokens as f64;
        }
    }

    /// Shares and means over what was added; zeros if there was nothing.
    pub fn finish(&self) -> Disagreement {
        let share = |part: u64, whole: u64| part as f64 / whole.max(1) as f64;
        Disagreement {
            router: share(self.routers_differing, self.routers),
            token: share(self.tokens_differing, self.tokens),
            sequence_mean: self.sequence_means / self.sequences.max(1) as f64,
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
                    let mismatch = sum.finish();
                    close(&[mismatch.kl_k3], &[typed(&expected["kl_k3"])], 1e-9);
                    let absolute = typed(&expected["mean_abs_logp_diff"]);
                    close(&[mismatch.mean_abs_logprob_diff], &[absolute], 1e-9);
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
        }
    }
}
