//! Every loss against the golden vectors of `tests/reference`, and against finite differences.

use super::*;
use crate::golden::{cases, close, ids, numbers, options, typed, vectors};
use crate::router::RouterFamily;
use orchestrate_handoff::protocol::{ImportanceLevel, KlEstimator, RouterShift};
use orchestrate_handoff::rules::refusals;
use serde_json::Value;

const TOLERANCE: f64 = 1e-12;

/// Sequences of `T` tokens each. `[S][T]`, advantages `[S]`.
struct Batch {
    new: Vec<Vec<f64>>,
    old: Vec<Vec<f64>>,
    sampler: Vec<Vec<f64>>,
    reference: Vec<Vec<f64>>,
    gamma: Vec<Vec<f64>>,
    mask: Vec<Vec<bool>>,
    advantage: Vec<f64>,
    token_advantage: Vec<Vec<f64>>,
}

impl Batch {
    fn read(file: &Value, name: &str) -> Self {
        let batch = &file["batches"][name];
        Self {
            new: typed(&batch["new"]),
            old: typed(&batch["old"]),
            sampler: typed(&batch["sampler"]),
            reference: typed(&batch["reference"]),
            gamma: typed(&batch["gamma"]),
            mask: typed(&batch["mask"]),
            advantage: typed(&batch["advantage"]),
            token_advantage: typed(&batch["token_advantage"]),
        }
    }

    fn totals(&self) -> Totals {
        let loss_tokens = self.mask.iter().flatten().filter(|&&m| m).count();
        Totals { sequences: self.mask.len(), loss_tokens }
    }

    fn parts(&self, h: &Hyperparameters) -> Vec<SequenceLoss<f64>> {
        let objective = Objective::new(h, self.totals());
        let part = |i: usize| {
            let floored: Vec<f64> =
                self.gamma[i].iter().map(|gamma| gamma.max(h.router_shift_floor)).collect();
            objective.sequence(SequenceTokens {
                new: &self.new[i],
                old: &self.old[i],
                sampler: &self.sampler[i],
                reference: (h.kl_coefficient > 0.0).then_some(&self.reference[i][..]),
                shift: (h.router_shift != RouterShift::None).then_some(&floored[..]),
                mask: &self.mask[i],
                advantages: if h.policy_loss == PolicyLoss::Ppo {
                    Advantages::Tokens(&self.token_advantage[i])
                } else {
                    Advantages::Sequence(self.advantage[i])
                },
            })
        };
        (0..self.mask.len()).map(part).collect()
    }

    /// Weights of the correction, 0 for tokens without a loss, and how many tokens it changed.
    fn weights(&self, h: &Hyperparameters) -> (Vec<f64>, usize) {
        let (mut all, mut changed) = (Vec::new(), 0);
        for (i, mask) in self.mask.iter().enumerate() {
            let live = || (0..mask.len()).filter(|&t| mask[t]);
            let logs: Vec<f64> = live().map(|t| self.old[i][t] - self.sampler[i][t]).collect();
            let (weights, corrected) = importance::weights(h, &logs);
            let mut row = vec![0.0; mask.len()];
            for (t, weight) in live().zip(weights) {
                row[t] = weight;
            }
            all.extend(row);
            changed += corrected;
        }
        (all, changed)
    }
}

fn settings(file: &Value, changed: &Value) -> Hyperparameters {
    let mut all = serde_json::to_value(Hyperparameters::default()).unwrap();
    for layer in [&file["defaults"], changed] {
        for (key, value) in layer.as_object().unwrap() {
            assert!(all.get(key).is_some(), "{key}");
            all[key] = value.clone();
        }
    }
    typed(&all)
}

