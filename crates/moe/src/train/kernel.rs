//! Matrix product in f32 for CPUs with AVX-512: four times as fast on this model's small, oddly
//! strided shapes as the general library, which serves everything else.
//!
//! The right operand is packed into panels of 32 columns, the left one is read in place (or packed
//! when it is transposed), and a tile of 8 × 32 sums stays in registers. Each element is summed in
//! the order of `k` wherever it lies in a tile, so a row's result does not depend on how many other
//! rows there are: a sequence has the same log-probs in every micro batch.
#![expect(unsafe_code, reason = "vector intrinsics over raw pointers")]

use std::arch::x86_64::{
    _mm512_fmadd_ps, _mm512_loadu_ps, _mm512_mask_storeu_ps, _mm512_maskz_loadu_ps, _mm512_set1_ps,
    _mm512_setzero_ps,
};
use std::cell::RefCell;

/// Rows of a tile.
const ROWS: usize = 8;
/// Columns of a tile: two registers.
const COLUMNS: usize = 32;
/// Summands handled before sums go back to memory: a panel then stays in the first-level cache.
const DEPTH: usize = 256;

/// Address and strides, in elements, of an operand.
#[derive(Clone, Copy)]
pub(super) struct Operand {
    pub(super) at: *const f32,
    pub(super) row_stride: usize,
    pub(super) col_stride: usize,
}

/// Address and row stride of the result; columns are adjacent.
#[derive(Clone, Copy)]
pub(super) struct Target {
    pub(super) at: *mut f32,
    pub(super) row_stride: usize,
    /// Whether the product is added to what is there.
    pub(super) add: bool,
    pub(super) scale: f32,
}

thread_local! {
    /// Packed panels of the right operand, and a packed strip of the left one.
    static SCRATCH: RefCell<(Vec<f32>, Vec<f32>)> = const { RefCell::new((Vec::new(), Vec::new())) };
}

/// Whether this CPU can run [`multiply`].
pub(super) fn available() -> bool {
    std::arch::is_x86_feature_detected!("avx512f")
}

/// `c (+)= scale · a·b` with `a [m, k]`, `b [k, n]`, `c [m, n]`.
///
/// # Safety
/// [`available`] must hold; both operands must be readable and `c` writable over their whole
/// extent, and `c` must overlap neither.
pub(super) unsafe fn multiply((m, n, k): (usize, usize, usize), c: Target, a: Operand, b: Operand) {
    SCRATCH.with_borrow_mut(|(panels, strip)| {
        let count = n.div_ceil(COLUMNS);
        let depth = DEPTH.min(k);
        if panels.len() < count * COLUMNS * depth {
            panels.resize(count * COLUMNS * depth, 0.0);
        }
        strip.resize(ROWS * DEPTH, 0.0);
        let mut done = 0;
        while done < k {
            let depth = DEPTH.min(k - done);
            // SAFETY: the caller vouches for operands and CPU; the scratch buffers were just made
            // large enough for this depth.
            unsafe {
                let b = Operand { at: b.at.wrapping_add(done * b.row_stride), ..b };
                let a = Operand { at: a.at.wrapping_add(done * a.col_stride), ..a };
                let c = Target { add: c.add || done > 0, ..c };
                block((m, n, depth), c, a, b, (panels.as_mut_ptr(), strip.as_mut_ptr()));
            }
            done += depth;
        }
    });
}

