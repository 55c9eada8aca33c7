//! Tiles of f32 on AVX-512: 8 rows of two registers.

use super::{Operand, Scratch, Shape, Target, Tile, block_by};
use std::arch::x86_64::{
    _mm512_fmadd_ps, _mm512_loadu_ps, _mm512_mask_storeu_ps, _mm512_maskz_loadu_ps, _mm512_set1_ps,
    _mm512_setzero_ps,
};

const ROWS: usize = 8;
const COLUMNS: usize = 32;

pub(super) struct Avx512Tile;

impl Tile<f32> for Avx512Tile {
    const ROWS: usize = ROWS;
    const COLUMNS: usize = COLUMNS;

    // SAFETY: callers meet the conditions of the trait's method.
    #[inline(always)]
    unsafe fn compute(shape: Shape, target: Target<f32>, left: Operand<f32>, panel: *const f32) {
        // SAFETY: the caller guarantees instruction set and operands.
        unsafe { tile(shape, target, left, panel) };
    }
}

/// One block of summands.
///
/// # Safety
/// That of [`block_by`].
#[target_feature(enable = "avx512f")]
pub(super) unsafe fn block(
    shape: Shape,
    target: Target<f32>,
    left: Operand<f32>,
    right: Operand<f32>,
    scratch: Scratch<f32>,
) {
    // SAFETY: as guaranteed by the caller.
    unsafe { block_by::<f32, Avx512Tile>(shape, target, left, right, scratch) };
}

/// Computes one tile. Not inlined: inside the caller's loops the compiler runs out of registers and
/// spills a sum to memory at every step.
///
/// # Safety
/// That of [`Tile::compute`].
#[inline(never)]
#[target_feature(enable = "avx512f")]
unsafe fn tile(
    (rows, columns, depth): Shape,
    target: Target<f32>,
    left: Operand<f32>,
    panel: *const f32,
) {
    let mut sums = [[_mm512_setzero_ps(); 2]; ROWS];
    let (mut start, mut right) = (left.at, panel);
    for _ in 0..depth {
        // SAFETY: a row of the panel.
        let (low, high) =
            unsafe { (_mm512_loadu_ps(right), _mm512_loadu_ps(right.wrapping_add(16))) };
        let mut row = start;
        for sum in &mut sums {
            // SAFETY: an element of the left operand, which has all ROWS rows.
            let value = _mm512_set1_ps(unsafe { row.read() });
            row = row.wrapping_add(left.row_stride);
            sum[0] = _mm512_fmadd_ps(value, low, sum[0]);
            sum[1] = _mm512_fmadd_ps(value, high, sum[1]);
        }
        start = start.wrapping_add(left.col_stride);
        right = right.wrapping_add(COLUMNS);
    }
    let mask = |columns: usize| if columns >= 16 { u16::MAX } else { (1_u16 << columns) - 1 };
    let masks = [mask(columns), mask(columns.saturating_sub(16))];
    let scale = _mm512_set1_ps(target.scale);
    for (r, sum) in sums.iter().enumerate().take(rows) {
        for (half, (&sum, mask)) in sum.iter().zip(masks).enumerate() {
            let at = target.at.wrapping_add(r * target.row_stride + half * 16);
            // SAFETY: masked-off columns are neither read nor written.
            unsafe {
                let zero = _mm512_setzero_ps();
                let old = if target.add { _mm512_maskz_loadu_ps(mask, at) } else { zero };
                _mm512_mask_storeu_ps(at, mask, _mm512_fmadd_ps(scale, sum, old));
            }
        }
    }
}
