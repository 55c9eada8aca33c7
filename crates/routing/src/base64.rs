//! Decodes base64: with loops of its own on processors with AVX2 or AVX-512 VBMI, and `base64-simd` for the
//! rest of a text and on other processors.
//!
//! Why custom loops: decoding is most of the work on a mask, and they take half of the time. They accept
//! exactly the text that `base64-simd` accepts; the tests compare them.

#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;

use base64_simd::STANDARD;
use orchestrate_cpu::{InstructionSet, Level};

/// Characters of a base64 group.
pub(crate) const GROUP_CHARS: usize = 4;
/// Bytes that the characters of a group encode.
pub(crate) const GROUP_BYTES: usize = 3;
/// Characters of a block of 32-bit words, and its bytes and words.
const WORDS_CHARS: usize = 128;
pub(crate) const WORDS_BYTES: usize = WORDS_CHARS / GROUP_CHARS * GROUP_BYTES;
const WORDS: usize = WORDS_BYTES / 4;

/// Decodes `chars`, standard base64 with padding, to the end of `out`. `None` if the text is invalid;
/// the content appended to `out` is then unspecified.
pub(crate) fn append(chars: &[u8], out: &mut Vec<u8>) -> Option<()> {
    append_on(Level::current(), chars, out)
}

#[cfg(target_arch = "x86_64")]
fn append_on(level: Level, chars: &[u8], out: &mut Vec<u8>) -> Option<()> {
    let rest = match level.set() {
        InstructionSet::Avx512 if level.byte_permutations() => avx512::append(level, chars, out)?,
        InstructionSet::Avx512 | InstructionSet::Avx2 => avx2::append(level, chars, out)?,
        InstructionSet::Base => chars,
    };
    STANDARD.decode_append(rest, out).ok()
}

#[cfg(not(target_arch = "x86_64"))]
fn append_on(_level: Level, chars: &[u8], out: &mut Vec<u8>) -> Option<()> {
    STANDARD.decode_append(chars, out).ok()
}

/// Whether [`append_low_bytes`] exists for this processor, and is the fastest way to the lowest bytes.
pub(crate) fn takes_low_bytes() -> bool {
    low_bytes_on(Level::current())
}

fn low_bytes_on(level: Level) -> bool {
    // With VBMI, decoding is so fast that a second pass over a small buffer costs less.
    cfg!(target_arch = "x86_64")
        && level.set() != InstructionSet::Base
        && !level.byte_permutations()
}

/// Decodes `chars`, whole blocks of [`WORDS_BYTES`] bytes without padding, and appends the lowest byte of
/// each little-endian word of 32 bits to `out`. Returns whether any other byte is set, and `None` if the
/// text is invalid; the content appended to `out` is then unspecified. Requires [`takes_low_bytes`].
///
/// SGLang sends ids in words of which three bytes are zero; this never writes those.
pub(crate) fn append_low_bytes(chars: &[u8], out: &mut Vec<u8>) -> Option<bool> {
    low_bytes_by(Level::current(), chars, out)
}

#[cfg(target_arch = "x86_64")]
fn low_bytes_by(level: Level, chars: &[u8], out: &mut Vec<u8>) -> Option<bool> {
    assert!(low_bytes_on(level), "requires AVX2");
    avx2::append_low_bytes(level, chars, out)
}

#[cfg(not(target_arch = "x86_64"))]
fn low_bytes_by(_level: Level, _chars: &[u8], _out: &mut Vec<u8>) -> Option<bool> {
    None
}

#[cfg(test)]
mod tests {
    use super::{WORDS_CHARS, append_on, low_bytes_by, low_bytes_on};
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

    /// The lowest bytes of the words, and whether another byte is set. `None` if the text is invalid.
    fn low_bytes(text: &[u8]) -> Option<(Vec<u8>, bool)> {
        let bytes = STANDARD.decode_to_vec(text).ok()?;
        let words = bytes.as_chunks::<4>().0;
        let is_wide = words.iter().any(|word| word[1..] != [0; 3]);
        Some((words.iter().map(|word| word[0]).collect(), is_wide))
    }

    fn assert_low_bytes(text: &[u8]) {
        for level in Level::supported().into_iter().filter(|level| low_bytes_on(*level)) {
            let mut out = Vec::with_capacity(text.len() / WORDS_CHARS * 24);
            let found = low_bytes_by(level, text, &mut out).map(|is_wide| (out, is_wide));
            assert_eq!(found, low_bytes(text));
        }
    }

    #[test]
    fn every_bit_above_a_lowest_byte_is_noticed() {
        for blocks in 0..3 {
            let mut words: Vec<u8> =
                (0..24 * blocks).flat_map(|word: u8| [word.wrapping_mul(37), 0, 0, 0]).collect();
            assert_low_bytes(STANDARD.encode_to_string(&words).as_bytes());
            for at in 0..words.len() {
                for bit in 0..8 {
                    words[at] ^= 1 << bit;
                    assert_low_bytes(STANDARD.encode_to_string(&words).as_bytes());
                    words[at] ^= 1 << bit;
                }
            }
        }
    }

    #[test]
    fn every_byte_at_every_position_of_words_is_accepted_or_rejected_as_by_base64_simd() {
        let text = STANDARD.encode_to_string([0x5a, 0, 0, 0].repeat(48));
        for at in 0..text.len() {
            for byte in (0..=u8::MAX).filter(|byte| *byte != b'=') {
                let mut text = text.clone().into_bytes();
                text[at] = byte;
                assert_low_bytes(&text);
            }
        }
    }

    #[test]
    fn padding_is_no_character_of_a_block_of_words() {
        for level in Level::supported().into_iter().filter(|level| low_bytes_on(*level)) {
            let mut text = STANDARD.encode_to_string([0; 96]).into_bytes();
            text[127] = b'=';
            assert_eq!(low_bytes_by(level, &text, &mut Vec::new()), None);
        }
    }
}
