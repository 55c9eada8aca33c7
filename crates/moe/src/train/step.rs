//! One step of reinforcement learning: recompute, measurements, mini steps. No files, no HTTP.
//!
//! The invariant: recompute and update execute the same routes, rows that were missing included
//! (the model's own choice in the recompute pass is stored and replayed).

use super::batch::{BatchError, PackedBatch, Routes};
use super::model::{Pass, SequenceOutput, TrainModel};
use super::optimizer::{AdamSettings, AdamW, clip_global_norm};
use crate::ModelConfig;
use crate::diagnostics::{DisagreementSum, MismatchSum};
use crate::loss::{SequenceLoss, Surrogate, TokenLogprobs, Totals};
use orchestrate_handoff::Batch;
use orchestrate_handoff::protocol::{
    Disagreement, Hyperparameters, Mismatch, PolicyLoss, RoutingReplay, StepMetrics,
};
use std::cmp::Reverse;

/// A step that cannot be done; weights must be put back by the caller.
#[derive(Debug, thiserror::Error)]
pub enum StepError {
    /// The batch does not fit together or the model.
    #[error("the batch does not fit the model")]
    Batch(#[from] BatchError),
    /// The batch was made for another model, or cannot be read.
    #[error(transparent)]
    Files(#[from] orchestrate_handoff::BatchError),
    /// Nothing to learn from.
    #[error("the batch has no loss tokens")]
    Empty,
    /// A setting outside its range.
    #[error("hyperparameter `{0}`")]
    Setting(&'static str),
    /// Loss or gradient is not a number any more.
    #[error("{what} of mini step {mini_step} is not finite")]
    NotFinite {
        /// Loss or gradient.
        what: &'static str,
        /// Counts from 1.
        mini_step: usize,
    },
    /// Somebody asked to stop.
    #[error("stopped before the step was applied: the trainer is shutting down")]
    Stopped,
}

/// A batch in memory: packed, checked against the model.
#[derive(Debug, Clone)]
pub struct TrainBatch {
    packed: PackedBatch,
    rollout_logprobs: Vec<f32>,
    advantages: Vec<f64>,
    routes: Routes,
}

impl TrainBatch {
    /// Takes plain arrays: `packed` (its `scored` is the loss mask), sampler's log-probs `[N]`,
    /// advantages `[S]`, and recorded routes `[N]`.
    ///
    /// # Errors
    /// If lengths disagree, or tokens or lengths do not fit the model.
    pub fn new(
        packed: PackedBatch,
        rollout_logprobs: Vec<f32>,
        advantages: Vec<f64>,
        routes: Routes,
        config: &ModelConfig,
    ) -> Result<Self, BatchError> {
        packed.check(config.vocab_size, config.max_position_embeddings)?;
        let tokens = packed.tokens().len();
        let lengths = [
            ("rollout_logprobs", rollout_logprobs.len(), tokens),
            ("advantages", advantages.len(), packed.sequences()),
            ("routing_valid", routes.rows(), tokens),
        ];
        for (array, found, expected) in lengths {
            if found != expected {
                return Err(BatchError::Length { array, found, expected });
            }
        }
        Ok(Self { packed, rollout_logprobs, advantages, routes })
    }

    /// Copies an opened batch folder.
    ///
    /// # Errors
    /// If it was made for another model, or holds values the model cannot take.
    pub fn from_files(files: &Batch, config: &ModelConfig) -> Result<Self, StepError> {
        let shape = config.shape();
        files.require_model(&shape)?;
        let wide = shape.id_bytes() == 2;
        let (mut tokens, mut mask, mut offsets) = (Vec::new(), Vec::new(), vec![0]);
        let (mut logprobs, mut advantages) = (Vec::new(), Vec::new());
        let (mut ids, mut valid) = (Vec::new(), Vec::new());
        for sequence in files.sequences() {
            let sequence = sequence?;
            tokens.extend_from_slice(sequence.token_ids);
            logprobs.extend_from_slice(sequence.rollout_logprobs);
            // Nothing comes before the first token, so it never has a log-prob.
            let masked = sequence.loss_mask.iter().enumerate().map(|(p, &m)| p > 0 && m == 1);
            mask.extend(masked);
            offsets.push(tokens.len());
            advantages.push(f64::from(sequence.advantage));
            valid.extend(sequence.routing_valid.iter().map(|&v| v == 1));
            for piece in sequence.routed_experts.pieces() {
                if wide {
                    let pairs = piece.as_chunks::<2>().0;
                    ids.extend(pairs.iter().map(|&pair| u16::from_le_bytes(pair)));
                } else {
                    ids.extend(piece.iter().map(|&id| u16::from(id)));
                }
            }
        }
        let packed = PackedBatch::new(tokens, offsets, mask)?;
        let dims = (shape.moe_layers.len(), shape.top_k, shape.experts);
        let routes = Routes::new(ids, valid, dims)?;
        Ok(Self::new(packed, logprobs, advantages, routes, config)?)
    }

    /// Tokens of all sequences.
    pub fn tokens(&self) -> usize {
        self.packed.tokens().len()
    }

    fn loss_tokens(&self, sequences: &[usize]) -> usize {
        sequences.iter().map(|&s| self.mask(s).iter().filter(|&&m| m).count()).sum()
    }

    fn mask(&self, sequence: usize) -> &[bool] {
        self.packed.scored().get(self.packed.range(sequence)).unwrap_or_default()
    }

    /// (token, layer) pairs without a row, last tokens excepted: nothing depends on theirs.
    fn missing_routes(&self) -> u64 {
        let missing = |sequence: usize| {
            let range = self.packed.range(sequence);
            let inputs = range.start..range.end - 1;
            inputs.filter(|&place| !self.routes.is_valid(place)).count()
        };
        let rows: usize = (0..self.packed.sequences()).map(missing).sum();
        (rows * self.routes.layers()) as u64
    }

    fn mismatch(&self, outputs: &[SequenceOutput<f32>]) -> Mismatch {
        let mut sum = MismatchSum::default();
        for output in outputs {
            let sampler = self.rollout_logprobs.get(self.packed.range(output.sequence));
            let pairs = output.logprobs.iter().zip(sampler.unwrap_or_default());
            for ((&trainer, &sampler), _) in
                pairs.zip(self.mask(output.sequence)).filter(|(_, masked)| **masked)
            {
                sum.add(f64::from(trainer), f64::from(sampler));
            }
        }
        sum.finish()
    }

    /// Against outputs of a forward without replay.
    fn disagreement(&self, outputs: &[SequenceOutput<f32>]) -> Disagreement {
        let mut sum = DisagreementSum::default();
        let width = self.routes.layers() * self.routes.top_k();
        for output in outputs {
            let places = self.packed.range(output.sequence);
            let rows = places.zip(output.routes.chunks_exact(width));
            let recorded = rows
                .filter(|(place, _)| self.routes.is_valid(*place))
                .map(|(place, own)| (self.routes.row(place), own));
            sum.add_sequence(recorded, self.routes.top_k());
        }
        sum.finish()
    }

    fn entropy(&self, outputs: &[SequenceOutput<f32>]) -> f64 {
        let (mut total, mut count) = (0.0, 0);
        for output in outputs {
            for (&value, _) in
                output.entropy.iter().zip(self.mask(output.sequence)).filter(|(_, m)| **m)
            {
                total += f64::from(value);
                count += 1;
            }
        }
        total / f64::from(count.max(1))
    }
}

/// What a forward without update says about a batch.
#[derive(Debug, Clone, PartialEq)]
pub struct Measured {
    /// Per sequence, log-prob of each token given those before; 0.0 for the first. `[T]`
    pub logprobs: Vec<Vec<f32>>,
    /// Against the sampler's log-probs, on loss tokens.
    pub mismatch: Mismatch,
    /// Route disagreement, if nothing was replayed.
    pub disagreement: Option<Disagreement>,
}

/// Log-probs of every token, with the batch's routes replayed or not. Nothing changes.
pub fn measure(
    model: &TrainModel<f32>,
    batch: &TrainBatch,
    replay: bool,
    temperature: f64,
) -> Measured {
    let every = batch.packed.with_all_scored();
    let all: Vec<usize> = (0..every.sequences()).collect();
    let replay = replay.then_some(&batch.routes);
    let outputs = model.forward(&every, Pass { replay, temperature, ..Pass::new(&all) });
    Measured {
        mismatch: batch.mismatch(&outputs),
        disagreement: replay.is_none().then(|| batch.disagreement(&outputs)),
        logprobs: outputs.into_iter().map(|o| o.logprobs).collect(),
    }
}

/// Checks settings that come from outside.
///
/// # Errors
/// Names the first setting outside its range, and the range.
pub fn check_settings(settings: &Hyperparameters) -> Result<(), StepError> {
    let unit = |v: f64| (0.0..1.0).contains(&v);
    let checks = [
        (settings.clip_low >= 0.0, "clip_low must be ≥ 0"),
        (settings.clip_high >= 0.0, "clip_high must be ≥ 0"),
        (settings.dual_clip.is_none_or(|c| c > 1.0), "dual_clip must be > 1"),
        (settings.loss_norm_tokens > 0.0, "loss_norm_tokens must be > 0"),
        (settings.mini_steps > 0, "mini_steps must be ≥ 1"),
        (settings.micro_batch_tokens > 0, "micro_batch_tokens must be ≥ 1"),
        (
            settings.learning_rate.is_finite() && settings.learning_rate >= 0.0,
            "learning_rate must be ≥ 0",
        ),
        (unit(settings.betas.0) && unit(settings.betas.1), "betas must lie in [0, 1)"),
        (settings.adam_eps > 0.0, "adam_eps must be > 0"),
        (settings.weight_decay >= 0.0, "weight_decay must be ≥ 0"),
        (settings.max_grad_norm > 0.0, "max_grad_norm must be > 0"),
        (settings.temperature.is_finite() && settings.temperature > 0.0, "temperature must be > 0"),
    ];
    checks.into_iter().find(|(fine, _)| !fine).map_or(Ok(()), |(_, m)| Err(StepError::Setting(m)))
}

/// Told of each phase with its share done; answers whether to go on.
pub type StepProgress<'a> = dyn FnMut(&'static str, f64) -> bool + 'a;

/// Applies one step to model and optimizer. On an error both may be half changed: the caller
/// keeps a copy. `seconds` and checkpoint fields of the metrics are left to the caller.
///
/// # Errors
/// [`StepError`].
pub fn apply(
    (model, adam): (&mut TrainModel<f32>, &mut AdamW),
    batch: &TrainBatch,
    settings: &Hyperparameters,
    progress: &mut StepProgress<'_>,
) -> Result<StepMetrics, StepError> {
    check_settings(settings)?;
    let all: Vec<usize> = (0..batch.packed.sequences()).collect();
    let loss_tokens = batch.loss_tokens(&all);
    if loss_tokens == 0 {
        return Err(StepError::Empty);
    }
    let mut metrics = StepMetrics {
        loss_tokens: loss_tokens as u64,
        tokens: batch.tokens() as u64,
        ..StepMetrics::default()
    };
    let replayed = match settings.routing_replay {
        RoutingReplay::Rollout => {
            metrics.routing_missing = batch.missing_routes();
            Some(&batch.routes)
        }
        RoutingReplay::None | RoutingReplay::Recompute => None,
    };
    let base = Pass {
        replay: replayed,
        temperature: settings.temperature,
        micro_batch_tokens: settings.micro_batch_tokens,
        ..Pass::new(&all)
    };
    let parts = mini_steps(&batch.packed, settings.mini_steps);

    if !progress("recompute", 0.0) {
        return Err(StepError::Stopped);
    }
    if settings.measure_no_replay && replayed.is_some() {
        let outputs = model.forward(&batch.packed, Pass { replay: None, ..base });
        metrics.mismatch_no_replay = Some(batch.mismatch(&outputs));
        metrics.disagreement = Some(batch.disagreement(&outputs));
    }
    // With one mini step the update's own forward is at the weights of the rollout: its log-probs
    // are the old ones, and a recompute pass would only repeat it.
    let recomputed = (parts.len() > 1).then(|| model.forward(&batch.packed, base));
    let stored = match (&recomputed, settings.routing_replay) {
        (Some(outputs), RoutingReplay::Recompute | RoutingReplay::Rollout) => {
            Some(executed_routes(model.config(), outputs)?)
        }
        (Some(_), RoutingReplay::None) | (None, _) => None,
    };
    if let Some(outputs) = &recomputed {
        measure_base(batch, settings, outputs, &mut metrics);
    }

    let update = Update {
        batch,
        settings,
        routes: stored.as_ref().or(replayed),
        old: recomputed.as_deref(),
    };
    let mut clipped = 0;
    for (number, sequences) in parts.iter().enumerate() {
        if !progress("update", number as f64 / parts.len() as f64) {
            return Err(StepError::Stopped);
        }
        let done = update.mini_step(model, adam, sequences, number + 1)?;
        metrics.loss += done.loss / parts.len() as f64;
        metrics.grad_norm += done.grad_norm / parts.len() as f64;
        clipped += done.clipped;
        if recomputed.is_none() {
            measure_base(batch, settings, &done.outputs, &mut metrics);
        }
    }
    metrics.clip_fraction = clipped as f64 / loss_tokens as f64;
    Ok(metrics)
}

/// Measurements from a forward of the whole batch at the weights it was sampled with.
fn measure_base(
    batch: &TrainBatch,
    settings: &Hyperparameters,
    outputs: &[SequenceOutput<f32>],
    metrics: &mut StepMetrics,
) {
    metrics.entropy = batch.entropy(outputs);
    metrics.mismatch = batch.mismatch(outputs);
    match settings.routing_replay {
        RoutingReplay::Rollout => {}
        RoutingReplay::None | RoutingReplay::Recompute => {
            metrics.disagreement = Some(batch.disagreement(outputs));
            if settings.measure_no_replay {
                metrics.mismatch_no_replay = Some(metrics.mismatch.clone());
            }
        }
    }
}

/// Every row valid: what the recompute pass executed, in batch order.
fn executed_routes(
    config: &ModelConfig,
    outputs: &[SequenceOutput<f32>],
) -> Result<Routes, BatchError> {
    let (layers, top_k) = (config.num_hidden_layers, config.num_experts_per_tok);
    let ids: Vec<u16> = outputs.iter().flat_map(|o| o.routes.iter().copied()).collect();
    let rows = ids.len() / (layers * top_k);
    Routes::new(ids, vec![true; rows], (layers, top_k, config.num_experts))
}

/// Sequences of each mini step: longest first to the emptiest, stable, none empty.
fn mini_steps(packed: &PackedBatch, count: u32) -> Vec<Vec<usize>> {
    let mut order: Vec<usize> = (0..packed.sequences()).collect();
    order.sort_by_key(|&s| Reverse(packed.range(s).len()));
    let count = usize::try_from(count).unwrap_or(usize::MAX).min(order.len());
    let mut parts = vec![(0, Vec::new()); count];
    for sequence in order {
        if let Some(part) = parts.iter_mut().min_by_key(|part| part.0) {
            part.0 += packed.range(sequence).len();
            part.1.push(sequence);
        }
    }
    parts
        .into_iter()
        .map(|(_, mut sequences)| {
            sequences.sort_unstable();
            sequences
        })
        .collect()
}

struct Update<'a> {
    batch: &'a TrainBatch,
    settings: &'a Hyperparameters,
    routes: Option<&'a Routes>,
    /// Old log-probs in batch order; `None` = those of the update's own forward.
    old: Option<&'a [SequenceOutput<f32>]>,
}

struct MiniStep {
    outputs: Vec<SequenceOutput<f32>>,
    loss: f64,
    grad_norm: f64,
    clipped: usize,
}

impl Update<'_> {
    fn mini_step(
        &self,
        model: &mut TrainModel<f32>,
        adam: &mut AdamW,
        sequences: &[usize],
        number: usize,
    ) -> Result<MiniStep, StepError> {
        let settings = self.settings;
        let totals =
            Totals { sequences: sequences.len(), loss_tokens: self.batch.loss_tokens(sequences) };
        let pass = Pass {
            replay: self.routes,
            temperature: settings.temperature,
            micro_batch_tokens: settings.micro_batch_tokens,
            ..Pass::new(sequences)
        };
        let mut grads = vec![0.0; model.params().len()];
        let gradient = |output: &SequenceOutput<f32>| self.loss(output, totals).gradient;
        let (outputs, _) = model.forward_backward(&self.batch.packed, pass, &gradient, &mut grads);
        let (mut loss, mut clipped) = (0.0, 0);
        for output in &outputs {
            let part = self.loss(output, totals);
            loss += part.value;
            clipped += part.clipped;
        }
        let not_finite = |what| StepError::NotFinite { what, mini_step: number };
        if !loss.is_finite() {
            return Err(not_finite("the loss"));
        }
        let grad_norm = clip_global_norm(&mut grads, settings.max_grad_norm);
        if !grad_norm.is_finite() {
            return Err(not_finite("the gradient"));
        }
        let adam_settings = AdamSettings {
            learning_rate: settings.learning_rate,
            betas: settings.betas,
            eps: settings.adam_eps,
            weight_decay: settings.weight_decay,
        };
        // Without loss tokens there is no gradient, and momentum alone must not move the weights.
        if totals.loss_tokens > 0 {
            adam.update(adam_settings, model.params_mut(), &grads);
        }
        Ok(MiniStep { outputs, loss, grad_norm, clipped })
    }

    fn loss(&self, output: &SequenceOutput<f32>, totals: Totals) -> SequenceLoss<f32> {
        let old = self.old.and_then(|all| all.get(output.sequence));
        let tokens = TokenLogprobs {
            new: &output.logprobs,
            old: old.map_or(&output.logprobs, |o| &o.logprobs),
            mask: self.batch.mask(output.sequence),
        };
        let advantage = self.batch.advantages.get(output.sequence).copied().unwrap_or(0.0);
        let surrogate = Surrogate {
            clip_low: self.settings.clip_low,
            clip_high: self.settings.clip_high,
            dual_clip: self.settings.dual_clip,
            aggregation: self.settings.aggregation,
            norm_tokens: self.settings.loss_norm_tokens,
        };
        match self.settings.policy_loss {
            PolicyLoss::Grpo => surrogate.sequence(totals, tokens, advantage),
        }
    }
}
