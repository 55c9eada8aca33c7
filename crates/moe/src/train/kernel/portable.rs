//! Tiles of f32 and f64 as plain loops, which the compiler vectorises for the instruction set that it
//! compiles them for.
#![expect(clippy::indexing_slicing, reason = "tiles of fixed size")]

use super::{Operand, Scratch, Shape, Target, Tile, block_by};
use crate::fused::BASE_HAS_FMA;
use crate::train::real::Real;

const ROWS: usize = 6;
const COLUMNS: usize = 16;

/// Tiles for AVX2 and FMA, for f64: tests do not need more.
#[cfg(target_arch = "x86_64")]
pub(super) struct Avx2;

#[cfg(target_arch = "x86_64")]
impl<T: Real> Tile<T> for Avx2 {
    const ROWS: usize = ROWS;
    const COLUMNS: usize = COLUMNS;

    // SAFETY: callers meet the conditions of the trait's method.
    #[inline(always)]
    unsafe fn compute(shape: Shape, target: Target<T>, left: Operand<T>, panel: *const T) {
        // SAFETY: the caller guarantees instruction set and operands.
        unsafe { avx2_tile(shape, target, left, panel) };
    }
}

/// Tiles for what every processor of the architecture has.
pub(super) struct Base;

impl<T: Real> Tile<T> for Base {
    const ROWS: usize = ROWS;
    const COLUMNS: usize = COLUMNS;

    // SAFETY: callers meet the conditions of the trait's method.
    #[inline(always)]
    unsafe fn compute(shape: Shape, target: Target<T>, left: Operand<T>, panel: *const T) {
        // SAFETY: the caller guarantees the operands.
        unsafe { base_tile(shape, target, left, panel) };
    }
}

/// One block of summands, for AVX2.
///
/// # Safety
/// That of [`block_by`].
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma")]
pub(super) unsafe fn avx2_block<T: Real>(
    shape: Shape,
    target: Target<T>,
    left: Operand<T>,
    right: Operand<T>,
    scratch: Scratch<T>,
) {
    // SAFETY: as guaranteed by the caller.
    unsafe { block_by::<T, Avx2>(shape, target, left, right, scratch) };
}

/// One block of summands.
///
/// # Safety
/// That of [`block_by`].
pub(super) unsafe fn block<T: Real>(
    shape: Shape,
    target: Target<T>,
    left: Operand<T>,
    right: Operand<T>,
    scratch: Scratch<T>,
) {
    // SAFETY: as guaranteed by the caller.
    unsafe { block_by::<T, Base>(shape, target, left, right, scratch) };
}

/// Computes one tile for AVX2. Not inlined: inside the caller's loops the compiler runs out of
/// registers.
///
/// # Safety
/// That of [`Tile::compute`].
#[cfg(target_arch = "x86_64")]
#[inline(never)]
#[target_feature(enable = "avx2,fma")]
unsafe fn avx2_tile<T: Real>(shape: Shape, target: Target<T>, left: Operand<T>, panel: *const T) {
    // SAFETY: as guaranteed by the caller.
    unsafe { tile::<T, true>(shape, target, left, panel) };
}

/// Computes one tile for the base of the architecture.
///
/// # Safety
/// That of [`Tile::compute`].
#[inline(never)]
unsafe fn base_tile<T: Real>(shape: Shape, target: Target<T>, left: Operand<T>, panel: *const T) {
    // SAFETY: as guaranteed by the caller.
    unsafe { tile::<T, BASE_HAS_FMA>(shape, target, left, panel) };
}

/// Computes one tile; its loops use indices, because those reliably compile to vector code.
///
/// # Safety
/// That of [`Tile::compute`].
#[inline(always)]
unsafe fn tile<T: Real, const FUSED: bool>(
    (rows, columns, depth): Shape,
    target: Target<T>,
    left: Operand<T>,
    panel: *const T,
) {
    let mut sums = [[T::ZERO; COLUMNS]; ROWS];
    let (mut start, mut right) = (left.at, panel);
    for _ in 0..depth {
        // SAFETY: a row of the panel.
        let weights = unsafe { &*right.cast::<[T; COLUMNS]>() };
        let mut row = start;
        let mut r = 0;
        while r < ROWS {
            // SAFETY: an element of the left operand, which has all ROWS rows.
            let value = unsafe { row.read() };
            let mut j = 0;
            while j < COLUMNS {
                sums[r][j] = value.fused::<FUSED>(weights[j], sums[r][j]);
                j += 1;
            }
            row = row.wrapping_add(left.row_stride);
            r += 1;
        }
        start = start.wrapping_add(left.col_stride);
        right = right.wrapping_add(COLUMNS);
    }
    for (r, sums) in sums.iter().enumerate().take(rows) {
        // SAFETY: the part of this row that the caller lets this tile write.
        let out = unsafe {
            std::slice::from_raw_parts_mut(target.at.wrapping_add(r * target.row_stride), columns)
        };
        for (out, &sum) in out.iter_mut().zip(sums) {
            let old = if target.add { *out } else { T::ZERO };
            *out = target.scale.fused::<FUSED>(sum, old);
        }
    }
}
