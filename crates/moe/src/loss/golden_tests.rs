//! Every loss against the golden numbers, and against finite differences.

use super::*;
use crate::golden::{cases, close, numbers, typed};
use orchestrate_handoff::protocol::{ImportanceLevel, KlEstimator, RouterShift};
use orchestrate_handoff::rules::refusals;
use serde_json::Value;

/// The three sequences all loss files share, padded as they are.
struct Batch {
    new: Vec<Vec<f64>>,
    old: Vec<Vec<f64>>,
    sampler: Vec<Vec<f64>>,
    mask: Vec<Vec<bool>>,
    advantages: Vec<f64>,
    shift: Option<Vec<Vec<f64>>>,
    reference: Option<Vec<Vec<f64>>>,
}

fn flags(value: &Value) -> Vec<Vec<bool>> {
    let rows: Vec<Vec<f64>> = typed(value);
    rows.iter().map(|row| row.iter().map(|&m| m > 0.5).collect()).collect()
}

impl Batch {
    fn new(inputs: &Value) -> Self {
        let old: Vec<Vec<f64>> = typed(&inputs["logp_old"]);
        let sampler = inputs.get("logp_rollout").map_or_else(|| old.clone(), typed);
        Self {
            new: typed(&inputs["logp"]),
            sampler,
            old,
            mask: flags(&inputs["mask"]),
            advantages: numbers(&inputs["advantage_per_sequence"]),
            shift: None,
            reference: None,
        }
    }

    fn totals(&self) -> Totals {
        let loss_tokens = self.mask.iter().flatten().filter(|&&m| m).count();
        Totals { sequences: self.mask.len(), loss_tokens }
    }

    fn parts(&self, h: &Hyperparameters) -> Vec<SequenceLoss<f64>> {
        let objective = Objective::new(h, self.totals());
        let part = |i: usize| {
            objective.sequence(SequenceTokens {
                new: &self.new[i],
                old: &self.old[i],
                sampler: &self.sampler[i],
                reference: self.reference.as_ref().map(|all| &all[i][..]),
                shift: self.shift.as_ref().map(|all| &all[i][..]),
                mask: &self.mask[i],
                advantages: Advantages::Sequence(self.advantages[i]),
            })
        };
        (0..self.mask.len()).map(part).collect()
    }

    fn value(&self, h: &Hyperparameters) -> f64 {
        self.parts(h).iter().map(|part| part.value).sum()
    }

    #[track_caller]
    fn matches(&self, h: &Hyperparameters, expected: &Value) {
        close(&[self.value(h)], &[typed(&expected["loss"])], 1e-9);
        let gradient: Vec<f64> = self.parts(h).into_iter().flat_map(|p| p.gradient).collect();
        close(&gradient, &numbers(&expected["dloss_dlogp"]), 1e-9);
    }
}

fn of(policy_loss: PolicyLoss) -> Hyperparameters {
    let aggregation = match policy_loss {
        PolicyLoss::Gspo | PolicyLoss::Gmpo | PolicyLoss::Rspo | PolicyLoss::Sapo => {
            LossAggregation::SeqMeanTokenMean
        }
        PolicyLoss::Minirl => LossAggregation::SeqMeanTokenSum,
        PolicyLoss::Grpo | PolicyLoss::Cispo | PolicyLoss::Ppo => LossAggregation::TokenMean,
    };
    Hyperparameters { policy_loss, aggregation, dual_clip: None, ..Hyperparameters::default() }
}

/// With the clips a case names.
fn clipped(h: &Hyperparameters, inputs: &Value) -> Hyperparameters {
    let read = |key: &str, default: f64| inputs.get(key).map_or(default, typed);
    let (low, high) = match inputs.get("log_clip") {
        Some(e) => (typed(e), typed(e)),
        None => (read("eps_low", h.clip_low), read("eps_high", h.clip_high)),
    };
    Hyperparameters { clip_low: low, clip_high: high, ..h.clone() }
}

