//! The complete routing mask of one trajectory.

use crate::blocks::{Block, Blocks, HeldBytes, held};
use crate::check::{check_rows, id_at};
use crate::{BLOCK_ROWS, RoutingError};
use orchestrate_types::{ModelShape, PolicyVersion};
use std::collections::HashSet;
use std::ops::Range;
use std::sync::Arc;

/// Rows `start..end` were computed under `version`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RowVersion {
    /// Index of the first row.
    pub start: usize,
    /// Index one past the last row.
    pub end: usize,
    /// Policy version whose weights chose the experts.
    pub version: PolicyVersion,
}

/// Routing rows of one trajectory of `T` tokens: `T − 1` rows (INV-3). Row `t` belongs to input
/// token `t`; the last token was never an input and has no row.
///
/// Rows are held in blocks of [`BLOCK_ROWS`] that masks may share; cloning copies no rows.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RoutingMask {
    pub(crate) shape: Arc<ModelShape>,
    pub(crate) rows: usize,
    pub(crate) blocks: Vec<Block>,
    pub(crate) versions: Vec<RowVersion>,
    pub(crate) mixed: Vec<Range<usize>>,
}

impl RoutingMask {
    /// A mask from rows in stored form, `[T − 1, moe layers, top_k]`, and the version of each
    /// range of rows; none of them mixed.
    ///
    /// # Errors
    /// [`RoutingError`] when a row is not valid for `shape`, or the versions do not cover the rows.
    pub fn new(
        shape: Arc<ModelShape>,
        data: &[u8],
        versions: Vec<RowVersion>,
    ) -> Result<Self, RoutingError> {
        check_rows(data, &shape, 0)?;
        let row_bytes = shape.row_bytes();
        let rows = data.len() / row_bytes;
        check_versions(&versions, rows)?;
        let mut blocks = Blocks::new(row_bytes);
        for piece in data.chunks(BLOCK_ROWS * row_bytes) {
            blocks.append(piece.to_vec(), 0);
        }
        Ok(Self { shape, rows, blocks: blocks.finish(), versions, mixed: Vec::new() })
    }

    /// Number of rows, `T − 1`.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Bytes of one row: MoE layers × top-k × id width.
    pub fn row_bytes(&self) -> usize {
        self.shape.row_bytes()
    }

    /// Shape of the model the rows belong to; `moe_layers` gives the layer of each part of a row.
    pub fn shape(&self) -> &ModelShape {
        &self.shape
    }

    /// Row-major bytes `[T − 1, moe layers, top_k]`, id width 1 or 2 (little-endian), in order and
    /// in slices of [`BLOCK_ROWS`] rows (the last may have fewer).
    pub fn chunks(&self) -> impl Iterator<Item = &[u8]> + Clone {
        self.blocks.iter().map(Block::bytes)
    }

    /// The bytes of [`RoutingMask::chunks`] copied into one vector.
    pub fn to_vec(&self) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(self.rows * self.row_bytes());
        self.chunks().for_each(|chunk| bytes.extend_from_slice(chunk));
        bytes
    }

    /// Bytes of row `t`, `[moe layers, top_k]`; `None` from `T − 1` on.
    pub fn row(&self, t: usize) -> Option<&[u8]> {
        let at = t % BLOCK_ROWS * self.row_bytes();
        self.blocks.get(t / BLOCK_ROWS)?.bytes().get(at..at + self.row_bytes())
    }

    /// Expert ids `[top_k]` of row `t` in the MoE layer with global number `layer`, in the
    /// engine's order; `None` if the row does not exist or the layer is dense.
    pub fn experts(&self, t: usize, layer: usize) -> Option<Vec<usize>> {
        let index = self.shape.moe_layers.binary_search(&layer).ok()?;
        let (width, k) = (self.shape.id_bytes(), self.shape.top_k);
        let cell = self.row(t)?.get(index * k * width..(index + 1) * k * width)?;
        Some((0..k).map(|slot| id_at(cell, slot, width)).collect())
    }

    /// Policy version per row range; ascending, without gaps.
    pub fn versions(&self) -> &[RowVersion] {
        &self.versions
    }

    /// Ranges of rows that may differ from the choices behind their tokens' log-probabilities,
    /// because weights changed inside a turn, or its KV cache was dropped and recomputed. Ascending
    /// and not adjacent.
    pub fn mixed(&self) -> &[Range<usize>] {
        &self.mixed
    }

    /// Bytes in memory, split by whether other masks, builders or the cache share them.
    pub fn held(&self) -> HeldBytes {
        held(&self.blocks)
    }

    /// Total bytes that several masks hold, counting each shared block once.
    pub fn held_together<'a>(masks: impl IntoIterator<Item = &'a Self>) -> usize {
        let mut seen = HashSet::new();
        masks
            .into_iter()
            .flat_map(|mask| &mask.blocks)
            .filter(|block| seen.insert(block.address()))
            .map(|block| block.bytes().len())
            .sum()
    }
}

/// Checks that the ranges cover rows `0..rows` in order.
pub(crate) fn check_versions(versions: &[RowVersion], rows: usize) -> Result<(), RoutingError> {
    let mut next = 0;
    for range in versions {
        if range.start != next || range.end <= range.start {
            return Err(RoutingError::Versions { rows });
        }
        next = range.end;
    }
    if next == rows { Ok(()) } else { Err(RoutingError::Versions { rows }) }
}

/// Checks that mixed ranges are non-empty, within the rows, ascending and not adjacent.
pub(crate) fn check_mixed(mixed: &[Range<usize>], rows: usize) -> Result<(), RoutingError> {
    let fits = mixed.iter().all(|range| range.start < range.end && range.end <= rows);
    let apart = mixed.is_sorted_by(|a, b| a.end < b.start);
    if fits && apart { Ok(()) } else { Err(RoutingError::Versions { rows }) }
}
