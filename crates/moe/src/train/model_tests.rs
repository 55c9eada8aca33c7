//! Tests of the whole model against golden values, finite differences and its invariants.

use super::experts::{MoeShape, moe, moe_backward, router_logits};
use super::layout::{ExpertSlots, LayerSlots};
use super::real::Real;
use super::{PackedBatch, Pass, Routes, SequenceOutput, TokenGradient, TrainModel};
use crate::diagnostics::{DisagreementSum, MismatchSum, is_extreme};
use crate::golden::{cases, checkpoint, close, ids, numbers, typed, vectors};
use crate::loss::{Advantages, Objective, SequenceTokens, Totals};
use crate::router::RouterFamily;
use crate::{ModelConfig, Weights};
use orchestrate_handoff::protocol::Hyperparameters;
use serde_json::Value;

/// The reference model and its expected outputs.
struct Golden<T: Real> {
    model: TrainModel<T>,
    file: Value,
}

impl<T: Real> Golden<T> {
    fn load() -> Self {
        Self { model: TrainModel::load(checkpoint()).unwrap(), file: vectors("whole_model") }
    }

    fn case(&self, name: &str) -> &Value {
        cases(&self.file).iter().find(|c| c["name"] == name).unwrap()
    }
}

fn one_sequence(inputs: &Value) -> PackedBatch {
    let tokens: Vec<u32> = typed(&inputs["input_ids"]);
    let count = tokens.len();
    PackedBatch::new(tokens, vec![0, count], vec![true; count]).unwrap()
}

fn recorded(inputs: &Value) -> Routes {
    let all = ids(&inputs["idx_infer"]);
    let tokens = all.len() / 6;
    Routes::new(all, vec![true; tokens], (3, 2, 8)).unwrap()
}

fn wide<T: Real>(values: &[T]) -> Vec<f64> {
    values.iter().map(|v| v.to_f64()).collect()
}

fn forward<T: Real>(
    model: &TrainModel<T>,
    batch: &PackedBatch,
    pass: Pass<'_, T>,
) -> SequenceOutput<T> {
    model.forward(batch, pass).remove(0)
}

fn forward_matches<T: Real>(tolerance: f64) {
    let golden = Golden::<T>::load();
    let model = &golden.model;
    let own = golden.case("forward_own_routing");
    let batch = one_sequence(&own["inputs"]);
    let output = forward(model, &batch, Pass::new(&[0]));
    assert_eq!(output.routes, ids(&own["expected"]["idx_own"]));
    close(&wide(&output.logprobs[1..]), &numbers(&own["expected"]["token_logprobs"]), tolerance);
    let entropy = numbers(&own["expected"]["token_entropy"]);
    close(&wide(&output.entropy[1..]), &entropy[..entropy.len() - 1], tolerance);

    let engine = golden.case("inference_engine");
    // The file has [layers, tokens, experts]; the model takes [tokens, layers, experts].
    let delta: Vec<Vec<Vec<f64>>> = typed(&engine["inputs"]["router_delta"]);
    let tokens = delta[0].len();
    let shift: Vec<f64> =
        (0..tokens).flat_map(|t| delta.iter().flat_map(move |l| l[t].clone())).collect();
    let pass = Pass { router_shift: Some(&shift), ..Pass::new(&[0]) };
    let sampler = forward(model, &batch, pass);
    assert_eq!(sampler.routes, ids(&engine["expected"]["idx_infer"]));
    let expected = numbers(&engine["expected"]["token_logprobs"]);
    close(&wide(&sampler.logprobs[1..]), &expected, tolerance);

    let replay = golden.case("training_engine_with_replay");
    let routes = recorded(&replay["inputs"]);
    let pass = Pass { replay: Some(&routes), ..Pass::new(&[0]) };
    let replayed = forward(model, &batch, pass);
    assert_eq!(replayed.routes, sampler.routes);
    let expected = &replay["expected"];
    close(&wide(&replayed.logprobs[1..]), &numbers(&expected["token_logprobs"]), tolerance);
    let prompt: usize = typed(&replay["inputs"]["prompt_len"]);
    for (trainer, suffix) in [(&output, "no_replay"), (&replayed, "replay")] {
        let mut sum = MismatchSum::default();
        let mut above = 0;
        let pairs = trainer.logprobs[prompt..].iter().zip(&sampler.logprobs[prompt..]);
        for (t, s) in pairs {
            sum.add(t.to_f64(), s.to_f64());
            above += usize::from(is_extreme(t.to_f64(), s.to_f64(), 1.1));
        }
        let found = sum.finish();
        close(&[found.kl_k3], &[typed(&expected[format!("kl_k3_{suffix}")])], tolerance);
        let extreme = found.extreme_token_fraction["2"];
        close(&[extreme], &[typed(&expected[format!("F_2_{suffix}")])], tolerance);
        let share = above as f64 / (tokens - prompt) as f64;
        close(&[share], &[typed(&expected[format!("F_1.1_{suffix}")])], tolerance);
    }
    let mut sum = DisagreementSum::default();
    sum.add_sequence(sampler.routes.chunks(6).zip(output.routes.chunks(6)), 2);
    let found = sum.finish();
    close(&[found.router], &[typed(&expected["router_mismatch_fraction"])], tolerance);
    close(&[found.token], &[typed(&expected["token_any_mismatch_fraction"])], tolerance);
}

