use super::*;
use serde_json::{Value, json};

fn numbers(value: &Value) -> Vec<f32> {
    serde_json::from_value(value.clone()).unwrap()
}

/// Configuration of the bundled policy, with the given number of layers.
pub(crate) fn small_config(layers: usize) -> ModelConfig {
    serde_json::from_value(json!({
        "model_type": "qwen3_moe", "hidden_size": 128, "num_hidden_layers": layers,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32,
        "moe_intermediate_size": 128, "num_experts": 8, "num_experts_per_tok": 2,
        "norm_topk_prob": true, "vocab_size": 1024, "rope_theta": 1e4, "rms_norm_eps": 1e-6,
        "tie_word_embeddings": true, "max_position_embeddings": 1024
    }))
    .unwrap()
}

fn run(model: &Model, pool: &mut KvPool, tokens: &[u32], slots: &[u32]) -> Vec<f32> {
    let mut scratch = Scratch::default();
    model.forward(pool, &[Chunk { tokens, slots, logits_from: 0 }], &mut scratch);
    scratch.logits
}

#[test]
fn f32_forward_matches_reference_logits_and_routes() {
    let weights = Weights::load(crate::golden::checkpoint()).unwrap();
    let file = crate::golden::vectors("whole_model");
    let case = &crate::golden::cases(&file)[0];
    let model = Model::build(&weights, WeightFormat::F32).unwrap();
    let tokens: Vec<u32> = serde_json::from_value(case["inputs"]["input_ids"].clone()).unwrap();
    let slots: Vec<u32> = (0u32..).take(tokens.len()).collect();
    let mut pool = KvPool::new(model.config(), 64);
    let logits = run(&model, &mut pool, &tokens, &slots);
    let vocab = model.config().vocab_size;
    let expected = &case["expected"];
    let close = |a: &[f32], b: &[f32]| a.iter().zip(b).all(|(a, b)| (a - b).abs() <= 1e-4);
    assert!(close(&logits[..vocab], &numbers(&expected["logits_first_row"])));
    let last = &logits[logits.len() - vocab..];
    assert!(close(last, &numbers(&expected["logits_last_row"])));
    let routes: Vec<Vec<Vec<u16>>> = serde_json::from_value(expected["idx_own"].clone()).unwrap();
    for (&slot, route) in slots.iter().zip(&routes) {
        assert_eq!(pool.route(slot), route.concat());
    }
    let lps = numbers(&expected["token_logprobs"]);
    for (i, &lp) in lps.iter().enumerate() {
        let mut row = logits[i * vocab..(i + 1) * vocab].to_vec();
        let logit = row[tokens[i + 1] as usize];
        let normaliser = model.probabilities(&mut row, 1.0);
        assert!((logit - normaliser - lp).abs() < 1e-4);
    }
}

#[test]
fn rows_do_not_depend_on_chunking_or_batch() {
    for format in [WeightFormat::F32, WeightFormat::Q8_0] {
        let model = Model::build(&Weights::random(small_config(2), 7), format).unwrap();
        let tokens: Vec<u32> = (0..40).map(|i| i * 23 % 1024).collect();
        let slots: Vec<u32> = (0..40).rev().collect();
        let mut pool = KvPool::new(model.config(), 512);
        let whole = run(&model, &mut pool, &tokens, &slots);
        let routes: Vec<u16> = slots.iter().flat_map(|&s| pool.route(s).to_vec()).collect();

        let mut pool = KvPool::new(model.config(), 512);
        let mut scratch = Scratch::default();
        let others: Vec<u32> = (0..9).collect();
        let mut pieces = Vec::new();
        for (from, to) in [(0, 1), (1, 4), (4, 11), (11, 40)] {
            let spare: Vec<u32> = (100..100 + 9).collect();
            let chunks = [
                Chunk { tokens: &others, slots: &spare, logits_from: 9 },
                Chunk { tokens: &tokens[from..to], slots: &slots[..to], logits_from: 0 },
            ];
            model.forward(&mut pool, &chunks, &mut scratch);
            pieces.extend_from_slice(&scratch.logits);
        }
        assert_eq!(bits(&whole), bits(&pieces));
        let again: Vec<u16> = slots.iter().flat_map(|&s| pool.route(s).to_vec()).collect();
        assert_eq!(routes, again);
    }
}

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|v| v.to_bits()).collect()
}

#[test]
fn q8_stays_close_to_f32_and_q4_is_coarser() {
    let tokens: Vec<u32> = (0..64).map(|i| i * 37 % 1024).collect();
    let slots: Vec<u32> = (0..64).collect();
    for seed in 0..5 {
        let weights = Weights::random(small_config(4), seed);
        let formats = [WeightFormat::F32, WeightFormat::Q8_0, WeightFormat::Q4_0];
        let [exact, fine, coarse] = formats.map(|format| {
            let model = Model::build(&weights, format).unwrap();
            run(&model, &mut KvPool::new(model.config(), 64), &tokens, &slots)
        });
        // Of the median token, because a token whose experts change has another error.
        let error = |found: &[f32]| {
            let rows = exact.chunks_exact(1024).zip(found.chunks_exact(1024));
            let mut errors: Vec<f32> =
                rows.map(|(a, b)| distance(a, b) / distance(a, &[0.0; 1024])).collect();
            errors.sort_by(f32::total_cmp);
            errors[errors.len() / 2]
        };
        let (fine, coarse) = (error(&fine), error(&coarse));
        assert!(fine > 0.0 && fine < 0.05, "{fine}");
        // A step of q4 is as large as 18 of q8.
        assert!(coarse > 6.0 * fine && coarse < 54.0 * fine, "coarse {coarse}, fine {fine}");
    }
}