#[test]
fn grpo_matches_the_golden_file_in_every_aggregation() {
    for case in cases("grpo_loss") {
        let (inputs, expected) = (&case["inputs"], &case["expected"]);
        let h = Hyperparameters {
            dual_clip: typed(&inputs["dual_clip_c"]),
            aggregation: typed(&inputs["agg"]),
            loss_norm_tokens: typed(&inputs["norm_constant"]),
            ..clipped(&of(PolicyLoss::Grpo), inputs)
        };
        let batch = Batch::new(inputs);
        batch.matches(&h, expected);
        let clipped: usize = batch.parts(&h).iter().map(|p| p.clipped.0 + p.clipped.1).sum();
        let fraction = clipped as f64 / batch.totals().loss_tokens as f64;
        close(&[fraction], &[typed(&expected["clip_fraction"])], 1e-9);
        // PPO is the same surrogate, with an advantage per token.
        let ppo = Hyperparameters { policy_loss: PolicyLoss::Ppo, ..h };
        batch.matches(&ppo, expected);
    }
}

#[test]
fn gspo_matches_the_golden_file() {
    for case in cases("gspo_loss") {
        let (inputs, expected) = (&case["inputs"], &case["expected"]);
        let (h, batch) = (clipped(&of(PolicyLoss::Gspo), inputs), Batch::new(inputs));
        batch.matches(&h, expected);
        let clipped: Vec<bool> =
            batch.parts(&h).iter().map(|p| p.clipped.0 + p.clipped.1 > 0).collect();
        assert_eq!(clipped, typed::<Vec<bool>>(&expected["clipped_sequences"]));
    }
}

#[test]
fn corrections_match_the_golden_file() {
    use ImportanceCorrection::{GeometricMask, Icepop, Mis, Tis};
    use ImportanceLevel::{Sequence, Token};
    for case in cases("tis_mis_icepop") {
        let (inputs, expected) = (&case["inputs"], &case["expected"]);
        let (correction, level, low, high) = match case["name"].as_str().unwrap() {
            "tis_C2" => (Tis, Token, 0.0, 2.0),
            "tis_seq_C1.5" => (Tis, Sequence, 0.0, 1.5),
            "mis_token_C2" => (Mis, Token, 0.0, 2.0),
            "mis_seq_C1.5" => (Mis, Sequence, 0.0, 1.5),
            "icepop_0.5_5" => (Icepop, Token, 0.5, 5.0),
            "geo_seq_mask_0.95_1.05" => (GeometricMask, Sequence, 0.95, 1.05),
            other => panic!("{other}"),
        };
        let h = Hyperparameters {
            importance_correction: correction,
            importance_level: level,
            importance_low: low,
            importance_high: high,
            ..clipped(&of(PolicyLoss::Grpo), inputs)
        };
        let batch = Batch::new(inputs);
        batch.matches(&h, expected);
        let flagged = flags_or_none(&expected["truncated_or_masked"]);
        let (mut weights, mut corrected) = (Vec::new(), 0);
        for i in 0..3 {
            let count = batch.mask[i].iter().filter(|&&m| m).count();
            let pairs = batch.old[i].iter().zip(&batch.sampler[i]).take(count);
            let logs: Vec<f64> = pairs.map(|(old, roll)| old - roll).collect();
            let (row, touched) = importance::weights(&h, &logs);
            weights.extend(row);
            weights.extend(vec![0.0; 5 - count]);
            corrected += touched;
        }
        close(&weights, &numbers(&expected["weight"]), 1e-9);
        if let Some(flagged) = flagged {
            assert_eq!(corrected, flagged, "{}", case["name"]);
        }
    }
}

fn flags_or_none(value: &Value) -> Option<usize> {
    let rows: Option<Vec<Vec<bool>>> = typed(value);
    rows.map(|rows| rows.iter().flatten().filter(|&&f| f).count())
}

#[test]
fn other_policy_losses_match_the_golden_file() {
    let mut seen = 0;
    for case in cases("other_policy_losses") {
        let (inputs, expected) = (&case["inputs"], &case["expected"]);
        let h = match case["name"].as_str().unwrap() {
            "cispo_upper_only" => Hyperparameters {
                clip_low: 1.0,
                clip_high: typed(&inputs["eps_high_is"]),
                ..of(PolicyLoss::Cispo)
            },
            "gmpo_0.4" => clipped(&of(PolicyLoss::Gmpo), inputs),
            "minirl" => Hyperparameters {
                importance_high: typed(&inputs["is_cap"]),
                ..clipped(&of(PolicyLoss::Minirl), inputs)
            },
            "sapo" => Hyperparameters {
                sapo_tau: (typed(&inputs["tau_pos"]), typed(&inputs["tau_neg"])),
                ..of(PolicyLoss::Sapo)
            },
            other => panic!("{other}"),
        };
        Batch::new(inputs).matches(&h, expected);
        seen += 1;
    }
    assert!(seen == 4 || cases("other_policy_losses").is_empty());
}

