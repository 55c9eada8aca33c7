//! Joins the rows of all replies of one episode, by absolute token position.

use crate::check::{check_shape, same_sets};
use crate::{RoutedRows, RoutingError, RoutingMask, RowVersion};
use orchestrate_types::{ModelShape, PolicyVersion};
use std::sync::Arc;

/// What one [`MaskBuilder::push`] did.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct PushReport {
    /// Rows stored for the first time.
    pub new_rows: usize,
    /// Rows that were already held, and compared.
    pub overlap_rows: usize,
    /// Of these, rows whose expert sets differ in some layer; the first one stands.
    pub drift_rows: usize,
}

/// Collects rows. A row, once held, is never overwritten: the first forward pass over a position
/// produced the log-probabilities of the tokens after it.
#[derive(Debug, Clone)]
pub struct MaskBuilder {
    shape: Arc<ModelShape>,
    data: Vec<u8>,
    versions: Vec<RowVersion>,
}

impl MaskBuilder {
    /// Nothing held yet.
    ///
    /// # Errors
    /// [`RoutingError::Shape`] for a model without usable MoE layers.
    pub fn new(shape: Arc<ModelShape>) -> Result<Self, RoutingError> {
        check_shape(&shape)?;
        Ok(Self { shape, data: Vec::new(), versions: Vec::new() })
    }

    /// Leading positions that have a row.
    pub fn rows(&self) -> usize {
        self.data.len() / self.shape.row_bytes()
    }

    /// Bytes held.
    pub fn held_bytes(&self) -> usize {
        self.data.len()
    }

    /// First position to ask the next reply for: the last row held, so that one row of overlap
    /// shows whether engine and builder still mean the same positions.
    pub fn next_start(&self) -> usize {
        self.rows().saturating_sub(1)
    }

    /// Places the rows of one reply, after which the sequence has `total_tokens` tokens. Rows
    /// for positions already held are compared as sets per layer, and dropped.
    ///
    /// # Errors
    /// [`RoutingError::Gap`], [`RoutingError::BeyondEnd`] or [`RoutingError::RowBytes`]; the
    /// builder is then as before.
    pub fn push(
        &mut self,
        rows: &RoutedRows,
        total_tokens: usize,
        version: PolicyVersion,
    ) -> Result<PushReport, RoutingError> {
        let row_bytes = self.shape.row_bytes();
        if rows.row_bytes() != row_bytes {
            return Err(RoutingError::RowBytes { found: rows.row_bytes(), expected: row_bytes });
        }
        let (have, start) = (self.rows(), rows.start());
        let end = start + rows.rows();
        if start > have {
            return Err(RoutingError::Gap { have, start });
        }
        if rows.rows() > 0 && end > total_tokens.saturating_sub(1) {
            return Err(RoutingError::BeyondEnd { end, tokens: total_tokens });
        }
        let overlap_rows = (have - start).min(rows.rows());
        let bytes = rows.to_vec();
        let (overlap, new) = bytes.split_at(overlap_rows * row_bytes);
        let held = self.data.get(start * row_bytes..).unwrap_or_default();
        let drift_rows = overlap
            .chunks_exact(row_bytes)
            .zip(held.chunks_exact(row_bytes))
            .filter(|(offered, held)| !same_sets(offered, held, &self.shape))
            .count();
        self.data.extend_from_slice(new);
        let new_rows = new.len() / row_bytes;
        match self.versions.last_mut() {
            Some(last) if last.version == version => last.end += new_rows,
            Some(_) | None if new_rows == 0 => {}
            Some(_) | None => {
                self.versions.push(RowVersion { start: have, end: have + new_rows, version });
            }
        }
        Ok(PushReport { new_rows, overlap_rows, drift_rows })
    }

    /// Cuts the sequence to `tokens` tokens: rows from `tokens − 1` on are dropped, the new last
    /// token is pending again.
    pub fn truncate(&mut self, tokens: usize) {
        let rows = self.rows().min(tokens.saturating_sub(1));
        self.data.truncate(rows * self.shape.row_bytes());
        self.versions.retain_mut(|range| {
            range.end = range.end.min(rows);
            range.start < range.end
        });
    }

    /// Ends the trajectory of `total_tokens` tokens. INV-3: exactly `total_tokens − 1` rows.
    ///
    /// # Errors
    /// [`RoutingError::Incomplete`] with any other number of rows.
    pub fn finish(self, total_tokens: usize) -> Result<RoutingMask, RoutingError> {
        let rows = self.rows();
        if total_tokens == 0 || rows != total_tokens - 1 {
            return Err(RoutingError::Incomplete { rows, tokens: total_tokens });
        }
        let row_bytes = self.shape.row_bytes();
        Ok(RoutingMask { shape: self.shape, row_bytes, data: self.data, versions: self.versions })
    }
}
