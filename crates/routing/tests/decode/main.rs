//! Decoding of replies: accepted payloads, and errors with their position for all others.

#![expect(clippy::unwrap_used, clippy::indexing_slicing, clippy::panic, reason = "test helpers")]

mod body;
mod captures;
mod npy;
mod pieces;
mod sglang;

use orchestrate_types::ModelShape;

/// A model shape with a vocabulary of arbitrary size.
fn shape(hidden_layers: usize, moe_layers: &[usize], experts: usize, top_k: usize) -> ModelShape {
    let moe_layers = moe_layers.to_vec();
    ModelShape { hidden_layers, moe_layers, experts, top_k, vocab: 100, context: 1000 }
}

/// `[rows, layers, k]` distinct ids that differ from row to row and layer to layer.
fn varied(shape: &ModelShape, rows: usize) -> Vec<u16> {
    let mut ids = Vec::new();
    for row in 0..rows {
        for layer in 0..shape.moe_layers.len() {
            for slot in 0..shape.top_k {
                let id = (row * 7 + layer * 3 + row * layer + slot) % shape.experts;
                ids.push(u16::try_from(id).unwrap());
            }
        }
    }
    ids
}

/// The wire form, written independently of `encode_sglang`.
fn wire(shape: &ModelShape, ids: &[u16]) -> Vec<u8> {
    let mut bytes = Vec::new();
    for row in ids.chunks(shape.ids_per_row()) {
        let mut cells = row.chunks(shape.top_k);
        for layer in 0..shape.hidden_layers {
            if shape.moe_layers.contains(&layer) {
                for &id in cells.next().unwrap() {
                    bytes.extend_from_slice(&i32::from(id).to_le_bytes());
                }
            } else {
                bytes.extend(std::iter::repeat_n(0u8, 4 * shape.top_k));
            }
        }
    }
    bytes
}

fn text(bytes: &[u8]) -> String {
    base64_simd::STANDARD.encode_to_string(bytes)
}

/// Plain base64 decoder, one character at a time; `None` for anything that is not canonical.
fn plain_base64(text: &[u8]) -> Option<Vec<u8>> {
    const ALPHABET: &[u8] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    if !text.len().is_multiple_of(4) {
        return None;
    }
    let padding = text.iter().rev().take_while(|&&c| c == b'=').count();
    if padding > 2 {
        return None;
    }
    let (mut bits, mut held, mut bytes) = (0u32, 0, Vec::new());
    for c in &text[..text.len() - padding] {
        let value = ALPHABET.iter().position(|known| known == c)?;
        bits = (bits << 6) | u32::try_from(value).unwrap();
        held += 6;
        if held >= 8 {
            held -= 8;
            bytes.push(u8::try_from((bits >> held) & 0xff).unwrap());
            bits &= (1 << held) - 1;
        }
    }
    // The remaining bits must be zero and match the padding.
    (bits == 0 && held == 2 * padding).then_some(bytes)
}

/// Plain conversion of wire ids `[rows, hidden layers, k]` to stored form; `None` for rows with an
/// invalid id or choice.
fn plain_rows(shape: &ModelShape, ids: &[i64]) -> Option<Vec<u8>> {
    let mut stored = Vec::new();
    for (cell, choice) in ids.chunks(shape.top_k).enumerate() {
        if !shape.moe_layers.contains(&(cell % shape.hidden_layers)) {
            if choice.iter().any(|&id| id != 0) {
                return None;
            }
            continue;
        }
        for (slot, &id) in choice.iter().enumerate() {
            let id = usize::try_from(id).ok().filter(|&id| id < shape.experts)?;
            if choice[..slot].iter().any(|&other| other == choice[slot]) {
                return None;
            }
            stored.extend_from_slice(&id.to_le_bytes()[..shape.id_bytes()]);
        }
    }
    Some(stored)
}
