//! Matrices in GGML's `Q8_0`: blocks of 32 signed bytes with one f16 scale. Values of its `Q4_0`
//! are stored as bytes too: they are coarser, not smaller.
//!
//! The product quantises its input rows the same way, multiplies and sums bytes exactly in
//! integers, and scales the sum of each block. Bytes are stored four values of sixteen columns at
//! a time, the layout that AVX-512 VNNI consumes; on other CPUs, portable code computes the same
//! sums with the same result.
#![expect(clippy::indexing_slicing, reason = "fixed tiles; lengths are asserted at entry")]
#![expect(
    clippy::cast_possible_truncation,
    reason = "rounded values are clamped by construction: |x| / scale <= 127"
)]
#![expect(unsafe_code, reason = "calling code compiled for a wider instruction set than the base")]
#![expect(
    clippy::inline_always,
    reason = "a body is compiled for an instruction set only where it is inlined into its wrapper"
)]

use super::kernels::dispatch;
use crate::fused::fused;
use half::f16;
use orchestrate_cpu::Level;

/// Number of consecutive values that share a scale.
pub(crate) const BLOCK: usize = 32;
/// Number of columns stored together in a tile.
const COLUMNS: usize = 16;
/// Number of consecutive values of one column stored together.
const QUAD: usize = 4;
/// Added to input bytes to make them unsigned, as the byte dot product instructions require.
const SHIFT: i32 = 128;

/// One block of values of 16 columns.
#[derive(Debug, Clone)]
#[repr(C, align(64))]
struct Tile {
    /// `[value / 4][column][value % 4]`.
    bytes: [[[i8; QUAD]; COLUMNS]; BLOCK / QUAD],
    scales: [f32; COLUMNS],
    /// Amount that [`SHIFT`] adds to the sum of each column.
    excess: [i32; COLUMNS],
}

/// A weight matrix `[n, k]`.
#[derive(Debug)]
pub(crate) struct Quantized {
    n: usize,
    k: usize,
    /// `[n / 16, k / 32]`, the last columns padded with zeros.
    tiles: Vec<Tile>,
}

/// Quantised input rows.
struct Input {
    /// `[rows, k]`, shifted.
    bytes: Vec<u8>,
    /// `[rows, k / 32]`.
    scales: Vec<f32>,
}

/// Precision of quantised weights.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Bits {
    /// 255 distinct values (`Q8_0`).
    Eight,
    /// 16 distinct values (`Q4_0`).
    Four,
}

impl Quantized {
    /// Quantises `rows`, `[n, k]`; `k` must be a multiple of [`BLOCK`].
    pub(crate) fn pack(bits: Bits, rows: &[f32], n: usize, k: usize) -> Self {
        assert!(rows.len() == n * k && k > 0 && k.is_multiple_of(BLOCK));
        let blocks = k / BLOCK;
        let empty = Tile {
            bytes: [[[0; QUAD]; COLUMNS]; BLOCK / QUAD],
            scales: [0.0; COLUMNS],
            excess: [0; COLUMNS],
        };
        let mut tiles = vec![empty; n.div_ceil(COLUMNS) * blocks];
        for (column, row) in rows.chunks_exact(k).enumerate() {
            for (block, values) in row.as_chunks::<BLOCK>().0.iter().enumerate() {
                let tile = &mut tiles[column / COLUMNS * blocks + block];
                let at = column % COLUMNS;
                let (scale, inverse) = match bits {
                    Bits::Eight => scale_of(values),
                    Bits::Four => coarse_scale_of(values),
                };
                tile.scales[at] = scale;
                for (i, &value) in values.iter().enumerate() {
                    let byte = match bits {
                        Bits::Eight => round(value * inverse),
                        Bits::Four => (value * inverse + 8.5).trunc().min(15.0) - 8.0,
                    } as i8;
                    tile.bytes[i / QUAD][at][i % QUAD] = byte;
                    tile.excess[at] += SHIFT * i32::from(byte);
                }
            }
        }
        Self { n, k, tiles }
    }

