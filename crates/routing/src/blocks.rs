//! Rows in immutable blocks that several masks may share.
//!
//! The invariant: every block of a [`Blocks`] except the open last one holds exactly
//! [`BLOCK_ROWS`] rows, so row `p` is in block `p / BLOCK_ROWS` regardless of which reply sent it.

use crate::BLOCK_ROWS;
use std::sync::Arc;

/// [`BLOCK_ROWS`] rows (the last block of a mask may have fewer), immutable and reference-counted:
/// cloning copies no rows.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Block(Arc<Vec<u8>>);

impl Block {
    /// Takes ownership of the bytes and releases spare capacity.
    pub(crate) fn new(mut bytes: Vec<u8>) -> Self {
        bytes.shrink_to_fit();
        Self(Arc::new(bytes))
    }

    /// The rows' bytes, `[rows, moe layers, top_k]`.
    pub fn bytes(&self) -> &[u8] {
        &self.0
    }

    /// Whether another mask, builder or cache entry holds this block as well.
    pub fn is_shared(&self) -> bool {
        Arc::strong_count(&self.0) > 1
    }

    /// Address of the block: equal for clones of one block, different for two live blocks.
    pub(crate) fn address(&self) -> usize {
        Arc::as_ptr(&self.0).addr()
    }

    /// The first `keep` bytes for modification: moved out of an unshared block, copied otherwise.
    fn into_open(self, keep: usize) -> Vec<u8> {
        match Arc::try_unwrap(self.0) {
            Ok(mut bytes) => {
                bytes.truncate(keep);
                bytes
            }
            Err(shared) => shared.get(..keep).unwrap_or_default().to_vec(),
        }
    }
}

/// Bytes of routing rows in memory, split by sharing.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct HeldBytes {
    /// Bytes in blocks that have a single holder.
    pub own: usize,
    /// Bytes in blocks that another mask, builder or the prefix cache holds as well.
    pub shared: usize,
}

/// Rows `0..n` of one sequence while they are being collected.
#[derive(Debug, Clone)]
pub(crate) struct Blocks {
    row_bytes: usize,
    full: Vec<Block>,
    open: Vec<u8>,
}

impl Blocks {
    pub(crate) fn new(row_bytes: usize) -> Self {
        Self { row_bytes, full: Vec::new(), open: Vec::new() }
    }

    pub(crate) fn rows(&self) -> usize {
        self.full.len() * BLOCK_ROWS + self.open.len() / self.row_bytes
    }

    pub(crate) fn full(&self) -> &[Block] {
        &self.full
    }

    pub(crate) fn row(&self, position: usize) -> Option<&[u8]> {
        let block = position / BLOCK_ROWS;
        let bytes = match self.full.get(block) {
            Some(full) => full.bytes(),
            None if block == self.full.len() => &self.open,
            None => return None,
        };
        let at = position % BLOCK_ROWS * self.row_bytes;
        bytes.get(at..at + self.row_bytes)
    }

    /// Appends a piece without its first `skip` rows. The piece lies within one block; a piece that
    /// starts a block is moved, not copied.
    pub(crate) fn append(&mut self, piece: Vec<u8>, skip: usize) {
        let block_bytes = BLOCK_ROWS * self.row_bytes;
        if skip == 0 && self.open.is_empty() {
            self.open = piece;
        } else {
            self.open.reserve_exact(block_bytes - self.open.len());
            self.open.extend_from_slice(piece.get(skip * self.row_bytes..).unwrap_or_default());
        }
        debug_assert!(self.open.len() <= block_bytes);
        if self.open.len() == block_bytes {
            self.full.push(Block::new(std::mem::take(&mut self.open)));
        }
    }

    /// Sets the full blocks of an empty sequence.
    pub(crate) fn seed(&mut self, blocks: Vec<Block>) {
        debug_assert_eq!(self.rows(), 0);
        self.full = blocks;
    }

    /// Replaces full block `index` by another block with equal bytes.
    pub(crate) fn share(&mut self, index: usize, block: &Block) {
        if let Some(mine) = self.full.get_mut(index) {
            debug_assert_eq!(mine, block);
            *mine = block.clone();
        }
    }

    pub(crate) fn truncate(&mut self, rows: usize) {
        let (keep, rest) = (rows / BLOCK_ROWS, rows % BLOCK_ROWS * self.row_bytes);
        if keep < self.full.len() {
            let cut = self.full.drain(keep..).next();
            self.open = cut.map(|block| block.into_open(rest)).unwrap_or_default();
        } else {
            self.open.truncate(rest);
        }
    }

    /// A copy of rows `0..rows`: full blocks are shared, at most one partial block is copied.
    pub(crate) fn fork(&self, rows: usize) -> Self {
        let (keep, rest) = (rows / BLOCK_ROWS, rows % BLOCK_ROWS * self.row_bytes);
        let cut = self.full.get(keep).map_or(self.open.as_slice(), Block::bytes);
        Self {
            row_bytes: self.row_bytes,
            full: self.full.iter().take(keep).cloned().collect(),
            open: cut.get(..rest).unwrap_or_default().to_vec(),
        }
    }

    pub(crate) fn held(&self) -> HeldBytes {
        let mut held = held(&self.full);
        held.own += self.open.len();
        held
    }

    pub(crate) fn finish(self) -> Vec<Block> {
        let mut blocks = self.full;
        if !self.open.is_empty() {
            blocks.push(Block::new(self.open));
        }
        blocks
    }
}

pub(crate) fn held(blocks: &[Block]) -> HeldBytes {
    let mut held = HeldBytes::default();
    for block in blocks {
        let side = if block.is_shared() { &mut held.shared } else { &mut held.own };
        *side += block.bytes().len();
    }
    held
}