#[test]
fn every_loss_gradient_and_diagnostic_matches_its_vector() {
    let file = vectors("objective");
    for case in cases(&file) {
        let h = settings(&file, &case["settings"]);
        let (name, expected) = (&case["name"], &case["expected"]);
        assert_eq!(refusals(&h), [], "{name}");
        let batch = Batch::read(&file, case["batch"].as_str().unwrap());
        let parts = batch.parts(&h);
        let compare = |what: &str, found: &[f64]| {
            let wanted = numbers(&expected[what]);
            assert_eq!(found.len(), wanted.len(), "{name}");
            for (f, e) in found.iter().zip(&wanted) {
                let near = (f - e).abs() <= TOLERANCE * (1.0 + e.abs());
                assert!(near, "{name}: {what} is {f}, expected {e}");
            }
        };
        let single = |what: &str, found: f64| {
            let wanted: f64 = typed(&expected[what]);
            let near = (found - wanted).abs() <= TOLERANCE * (1.0 + wanted.abs());
            assert!(near, "{name}: {what} is {found}, expected {wanted}");
        };
        single("loss", parts.iter().map(|part| part.value).sum());
        let gradient: Vec<f64> = parts.iter().flat_map(|part| part.gradient.clone()).collect();
        compare("gradient", &gradient);
        let tokens = batch.totals().loss_tokens as f64;
        let clipped = |side: fn(&SequenceLoss<f64>) -> usize| {
            parts.iter().map(side).sum::<usize>() as f64 / tokens
        };
        single("clipped_low", clipped(|part| part.clipped.0));
        single("clipped_high", clipped(|part| part.clipped.1));
        let (weights, corrected) = batch.weights(&h);
        compare("weights", &weights);
        single("weight_mean", weights.iter().sum::<f64>() / tokens);
        single("corrected", corrected as f64 / tokens);
    }
}

/// Settings that the rules accept as far as clips go.
fn of(policy_loss: PolicyLoss) -> Hyperparameters {
    let aggregation = match policy_loss {
        PolicyLoss::Gspo | PolicyLoss::Gmpo | PolicyLoss::Rspo | PolicyLoss::Sapo => {
            LossAggregation::SeqMeanTokenMean
        }
        PolicyLoss::Minirl => LossAggregation::SeqMeanTokenSum,
        PolicyLoss::Grpo | PolicyLoss::Cispo | PolicyLoss::Ppo => LossAggregation::TokenMean,
    };
    let (clip_low, clip_high) = match policy_loss {
        PolicyLoss::Gmpo | PolicyLoss::Rspo => (0.4, 0.4),
        _ => (0.2, 0.28),
    };
    let router_shift = match policy_loss {
        PolicyLoss::Rspo => RouterShift::BeforeClip,
        _ => RouterShift::None,
    };
    Hyperparameters {
        policy_loss,
        aggregation,
        clip_low,
        clip_high,
        router_shift,
        dual_clip: None,
        ..Hyperparameters::default()
    }
}

/// Every combination of options that must have its own vector, including refused combinations.
fn combinations() -> Vec<Hyperparameters> {
    let mut all = Vec::new();
    for policy_loss in options::<PolicyLoss>() {
        let base = of(policy_loss);
        for aggregation in options::<LossAggregation>() {
            for importance_correction in options::<ImportanceCorrection>() {
                for importance_level in options::<ImportanceLevel>() {
                    all.push(Hyperparameters {
                        aggregation,
                        importance_correction,
                        importance_level,
                        ..base.clone()
                    });
                }
            }
            let dual_clip = Some(3.0);
            all.push(Hyperparameters { aggregation, dual_clip, ..base.clone() });
        }
        for router_shift in options::<RouterShift>() {
            all.push(Hyperparameters { router_shift, ..base.clone() });
        }
        for kl_estimator in options::<KlEstimator>() {
            for kl_unbiased in [false, true] {
                let kl_coefficient = 0.3;
                let base = base.clone();
                all.push(Hyperparameters { kl_coefficient, kl_estimator, kl_unbiased, ..base });
            }
        }
        all.push(Hyperparameters { off_policy_delta: Some(0.1), ..base });
    }
    all
}

#[test]
fn every_option_that_is_allowed_has_a_vector() {
    let file = vectors("objective");
    let key = |h: &Hyperparameters| {
        // A level means nothing without a correction, an estimator nothing without a divergence.
        let level =
            (h.importance_correction != ImportanceCorrection::None).then_some(h.importance_level);
        let divergence = (h.kl_coefficient > 0.0).then_some((h.kl_estimator, h.kl_unbiased));
        let switches = (h.dual_clip.is_some(), h.off_policy_delta.is_some());
        let loss = (h.policy_loss, h.aggregation, h.router_shift);
        (loss, h.importance_correction, level, divergence, switches)
    };
    let have: Vec<_> =
        cases(&file).iter().map(|case| key(&settings(&file, &case["settings"]))).collect();
    let wanted: Vec<_> = combinations().into_iter().filter(|h| refusals(h).is_empty()).collect();
    assert!(wanted.len() > 150, "{}", wanted.len());
    for h in wanted {
        assert!(have.contains(&key(&h)), "no vector in tests/reference for {:?}", key(&h));
    }
}

