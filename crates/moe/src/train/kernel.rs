//! f32 matrix product for CPUs with AVX-512. It is four times as fast as the general library on
//! this model's small, irregularly strided shapes; the library handles everything else.
//!
//! The right operand is packed into panels of 32 columns, the left one is read in place (or packed
//! if it is transposed), and a tile of 8 × 32 sums stays in registers. Each element is summed in
//! the order of `k` wherever it lies in a tile, so the result of a row does not depend on the
//! number of other rows: a sequence has the same log-probs in every micro batch.
#![expect(unsafe_code, reason = "vector intrinsics over raw pointers")]

use std::arch::x86_64::{
    _mm512_fmadd_ps, _mm512_loadu_ps, _mm512_mask_storeu_ps, _mm512_maskz_loadu_ps, _mm512_set1_ps,
    _mm512_setzero_ps,
};
use std::cell::RefCell;

/// Number of rows of a tile.
const ROWS: usize = 8;
/// Number of columns of a tile: two registers.
const COLUMNS: usize = 32;
/// Number of summands processed before sums are written back, so that a panel stays in the L1
/// cache.
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
    /// Whether the product is added to the present values.
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
pub(super) unsafe fn multiply(
    (rows, columns, summands): (usize, usize, usize),
    c: Target,
    a: Operand,
    b: Operand,
) {
    SCRATCH.with_borrow_mut(|(panels, strip)| {
        let count = columns.div_ceil(COLUMNS);
        let depth = DEPTH.min(summands);
        if panels.len() < count * COLUMNS * depth {
            panels.resize(count * COLUMNS * depth, 0.0);
        }
        strip.resize(ROWS * DEPTH, 0.0);
        let mut done = 0;
        while done < summands {
            let depth = DEPTH.min(summands - done);
            // SAFETY: the caller guarantees operands and CPU; the scratch buffers were just resized
            // for this depth.
            unsafe {
                let b = Operand { at: b.at.wrapping_add(done * b.row_stride), ..b };
                let a = Operand { at: a.at.wrapping_add(done * a.col_stride), ..a };
                let c = Target { add: c.add || done > 0, ..c };
                block((rows, columns, depth), c, a, b, (panels.as_mut_ptr(), strip.as_mut_ptr()));
            }
            done += depth;
        }
    });
}

/// One block of at most [`DEPTH`] summands.
///
/// # Safety
/// That of [`multiply`]; `panels` holds `⌈columns / 32⌉` panels of `depth × 32`, and `strip` `depth × 8`.
#[target_feature(enable = "avx512f")]
unsafe fn block(
    (rows, columns, depth): (usize, usize, usize),
    target: Target,
    left: Operand,
    right: Operand,
    (panels, strip): (*mut f32, *mut f32),
) {
    let panel_size = COLUMNS * depth;
    for panel in 0..columns.div_ceil(COLUMNS) {
        let first = panel * COLUMNS;
        let part = Operand { at: right.at.wrapping_add(first * right.col_stride), ..right };
        let into = panels.wrapping_add(panel * panel_size);
        // SAFETY: reads `depth` rows of the columns that exist, writes one panel.
        unsafe { pack(depth, COLUMNS.min(columns - first), part, into) };
    }
    let mut row = 0;
    while row < rows {
        let height = ROWS.min(rows - row);
        let mut part = Operand { at: left.at.wrapping_add(row * left.row_stride), ..left };
        if left.col_stride != 1 || height < ROWS {
            // SAFETY: `height` rows exist, and the strip has ROWS · DEPTH elements.
            unsafe { pack_strip((height, depth), part, strip) };
            part = Operand { at: strip, row_stride: 1, col_stride: ROWS };
        }
        for panel in 0..columns.div_ceil(COLUMNS) {
            let first = panel * COLUMNS;
            let at = target.at.wrapping_add(row * target.row_stride + first);
            let width = COLUMNS.min(columns - first);
            let packed = panels.wrapping_add(panel * panel_size);
            // SAFETY: `height` rows of the left operand, a packed panel, and the part of the
            // target at this row and column, all inside their buffers.
            unsafe { tile((height, width, depth), Target { at, ..target }, part, packed) };
        }
        row += height;
    }
}

/// Packs the rows of an operand that is transposed or has fewer than 8 rows: `[depth, 8]`. Missing
/// rows keep their old contents: their sums are never stored.
///
/// # Safety
/// `a` must be readable over `rows × depth`, and `strip` writable over `depth × 8`.
#[inline]
unsafe fn pack_strip((rows, depth): (usize, usize), a: Operand, strip: *mut f32) {
    let (mut from, mut to) = (a.at, strip);
    for _ in 0..depth {
        for r in 0..rows {
            // SAFETY: the caller guarantees the rows and the strip.
            unsafe { to.wrapping_add(r).write(from.wrapping_add(r * a.row_stride).read()) };
        }
        from = from.wrapping_add(a.col_stride);
        to = to.wrapping_add(ROWS);
    }
}

/// Copies `columns` columns into a panel `[depth, 32]` and fills the rest with zeros.
///
/// # Safety
/// `b` must be readable over `depth × columns`, and `panel` writable over `depth × 32`; they must not
/// overlap.
#[inline]
unsafe fn pack(depth: usize, columns: usize, b: Operand, panel: *mut f32) {
    // Pointers are incremented, which avoids checked multiplications in the inner loops.
    if b.col_stride == 1 {
        let (mut from, mut to) = (b.at, panel);
        for _ in 0..depth {
            // SAFETY: one row of `b` and of the panel, which do not overlap.
            unsafe {
                from.copy_to_nonoverlapping(to, columns);
                to.wrapping_add(columns).write_bytes(0, COLUMNS - columns);
            }
            from = from.wrapping_add(b.row_stride);
            to = to.wrapping_add(COLUMNS);
        }
        return;
    }
    for j in 0..COLUMNS {
        let mut from = b.at.wrapping_add(j * b.col_stride);
        let mut to = panel.wrapping_add(j);
        for _ in 0..depth {
            // SAFETY: element of column `j` of `b`, if it exists, and of the panel.
            unsafe { to.write(if j < columns { from.read() } else { 0.0 }) };
            from = from.wrapping_add(b.row_stride);
            to = to.wrapping_add(COLUMNS);
        }
    }
}

/// Computes one tile of at most 8 × 32 sums. Not inlined: inside the caller's loops the compiler
/// runs out of registers and spills a sum to memory at every step.
///
/// # Safety
/// The CPU must have AVX-512F; `left` must be readable over 8 rows of `depth`, `panel` over `depth × 32`,
/// and `target` writable over `rows × columns`.
#[inline(never)]
#[target_feature(enable = "avx512f")]
unsafe fn tile(
    (rows, columns, depth): (usize, usize, usize),
    target: Target,
    left: Operand,
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