#[test]
fn router_shift_matches_the_golden_file_in_every_loss_that_takes_it() {
    for case in cases("rspo") {
        let (inputs, expected) = (&case["inputs"], &case["expected"]);
        let mut batch = Batch::new(inputs);
        let old: Vec<Vec<Vec<Vec<f64>>>> = typed(&inputs["router_logits_old"]);
        let new: Vec<Vec<Vec<Vec<f64>>>> = typed(&inputs["router_logits_new"]);
        let floor: f64 = typed(&inputs["gamma_min"]);
        let family = crate::router::RouterFamily::SoftmaxRenormalised;
        let gamma = |i: usize, t: usize| {
            let mut ids = Vec::new();
            for logits in &old[i][t] {
                let mut chosen = [0u16; 2];
                family.select(logits, &mut chosen);
                ids.extend(chosen);
            }
            shift::gamma(&old[i][t].concat(), &new[i][t].concat(), &ids, 2)
        };
        let raw: Vec<Vec<f64>> = (0..3).map(|i| (0..5).map(|t| gamma(i, t)).collect()).collect();
        let floored: Vec<Vec<f64>> =
            raw.iter().map(|row| row.iter().map(|g| g.max(floor)).collect()).collect();
        close(&floored.concat(), &numbers(&expected["gamma"]), 1e-9);
        let (loss, place) = match case["name"].as_str().unwrap() {
            "gamma" => {
                close(&raw.concat(), &numbers(&expected["gamma_raw"]), 1e-9);
                continue;
            }
            "rspo_gmpo_rs_preclip" => (PolicyLoss::Rspo, RouterShift::BeforeClip),
            "rspo_v1_postclip" => (PolicyLoss::Rspo, RouterShift::AfterClip),
            "grpo_rs_preclip" => (PolicyLoss::Grpo, RouterShift::BeforeClip),
            "gspo_rs_preclip_wide" => (PolicyLoss::Gspo, RouterShift::BeforeClip),
            other => panic!("{other}"),
        };
        batch.shift = Some(floored);
        let h = Hyperparameters {
            router_shift: place,
            router_shift_floor: floor,
            aggregation: LossAggregation::SeqMeanTokenMean,
            ..clipped(&of(loss), inputs)
        };
        assert_eq!(refusals(&h), []);
        batch.matches(&h, expected);
    }
}

#[test]
fn penalties_match_the_golden_file() {
    for case in cases("kl_and_extreme_tokens") {
        if case["name"] != "penalty_to_reference" {
            continue;
        }
        let logp = numbers(&case["inputs"]["logp"]);
        let reference = numbers(&case["inputs"]["logp_ref"]);
        for (estimator, value, gradient) in [
            (KlEstimator::K1, "k1_value", "k1_grad"),
            (KlEstimator::K2, "k2_value", "k2_grad"),
            (KlEstimator::K3, "k3_value", "k3_grad"),
            (KlEstimator::K3Plus, "k3_value", "k2_grad"),
        ] {
            let pairs = logp.iter().zip(&reference);
            let terms = pairs.map(|(&l, &r)| divergence::penalty(estimator, l, r));
            let (values, slopes): (Vec<f64>, Vec<f64>) =
                terms.map(|term| (term.value, term.gradient)).unzip();
            close(&values, &numbers(&case["expected"][value]), 1e-9);
            close(&slopes, &numbers(&case["expected"][gradient]), 1e-9);
        }
    }
}

#[test]
fn advantages_and_loss_of_a_value_head_match_the_golden_file() {
    for case in cases("ppo_gae_value") {
        let (inputs, expected) = (&case["inputs"], &case["expected"]);
        let mask = flags(&inputs["mask"]).concat();
        let old = numbers(&inputs["values_old"]);
        let rates = (typed(&inputs["gamma"]), typed(&inputs["lambda"]));
        let found = value::estimates(&numbers(&inputs["rewards"]), &old, &mask, rates);
        close(&found.advantages, &numbers(&expected["advantages_at_mask"]), 1e-9);
        close(&found.returns, &numbers(&expected["returns_at_mask"]), 1e-9);
        let mut white = found.advantages.clone();
        let mut live: Vec<&mut f64> =
            white.iter_mut().zip(&mask).filter(|(_, m)| **m).map(|(a, _)| a).collect();
        value::whiten(&mut live);
        close(&white, &numbers(&expected["whitened_at_mask"]), 1e-9);

        let range: f64 = typed(&inputs["cliprange_value"]);
        let new = numbers(&inputs["values_new"]);
        let (mut total, mut count) = (0.0, 0.0);
        for t in (0..mask.len()).filter(|&t| mask[t]) {
            let of = |v: f64| value::loss(v, old[t], found.returns[t], range);
            total += of(new[t]).0;
            count += 1.0;
            let slope = (of(new[t] + 1e-6).0 - of(new[t] - 1e-6).0) / 2e-6;
            let edge = ((new[t] - old[t]).abs() - range).abs() < 1e-5;
            assert!(edge || (slope - of(new[t]).1).abs() < 1e-6, "{t}");
        }
        close(&[total / count], &[typed(&expected["value_loss"])], 1e-9);
    }
}

