//! Decoding with AVX-512 VBMI, which translates 64 characters in two instructions.
#![expect(unsafe_code, reason = "vector loads, stores and feature dispatch require unsafe calls")]

use crate::base64::{GROUP_BYTES, GROUP_CHARS};
use orchestrate_cpu::Level;
use std::arch::x86_64::{
    _MM_HINT_ET0, _mm_prefetch, _mm512_loadu_epi8, _mm512_madd_epi16, _mm512_maddubs_epi16,
    _mm512_mask_storeu_epi8, _mm512_movepi8_mask, _mm512_or_si512, _mm512_permutex2var_epi8,
    _mm512_permutexvar_epi8, _mm512_set1_epi32, _mm512_setzero_si512, _mm512_storeu_epi8,
};
use std::mem::MaybeUninit;

/// Characters translated at a time, and their bytes.
const BLOCK_CHARS: usize = 64;
const BLOCK_BYTES: usize = 48;

/// Prefetch distance ahead of the store: rows go to uncached memory, and without the prefetch
/// every other store waits for its cache line.
const AHEAD: usize = 4096;

/// Marks characters outside the alphabet.
const NONE: u8 = 0x80;

/// Value of each character below 128.
const VALUES: [u8; 128] = {
    let alphabet = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let mut values = [NONE; 128];
    let mut value = 0u8;
    while value < 64 {
        #[expect(clippy::indexing_slicing, reason = "computed by the compiler")]
        {
            values[alphabet[value as usize] as usize] = value;
        }
        value += 1;
    }
    values
};

/// Positions of the bytes of 16 groups, each held in the lowest 24 bits of a 32-bit lane.
const PLACES: [u8; 64] = {
    let mut places = [0; 64];
    let mut group = 0u8;
    while group < 16 {
        #[expect(clippy::indexing_slicing, reason = "computed by the compiler")]
        {
            places[3 * group as usize] = 4 * group + 2;
            places[3 * group as usize + 1] = 4 * group + 1;
            places[3 * group as usize + 2] = 4 * group;
        }
        group += 1;
    }
    places
};

/// Decodes leading characters of `chars` to the end of `out` and returns the rest, which includes
/// any padding. `None` if a character is not in the alphabet.
pub(super) fn append<'a>(level: Level, chars: &'a [u8], out: &mut Vec<u8>) -> Option<&'a [u8]> {
    if !level.byte_permutations() {
        return Some(chars);
    }
    let blocks = chars.len().saturating_sub(1) / BLOCK_CHARS;
    if blocks == 0 {
        return Some(chars);
    }
    let (wide, rest) = chars.split_at(blocks * BLOCK_CHARS);
    out.reserve(chars.len() / GROUP_CHARS * GROUP_BYTES);
    // SAFETY: the level says that the processor has all features of the function.
    let valid = unsafe { decode(wide.as_chunks().0, out.spare_capacity_mut()) };
    if !valid {
        return None;
    }
    // SAFETY: capacity for that many blocks was reserved, and `decode` wrote all of them.
    unsafe { out.set_len(out.len() + blocks * BLOCK_BYTES) };
    Some(rest)
}

/// Writes the bytes of all `blocks` to `out`, which is large enough. Returns whether every
/// character is in the alphabet.
#[target_feature(enable = "avx512f,avx512bw,avx512vbmi")]
fn decode(blocks: &[[u8; BLOCK_CHARS]], out: &mut [MaybeUninit<u8>]) -> bool {
    assert!(blocks.len() * BLOCK_BYTES <= out.len());
    let (low, high) = VALUES.split_at(64);
    // SAFETY: both halves and the places are 64 bytes long.
    let (low, high, places) = unsafe {
        (
            _mm512_loadu_epi8(low.as_ptr().cast()),
            _mm512_loadu_epi8(high.as_ptr().cast()),
            _mm512_loadu_epi8(PLACES.as_ptr().cast()),
        )
    };
    let mut wrong = _mm512_setzero_si512();
    let mut bytes_of = |block: &[u8; BLOCK_CHARS]| {
        // SAFETY: a block has 64 bytes.
        let chars = unsafe { _mm512_loadu_epi8(block.as_ptr().cast()) };
        // Looks up the lower 7 bits of each character; the highest bit marks non-ASCII ones.
        let values = _mm512_permutex2var_epi8(low, chars, high);
        wrong = _mm512_or_si512(wrong, _mm512_or_si512(values, chars));
        // Joins pairs of 6 bits to 12 and pairs of those to 24, then orders the bytes.
        let pairs = _mm512_maddubs_epi16(values, _mm512_set1_epi32(0x0140_0140));
        let groups = _mm512_madd_epi16(pairs, _mm512_set1_epi32(0x0001_1000));
        _mm512_permutexvar_epi8(places, groups)
    };
    let Some((last, before)) = blocks.split_last() else { return true };
    let mut to = out.as_mut_ptr();
    for block in before {
        let bytes = bytes_of(block);
        // SAFETY: the store writes 48 bytes of this block and 16 of the next one, which has room
        // for 48. A prefetch only affects timing and is valid for any address.
        unsafe {
            _mm512_storeu_epi8(to.cast(), bytes);
            _mm_prefetch::<_MM_HINT_ET0>(to.wrapping_add(AHEAD).cast());
            to = to.add(BLOCK_BYTES);
        }
    }
    let bytes = bytes_of(last);
    // SAFETY: the mask limits the store to the bytes that fit.
    unsafe { _mm512_mask_storeu_epi8(to.cast(), (1 << BLOCK_BYTES) - 1, bytes) };
    _mm512_movepi8_mask(wrong) == 0
}
