//! Matrix products and vectorised loops. `unsafe` code of the trainer is confined to this module
//! and its AVX-512 kernel.
#![expect(unsafe_code, reason = "the matrix library takes raw pointers; CPU features are checked")]
#![expect(clippy::inline_always, reason = "loops must inline into `simd` to be vectorised")]
#![expect(clippy::indexing_slicing, reason = "dense numeric code over fixed-size lanes")]

#[cfg(target_arch = "x86_64")]
use super::kernel;
use super::real::Real;
use std::any::TypeId;

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
    #[cfg(target_arch = "x86_64")]
    if TypeId::of::<T>() == TypeId::of::<f32>() && kernel::available() {
        let shape = (dst.rows, dst.cols, a.cols);
        let operand = |view: View<'_, T>| kernel::Operand {
            at: view.data.as_ptr().cast(),
            row_stride: view.row_stride,
            col_stride: view.col_stride,
        };
        let target = kernel::Target {
            at: dst.data.as_mut_ptr().cast(),
            row_stride: dst.row_stride,
            add,
            scale: Real::from_f64(scale),
        };
        // SAFETY: T is f32, the CPU has the features, and the views lie inside their slices, as in
        // `general_matmul`.
        unsafe { kernel::multiply(shape, target, operand(a), operand(b)) };
        return;
    }
    general_matmul(dst, add, scale, a, b);
}

/// Product by the general matrix library, for any CPU and for f64.
#[expect(clippy::needless_pass_by_value, reason = "a view is used for one product")]
fn general_matmul<T: Real>(
    dst: ViewMut<'_, T>,
    add: bool,
    scale: f64,
    a: View<'_, T>,
    b: View<'_, T>,
) {
    // Strides come from slice lengths, which never exceed isize::MAX.
    let stride = |s: usize| s.cast_signed();
    // SAFETY: each view was checked to lie inside its slice, with its strides, when it was created;
    // `dst` is a unique borrow, so it overlaps neither operand; T is f32 or f64 (`Real` has no
    // other implementations), both of which the library dispatches on.
    unsafe {
        gemm::gemm(
            dst.rows,
            dst.cols,
            a.cols,
            dst.data.as_mut_ptr(),
            1,
            stride(dst.row_stride),
            add,
            a.data.as_ptr(),
            stride(a.col_stride),
            stride(a.row_stride),
            b.data.as_ptr(),
            stride(b.col_stride),
            stride(b.row_stride),
            T::ONE,
            T::from_f64(scale),
            false,
            false,
            false,
            gemm::Parallelism::None,
        );
    }
}

/// Runs `work` compiled for AVX2 if the CPU supports it; the binary still runs on any CPU. Loops
/// benefit only if they are inlined into the closure.
pub(crate) fn simd<R>(work: impl FnOnce() -> R) -> R {
    #[cfg(target_arch = "x86_64")]
    if std::arch::is_x86_feature_detected!("avx2") && std::arch::is_x86_feature_detected!("fma") {
        // SAFETY: the features were just detected on this CPU.
        return unsafe { on_avx2(work) };
    }
    work()
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma")]
fn on_avx2<R>(work: impl FnOnce() -> R) -> R {
    work()
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
    fn products_of_all_shapes_and_layouts_are_correct() {
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
                    let (mut ours, mut theirs) = (before.clone(), before.clone());
                    matmul(ViewMut::strided(&mut ours, m, n, n + 2), add, 0.5, a, b);
                    general_matmul(ViewMut::strided(&mut theirs, m, n, n + 2), add, 0.5, a, b);
                    for i in 0..m {
                        for j in 0..n + 2 {
                            let at = i * (n + 2) + j;
                            let kept = f64::from(before[at]);
                            let expected = match (j < n, add) {
                                (true, true) => kept + 0.5 * plain(a, b, i, j),
                                (true, false) => 0.5 * plain(a, b, i, j),
                                (false, _) => kept,
                            };
                            for found in [ours[at], theirs[at]] {
                                let error = (f64::from(found) - expected).abs();
                                assert!(error < 1e-4, "{m}×{n}×{k} at {i},{j}: {found} {expected}");
                            }
                        }
                    }
                }
            }
        }
    }
}
