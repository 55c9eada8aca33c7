//! Causal grouped-query attention over packed sequences of different lengths.
//!
//! Queries are processed in blocks, so that no buffer is larger than `[block, keys so far]`. The
//! backward pass recomputes the probabilities from the stored log-sum-exp.
#![expect(clippy::inline_always, reason = "loops must inline into kernels to be vectorised")]
#![expect(clippy::indexing_slicing, reason = "dense numeric code over rows of known width")]

use super::linalg::{View, ViewMut, dot, largest, matmul, sum};
use super::norm::HeadShape;
use super::real::Real;
use orchestrate_cpu::kernel;
use std::ops::Range;

/// Number of query rows processed at once: small enough that their scores stay in cache.
const BLOCK: usize = 64;

/// Computes `out [N, query_heads · head_dim]` and the log-sum-exp `lse [N, query_heads]` from
/// `qkv [N, width]`, separately for each sequence (a range of rows).
pub(crate) fn attention<T: Real>(
    shape: HeadShape,
    sequences: &[Range<usize>],
    qkv: &[T],
    out: &mut [T],
    lse: &mut [T],
) {
    let scale = 1.0 / (shape.head_dim as f64).sqrt();
    let mut scores = Vec::new();
    for sequence in sequences {
        for head in 0..shape.query_heads {
            let at = HeadOffsets::new(shape, sequence.start, head);
            for block in blocks(sequence.len()) {
                let (rows, keys) = (block.len(), block.end);
                scores.resize(rows * keys, T::ZERO);
                at.scores(qkv, &block, &mut scores, scale);
                causal_softmax(at, &block, &mut scores, lse);
                matmul(
                    at.out_mut(out, &block),
                    false,
                    1.0,
                    View::new(&scores, rows, keys),
                    at.values(qkv, keys),
                );
            }
        }
    }
}

/// Adds the gradient of `qkv` to `d_qkv`, given the gradient of `out`.
pub(crate) fn attention_backward<T: Real>(
    shape: HeadShape,
    sequences: &[Range<usize>],
    (qkv, out, lse): (&[T], &[T], &[T]),
    d_out: &[T],
    d_qkv: &mut [T],
) {
    let scale = 1.0 / (shape.head_dim as f64).sqrt();
    let (mut p, mut ds) = (Vec::new(), Vec::new());
    for sequence in sequences {
        for head in 0..shape.query_heads {
            let at = HeadOffsets::new(shape, sequence.start, head);
            for block in blocks(sequence.len()) {
                let (rows, keys) = (block.len(), block.end);
                p.resize(rows * keys, T::ZERO);
                ds.resize(rows * keys, T::ZERO);
                at.scores(qkv, &block, &mut p, scale);
                let d_rows = at.out(d_out, &block);
                matmul(
                    ViewMut::new(&mut ds, rows, keys),
                    false,
                    1.0,
                    d_rows,
                    at.values(qkv, keys).t(),
                );
                causal_softmax_backward(at, &block, (lse, out, d_out), &mut p, &mut ds);
                let (p, ds) = (View::new(&p, rows, keys), View::new(&ds, rows, keys));
                matmul(at.queries_mut(d_qkv, &block), false, scale, ds, at.keys(qkv, keys));
                matmul(at.keys_mut(d_qkv, keys), true, scale, ds.t(), at.queries(qkv, &block));
                matmul(at.values_mut(d_qkv, keys), true, 1.0, p.t(), d_rows);
            }
        }
    }
}

kernel! {
    /// Replaces a block of scores by probabilities and writes the log-sum-exp of each row.
    fn causal_softmax<T: Real>(at: HeadOffsets, block: &Range<usize>, scores: &mut [T], lse: &mut [T]) {
        for (row, scores) in block.clone().zip(scores.chunks_exact_mut(block.end)) {
            let (seen, hidden) = scores.split_at_mut(row + 1);
            let (total, top) = exponentials(seen);
            lse[at.out_row(row).start / at.dim] = top + total.ln();
            let inverse = T::ONE / total;
            for p in seen {
                *p = *p * inverse;
            }
            hidden.fill(T::ZERO);
        }
    }
}

