//! The inner loops over ids: plain Rust over fixed-size chunks, which the compiler vectorises once
//! per instruction set ([`kernel!`]). The loops only detect *that* there is an error;
//! [`crate::check::explain`] finds which.
#![expect(
    clippy::inline_always,
    reason = "a loop that is not inlined into its kernel is compiled for the base"
)]

use orchestrate_cpu::kernel;
use orchestrate_types::ModelShape;

/// Type of an id on the wire, little-endian.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum WireId {
    U8,
    U16,
    I16,
    I32,
}

impl WireId {
    pub(crate) fn bytes(self) -> usize {
        match self {
            Self::U8 => 1,
            Self::U16 | Self::I16 => 2,
            Self::I32 => 4,
        }
    }

    /// Reads one id from exactly [`WireId::bytes`] bytes.
    pub(crate) fn read(self, bytes: &[u8]) -> i64 {
        match (self, bytes) {
            (Self::U8, &[a]) => i64::from(a),
            (Self::U16, &[a, b]) => i64::from(u16::from_le_bytes([a, b])),
            (Self::I16, &[a, b]) => i64::from(i16::from_le_bytes([a, b])),
            (Self::I32, &[a, b, c, d]) => i64::from(i32::from_le_bytes([a, b, c, d])),
            (Self::U8 | Self::U16 | Self::I16 | Self::I32, _) => -1,
        }
    }
}

kernel! {
    /// Writes the ids of `wire` to `out` in `width` bytes each (1 or 2), truncating those that do not fit.
    /// Returns whether any id is negative or above `limit`; `out` is then invalid.
    pub(crate) fn narrow(ids: WireId, wire: &[u8], width: usize, out: &mut [u8], limit: usize) -> bool {
        let limit16 = u16::try_from(limit).unwrap_or(u16::MAX);
        match (ids, width) {
            (WireId::U8, _) => copy_u8(wire, out, u8::try_from(limit).unwrap_or(u8::MAX)),
            // Negative ids, read as unsigned, exceed every limit up to the largest signed number.
            (WireId::U16 | WireId::I16, 1) => narrow_16_to_8(wire, out, limit16),
            (WireId::U16, _) => copy_u16(wire, out, limit16),
            (WireId::I16, _) => copy_u16(wire, out, limit16.min(i16::MAX.unsigned_abs())),
            (WireId::I32, 1) => narrow_32_to_8(wire, out, limit),
            (WireId::I32, _) => narrow_32_to_16(wire, out, limit),
        }
    }
}

#[inline(always)]
fn copy_u8(wire: &[u8], out: &mut [u8], limit: u8) -> bool {
    let mut above = 0;
    for (out, &id) in out.iter_mut().zip(wire) {
        *out = id;
        above |= id.saturating_sub(limit);
    }
    above != 0
}

#[inline(always)]
fn copy_u16(wire: &[u8], out: &mut [u8], limit: u16) -> bool {
    let mut above = 0;
    for (out, id) in out.as_chunks_mut::<2>().0.iter_mut().zip(wire.as_chunks::<2>().0) {
        *out = *id;
        above |= u16::from_le_bytes(*id).saturating_sub(limit);
    }
    above != 0
}

#[inline(always)]
fn narrow_16_to_8(wire: &[u8], out: &mut [u8], limit: u16) -> bool {
    let mut above = 0;
    for (out, id) in out.iter_mut().zip(wire.as_chunks::<2>().0) {
        *out = id[0];
        above |= u16::from_le_bytes(*id).saturating_sub(limit);
    }
    above != 0
}

/// The highest bit of `id | (limit − id)` is set exactly when `id` is negative or above `limit`;
/// unlike a comparison this is two operations on every processor.
#[inline(always)]
fn outside(id: u32, limit: u32) -> u32 {
    id | limit.wrapping_sub(id)
}

const HIGHEST: u32 = 1 << 31;

