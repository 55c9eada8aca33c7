//! The inner loops over ids: plain Rust over fixed-size chunks, which the compiler turns into
//! vector code. They only say *that* something is wrong; [`crate::check::explain`] says what.

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

    /// Reads one id; `bytes` has [`WireId::bytes`] of them.
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

/// Writes the ids of `wire` to `out` in `width` bytes each (1 or 2), cutting what does not fit.
/// Whether some id is negative or above `limit`; then `out` is not to be used.
pub(crate) fn narrow(ids: WireId, wire: &[u8], width: usize, out: &mut [u8], limit: usize) -> bool {
    let limit16 = u16::try_from(limit).unwrap_or(u16::MAX);
    match (ids, width) {
        (WireId::U8, _) => copy_u8(wire, out, u8::try_from(limit).unwrap_or(u8::MAX)),
        // As unsigned numbers, negative ones are above every limit up to the largest signed one.
        (WireId::U16 | WireId::I16, 1) => narrow_16_to_8(wire, out, limit16),
        (WireId::U16, _) => copy_u16(wire, out, limit16),
        (WireId::I16, _) => copy_u16(wire, out, limit16.min(i16::MAX.unsigned_abs())),
        (WireId::I32, 1) => narrow_32_to_8(wire, out, limit),
        (WireId::I32, _) => narrow_32_to_16(wire, out, limit),
    }
}

fn copy_u8(wire: &[u8], out: &mut [u8], limit: u8) -> bool {
    let mut above = 0;
    for (out, &id) in out.iter_mut().zip(wire) {
        *out = id;
        above |= id.saturating_sub(limit);
    }
    above != 0
}

fn copy_u16(wire: &[u8], out: &mut [u8], limit: u16) -> bool {
    let mut above = 0;
    for (out, id) in out.as_chunks_mut::<2>().0.iter_mut().zip(wire.as_chunks::<2>().0) {
        *out = *id;
        above |= u16::from_le_bytes(*id).saturating_sub(limit);
    }
    above != 0
}

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
fn outside(id: u32, limit: u32) -> u32 {
    id | limit.wrapping_sub(id)
}

const HIGHEST: u32 = 1 << 31;

fn narrow_32_to_8(wire: &[u8], out: &mut [u8], limit: usize) -> bool {
    let limit = u32::try_from(limit).unwrap_or(0);
    let mut bits = 0;
    for (out, id) in out.iter_mut().zip(wire.as_chunks::<4>().0) {
        *out = id[0];
        bits |= outside(u32::from_le_bytes(*id), limit);
    }
    bits & HIGHEST != 0
}

fn narrow_32_to_16(wire: &[u8], out: &mut [u8], limit: usize) -> bool {
    let limit = u32::try_from(limit).unwrap_or(0);
    let mut bits = 0;
    for (out, id) in out.as_chunks_mut::<2>().0.iter_mut().zip(wire.as_chunks::<4>().0) {
        *out = [id[0], id[1]];
        bits |= outside(u32::from_le_bytes(*id), limit);
    }
    bits & HIGHEST != 0
}

/// Whether a byte is not zero.
pub(crate) fn any_set(bytes: &[u8]) -> bool {
    bytes.iter().fold(0, |all, byte| all | byte) != 0
}

/// Whether a stored id is above `limit`.
pub(crate) fn any_above(stored: &[u8], width: usize, limit: usize) -> bool {
    if width == 1 {
        let limit = u8::try_from(limit).unwrap_or(u8::MAX);
        stored.iter().fold(0, |above, id| above | id.saturating_sub(limit)) != 0
    } else {
        let limit = u16::try_from(limit).unwrap_or(u16::MAX);
        let ids = stored.as_chunks::<2>().0;
        ids.iter().fold(0, |above, id| above | u16::from_le_bytes(*id).saturating_sub(limit)) != 0
    }
}

/// Ids compared at a time; a multiple of every top-k up to 12, and of all that models have.
const SPAN_IDS: usize = 4096;

/// Looks for an expert that is twice in one choice.
///
/// Every id is compared with the one `distance` further on, for all distances below top-k; what
/// crosses the border of a choice is masked out. No shuffles, any top-k, any width.
#[derive(Debug)]
pub(crate) struct Repeats {
    top_k: usize,
    width: usize,
    /// The slot of each id of a span, as wide as an id.
    slots: Vec<u8>,
}

impl Repeats {
    pub(crate) fn new(shape: &ModelShape) -> Self {
        let (top_k, width) = (shape.top_k, shape.id_bytes());
        let slots = (0..(SPAN_IDS / top_k).max(1) * top_k)
            .map(|id| id % top_k)
            .flat_map(|slot| {
                let [low, high, ..] = slot.to_le_bytes();
                [low, high].into_iter().take(width)
            })
            .collect();
        Self { top_k, width, slots }
    }

    /// Whether some choice in `stored`, whole choices in stored form, repeats an expert.
    pub(crate) fn any(&self, stored: &[u8]) -> bool {
        stored.chunks(self.slots.len()).any(|span| {
            if self.width == 1 {
                repeats_u8(span, &self.slots, self.top_k)
            } else {
                repeats_u16(span.as_chunks().0, self.slots.as_chunks().0, self.top_k)
            }
        })
    }
}

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
