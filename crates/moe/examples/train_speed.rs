//! Measures the trainer's speed on a model of the bundled policy's shape: tokens per second of
//! forward and backward over synthetic sequences. Run it with `cargo run -p orchestrate-moe
//! --example train_speed`.
#![expect(clippy::print_stdout, reason = "this program prints its measurements")]

use orchestrate_moe::train::sft::{SftOptions, SftSequence, train};
use orchestrate_moe::train::{PackedBatch, Pass, TrainModel};
use orchestrate_moe::{ModelConfig, Weights};
use std::ops::ControlFlow;
use std::time::Instant;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let config: ModelConfig = serde_json::from_str(
        r#"{"model_type": "qwen3_moe", "hidden_size": 128, "num_hidden_layers": 4,
            "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32,
            "moe_intermediate_size": 128, "num_experts": 8, "num_experts_per_tok": 2,
            "norm_topk_prob": true, "vocab_size": 1024, "rms_norm_eps": 1e-6,
            "tie_word_embeddings": true, "max_position_embeddings": 1024, "rope_theta": 1e4}"#,
    )?;
    let mut model: TrainModel<f32> = TrainModel::new(&Weights::random(config, 1));
    let sequence = |i: u32| {
        let tokens: Vec<u32> = (0..200 + i % 80).map(|t| (t * 37 + i * 11) % 1024).collect();
        SftSequence { weights: vec![1.0; tokens.len()], tokens }
    };
    let options = SftOptions { token_budget: 60_000, ..SftOptions::default() };
    let last = train(&mut model, (0..).map(sequence), &options, |_, _| ControlFlow::Continue(()))?;
    if let Some(last) = last {
        println!(
            "forward+backward+update: {:.0} tokens/s (loss {:.3})",
            last.tokens_per_second, last.loss
        );
    }
    let (mut tokens, mut offsets) = (Vec::new(), vec![0]);
    for i in 0..64 {
        tokens.extend(sequence(i).tokens);
        offsets.push(tokens.len());
    }
    let count = tokens.len();
    let batch = PackedBatch::new(tokens, offsets, vec![true; count])?;
    let all: Vec<usize> = (0..batch.sequences()).collect();
    let started = Instant::now();
    model.forward(&batch, Pass::new(&all));
    println!("forward: {:.0} tokens/s", count as f64 / started.elapsed().as_secs_f64());
    Ok(())
}