#[test]
fn divergence_estimates_match_their_vectors() {
    let file = vectors("divergence");
    let [new, old, reference] = ["new", "old", "reference"].map(|key| numbers(&file[key]));
    let mut seen = Vec::new();
    for case in cases(&file) {
        let h = settings(&serde_json::json!({"defaults": {}}), &case["settings"]);
        seen.push((h.kl_estimator, h.kl_unbiased));
        let terms = (0..new.len()).map(|t| {
            // k1 is a penalty on rewards and never a term of the loss.
            if h.kl_estimator == KlEstimator::K1 {
                return divergence::penalty(h.kl_estimator, new[t], reference[t]);
            }
            let log_ratio = new[t] - old[t];
            let token = Token {
                new: new[t],
                log_ratio,
                log_sampler_ratio: log_ratio,
                log_shift: 0.0,
                advantage: 1.0,
            };
            let term = divergence::term(&h, &token, reference[t]);
            let alone = divergence::penalty(h.kl_estimator, new[t], reference[t]);
            assert!(h.kl_unbiased || term == alone);
            term
        });
        let (values, slopes): (Vec<f64>, Vec<f64>) =
            terms.map(|term| (term.value, term.gradient)).unzip();
        close(&values, &numbers(&case["expected"]["value"]), TOLERANCE);
        close(&slopes, &numbers(&case["expected"]["gradient"]), TOLERANCE);
    }
    for estimator in options::<KlEstimator>() {
        assert!(seen.contains(&(estimator, false)), "{estimator:?}");
    }
    assert!(seen.contains(&(KlEstimator::K3, true)));
}

#[test]
fn router_shift_weights_match_their_vectors() {
    let file = vectors("router_shift");
    let [old, new, executed] = ["old", "new", "executed"].map(|key| &file[key]);
    let mut checked = 0;
    for case in cases(&file) {
        // The models that are trained here have softmax routers.
        if case["router"]["family"].as_str().unwrap().starts_with("sigmoid") {
            continue;
        }
        let found: Vec<f64> = (0..old.as_array().unwrap().len())
            .map(|t| shift::gamma(&numbers(&old[t]), &numbers(&new[t]), &ids(&executed[t]), 2))
            .collect();
        close(&found, &numbers(&case["expected"]["gamma"]), TOLERANCE);
        checked += 1;
    }
    assert_eq!(checked, 2);
}

#[test]
fn advantages_and_loss_of_a_value_head_match_their_vectors() {
    let file = vectors("values");
    let rows = |value: &Value| -> Vec<Vec<f64>> { typed(value) };
    let masks: Vec<Vec<bool>> = typed(&file["mask"]);
    let [rewards, old, new] = ["rewards", "old", "new"].map(|key| rows(&file[key]));
    let range: f64 = typed(&file["value_clip"]);
    let mask = masks.concat();
    for case in cases(&file) {
        let expected = &case["expected"];
        let rates = (typed(&case["gae_gamma"]), typed(&case["gae_lambda"]));
        let found: Vec<value::Estimates> = (0..masks.len())
            .map(|i| value::estimates(&rewards[i], &old[i], &masks[i], rates))
            .collect();
        let mut white: Vec<f64> = found.iter().flat_map(|e| e.advantages.clone()).collect();
        let returns: Vec<f64> = found.iter().flat_map(|e| e.returns.clone()).collect();
        close(&white, &numbers(&expected["advantages"]), TOLERANCE);
        close(&returns, &numbers(&expected["returns"]), TOLERANCE);
        let mut live: Vec<&mut f64> =
            white.iter_mut().zip(&mask).filter(|(_, m)| **m).map(|(a, _)| a).collect();
        value::whiten(&mut live);
        close(&white, &numbers(&expected["whitened"]), TOLERANCE);

        let count = mask.iter().filter(|&&m| m).count() as f64;
        let (old, new) = (old.concat(), new.concat());
        let term = |t: usize| value::loss(new[t], old[t], returns[t], range);
        let terms = (0..mask.len()).map(|t| if mask[t] { term(t) } else { (0.0, 0.0) });
        let (losses, slopes): (Vec<f64>, Vec<f64>) = terms.unzip();
        close(&[losses.iter().sum::<f64>() / count], &numbers(&expected["loss"]), TOLERANCE);
        let slopes: Vec<f64> = slopes.iter().map(|slope| slope / count).collect();
        close(&slopes, &numbers(&expected["gradient"]), TOLERANCE);
    }
}