/// One block of at most [`DEPTH`] summands.
#[target_feature(enable = "avx512f")]
unsafe fn block(
    (m, n, depth): (usize, usize, usize),
    c: Target,
    a: Operand,
    b: Operand,
    (panels, strip): (*mut f32, *mut f32),
) {
    let panel_size = COLUMNS * depth;
    for panel in 0..n.div_ceil(COLUMNS) {
        let first = panel * COLUMNS;
        let part = Operand { at: b.at.wrapping_add(first * b.col_stride), ..b };
        // SAFETY: reads `depth` rows of the columns that exist, writes one panel.
        unsafe {
            pack(depth, COLUMNS.min(n - first), part, panels.wrapping_add(panel * panel_size))
        };
    }
    let mut row = 0;
    while row < m {
        let rows = ROWS.min(m - row);
        let mut left = Operand { at: a.at.wrapping_add(row * a.row_stride), ..a };
        if a.col_stride != 1 && rows == ROWS {
            for i in 0..depth {
                for r in 0..ROWS {
                    // SAFETY: element (row + r, i) of `a`; the strip has ROWS · DEPTH places.
                    unsafe {
                        let from = left.at.wrapping_add(i * a.col_stride + r * a.row_stride);
                        strip.wrapping_add(i * ROWS + r).write(from.read());
                    }
                }
            }
            left = Operand { at: strip, row_stride: 1, col_stride: ROWS };
        }
        for panel in 0..n.div_ceil(COLUMNS) {
            let first = panel * COLUMNS;
            let at = c.at.wrapping_add(row * c.row_stride + first);
            let columns = COLUMNS.min(n - first);
            let right = panels.wrapping_add(panel * panel_size);
            // SAFETY: `rows` rows of the left operand, a packed panel, and the part of `c` at this
            // row and column, all inside their buffers.
            unsafe { tile((rows, columns, depth), Target { at, ..c }, left, right) };
        }
        row += rows;
    }
}

/// Copies `columns` columns into a panel `[depth, 32]`, the rest of which becomes 0.
#[inline]
unsafe fn pack(depth: usize, columns: usize, b: Operand, panel: *mut f32) {
    for j in columns..COLUMNS {
        for i in 0..depth {
            // SAFETY: place (i, j) of the panel.
            unsafe { panel.wrapping_add(i * COLUMNS + j).write(0.0) };
        }
    }
    if b.col_stride == 1 {
        for i in 0..depth {
            let from = b.at.wrapping_add(i * b.row_stride);
            for j in 0..columns {
                // SAFETY: element (i, j) of `b` and of the panel.
                unsafe { panel.wrapping_add(i * COLUMNS + j).write(from.wrapping_add(j).read()) };
            }
        }
    } else {
        for j in 0..columns {
            let from = b.at.wrapping_add(j * b.col_stride);
            for i in 0..depth {
                let value = from.wrapping_add(i * b.row_stride);
                // SAFETY: element (i, j) of `b` and of the panel.
                unsafe { panel.wrapping_add(i * COLUMNS + j).write(value.read()) };
            }
        }
    }
}

/// One tile of at most 8 × 32 sums.
#[target_feature(enable = "avx512f")]
unsafe fn tile(
    (rows, columns, depth): (usize, usize, usize),
    c: Target,
    a: Operand,
    panel: *const f32,
) {
    let mut sums = [[_mm512_setzero_ps(); 2]; ROWS];
    // Rows beyond the last repeat it; their sums are not stored.
    let starts: [*const f32; ROWS] =
        std::array::from_fn(|r| a.at.wrapping_add(r.min(rows - 1) * a.row_stride));
    for i in 0..depth {
        let right = panel.wrapping_add(i * COLUMNS);
        // SAFETY: row `i` of the panel.
        let (low, high) =
            unsafe { (_mm512_loadu_ps(right), _mm512_loadu_ps(right.wrapping_add(16))) };
        for (sum, start) in sums.iter_mut().zip(starts) {
            // SAFETY: element (row, i) of the left operand.
            let left = _mm512_set1_ps(unsafe { start.wrapping_add(i * a.col_stride).read() });
            sum[0] = _mm512_fmadd_ps(left, low, sum[0]);
            sum[1] = _mm512_fmadd_ps(left, high, sum[1]);
        }
    }
    let mask = |columns: usize| if columns >= 16 { u16::MAX } else { (1_u16 << columns) - 1 };
    let masks = [mask(columns), mask(columns.saturating_sub(16))];
    let scale = _mm512_set1_ps(c.scale);
    for (r, sum) in sums.iter().enumerate().take(rows) {
        for (half, (&sum, mask)) in sum.iter().zip(masks).enumerate() {
            let at = c.at.wrapping_add(r * c.row_stride + half * 16);
            // SAFETY: masked-off columns are neither read nor written.
            unsafe {
                let old = if c.add { _mm512_maskz_loadu_ps(mask, at) } else { _mm512_setzero_ps() };
                _mm512_mask_storeu_ps(at, mask, _mm512_fmadd_ps(scale, sum, old));
            }
        }
    }
}
