//! Matrix products and vectorised loops. `unsafe` code of the trainer is confined to this module
//! and its kernel.
#![expect(unsafe_code, reason = "the kernel takes raw pointers; instruction sets are checked")]
#![expect(clippy::inline_always, reason = "loops must inline into kernels to be vectorised")]
#![expect(clippy::indexing_slicing, reason = "dense numeric code over fixed-size lanes")]

use super::kernel;
use super::real::Real;
use orchestrate_cpu::Level;

/// A read-only matrix view into a slice.
#[derive(Clone, Copy, Debug)]
pub(crate) struct View<'a, T> {
    data: &'a [T],
    rows: usize,
    cols: usize,
    row_stride: usize,
    col_stride: usize,
}

impl<'a, T> View<'a, T> {
    /// A row-major matrix with contiguous rows.
    pub(crate) fn new(data: &'a [T], rows: usize, cols: usize) -> Self {
        Self::strided(data, rows, cols, cols)
    }

    /// A row-major matrix with rows `row_stride` elements apart, starting at the first element of
    /// `data`.
    pub(crate) fn strided(data: &'a [T], rows: usize, cols: usize, row_stride: usize) -> Self {
        assert!(fits(data.len(), rows, cols, row_stride), "matrix exceeds its buffer");
        Self { data, rows, cols, row_stride, col_stride: 1 }
    }

    /// The transposed matrix; no data is copied.
    pub(crate) fn t(self) -> Self {
        Self {
            rows: self.cols,
            cols: self.rows,
            row_stride: self.col_stride,
            col_stride: self.row_stride,
            ..self
        }
    }
}

/// A mutable row-major matrix view into a slice.
#[derive(Debug)]
pub(crate) struct ViewMut<'a, T> {
    data: &'a mut [T],
    rows: usize,
    cols: usize,
    row_stride: usize,
}

impl<'a, T> ViewMut<'a, T> {
    /// A matrix with contiguous rows.
    pub(crate) fn new(data: &'a mut [T], rows: usize, cols: usize) -> Self {
        Self::strided(data, rows, cols, cols)
    }

    /// A matrix with rows `row_stride` elements apart.
    pub(crate) fn strided(data: &'a mut [T], rows: usize, cols: usize, row_stride: usize) -> Self {
        assert!(fits(data.len(), rows, cols, row_stride), "matrix exceeds its buffer");
        Self { data, rows, cols, row_stride }
    }
}

fn fits(len: usize, rows: usize, cols: usize, row_stride: usize) -> bool {
    rows == 0 || cols == 0 || (cols <= row_stride && (rows - 1) * row_stride + cols <= len)
}

/// `dst = scale · a·b`, or `dst += scale · a·b` if `add`. Single-threaded: callers parallelise over
/// sequences.
pub(crate) fn matmul<T: Real>(
    dst: ViewMut<'_, T>,
    add: bool,
    scale: f64,
    a: View<'_, T>,
    b: View<'_, T>,
) {
    assert!(
        dst.rows == a.rows && dst.cols == b.cols && a.cols == b.rows,
        "matrix shapes do not match"
    );
    if dst.rows == 0 || dst.cols == 0 || a.cols == 0 {
        return;
    }
    multiply(Level::current(), dst, add, scale, a, b);
}

/// [`matmul`] of views whose shapes match and are not empty.
#[expect(clippy::needless_pass_by_value, reason = "a view is used for one product")]
fn multiply<T: Real>(
    level: Level,
    dst: ViewMut<'_, T>,
    add: bool,
    scale: f64,
    a: View<'_, T>,
    b: View<'_, T>,
) {
    let operand = |view: View<'_, T>| kernel::Operand {
        at: view.data.as_ptr(),
        row_stride: view.row_stride,
        col_stride: view.col_stride,
    };
    let target = kernel::Target {
        at: dst.data.as_mut_ptr(),
        row_stride: dst.row_stride,
        add,
        scale: T::from_f64(scale),
    };
    let shape = (dst.rows, dst.cols, a.cols);
    // SAFETY: each view was checked to lie inside its slice, with its strides, when it was created;
    // `dst` is a unique borrow, so it overlaps neither operand.
    unsafe { kernel::multiply(level, shape, target, operand(a), operand(b)) };
}

const LANES: usize = 16;

