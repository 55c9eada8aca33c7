//! RMSNorm and rotary position embedding, forward and backward.
#![expect(clippy::inline_always, reason = "loops must inline into kernels to be vectorised")]
#![expect(clippy::indexing_slicing, reason = "dense numeric code over rows of known width")]

use super::linalg::{add_scaled, dot};
use super::real::Real;
use orchestrate_cpu::kernel;

kernel! {
    /// RMSNorm: `y = x / sqrt(mean(x²) + ε) · w` for each row of `x [rows, w.len()]`.
    pub(crate) fn rms_norm<T: Real>(x: &[T], weight: &[T], eps: f64, y: &mut [T]) {
        let width = weight.len();
        for (row, out) in x.chunks_exact(width).zip(y.chunks_exact_mut(width)) {
            let scale = inverse_rms(row, eps);
            for ((o, &v), &w) in out.iter_mut().zip(row).zip(weight) {
                *o = v * scale * w;
            }
        }
    }
}

kernel! {
    /// Backward of [`rms_norm`]: adds to `dx` and `d_weight`, given `dy`. Recomputes the statistics
    /// from `x`.
    pub(crate) fn rms_norm_backward<T: Real>(
        x: &[T],
        weight: &[T],
        eps: f64,
        dy: &[T],
        dx: &mut [T],
        d_weight: &mut [T],
    ) {
        let width = weight.len();
        let rows = x.chunks_exact(width).zip(dy.chunks_exact(width));
        for ((row, dy), dx) in rows.zip(dx.chunks_exact_mut(width)) {
            norm_row_backward((row, weight, dy), eps, dx, d_weight);
        }
    }
}

#[inline(always)]
fn inverse_rms<T: Real>(row: &[T], eps: f64) -> T {
    let mean = dot(row, row) * T::from_f64(1.0 / row.len() as f64);
    T::ONE / (mean + T::from_f64(eps)).sqrt()
}

#[inline(always)]
fn norm_row_backward<T: Real>(
    (row, weight, dy): (&[T], &[T], &[T]),
    eps: f64,
    dx: &mut [T],
    d_weight: &mut [T],
) {
    let scale = inverse_rms(row, eps);
    let mut inner = T::ZERO;
    for ((&v, &w), &d) in row.iter().zip(weight).zip(dy) {
        inner += v * w * d;
    }
    let pull = inner * scale * scale * scale * T::from_f64(1.0 / row.len() as f64);
    for (((d, &v), &w), &g) in dx.iter_mut().zip(row).zip(weight).zip(dy) {
        *d += scale * w * g - pull * v;
    }
    for ((d, &v), &g) in d_weight.iter_mut().zip(row).zip(dy) {
        *d += scale * v * g;
    }
}

/// RoPE tables: cosines and sines, `[positions, head_dim / 2]` each.
#[derive(Debug)]
pub(crate) struct Rope<T> {
    half: usize,
    cos: Vec<T>,
    sin: Vec<T>,
}

impl<T: Real> Rope<T> {
    /// Computes the tables for positions `0..positions`, with angles in f64.
    pub(crate) fn new(base: f64, head_dim: usize, positions: usize) -> Self {
        let half = head_dim / 2;
        let inverse: Vec<f64> =
            (0..half).map(|j| libm::pow(base, -2.0 * j as f64 / head_dim as f64)).collect();
        let angles = (0..positions).flat_map(|p| inverse.iter().map(move |f| p as f64 * f));
        let (sin, cos) = angles
            .map(|angle| {
                let (sin, cos) = libm::sincos(angle);
                (T::from_f64(sin), T::from_f64(cos))
            })
            .unzip();
        Self { half, cos, sin }
    }

    /// Rotates one head in place; the backward pass rotates by the negative angle.
    #[inline(always)]
    fn rotate(&self, position: usize, backward: bool, head: &mut [T]) {
        let at = position * self.half..(position + 1) * self.half;
        let (low, high) = head.split_at_mut(self.half);
        let angles = self.cos[at.clone()].iter().zip(&self.sin[at]);
        for ((a, b), (&c, &s)) in low.iter_mut().zip(high).zip(angles) {
            let s = if backward { -s } else { s };
            (*a, *b) = (*a * c - *b * s, *b * c + *a * s);
        }
    }
}

/// Heads of one row: query heads, then key heads (both normalised and rotated), then value heads.
#[derive(Debug, Clone, Copy)]
pub(crate) struct HeadShape {
    pub(crate) query_heads: usize,
    pub(crate) key_heads: usize,
    pub(crate) head_dim: usize,
    pub(crate) eps: f64,
}

impl HeadShape {
    /// Width of a row: all query, key and value heads.
    pub(crate) fn width(self) -> usize {
        (self.query_heads + 2 * self.key_heads) * self.head_dim
    }

    fn normed(self) -> usize {
        (self.query_heads + self.key_heads) * self.head_dim
    }
}

kernel! {
    /// Normalises every query and key head and rotates it by its position; copies the values.
    pub(crate) fn norm_and_rotate<T: Real>(
        shape: HeadShape,
        rope: &Rope<T>,
        positions: &[usize],
        norms: (&[T], &[T]),
        raw: &[T],
        out: &mut [T],
    ) {
        let (query_norm, key_norm) = norms;
        let (width, dim) = (shape.width(), shape.head_dim);
        let rows = raw.chunks_exact(width).zip(out.chunks_exact_mut(width));
        for ((raw, out), &position) in rows.zip(positions) {
            out[shape.normed()..].copy_from_slice(&raw[shape.normed()..]);
            let heads = raw.chunks_exact(dim).zip(out.chunks_exact_mut(dim));
            for (h, (raw, out)) in heads.take(shape.query_heads + shape.key_heads).enumerate() {
                let weight = if h < shape.query_heads { query_norm } else { key_norm };
                let scale = inverse_rms(raw, shape.eps);
                for ((o, &v), &w) in out.iter_mut().zip(raw).zip(weight) {
                    *o = v * scale * w;
                }
                rope.rotate(position, false, out);
            }
        }
    }
}

kernel! {
    /// Backward of [`norm_and_rotate`]: `d_out` is overwritten with the gradient of `raw`.
    pub(crate) fn norm_and_rotate_backward<T: Real>(
        shape: HeadShape,
        rope: &Rope<T>,
        positions: &[usize],
        weights: (&[T], &[T], &mut [T], &mut [T]),
        raw: &[T],
        d_out: &mut [T],
    ) {
        let (width, dim) = (shape.width(), shape.head_dim);
        let (query_norm, key_norm, d_query, d_key) = weights;
        let mut turned = vec![T::ZERO; dim];
        let rows = raw.chunks_exact(width).zip(d_out.chunks_exact_mut(width));
        for ((raw, d_out), &position) in rows.zip(positions) {
            let heads = raw.chunks_exact(dim).zip(d_out.chunks_exact_mut(dim));
            for (h, (raw, d)) in heads.take(shape.query_heads + shape.key_heads).enumerate() {
                rope.rotate(position, true, d);
                turned.copy_from_slice(d);
                d.fill(T::ZERO);
                let (weight, d_weight) = if h < shape.query_heads {
                    (query_norm, &mut *d_query)
                } else {
                    (key_norm, &mut *d_key)
                };
                norm_row_backward((raw, weight, &turned), shape.eps, d, d_weight);
            }
        }
    }
}

kernel! {
    /// Adds `src` to `dst`, element by element.
    pub(crate) fn add<T: Real>(dst: &mut [T], src: &[T]) {
        add_scaled(dst, T::ONE, src);
    }
}
