//! Supervised training of a starting policy: weighted next-token loss plus expert balance loss.

use super::batch::{BatchError, PackedBatch};
use super::model::TrainModel;
use super::optimizer::{AdamSettings, AdamW, clip_global_norm};
use super::pass::{Pass, SequenceOutput, TokenGradient};
use std::ops::ControlFlow;
use std::time::Instant;

/// One demonstration of `T` tokens.
#[derive(Debug, Clone, PartialEq)]
pub struct SftSequence {
    /// Token ids `[T]`.
    pub tokens: Vec<u32>,
    /// Weight of each token's loss, ≥ 0; that of the first token is ignored. `[T]`
    pub weights: Vec<f32>,
}

/// Shape of the learning rate decay after the warm-up, up to the end of the token budget.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Decay {
    /// Half a cosine wave.
    Cosine,
    /// Linear decay.
    Linear,
}

/// Hyperparameters of the supervised phase.
#[derive(Debug, Clone, PartialEq)]
pub struct SftOptions {
    /// Number of tokens to train on; training ends with the step that reaches it.
    pub token_budget: u64,
    /// Number of tokens over which the learning rate rises linearly from 0.
    pub warmup_tokens: u64,
    /// Peak learning rate.
    pub learning_rate: f64,
    /// Learning rate at the end, as a share of the peak.
    pub final_share: f64,
    /// Shape of the decay.
    pub decay: Decay,
    /// Number of sequences per optimizer step.
    pub batch_sequences: usize,
    /// Coefficient of the balance loss, per layer.
    pub balance: f64,
    /// `AdamW` decay rates (β₁, β₂).
    pub betas: (f64, f64),
    /// `AdamW` ε, added to the denominator.
    pub adam_eps: f64,
    /// Decoupled weight decay.
    pub weight_decay: f64,
    /// Global L2 norm to which the gradient is clipped.
    pub max_grad_norm: f64,
}

impl Default for SftOptions {
    fn default() -> Self {
        Self {
            token_budget: 3_000_000,
            warmup_tokens: 60_000,
            learning_rate: 3e-3,
            final_share: 0.1,
            decay: Decay::Cosine,
            batch_sequences: 8,
            balance: 0.01,
            betas: (0.9, 0.95),
            adam_eps: 1e-8,
            weight_decay: 0.0,
            max_grad_norm: 1.0,
        }
    }
}

impl SftOptions {
    /// Learning rate after `tokens` training tokens.
    pub fn rate_at(&self, tokens: u64) -> f64 {
        if tokens < self.warmup_tokens {
            return self.learning_rate * (tokens + 1) as f64 / self.warmup_tokens as f64;
        }
        let span = self.token_budget.saturating_sub(self.warmup_tokens).max(1) as f64;
        let done = ((tokens - self.warmup_tokens) as f64 / span).min(1.0);
        let left = match self.decay {
            Decay::Cosine => 0.5 * (1.0 + libm::cos(std::f64::consts::PI * done)),
            Decay::Linear => 1.0 - done,
        };
        self.learning_rate * (self.final_share + (1.0 - self.final_share) * left)
    }
}

/// Progress of the supervised phase after a step.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct SftProgress {
    /// Number of optimizer steps so far.
    pub step: u64,
    /// Number of training tokens so far.
    pub tokens: u64,
    /// Weighted mean negative log-prob of this step's batch, in nats.
    pub loss: f64,
    /// Balance loss, mean over layers: 1 = perfectly balanced.
    pub balance: f64,
    /// Global L2 norm of the gradient before clipping.
    pub grad_norm: f64,
    /// Learning rate of this step.
    pub learning_rate: f64,
    /// Average speed in tokens per second, excluding time spent in `on_step`.
    pub tokens_per_second: f64,
}

/// Why the supervised phase failed.
#[derive(Debug, thiserror::Error)]
pub enum SftError {
    /// A demonstration does not fit the model.
    #[error("demonstration batch {step} does not fit the model")]
    Batch {
        /// Index of the step.
        step: u64,
        /// Why the batch does not fit.
        #[source]
        source: BatchError,
    },
    /// The loss or the gradient is no longer finite.
    #[error("loss or gradient of step {step} is not finite; lower the learning rate")]
    NotFinite {
        /// Index of the step.
        step: u64,
    },
}