#[test]
fn forward_matches_the_golden_model_in_f64() {
    forward_matches::<f64>(1e-8);
}

#[test]
fn forward_matches_the_golden_model_in_f32() {
    forward_matches::<f32>(5e-4);
}

fn policy_step_matches<T: Real>(tolerance: f64) {
    let golden = Golden::<T>::load();
    let model = &golden.model;
    let case = golden.case("policy_gradient_step");
    let (inputs, expected) = (&case["inputs"], &case["expected"]);
    let batch = one_sequence(inputs);
    let routes = recorded(inputs);
    let prompt: usize = typed(&inputs["prompt_len"]);
    let count = batch.tokens().len();
    let mask: Vec<bool> = (0..count).map(|p| p >= prompt).collect();
    let mut old = vec![0.0];
    old.extend(numbers(&inputs["logp_old"]));
    let settings = Hyperparameters {
        clip_low: typed(&inputs["eps_low"]),
        clip_high: typed(&inputs["eps_high"]),
        dual_clip: None,
        ..Hyperparameters::default()
    };
    let totals = Totals { sequences: 1, loss_tokens: count - prompt };
    let advantage: f64 = typed(&inputs["advantage"]);
    let loss = |output: &SequenceOutput<T>| {
        let new = wide(&output.logprobs);
        Objective::new(&settings, totals).sequence(SequenceTokens {
            new: &new,
            old: &old,
            sampler: &old,
            reference: None,
            shift: None,
            mask: &mask,
            advantages: Advantages::Sequence(advantage),
        })
    };
    let mut grads = vec![T::ZERO; model.params().len()];
    let pass = Pass { replay: Some(&routes), ..Pass::new(&[0]) };
    let coefficients = |o: &SequenceOutput<T>| {
        TokenGradient::from(loss(o).gradient.into_iter().map(T::from_f64).collect::<Vec<T>>())
    };
    let (outputs, _) = model.forward_backward(&batch, pass, &coefficients, &mut grads);
    close(&[loss(&outputs[0]).value], &[typed(&expected["loss"])], tolerance);

    let norm = wide(&grads).iter().map(|g| g * g).sum::<f64>().sqrt();
    close(&[norm], &[typed(&expected["grad_norm_all"])], tolerance);
    for (name, _, range) in model.layout().entries() {
        let (found, golden) = (wide(&grads[range]), numbers(&expected["grads"][name]));
        close(&found, &golden, tolerance);
        // Experts that no replayed token uses have no gradient at all.
        let any = |values: &[f64]| values.iter().any(|v| v.abs() > 0.0);
        assert_eq!(any(&found), any(&golden), "{name}");
    }
    assert_eq!(expected["grads"].as_object().unwrap().len(), model.layout().entries().count());
}

#[test]
fn policy_step_matches_the_golden_gradients_in_f64() {
    policy_step_matches::<f64>(1e-8);
}

#[test]
fn policy_step_matches_the_golden_gradients_in_f32() {
    policy_step_matches::<f32>(1e-3);
}

