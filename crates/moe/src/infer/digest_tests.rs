//! A seeded training run in small: sample, train, sample again. Its digest was recorded once and must
//! be the same on every processor, with every instruction set, and on any number of threads.

use crate::infer::WeightFormat;
use crate::infer::model::{Chunk, KvPool, Model, Scratch};
use crate::infer::sampling::Sampling;
use crate::train::learner::Learner;
use crate::train::step::{TrainBatch, apply};
use crate::train::{PackedBatch, Routes, TrainModel};
use crate::{ModelConfig, Weights};
use orchestrate_handoff::protocol::{Hyperparameters, LossAggregation, PolicyLoss};
use std::sync::Arc;

const STEPS: u64 = 10;
const SEQUENCES: usize = 12;
const LENGTH: usize = 40;

/// Widths that fill no tile of any instruction set.
fn config() -> ModelConfig {
    serde_json::from_value(serde_json::json!({
        "model_type": "qwen3_moe", "hidden_size": 96, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 24,
        "moe_intermediate_size": 32, "num_experts": 6, "num_experts_per_tok": 2,
        "norm_topk_prob": true, "vocab_size": 301, "rms_norm_eps": 1e-6,
        "tie_word_embeddings": true, "max_position_embeddings": 64, "rope_theta": 1e4
    }))
    .unwrap()
}

/// Samples a batch and returns it with a checksum of tokens, log-probs and routes.
fn sampled(weights: &Weights, format: WeightFormat, step: u64) -> (TrainBatch, blake3::Hash) {
    let model = Model::build(weights, format).unwrap();
    let mut hash = blake3::Hasher::new();
    let (mut tokens, mut logprobs, mut routes) = (Vec::new(), Vec::new(), Vec::new());
    for sequence in 0..SEQUENCES as u64 {
        let sampling = Sampling {
            max_new_tokens: LENGTH,
            min_new_tokens: 0,
            temperature: 0.9,
            top_k: None,
            top_p: 1.0,
            min_p: 0.0,
            seed: Some(step),
            stream: sequence,
            stop_token_ids: Arc::default(),
            stop: Arc::default(),
            ignore_eos: true,
        };
        let mut pool = KvPool::new(model.config(), LENGTH);
        let mut scratch = Scratch::default();
        let slots: Vec<u32> = (0..).take(LENGTH).collect();
        let mut own = vec![u32::try_from(sequence).unwrap()];
        logprobs.push(0.0);
        while own.len() < LENGTH {
            let place = own.len() - 1;
            let chunk = Chunk { tokens: &own[place..], slots: &slots[..own.len()], logits_from: 0 };
            model.forward(&mut pool, &[chunk], &mut scratch);
            let drawn = sampling.draw(&model, &scratch.logits, step, place).unwrap();
            own.push(drawn.token);
            logprobs.push(drawn.logprob);
        }
        let last = Chunk { tokens: &own[LENGTH - 1..], slots: &slots, logits_from: 0 };
        model.forward(&mut pool, &[last], &mut scratch);
        routes.extend(slots.iter().flat_map(|&slot| pool.route(slot).to_vec()));
        tokens.extend(own);
    }
    for token in &tokens {
        hash.update(&token.to_le_bytes());
    }
    for logprob in &logprobs {
        hash.update(&logprob.to_bits().to_le_bytes());
    }
    for id in &routes {
        hash.update(&id.to_le_bytes());
    }
    let count = tokens.len();
    let scored = (0..count).map(|place| place % LENGTH != 0).collect();
    let offsets = (0..=SEQUENCES).map(|sequence| sequence * LENGTH).collect();
    let reward = |sequence: usize| f64::from(u8::from(tokens[sequence * LENGTH + 9] % 2 == 0));
    let rewards: Vec<f64> = (0..SEQUENCES).map(reward).collect();
    let advantages = rewards.iter().map(|reward| reward - 0.5).collect();
    let packed = PackedBatch::new(tokens, offsets, scored).unwrap();
    let shape = (2, 2, 6);
    let routes = Routes::new(routes, vec![true; count], shape).unwrap();
    let batch = TrainBatch::new(packed, logprobs, (advantages, rewards), routes, &config());
    (batch.unwrap(), hash.finalize())
}

/// A digest of all tokens, log-probs, routes, losses and weights of a run.
fn digest(format: WeightFormat, policy_loss: PolicyLoss) -> String {
    let settings = Hyperparameters {
        policy_loss,
        aggregation: LossAggregation::SeqMeanTokenMean,
        dual_clip: None,
        learning_rate: 1e-3,
        mini_steps: 2,
        micro_batch_tokens: 256,
        loss_norm_tokens: 256.0,
        measure_no_replay: true,
        ..Hyperparameters::default()
    };
    let mut model = TrainModel::<f32>::new(&Weights::random(config(), 11));
    for p in model.params_mut() {
        *p *= 6.0;
    }
    let mut learner = Learner::new(model);
    let mut hash = blake3::Hasher::new();
    for step in 1..=STEPS {
        let (batch, seen) = sampled(&learner.model.weights().unwrap(), format, step);
        hash.update(seen.as_bytes());
        let metrics = apply(&mut learner, None, &batch, &settings, &mut |_, _| true).unwrap();
        for number in [metrics.loss, metrics.grad_norm, metrics.entropy, metrics.mismatch.kl_k3] {
            hash.update(&number.to_bits().to_le_bytes());
        }
        for parameter in learner.model.params() {
            hash.update(&parameter.to_bits().to_le_bytes());
        }
    }
    hash.finalize().to_hex()[..16].to_owned()
}

#[test]
fn a_seeded_run_has_its_recorded_digest_on_every_processor() {
    let found =
        [digest(WeightFormat::F32, PolicyLoss::Grpo), digest(WeightFormat::Q8_0, PolicyLoss::Gspo)];
    assert_eq!(found, ["b423963941bb8cd3", "05e14c3f28c36233"]);
}

#[test]
fn the_number_of_threads_changes_no_bit() {
    let on = |threads| {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
        pool.install(|| digest(WeightFormat::F32, PolicyLoss::Grpo))
    };
    let alone = on(1);
    assert_eq!((on(3), on(8)), (alone.clone(), alone));
}
