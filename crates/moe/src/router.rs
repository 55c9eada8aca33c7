//! Selection of experts and their gate weights from router logits, for every family of public models.
//!
//! Selection and weights are separate functions on purpose: replaying recorded routes means
//! calling [`RouterFamily::gates`] with the recorded ids and not [`RouterFamily::select`]. Gate
//! weights always come from the logits of the model that runs, no matter how the experts were chosen.
#![expect(clippy::indexing_slicing, reason = "dense numeric code; lengths are checked at entry")]

use crate::train::real::Real;

/// Mapping of one token's logits `[E]` to `K` experts and their weights.
#[derive(Debug, Clone, PartialEq)]
pub enum RouterFamily {
    /// Softmax over all experts, renormalised over the chosen ones (Qwen3-MoE, Mixtral).
    SoftmaxRenormalised,
    /// Softmax over the chosen logits only (gpt-oss); the same numbers as renormalising.
    LogitsThenSoftmax,
    /// Softmax over all experts, not renormalised: gradient reaches every logit (`OLMoE`).
    Softmax,
    /// Sigmoid scores; a bias and groups decide the selection only; weights are renormalised and
    /// scaled (DeepSeek-V3, GLM-4.5).
    SigmoidBias {
        /// Added to the scores for selection `[E]`.
        bias: Vec<f64>,
        /// Number of equal groups that the experts are divided into; 1 = no groups.
        groups: usize,
        /// Number of groups that experts are chosen from: those with the largest sum of their two
        /// best scores.
        top_groups: usize,
        /// Factor on the weights.
        scale: f64,
    },
    /// Softmax over all experts; only the groups with the best single expert are chosen from;
    /// weights are scaled, not renormalised (DeepSeek-V2).
    SoftmaxGrouped {
        /// Number of equal groups that the experts are divided into; 1 = no groups.
        groups: usize,
        /// Number of groups that experts are chosen from: those with the best single expert.
        top_groups: usize,
        /// Factor on the weights.
        scale: f64,
    },
}

/// Added to a sum of sigmoid scores before dividing by it.
const SIGMOID_SUM_FLOOR: f64 = 1e-20;

impl RouterFamily {
    /// Chooses `ids.len()` experts: larger key first, lower id on ties.
    pub fn select<T: Real>(&self, logits: &[T], ids: &mut [u16]) {
        match self {
            // Softmax keeps the order, so the logits themselves are the key.
            Self::SoftmaxRenormalised | Self::LogitsThenSoftmax | Self::Softmax => {
                top_k(logits, ids);
            }
            Self::SigmoidBias { bias, groups, top_groups, .. } => {
                let keys: Vec<T> =
                    logits.iter().zip(bias).map(|(&s, &b)| sigmoid(s) + T::from_f64(b)).collect();
                top_k(&keep_groups(&keys, *groups, *top_groups, 2), ids);
            }
            Self::SoftmaxGrouped { groups, top_groups, .. } => {
                top_k(&keep_groups(logits, *groups, *top_groups, 1), ids);
            }
        }
    }

    /// Gate weights of the experts `ids` under `logits`; `gates` has the length of `ids`.
    pub fn gates<T: Real>(&self, logits: &[T], ids: &[u16], gates: &mut [T]) {
        match self {
            Self::SoftmaxRenormalised | Self::LogitsThenSoftmax => {
                let chosen = ids.iter().map(|&e| logits[usize::from(e)]);
                let top = chosen.clone().fold(T::LOWEST, Real::max);
                let mut sum = T::ZERO;
                for (gate, s) in gates.iter_mut().zip(chosen) {
                    *gate = (s - top).exp();
                    sum += *gate;
                }
                for gate in gates {
                    *gate = *gate / sum;
                }
            }
            Self::Softmax => pick(logits, ids, gates, T::ONE),
            Self::SoftmaxGrouped { scale, .. } => pick(logits, ids, gates, T::from_f64(*scale)),
            Self::SigmoidBias { scale, .. } => {
                let mut sum = T::from_f64(SIGMOID_SUM_FLOOR);
                for (gate, &e) in gates.iter_mut().zip(ids) {
                    *gate = sigmoid(logits[usize::from(e)]);
                    sum += *gate;
                }
                for gate in gates {
                    *gate = *gate * T::from_f64(*scale) / sum;
                }
            }
        }
    }

