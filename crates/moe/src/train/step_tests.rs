//! Steps on a small model: what mini steps, micro batches and replay must and must not change.

use super::optimizer::AdamW;
use super::step::{StepError, TrainBatch, apply, check_settings, measure};
use super::{PackedBatch, Pass, Routes, TrainModel};
use crate::{ModelConfig, Weights};
use orchestrate_handoff::protocol::{
    Hyperparameters, LossAggregation, PolicyLoss, RoutingReplay, StepMetrics,
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

fn model() -> TrainModel<f32> {
    let mut model = TrainModel::new(&Weights::random(config(), 3));
    for p in model.params_mut() {
        *p *= 8.0;
    }
    model
}

fn settings() -> Hyperparameters {
    Hyperparameters {
        policy_loss: PolicyLoss::Grpo,
        clip_low: 0.2,
        clip_high: 0.28,
        dual_clip: None,
        aggregation: LossAggregation::TokenMean,
        loss_norm_tokens: 32.0,
        routing_replay: RoutingReplay::Rollout,
        mini_steps: 1,
        micro_batch_tokens: 4096,
        learning_rate: 1e-3,
        betas: (0.9, 0.95),
        adam_eps: 1e-8,
        weight_decay: 0.0,
        max_grad_norm: 1.0,
        temperature: 1.0,
        measure_no_replay: true,
    }
}

/// A batch sampled by the model with noisy routers: every third row's experts are others.
fn batch(model: &TrainModel<f32>) -> TrainBatch {
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
    let advantages = vec![1.0, -0.5, 0.75, -1.0, 0.25];
    TrainBatch::new(packed, rollout, advantages, routes, &config()).unwrap()
}

fn step(settings: &Hyperparameters) -> (TrainModel<f32>, StepMetrics) {
    let mut model = model();
    let batch = batch(&model);
    let mut adam = AdamW::new(model.params().len());
    let metrics = apply((&mut model, &mut adam), &batch, settings, &mut |_, _| true).unwrap();
    (model, metrics)
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
fn the_first_look_at_unchanged_weights_has_ratio_one() {
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
fn micro_batches_and_recompute_do_not_change_the_step() {
    let (whole, metrics) = step(&settings());
    let small = Hyperparameters { micro_batch_tokens: 8, ..settings() };
    let (parts, again) = step(&small);
    assert!((metrics.loss - again.loss).abs() < 1e-7);
    let (norm, other) = (metrics.grad_norm, again.grad_norm);
    assert!((norm - other).abs() < 1e-5 * norm, "{norm} {other}");
    for (a, b) in whole.params().iter().zip(parts.params()) {
        assert!((a - b).abs() < 2e-4, "{a} {b}");
    }
}

#[test]
fn a_step_makes_good_sequences_likelier_and_bad_ones_rarer() {
    let before = model();
    let batch = batch(&before);
    let learning = Hyperparameters { learning_rate: 3e-3, mini_steps: 2, ..settings() };
    let (after, metrics) = step(&learning);
    assert!(metrics.grad_norm > 0.0);
    let gain = |sequence: usize| {
        let of =
            |model| -> f32 { measure(model, &batch, true, 1.0).logprobs[sequence].iter().sum() };
        of(&after) - of(&before)
    };
    assert!(gain(0) > 0.0 && gain(3) < 0.0, "{} {}", gain(0), gain(3));
}

#[test]
fn a_step_can_be_stopped_and_settings_are_checked() {
    let mut model = model();
    let batch = batch(&model);
    let mut adam = AdamW::new(model.params().len());
    let stopped = apply((&mut model, &mut adam), &batch, &settings(), &mut |_, _| false);
    assert!(matches!(stopped, Err(StepError::Stopped)));
    let bad = Hyperparameters { learning_rate: f64::NAN, ..settings() };
    assert!(check_settings(&bad).unwrap_err().to_string().contains("learning_rate"));
    assert!(check_settings(&settings()).is_ok());
}
