//! Decoded, checked and narrowed rows of one engine reply.

/// Rows of positions `start .. start + rows`, row-major `[rows, moe layers, top_k]`, one byte per
/// id up to 256 experts, else two (little-endian).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RoutedRows {
    start: usize,
    row_bytes: usize,
    data: Vec<u8>,
}

impl RoutedRows {
    /// Wraps checked bytes; `data.len()` must be a multiple of `row_bytes`.
    pub(crate) fn from_checked(start: usize, row_bytes: usize, data: Vec<u8>) -> Self {
        debug_assert!(row_bytes > 0 && data.len() % row_bytes == 0);
        Self { start, row_bytes, data }
    }

    /// Absolute position of the first row.
    pub fn start(&self) -> usize {
        self.start
    }

    /// Number of rows.
    pub fn rows(&self) -> usize {
        self.data.len() / self.row_bytes
    }

    /// The bytes.
    pub fn data(&self) -> &[u8] {
        &self.data
    }
}