    /// Adds `dL/dlogits` to `d_logits [E]`, given `dL/dgates [K]` of the experts `ids`. The choice
    /// is a constant.
    pub fn gates_backward<T: Real>(
        &self,
        logits: &[T],
        ids: &[u16],
        d_gates: &[T],
        d_logits: &mut [T],
    ) {
        let mut gates = vec![T::ZERO; ids.len()];
        self.gates(logits, ids, &mut gates);
        let mean: T = gates.iter().zip(d_gates).map(|(&g, &d)| g * d).sum();
        match self {
            Self::SoftmaxRenormalised | Self::LogitsThenSoftmax => {
                for ((&e, &g), &d) in ids.iter().zip(&gates).zip(d_gates) {
                    d_logits[usize::from(e)] += g * (d - mean);
                }
            }
            Self::Softmax | Self::SoftmaxGrouped { .. } => {
                for (d, p) in d_logits.iter_mut().zip(softmax(logits)) {
                    *d += -p * mean;
                }
                for ((&e, &g), &d) in ids.iter().zip(&gates).zip(d_gates) {
                    d_logits[usize::from(e)] += g * d;
                }
            }
            Self::SigmoidBias { scale, .. } => {
                // g_i = λ a_i / Σ and da_j/ds_j = a_j (1 − a_j): the quotient rule leaves
                // g_j (1 − a_j) (d_j − Σ_i g_i d_i / λ).
                let mean = mean / T::from_f64(*scale);
                for ((&e, &g), &d) in ids.iter().zip(&gates).zip(d_gates) {
                    let a = sigmoid(logits[usize::from(e)]);
                    d_logits[usize::from(e)] += g * (T::ONE - a) * (d - mean);
                }
            }
        }
    }
}

/// Softmax over all logits of one token.
pub(crate) fn softmax<T: Real>(logits: &[T]) -> Vec<T> {
    let top = logits.iter().copied().fold(T::LOWEST, Real::max);
    let mut p: Vec<T> = logits.iter().map(|&s| (s - top).exp()).collect();
    let sum: T = p.iter().copied().sum();
    for value in &mut p {
        *value = *value / sum;
    }
    p
}

fn pick<T: Real>(logits: &[T], ids: &[u16], gates: &mut [T], scale: T) {
    let p = softmax(logits);
    for (gate, &e) in gates.iter_mut().zip(ids) {
        *gate = p[usize::from(e)] * scale;
    }
}

fn sigmoid<T: Real>(s: T) -> T {
    T::ONE / (T::ONE + (-s).exp())
}

/// The `ids.len()` largest keys, larger first, lower id on ties.
fn top_k<T: Real>(keys: &[T], ids: &mut [u16]) {
    for k in 0..ids.len() {
        let (taken, rest) = ids.split_at_mut(k);
        let mut best: Option<(u16, T)> = None;
        for (e, &key) in (0u16..).zip(keys) {
            if !taken.contains(&e) && best.is_none_or(|(_, top)| key > top) {
                best = Some((e, key));
            }
        }
        if let (Some(slot), Some((e, _))) = (rest.first_mut(), best) {
            *slot = e;
        }
    }
}