    /// `out[r] = W · x[r]` for rows of `x`, `[rows, k]`; `out` is `[rows, n]`.
    pub(crate) fn apply(&self, level: Level, x: &[f32], out: &mut [f32]) {
        assert_eq!(x.len() / self.k, out.len() / self.n.max(1));
        let mut input = Input { bytes: vec![0; x.len()], scales: vec![0.0; x.len() / BLOCK] };
        quantize(level, x, &mut input);
        #[cfg(target_arch = "x86_64")]
        if level.byte_dots() {
            // SAFETY: the level says that the CPU has these instructions.
            unsafe { vnni::product(self, &input, out) };
            return;
        }
        portable(level, self, &input, out);
    }

    /// Writes row `index` to `out [k]` in f32, for the embedding lookup.
    pub(crate) fn row(&self, index: usize, out: &mut [f32]) {
        let blocks = self.k / BLOCK;
        let at = index % COLUMNS;
        let tiles = &self.tiles[index / COLUMNS * blocks..][..blocks];
        for (tile, out) in tiles.iter().zip(out.chunks_exact_mut(BLOCK)) {
            for (quad, out) in tile.bytes.iter().zip(out.chunks_exact_mut(QUAD)) {
                for (&byte, out) in quad[at].iter().zip(out) {
                    *out = f32::from(byte) * tile.scales[at];
                }
            }
        }
    }
}

/// The stored scale of a block (rounded to f16), and the exact factor that maps its values to ±127.
#[inline(always)]
fn scale_of(values: &[f32; BLOCK]) -> (f32, f32) {
    let mut largest = 0.0f32;
    let mut i = 0;
    while i < BLOCK {
        let size = values[i].abs();
        largest = if size > largest { size } else { largest };
        i += 1;
    }
    let scale = largest / 127.0;
    let inverse = if scale > 0.0 { 1.0 / scale } else { 0.0 };
    (f16::from_f32(scale).to_f32(), inverse)
}

/// As [`scale_of`], for −8 to 7: the value farthest from 0 becomes −8, so the scale has the
/// opposite sign of that value.
fn coarse_scale_of(values: &[f32; BLOCK]) -> (f32, f32) {
    let farther = |a: f32, b: &f32| if b.abs() > a.abs() { *b } else { a };
    let scale = values.iter().fold(0.0, farther) / -8.0;
    let inverse = if scale == 0.0 { 0.0 } else { 1.0 / scale };
    (f16::from_f32(scale).to_f32(), inverse)
}

/// Rounds to the nearest integer, halves away from zero.
#[inline(always)]
fn round(value: f32) -> f32 {
    // The largest number below one half: adding 0.5 itself would round 0.49999997 up to 1.
    (value + 0.499_999_97_f32.copysign(value)).trunc()
}

dispatch!(quantize => quantize_body(x: &[f32], input: &mut Input));

#[inline(always)]
fn quantize_body<const FUSED: bool, const WIDE: bool>(x: &[f32], input: &mut Input) {
    let (blocks, _) = x.as_chunks::<BLOCK>();
    let (outs, _) = input.bytes.as_chunks_mut::<BLOCK>();
    for ((values, out), stored) in blocks.iter().zip(outs).zip(&mut input.scales) {
        let (scale, inverse) = scale_of(values);
        *stored = scale;
        let mut i = 0;
        while i < BLOCK {
            let shifted = round(values[i] * inverse) as i32 + SHIFT;
            out[i] = shifted.cast_unsigned() as u8;
            i += 1;
        }
    }
}

dispatch!(portable => portable_body(matrix: &Quantized, input: &Input, out: &mut [f32]));

