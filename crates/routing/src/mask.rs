//! The joined routing mask of one whole trajectory.

use orchestrate_types::PolicyVersion;

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
    pub(crate) row_bytes: usize,
    pub(crate) data: Vec<u8>,
    pub(crate) versions: Vec<RowVersion>,
}

impl RoutingMask {
    /// Number of rows, `T − 1`.
    pub fn rows(&self) -> usize {
        self.data.len() / self.row_bytes
    }

    /// Bytes of one row: MoE layers × top-k × id width.
    pub fn row_bytes(&self) -> usize {
        self.row_bytes
    }

    /// Row-major bytes `[T − 1, moe layers, top_k]`, id width 1 or 2 (little-endian).
    pub fn data(&self) -> &[u8] {
        &self.data
    }

    /// Policy version per row range; ascending, without gap.
    pub fn versions(&self) -> &[RowVersion] {
        &self.versions
    }
}