#[test]
fn the_router_predictor_matches_the_golden_file() {
    for case in cases("pr2") {
        let (inputs, expected) = (&case["inputs"], &case["expected"]);
        let (h, old) = (numbers(&inputs["h_old"]), numbers(&inputs["router_logits_old"]));
        let new = numbers(&inputs["router_logits_current"]);
        // The file has [hidden, experts]; here it lies like a router, [experts, hidden].
        let file: Vec<Vec<f64>> = typed(&inputs["w_predictor"]);
        let across = |rows: &[Vec<f64>]| -> Vec<f64> {
            (0..5).flat_map(|e| rows.iter().map(move |row| row[e])).collect()
        };
        let mut weights = across(&file);
        let features = predictor::Features { inputs: &h, old: &old, new: &new };
        let mut gradient = vec![0.0; weights.len()];
        let total = predictor::loss(features, 5, &weights, &mut gradient);
        close(&[total / 4.0], &[typed(&expected["loss"])], 1e-9);

        let family = crate::router::RouterFamily::SoftmaxRenormalised;
        let mut chosen = Vec::new();
        let mut gates = Vec::new();
        for (t, (logits, inputs)) in old.chunks(5).zip(h.chunks(3)).enumerate() {
            let mut predicted = logits.to_vec();
            predictor::add_prediction(&weights, inputs, &mut predicted);
            let mut ids = [0u16; 2];
            family.select(&predicted, &mut ids);
            let mut own = [0.0; 2];
            family.gates(&new[t * 5..(t + 1) * 5], &ids, &mut own);
            chosen.push(ids.to_vec());
            gates.extend(own);
        }
        assert_eq!(chosen, typed::<Vec<Vec<u16>>>(&expected["idx_predicted"]));
        if case["name"] == "zero_init" {
            continue;
        }
        close(&gates, &numbers(&expected["gates_update_replay"]), 1e-9);
        let golden: Vec<Vec<f64>> = typed(&expected["dloss_dw"]);
        let mean: Vec<f64> = gradient.iter().map(|g| g / 4.0).collect();
        close(&mean, &across(&golden), 1e-9);
        for (w, g) in weights.iter_mut().zip(&mean) {
            *w -= 0.5 * g;
        }
        let after = predictor::loss(features, 5, &weights, &mut gradient) / 4.0;
        close(&[after], &[typed(&expected["loss_after_sgd_lr0.5"])], 1e-9);
    }
}

/// A batch of its own, so that this needs no file: no token sits on an edge of a clip.
fn made_up() -> Batch {
    let row = |values: &[f64]| values.to_vec();
    let old = vec![row(&[-0.5, -1.2, -0.3, -2.0, -0.9]), row(&[-0.7, -0.4, -1.5, -0.6, 0.0])];
    let step = [[0.05, 0.31, -0.35, 0.12, -0.02], [-0.47, 0.03, 1.25, -0.11, 0.0]];
    let add = |by: &[[f64; 5]; 2]| -> Vec<Vec<f64>> {
        let rows = old.iter().zip(by);
        rows.map(|(row, by)| row.iter().zip(by).map(|(a, b)| a + b).collect()).collect()
    };
    Batch {
        new: add(&step),
        sampler: add(&[[0.02, -0.15, 0.1, 0.3, -0.01], [0.0, 0.05, -0.2, 0.3, 0.0]]),
        reference: Some(add(&[[-0.2, 0.1, 0.3, 0.05, 0.1], [0.3, -0.1, 0.2, 0.0, 0.0]])),
        shift: Some(vec![row(&[0.9, 1.0, 0.85, 0.95, 0.8]), row(&[0.99, 0.81, 0.9, 1.0, 1.0])]),
        mask: vec![vec![false, true, true, true, true], vec![true, true, true, true, false]],
        advantages: vec![1.0, -0.8],
        old,
    }
}

