//! Decoding with AVX2, 32 characters at a time.
#![expect(unsafe_code, reason = "vector loads, stores and feature dispatch require unsafe calls")]

use super::{GROUP_BYTES, GROUP_CHARS, WORDS, WORDS_CHARS};
use orchestrate_cpu::{InstructionSet, Level};
use std::arch::x86_64::{
    __m128i, __m256i, _mm_loadu_si128, _mm_setr_epi8, _mm_srli_si128, _mm_storeu_si32,
    _mm_storeu_si64, _mm_storeu_si128, _mm256_add_epi8, _mm256_and_si256,
    _mm256_broadcastsi128_si256, _mm256_castsi128_si256, _mm256_castsi256_si128, _mm256_cmpeq_epi8,
    _mm256_extracti128_si256, _mm256_inserti128_si256, _mm256_loadu_si256, _mm256_madd_epi16,
    _mm256_maddubs_epi16, _mm256_or_si256, _mm256_set1_epi8, _mm256_set1_epi32,
    _mm256_setzero_si256, _mm256_shuffle_epi8, _mm256_srli_epi32, _mm256_testz_si256,
};
use std::mem::MaybeUninit;

/// Characters translated at a time, and their bytes.
const BLOCK_CHARS: usize = 32;
const BLOCK_BYTES: usize = BLOCK_CHARS / GROUP_CHARS * GROUP_BYTES;

/// Characters left to the caller at least. They have 6 bytes or more, so that the last store, which
/// writes 4 bytes too many, stays within the capacity.
const LEFT_CHARS: usize = 9;

/// Characters per vector of a block of words: 16 have 3 whole words.
const HALF_CHARS: usize = BLOCK_CHARS / 2;

/// Decodes leading characters of `chars` to the end of `out` and returns the rest, which includes any
/// padding. `None` if a character is not in the alphabet.
pub(super) fn append<'a>(level: Level, chars: &'a [u8], out: &mut Vec<u8>) -> Option<&'a [u8]> {
    assert_ne!(level.set(), InstructionSet::Base, "requires AVX2");
    let blocks = chars.len().saturating_sub(LEFT_CHARS) / BLOCK_CHARS;
    if blocks == 0 {
        return Some(chars);
    }
    let (decoded, rest) = chars.split_at(blocks * BLOCK_CHARS);
    out.reserve(chars.len() / GROUP_CHARS * GROUP_BYTES);
    // SAFETY: the level says that the processor has AVX2.
    let valid = unsafe { decode(decoded.as_chunks().0, out.spare_capacity_mut()) };
    if !valid {
        return None;
    }
    // SAFETY: capacity for that many blocks was reserved, and `decode` wrote all of them.
    unsafe { out.set_len(out.len() + blocks * BLOCK_BYTES) };
    Some(rest)
}

/// See [`super::append_low_bytes`].
pub(super) fn append_low_bytes(level: Level, chars: &[u8], out: &mut Vec<u8>) -> Option<bool> {
    assert_ne!(level.set(), InstructionSet::Base, "requires AVX2");
    let (blocks, rest) = chars.as_chunks::<WORDS_CHARS>();
    if !rest.is_empty() {
        return None;
    }
    out.reserve(blocks.len() * WORDS);
    // SAFETY: the level says that the processor has AVX2.
    let is_wide = unsafe { decode_low_bytes(blocks, out.spare_capacity_mut()) }?;
    // SAFETY: the capacity was reserved, and `decode_low_bytes` wrote all words of all blocks.
    unsafe { out.set_len(out.len() + blocks.len() * WORDS) };
    Some(is_wide)
}

/// Writes the bytes of all `blocks` to `out`, and 4 bytes more. Returns whether every character is in the
/// alphabet.
#[target_feature(enable = "avx2")]
fn decode(blocks: &[[u8; BLOCK_CHARS]], out: &mut [MaybeUninit<u8>]) -> bool {
    assert!(blocks.len() * BLOCK_BYTES + 4 <= out.len());
    let order = both(_mm_setr_epi8(2, 1, 0, 6, 5, 4, 10, 9, 8, 14, 13, 12, -1, -1, -1, -1));
    let mut wrong = _mm256_setzero_si256();
    let mut to = out.as_mut_ptr();
    for block in blocks {
        // SAFETY: a block has 32 bytes.
        let chars = unsafe { _mm256_loadu_si256(block.as_ptr().cast()) };
        let bytes = _mm256_shuffle_epi8(groups(chars, &mut wrong), order);
        // SAFETY: each half has 12 bytes, so the stores end 4 bytes after the block's, where `out` has
        // room.
        unsafe {
            _mm_storeu_si128(to.cast(), _mm256_castsi256_si128(bytes));
            _mm_storeu_si128(to.add(12).cast(), _mm256_extracti128_si256::<1>(bytes));
            to = to.add(BLOCK_BYTES);
        }
    }
    _mm256_testz_si256(wrong, wrong) == 1
}