#[inline(always)]
fn narrow_32_to_8(wire: &[u8], out: &mut [u8], limit: usize) -> bool {
    let limit = u32::try_from(limit).unwrap_or(0);
    let mut bits = 0;
    for (out, id) in out.iter_mut().zip(wire.as_chunks::<4>().0) {
        *out = id[0];
        bits |= outside(u32::from_le_bytes(*id), limit);
    }
    bits & HIGHEST != 0
}

#[inline(always)]
fn narrow_32_to_16(wire: &[u8], out: &mut [u8], limit: usize) -> bool {
    let limit = u32::try_from(limit).unwrap_or(0);
    let mut bits = 0;
    for (out, id) in out.as_chunks_mut::<2>().0.iter_mut().zip(wire.as_chunks::<4>().0) {
        *out = [id[0], id[1]];
        bits |= outside(u32::from_le_bytes(*id), limit);
    }
    bits & HIGHEST != 0
}

/// Whether any byte is not zero.
pub(crate) fn any_set(bytes: &[u8]) -> bool {
    bytes.iter().fold(0, |all, byte| all | byte) != 0
}

kernel! {
    /// Whether any stored id is above `limit`.
    pub(crate) fn any_above(stored: &[u8], width: usize, limit: usize) -> bool {
        if width == 1 {
            let limit = u8::try_from(limit).unwrap_or(u8::MAX);
            stored.iter().fold(0, |above, id| above | id.saturating_sub(limit)) != 0
        } else {
            let limit = u16::try_from(limit).unwrap_or(u16::MAX);
            let above = |id: &[u8; 2]| u16::from_le_bytes(*id).saturating_sub(limit);
            stored.as_chunks().0.iter().fold(0, |all, id| all | above(id)) != 0
        }
    }
}

/// Upper bound on the ids compared at a time.
const SPAN_IDS: usize = 4096;

/// Finds choices that contain an expert twice.
#[derive(Debug)]
pub(crate) struct Repeats {
    top_k: usize,
    width: usize,
    /// The slot of each id of a span, in the width of an id; empty for top-8.
    slots: Vec<u8>,
}

impl Repeats {
    pub(crate) fn new(shape: &ModelShape) -> Self {
        let (top_k, width) = (shape.top_k, shape.id_bytes());
        // Top-8 has faster code. The pattern is copied, not computed: otherwise short payloads would
        // spend most of their time on it.
        let ids = if top_k == 8 { 0 } else { (SPAN_IDS / top_k).max(1) * top_k };
        let mut slots = Vec::with_capacity(ids * width);
        if ids > 0 {
            slots.extend((0..top_k).flat_map(|slot| slot.to_le_bytes().into_iter().take(width)));
        }
        while slots.len() < ids * width {
            slots.extend_from_within(..slots.len().min(ids * width - slots.len()));
        }
        Self { top_k, width, slots }
    }

    /// Whether any choice in `stored` (whole choices in stored form) repeats an expert.
    pub(crate) fn any(&self, stored: &[u8]) -> bool {
        any_repeat(self, stored)
    }
}

kernel! {
    fn any_repeat(repeats: &Repeats, stored: &[u8]) -> bool {
        let Repeats { top_k, width, slots } = repeats;
        match (*top_k, *width) {
            (8, 1) => repeats_8_of_u8(stored),
            (8, _) => repeats_8_of_u16(stored.as_chunks().0.as_chunks().0),
            (_, 1) => stored.chunks(slots.len()).any(|span| repeats_u8(span, slots, *top_k)),
            (_, _) => stored
                .chunks(slots.len())
                .any(|span| repeats_u16(span.as_chunks().0, slots.as_chunks().0, *top_k)),
        }
    }
}

/// Bytes of four choices of 8 ids.
const FOUR: usize = 32;

