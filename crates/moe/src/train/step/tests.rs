//! Steps on a small model: what mini steps, micro-batches and replay change and do not change.

use super::{StepError, TrainBatch, apply, check_settings, measure};
use crate::golden::{cases, close, numbers, typed, vectors};
use crate::train::auxiliary::AuxiliaryWeights;
use crate::train::learner::Learner;
use crate::train::optimizer::{AdamW, clip_global_norm};
use crate::train::{PackedBatch, Pass, Routes, TrainModel};
use crate::{ModelConfig, Weights};
use orchestrate_handoff::AlgorithmSection;
use orchestrate_handoff::protocol::{
    Hyperparameters, ImportanceCorrection, KlEstimator, LossAggregation, PolicyLoss, RouterShift,
    RoutingReplay, StepMetrics,
};

const LENGTHS: [usize; 5] = [12, 7, 19, 10, 5];

fn config() -> ModelConfig {
    serde_json::from_value(serde_json::json!({
        "model_type": "qwen3_moe", "hidden_size": 16, "num_hidden_layers": 2,
        "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8,
        "moe_intermediate_size": 16, "num_experts": 4, "num_experts_per_tok": 2,
        "norm_topk_prob": true, "vocab_size": 23, "rms_norm_eps": 1e-6,
        "tie_word_embeddings": true, "max_position_embeddings": 64, "rope_theta": 1e4
    }))
    .unwrap()
}

/// Seeds of the models on which an effect must have the same sign.
const SEEDS: std::ops::Range<u64> = 1..7;

fn model() -> TrainModel<f32> {
    model_of(3)
}

fn model_of(seed: u64) -> TrainModel<f32> {
    let mut model = TrainModel::new(&Weights::random(config(), seed));
    for p in model.params_mut() {
        *p *= 8.0;
    }
    model
}

fn settings() -> Hyperparameters {
    Hyperparameters {
        dual_clip: None,
        loss_norm_tokens: 32.0,
        micro_batch_tokens: 4096,
        learning_rate: 1e-3,
        betas: (0.9, 0.95),
        weight_decay: 0.0,
        measure_no_replay: true,
        ..Hyperparameters::default()
    }
}

/// A batch sampled by the model with noisy routers: every third row's experts are others.
fn batch(model: &TrainModel<f32>) -> TrainBatch {
    batch_with(model, ADVANTAGES)
}

const ADVANTAGES: [f64; 5] = [1.0, -0.5, 0.75, -1.0, 0.25];

fn batch_with(model: &TrainModel<f32>, advantages: [f64; 5]) -> TrainBatch {
    let count: usize = LENGTHS.iter().sum();
    let tokens: Vec<u32> = (0..count).map(|i| u32::try_from(i * 5 % 23).unwrap()).collect();
    let mut offsets = vec![0];
    for length in LENGTHS {
        offsets.push(offsets[offsets.len() - 1] + length);
    }
    let mut scored: Vec<bool> = (0..count).map(|i| i % 4 != 1).collect();
    for start in &offsets[..5] {
        scored[*start] = false;
    }
    let packed = PackedBatch::new(tokens, offsets, scored).unwrap();
    let all = [0, 1, 2, 3, 4];
    let own = model.forward(&packed, Pass::new(&all));
    let mut ids: Vec<u16> = own.into_iter().flat_map(|o| o.routes).collect();
    for row in ids.chunks_mut(4).step_by(3) {
        row[0] = (0..4).find(|e| !row[..2].contains(e)).unwrap();
    }
    let mut valid = vec![true; count];
    valid[2] = false;
    let routes = Routes::new(ids, valid, (2, 2, 4)).unwrap();
    let pass = Pass { replay: Some(&routes), ..Pass::new(&all) };
    let rollout: Vec<f32> =
        model.forward(&packed, pass).into_iter().flat_map(|o| o.logprobs).collect();
    let rewards = vec![1.0, 0.0, 1.0, 0.0, 0.5];
    TrainBatch::new(packed, rollout, (advantages.to_vec(), rewards), routes, &config()).unwrap()
}