/// Writes the lowest byte of each word of all `blocks` to `out`. Returns whether any other byte is set;
/// `None` if a character is not in the alphabet.
#[target_feature(enable = "avx2")]
fn decode_low_bytes(blocks: &[[u8; WORDS_CHARS]], out: &mut [MaybeUninit<u8>]) -> Option<bool> {
    assert!(blocks.len() * WORDS <= out.len());
    // 16 characters are 4 groups and 3 words. The words begin with the first byte of the first group, the
    // second of the second and the third of the third. Each vector has them at places of its own.
    let places = [
        both(_mm_setr_epi8(2, 5, 8, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1)),
        both(_mm_setr_epi8(-1, -1, -1, 2, 5, 8, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1)),
        both(_mm_setr_epi8(-1, -1, -1, -1, -1, -1, 2, 5, 8, -1, -1, -1, -1, -1, -1, -1)),
        both(_mm_setr_epi8(-1, -1, -1, -1, -1, -1, -1, -1, -1, 2, 5, 8, -1, -1, -1, -1)),
    ];
    let other_bytes = both(_mm_setr_epi8(-1, -1, 0, 0, -1, 0, -1, 0, 0, -1, -1, 0, -1, -1, -1, 0));
    let (mut wrong, mut set) = (_mm256_setzero_si256(), _mm256_setzero_si256());
    let mut to = out.as_mut_ptr();
    for block in blocks {
        let mut lowest = _mm256_setzero_si256();
        // The first half of the block in the lower lanes, the second one in the upper lanes: the lowest
        // bytes are then in order within each lane.
        let (first, second) = block.split_at(WORDS_CHARS / 2);
        let pairs =
            first.as_chunks::<HALF_CHARS>().0.iter().zip(second.as_chunks::<HALF_CHARS>().0);
        for ((first, second), place) in pairs.zip(places) {
            // SAFETY: both have 16 bytes.
            let (first, second) = unsafe {
                (_mm_loadu_si128(first.as_ptr().cast()), _mm_loadu_si128(second.as_ptr().cast()))
            };
            let chars = _mm256_inserti128_si256::<1>(_mm256_castsi128_si256(first), second);
            let groups = groups(chars, &mut wrong);
            set = _mm256_or_si256(set, groups);
            lowest = _mm256_or_si256(lowest, _mm256_shuffle_epi8(groups, place));
        }
        let upper = _mm256_extracti128_si256::<1>(lowest);
        // SAFETY: the stores write the 24 bytes of this block, which `out` has.
        unsafe {
            _mm_storeu_si128(to.cast(), _mm256_castsi256_si128(lowest));
            _mm_storeu_si64(to.add(12).cast(), upper);
            _mm_storeu_si32(to.add(20).cast(), _mm_srli_si128::<8>(upper));
            to = to.add(WORDS);
        }
    }
    let is_valid = _mm256_testz_si256(wrong, wrong) == 1;
    is_valid.then(|| _mm256_testz_si256(set, other_bytes) == 0)
}

/// The same 16 bytes in both lanes.
#[inline]
#[target_feature(enable = "avx2")]
fn both(lane: __m128i) -> __m256i {
    _mm256_broadcastsi128_si256(lane)
}

/// Translates 32 characters and joins each 4 of them to 24 bits. Sets bits of `wrong` for characters that
/// are not in the alphabet.
///
/// The upper half of a character decides what is added to it (`/` shares its upper half with `+`, so it is
/// moved to a place of its own), and the sets of upper and lower halves that do not belong together have a
/// bit in common.
#[inline]
#[target_feature(enable = "avx2")]
fn groups(chars: __m256i, wrong: &mut __m256i) -> __m256i {
    let slash = _mm256_set1_epi8(0x2f);
    let offsets = both(_mm_setr_epi8(0, 16, 19, 4, -65, -65, -71, -71, 0, 0, 0, 0, 0, 0, 0, 0));
    let by_lower = both(_mm_setr_epi8(
        0x15, 0x11, 0x11, 0x11, 0x11, 0x11, 0x11, 0x11, 0x11, 0x11, 0x13, 0x1a, 0x1b, 0x1b, 0x1b,
        0x1a,
    ));
    let by_upper = both(_mm_setr_epi8(
        0x10, 0x10, 0x01, 0x02, 0x04, 0x08, 0x04, 0x08, 0x10, 0x10, 0x10, 0x10, 0x10, 0x10, 0x10,
        0x10,
    ));
    // Bit 5 is left in both indices; a lookup reads the lower four bits and bit 7 only.
    let upper = _mm256_and_si256(_mm256_srli_epi32::<4>(chars), slash);
    let lower = _mm256_and_si256(chars, slash);
    let conflict = _mm256_and_si256(
        _mm256_shuffle_epi8(by_upper, upper),
        _mm256_shuffle_epi8(by_lower, lower),
    );
    *wrong = _mm256_or_si256(*wrong, conflict);
    let is_slash = _mm256_cmpeq_epi8(chars, slash);
    let offset = _mm256_shuffle_epi8(offsets, _mm256_add_epi8(is_slash, upper));
    let values = _mm256_add_epi8(chars, offset);
    // Pairs of 6 bits to 12, and pairs of those to 24.
    let pairs = _mm256_maddubs_epi16(values, _mm256_set1_epi32(0x0140_0140));
    _mm256_madd_epi16(pairs, _mm256_set1_epi32(0x0001_1000))
}