/// The most common case, 8 ids of one byte: rotating each choice by 1, 2, 3 and 4 ids compares every id with
/// every other one.
#[inline(always)]
fn repeats_8_of_u8(stored: &[u8]) -> bool {
    let mut repeated = [0; FOUR];
    let (fours, rest) = stored.as_chunks::<FOUR>();
    for ids in fours {
        mark_equal::<1>(ids, &mut repeated);
        mark_equal::<2>(ids, &mut repeated);
        mark_equal::<3>(ids, &mut repeated);
        mark_equal::<4>(ids, &mut repeated);
    }
    let is_repeated = |choice: &[u8; 8]| {
        let mut later = choice.iter();
        later.clone().any(|id| {
            later.next();
            later.as_slice().contains(id)
        })
    };
    repeated != [0; FOUR] || rest.as_chunks().0.iter().any(is_repeated)
}

/// Marks ids that equal the one `DISTANCE` later in their choice of 8. With a constant distance and indices the
/// rotation compiles to one shuffle.
#[expect(clippy::indexing_slicing, reason = "all indices are below FOUR")]
#[inline(always)]
fn mark_equal<const DISTANCE: usize>(ids: &[u8; FOUR], marks: &mut [u8; FOUR]) {
    for at in 0..FOUR {
        marks[at] |= u8::from(ids[at] == ids[(at & !7) | ((at + DISTANCE) & 7)]);
    }
}

/// 8 ids of two bytes as two 64-bit words: rotations compare each with itself and with the other.
#[inline(always)]
fn repeats_8_of_u16(choices: &[[[u8; 8]; 2]]) -> bool {
    const LOWEST: u64 = u64::from_le_bytes([1, 0, 1, 0, 1, 0, 1, 0]);
    let mut zero = 0;
    for choice in choices {
        let [first, second] = choice.map(u64::from_le_bytes);
        for bits in [16, 32] {
            zero |= zero_lanes(first ^ first.rotate_left(bits), LOWEST);
            zero |= zero_lanes(second ^ second.rotate_left(bits), LOWEST);
        }
        for bits in [0, 16, 32, 48] {
            zero |= zero_lanes(first ^ second.rotate_left(bits), LOWEST);
        }
    }
    zero & (LOWEST << 15) != 0
}

/// Sets the highest bit of some lane if, and only if, a lane of `word` is zero; `lowest` has the
/// lowest bit of every lane. Only a lane of zeros borrows into a highest bit that was not set.
#[inline(always)]
fn zero_lanes(word: u64, lowest: u64) -> u64 {
    word.wrapping_sub(lowest) & !word
}

/// Compares every id with the one `distance` later, for all distances below top-k, and masks out
/// pairs that cross into the next choice. Needs no shuffles and works for any top-k.
#[inline(always)]
fn repeats_u8(ids: &[u8], slots: &[u8], top_k: usize) -> bool {
    let mut repeated = 0;
    for distance in 1..top_k {
        let last = u8::try_from(top_k - distance).unwrap_or(u8::MAX);
        let later = ids.get(distance..).unwrap_or_default();
        for ((a, b), slot) in ids.iter().zip(later).zip(slots) {
            repeated |= u8::from(a == b) & u8::from(*slot < last);
        }
    }
    repeated != 0
}

/// Like [`repeats_u8`], for ids of two bytes.
#[inline(always)]
fn repeats_u16(ids: &[[u8; 2]], slots: &[[u8; 2]], top_k: usize) -> bool {
    let mut repeated = 0;
    for distance in 1..top_k {
        let last = u16::try_from(top_k - distance).unwrap_or(u16::MAX);
        let later = ids.get(distance..).unwrap_or_default();
        for ((a, b), slot) in ids.iter().zip(later).zip(slots) {
            let equal = u16::from_le_bytes(*a) == u16::from_le_bytes(*b);
            repeated |= u16::from(equal) & u16::from(u16::from_le_bytes(*slot) < last);
        }
    }
    repeated != 0
}
