//! A batch in memory, and measurements of it.

use super::StepError;
use crate::ModelConfig;
use crate::diagnostics::{DisagreementSum, ExpertLoad, MismatchSum};
use crate::train::batch::{BatchError, PackedBatch, Routes};
use crate::train::pass::SequenceOutput;
use orchestrate_handoff::Batch;
use orchestrate_handoff::protocol::{Disagreement, Mismatch};

/// A batch, packed and checked against the model.
#[derive(Debug, Clone)]
pub struct TrainBatch {
    pub(super) packed: PackedBatch,
    rollout_logprobs: Vec<f32>,
    pub(super) advantages: Vec<f64>,
    pub(super) rewards: Vec<f64>,
    pub(super) routes: Routes,
}

impl TrainBatch {
    /// From plain arrays: `packed`, whose `scored` is the loss mask, the engine's log-probs `[N]` in
    /// nats, advantages and rewards `[S]`, and recorded routes of `N` rows.
    ///
    /// # Errors
    /// If the lengths disagree, or tokens or lengths do not fit the model.
    pub fn new(
        packed: PackedBatch,
        rollout_logprobs: Vec<f32>,
        (advantages, rewards): (Vec<f64>, Vec<f64>),
        routes: Routes,
        config: &ModelConfig,
    ) -> Result<Self, BatchError> {
        packed.check(config.vocab_size, config.max_position_embeddings)?;
        let tokens = packed.tokens().len();
        let lengths = [
            ("rollout_logprobs", rollout_logprobs.len(), tokens),
            ("advantages", advantages.len(), packed.sequences()),
            ("rewards", rewards.len(), packed.sequences()),
            ("routing_valid", routes.rows(), tokens),
        ];
        for (array, found, expected) in lengths {
            if found != expected {
                return Err(BatchError::Length { array, found, expected });
            }
        }
        Ok(Self { packed, rollout_logprobs, advantages, rewards, routes })
    }

    /// Reads an opened batch folder into memory.
    ///
    /// # Errors
    /// If it was made for another model, or has values that the model cannot take.
    pub fn from_files(files: &Batch, config: &ModelConfig) -> Result<Self, StepError> {
        let shape = config.shape();
        files.require_model(&shape)?;
        let wide = shape.id_bytes() == 2;
        let (mut tokens, mut mask, mut offsets) = (Vec::new(), Vec::new(), vec![0]);
        let (mut logprobs, mut advantages, mut rewards) = (Vec::new(), Vec::new(), Vec::new());
        let (mut ids, mut valid) = (Vec::new(), Vec::new());
        for sequence in files.sequences() {
            let sequence = sequence?;
            tokens.extend_from_slice(sequence.token_ids);
            logprobs.extend_from_slice(sequence.rollout_logprobs);
            // The first token has nothing to be predicted from, so it never has a log-prob.
            let masked = sequence.loss_mask.iter().enumerate().map(|(p, &m)| p > 0 && m == 1);
            mask.extend(masked);
            offsets.push(tokens.len());
            advantages.push(f64::from(sequence.advantage));
            rewards.push(f64::from(sequence.reward));
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
        Ok(Self::new(packed, logprobs, (advantages, rewards), routes, config)?)
    }

    /// Number of tokens of all sequences.
    pub fn tokens(&self) -> usize {
        self.packed.tokens().len()
    }

    pub(super) fn loss_tokens(&self, sequences: &[usize]) -> usize {
        sequences.iter().map(|&s| self.mask(s).iter().filter(|&&m| m).count()).sum()
    }

    pub(super) fn mask(&self, sequence: usize) -> &[bool] {
        self.packed.scored().get(self.packed.range(sequence)).unwrap_or_default()
    }

    /// The engine's log-probs of one sequence. `[T]`
    pub(super) fn sampler(&self, sequence: usize) -> &[f32] {
        self.rollout_logprobs.get(self.packed.range(sequence)).unwrap_or_default()
    }

    /// Number of (token, layer) pairs that can have a row: a last token never has one.
    pub(super) fn route_pairs(&self) -> u64 {
        ((self.tokens() - self.packed.sequences()) * self.routes.layers()) as u64
    }

    /// Number of (token, layer) pairs without a row, last tokens excepted: nothing depends on
    /// theirs.
    pub(super) fn missing_routes(&self) -> u64 {
        let missing = |sequence: usize| {
            let range = self.packed.range(sequence);
            let inputs = range.start..range.end - 1;
            inputs.filter(|&place| !self.routes.is_valid(place)).count()
        };
        let rows: usize = (0..self.packed.sequences()).map(missing).sum();
        (rows * self.routes.layers()) as u64
    }

    pub(super) fn mismatch(&self, outputs: &[SequenceOutput<f32>]) -> Mismatch {
        let mut sum = MismatchSum::default();
        for output in outputs {
            let pairs = output.logprobs.iter().zip(self.sampler(output.sequence));
            for ((&trainer, &sampler), _) in
                pairs.zip(self.mask(output.sequence)).filter(|(_, masked)| **masked)
            {
                sum.add(f64::from(trainer), f64::from(sampler));
            }
            sum.end_sequence();
        }
        sum.finish()
    }

    /// Route disagreement with the outputs of a forward pass without replay.
    pub(super) fn disagreement(&self, outputs: &[SequenceOutput<f32>]) -> Disagreement {
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

    pub(super) fn entropy(&self, outputs: &[SequenceOutput<f32>]) -> f64 {
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

    /// Use of the experts of each layer, last tokens excepted.
    pub(super) fn load(&self, outputs: &[SequenceOutput<f32>], experts: usize) -> ExpertLoad {
        let (layers, top_k) = (self.routes.layers(), self.routes.top_k());
        let rows = outputs.iter().flat_map(|output| {
            let rows = output.routes.chunks_exact(layers * top_k);
            let inputs = rows.len().saturating_sub(1);
            rows.take(inputs)
        });
        ExpertLoad::count(rows, layers, experts)
    }
}