#[test]
fn the_router_predictor_matches_its_vectors() {
    let file = vectors("predictor");
    let [hidden, old, new] = ["hidden", "old", "new"].map(|key| numbers(&file[key]));
    let (experts, width) = (5, 3);
    let tokens = (hidden.len() / width) as f64;
    for case in cases(&file) {
        let expected = &case["expected"];
        // The file has [hidden, experts]; here the weights lie as a router's, [experts, hidden].
        let across = |value: &Value| -> Vec<f64> {
            let rows: Vec<Vec<f64>> = typed(value);
            (0..experts).flat_map(|e| rows.iter().map(move |row| row[e])).collect()
        };
        let mut weights = across(&case["w"]);
        let features = predictor::Features { inputs: &hidden, old: &old, new: &new };
        let mut gradient = vec![0.0; weights.len()];
        let total = predictor::loss(features, experts, &weights, &mut gradient);
        close(&[total / tokens], &numbers(&expected["loss"]), TOLERANCE);
        let mean: Vec<f64> = gradient.iter().map(|g| g / tokens).collect();
        close(&mean, &across(&expected["gradient"]), TOLERANCE);
        let mut chosen = Vec::new();
        for (logits, inputs) in old.chunks(experts).zip(hidden.chunks(width)) {
            let mut predicted = logits.to_vec();
            predictor::add_prediction(&weights, inputs, &mut predicted);
            let mut row = [0; 2];
            RouterFamily::SoftmaxRenormalised.select(&predicted, &mut row);
            chosen.extend(row);
        }
        assert_eq!(chosen, ids(&expected["experts"]));
        for (w, g) in weights.iter_mut().zip(&mean) {
            *w -= 0.5 * g;
        }
        let after = predictor::loss(features, experts, &weights, &mut gradient) / tokens;
        close(&[after], &numbers(&expected["loss_after_step"]), TOLERANCE);
    }
}

#[test]
fn gradients_are_those_of_the_loss() {
    let file = vectors("objective");
    let mut checked = 0;
    for case in cases(&file) {
        let h = settings(&file, &case["settings"]);
        // Parts of these losses are constants by definition: their gradient is not the slope of
        // their value. The reference checks them with those parts held where they are.
        let straight_through = matches!(h.policy_loss, PolicyLoss::Cispo | PolicyLoss::Minirl)
            || (matches!(h.policy_loss, PolicyLoss::Gspo | PolicyLoss::Gmpo | PolicyLoss::Rspo)
                && h.importance_correction != ImportanceCorrection::None
                && h.importance_level == ImportanceLevel::Token)
            || h.kl_estimator == KlEstimator::K3Plus;
        if straight_through || case["batch"] != "ordinary" {
            continue;
        }
        checked += 1;
        let mut batch = Batch::read(&file, "ordinary");
        let value = |batch: &Batch| batch.parts(&h).iter().map(|part| part.value).sum::<f64>();
        for (i, part) in batch.parts(&h).iter().enumerate() {
            for (t, exact) in part.gradient.iter().enumerate() {
                let at = batch.new[i][t];
                batch.new[i][t] = at + 1e-6;
                let above = value(&batch);
                batch.new[i][t] = at - 1e-6;
                let below = value(&batch);
                batch.new[i][t] = at;
                let slope = (above - below) / 2e-6;
                assert!((slope - exact).abs() < 1e-7, "{} {i} {t}: {slope} {exact}", case["name"]);
            }
        }
    }
    assert!(checked >= 60, "{checked}");
}

#[test]
fn a_token_that_a_correction_masks_has_no_gradient_in_any_loss() {
    let file = vectors("objective");
    for policy_loss in PolicyLoss::ALL {
        for importance_correction in [ImportanceCorrection::Mis, ImportanceCorrection::Icepop] {
            let h = Hyperparameters {
                importance_correction,
                importance_level: ImportanceLevel::Token,
                importance_low: 0.8,
                importance_high: 1.5,
                clip_low: 0.9,
                clip_high: 9.0,
                ..of(policy_loss)
            };
            if !refusals(&h).is_empty() {
                continue;
            }
            let batch = Batch::read(&file, "ordinary");
            let gradient: Vec<f64> = batch.parts(&h).into_iter().flat_map(|p| p.gradient).collect();
            let (weights, masked) = batch.weights(&h);
            assert!(masked > 0);
            for ((g, w), live) in gradient.iter().zip(&weights).zip(batch.mask.concat()) {
                assert_eq!(g.abs() > 0.0, live && *w > 0.0, "{policy_loss:?} {g} {w}");
            }
        }
    }
}
