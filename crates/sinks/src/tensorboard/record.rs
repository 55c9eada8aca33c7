//! The framing of event files (TFRecord): length, its checksum, bytes, their checksum.

use crc::{CRC_32_ISCSI, Crc};

/// CRC-32C.
const CRC: Crc<u32> = Crc::<u32>::new(&CRC_32_ISCSI);
/// Bytes of a length and its checksum.
const HEAD: usize = 12;
/// Bytes of a checksum.
const SUM: usize = 4;

/// The checksum as the format stores it: rotated and shifted by a constant, because checksums of data
/// that holds checksums are weak.
fn masked(bytes: &[u8]) -> [u8; SUM] {
    CRC.checksum(bytes).rotate_right(15).wrapping_add(0xa282_ead8).to_le_bytes()
}

/// Appends a record with this content to `file`.
pub(super) fn append_record(file: &mut Vec<u8>, content: &[u8]) {
    let length = (content.len() as u64).to_le_bytes();
    file.extend(length);
    file.extend(masked(&length));
    file.extend(content);
    file.extend(masked(content));
}

/// The contents of a file's records, up to the first that is incomplete or damaged.
pub(super) fn records(mut file: &[u8]) -> impl Iterator<Item = &[u8]> {
    std::iter::from_fn(move || {
        let (head, rest) = file.split_at_checked(HEAD)?;
        let (length, sum) = head.split_first_chunk::<8>()?;
        if sum != masked(length) {
            return None;
        }
        let length = usize::try_from(u64::from_le_bytes(*length)).ok()?;
        let (content, rest) = rest.split_at_checked(length)?;
        let (sum, rest) = rest.split_at_checked(SUM)?;
        file = rest;
        (sum == masked(content)).then_some(content)
    })
    .fuse()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn records_end_at_the_first_damage() {
        let mut file = Vec::new();
        for content in [&b"one"[..], b"", b"three"] {
            append_record(&mut file, content);
        }
        assert_eq!(records(&file).collect::<Vec<_>>(), [&b"one"[..], b"", b"three"]);
        assert_eq!(records(&file[..file.len() - 1]).count(), 2);
        for at in 0..file.len() {
            let mut damaged = file.clone();
            damaged[at] ^= 1;
            assert!(records(&damaged).count() < 3, "byte {at}");
        }
        // The check value of CRC-32C.
        assert_eq!(CRC.checksum(b"123456789"), 0xe306_9283);
    }
}
