//! Floors: the minimum work that a case needs on the same machine, measured together with the case.

use super::workload::Wire;
use anyhow::{Context as _, ensure};
use base64_simd::{Out, STANDARD};
use orchestrate_cpu::kernel;
use std::io::{Read as _, Write as _};
use std::path::Path;

/// Characters decoded at a time, so that the scratch buffer stays in the L2 cache.
const BLOCK_CHARS: usize = 64 << 10;

pub(super) const DELTA_NARROW: &str =
    "scan of the payload for its closing quote, one base64 pass and one narrowing pass over it";
pub(super) const DELTA_COPY: &str =
    "scan of the payload for its closing quote and one base64 pass over it";
pub(super) const FULL: &str = "scan of the payload for its closing quote";

/// Buffers that a floor decodes into. All rows of a round are kept, as in the case. The memory is
/// kept between rounds, so its pages are already mapped.
#[derive(Debug, Default)]
pub(super) struct Floor {
    scratch: Vec<u8>,
    rows: Vec<u8>,
    /// Bytes of `rows` in use.
    taken: usize,
}

impl Floor {
    /// Starts another round.
    pub(super) fn rewind(&mut self) {
        self.taken = 0;
    }

    /// Finds the closing quote of the text that starts at `begin`.
    pub(super) fn scan(body: &[u8], begin: usize) -> anyhow::Result<&[u8]> {
        let text = body.get(begin..).unwrap_or_default();
        let end = memchr::memchr(b'"', text).context("the body has no closing quote")?;
        Ok(text.get(..end).unwrap_or_default())
    }

    /// Scans, decodes and narrows without checking the result.
    pub(super) fn delta(&mut self, wire: Wire, body: &[u8], begin: usize) -> anyhow::Result<()> {
        let text = Self::scan(body, begin)?;
        let width = if wire == Wire::SglangI32 { 4 } else { 1 };
        self.scratch.resize(BLOCK_CHARS / 4 * 3, 0);
        let end = self.taken + text.len() / 4 * 3 / width;
        if self.rows.len() < end {
            self.rows.resize(end, 0);
        }
        let mut rest = self.rows.get_mut(self.taken..end).unwrap_or_default();
        self.taken = end;
        for block in text.chunks(BLOCK_CHARS) {
            let taken = if width == 1 {
                decode(block, rest)?
            } else {
                let decoded = decode(block, &mut self.scratch)?;
                let words = self.scratch.get(..decoded).unwrap_or_default().as_chunks::<4>().0;
                narrow(words, rest);
                words.len()
            };
            rest = rest.split_at_mut(taken).1;
        }
        ensure!(text.len() >= 4, "the body has no rows");
        std::hint::black_box(&self.rows);
        Ok(())
    }
}

kernel! {
    /// Takes the lowest byte of each word.
    fn narrow(words: &[[u8; 4]], rows: &mut [u8]) {
        rows.iter_mut().zip(words).for_each(|(to, &[low, ..])| *to = low);
    }
}

/// Decodes `text` to the front of `target`; returns the number of bytes.
fn decode(text: &[u8], target: &mut [u8]) -> anyhow::Result<usize> {
    let decoded = STANDARD
        .decode(text, Out::from_slice(target))
        .map_err(|_| anyhow::anyhow!("bug: the benchmark created a body that is not base64"))?;
    Ok(decoded.len())
}

pub(super) const WRITE_FILE: &str =
    "write of the same number of bytes to one file in the page cache of the same folder";
pub(super) const READ_FILE: &str =
    "read of the same number of bytes from one file in the page cache of the same folder";
pub(super) const COPY: &str = "copy of the same bytes to fresh memory";

/// Bytes per read or write call, large enough that the number of calls does not matter.
const CALL_BYTES: usize = 1 << 20;

/// Writes `bytes` non-zero bytes to a new file.
pub(super) fn write_file(path: &Path, bytes: u64) -> anyhow::Result<()> {
    let part = vec![0x5a; CALL_BYTES];
    let mut file = fs_err::File::create(path)?;
    let mut left = bytes;
    while left > 0 {
        let count = usize::try_from(left).unwrap_or(CALL_BYTES).min(CALL_BYTES);
        file.write_all(part.get(..count).unwrap_or_default())?;
        left -= count as u64;
    }
    Ok(())
}

/// Reads a file to its end.
pub(super) fn read_file(path: &Path) -> anyhow::Result<()> {
    let mut part = vec![0; CALL_BYTES];
    let mut file = fs_err::File::open(path)?;
    while file.read(&mut part)? > 0 {
        std::hint::black_box(&part);
    }
    Ok(())
}
