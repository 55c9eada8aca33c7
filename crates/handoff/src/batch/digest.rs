//! BLAKE3 digest of a file whose front is known last.
//!
//! Rows are written and digested as they arrive; the header and columns in front of them are complete
//! only after the last sequence. BLAKE3 is a tree over the file, so the branches within the rows can
//! be computed first, in parallel, and while the rows are written.

use blake3::hazmat::{
    ChainingValue, HasherExt as _, Mode, left_subtree_len, merge_subtrees_non_root,
    merge_subtrees_root,
};
use blake3::{Hash, Hasher};
use rayon::iter::{IntoParallelRefIterator, ParallelIterator};
use std::io;

/// Bytes of a branch: a power of two of BLAKE3's chunks, and small enough to stay in a core's L2
/// cache while it is processed.
const BRANCH_BYTES: u64 = 1 << 19;

/// Digests a file from byte `front` on, and the bytes before that last.
#[derive(Debug)]
pub(super) struct FileDigest {
    front: u64,
    /// Bytes from `front` up to the first branch boundary: they share a branch with the front.
    head: Vec<u8>,
    head_bytes: usize,
    rest: Branches,
}

impl FileDigest {
    pub(super) fn new(front: u64) -> Self {
        let boundary = front.next_multiple_of(BRANCH_BYTES);
        let head_bytes = usize::try_from(boundary - front).unwrap_or(usize::MAX);
        Self { front, head: Vec::new(), head_bytes, rest: Branches::new(boundary) }
    }

    /// Digests the next bytes after the front and writes each of them once, through `write_at`, at its
    /// offset in the file.
    pub(super) fn write<'c>(
        &mut self,
        chunks: impl IntoIterator<Item = &'c [u8]>,
        write_at: impl Fn(u64, &[u8]) -> io::Result<()> + Sync,
    ) -> io::Result<()> {
        let head = self.head.len() as u64;
        let start = if head < self.head_bytes as u64 { self.front + head } else { self.rest.end };
        let pieces = pieces(start, chunks);
        // The file system serialises writes to one file. Each thread first digests a piece and then
        // writes it from its cache, while another thread digests.
        let digests: Vec<Option<ChainingValue>> = pieces
            .par_iter()
            .map_init(Vec::new, |whole, piece| {
                piece.gather(whole);
                let value = piece.is_branch().then(|| piece.digest(whole));
                write_at(piece.at, whole)?;
                Ok(value)
            })
            .collect::<io::Result<_>>()?;
        for (piece, value) in pieces.iter().zip(digests) {
            match value {
                _ if piece.at < self.front + self.head_bytes as u64 => {
                    piece.parts.iter().for_each(|part| self.head.extend_from_slice(part));
                }
                Some(value) => self.rest.push(value),
                None => piece.parts.iter().for_each(|part| self.rest.update(part)),
            }
        }
        Ok(())
    }

    /// Takes the front, in parts, and returns the digest of the whole file.
    pub(super) fn finish<'p>(self, front: impl IntoIterator<Item = &'p [u8]>) -> Hash {
        let mut front_branches = Branches::new(0);
        for part in front {
            front_branches.update(part);
        }
        front_branches.update(&self.head);
        if self.rest.is_empty() && front_branches.closed.is_empty() {
            return front_branches.open.finalize();
        }
        let bytes = front_branches.end.max(self.rest.end);
        let mut values = front_branches.close();
        values.extend(self.rest.close());
        let Some((left, right, left_bytes)) = halves(&values, bytes) else {
            // A single branch was handled above.
            return Hash::from_bytes(values.first().copied().unwrap_or_default());
        };
        let right = merge(right, bytes - left_bytes);
        merge_subtrees_root(&merge(left, left_bytes), &right, Mode::Hash)
    }
}

/// Consecutive bytes of the file within one branch.
#[derive(Debug)]
struct Piece<'c> {
    at: u64,
    bytes: u64,
    parts: Vec<&'c [u8]>,
}

impl Piece<'_> {
    fn is_branch(&self) -> bool {
        self.bytes == BRANCH_BYTES
    }

    /// Copies the parts to `whole`: blocks of rows are short and cross BLAKE3's chunk
    /// boundaries. Hashing many chunks at once, and writing with one system call, saves more than the
    /// copy costs.
    fn gather(&self, whole: &mut Vec<u8>) {
        whole.clear();
        self.parts.iter().for_each(|part| whole.extend_from_slice(part));
    }

    fn digest(&self, whole: &[u8]) -> ChainingValue {
        let mut hasher = Hasher::new();
        hasher.set_input_offset(self.at).update(whole);
        hasher.finalize_non_root()
    }
}

/// Splits bytes that start at offset `start` in the file at branch boundaries.
fn pieces<'c>(start: u64, chunks: impl IntoIterator<Item = &'c [u8]>) -> Vec<Piece<'c>> {
    let mut pieces: Vec<Piece<'c>> = Vec::new();
    let mut at = start;
    for mut chunk in chunks {
        while !chunk.is_empty() {
            let in_branch = at % BRANCH_BYTES;
            let room = usize::try_from(BRANCH_BYTES - in_branch).unwrap_or(usize::MAX);
            let (part, rest) = chunk.split_at(chunk.len().min(room));
            match pieces.last_mut().filter(|_| in_branch > 0) {
                Some(piece) => {
                    piece.bytes += part.len() as u64;
                    piece.parts.push(part);
                }
                None => {
                    pieces.push(Piece { at, bytes: part.len() as u64, parts: vec![part] });
                }
            }
            at += part.len() as u64;
            chunk = rest;
        }
    }
    pieces
}

