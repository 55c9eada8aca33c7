//! Encodes rows in the wire formats of the engines.

use crate::check::check_shape;
use crate::{RoutedRows, RoutingError, npy};
use base64_simd::STANDARD;
use orchestrate_types::ModelShape;

/// Wire bytes encoded at a time.
const BLOCK_BYTES: usize = 16 << 10;

/// Encodes rows as SGLang sends them: int32, zeros for dense layers, standard padded base64.
///
/// # Errors
/// [`RoutingError::RowBytes`] if the rows belong to another model, [`RoutingError::Shape`] if the
/// shape cannot have rows.
pub fn encode_sglang(rows: &RoutedRows, shape: &ModelShape) -> Result<String, RoutingError> {
    encode(rows, shape, 4, Vec::new())
}

/// Encodes rows as vLLM sends them: a `.npy` file of the model's id width (`|u1` or `<u2`), zeros
/// for dense layers, standard padded base64.
///
/// # Errors
/// The errors of [`encode_sglang`].
pub fn encode_npy(rows: &RoutedRows, shape: &ModelShape) -> Result<String, RoutingError> {
    let width = shape.id_bytes();
    let header = npy::header(width, [rows.rows(), shape.hidden_layers, shape.top_k]);
    encode(rows, shape, width, header)
}

fn encode(
    rows: &RoutedRows,
    shape: &ModelShape,
    wire_width: usize,
    header: Vec<u8>,
) -> Result<String, RoutingError> {
    check_shape(shape)?;
    if rows.row_bytes() != shape.row_bytes() {
        let (found, expected) = (rows.row_bytes(), shape.row_bytes());
        return Err(RoutingError::RowBytes { found, expected });
    }
    let (width, dense_bytes) = (shape.id_bytes(), shape.top_k * wire_width);
    let wire_row = shape.hidden_layers * dense_bytes;
    let mut text = String::with_capacity((header.len() + rows.rows() * wire_row).div_ceil(3) * 4);
    let mut wire = header;
    for row in rows.chunks().flat_map(|chunk| chunk.chunks_exact(shape.row_bytes())) {
        if shape.moe_layers.len() == shape.hidden_layers {
            widen(row, width, wire_width, &mut wire);
        } else {
            let mut cells = row.chunks_exact(shape.top_k * width);
            let mut moe_layers = shape.moe_layers.iter().copied().peekable();
            for layer in 0..shape.hidden_layers {
                match moe_layers.next_if_eq(&layer).and_then(|_| cells.next()) {
                    Some(cell) => widen(cell, width, wire_width, &mut wire),
                    None => wire.resize(wire.len() + dense_bytes, 0),
                }
            }
        }
        if wire.len() >= BLOCK_BYTES {
            // Whole groups only: padding is allowed only at the end.
            let whole = wire.len() - wire.len() % 3;
            if let Some(groups) = wire.get(..whole) {
                STANDARD.encode_append(groups, &mut text);
            }
            wire.drain(..whole);
        }
    }
    STANDARD.encode_append(&wire, &mut text);
    Ok(text)
}

/// Appends stored ids of `width` bytes, widened to `wire_width` bytes each.
fn widen(stored: &[u8], width: usize, wire_width: usize, wire: &mut Vec<u8>) {
    let before = wire.len();
    wire.resize(before + stored.len() / width * wire_width, 0);
    let out = wire.get_mut(before..).unwrap_or_default();
    match (width, wire_width) {
        (1, 4) => {
            for (out, id) in out.as_chunks_mut().0.iter_mut().zip(stored) {
                *out = [*id, 0, 0, 0];
            }
        }
        (2, 4) => {
            for (out, [low, high]) in out.as_chunks_mut().0.iter_mut().zip(stored.as_chunks().0) {
                *out = [*low, *high, 0, 0];
            }
        }
        _ => out.copy_from_slice(stored),
    }
}