/// Trains `model` on demonstrations in the given order (repeat or shuffle them in the iterator)
/// until the token budget is reached, the iterator ends, or `on_step` breaks. `on_step` is called
/// with the model after each update, to evaluate or save it. Returns the progress after the last
/// step, or `None` if there was no step.
///
/// # Errors
/// If a demonstration does not fit the model, or the loss or gradient is not finite. The model is
/// then as after the last successful step.
pub fn train(
    model: &mut TrainModel<f32>,
    demonstrations: impl IntoIterator<Item = SftSequence>,
    options: &SftOptions,
    mut on_step: impl FnMut(&SftProgress, &TrainModel<f32>) -> ControlFlow<()>,
) -> Result<Option<SftProgress>, SftError> {
    let mut demonstrations = demonstrations.into_iter();
    let mut adam = AdamW::new(model.params().len());
    let mut grads = vec![0.0; model.params().len()];
    let mut last: Option<SftProgress> = None;
    let mut seconds = 0.0;
    loop {
        let (step, tokens) = last.map_or((0, 0), |p| (p.step, p.tokens));
        if tokens >= options.token_budget {
            return Ok(last);
        }
        let batch: Vec<_> = demonstrations.by_ref().take(options.batch_sequences.max(1)).collect();
        if batch.is_empty() {
            return Ok(last);
        }
        let started = Instant::now();
        let packed = pack(model, &batch).map_err(|source| SftError::Batch { step, source })?;
        grads.fill(0.0);
        let (loss, balance) = gradients(model, &packed, options.balance, &mut grads);
        let grad_norm = clip_global_norm(&mut grads, options.max_grad_norm);
        if !loss.is_finite() || !grad_norm.is_finite() {
            return Err(SftError::NotFinite { step });
        }
        let learning_rate = options.rate_at(tokens);
        let settings = AdamSettings {
            learning_rate,
            betas: options.betas,
            eps: options.adam_eps,
            weight_decay: options.weight_decay,
        };
        adam.update(settings, model.params_mut(), &grads);
        seconds += started.elapsed().as_secs_f64();
        let tokens = tokens + packed.batch.tokens().len() as u64;
        let progress = SftProgress {
            step: step + 1,
            tokens,
            loss,
            balance,
            grad_norm,
            learning_rate,
            tokens_per_second: tokens as f64 / seconds.max(1e-9),
        };
        last = Some(progress);
        if on_step(&progress, model).is_break() {
            return Ok(last);
        }
    }
}

/// Weighted mean negative log-prob of held-out demonstrations, in nats.
///
/// # Errors
/// If a demonstration does not fit the model.
pub fn evaluate(model: &TrainModel<f32>, held_out: &[SftSequence]) -> Result<f64, BatchError> {
    let packed = pack(model, held_out)?;
    let all: Vec<usize> = (0..packed.batch.sequences()).collect();
    let outputs = model.forward(&packed.batch, Pass::new(&all));
    let total: f64 = packed.weights.iter().map(|&w| f64::from(w)).sum();
    Ok(weighted_loss(&packed, &outputs) / total.max(f64::MIN_POSITIVE))
}

struct Weighted {
    batch: PackedBatch,
    /// Loss weights `[N]`; 0 for the first token of each sequence.
    weights: Vec<f32>,
}

fn pack(model: &TrainModel<f32>, batch: &[SftSequence]) -> Result<Weighted, BatchError> {
    let (mut tokens, mut weights, mut offsets) = (Vec::new(), Vec::new(), vec![0]);
    for sequence in batch {
        let (found, expected) = (sequence.weights.len(), sequence.tokens.len());
        if found != expected {
            return Err(BatchError::Length { array: "weights", found, expected });
        }
        tokens.extend_from_slice(&sequence.tokens);
        weights.push(0.0);
        weights.extend(sequence.weights.iter().skip(1));
        offsets.push(tokens.len());
    }
    let scored = weights.iter().map(|&w| w > 0.0).collect();
    let batch = PackedBatch::new(tokens, offsets, scored)?;
    batch.check(model.config().vocab_size, model.config().max_position_embeddings)?;
    Ok(Weighted { batch, weights })
}

