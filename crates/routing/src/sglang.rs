//! The wire form of SGLang: base64 of little-endian int32 `[rows, hidden layers, top_k]`.

use crate::check::{check_block, check_cell, check_shape, id_at};
use crate::{PayloadForm, RoutedRows, RoutingError};
use base64_simd::{Out, STANDARD};
use orchestrate_types::ModelShape;

/// Bytes decoded at a time; small enough to stay in the L2 cache between decoding and narrowing.
const BLOCK_BYTES: usize = 48 << 10;

/// Three rows of any size end on a base64 group, so blocks of whole rows can be cut from the text.
const ROWS_PER_GROUP: usize = 3;

/// Decodes `meta_info.routed_experts` of a reply whose prompt and output have `tokens_total`
/// tokens and for which rows from position `start` were asked.
///
/// Expected are `tokens_total − 1 − start` rows. Two documented deviations are accepted and
/// reported by [`RoutedRows::form`]: one surplus row at the end, and all rows from position 0.
/// Dense layers are dropped, ids narrowed to the model's width. The expected length is compared
/// before anything is allocated.
///
/// # Errors
/// [`RoutingError`], with the absolute position and global layer, when the length, the text, or
/// any id is not what it must be. Nothing is padded.
pub fn decode_sglang(
    base64: &str,
    shape: &ModelShape,
    start: usize,
    tokens_total: usize,
) -> Result<RoutedRows, RoutingError> {
    check_shape(shape)?;
    if start > tokens_total {
        return Err(RoutingError::StartBeyondEnd { start, tokens: tokens_total });
    }
    let text = base64.as_bytes();
    let all_rows = tokens_total.saturating_sub(1);
    let rows = all_rows.saturating_sub(start);
    let wire_row = shape.hidden_layers * shape.top_k * 4;
    let (form, found_rows, first) = classify(text, shape, start, rows, all_rows)?;

    let mut data = Vec::with_capacity(rows * shape.row_bytes());
    let groups = (BLOCK_BYTES / (wire_row * ROWS_PER_GROUP)).max(1);
    let block_rows = groups * ROWS_PER_GROUP;
    let block_chars = groups * wire_row * 4;
    let mut scratch = vec![0u8; (block_rows * wire_row).min(found_rows * wire_row)];
    let skipped_groups = first / ROWS_PER_GROUP;
    let mut row = skipped_groups * ROWS_PER_GROUP;
    let tail = text.get(skipped_groups * wire_row * 4..).unwrap_or_default();
    let offset = start.saturating_sub(first);
    for block in tail.chunks(block_chars) {
        let error = RoutingError::Base64 { position: row + offset };
        let wire =
            STANDARD.decode(block, Out::from_slice(&mut scratch)).map_err(|_| error.clone())?;
        if wire.len() != (found_rows - row).min(block_rows) * wire_row {
            return Err(error); // padding in the middle of the text
        }
        for wire_row in wire.chunks_exact(wire_row) {
            if row >= first && row < first + rows {
                narrow_row(wire_row, shape, row + offset, &mut data)?;
            }
            row += 1;
        }
    }
    check_block(&data, shape, start)?;
    Ok(RoutedRows::from_checked(shape, start, &data, form))
}

