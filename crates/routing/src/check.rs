//! The checks every row passes, whatever its source. Hot: one call per (row, layer).
#![expect(clippy::indexing_slicing, reason = "indices are bounded by the id range checked before")]

use crate::RoutingError;
use orchestrate_types::ModelShape;

/// Rows from which a layer of nothing but zeros is no coincidence at top-1.
const ZERO_LAYER_ROWS: usize = 8;
/// Rows from which equal layers are looked for.
const EQUAL_LAYER_ROWS: usize = 16;
/// Independent coincidences that make equal layers a fault: repeated tokens repeat their row, so
/// only changes of the row count, once per further layer.
const EQUAL_LAYER_EVIDENCE: usize = 8;

/// Refuses shapes that have no rows, or rows that do not fit the stored ids.
pub(crate) fn check_shape(shape: &ModelShape) -> Result<(), RoutingError> {
    let fault = if shape.moe_layers.is_empty() {
        Some("it has no MoE layer")
    } else if shape.moe_layers.iter().any(|&layer| layer >= shape.hidden_layers) {
        Some("a MoE layer number is not below the number of hidden layers")
    } else if !shape.moe_layers.is_sorted_by(|a, b| a < b) {
        Some("its MoE layer numbers are not ascending")
    } else if shape.top_k == 0 || shape.top_k > shape.experts {
        Some("top-k must be at least 1 and at most the number of experts")
    } else if shape.experts > 1 << 16 {
        Some("it has more than 65536 experts")
    } else if shape.hidden_layers.checked_mul(shape.top_k).is_none_or(|ids| ids > 1 << 24) {
        Some("layers times top-k is beyond any model")
    } else {
        None
    };
    fault.map_or(Ok(()), |fault| Err(RoutingError::Shape(fault)))
}

/// Reads one stored id.
pub(crate) fn id_at(cell: &[u8], slot: usize, id_bytes: usize) -> usize {
    if id_bytes == 1 {
        usize::from(cell[slot])
    } else {
        usize::from(u16::from_le_bytes([cell[2 * slot], cell[2 * slot + 1]]))
    }
}

/// Checks one router's choice, in stored form: ids in range and distinct.
pub(crate) fn check_cell(
    cell: &[u8],
    shape: &ModelShape,
    position: usize,
    layer: usize,
) -> Result<(), RoutingError> {
    let (width, k) = (shape.id_bytes(), shape.top_k);
    if width == 1 {
        let mut seen = [0u64; 4];
        for &byte in cell {
            let id = usize::from(byte);
            if id >= shape.experts {
                return Err(out_of_range(shape, position, layer, id));
            }
            let bit = 1u64 << (id & 63);
            if seen[id >> 6] & bit != 0 {
                return Err(repeated(cell, position, layer, id));
            }
            seen[id >> 6] |= bit;
        }
    } else {
        for slot in 0..k {
            let id = id_at(cell, slot, width);
            if id >= shape.experts {
                return Err(out_of_range(shape, position, layer, id));
            }
            if (0..slot).any(|before| id_at(cell, before, width) == id) {
                return Err(repeated(cell, position, layer, id));
            }
        }
    }
    Ok(())
}

fn out_of_range(shape: &ModelShape, position: usize, layer: usize, id: usize) -> RoutingError {
    let id = i64::try_from(id).unwrap_or(i64::MAX);
    RoutingError::ExpertRange { position, layer, id, experts: shape.experts }
}

fn repeated(cell: &[u8], position: usize, layer: usize, id: usize) -> RoutingError {
    if cell.iter().all(|&byte| byte == 0) {
        RoutingError::NotCaptured { position, layer }
    } else {
        RoutingError::Repeated { position, layer, id }
    }
}

/// Checks what only shows over many rows: a layer never captured, one layer sent for all.
pub(crate) fn check_block(
    data: &[u8],
    shape: &ModelShape,
    start: usize,
) -> Result<(), RoutingError> {
    let (row_bytes, cell_bytes) = (shape.row_bytes(), shape.top_k * shape.id_bytes());
    let rows = data.len() / row_bytes;
    let layers = shape.moe_layers.len();
    // With top-k ≥ 2 an all-zero choice repeats expert 0 and was refused cell by cell.
    if shape.top_k == 1 && shape.experts > 1 && rows >= ZERO_LAYER_ROWS {
        for (index, &layer) in shape.moe_layers.iter().enumerate() {
            let at = index * cell_bytes;
            let zero = |row: &[u8]| row[at..at + cell_bytes].iter().all(|&byte| byte == 0);
            if data.chunks_exact(row_bytes).all(zero) {
                return Err(RoutingError::NotCaptured { position: start, layer });
            }
        }
    }
    if layers >= 2 && shape.experts > shape.top_k && rows >= EQUAL_LAYER_ROWS {
        let equal =
            |row: &[u8]| row.chunks_exact(cell_bytes).all(|cell| *cell == row[..cell_bytes]);
        if data.chunks_exact(row_bytes).all(equal) {
            let rows_by_order = data.chunks_exact(row_bytes);
            let changes = rows_by_order.clone().zip(rows_by_order.skip(1)).filter(|(a, b)| a != b);
            if (layers - 1) * (changes.count() + 1) >= EQUAL_LAYER_EVIDENCE {
                return Err(RoutingError::LayersIdentical { rows, layers });
            }
        }
    }
    Ok(())
}

/// Checks stored rows as a whole: length, every cell, and the block.
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
    let cell_bytes = shape.top_k * shape.id_bytes();
    for (row, bytes) in data.chunks_exact(row_bytes).enumerate() {
        for (cell, &layer) in bytes.chunks_exact(cell_bytes).zip(&shape.moe_layers) {
            check_cell(cell, shape, start + row, layer)?;
        }
    }
    check_block(data, shape, start)
}

/// Whether two stored rows choose the same experts in every layer, in any order.
pub(crate) fn same_sets(a: &[u8], b: &[u8], shape: &ModelShape) -> bool {
    if a == b {
        return true;
    }
    let (width, k) = (shape.id_bytes(), shape.top_k);
    // Ids of a checked cell are distinct, so inclusion of equally many is equality.
    a.chunks_exact(k * width).zip(b.chunks_exact(k * width)).all(|(a, b)| {
        (0..k).all(|slot| {
            let id = id_at(a, slot, width);
            (0..k).any(|other| id_at(b, other, width) == id)
        })
    })
}
