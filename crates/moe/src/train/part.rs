//! Division of a batch into lanes, which threads process, and of each lane into parts whose
//! activations are held together.
#![expect(clippy::indexing_slicing, reason = "dense numeric code over rows of known width")]

use super::batch::PackedBatch;
use super::experts::MoeShape;
use super::head::Targets;
use super::pass::{Pass, SequenceOutput, spread};
use super::real::Real;
use std::ops::Range;

/// Maximum number of tokens per part, whatever the caller allows: larger parts cost memory without
/// being faster.
const PART_TOKENS: usize = 1024;

/// Maximum number of lanes. A constant, because gradients are summed lane by lane: the sum must not
/// depend on how many threads a machine has.
const LANES: usize = 8;

/// Sequences of a lane whose activations are held together.
#[derive(Debug)]
pub(super) struct Part {
    pub(super) sequences: Vec<usize>,
    /// Rows of each sequence.
    pub(super) ranges: Vec<Range<usize>>,
    /// Position in the packed batch, by row.
    pub(super) places: Vec<usize>,
    /// Position in its sequence, by row.
    pub(super) positions: Vec<usize>,
}

/// Distributes sequences over lanes (longest first, to the least loaded lane) and splits each lane
/// into parts.
pub(super) fn lanes<T>(batch: &PackedBatch, pass: &Pass<'_, T>) -> Vec<Vec<Part>> {
    let count = LANES.min(pass.sequences.len()).max(1);
    let limit = (pass.micro_batch_tokens / count).clamp(1, PART_TOKENS);
    let mut sequences = pass.sequences.to_vec();
    sequences.sort_by_key(|&s| std::cmp::Reverse(batch.range(s).len()));
    let mut loads = vec![(0, Vec::new()); count];
    for sequence in sequences {
        let tokens = batch.range(sequence).len();
        if let Some(lane) = loads.iter_mut().min_by_key(|lane| lane.0) {
            lane.0 += tokens;
            lane.1.push(sequence);
        }
    }
    let cut = |sequences: Vec<usize>| {
        let mut parts: Vec<Part> = Vec::new();
        for sequence in sequences {
            let tokens = batch.range(sequence).len();
            if parts.last().is_none_or(|part| part.places.len() + tokens > limit) {
                parts.push(Part::empty());
            }
            if let Some(part) = parts.last_mut() {
                part.push(batch, sequence);
            }
        }
        parts
    };
    loads.into_iter().map(|(_, sequences)| cut(sequences)).collect()
}

impl Part {
    fn empty() -> Self {
        Self { sequences: vec![], ranges: vec![], places: vec![], positions: vec![] }
    }

    fn push(&mut self, batch: &PackedBatch, sequence: usize) {
        let range = batch.range(sequence);
        let start = self.places.len();
        self.sequences.push(sequence);
        self.ranges.push(start..start + range.len());
        self.positions.extend(0..range.len());
        self.places.extend(range);
    }

    /// Scored tokens of the part: token `p` is predicted by row `p − 1` of its sequence.
    pub(super) fn targets(&self, batch: &PackedBatch) -> Targets {
        let mut targets = Targets::default();
        for range in &self.ranges {
            for row in range.clone().skip(1).filter(|&row| batch.scored()[self.places[row]]) {
                targets.rows.push(row - 1);
                targets.tokens.push(batch.tokens()[self.places[row]]);
            }
        }
        targets
    }

    pub(super) fn collect<T: Real>(
        &self,
        targets: &Targets,
        (logprobs, entropy, values): (&[T], &[T], Option<&[T]>),
        captured: RouterCapture<T>,
        outputs: &mut Vec<SequenceOutput<T>>,
    ) {
        let spread = |values: &[T]| {
            let mut rows = vec![T::ZERO; self.places.len()];
            for (&row, &value) in targets.rows.iter().zip(values) {
                rows[row + 1] = value;
            }
            rows
        };
        let (logprobs, entropy, values) = (spread(logprobs), spread(entropy), values.map(spread));
        let mut inputs = captured.inputs.into_iter();
        for (&sequence, range) in self.sequences.iter().zip(&self.ranges) {
            let rows =
                |all: &[u16], width: usize| all[range.start * width..range.end * width].to_vec();
            let logits = captured.logits_width;
            outputs.push(SequenceOutput {
                sequence,
                logprobs: logprobs[range.clone()].to_vec(),
                entropy: entropy[range.clone()].to_vec(),
                values: values.as_ref().map_or_else(Vec::new, |v| v[range.clone()].to_vec()),
                routes: rows(&captured.routes, captured.routes_width),
                router_logits: captured.logits[range.start * logits..range.end * logits].to_vec(),
                router_inputs: inputs.next().unwrap_or_default(),
            });
        }
    }

