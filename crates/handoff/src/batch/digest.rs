//! BLAKE3 of a file whose front is known last.
//!
//! Rows are written, and digested, as they come; header and columns in front of them are complete
//! only with the last sequence. BLAKE3 is a tree over the file, so the branches that lie within
//! the rows can be made first.

use blake3::hazmat::{
    ChainingValue, HasherExt as _, Mode, left_subtree_len, merge_subtrees_non_root,
    merge_subtrees_root,
};
use blake3::{Hash, Hasher};

/// Bytes of a branch: a power of two of BLAKE3's chunks.
const BRANCH_BYTES: u64 = 1 << 20;

/// Digests a file from byte `front` on, then what is before it.
#[derive(Debug)]
pub(super) struct FileDigest {
    /// Bytes from `front` up to the first border of a branch: they share one with the front.
    head: Vec<u8>,
    head_bytes: usize,
    rest: Branches,
}

impl FileDigest {
    pub(super) fn new(front: u64) -> Self {
        let border = front.next_multiple_of(BRANCH_BYTES);
        let head_bytes = usize::try_from(border - front).unwrap_or(usize::MAX);
        Self { head: Vec::new(), head_bytes, rest: Branches::new(border) }
    }

    /// Takes the next bytes after the front.
    pub(super) fn update(&mut self, bytes: &[u8]) {
        let (head, rest) = bytes.split_at(bytes.len().min(self.head_bytes - self.head.len()));
        self.head.extend_from_slice(head);
        self.rest.update(rest);
    }

    /// Takes the front, in parts, and gives the digest of the whole file.
    pub(super) fn finish<'p>(self, front: impl IntoIterator<Item = &'p [u8]>) -> Hash {
        let mut begin = Branches::new(0);
        for part in front {
            begin.update(part);
        }
        begin.update(&self.head);
        if self.rest.open.count() == 0 && begin.closed.is_empty() {
            return begin.open.finalize();
        }
        let bytes = begin.end.max(self.rest.end);
        let mut values = begin.close();
        if self.rest.open.count() > 0 {
            values.extend(self.rest.close());
        }
        let Some((left, right, left_bytes)) = halves(&values, bytes) else {
            // One branch alone was returned above.
            return Hash::from_bytes(values.first().copied().unwrap_or_default());
        };
        let right = merge(right, bytes - left_bytes);
        merge_subtrees_root(&merge(left, left_bytes), &right, Mode::Hash)
    }
}

/// Consecutive branches, the last one open.
#[derive(Debug)]
struct Branches {
    closed: Vec<ChainingValue>,
    open: Hasher,
    /// Where in the file the last byte taken ends.
    end: u64,
}

impl Branches {
    fn new(start: u64) -> Self {
        let mut open = Hasher::new();
        open.set_input_offset(start);
        Self { closed: Vec::new(), open, end: start }
    }

    fn update(&mut self, mut bytes: &[u8]) {
        while !bytes.is_empty() {
            if self.open.count() == BRANCH_BYTES {
                self.closed.push(self.open.finalize_non_root());
                self.open = Hasher::new();
                self.open.set_input_offset(self.end);
            }
            let room = usize::try_from(BRANCH_BYTES - self.open.count()).unwrap_or(usize::MAX);
            let (part, rest) = bytes.split_at(bytes.len().min(room));
            self.open.update(part);
            self.end += part.len() as u64;
            bytes = rest;
        }
    }

    /// All values; there was a byte.
    fn close(mut self) -> Vec<ChainingValue> {
        self.closed.push(self.open.finalize_non_root());
        self.closed
    }
}

/// Splits the branches of `bytes` bytes where BLAKE3's tree splits them; `None` for a single one.
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

    #[test]
    fn is_the_digest_of_the_whole_wherever_the_front_ends_and_however_parts_come() {
        const MIB: usize = 1 << 20;
        let file: Vec<u8> =
            (0..5 * MIB + 12_345).map(|at| ((at * 2_654_435_761) >> 11).to_le_bytes()[0]).collect();
        let lengths = [1, 1024, MIB - 1, MIB, MIB + 1, 2 * MIB, 3 * MIB + 7, file.len()];
        for length in lengths {
            let file = &file[..length];
            for front in [1, 1000, MIB - 1, MIB, MIB + 1, 2 * MIB + 5, length] {
                let (front, rows) = file.split_at(front.min(length));
                for part in [9_999, MIB, usize::MAX] {
                    let mut digest = FileDigest::new(front.len() as u64);
                    rows.chunks(part).for_each(|part| digest.update(part));
                    let digest = digest.finish(front.chunks(part.min(70_000)));
                    assert_eq!(digest, blake3::hash(file), "{length} {} {part}", front.len());
                }
            }
        }
    }
}
