//! The checks that every row must pass, whatever its source.
#![expect(clippy::indexing_slicing, reason = "indices are bounded by the id range checked before")]

use crate::kernels::{Repeats, WireId, any_above, any_set};
use crate::{BLOCK_ROWS, RoutingError};
use orchestrate_types::ModelShape;

/// Bound on top-k: the cost of finding a repeated expert grows with its square.
const MAX_TOP_K: usize = 256;
/// From this many rows on, an all-zero layer at top-1 is not a coincidence.
const ZERO_LAYER_ROWS: usize = 8;
/// From this many rows on, equal layers are an error.
const EQUAL_LAYER_ROWS: usize = 16;
/// Independent coincidences after which equal layers are an error. Repeated tokens repeat their row,
/// so only changes from row to row count, once per additional layer.
const EQUAL_LAYER_EVIDENCE: usize = 8;

/// Checks that a model of this shape has routing rows whose ids fit the stored width.
pub(crate) fn check_shape(shape: &ModelShape) -> Result<(), RoutingError> {
    let fault = if shape.moe_layers.is_empty() {
        Some("it has no MoE layer")
    } else if shape.moe_layers.iter().any(|&layer| layer >= shape.hidden_layers) {
        Some("a MoE layer number is not below the number of hidden layers")
    } else if !shape.moe_layers.is_sorted_by(|a, b| a < b) {
        Some("its MoE layer numbers are not ascending")
    } else if shape.top_k == 0 || shape.top_k > shape.experts {
        Some("top-k must be at least 1 and at most the number of experts")
    } else if shape.top_k > MAX_TOP_K {
        Some("top-k is larger than 256")
    } else if shape.experts > 1 << 16 {
        Some("it has more than 65536 experts")
    } else if shape.hidden_layers.checked_mul(shape.top_k).is_none_or(|ids| ids > 1 << 24) {
        Some("hidden layers times top-k is larger than 2^24")
    } else {
        None
    };
    fault.map_or(Ok(()), |fault| Err(RoutingError::Shape(fault)))
}

/// Reads the stored id in `slot` of a cell; `id_bytes` is 1 or 2.
pub(crate) fn id_at(cell: &[u8], slot: usize, id_bytes: usize) -> usize {
    if id_bytes == 1 {
        usize::from(cell[slot])
    } else {
        usize::from(u16::from_le_bytes([cell[2 * slot], cell[2 * slot + 1]]))
    }
}

/// Finds the error in whole wire rows by walking them id by id; the first row has absolute position
/// `position`. Returns `Ok` for valid rows, because the fast check may report false positives.
pub(crate) fn explain(
    wire: &[u8],
    ids: WireId,
    shape: &ModelShape,
    position: usize,
) -> Result<(), RoutingError> {
    let cell_bytes = shape.top_k * ids.bytes();
    for (row, wire_row) in wire.chunks_exact(shape.hidden_layers * cell_bytes).enumerate() {
        let mut moe_layers = shape.moe_layers.iter().copied().peekable();
        for (layer, cell) in wire_row.chunks_exact(cell_bytes).enumerate() {
            if moe_layers.next_if_eq(&layer).is_some() {
                explain_cell(cell, ids, shape, position + row, layer)?;
            } else if any_set(cell) {
                return Err(RoutingError::DenseLayer { position: position + row, layer });
            }
        }
    }
    Ok(())
}

/// Finds the error in one router's choice: an id that is out of range or repeated.
fn explain_cell(
    cell: &[u8],
    ids: WireId,
    shape: &ModelShape,
    position: usize,
    layer: usize,
) -> Result<(), RoutingError> {
    let mut seen = Vec::with_capacity(shape.top_k);
    for id in cell.chunks_exact(ids.bytes()).map(|id| ids.read(id)) {
        let experts = shape.experts;
        let Some(expert) = usize::try_from(id).ok().filter(|&id| id < experts) else {
            return Err(RoutingError::ExpertRange { position, layer, id, experts });
        };
        if seen.contains(&expert) {
            return Err(if any_set(cell) {
                RoutingError::Repeated { position, layer, id: expert }
            } else {
                RoutingError::NotCaptured { position, layer }
            });
        }
        seen.push(expert);
    }
    Ok(())
}

/// Detects faults that only show over many rows: a layer that was never captured, or one layer sent
/// for all. The first few rows of a valid payload rule out both; later rows cost nothing.
#[derive(Debug)]
pub(crate) struct LayerWatch<'a> {
    shape: &'a ModelShape,
    start: usize,
    rows: usize,
    /// Indices of the MoE layers that were zero in every row. Only used at top-1: otherwise an
    /// all-zero choice repeats expert 0 and is already an error.
    zero: Vec<usize>,
    /// Whether all layers had the same ids in every row.
    equal: bool,
    /// How often a row differed from the one before, while `equal`.
    changes: usize,
    last: Vec<u8>,
}