/// `keys`, in which those outside the `top_groups` best groups are replaced with the lowest value.
/// Groups are ranked by the sum of their `best` largest keys.
fn keep_groups<T: Real>(keys: &[T], groups: usize, top_groups: usize, best: usize) -> Vec<T> {
    if groups <= 1 {
        return keys.to_vec();
    }
    let size = keys.len() / groups;
    let scores: Vec<T> = keys
        .chunks(size)
        .map(|group| {
            let mut chosen = vec![0u16; best.min(group.len())];
            top_k(group, &mut chosen);
            chosen.iter().map(|&e| group[usize::from(e)]).sum()
        })
        .collect();
    let mut kept = vec![0u16; top_groups];
    top_k(&scores, &mut kept);
    let allowed = |e: usize| kept.iter().any(|&g| usize::from(g) == e / size);
    keys.iter().enumerate().map(|(e, &key)| if allowed(e) { key } else { T::LOWEST }).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::golden::{cases, close, ids, numbers, typed, vectors};
    use serde_json::Value;

    /// The family of a router in the reference vectors. `None` for `sigmoid_bias_plain` (scores that are
    /// not renormalised), which only the PyTorch trainer supports.
    fn family(router: &Value) -> Option<RouterFamily> {
        let count = |key: &str| typed(&router[key]);
        let scale: f64 = typed(&router["scale"]);
        let unscaled = (scale - 1.0).abs() < f64::EPSILON;
        Some(match router["family"].as_str().unwrap() {
            "softmax_renormalised" => RouterFamily::SoftmaxRenormalised,
            "logits_then_softmax" => RouterFamily::LogitsThenSoftmax,
            "softmax" if unscaled => RouterFamily::Softmax,
            // Without groups every expert is allowed.
            "softmax" | "softmax_grouped" => RouterFamily::SoftmaxGrouped {
                groups: count("groups"),
                top_groups: count("kept_groups"),
                scale,
            },
            "sigmoid_bias" => RouterFamily::SigmoidBias {
                bias: typed(&router["bias"]),
                groups: count("groups"),
                top_groups: count("kept_groups"),
                scale,
            },
            "sigmoid_bias_plain" => return None,
            other => panic!("{other}"),
        })
    }

    /// Does not compile when a family is added without a number here; add a vector for it, too.
    fn number(family: &RouterFamily) -> usize {
        match family {
            RouterFamily::SoftmaxRenormalised => 0,
            RouterFamily::LogitsThenSoftmax => 1,
            RouterFamily::Softmax => 2,
            RouterFamily::SigmoidBias { .. } => 3,
            RouterFamily::SoftmaxGrouped { .. } => 4,
        }
    }

    #[test]
    fn gates_and_gradients_match_their_vectors_for_every_family_own_and_replayed() {
        let file = vectors("routers");
        let rows: Vec<Vec<f64>> = typed(&file["logits"]);
        let upstream: Vec<Vec<f64>> = typed(&file["upstream"]);
        let mut seen = [false; 5];
        for case in cases(&file) {
            let Some(family) = family(&case["router"]) else { continue };
            seen[number(&family)] = true;
            for kind in ["own", "replayed"] {
                let expected = &case["expected"][kind];
                for (t, logits) in rows.iter().enumerate() {
                    let mut chosen = ids(&expected["experts"][t]);
                    if kind == "own" {
                        let wanted = chosen.clone();
                        chosen.fill(0);
                        family.select(logits, &mut chosen);
                        assert_eq!(chosen, wanted, "{}", case["name"]);
                    }
                    let mut gates = vec![0.0; chosen.len()];
                    family.gates(logits, &chosen, &mut gates);
                    close(&gates, &numbers(&expected["gates"][t]), 1e-12);
                    let d_gates: Vec<f64> =
                        chosen.iter().map(|&e| upstream[t][usize::from(e)]).collect();
                    let mut d_logits = vec![0.0; logits.len()];
                    family.gates_backward(logits, &chosen, &d_gates, &mut d_logits);
                    close(&d_logits, &numbers(&expected["gradient"][t]), 1e-12);
                }
            }
        }
        assert_eq!(seen, [true; 5], "a family without a vector");
    }

    #[test]
    fn replayed_gates_are_gathered_from_all_logits_and_their_gradient_reaches_each() {
        let logits = [1.0_f64, 2.0, 3.0, 4.0];
        let total: f64 = logits.iter().map(|logit| libm::exp(*logit)).sum();
        let all = logits.map(|logit| libm::exp(logit) / total);
        // Experts that this router would not have chosen.
        let replayed = [0, 1];
        let mut gates = [0.0; 2];
        RouterFamily::Softmax.gates(&logits, &replayed, &mut gates);
        close(&gates, &all[..2], 1e-12);
        let mut d_logits = [0.0; 4];
        RouterFamily::Softmax.gates_backward(&logits, &replayed, &[1.0, 0.0], &mut d_logits);
        let expected: Vec<f64> =
            (0..4).map(|e| all[0] * (if e == 0 { 1.0 } else { 0.0 } - all[e])).collect();
        close(&d_logits, &expected, 1e-12);
        // Renormalised over the chosen experts: still from this router's own logits, with a sum of one.
        RouterFamily::SoftmaxRenormalised.gates(&logits, &replayed, &mut gates);
        let chosen = all[0] + all[1];
        close(&gates, &[all[0] / chosen, all[1] / chosen], 1e-12);
    }

    #[test]
    fn ties_go_to_the_lower_id() {
        let mut ids = [0; 3];
        RouterFamily::Softmax.select(&[1.0, 2.0, 2.0, 1.0, 2.0_f32], &mut ids);
        assert_eq!(ids, [1, 2, 4]);
        RouterFamily::Softmax.select(&[0.0; 5], &mut ids);
        assert_eq!(ids, [0, 1, 2]);
    }

    #[test]
    fn renormalised_gates_leave_other_logits_alone() {
        let mut d = [0.0_f64; 4];
        let family = RouterFamily::SoftmaxRenormalised;
        family.gates_backward(&[0.3, -0.2, 0.9, 0.1], &[3, 1], &[0.7, -0.4], &mut d);
        assert!(d[0].abs() < f64::MIN_POSITIVE && d[2].abs() < f64::MIN_POSITIVE);
        assert!((d[1] + d[3]).abs() < 1e-15);
    }
}