#[test]
fn expert_layer_matches_golden_vectors_with_own_and_replayed_routes() {
    let file = vectors("replay");
    let (x, layer) = (numbers(&file["x"]), &file["layer"]);
    for case in cases(&file) {
        let expected = &case["expected"];
        let (experts, hidden, width) = (4, 4, 3);
        let mut params = numbers(&layer["router"]);
        let mut experts_at = Vec::new();
        for e in 0..experts {
            let start = params.len();
            params.extend(numbers(&layer["gate"][e]));
            params.extend(numbers(&layer["up"][e]));
            let middle = params.len();
            params.extend(numbers(&layer["down"][e]));
            experts_at.push(ExpertSlots { gate_up: start..middle, down: middle..params.len() });
        }
        let slots = LayerSlots {
            attention_norm: 0..0,
            qkv: 0..0,
            output: 0..0,
            query_norm: 0..0,
            key_norm: 0..0,
            moe_norm: 0..0,
            router: 0..experts * hidden,
            experts: experts_at.clone(),
        };
        let shape = MoeShape {
            hidden,
            width,
            experts,
            top_k: typed(&file["top_k"]),
            family: RouterFamily::SoftmaxRenormalised,
        };
        let logits = router_logits(&shape, &params[slots.router.clone()], &x);
        close(&logits, &numbers(&expected["logits"]), 1e-12);
        let chosen = if case["recorded"].is_null() {
            let mut chosen = vec![0; 6];
            for (row, ids) in logits.chunks(experts).zip(chosen.chunks_mut(2)) {
                shape.family.select(row, ids);
            }
            chosen
        } else {
            ids(&case["recorded"])
        };
        assert_eq!(chosen, ids(&expected["experts"]));
        let mut y = vec![0.0; x.len()];
        let trace = moe(&shape, (&params, &slots), &x, (logits, chosen), &mut y);
        close(&y, &numbers(&expected["y"]), 1e-12);
        let cotangent = numbers(&file["upstream"]);
        let gradient = &expected["gradient"];
        let mut grads = vec![0.0; params.len()];
        let mut d_x = vec![0.0; x.len()];
        let into = (&params[..], &slots, &mut grads[..]);
        moe_backward(&shape, into, (&trace, &x), (&cotangent, None), &mut d_x);
        close(&d_x, &numbers(&gradient["x"]), 1e-12);
        close(&grads[slots.router.clone()], &numbers(&gradient["router"]), 1e-12);
        for (e, at) in experts_at.iter().enumerate() {
            let mut gate_up = numbers(&gradient["gate"][e]);
            gate_up.extend(numbers(&gradient["up"][e]));
            close(&grads[at.gate_up.clone()], &gate_up, 1e-12);
            close(&grads[at.down.clone()], &numbers(&gradient["down"][e]), 1e-12);
        }
    }
}

fn small(tied: bool, renormalised: bool) -> ModelConfig {
    serde_json::from_value(serde_json::json!({
        "model_type": "qwen3_moe", "hidden_size": 12, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 6,
        "moe_intermediate_size": 10, "num_experts": 4, "num_experts_per_tok": 2,
        "norm_topk_prob": renormalised, "vocab_size": 19, "rms_norm_eps": 1e-6,
        "tie_word_embeddings": tied, "max_position_embeddings": 256, "rope_theta": 1e4
    }))
    .unwrap()
}

/// A model with unusually large weights, so that no operation is nearly linear.
fn large_weight_model(config: ModelConfig, seed: u64) -> TrainModel<f64> {
    let mut model: TrainModel<f64> = TrainModel::new(&Weights::random(config, seed));
    for (i, p) in model.params_mut().iter_mut().enumerate() {
        *p = *p * 12.0 + 0.02 * ((i % 7) as f64 - 3.0);
    }
    model
}

/// Three sequences, one of them longer than an attention block and a head chunk.
fn ragged() -> PackedBatch {
    let lengths = [70_usize, 1, 9];
    let count = lengths.iter().sum();
    let tokens: Vec<u32> = (0..count).map(|i| u32::try_from(i * 7 % 19).unwrap()).collect();
    let mut scored = vec![true; count];
    scored[3] = false;
    PackedBatch::new(tokens, vec![0, 70, 71, 80], scored).unwrap()
}

fn coefficient(sequence: usize, position: usize) -> f64 {
    (((sequence * 31 + position * 17) % 13) as f64 - 5.0) / 13.0
}

/// Derivative at 0 by differences whose error is of fourth order in the step: at large weights the third
/// derivative is large too.
fn derivative(mut function: impl FnMut(f64) -> f64) -> f64 {
    let step = 3e-7;
    let mut difference = |step| function(step) - function(-step);
    (8.0 * difference(step) - difference(2.0 * step)) / (12.0 * step)
}

