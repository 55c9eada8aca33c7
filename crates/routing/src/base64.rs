//! Decodes base64 with `base64-simd`, preceded by a custom loop on processors that can translate 64
//! characters in two instructions (AVX-512 VBMI).
//!
//! Why a custom loop: decoding is most of the work on a mask, and the loop halves it. It accepts
//! exactly the text that `base64-simd` accepts; the tests compare the two.

use base64_simd::STANDARD;
use orchestrate_cpu::Level;

/// Characters of a base64 group.
pub(crate) const GROUP_CHARS: usize = 4;
/// Bytes that the characters of a group encode.
pub(crate) const GROUP_BYTES: usize = 3;

/// Decodes `chars`, standard base64 with padding, to the end of `out`. `None` if the text is invalid;
/// the content appended to `out` is then unspecified.
pub(crate) fn append(chars: &[u8], out: &mut Vec<u8>) -> Option<()> {
    append_on(Level::current(), chars, out)
}

fn append_on(level: Level, chars: &[u8], out: &mut Vec<u8>) -> Option<()> {
    let rest = wide::append(level, chars, out)?;
    STANDARD.decode_append(rest, out).ok()
}

#[cfg(target_arch = "x86_64")]
mod wide {
    #![expect(
        unsafe_code,
        reason = "vector loads, stores and feature dispatch require unsafe calls"
    )]

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
}

#[cfg(not(target_arch = "x86_64"))]
mod wide {
    /// Decodes nothing, so that `base64-simd` decodes all of the text.
    #[expect(clippy::unnecessary_wraps, reason = "same signature as on x86-64")]
    pub(super) fn append<'a>(
        _level: orchestrate_cpu::Level,
        chars: &'a [u8],
        _out: &mut Vec<u8>,
    ) -> Option<&'a [u8]> {
        Some(chars)
    }
}

#[cfg(test)]
mod tests {
    use super::append_on;
    use base64_simd::STANDARD;
    use orchestrate_cpu::Level;
    use proptest::prelude::*;

    /// The same on all levels of this processor.
    fn decoded(text: &[u8]) -> Option<Vec<u8>> {
        let results: Vec<Option<Vec<u8>>> = Level::supported()
            .into_iter()
            .map(|level| {
                let mut out = b"before".to_vec();
                append_on(level, text, &mut out).map(|()| out.split_off(6))
            })
            .collect();
        assert!(results.iter().all(|result| *result == results[0]));
        results.into_iter().next().flatten()
    }

    #[test]
    fn all_lengths_round_trip() {
        let bytes: Vec<u8> = (0..400u32).map(|at| ((at * 167) >> 3).to_le_bytes()[0]).collect();
        for length in 0..=bytes.len() {
            let text = STANDARD.encode_to_string(&bytes[..length]);
            assert_eq!(decoded(text.as_bytes()).as_deref(), Some(&bytes[..length]), "{length}");
        }
    }

    #[test]
    fn every_byte_at_every_position_is_accepted_or_rejected_as_by_base64_simd() {
        let text = STANDARD.encode_to_string([0x5a; 150]);
        for at in 0..text.len() {
            for byte in 0..=u8::MAX {
                let mut text = text.clone().into_bytes();
                text[at] = byte;
                let expected = STANDARD.decode_to_vec(&text).ok();
                assert_eq!(decoded(&text), expected, "{byte:#x} at {at}");
            }
        }
    }

    proptest! {
        #[test]
        fn any_text_decodes_as_with_base64_simd(
            bytes in prop::collection::vec(any::<u8>(), 0..500),
            cut in 0usize..8,
        ) {
            let text = STANDARD.encode_to_string(&bytes).into_bytes();
            let text = &text[..text.len().saturating_sub(cut)];
            prop_assert_eq!(decoded(text), STANDARD.decode_to_vec(text).ok());
        }
    }
}