#[inline(always)]
fn portable_body<const FUSED: bool, const WIDE: bool>(
    matrix: &Quantized,
    input: &Input,
    out: &mut [f32],
) {
    let blocks = matrix.k / BLOCK;
    for (index, tiles) in matrix.tiles.chunks_exact(blocks).enumerate() {
        let rows = input.bytes.chunks_exact(matrix.k).zip(input.scales.chunks_exact(blocks));
        for ((bytes, scales), out) in rows.zip(out.chunks_exact_mut(matrix.n)) {
            let mut sums = [0.0f32; COLUMNS];
            for ((tile, bytes), &scale) in tiles.iter().zip(bytes.chunks_exact(BLOCK)).zip(scales) {
                let mut dots = [0i32; COLUMNS];
                for (quads, bytes) in tile.bytes.iter().zip(bytes.chunks_exact(QUAD)) {
                    for (dot, quad) in dots.iter_mut().zip(quads) {
                        for (&w, &x) in quad.iter().zip(bytes) {
                            *dot += i32::from(w) * i32::from(x);
                        }
                    }
                }
                for (c, sum) in sums.iter_mut().enumerate() {
                    let dot = (dots[c] - tile.excess[c]) as f32;
                    *sum = fused::<FUSED>(dot, scale * tile.scales[c], *sum);
                }
            }
            store(&sums, index, out);
        }
    }
}

#[inline(always)]
fn store(sums: &[f32; COLUMNS], tile: usize, out: &mut [f32]) {
    let start = tile * COLUMNS;
    let width = COLUMNS.min(out.len() - start);
    out[start..start + width].copy_from_slice(&sums[..width]);
}

#[cfg(target_arch = "x86_64")]
mod vnni {
    use super::{BLOCK, COLUMNS, Input, QUAD, Quantized, Tile, store};
    use core::arch::x86_64::{
        __m512, __m512i, _mm512_cvtepi32_ps, _mm512_dpbusd_epi32, _mm512_fmadd_ps, _mm512_loadu_ps,
        _mm512_loadu_si512, _mm512_mul_ps, _mm512_set1_epi32, _mm512_set1_ps, _mm512_setzero_ps,
        _mm512_setzero_si512, _mm512_storeu_ps, _mm512_sub_epi32,
    };

    /// The same product as the portable code, for 16 columns at a time.
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni,avx2,fma")]
    pub(super) fn product(matrix: &Quantized, input: &Input, out: &mut [f32]) {
        let blocks = matrix.k / BLOCK;
        for (index, tiles) in matrix.tiles.chunks_exact(blocks).enumerate() {
            let mut row = 0;
            let mut outs = out.chunks_exact_mut(4 * matrix.n);
            for out in outs.by_ref() {
                rows::<4>(tiles, input, row, out, index);
                row += 4;
            }
            for out in outs.into_remainder().chunks_exact_mut(matrix.n) {
                rows::<1>(tiles, input, row, out, index);
                row += 1;
            }
        }
    }

    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni,avx2,fma")]
    fn rows<const ROWS: usize>(
        tiles: &[Tile],
        input: &Input,
        first: usize,
        out: &mut [f32],
        index: usize,
    ) {
        let blocks = tiles.len();
        let bytes: [&[[u8; QUAD]]; ROWS] = std::array::from_fn(|r| {
            let start = (first + r) * blocks * BLOCK;
            input.bytes[start..start + blocks * BLOCK].as_chunks::<QUAD>().0
        });
        let scales: [&[f32]; ROWS] =
            std::array::from_fn(|r| &input.scales[(first + r) * blocks..(first + r + 1) * blocks]);
        let mut sums = [_mm512_setzero_ps(); ROWS];
        for (block, tile) in tiles.iter().enumerate() {
            let mut dots = [_mm512_setzero_si512(); ROWS];
            for (quad, weights) in tile.bytes.iter().enumerate() {
                let weights = integers(weights.as_flattened());
                for r in 0..ROWS {
                    let x = bytes[r][block * (BLOCK / QUAD) + quad];
                    let x = _mm512_set1_epi32(i32::from_le_bytes(x));
                    dots[r] = _mm512_dpbusd_epi32(dots[r], x, weights);
                }
            }
            // SAFETY: the array holds the 16 integers that are read.
            let excess = unsafe { _mm512_loadu_si512(tile.excess.as_ptr().cast()) };
            let columns = floats(&tile.scales);
            for r in 0..ROWS {
                let dot = _mm512_cvtepi32_ps(_mm512_sub_epi32(dots[r], excess));
                let scale = _mm512_mul_ps(_mm512_set1_ps(scales[r][block]), columns);
                sums[r] = _mm512_fmadd_ps(dot, scale, sums[r]);
            }
        }
        let width = out.len() / ROWS;
        for (sum, out) in sums.iter().zip(out.chunks_exact_mut(width)) {
            let mut values = [0.0; COLUMNS];
            // SAFETY: the array has room for the 16 values that are written.
            unsafe { _mm512_storeu_ps(values.as_mut_ptr(), *sum) };
            store(&values, index, out);
        }
    }