#[test]
fn gradients_agree_with_finite_differences() {
    let configs = [(true, true, 0.0), (false, false, 0.3)];
    for (seed, (tied, renormalised, balance)) in (0..4).zip(configs.into_iter().cycle()) {
        let mut model = large_weight_model(small(tied, renormalised), seed);
        let width = model.config().hidden_size;
        // Small, so that values contribute no more curvature than log-probs.
        let head: Vec<f64> = (0..=width).map(|i| 0.02 * coefficient(i, 3)).collect();
        let batch = ragged();
        let all = [0, 1, 2];
        let own: Vec<u16> =
            model.forward(&batch, Pass::new(&all)).into_iter().flat_map(|o| o.routes).collect();
        let count = batch.tokens().len();
        // Routes are fixed, so that a finite difference never crosses a change of experts.
        let routes = Routes::new(own, vec![true; count], (2, 2, 4)).unwrap();
        let pass = Pass {
            replay: Some(&routes),
            temperature: 1.3,
            balance_per_token: balance / count as f64,
            value_head: Some(&head),
            ..Pass::new(&all)
        };
        let weigh = |o: &SequenceOutput<f64>| TokenGradient {
            logprobs: (0..o.logprobs.len()).map(|p| coefficient(o.sequence, p)).collect(),
            values: (0..o.values.len()).map(|p| coefficient(p, o.sequence)).collect(),
        };
        let mut grads = vec![0.0; model.params().len() + head.len()];
        model.forward_backward(&batch, pass, &weigh, &mut grads);

        let objective = |model: &TrainModel<f64>, head: &[f64]| {
            let pass = Pass { value_head: Some(head), ..pass };
            let mut unused = vec![0.0; model.params().len() + head.len()];
            let (outputs, spread) = model.forward_backward(&batch, pass, &weigh, &mut unused);
            let dot = |a: &[f64], b: &[f64]| a.iter().zip(b).map(|(a, b)| a * b).sum::<f64>();
            let policy: f64 = outputs
                .iter()
                .map(|o| {
                    let c = weigh(o);
                    dot(&c.logprobs, &o.logprobs) + dot(&c.values, &o.values)
                })
                .sum();
            policy + balance * spread / count as f64
        };
        let places: Vec<(String, std::ops::Range<usize>)> =
            model.layout().entries().map(|(n, _, r)| (n.to_owned(), r)).collect();
        for (name, range) in places {
            let busy = grads[range.clone()].iter().any(|g| g.abs() > 0.0);
            assert!(busy, "{name} has no gradient");
            for at in [range.start, range.start + range.len() / 2 + 1] {
                let kept = model.params()[at];
                let numeric = derivative(|step| {
                    model.params_mut()[at] = kept + step;
                    objective(&model, &head)
                });
                model.params_mut()[at] = kept;
                let exact = grads[at];
                assert!(
                    (numeric - exact).abs() < 2e-6 * (1.0 + exact.abs()),
                    "{name}[{at}]: {exact} by backward, {numeric} by differences"
                );
            }
        }
        for at in [0, head.len() / 2, head.len() - 1] {
            let numeric = derivative(|step| {
                let mut moved = head.clone();
                moved[at] += step;
                objective(&model, &moved)
            });
            let exact = grads[model.params().len() + at];
            assert!((numeric - exact).abs() < 2e-6 * (1.0 + exact.abs()), "value head {at}");
        }
    }
}

#[test]
fn replaying_own_routes_changes_nothing_and_missing_rows_use_the_router() {
    let model = large_weight_model(small(true, true), 11);
    let batch = ragged();
    let free = model.forward(&batch, Pass::new(&[0, 1, 2]));
    let own: Vec<u16> = free.iter().flat_map(|o| o.routes.clone()).collect();
    for every in [1, 3] {
        let mut given = own.clone();
        let valid: Vec<bool> = (0..80).map(|p| p % every == 0).collect();
        for (p, row) in given.chunks_mut(4).enumerate() {
            if !valid[p] {
                row.fill(u16::MAX);
            }
        }
        let routes = Routes::new(given, valid, (2, 2, 4)).unwrap();
        let pass = Pass { replay: Some(&routes), ..Pass::new(&[0, 1, 2]) };
        assert_eq!(model.forward(&batch, pass), free);
    }
}

#[test]
fn packing_and_micro_batches_do_not_change_a_sequence() {
    let model = large_weight_model(small(true, true), 11);
    let batch = ragged();
    let together = model.forward(&batch, Pass::new(&[0, 1, 2]));
    let pass = Pass { micro_batch_tokens: 8, ..Pass::new(&[2, 0]) };
    let apart = model.forward(&batch, pass);
    assert_eq!(apart.iter().map(|o| o.sequence).collect::<Vec<_>>(), [2, 0]);
    for output in apart {
        let whole = &together[output.sequence];
        assert_eq!(output.routes, whole.routes);
        close(&output.logprobs, &whole.logprobs, 1e-12);
    }
    assert!(
        together[0].logprobs[3].abs() < f64::MIN_POSITIVE,
        "tokens that are not scored have log-prob 0"
    );
}

#[test]
fn routes_with_repeated_or_unknown_experts_are_rejected() {
    for bad in [vec![1, 1], vec![0, 4]] {
        assert!(Routes::new(bad, vec![true], (1, 2, 4)).is_err());
    }
    assert!(Routes::new(vec![1, 1], vec![false], (1, 2, 4)).is_ok());
}

#[test]
fn kernel_gives_identical_bits_for_a_sequence_in_every_batch() {
    let mut model: TrainModel<f32> = TrainModel::new(&Weights::random(small(true, true), 11));
    for p in model.params_mut() {
        *p *= 12.0;
    }
    let batch = ragged();
    let together = model.forward(&batch, Pass::new(&[0, 1, 2]));
    for alone in 0..3 {
        assert_eq!(model.forward(&batch, Pass::new(&[alone])), together[alone..=alone]);
    }
}
