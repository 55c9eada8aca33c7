//! The joined routing mask of one whole trajectory.

use crate::RoutingError;
use crate::check::{check_rows, id_at};
use orchestrate_types::{ModelShape, PolicyVersion};
use std::sync::Arc;

/// Rows `start..end` were produced under `version`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RowVersion {
    /// First row.
    pub start: usize,
    /// One past the last row.
    pub end: usize,
    /// Policy version whose weights chose the experts.
    pub version: PolicyVersion,
}

/// Routing rows of one trajectory of `T` tokens: `T − 1` rows (INV-3), row `t` belongs to input
/// token `t`. The last token was never an input and has none.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RoutingMask {
    pub(crate) shape: Arc<ModelShape>,
    pub(crate) row_bytes: usize,
    pub(crate) data: Vec<u8>,
    pub(crate) versions: Vec<RowVersion>,
}

impl RoutingMask {
    /// A mask from rows in stored form, `[T − 1, moe layers, top_k]`, and the version of each
    /// range of rows.
    ///
    /// # Errors
    /// [`RoutingError`] when a row is not valid for `shape`, or the versions do not cover the rows.
    pub fn new(
        shape: Arc<ModelShape>,
        data: Vec<u8>,
        versions: Vec<RowVersion>,
    ) -> Result<Self, RoutingError> {
        check_rows(&data, &shape, 0)?;
        let row_bytes = shape.row_bytes();
        let rows = data.len() / row_bytes;
        let mut next = 0;
        for range in &versions {
            if range.start != next || range.end <= range.start {
                return Err(RoutingError::Versions { rows });
            }
            next = range.end;
        }
        if next != rows {
            return Err(RoutingError::Versions { rows });
        }
        Ok(Self { shape, row_bytes, data, versions })
    }

    /// Number of rows, `T − 1`.
    pub fn rows(&self) -> usize {
        self.data.len() / self.row_bytes
    }

    /// Bytes of one row: MoE layers × top-k × id width.
    pub fn row_bytes(&self) -> usize {
        self.row_bytes
    }

    /// Shape of the model the rows belong to; its `moe_layers` number the parts of a row.
    pub fn shape(&self) -> &ModelShape {
        &self.shape
    }

    /// Row-major bytes `[T − 1, moe layers, top_k]`, id width 1 or 2 (little-endian).
    pub fn data(&self) -> &[u8] {
        &self.data
    }

    /// The bytes of [`data`](Self::data) in order, as the pieces they are held in.
    pub fn chunks(&self) -> impl Iterator<Item = &[u8]> {
        std::iter::once(self.data.as_slice())
    }

    /// Bytes of row `t`, `[moe layers, top_k]`; `None` from `T − 1` on.
    pub fn row(&self, t: usize) -> Option<&[u8]> {
        let at = t.checked_mul(self.row_bytes)?;
        self.data.get(at..at.checked_add(self.row_bytes)?)
    }

    /// Expert ids `[top_k]` of row `t` in the MoE layer with global number `layer`, in the
    /// engine's order; `None` where there is no such row or the layer is dense.
    pub fn experts(&self, t: usize, layer: usize) -> Option<Vec<usize>> {
        let index = self.shape.moe_layers.binary_search(&layer).ok()?;
        let (width, k) = (self.shape.id_bytes(), self.shape.top_k);
        let cell = self.row(t)?.get(index * k * width..(index + 1) * k * width)?;
        Some((0..k).map(|slot| id_at(cell, slot, width)).collect())
    }

    /// Policy version per row range; ascending, without gap.
    pub fn versions(&self) -> &[RowVersion] {
        &self.versions
    }
}
