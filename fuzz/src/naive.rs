//! Simple, slow decoders to compare with, written from the format descriptions.

use orchestrate_routing::{PayloadForm, RoutedRows, RoutingError};
use orchestrate_types::ModelShape;

pub const ALPHABET: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";

/// Value of each character; 64 for those that are not in [`ALPHABET`].
const VALUES: [u8; 256] = {
    let mut values = [64; 256];
    let mut value = 0;
    while value < 64 {
        values[ALPHABET[value] as usize] = value as u8;
        value += 1;
    }
    values
};

/// The bytes that a base64 text encodes; `None` for the bytes of an invalid group. `None` as a whole if
/// the length is not a multiple of four.
pub fn base64(text: &[u8]) -> Option<Vec<Option<u8>>> {
    if text.len() % 4 != 0 {
        return None;
    }
    let groups = text.len() / 4;
    let mut bytes = Vec::with_capacity(groups * 3);
    for (index, group) in text.chunks(4).enumerate() {
        let last = index + 1 == groups;
        let padding =
            if last { group.iter().rev().take(2).take_while(|&&c| c == b'=').count() } else { 0 };
        let mut word = 0u32;
        let mut valid = true;
        for &c in &group[..4 - padding] {
            let six = VALUES[usize::from(c)];
            valid &= six < 64;
            word = word << 6 | u32::from(six & 63);
        }
        word <<= 6 * padding;
        // Bits beyond the last byte must be zero.
        valid &= word & ((1 << (8 * padding)) - 1) == 0;
        for at in 0..3 - padding {
            bytes.push(valid.then_some((word >> (16 - 8 * at)) as u8));
        }
    }
    Some(bytes)
}

/// How ids are written.
#[derive(Debug, Clone, Copy)]
pub struct Ids {
    pub bytes: usize,
    pub signed: bool,
}

/// Contents of a payload: its form, and the ids `[moe layers, top_k]` of each row.
pub struct Verdict {
    pub form: PayloadForm,
    pub rows: Vec<Vec<i64>>,
}

/// Reads `found` rows that begin at byte `at`. Rows from `start` on were requested of a sequence of
/// `tokens` tokens.
pub fn rows(
    bytes: &[Option<u8>],
    at: usize,
    found: usize,
    ids: Ids,
    shape: &ModelShape,
    (start, tokens): (usize, usize),
) -> Option<Verdict> {
    let all = tokens.saturating_sub(1);
    let asked = all.saturating_sub(start);
    let (form, first) = if found == asked {
        (PayloadForm::Exact, 0)
    } else if found == asked + 1 && asked > 0 && start != 1 {
        (PayloadForm::SurplusRow, 0)
    } else if start > 1 && found == all {
        (PayloadForm::WholeSequence, start)
    } else {
        return None;
    };
    let mut rows = Vec::new();
    for row in first..first + asked {
        let mut stored = Vec::new();
        for layer in 0..shape.hidden_layers {
            let mut cell = Vec::new();
            for slot in 0..shape.top_k {
                let from =
                    at + ((row * shape.hidden_layers + layer) * shape.top_k + slot) * ids.bytes;
                let mut value = 0i64;
                for byte in (0..ids.bytes).rev() {
                    value = value << 8 | i64::from(bytes.get(from + byte).copied().flatten()?);
                }
                let bits = 8 * ids.bytes;
                if ids.signed && value >> (bits - 1) & 1 == 1 {
                    value -= 1 << bits;
                }
                cell.push(value);
            }
            if !shape.moe_layers.contains(&layer) {
                if cell.iter().any(|&id| id != 0) {
                    return None;
                }
                continue;
            }
            for (slot, &id) in cell.iter().enumerate() {
                if id < 0 || id >= shape.experts as i64 || cell[..slot].contains(&id) {
                    return None;
                }
            }
            stored.extend(cell);
        }
        rows.push(stored);
    }
    Some(Verdict { form, rows })
}

/// Whether a model can have rows at all.
pub fn usable(shape: &ModelShape) -> bool {
    !shape.moe_layers.is_empty() && shape.top_k >= 1 && shape.top_k <= shape.experts
}

/// Panics if the decoder accepted what the naive one rejects, or decoded it differently. With
/// `complete`, also if it rejected a valid payload.
pub fn compare(
    found: &Result<RoutedRows, RoutingError>,
    plain: Option<&Verdict>,
    shape: &ModelShape,
    start: usize,
    complete: bool,
) {
    match (found, plain) {
        (Err(_), None) => {}
        // A fault of the whole capture, in which every single row is valid.
        (Err(RoutingError::LayersIdentical { .. } | RoutingError::NotCaptured { .. }), Some(_)) => {
        }
        (Err(error), Some(_)) => assert!(!complete, "rejected a valid payload: {error}"),
        (Ok(_), None) => panic!("accepted an invalid payload"),
        (Ok(rows), Some(plain)) => {
            assert_eq!(
                (rows.form(), rows.start(), rows.rows()),
                (plain.form, start, plain.rows.len())
            );
            assert_eq!(rows.row_bytes(), shape.row_bytes());
            for (index, ids) in plain.rows.iter().enumerate() {
                let stored: Vec<u8> = ids
                    .iter()
                    .flat_map(|id| id.to_le_bytes().into_iter().take(shape.id_bytes()))
                    .collect();
                assert_eq!(rows.row(start + index), Some(stored.as_slice()), "row {index}");
            }
            assert_eq!(rows.row(start + plain.rows.len()), None);
            assert_eq!(
                rows.chunks().map(<[u8]>::len).sum::<usize>(),
                plain.rows.len() * shape.row_bytes()
            );
        }
    }
}

/// Reads a `.npy` header: offset of the data, id type, and the three dimensions. Lenient: it reads
/// everything that the strict parser accepts, with the same result.
pub fn npy_header(bytes: &[Option<u8>]) -> Option<(usize, Ids, [usize; 3])> {
    let bytes: Vec<u8> = bytes.iter().map_while(|byte| *byte).take(1 << 13).collect();
    let rest = bytes.strip_prefix(b"\x93NUMPY")?;
    let (preamble, length): (usize, usize) = match *rest {
        [1, 0, a, b, ..] => (10, usize::from(u16::from_le_bytes([a, b]))),
        [2 | 3, 0, a, b, c, d, ..] => (12, u32::from_le_bytes([a, b, c, d]) as usize),
        _ => return None,
    };
    let header = bytes.get(preamble..preamble.checked_add(length)?)?;
    let words: String = header
        .iter()
        .filter(|byte| !byte.is_ascii_whitespace())
        .map(|&byte| if byte == b'"' { '\'' } else { char::from(byte) })
        .collect();
    if !words.starts_with('{') || !words.ends_with('}') || !words.contains("'fortran_order':False")
    {
        return None;
    }
    let after = |key: &str| words.split_once(key).map(|(_, rest)| rest);
    let ids = match after("'descr':'")?.split_once('\'')?.0 {
        "|u1" | "<u1" => Ids { bytes: 1, signed: false },
        "<u2" => Ids { bytes: 2, signed: false },
        "<i2" => Ids { bytes: 2, signed: true },
        "<i4" => Ids { bytes: 4, signed: true },
        _ => return None,
    };
    let (inside, _) = after("'shape':(")?.split_once(')')?;
    let mut dims = inside.strip_suffix(',').unwrap_or(inside).split(',').map(str::parse);
    let shape = [dims.next()?.ok()?, dims.next()?.ok()?, dims.next()?.ok()?];
    dims.next().is_none().then_some((preamble + length, ids, shape))
}
