//! Matrix product whose bits depend on neither the processor nor the number of rows.
//!
//! The right operand is packed into panels of columns, the left one is read in place (or packed if
//! it is transposed), and a tile of sums stays in registers. Each element is summed in the order of
//! `k`, with fused operations and in blocks of 256 summands, whatever the size of the tile and
//! wherever the element lies in it. So every instruction set gives the same bits, and the result of
//! a row does not depend on the number of other rows: a sequence has the same log-probs in every
//! micro-batch.
#![expect(unsafe_code, reason = "vector instructions over raw pointers")]
#![expect(
    clippy::inline_always,
    reason = "a body is compiled for an instruction set only where it is inlined into its wrapper"
)]

#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
mod portable;

use super::real::Real;
#[cfg(target_arch = "x86_64")]
use orchestrate_cpu::InstructionSet;
use orchestrate_cpu::Level;
#[cfg(target_arch = "x86_64")]
use std::any::TypeId;

/// Number of summands processed before sums are written back, so that a panel stays in the L1
/// cache. Part of the result: sums of blocks are rounded.
const DEPTH: usize = 256;

/// Address and strides, in elements, of an operand.
#[derive(Debug, Clone, Copy)]
pub(super) struct Operand<T> {
    pub(super) at: *const T,
    pub(super) row_stride: usize,
    pub(super) col_stride: usize,
}

/// Address and row stride of the result; columns are adjacent.
#[derive(Debug, Clone, Copy)]
pub(super) struct Target<T> {
    pub(super) at: *mut T,
    pub(super) row_stride: usize,
    /// Whether the product is added to the present values.
    pub(super) add: bool,
    pub(super) scale: T,
}

/// A tile of `ROWS × COLUMNS` sums, computed with one instruction set.
trait Tile<T> {
    const ROWS: usize;
    const COLUMNS: usize;

    /// Computes at most `ROWS × COLUMNS` elements of the product of one block.
    ///
    /// # Safety
    /// The processor must have the instruction set; `left` must be readable over `ROWS` rows of
    /// `depth`, `panel` over `depth × COLUMNS`, and `target` writable over `rows × columns`.
    unsafe fn compute(shape: Shape, target: Target<T>, left: Operand<T>, panel: *const T);
}

/// Rows, columns and summands of a product.
type Shape = (usize, usize, usize);

/// Address of the packed panels of the right operand, and of a packed strip of the left one.
type Scratch<T> = (*mut T, *mut T);

/// `c (+)= scale · a·b` with `a [m, k]`, `b [k, n]`, `c [m, n]`, computed with the instruction sets of
/// `level`.
///
/// # Safety
/// Both operands must be readable and `c` writable over their whole extent, and `c` must overlap
/// neither.
pub(super) unsafe fn multiply<T: Real>(
    level: Level,
    (rows, columns, summands): Shape,
    c: Target<T>,
    a: Operand<T>,
    b: Operand<T>,
) {
    let (block, tile) = implementation::<T>(level);
    T::with_scratch(|[panels, strip]| {
        let count = columns.div_ceil(tile.1);
        let depth = DEPTH.min(summands);
        if panels.len() < count * tile.1 * depth {
            panels.resize(count * tile.1 * depth, T::ZERO);
        }
        if strip.len() < tile.0 * DEPTH {
            strip.resize(tile.0 * DEPTH, T::ZERO);
        }
        let mut done = 0;
        while done < summands {
            let depth = DEPTH.min(summands - done);
            let b = Operand { at: b.at.wrapping_add(done * b.row_stride), ..b };
            let a = Operand { at: a.at.wrapping_add(done * a.col_stride), ..a };
            let c = Target { add: c.add || done > 0, ..c };
            // SAFETY: the caller guarantees the operands, and the level the instruction set; the
            // scratch buffers were just resized for this depth.
            unsafe {
                block((rows, columns, depth), c, a, b, (panels.as_mut_ptr(), strip.as_mut_ptr()));
            }
            done += depth;
        }
    });
}

/// A function that computes one block of summands.
///
/// # Safety
/// That of [`block_by`].
type BlockOf<T> = unsafe fn(Shape, Target<T>, Operand<T>, Operand<T>, Scratch<T>);

/// The function for one block, and rows and columns of its tiles.
fn implementation<T: Real>(level: Level) -> (BlockOf<T>, (usize, usize)) {
    fn size<T, K: Tile<T>>() -> (usize, usize) {
        (K::ROWS, K::COLUMNS)
    }
    #[cfg(target_arch = "x86_64")]
    if TypeId::of::<T>() == TypeId::of::<f32>() && level.set() >= InstructionSet::Avx2 {
        let (block, size) = if level.set() == InstructionSet::Avx512 {
            (avx512::block as BlockOf<f32>, size::<f32, avx512::Avx512Tile>())
        } else {
            (avx2::block as BlockOf<f32>, size::<f32, avx2::Avx2Tile>())
        };
        // SAFETY: T is f32, so both are the same type.
        return (unsafe { std::mem::transmute::<BlockOf<f32>, BlockOf<T>>(block) }, size);
    }
    #[cfg(target_arch = "x86_64")]
    if level.set() >= InstructionSet::Avx2 {
        return (portable::avx2_block::<T>, size::<T, portable::Avx2>());
    }
    let _ = level;
    (portable::block::<T>, size::<T, portable::Base>())
}