    /// Selects one coefficient per target from those of all tokens of the part.
    pub(super) fn gather<T: Real>(&self, targets: &Targets, rows: &[T]) -> Vec<T> {
        assert!(rows.len() == self.places.len(), "a loss must return one coefficient per token");
        targets.rows.iter().map(|&row| rows[row + 1]).collect()
    }

    #[cfg(test)]
    pub(super) fn shift<T: Real>(
        &self,
        shape: &MoeShape,
        layer: usize,
        (batch, pass): (&PackedBatch, Pass<'_, T>),
        logits: &mut [T],
    ) {
        let Some(shift) = pass.router_shift else { return };
        let layers = shift.len() / batch.tokens().len() / shape.experts;
        for (row, &place) in logits.chunks_exact_mut(shape.experts).zip(&self.places) {
            let at = (place * layers + layer) * shape.experts;
            for (logit, &by) in row.iter_mut().zip(&shift[at..]) {
                *logit += T::from_f64(by);
            }
        }
    }
}

/// Router outputs collected layer by layer.
#[derive(Debug)]
pub(super) struct RouterCapture<T> {
    routes: Vec<u16>,
    routes_width: usize,
    top_k: usize,
    /// Router logits `[rows, layers, experts]`, or empty.
    logits: Vec<T>,
    logits_width: usize,
    experts: usize,
    /// Rows of each sequence whose router inputs are kept.
    input_rows: Vec<Vec<usize>>,
    /// Router inputs of each sequence, `[rows, layers, hidden]`.
    inputs: Vec<Vec<T>>,
    layers: usize,
    hidden: usize,
}

impl<T: Real> RouterCapture<T> {
    pub(super) fn new(part: &Part, layers: usize, shape: &MoeShape, pass: Pass<'_, T>) -> Self {
        let rows = part.places.len();
        let routes_width = layers * shape.top_k;
        let logits_width = if pass.router_logits { layers * shape.experts } else { 0 };
        let input_rows: Vec<Vec<usize>> = part
            .ranges
            .iter()
            .map(|range| {
                spread(range.len(), pass.router_inputs).map(|row| range.start + row).collect()
            })
            .collect();
        let inputs = input_rows
            .iter()
            .map(|rows| vec![T::ZERO; rows.len() * layers * shape.hidden])
            .collect();
        Self {
            routes: vec![0; rows * routes_width],
            routes_width,
            top_k: shape.top_k,
            logits: vec![T::ZERO; rows * logits_width],
            logits_width,
            experts: shape.experts,
            input_rows,
            inputs,
            layers,
            hidden: shape.hidden,
        }
    }

    /// Stores executed experts, logits and inputs of one layer's router.
    pub(super) fn take(&mut self, layer: usize, (ids, logits, inputs): (&[u16], &[T], &[T])) {
        let rows = self.routes.chunks_exact_mut(self.routes_width);
        for (row, ids) in rows.zip(ids.chunks_exact(self.top_k)) {
            row[layer * self.top_k..(layer + 1) * self.top_k].copy_from_slice(ids);
        }
        if self.logits_width > 0 {
            let rows = self.logits.chunks_exact_mut(self.logits_width);
            for (row, logits) in rows.zip(logits.chunks_exact(self.experts)) {
                row[layer * self.experts..(layer + 1) * self.experts].copy_from_slice(logits);
            }
        }
        for (rows, kept) in self.input_rows.iter().zip(&mut self.inputs) {
            for (slot, &row) in kept.chunks_exact_mut(self.layers * self.hidden).zip(rows) {
                let from = &inputs[row * self.hidden..(row + 1) * self.hidden];
                slot[layer * self.hidden..(layer + 1) * self.hidden].copy_from_slice(from);
            }
        }
    }
}
