//! Frames of an append-only file: `length u32 | check of the length [4] | payload | check [8]`, all
//! little-endian. Checks are the first bytes of BLAKE3 digests.
//!
//! A process that is killed while it appends leaves the beginning of the last frame, which is cut off.
//! Anything else that does not fit is damage. The length has a check of its own, so that damage in it is
//! not taken for a cut.

const HEADER_BYTES: usize = 8;
const CHECK_BYTES: usize = 8;

/// A frame that is not as it was written.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error("record {number} does not have its checksum")]
pub(crate) struct DamagedFrame {
    /// Number of the frame, from 0.
    pub(crate) number: usize,
}

fn header(length: u32) -> [u8; HEADER_BYTES] {
    let length = length.to_le_bytes();
    let mut header = [0; HEADER_BYTES];
    let check = blake3::hash(&length);
    let bytes = length.iter().chain(check.as_bytes());
    header.iter_mut().zip(bytes).for_each(|(place, byte)| *place = *byte);
    header
}

/// A frame with this payload; `None` if it is 4 GiB or larger.
pub(super) fn frame(payload: &[u8]) -> Option<Vec<u8>> {
    let length = u32::try_from(payload.len()).ok()?;
    let mut frame = Vec::with_capacity(HEADER_BYTES + payload.len() + CHECK_BYTES);
    frame.extend_from_slice(&header(length));
    frame.extend_from_slice(payload);
    frame.extend(blake3::hash(payload).as_bytes().iter().take(CHECK_BYTES));
    Some(frame)
}

/// The payloads of all complete frames, and the number of bytes that these have.
pub(super) fn payloads(file: &[u8]) -> Result<(Vec<&[u8]>, usize), DamagedFrame> {
    let (mut payloads, mut rest) = (Vec::new(), file);
    while let Some((start, after)) = rest.split_first_chunk::<HEADER_BYTES>() {
        let damaged = || DamagedFrame { number: payloads.len() };
        let [length @ .., _, _, _, _] = *start;
        let length = u32::from_le_bytes(length);
        if *start != header(length) {
            return Err(damaged());
        }
        let Some((payload, after)) = after.split_at_checked(length as usize) else { break };
        let Some((check, after)) = after.split_at_checked(CHECK_BYTES) else { break };
        if !blake3::hash(payload).as_bytes().starts_with(check) {
            return Err(damaged());
        }
        payloads.push(payload);
        rest = after;
    }
    // A cut header is checked as far as it goes.
    if let Some((length, _)) = rest.split_first_chunk()
        && rest.len() < HEADER_BYTES
        && !header(u32::from_le_bytes(*length)).starts_with(rest)
    {
        return Err(DamagedFrame { number: payloads.len() });
    }
    Ok((payloads, file.len() - rest.len()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn file() -> (Vec<Vec<u8>>, Vec<usize>) {
        let payloads: Vec<Vec<u8>> = [0, 1, 300].map(|n| vec![7; n]).into();
        let mut ends = vec![0];
        for payload in &payloads {
            ends.push(ends.last().unwrap() + payload.len() + HEADER_BYTES + CHECK_BYTES);
        }
        (payloads, ends)
    }

    #[test]
    fn a_file_that_is_cut_anywhere_has_its_complete_frames() {
        let (written, ends) = file();
        let file: Vec<u8> = written.iter().flat_map(|payload| frame(payload).unwrap()).collect();
        for cut in 0..=file.len() {
            let (found, valid) = payloads(&file[..cut]).unwrap();
            let complete = ends.iter().filter(|end| **end <= cut).count() - 1;
            assert_eq!(found, written[..complete]);
            assert_eq!(valid, ends[complete]);
        }
    }

    #[test]
    fn every_flipped_byte_is_damage_of_its_frame() {
        let (written, ends) = file();
        let file: Vec<u8> = written.iter().flat_map(|payload| frame(payload).unwrap()).collect();
        for at in 0..file.len() {
            let mut bad = file.clone();
            bad[at] ^= 0x10;
            let number = ends.iter().filter(|end| **end <= at).count() - 1;
            assert_eq!(payloads(&bad), Err(DamagedFrame { number }), "byte {at}");
        }
    }

    #[test]
    fn a_cut_header_is_damaged_if_its_check_does_not_fit() {
        let (written, ends) = file();
        let file: Vec<u8> = written.iter().flat_map(|payload| frame(payload).unwrap()).collect();
        for (number, start) in ends.iter().enumerate().take(written.len()) {
            for length in 5..HEADER_BYTES {
                for at in 0..length {
                    let mut bad = file[..start + length].to_vec();
                    bad[start + at] ^= 0x10;
                    assert_eq!(payloads(&bad), Err(DamagedFrame { number }), "{length}, byte {at}");
                }
            }
        }
    }
}