/// Consecutive branches; the last one is open.
#[derive(Debug)]
struct Branches {
    closed: Vec<ChainingValue>,
    open: Hasher,
    /// File offset one past the last byte taken.
    end: u64,
}

impl Branches {
    fn new(start: u64) -> Self {
        let mut open = Hasher::new();
        open.set_input_offset(start);
        Self { closed: Vec::new(), open, end: start }
    }

    fn is_empty(&self) -> bool {
        self.closed.is_empty() && self.open.count() == 0
    }

    /// Closes the open branch unless it is empty, and opens the next one at the end.
    fn next(&mut self) {
        if self.open.count() > 0 {
            self.closed.push(self.open.finalize_non_root());
        }
        self.open = Hasher::new();
        self.open.set_input_offset(self.end);
    }

    /// Appends a complete branch that was digested elsewhere.
    fn push(&mut self, branch: ChainingValue) {
        self.next();
        self.closed.push(branch);
        self.end += BRANCH_BYTES;
        self.open.set_input_offset(self.end);
    }

    fn update(&mut self, mut bytes: &[u8]) {
        while !bytes.is_empty() {
            if self.open.count() == BRANCH_BYTES {
                self.next();
            }
            let room = usize::try_from(BRANCH_BYTES - self.open.count()).unwrap_or(usize::MAX);
            let (part, rest) = bytes.split_at(bytes.len().min(room));
            self.open.update(part);
            self.end += part.len() as u64;
            bytes = rest;
        }
    }

    /// The chaining values of all branches.
    fn close(mut self) -> Vec<ChainingValue> {
        if self.open.count() > 0 {
            self.closed.push(self.open.finalize_non_root());
        }
        self.closed
    }
}

/// Splits the branches of `bytes` bytes where BLAKE3's tree splits them; `None` for a single
/// branch.
fn halves(
    values: &[ChainingValue],
    bytes: u64,
) -> Option<(&[ChainingValue], &[ChainingValue], u64)> {
    if values.len() < 2 {
        return None;
    }
    let left_bytes = left_subtree_len(bytes);
    let left = usize::try_from(left_bytes / BRANCH_BYTES).unwrap_or(usize::MAX);
    let (left, right) = values.split_at(left.min(values.len()));
    Some((left, right, left_bytes))
}

fn merge(values: &[ChainingValue], bytes: u64) -> ChainingValue {
    match halves(values, bytes) {
        Some((left, right, left_bytes)) => {
            let right = merge(right, bytes - left_bytes);
            merge_subtrees_non_root(&merge(left, left_bytes), &right, Mode::Hash)
        }
        None => values.first().copied().unwrap_or_default(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Mutex;

    #[test]
    fn failed_write_is_reported() {
        let mut digest = FileDigest::new(10);
        let full = |at, _: &[u8]| match at {
            0..2_000_000 => Ok(()),
            _ => Err(io::ErrorKind::StorageFull.into()),
        };
        let rows = vec![7; 3_000_000];
        let error = digest.write(rows.chunks(1000), full).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::StorageFull);
    }

    #[test]
    fn digest_does_not_depend_on_the_front_or_the_parts() {
        const MIB: usize = 1 << 20;
        let file: Vec<u8> =
            (0..5 * MIB + 12_345).map(|at| ((at * 2_654_435_761) >> 11).to_le_bytes()[0]).collect();
        let lengths = [1, 1024, MIB - 1, MIB, MIB + 1, 2 * MIB, 3 * MIB + 7, file.len()];
        for length in lengths {
            let file = &file[..length];
            for front in [1, 1000, MIB - 1, MIB, MIB + 1, 2 * MIB + 5, length] {
                let (front, rows) = file.split_at(front.min(length));
                for (part, call) in [(9_999, 7), (9_999, usize::MAX), (MIB, 2), (usize::MAX, 1)] {
                    let mut digest = FileDigest::new(front.len() as u64);
                    let written = Mutex::new(front.to_vec());
                    written.lock().unwrap().resize(length, 0);
                    let parts: Vec<&[u8]> = rows.chunks(part).collect();
                    for parts in parts.chunks(call) {
                        let write_at = |at, bytes: &[u8]| {
                            let at = usize::try_from(at).unwrap();
                            written.lock().unwrap()[at..at + bytes.len()].copy_from_slice(bytes);
                            Ok(())
                        };
                        digest.write(parts.iter().copied(), write_at).unwrap();
                    }
                    assert!(written.into_inner().unwrap() == file, "{length} {part}");
                    let digest = digest.finish(front.chunks(part.min(70_000)));
                    assert_eq!(digest, blake3::hash(file), "{length} {} {part}", front.len());
                }
            }
        }
    }
}