    #[target_feature(enable = "avx512f")]
    fn integers(bytes: &[i8]) -> __m512i {
        assert_eq!(bytes.len(), COLUMNS * QUAD);
        // SAFETY: the slice holds the 64 bytes that are read.
        unsafe { _mm512_loadu_si512(bytes.as_ptr().cast()) }
    }

    #[target_feature(enable = "avx512f")]
    fn floats(values: &[f32; COLUMNS]) -> __m512 {
        // SAFETY: the array holds the 16 values that are read.
        unsafe { _mm512_loadu_ps(values.as_ptr()) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use candle_core::quantized::GgmlType;
    use candle_core::quantized::k_quants::{BlockQ4_0, BlockQ8_0};

    fn values(seed: u32, len: u32) -> Vec<f32> {
        let noise = |i: u32| (i.wrapping_mul(2_654_435_761).wrapping_add(seed) >> 8) as f32;
        (0..len).map(|i| noise(i * 7 + seed) / 16_777_216.0 - 0.5).collect()
    }

    #[test]
    fn product_equals_that_of_ggml_blocks() {
        let (n, k, rows) = (37, 96, 6);
        let weights = values(1, 37 * 96);
        let x = values(2, 6 * 96);
        let matrix = Quantized::pack(Bits::Eight, &weights, n, k);
        let mut out = vec![0.0; rows * n];
        matrix.apply(Level::current(), &x, &mut out);

        let blocks = |v: &[f32]| {
            let mut blocks = vec![BlockQ8_0::zeros(); v.len() / BLOCK];
            BlockQ8_0::from_float(v, &mut blocks);
            blocks
        };
        let (w, input) = (blocks(&weights), blocks(&x));
        for (r, input) in input.chunks_exact(k / BLOCK).enumerate() {
            for (c, w) in w.chunks_exact(k / BLOCK).enumerate() {
                let expected = BlockQ8_0::vec_dot_unopt(k, w, input);
                assert!((out[r * n + c] - expected).abs() < 1e-5, "{r} {c}");
            }
        }
        let (mut mine, mut theirs) = (vec![0.0; k], vec![0.0; k]);
        matrix.row(36, &mut mine);
        BlockQ8_0::to_float(&w[36 * k / BLOCK..], &mut theirs);
        assert_eq!(mine, theirs);
    }

    #[test]
    fn four_bit_values_equal_those_of_ggml_blocks() {
        let k = 64;
        let mut weights = values(5, 3 * 64);
        // A block of zeros, and one in which the largest magnitude occurs with both signs.
        weights[..BLOCK].fill(0.0);
        (weights[40], weights[50]) = (0.75, -0.75);
        let matrix = Quantized::pack(Bits::Four, &weights, 3, k);
        let mut blocks = vec![BlockQ4_0::zeros(); weights.len() / BLOCK];
        BlockQ4_0::from_float(&weights, &mut blocks);
        let (mut mine, mut theirs) = (vec![0.0; k], vec![0.0; k]);
        for (row, blocks) in blocks.chunks_exact(k / BLOCK).enumerate() {
            matrix.row(row, &mut mine);
            BlockQ4_0::to_float(blocks, &mut theirs);
            assert_eq!(mine, theirs, "row {row}");
        }
    }

    #[test]
    fn instruction_sets_give_identical_bits() {
        let matrix = Quantized::pack(Bits::Eight, &values(3, 48 * 64), 48, 64);
        let x = values(4, 5 * 64);
        let product = |level| {
            let mut out = vec![0.0; 5 * 48];
            matrix.apply(level, &x, &mut out);
            out.into_iter().map(f32::to_bits).collect::<Vec<_>>()
        };
        let products: Vec<_> = Level::supported().into_iter().map(product).collect();
        for other in &products[1..] {
            assert_eq!(&products[0], other);
        }
    }
}