fn step(settings: &Hyperparameters) -> (TrainModel<f32>, StepMetrics) {
    step_of(model(), settings)
}

fn step_of(model: TrainModel<f32>, settings: &Hyperparameters) -> (TrainModel<f32>, StepMetrics) {
    let batch = batch(&model);
    let mut learner = Learner::new(model);
    let metrics = apply(&mut learner, None, &batch, settings, &mut |_, _| true).unwrap();
    (learner.model, metrics)
}

#[test]
fn replay_removes_the_mismatch_that_routes_cause() {
    let (_, metrics) = step(&settings());
    assert!(metrics.mismatch.kl_k3.abs() < 1e-9, "{metrics:?}");
    let free = metrics.mismatch_no_replay.unwrap();
    assert!(free.kl_k3 > 1e-6, "{free:?}");
    let disagreement = metrics.disagreement.unwrap();
    assert!(disagreement.token > 0.2 && disagreement.router > 0.1, "{disagreement:?}");
    assert_eq!(metrics.routing_missing, 2);

    let none = Hyperparameters { routing_replay: RoutingReplay::None, ..settings() };
    let (_, without) = step(&none);
    assert!((without.mismatch.kl_k3 - free.kl_k3).abs() < 1e-12);
    assert_eq!(without.disagreement, Some(disagreement));
    assert_eq!(without.routing_missing, 0);
}

#[test]
fn ratios_at_unchanged_weights_are_one() {
    for replay in [RoutingReplay::None, RoutingReplay::Recompute, RoutingReplay::Rollout] {
        for mini_steps in [1, 3] {
            let still = Hyperparameters {
                learning_rate: 0.0,
                routing_replay: replay,
                mini_steps,
                aggregation: LossAggregation::SeqMeanTokenMean,
                ..settings()
            };
            let (model_after, metrics) = step(&still);
            assert_eq!(model_after.params(), model().params());
            assert!(metrics.clip_fraction.abs() < f64::MIN_POSITIVE);
            if mini_steps == 1 {
                // Ratio 1 everywhere: the loss is minus the mean advantage.
                assert!((metrics.loss + 0.1).abs() < 1e-6, "{replay:?}: {}", metrics.loss);
            }
        }
    }
}

#[test]
fn micro_batches_do_not_change_the_step() {
    let small = Hyperparameters { micro_batch_tokens: 8, ..settings() };
    for seed in SEEDS {
        let (whole, metrics) = step_of(model_of(seed), &settings());
        let (parts, again) = step_of(model_of(seed), &small);
        assert!((metrics.loss - again.loss).abs() < 1e-7);
        let (norm, other) = (metrics.grad_norm, again.grad_norm);
        assert!((norm - other).abs() < 1e-5 * norm, "{norm} {other}");
        for (a, b) in whole.params().iter().zip(parts.params()) {
            assert!((a - b).abs() < 2e-4, "{a} {b}");
        }
    }
}

#[test]
fn a_step_moves_probability_from_bad_sequences_to_good_ones() {
    // A step so small that its effect is that of the gradient.
    let learning = Hyperparameters { learning_rate: 3e-6, ..settings() };
    for seed in SEEDS {
        let before = model_of(seed);
        let batch = batch(&before);
        let (after, metrics) = step_of(model_of(seed), &learning);
        assert!(metrics.grad_norm > 0.0);
        let objective = |model: &TrainModel<f32>| -> f64 {
            let logprobs = measure(model, &batch, true, 1.0).logprobs;
            let sums = logprobs.iter().map(|all| all.iter().map(|&p| f64::from(p)).sum::<f64>());
            sums.zip(ADVANTAGES).map(|(sum, advantage)| sum * advantage).sum()
        };
        let (before, after) = (objective(&before), objective(&after));
        assert!(after > before, "model {seed}: {before} {after}");
    }
}

