//! How a batch is divided: over lanes (threads), and each lane's share into parts whose
//! activations are held together.
#![expect(clippy::indexing_slicing, reason = "dense numeric code over rows of known width")]

use super::batch::PackedBatch;
#[cfg(test)]
use super::experts::MoeShape;
use super::head::Targets;
use super::model::{Pass, SequenceOutput};
use super::real::Real;
use std::ops::Range;

/// Most tokens a lane holds activations of, whatever the caller allows: beyond this, larger parts
/// only cost memory.
const PART_TOKENS: usize = 1024;

/// A part of a lane's work: sequences whose activations are held together.
#[derive(Debug)]
pub(super) struct Part {
    pub(super) sequences: Vec<usize>,
    /// Rows of each sequence.
    pub(super) ranges: Vec<Range<usize>>,
    /// Row → place in the packed batch.
    pub(super) places: Vec<usize>,
    /// Row → position in its sequence.
    pub(super) positions: Vec<usize>,
}

/// Sequences over lanes (one per thread, longest first to the emptiest), each lane cut into parts.
pub(super) fn lanes(batch: &PackedBatch, pass: Pass<'_>) -> Vec<Vec<Part>> {
    let count = rayon::current_num_threads().min(pass.sequences.len()).max(1);
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

    /// Token `p` is predicted by row `p − 1` of its sequence.
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
        (logprobs, entropy): (&[T], &[T]),
        routes: &[u16],
        outputs: &mut Vec<SequenceOutput<T>>,
    ) {
        let spread = |values: &[T]| {
            let mut rows = vec![T::ZERO; self.places.len()];
            for (&row, &value) in targets.rows.iter().zip(values) {
                rows[row + 1] = value;
            }
            rows
        };
        let (logprobs, entropy) = (spread(logprobs), spread(entropy));
        let width = routes.len() / self.places.len();
        for (&sequence, range) in self.sequences.iter().zip(&self.ranges) {
            outputs.push(SequenceOutput {
                sequence,
                logprobs: logprobs[range.clone()].to_vec(),
                entropy: entropy[range.clone()].to_vec(),
                routes: routes[range.start * width..range.end * width].to_vec(),
            });
        }
    }

    /// Per-sequence coefficients → one per target.
    pub(super) fn gather<T: Real>(&self, targets: &Targets, coefficients: &[Vec<T>]) -> Vec<T> {
        let rows: Vec<T> = coefficients.iter().flatten().copied().collect();
        assert!(rows.len() == self.places.len(), "a loss gave not one coefficient per token");
        targets.rows.iter().map(|&row| rows[row + 1]).collect()
    }

    #[cfg(test)]
    pub(super) fn shift<T: Real>(
        &self,
        shape: &MoeShape,
        layer: usize,
        (batch, pass): (&PackedBatch, Pass<'_>),
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