/// Inner product, summed in fixed lanes so that the compiler can vectorise it.
#[inline(always)]
pub(crate) fn dot<T: Real>(a: &[T], b: &[T]) -> T {
    let (a_lanes, a_rest) = a.as_chunks::<LANES>();
    let (b_lanes, b_rest) = b.as_chunks::<LANES>();
    let mut sums = [T::ZERO; LANES];
    for (x, y) in a_lanes.iter().zip(b_lanes) {
        for i in 0..LANES {
            sums[i] += x[i] * y[i];
        }
    }
    let rest: T = a_rest.iter().zip(b_rest).map(|(&x, &y)| x * y).sum();
    sums.into_iter().sum::<T>() + rest
}

/// Largest value; [`Real::LOWEST`] for an empty slice.
#[inline(always)]
pub(crate) fn largest<T: Real>(values: &[T]) -> T {
    let (lanes, rest) = values.as_chunks::<LANES>();
    let mut tops = [T::LOWEST; LANES];
    for x in lanes {
        for i in 0..LANES {
            tops[i] = tops[i].max(x[i]);
        }
    }
    tops.iter().chain(rest).copied().fold(T::LOWEST, Real::max)
}

/// Sum, computed in fixed lanes so that the compiler can vectorise it.
#[inline(always)]
pub(crate) fn sum<T: Real>(values: &[T]) -> T {
    let (lanes, rest) = values.as_chunks::<LANES>();
    let mut sums = [T::ZERO; LANES];
    for x in lanes {
        for i in 0..LANES {
            sums[i] += x[i];
        }
    }
    sums.into_iter().chain(rest.iter().copied()).sum()
}

/// `dst += a · src`.
#[inline(always)]
pub(crate) fn add_scaled<T: Real>(dst: &mut [T], a: T, src: &[T]) {
    for (d, &s) in dst.iter_mut().zip(src) {
        *d += a * s;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// One element of the product by definition, in f64.
    fn plain(a: View<'_, f32>, b: View<'_, f32>, i: usize, j: usize) -> f64 {
        let element = |v: View<'_, f32>, r: usize, c: usize| {
            f64::from(v.data[r * v.row_stride + c * v.col_stride])
        };
        (0..a.cols).map(|k| element(a, i, k) * element(b, k, j)).sum()
    }

    #[test]
    fn products_of_all_shapes_and_layouts_are_correct_and_equal_on_all_levels() {
        let noise = |count: usize, seed: usize| -> Vec<f32> {
            (0..count).map(|i| ((i * 7919 + seed * 31) % 101) as f32 / 50.0 - 1.0).collect()
        };
        let shapes = [
            (1, 1, 1),
            (3, 5, 7),
            (8, 32, 16),
            (9, 33, 300),
            (64, 47, 32),
            (17, 16, 513),
            (5, 90, 2),
        ];
        for (m, n, k) in shapes {
            let (x, y) = (noise(m * k + k + m, 1), noise(n * k + n + k, 2));
            // Row strides are one more than the width, so that the two differ.
            let lefts =
                [View::strided(&x[..], m, k, k + 1 - usize::from(m == 1)), View::new(&x, k, m).t()];
            let rights = [View::new(&y[..], k, n), View::new(&y, n, k).t()];
            for (a, b) in lefts.into_iter().flat_map(|a| rights.map(|b| (a, b))) {
                for add in [false, true] {
                    let before = noise(m * (n + 2), 3);
                    let outcome = |level| {
                        let mut out = before.clone();
                        multiply(level, ViewMut::strided(&mut out, m, n, n + 2), add, 0.5, a, b);
                        out
                    };
                    let outcomes: Vec<Vec<f32>> =
                        Level::supported().into_iter().map(outcome).collect();
                    let bits =
                        |values: &[f32]| values.iter().map(|v| v.to_bits()).collect::<Vec<_>>();
                    for other in &outcomes[1..] {
                        assert_eq!(bits(&outcomes[0]), bits(other), "{m}×{n}×{k}");
                    }
                    for i in 0..m {
                        for j in 0..n + 2 {
                            let at = i * (n + 2) + j;
                            let kept = f64::from(before[at]);
                            let expected = match (j < n, add) {
                                (true, true) => kept + 0.5 * plain(a, b, i, j),
                                (true, false) => 0.5 * plain(a, b, i, j),
                                (false, _) => kept,
                            };
                            let found = outcomes[0][at];
                            let error = (f64::from(found) - expected).abs();
                            assert!(error < 1e-4, "{m}×{n}×{k} at {i},{j}: {found} {expected}");
                        }
                    }
                }
            }
        }
    }
}