/// Adds the gradient of the batch's loss to `grads`. Returns the loss and the balance loss per
/// layer.
#[expect(clippy::cast_possible_truncation, reason = "coefficients are f32")]
fn gradients(
    model: &TrainModel<f32>,
    packed: &Weighted,
    balance: f64,
    grads: &mut [f32],
) -> (f64, f64) {
    let tokens = packed.batch.tokens().len() as f64;
    let total: f64 = packed.weights.iter().map(|&w| f64::from(w)).sum();
    let scale = -(1.0 / total.max(f64::MIN_POSITIVE)) as f32;
    let all: Vec<usize> = (0..packed.batch.sequences()).collect();
    let pass = Pass { balance_per_token: balance / tokens, ..Pass::new(&all) };
    let coefficients = |output: &SequenceOutput<f32>| {
        let weights = packed.weights.get(packed.batch.range(output.sequence));
        let slopes = weights.unwrap_or_default().iter().map(|w| w * scale);
        TokenGradient::from(slopes.collect::<Vec<f32>>())
    };
    let (outputs, balance) = model.forward_backward(&packed.batch, pass, &coefficients, grads);
    let loss = weighted_loss(packed, &outputs) / total.max(f64::MIN_POSITIVE);
    (loss, balance / tokens / model.config().num_hidden_layers as f64)
}

fn weighted_loss(packed: &Weighted, outputs: &[SequenceOutput<f32>]) -> f64 {
    let of = |output: &SequenceOutput<f32>| -> f64 {
        let weights = packed.weights.get(packed.batch.range(output.sequence)).unwrap_or_default();
        weights.iter().zip(&output.logprobs).map(|(&w, &l)| -f64::from(w) * f64::from(l)).sum()
    };
    outputs.iter().map(of).sum()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Weights;

    fn tiny(seed: u64) -> TrainModel<f32> {
        let config = serde_json::from_value(serde_json::json!({
            "model_type": "qwen3_moe", "hidden_size": 16, "num_hidden_layers": 2,
            "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8,
            "moe_intermediate_size": 16, "num_experts": 4, "num_experts_per_tok": 2,
            "norm_topk_prob": true, "vocab_size": 17, "rms_norm_eps": 1e-6,
            "tie_word_embeddings": true, "max_position_embeddings": 32, "rope_theta": 1e4
        }));
        TrainModel::new(&Weights::random(config.unwrap(), seed))
    }

    fn counting(from: u32) -> SftSequence {
        let tokens: Vec<u32> = (0..12).map(|i| (from + i) % 17).collect();
        SftSequence { weights: vec![1.0; tokens.len()], tokens }
    }

    #[test]
    fn simple_rule_is_learned_within_the_budget() {
        let held_out: Vec<_> = (0..17).map(counting).collect();
        let options = SftOptions {
            token_budget: 12_000,
            warmup_tokens: 500,
            learning_rate: 1e-2,
            ..SftOptions::default()
        };
        for seed in 0..5 {
            let mut model = tiny(seed);
            let before = evaluate(&model, &held_out).unwrap();
            let data = (0..).map(|i| counting(i * 5 % 17));
            let last = train(&mut model, data, &options, |_, _| ControlFlow::Continue(())).unwrap();
            let after = evaluate(&model, &held_out).unwrap();
            let last = last.unwrap();
            assert!(after < before / 5.0, "{before} {after}");
            assert!(last.tokens >= 12_000 && last.tokens < 12_100);
            // Of 4 experts, those of half the tokens at most.
            assert!(last.balance > 0.5 && last.balance < 2.0, "{}", last.balance);
        }
    }

    #[test]
    fn callback_can_stop_training_and_errors_name_bad_tokens() {
        let mut model = tiny(5);
        let options = SftOptions::default();
        let one = train(&mut model, (0..).map(counting), &options, |_, _| ControlFlow::Break(()));
        assert_eq!(one.unwrap().unwrap().step, 1);
        let bad = SftSequence { tokens: vec![1, 99], weights: vec![1.0; 2] };
        let error = train(&mut model, [bad], &options, |_, _| ControlFlow::Continue(()));
        assert!(matches!(
            error,
            Err(SftError::Batch { source: BatchError::Token { id: 99, position: 1, .. }, .. })
        ));
    }

    #[test]
    fn learning_rate_warms_up_and_decays() {
        let options =
            SftOptions { token_budget: 1000, warmup_tokens: 100, ..SftOptions::default() };
        assert!(options.rate_at(0) < options.rate_at(50));
        assert!((options.rate_at(100) - 3e-3).abs() < 1e-12);
        assert!(options.rate_at(500) > options.rate_at(900));
        assert!((options.rate_at(1000) - 3e-4).abs() < 1e-12);
    }
}
