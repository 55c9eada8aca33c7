//! Tiles of f32 on AVX2 and FMA: 6 rows of two registers. With two registers of weights and one of a
//! value they fill the sixteen that there are; as plain loops they would spill.

use super::{Operand, Scratch, Shape, Target, Tile, block_by};
use std::arch::x86_64::{
    _mm256_broadcast_ss, _mm256_fmadd_ps, _mm256_loadu_ps, _mm256_set1_ps, _mm256_setzero_ps,
    _mm256_storeu_ps,
};

const ROWS: usize = 6;
const COLUMNS: usize = 2 * LANES;
/// Number of values in a register.
const LANES: usize = 8;

pub(super) struct Avx2Tile;

impl Tile<f32> for Avx2Tile {
    const ROWS: usize = ROWS;
    const COLUMNS: usize = COLUMNS;

    // SAFETY: callers meet the conditions of the trait's method.
    #[inline(always)]
    unsafe fn compute(shape: Shape, target: Target<f32>, left: Operand<f32>, panel: *const f32) {
        // SAFETY: the caller guarantees instruction set and operands.
        unsafe {
            if shape.1 > LANES {
                tile::<2>(shape, target, left, panel);
            } else {
                tile::<1>(shape, target, left, panel);
            }
        }
    }
}

/// One block of summands.
///
/// # Safety
/// That of [`block_by`].
#[target_feature(enable = "avx2,fma")]
pub(super) unsafe fn block(
    shape: Shape,
    target: Target<f32>,
    left: Operand<f32>,
    right: Operand<f32>,
    scratch: Scratch<f32>,
) {
    // SAFETY: as guaranteed by the caller.
    unsafe { block_by::<f32, Avx2Tile>(shape, target, left, right, scratch) };
}

/// Computes one tile of at most `PARTS` registers a row. Not inlined: inside the caller's loops the
/// compiler runs out of registers.
///
/// # Safety
/// That of [`Tile::compute`].
#[inline(never)]
#[target_feature(enable = "avx2,fma")]
unsafe fn tile<const PARTS: usize>(
    (rows, columns, depth): Shape,
    target: Target<f32>,
    left: Operand<f32>,
    panel: *const f32,
) {
    let mut sums = [[_mm256_setzero_ps(); PARTS]; ROWS];
    let (mut start, mut right) = (left.at, panel);
    for _ in 0..depth {
        let mut weights = [_mm256_setzero_ps(); PARTS];
        for (part, weights) in weights.iter_mut().enumerate() {
            // SAFETY: a row of the panel.
            *weights = unsafe { _mm256_loadu_ps(right.wrapping_add(part * LANES)) };
        }
        let mut row = start;
        for sums in &mut sums {
            // SAFETY: an element of the left operand, which has all ROWS rows.
            let value = _mm256_broadcast_ss(unsafe { &*row });
            row = row.wrapping_add(left.row_stride);
            for (sum, &weights) in sums.iter_mut().zip(&weights) {
                *sum = _mm256_fmadd_ps(value, weights, *sum);
            }
        }
        start = start.wrapping_add(left.col_stride);
        right = right.wrapping_add(COLUMNS);
    }
    let scale = _mm256_set1_ps(target.scale);
    for (r, sums) in sums.iter().enumerate().take(rows) {
        let at = target.at.wrapping_add(r * target.row_stride);
        // A row that ends within the tile takes a detour over memory of the tile's width.
        let mut row = [0.0_f32; COLUMNS];
        let whole = columns == PARTS * LANES;
        if target.add && !whole {
            // SAFETY: the columns of this row that exist.
            unsafe { row.as_mut_ptr().copy_from_nonoverlapping(at, columns) };
        }
        let into = if whole { at } else { row.as_mut_ptr() };
        for (part, &sum) in sums.iter().enumerate() {
            let into = into.wrapping_add(part * LANES);
            // SAFETY: a part of a row of the target or of the detour.
            unsafe {
                let old = if target.add { _mm256_loadu_ps(into) } else { _mm256_setzero_ps() };
                _mm256_storeu_ps(into, _mm256_fmadd_ps(scale, sum, old));
            }
        }
        if !whole {
            // SAFETY: the columns of this row that exist.
            unsafe { at.copy_from_nonoverlapping(row.as_ptr(), columns) };
        }
    }
}