impl<'a> LayerWatch<'a> {
    pub(crate) fn new(shape: &'a ModelShape, start: usize) -> Self {
        let layers = shape.moe_layers.len();
        let zero = if shape.top_k == 1 && shape.experts > 1 { 0..layers } else { 0..0 };
        let equal = layers >= 2 && shape.experts > shape.top_k;
        let zero = zero.collect();
        Self { shape, start, rows: 0, zero, equal, changes: 0, last: Vec::new() }
    }

    /// Processes the next rows, in stored form.
    pub(crate) fn observe(&mut self, stored: &[u8]) {
        let row_bytes = self.shape.row_bytes();
        self.rows += stored.len() / row_bytes;
        let cell_bytes = self.shape.top_k * self.shape.id_bytes();
        for row in stored.chunks_exact(row_bytes) {
            if self.zero.is_empty() && !self.equal {
                break;
            }
            self.zero.retain(|index| {
                let at = index * cell_bytes;
                !any_set(&row[at..at + cell_bytes])
            });
            self.equal &= row.chunks_exact(cell_bytes).all(|cell| *cell == row[..cell_bytes]);
            if self.equal && self.last != row {
                self.changes += usize::from(!self.last.is_empty());
                row.clone_into(&mut self.last);
            }
        }
    }

    /// Reports a fault, if any, after the last row.
    pub(crate) fn finish(self) -> Result<(), RoutingError> {
        let (rows, layers) = (self.rows, self.shape.moe_layers.len());
        if rows >= ZERO_LAYER_ROWS
            && let Some(&index) = self.zero.first()
        {
            let layer = self.shape.moe_layers[index];
            return Err(RoutingError::NotCaptured { position: self.start, layer });
        }
        let evidence = (layers - 1) * (self.changes + 1);
        if self.equal && rows >= EQUAL_LAYER_ROWS && evidence >= EQUAL_LAYER_EVIDENCE {
            return Err(RoutingError::LayersIdentical { rows, layers });
        }
        Ok(())
    }
}

/// Checks stored rows: their length, every id and choice, and each layer over all rows.
pub(crate) fn check_rows(
    data: &[u8],
    shape: &ModelShape,
    start: usize,
) -> Result<(), RoutingError> {
    check_shape(shape)?;
    let row_bytes = shape.row_bytes();
    if !data.len().is_multiple_of(row_bytes) {
        return Err(RoutingError::RowBytes { found: data.len(), expected: row_bytes });
    }
    check_pieces(data.chunks(BLOCK_ROWS * row_bytes), shape, start)
}

/// Like [`check_rows`], for rows in several pieces, each of whole rows. Faults that only show over
/// many rows are detected across pieces.
pub(crate) fn check_pieces<'a>(
    pieces: impl Iterator<Item = &'a [u8]>,
    shape: &ModelShape,
    start: usize,
) -> Result<(), RoutingError> {
    let (row_bytes, width) = (shape.row_bytes(), shape.id_bytes());
    let repeats = Repeats::new(shape);
    let mut watch = LayerWatch::new(shape, start);
    let mut position = start;
    for block in pieces {
        if any_above(block, width, shape.experts - 1) || repeats.any(block) {
            let ids = if width == 1 { WireId::U8 } else { WireId::U16 };
            let cell_bytes = shape.top_k * width;
            for (row, bytes) in block.chunks_exact(row_bytes).enumerate() {
                for (cell, &layer) in bytes.chunks_exact(cell_bytes).zip(&shape.moe_layers) {
                    explain_cell(cell, ids, shape, position + row, layer)?;
                }
            }
        }
        watch.observe(block);
        position += block.len() / row_bytes;
    }
    watch.finish()
}

/// Whether two stored rows choose the same experts in every layer, in any order.
pub(crate) fn same_sets(a: &[u8], b: &[u8], shape: &ModelShape) -> bool {
    if a == b {
        return true;
    }
    let (width, k) = (shape.id_bytes(), shape.top_k);
    // Ids of a checked cell are distinct, so inclusion between cells of equal size is equality.
    a.chunks_exact(k * width).zip(b.chunks_exact(k * width)).all(|(a, b)| {
        (0..k).all(|slot| {
            let id = id_at(a, slot, width);
            (0..k).any(|other| id_at(b, other, width) == id)
        })
    })
}
