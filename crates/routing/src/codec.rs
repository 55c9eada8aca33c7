//! Stored rows: one compressed frame with a checksum.
//!
//! `method u8 | payload | checksum [16]`. The checksum covers the context (a header or key that is
//! stored or known elsewhere), the method and the payload, so a changed or missing byte, or a frame
//! under another name, is detected. The raw size is never read from the frame: the reader knows it
//! and never decompresses more than that.
//!
//! Frames hold the rows compressed with zstd level 1, or uncompressed if that is not larger. The
//! README of this crate compares codecs and explains why slot order is kept.

use crate::RoutingError;
use std::io::{Read, Write};

const LEVEL: i32 = 1;
/// Largest zstd window accepted, as a power of two; level 1 writes far smaller ones.
const WINDOW_LOG: u32 = 23;
/// Largest allocation before any decompressed data has arrived.
const MOST_AT_ONCE: usize = 1 << 20;
const RAW: u8 = 0;
const ZSTD: u8 = 1;
const CHECKSUM_BYTES: usize = 16;

/// Appends a frame with the `raw_bytes` bytes of `chunks` to `out`; the checksum covers `context`.
pub(crate) fn pack<'a>(
    out: &mut Vec<u8>,
    chunks: impl Iterator<Item = &'a [u8]> + Clone,
    raw_bytes: usize,
    context: &[u8],
) {
    let start = out.len();
    out.push(ZSTD);
    let compressed = compress(out, chunks.clone()).is_ok();
    if !compressed || out.len() - start > raw_bytes {
        out.truncate(start);
        out.push(RAW);
        chunks.for_each(|chunk| out.extend_from_slice(chunk));
    }
    let sum = checksum(context, out.get(start..).unwrap_or_default());
    out.extend_from_slice(&sum);
}

fn compress<'a>(out: &mut Vec<u8>, chunks: impl Iterator<Item = &'a [u8]>) -> std::io::Result<()> {
    let mut encoder = zstd::stream::write::Encoder::new(out, LEVEL)?;
    for chunk in chunks {
        encoder.write_all(chunk)?;
    }
    encoder.finish().map(|_| ())
}

/// Decompresses the `raw_bytes` bytes of a frame into pieces of `piece_bytes`; the last piece may be
/// shorter.
pub(crate) fn unpack(
    frame: &[u8],
    context: &[u8],
    raw_bytes: usize,
    piece_bytes: usize,
) -> Result<Vec<Vec<u8>>, RoutingError> {
    let cut_off = RoutingError::Stored("it is truncated");
    let at = frame.len().checked_sub(CHECKSUM_BYTES).ok_or_else(|| cut_off.clone())?;
    let (body, sum) = frame.split_at(at);
    if checksum(context, body) != sum {
        return Err(RoutingError::Stored("its checksum does not match"));
    }
    match body.split_first() {
        Some((&RAW, payload)) => read_pieces(payload, raw_bytes, piece_bytes),
        Some((&ZSTD, payload)) => {
            let unreadable = |_| RoutingError::Stored("its rows cannot be decompressed");
            let mut decoder =
                zstd::stream::read::Decoder::with_buffer(payload).map_err(unreadable)?;
            decoder.window_log_max(WINDOW_LOG).map_err(unreadable)?;
            read_pieces(decoder, raw_bytes, piece_bytes)
        }
        Some(_) => Err(RoutingError::Stored("its compression method is unknown")),
        None => Err(cut_off),
    }
}

/// Reads the pieces. Memory grows with the data that arrives, not with the announced size.
fn read_pieces(
    mut from: impl Read,
    raw_bytes: usize,
    piece_bytes: usize,
) -> Result<Vec<Vec<u8>>, RoutingError> {
    let unreadable = |_| RoutingError::Stored("its rows cannot be decompressed");
    let mut pieces = Vec::new();
    let mut left = raw_bytes;
    while left > 0 {
        let want = left.min(piece_bytes.max(1));
        let mut piece = Vec::with_capacity(want.min(MOST_AT_ONCE));
        let got = from.by_ref().take(want as u64).read_to_end(&mut piece).map_err(unreadable)?;
        if got != want {
            return Err(RoutingError::Stored("it has fewer rows than its header says"));
        }
        left -= want;
        pieces.push(piece);
    }
    if from.read(&mut [0]).map_err(unreadable)? != 0 {
        return Err(RoutingError::Stored("it has more rows than its header says"));
    }
    Ok(pieces)
}

fn checksum(context: &[u8], body: &[u8]) -> [u8; CHECKSUM_BYTES] {
    let mut hasher = blake3::Hasher::new();
    hasher.update(&(context.len() as u64).to_le_bytes()).update(context).update(body);
    let mut sum = [0; CHECKSUM_BYTES];
    hasher.finalize_xof().fill(&mut sum);
    sum
}

#[cfg(test)]
mod tests {
    use super::*;

    fn packed(data: &[u8]) -> Vec<u8> {
        let mut frame = vec![9]; // bytes before the frame
        pack(&mut frame, data.chunks(7), data.len(), b"name");
        frame.remove(0);
        frame
    }

    #[test]
    fn frames_round_trip_in_pieces() {
        let noise: Vec<u8> =
            (0..400u64).map(|i| ((i * i * 2_654_435) >> 13).to_le_bytes()[0]).collect();
        for data in [vec![], vec![1], vec![5; 5000], noise] {
            let frame = packed(&data);
            let pieces = unpack(&frame, b"name", data.len(), 64).unwrap();
            assert_eq!(pieces.concat(), data);
            assert!(pieces.iter().rev().skip(1).all(|piece| piece.len() == 64));
            assert!(frame.len() <= data.len() + 1 + CHECKSUM_BYTES, "never larger than bare rows");
        }
    }

    #[test]
    fn flipped_bits_prefixes_and_other_contexts_are_rejected() {
        for data in [vec![3; 300], (0..=60).collect::<Vec<u8>>()] {
            let frame = packed(&data);
            for at in 0..frame.len() {
                assert!(unpack(&frame[..at], b"name", data.len(), 64).is_err(), "prefix {at}");
                for bit in 0..8 {
                    let mut bad = frame.clone();
                    bad[at] ^= 1 << bit;
                    assert!(unpack(&bad, b"name", data.len(), 64).is_err(), "{at} {bit}");
                }
            }
            assert!(unpack(&frame, b"nam", data.len(), 64).is_err());
        }
    }

    #[test]
    fn wrong_raw_size_is_rejected() {
        let frame = packed(&vec![7; 1 << 20]);
        assert!(frame.len() < 1000);
        for wrong in [0, 1, (1 << 20) - 1, (1 << 20) + 1, usize::MAX] {
            assert!(matches!(unpack(&frame, b"name", wrong, 64), Err(RoutingError::Stored(_))));
        }
    }
}