/// Which form the payload has by its length alone: `(form, rows in it, index of the first wanted)`.
fn classify(
    text: &[u8],
    shape: &ModelShape,
    start: usize,
    rows: usize,
    all_rows: usize,
) -> Result<(PayloadForm, usize, usize), RoutingError> {
    let wire_row = shape.hidden_layers * shape.top_k * 4;
    let padding = text.iter().rev().take(2).take_while(|&&c| c == b'=').count();
    let found =
        (text.len().is_multiple_of(4)).then(|| (text.len() / 4 * 3).saturating_sub(padding));
    let is = |rows: usize| found.is_some() && rows.checked_mul(wire_row) == found;
    // From start 1 on, one row more can be either deviation: rows would be misplaced by a guess.
    let ambiguous = start == 1 && is(rows + 1);
    if is(rows) {
        return Ok((PayloadForm::Exact, rows, 0));
    }
    if is(rows + 1) && !ambiguous && rows > 0 {
        return Ok((PayloadForm::SurplusRow, rows + 1, 0));
    }
    if start > 1 && is(all_rows) {
        return Ok((PayloadForm::WholeSequence, all_rows, start));
    }
    let per_id = rows * 4;
    let looks_like = |ids: usize| found == per_id.checked_mul(ids) && rows > 0;
    let hint = if ambiguous {
        "; it may start at 0 or end one row late, which start 1 cannot tell apart"
    } else if !text.len().is_multiple_of(4) {
        "; it was cut off or is not padded"
    } else if (1..=4).any(|more| looks_like(shape.hidden_layers * (shape.top_k + more))) {
        "; it has more columns than top-k: serve with --disable-shared-experts-fusion"
    } else if looks_like(shape.moe_layers.len() * shape.top_k) {
        "; it has the MoE layers only, but a part for every hidden layer is expected"
    } else {
        ""
    };
    Err(RoutingError::Length {
        found: text.len(),
        expected: rows.saturating_mul(wire_row).div_ceil(3).saturating_mul(4),
        rows,
        layers: shape.hidden_layers,
        top_k: shape.top_k,
        hint,
    })
}

/// Checks one wire row and appends its MoE layers in stored width.
fn narrow_row(
    wire: &[u8],
    shape: &ModelShape,
    position: usize,
    data: &mut Vec<u8>,
) -> Result<(), RoutingError> {
    let cell_bytes = shape.top_k * shape.id_bytes();
    let mut moe_layers = shape.moe_layers.iter().copied().peekable();
    for (layer, cell) in wire.chunks_exact(shape.top_k * 4).enumerate() {
        if moe_layers.next_if_eq(&layer).is_none() {
            if cell.iter().any(|&byte| byte != 0) {
                return Err(RoutingError::DenseLayer { position, layer });
            }
            continue;
        }
        for &id in cell.as_chunks::<4>().0 {
            let id = i32::from_le_bytes(id);
            let range = || RoutingError::ExpertRange {
                position,
                layer,
                id: i64::from(id),
                experts: shape.experts,
            };
            if shape.id_bytes() == 1 {
                data.push(u8::try_from(id).map_err(|_| range())?);
            } else {
                data.extend_from_slice(&u16::try_from(id).map_err(|_| range())?.to_le_bytes());
            }
        }
        let stored = data.len().checked_sub(cell_bytes).and_then(|from| data.get(from..));
        check_cell(stored.unwrap_or_default(), shape, position, layer)?;
    }
    Ok(())
}

/// Writes rows as SGLang sends them: int32, zeros for dense layers, standard padded base64.
///
/// # Errors
/// [`RoutingError::RowBytes`] when the rows are another model's, [`RoutingError::Shape`].
pub fn encode_sglang(rows: &RoutedRows, shape: &ModelShape) -> Result<String, RoutingError> {
    check_shape(shape)?;
    if rows.row_bytes() != shape.row_bytes() {
        let (found, expected) = (rows.row_bytes(), shape.row_bytes());
        return Err(RoutingError::RowBytes { found, expected });
    }
    let (width, k) = (shape.id_bytes(), shape.top_k);
    let wire_row = shape.hidden_layers * k * 4;
    let block_rows = (BLOCK_BYTES / (wire_row * ROWS_PER_GROUP)).max(1) * ROWS_PER_GROUP;
    let mut text = String::with_capacity((rows.rows() * wire_row).div_ceil(3) * 4);
    let mut wire = Vec::with_capacity(block_rows.min(rows.rows()) * wire_row);
    for block in rows.to_vec().chunks(block_rows * shape.row_bytes()) {
        wire.clear();
        for row in block.chunks_exact(shape.row_bytes()) {
            let mut cells = row.chunks_exact(k * width);
            let mut moe_layers = shape.moe_layers.iter().copied().peekable();
            for layer in 0..shape.hidden_layers {
                let cell = moe_layers.next_if_eq(&layer).and_then(|_| cells.next());
                for slot in 0..k {
                    let id = cell.map_or(0, |cell| id_at(cell, slot, width));
                    wire.extend_from_slice(&u32::try_from(id).unwrap_or(u32::MAX).to_le_bytes());
                }
            }
        }
        STANDARD.encode_append(&wire, &mut text);
    }
    Ok(text)
}