kernel! {
    /// Replaces a block of scores `p` by probabilities, and their gradient `ds` by that of the scores, given
    /// the log-sum-exp, the outputs and the outputs' gradient.
    fn causal_softmax_backward<T: Real>(
        at: HeadOffsets,
        block: &Range<usize>,
        outputs: (&[T], &[T], &[T]),
        p: &mut [T],
        ds: &mut [T],
    ) {
        let (lse, out, d_out) = outputs;
        let rows = p.chunks_exact_mut(block.end).zip(ds.chunks_exact_mut(block.end));
        for (row, (p, ds)) in block.clone().zip(rows) {
            let own = at.out_row(row);
            let row_lse = lse[own.start / at.dim];
            let delta = dot(&d_out[own.clone()], &out[own]);
            let (p, p_hidden) = p.split_at_mut(row + 1);
            let (ds, ds_hidden) = ds.split_at_mut(row + 1);
            for (p, ds) in p.iter_mut().zip(ds) {
                *p = (*p - row_lse).exp();
                *ds = *p * (*ds - delta);
            }
            p_hidden.fill(T::ZERO);
            ds_hidden.fill(T::ZERO);
        }
    }
}

/// Replaces `row` by `exp(row - max)`; returns the sum and the maximum.
#[inline(always)]
fn exponentials<T: Real>(row: &mut [T]) -> (T, T) {
    let top = largest(row);
    for s in &mut *row {
        *s = (*s - top).exp();
    }
    (sum(row), top)
}

fn blocks(rows: usize) -> impl Iterator<Item = Range<usize>> {
    (0..rows).step_by(BLOCK).map(move |start| start..(start + BLOCK).min(rows))
}

/// Offsets of one head of one sequence in the packed buffers.
#[derive(Clone, Copy)]
struct HeadOffsets {
    width: usize,
    dim: usize,
    out_width: usize,
    query: usize,
    key: usize,
    value: usize,
    out: usize,
}

impl HeadOffsets {
    fn new(shape: HeadShape, first_row: usize, head: usize) -> Self {
        let (dim, width) = (shape.head_dim, shape.width());
        let key_head = head / (shape.query_heads / shape.key_heads);
        let base = first_row * width;
        let out_width = shape.query_heads * dim;
        Self {
            width,
            dim,
            out_width,
            query: base + head * dim,
            key: base + (shape.query_heads + key_head) * dim,
            value: base + (shape.query_heads + shape.key_heads + key_head) * dim,
            out: first_row * out_width + head * dim,
        }
    }

    fn scores<T: Real>(self, qkv: &[T], block: &Range<usize>, into: &mut [T], scale: f64) {
        let into = ViewMut::new(into, block.len(), block.end);
        matmul(into, false, scale, self.queries(qkv, block), self.keys(qkv, block.end).t());
    }

    fn queries<'a, T>(self, qkv: &'a [T], block: &Range<usize>) -> View<'a, T> {
        let from = self.query + block.start * self.width;
        View::strided(&qkv[from..], block.len(), self.dim, self.width)
    }

    fn keys<T>(self, qkv: &[T], keys: usize) -> View<'_, T> {
        View::strided(&qkv[self.key..], keys, self.dim, self.width)
    }

    fn values<T>(self, qkv: &[T], keys: usize) -> View<'_, T> {
        View::strided(&qkv[self.value..], keys, self.dim, self.width)
    }

    fn out<'a, T>(self, out: &'a [T], block: &Range<usize>) -> View<'a, T> {
        let from = self.out + block.start * self.out_width;
        View::strided(&out[from..], block.len(), self.dim, self.out_width)
    }

    /// Place of the head's output of one row of the sequence; divided by `dim`, that of its log-sum-exp.
    #[inline(always)]
    fn out_row(self, row: usize) -> Range<usize> {
        let from = self.out + row * self.out_width;
        from..from + self.dim
    }

    fn queries_mut<'a, T>(self, qkv: &'a mut [T], block: &Range<usize>) -> ViewMut<'a, T> {
        let from = self.query + block.start * self.width;
        ViewMut::strided(&mut qkv[from..], block.len(), self.dim, self.width)
    }

    fn keys_mut<T>(self, qkv: &mut [T], keys: usize) -> ViewMut<'_, T> {
        ViewMut::strided(&mut qkv[self.key..], keys, self.dim, self.width)
    }

    fn values_mut<T>(self, qkv: &mut [T], keys: usize) -> ViewMut<'_, T> {
        ViewMut::strided(&mut qkv[self.value..], keys, self.dim, self.width)
    }

    fn out_mut<'a, T>(self, out: &'a mut [T], block: &Range<usize>) -> ViewMut<'a, T> {
        let from = self.out + block.start * self.out_width;
        ViewMut::strided(&mut out[from..], block.len(), self.dim, self.out_width)
    }
}
