//! Decoded, checked and narrowed rows of one engine reply.

use crate::RoutingError;
use crate::check::check_rows;
use orchestrate_types::ModelShape;

/// How the payload related to what was asked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PayloadForm {
    /// Exactly the rows asked for.
    Exact,
    /// One row too many at the end (engines that speculate, at a stop edge); it was dropped.
    SurplusRow,
    /// All rows from position 0 although later ones were asked for; only the tail was decoded.
    WholeSequence,
}

/// Rows of positions `start .. start + rows`, row-major `[rows, moe layers, top_k]`, one byte per
/// id up to 256 experts, else two (little-endian).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RoutedRows {
    start: usize,
    row_bytes: usize,
    data: Vec<u8>,
    form: PayloadForm,
}

impl RoutedRows {
    /// Wraps checked bytes; `data.len()` must be a multiple of `row_bytes`.
    pub(crate) fn from_checked(
        start: usize,
        row_bytes: usize,
        data: Vec<u8>,
        form: PayloadForm,
    ) -> Self {
        debug_assert!(row_bytes > 0 && data.len().is_multiple_of(row_bytes));
        Self { start, row_bytes, data, form }
    }

    /// Rows in stored form: `data` is `[rows, moe layers, top_k]` of `shape.id_bytes()` bytes
    /// each, little-endian.
    ///
    /// # Errors
    /// [`RoutingError`] when the length is no whole number of rows, an id is out of range, or a
    /// choice repeats an expert.
    pub fn new(shape: &ModelShape, start: usize, data: Vec<u8>) -> Result<Self, RoutingError> {
        check_rows(&data, shape, start)?;
        Ok(Self::from_checked(start, shape.row_bytes(), data, PayloadForm::Exact))
    }

    /// Rows from plain ids `[rows, moe layers, top_k]`, narrowed to the model's width.
    ///
    /// # Errors
    /// As [`RoutedRows::new`].
    pub fn from_ids(shape: &ModelShape, start: usize, ids: &[u16]) -> Result<Self, RoutingError> {
        let mut data = Vec::with_capacity(ids.len() * shape.id_bytes());
        for (index, &id) in ids.iter().enumerate() {
            if shape.id_bytes() == 1 {
                data.push(u8::try_from(id).map_err(|_| {
                    let (cell, layers) = (index / shape.top_k.max(1), shape.moe_layers.len());
                    RoutingError::ExpertRange {
                        position: start + cell / layers.max(1),
                        layer: shape.moe_layers.get(cell % layers.max(1)).copied().unwrap_or(0),
                        id: i64::from(id),
                        experts: shape.experts,
                    }
                })?);
            } else {
                data.extend_from_slice(&id.to_le_bytes());
            }
        }
        Self::new(shape, start, data)
    }

    /// Absolute position of the first row.
    pub fn start(&self) -> usize {
        self.start
    }

    /// Number of rows.
    pub fn rows(&self) -> usize {
        self.data.len() / self.row_bytes
    }

    /// Bytes of one row: MoE layers × top-k × id width.
    pub fn row_bytes(&self) -> usize {
        self.row_bytes
    }

    /// The bytes.
    pub fn data(&self) -> &[u8] {
        &self.data
    }

    /// The row of absolute position `position`, if it is among these.
    pub fn row(&self, position: usize) -> Option<&[u8]> {
        let at = position.checked_sub(self.start)?.checked_mul(self.row_bytes)?;
        self.data.get(at..at.checked_add(self.row_bytes)?)
    }

    /// How the payload related to what was asked for.
    pub fn form(&self) -> PayloadForm {
        self.form
    }
}