/// One block of at most [`DEPTH`] summands.
///
/// # Safety
/// That of [`multiply`]; the scratch buffers hold `⌈columns / COLUMNS⌉` panels of `depth × COLUMNS`, and
/// a strip of `depth × ROWS`; the processor has the instruction set of the tile.
#[inline(always)]
unsafe fn block_by<T: Real, K: Tile<T>>(
    (rows, columns, depth): Shape,
    target: Target<T>,
    left: Operand<T>,
    right: Operand<T>,
    (panels, strip): Scratch<T>,
) {
    let panel_size = K::COLUMNS * depth;
    for panel in 0..columns.div_ceil(K::COLUMNS) {
        let first = panel * K::COLUMNS;
        let part = Operand { at: right.at.wrapping_add(first * right.col_stride), ..right };
        let into = panels.wrapping_add(panel * panel_size);
        // SAFETY: reads `depth` rows of the columns that exist, writes one panel.
        unsafe { pack::<T, K>(depth, K::COLUMNS.min(columns - first), part, into) };
    }
    let mut row = 0;
    while row < rows {
        let height = K::ROWS.min(rows - row);
        let mut part = Operand { at: left.at.wrapping_add(row * left.row_stride), ..left };
        if left.col_stride != 1 || height < K::ROWS {
            // SAFETY: `height` rows exist, and the strip has ROWS · DEPTH elements.
            unsafe { pack_strip::<T, K>((height, depth), part, strip) };
            part = Operand { at: strip, row_stride: 1, col_stride: K::ROWS };
        }
        for panel in 0..columns.div_ceil(K::COLUMNS) {
            let first = panel * K::COLUMNS;
            let at = target.at.wrapping_add(row * target.row_stride + first);
            let width = K::COLUMNS.min(columns - first);
            let packed = panels.wrapping_add(panel * panel_size);
            // SAFETY: `height` rows of the left operand, a packed panel, and the part of the
            // target at this row and column, all inside their buffers.
            unsafe { K::compute((height, width, depth), Target { at, ..target }, part, packed) };
        }
        row += height;
    }
}

/// Packs the rows of an operand that is transposed or has fewer rows than a tile: `[depth, ROWS]`.
/// Missing rows keep their old contents: their sums are never stored.
///
/// # Safety
/// `a` must be readable over `rows × depth`, and `strip` writable over `depth × ROWS`.
#[inline(always)]
unsafe fn pack_strip<T: Real, K: Tile<T>>(
    (rows, depth): (usize, usize),
    a: Operand<T>,
    strip: *mut T,
) {
    let (mut from, mut to) = (a.at, strip);
    let adjacent = a.row_stride == 1 && rows == K::ROWS;
    for _ in 0..depth {
        // SAFETY: the caller guarantees the rows and the strip.
        unsafe {
            if adjacent {
                // The length is constant, so the copy is inlined.
                from.copy_to_nonoverlapping(to, K::ROWS);
            } else {
                for r in 0..rows {
                    to.wrapping_add(r).write(from.wrapping_add(r * a.row_stride).read());
                }
            }
        }
        from = from.wrapping_add(a.col_stride);
        to = to.wrapping_add(K::ROWS);
    }
}

/// Copies `columns` columns into a panel `[depth, COLUMNS]` and fills the rest with zeros.
///
/// # Safety
/// `b` must be readable over `depth × columns`, and `panel` writable over `depth × COLUMNS`; they must
/// not overlap.
#[inline(always)]
unsafe fn pack<T: Real, K: Tile<T>>(depth: usize, columns: usize, b: Operand<T>, panel: *mut T) {
    // Pointers are incremented, which avoids checked multiplications in the inner loops.
    if b.col_stride == 1 {
        let (mut from, mut to) = (b.at, panel);
        for _ in 0..depth {
            // SAFETY: one row of `b` and of the panel, which do not overlap.
            unsafe {
                if columns == K::COLUMNS {
                    // The length is constant, so the copy is inlined.
                    from.copy_to_nonoverlapping(to, K::COLUMNS);
                } else {
                    from.copy_to_nonoverlapping(to, columns);
                    to.wrapping_add(columns).write_bytes(0, K::COLUMNS - columns);
                }
            }
            from = from.wrapping_add(b.row_stride);
            to = to.wrapping_add(K::COLUMNS);
        }
        return;
    }
    for j in 0..K::COLUMNS {
        let mut from = b.at.wrapping_add(j * b.col_stride);
        let mut to = panel.wrapping_add(j);
        for _ in 0..depth {
            // SAFETY: element of column `j` of `b`, if it exists, and of the panel.
            unsafe { to.write(if j < columns { from.read() } else { T::ZERO }) };
            from = from.wrapping_add(b.row_stride);
            to = to.wrapping_add(K::COLUMNS);
        }
    }
}