#[test]
fn gradients_are_those_of_the_loss() {
    let mut checked = 0;
    for policy_loss in PolicyLoss::ALL {
        // Their weights are constants: the loss is no function whose slope could be measured.
        if matches!(policy_loss, PolicyLoss::Cispo | PolicyLoss::Minirl) {
            continue;
        }
        for correction in [ImportanceCorrection::None, ImportanceCorrection::Tis] {
            for (beta, estimator, unbiased) in [
                (0.0, KlEstimator::K3, false),
                (0.3, KlEstimator::K2, false),
                (0.3, KlEstimator::K3, false),
                (0.3, KlEstimator::K3, true),
            ] {
                for router_shift in
                    [RouterShift::None, RouterShift::BeforeClip, RouterShift::AfterClip]
                {
                    let h = Hyperparameters {
                        clip_low: 0.25,
                        kl_coefficient: beta,
                        kl_estimator: estimator,
                        kl_unbiased: unbiased,
                        router_shift,
                        importance_correction: correction,
                        // One weight for a sequence: token weights make GSPO its token form,
                        // whose slope is by definition not that of its value.
                        importance_level: ImportanceLevel::Sequence,
                        ..of(policy_loss)
                    };
                    if !refusals(&h).is_empty() {
                        continue;
                    }
                    checked += 1;
                    let mut batch = made_up();
                    if router_shift == RouterShift::None {
                        batch.shift = None;
                    }
                    let gradients = batch.parts(&h);
                    for (i, gradient) in gradients.iter().enumerate() {
                        for t in 0..5 {
                            let at = batch.new[i][t];
                            batch.new[i][t] = at + 1e-6;
                            let above = batch.value(&h);
                            batch.new[i][t] = at - 1e-6;
                            let below = batch.value(&h);
                            batch.new[i][t] = at;
                            let slope = (above - below) / 2e-6;
                            let found = gradient.gradient[t];
                            assert!((slope - found).abs() < 1e-7, "{h:?} {i} {t}: {slope} {found}");
                        }
                    }
                }
            }
        }
    }
    assert!(checked >= 60, "{checked}");
}

#[test]
fn a_weight_on_a_token_scales_its_loss_and_its_gradient_alike() {
    let h = Hyperparameters {
        importance_correction: ImportanceCorrection::Mis,
        importance_high: 1.1,
        ..of(PolicyLoss::Gspo)
    };
    let plain = Hyperparameters { importance_correction: ImportanceCorrection::None, ..h.clone() };
    let batch = made_up();
    let (weighted, plain) = (batch.parts(&h), batch.parts(&plain));
    for i in 0..2 {
        let live = |v: &[f64]| -> Vec<f64> {
            v.iter().zip(&batch.mask[i]).filter(|(_, m)| **m).map(|(v, _)| *v).collect()
        };
        let logs: Vec<f64> = live(&batch.old[i])
            .iter()
            .zip(live(&batch.sampler[i]))
            .map(|(old, roll)| old - roll)
            .collect();
        let (weights, corrected) = importance::weights(&h, &logs);
        assert!(corrected > 0 && corrected < logs.len());
        let expected: Vec<f64> =
            live(&plain[i].gradient).iter().zip(&weights).map(|(g, w)| g * w).collect();
        close(&live(&weighted[i].gradient), &expected, 1e-12);
        let mean = weights.iter().sum::<f64>() / weights.len() as f64;
        close(&[weighted[i].value], &[plain[i].value * mean], 1e-12);
    }
}

#[test]
fn a_bad_sequence_the_policy_has_left_is_not_pushed_further() {
    let h = Hyperparameters { off_policy_delta: Some(0.1), ..of(PolicyLoss::Grpo) };
    let mut batch = made_up();
    batch.new[1] = batch.old[1].iter().map(|old| old - 0.15).collect();
    let parts = batch.parts(&h);
    assert!(parts[1].gradient.iter().all(|g| g.abs() < f64::MIN_POSITIVE));
    assert!(parts[0].gradient.iter().any(|g| g.abs() > 1e-3));
    // A good one is kept, however far it is.
    batch.advantages[1] = 0.8;
    assert!(batch.parts(&h)[1].gradient.iter().any(|g| g.abs() > 1e-3));
}