/// Euclidean distance.
fn distance(a: &[f32], b: &[f32]) -> f32 {
    a.iter().zip(b).map(|(a, b)| (a - b) * (a - b)).sum::<f32>().sqrt()
}

#[test]
#[ignore = "a measurement without assertions"]
#[expect(clippy::print_stderr, reason = "prints what it measured")]
fn measure_decode_and_prefill() {
    let weights = Weights::random(small_config(4), 7);
    for format in [WeightFormat::F32, WeightFormat::Q8_0] {
        let model = Model::build(&weights, format).unwrap();
        let mut pool = KvPool::new(model.config(), 32 * 320);
        let mut scratch = Scratch::default();
        for batch in [1u32, 16, 32] {
            let slots: Vec<Vec<u32>> =
                (0..batch).map(|b| (b * 320..b * 320 + 300).collect()).collect();
            let started = orchestrate_e2e::thread_cpu_time().unwrap().as_secs_f64();
            for position in 150..300 {
                let chunks: Vec<Chunk<'_>> = slots
                    .iter()
                    .map(|s| Chunk { tokens: &[5], slots: &s[..position], logits_from: 0 })
                    .collect();
                model.forward(&mut pool, &chunks, &mut scratch);
            }
            let rate = 150.0 * f64::from(batch)
                / (orchestrate_e2e::thread_cpu_time().unwrap().as_secs_f64() - started);
            eprintln!("{format:?} decode, batch {batch}: {rate:.0} tokens/s");
        }
        let tokens: Vec<u32> = (0..200).collect();
        let started = orchestrate_e2e::thread_cpu_time().unwrap().as_secs_f64();
        for _ in 0..20 {
            let chunk = Chunk { tokens: &tokens, slots: &tokens, logits_from: 199 };
            model.forward(&mut pool, &[chunk], &mut scratch);
        }
        let rate =
            20.0 * 200.0 / (orchestrate_e2e::thread_cpu_time().unwrap().as_secs_f64() - started);
        eprintln!("{format:?} prefill of 200: {rate:.0} tokens/s");
    }
}

#[test]
fn predicted_logits_choose_experts_and_router_logits_weigh_them() {
    use crate::loss::predictor::add_prediction;
    use crate::train::{PackedBatch, Pass, Routes, TrainModel};
    let config = small_config(3);
    let weights = Weights::random(config.clone(), 7);
    let mut model = Model::build(&weights, WeightFormat::F32).unwrap();
    let tokens: Vec<u32> = (0..24).map(|i| i * 37 % 1024).collect();
    let slots: Vec<u32> = (0..24).collect();
    let route = |model: &Model| -> (Vec<u16>, Vec<f32>) {
        let mut pool = KvPool::new(model.config(), 64);
        let logits = run(model, &mut pool, &tokens, &slots);
        (slots.iter().flat_map(|&s| pool.route(s).to_vec()).collect(), logits)
    };
    let (own, _) = route(&model);
    let count = 3 * config.num_experts * config.hidden_size;
    let predictor: Vec<f32> =
        (0u8..=250).cycle().take(count).map(|i| (f32::from(i) - 125.0) / 4000.0).collect();
    model.predict_routes(&predictor);
    let (chosen, logits) = route(&model);
    assert_ne!(chosen, own);

    // The trainer replays the routes and returns its router inputs and logits.
    let routes = Routes::new(chosen.clone(), vec![true; 24], (3, 2, 8)).unwrap();
    let batch = PackedBatch::new(tokens.clone(), vec![0, 24], vec![true; 24]).unwrap();
    let trainer: TrainModel<f32> = TrainModel::new(&weights);
    let pass =
        Pass { replay: Some(&routes), router_logits: true, router_inputs: 24, ..Pass::new(&[0]) };
    let seen = trainer.forward(&batch, pass).remove(0);
    let per_layer = predictor.chunks(config.num_experts * config.hidden_size);
    let layers: Vec<&[f32]> = per_layer.collect();
    let rows = seen.router_logits.chunks(8).zip(seen.router_inputs.chunks(128));
    for (i, ((logits, inputs), chosen)) in rows.zip(chosen.chunks(2)).enumerate() {
        let mut predicted = logits.to_vec();
        add_prediction(layers[i % 3], inputs, &mut predicted);
        let mut ids = [0; 2];
        trainer.family().select(&predicted, &mut ids);
        assert_eq!(ids, chosen, "router {i}");
    }
    for (t, expected) in seen.logprobs.iter().enumerate().skip(1) {
        let mut row = logits[(t - 1) * 1024..t * 1024].to_vec();
        let logit = row[tokens[t] as usize];
        let found = logit - model.probabilities(&mut row, 1.0);
        assert!((found - expected).abs() < 1e-4, "{t}: {found} {expected}");
    }
}