#[test]
fn a_step_stops_on_request_and_invalid_settings_are_refused() {
    let mut learner = Learner::new(model());
    let batch = batch(&learner.model);
    let stopped = apply(&mut learner, None, &batch, &settings(), &mut |_, _| false);
    assert!(matches!(stopped, Err(StepError::Stopped)));
    let bad = Hyperparameters { learning_rate: f64::NAN, ..settings() };
    assert!(check_settings(&bad).unwrap_err().to_string().contains("learning_rate"));
    assert!(check_settings(&settings()).is_ok());
}

/// Applies a step with a reference policy that differs from the model.
fn applied(settings: &Hyperparameters) -> (Learner, StepMetrics) {
    applied_to(3, settings)
}

fn applied_to(seed: u64, settings: &Hyperparameters) -> (Learner, StepMetrics) {
    let model = model_of(seed);
    let batch = batch(&model);
    let mut learner = Learner::new(model);
    let reference = TrainModel::new(&Weights::random(config(), seed));
    let metrics = apply(&mut learner, Some(&reference), &batch, settings, &mut |_, _| true);
    (learner, metrics.unwrap_or_else(|error| panic!("{settings:?}: {error}")))
}

/// A kind of option, and a setting of it.
type Choice = (&'static str, Box<dyn Fn(&mut AlgorithmSection)>);

fn options() -> Vec<Choice> {
    let mut all: Vec<Choice> = Vec::new();
    for loss in PolicyLoss::ALL {
        all.push(("loss", Box::new(move |s| s.policy_loss = Some(loss))));
    }
    for shift in [RouterShift::BeforeClip, RouterShift::AfterClip] {
        all.push(("shift", Box::new(move |s| s.router_shift = Some(shift))));
    }
    for correction in [
        ImportanceCorrection::Tis,
        ImportanceCorrection::Mis,
        ImportanceCorrection::Icepop,
        ImportanceCorrection::GeometricMask,
    ] {
        all.push(("correction", Box::new(move |s| s.importance_correction = Some(correction))));
    }
    for estimator in [KlEstimator::K1, KlEstimator::K2, KlEstimator::K3, KlEstimator::K3Plus] {
        all.push((
            "kl",
            Box::new(move |s| {
                s.kl_coefficient = Some(0.1);
                s.kl_estimator = Some(estimator);
            }),
        ));
    }
    for replay in [RoutingReplay::None, RoutingReplay::Recompute, RoutingReplay::Predictive] {
        all.push(("replay", Box::new(move |s| s.routing_replay = Some(replay))));
    }
    for sum in [LossAggregation::SeqMeanTokenMean, LossAggregation::SeqMeanTokenSum] {
        all.push(("sum", Box::new(move |s| s.aggregation = Some(sum))));
    }
    all.push(("delta", Box::new(|s| s.off_policy_delta = Some(0.05))));
    all.push(("warm-up", Box::new(|s| s.warmup_steps = Some(4))));
    all
}

#[test]
fn every_allowed_pair_of_options_trains() {
    let options = options();
    let (mut worked, mut refused) = (0, 0);
    for (i, (a, first)) in options.iter().enumerate() {
        for (b, second) in options.iter().skip(i + 1).filter(|(b, _)| b != a) {
            let mut section = AlgorithmSection {
                mini_steps: Some(3),
                learning_rate: Some(1e-3),
                ..AlgorithmSection::default()
            };
            first(&mut section);
            second(&mut section);
            let Ok(algorithm) = section.check() else {
                refused += 1;
                continue;
            };
            let h = algorithm.hyperparameters(1.0, false);
            let (learner, metrics) = applied(&h);
            assert!(learner.model.params().iter().all(|p| p.is_finite()), "{a} {b} {h:?}");
            assert_ne!(learner.model.params(), model().params(), "{a} {b} {h:?}");
            worked += 1;
            // A correction may mask every token of this small batch.
            if metrics.rollout_ratio.weight_mean < f64::MIN_POSITIVE {
                assert!(metrics.rollout_ratio.corrected > 0.99 && metrics.grad_norm < 1e-12);
                continue;
            }
            assert!(metrics.grad_norm > 0.0 && metrics.loss.is_finite(), "{metrics:?}");
            assert!(metrics.router_grad_norm > 0.0 && metrics.router_grad_norm < metrics.grad_norm);
            assert_eq!(metrics.kl_reference.is_some(), h.kl_coefficient > 0.0);
            assert_eq!(metrics.router_shift.is_some(), h.router_shift != RouterShift::None);
            assert_eq!(metrics.value.is_some(), h.policy_loss == PolicyLoss::Ppo);
            let predictive = h.routing_replay == RoutingReplay::Predictive;
            assert_eq!(metrics.predictor_loss.is_some(), predictive);
            assert_eq!(metrics.route_drift.is_some(), h.routing_replay != RoutingReplay::None);
        }
    }
    assert!(worked > 150 && refused > 20, "{worked} {refused}");
}

#[test]
fn with_ratio_one_every_loss_has_the_gradient_of_its_advantages() {
    // At unchanged weights no clip acts: all losses of the same aggregation agree.
    let norm = |policy_loss| {
        let h = Hyperparameters {
            policy_loss,
            clip_low: 0.4,
            clip_high: 0.4,
            aggregation: LossAggregation::SeqMeanTokenMean,
            ..settings()
        };
        step(&h).1.grad_norm
    };
    let grpo = norm(PolicyLoss::Grpo);
    for loss in [PolicyLoss::Gspo, PolicyLoss::Gmpo, PolicyLoss::Cispo, PolicyLoss::Sapo] {
        let other = norm(loss);
        assert!((other - grpo).abs() < 1e-5 * grpo, "{loss:?}: {other} {grpo}");
    }
}

#[test]
fn the_learning_rate_warms_up_over_optimizer_steps() {
    let h = Hyperparameters { warmup_steps: 4, mini_steps: 3, ..settings() };
    let (mut learner, metrics) = applied(&h);
    assert!((metrics.learning_rate - 0.75e-3).abs() < 1e-12);
    let batch = batch(&model());
    // The warm-up continues with the next batch, also after the optimizer was saved and loaded.
    let folder = tempfile::tempdir().unwrap();
    let folder = camino::Utf8Path::from_path(folder.path()).unwrap();
    learner.adam.write(learner.model.layout(), folder).unwrap();
    learner.adam = AdamW::load(learner.model.layout(), folder).unwrap();
    let one = Hyperparameters { mini_steps: 1, ..h };
    let metrics = apply(&mut learner, None, &batch, &one, &mut |_, _| true).unwrap();
    assert!((metrics.learning_rate - 1e-3).abs() < 1e-12);
}

#[test]
fn the_divergence_pulls_towards_the_reference() {
    // Without advantages the loss is the divergence alone, and a small step must reduce it on the
    // same batch.
    let small = |beta| Hyperparameters { kl_coefficient: beta, learning_rate: 3e-6, ..settings() };
    let still = |beta| Hyperparameters { learning_rate: 0.0, ..small(beta) };
    for seed in SEEDS {
        let model = model_of(seed);
        let batch = batch_with(&model, [0.0; 5]);
        let reference = TrainModel::new(&Weights::random(config(), seed));
        let mut learner = Learner::new(model);
        let mut divergence = |h| {
            let metrics = apply(&mut learner, Some(&reference), &batch, &h, &mut |_, _| true);
            metrics.unwrap().kl_reference
        };
        let (first, last) = (divergence(small(20.0)).unwrap(), divergence(still(20.0)).unwrap());
        assert!(last < first, "model {seed}: {first} {last}");
        assert_eq!(divergence(still(0.0)), None);
    }
    let mut learner = Learner::new(model());
    let missing = apply(&mut learner, None, &batch(&model()), &small(0.1), &mut |_, _| true);
    assert!(matches!(missing, Err(StepError::NoReference)));
}

#[test]
fn a_value_head_learns_the_returns() {
    // The policy stands still, so that the head has a fixed regression to solve.
    let h = Hyperparameters {
        policy_loss: PolicyLoss::Ppo,
        learning_rate: 1e-9,
        value_rate: 3e7,
        value_coefficient: 1e-6,
        mini_steps: 2,
        ..settings()
    };
    for seed in SEEDS {
        let (mut learner, first) = applied_to(seed, &h);
        let batch = batch(&model_of(seed));
        let mut last = first.clone();
        for _ in 0..40 {
            last = apply(&mut learner, None, &batch, &h, &mut |_, _| true).unwrap();
        }
        let (first, last) = (first.value.unwrap(), last.value.unwrap());
        assert!(last.loss < first.loss, "model {seed}: {first:?} {last:?}");
        assert!(last.explained_variance > first.explained_variance, "{first:?} {last:?}");
    }
}

#[test]
fn the_router_predictor_learns_where_the_routers_go() {
    let h = Hyperparameters {
        routing_replay: RoutingReplay::Predictive,
        predictor_rate: 1.0,
        predictor_tokens: 8,
        mini_steps: 4,
        learning_rate: 3e-3,
        ..settings()
    };
    let (learner, metrics) = applied(&h);
    let predictor = learner.auxiliary.predictor.as_ref().unwrap();
    assert_eq!(predictor.weights().len(), 2 * 4 * 16);
    assert!(predictor.weights().iter().any(|w| w.abs() > 0.0));
    let loss = metrics.predictor_loss.unwrap();
    assert!(loss > 0.0 && loss.is_finite());
    // It changes nothing in the model: the policy's step is that of R3.
    let plain = Hyperparameters { routing_replay: RoutingReplay::Rollout, ..h };
    assert_eq!(applied(&plain).0.model.params(), learner.model.params());
    // A checkpoint keeps it.
    let folder = tempfile::tempdir().unwrap();
    let folder = camino::Utf8Path::from_path(folder.path()).unwrap();
    learner.auxiliary.write(folder).unwrap();
    assert_eq!(AuxiliaryWeights::load(folder, &config()).unwrap(), learner.auxiliary);
}

#[test]
fn router_shift_reduces_the_weight_of_tokens_whose_routers_moved() {
    let h = Hyperparameters {
        policy_loss: PolicyLoss::Rspo,
        router_shift: RouterShift::BeforeClip,
        clip_low: 0.4,
        clip_high: 0.4,
        aggregation: LossAggregation::SeqMeanTokenMean,
        mini_steps: 3,
        learning_rate: 3e-2,
        ..settings()
    };
    let shift = |seed, h: &Hyperparameters| applied_to(seed, h).1.router_shift.unwrap();
    for replay in [RoutingReplay::None, RoutingReplay::Recompute, RoutingReplay::Rollout] {
        for seed in SEEDS {
            let moved = shift(seed, &Hyperparameters { routing_replay: replay, ..h.clone() });
            let still = Hyperparameters { routing_replay: replay, learning_rate: 0.0, ..h.clone() };
            let still = shift(seed, &still);
            // Exactly 1: the update computes the same router probabilities as the recompute.
            assert!((still.mean - 1.0).abs() < 1e-12 && still.floored.abs() < 1e-12, "{still:?}");
            assert!(moved.mean < still.mean && moved.mean >= h.router_shift_floor, "{moved:?}");
        }
    }
}

#[test]
fn optimizer_steps_match_their_vectors() {
    let file = vectors("optimizer");
    for case in cases(&file) {
        let mut h = serde_json::to_value(Hyperparameters::default()).unwrap();
        for (key, value) in case["settings"].as_object().unwrap() {
            h[key] = value.clone();
        }
        let h: Hyperparameters = typed(&h);
        let mut params: Vec<f32> = typed(&file["start"]);
        let mut learner = Learner::new(model());
        learner.adam = AdamW::new(params.len());
        let steps = case["expected"].as_array().unwrap();
        for (grads, expected) in file["gradients"].as_array().unwrap().iter().zip(steps) {
            let mut grads: Vec<f32> = typed(grads);
            let norm = clip_global_norm(&mut grads, h.max_grad_norm);
            learner.adam.update(learner.next_update(&h), &mut params, &grads);
            close(&[norm], &numbers(&expected["norm"]), 1e-6);
            let found: Vec<f64> = params.iter().map(|&p| f64::from(p)).collect();
            close(&found, &numbers(&expected["parameters"]), 1e-6);
        }
    }
}
