//! Decodes the base64 text of a reply into validated rows, in one pass.
//!
//! The text is decoded in blocks that fit the L1 cache; each block is narrowed into its final piece
//! and checked while it is cached. Only the requested rows are decoded, even if the engine sent the
//! whole sequence: base64 can be decoded from every third byte on.

use crate::base64::{self, GROUP_BYTES, GROUP_CHARS};
use crate::check::{LayerWatch, check_shape, explain};
use crate::kernels::{Repeats, WireId, any_above, any_set, narrow};
use crate::npy::{self, NpyHeader};
use crate::rows::PieceWriter;
use crate::{PayloadForm, RoutedRows, RoutingError};
use orchestrate_types::ModelShape;
use std::ops::Range;

/// Wire bytes decoded at a time. Together with their text and their narrowed form they fit an L1 cache
/// of 48 KiB.
const SCRATCH_BYTES: usize = 16 << 10;

/// Wire format of routed experts. Both formats have a part for every hidden layer, zeros for dense
/// ones, in row-major order `[rows, hidden layers, top_k]`, little-endian.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum WireForm {
    /// SGLang, `meta_info.routed_experts` and `sglext.routed_experts`: base64 of plain int32.
    SglangI32,
    /// vLLM, `choices[i].routed_experts`: base64 of a `.npy` file; its header gives the id type
    /// (`u1`, `u2`, `i2` or `i4`) and the number of rows.
    VllmNpy,
}

/// Decodes the routed experts of a reply whose prompt and output have `tokens_total` tokens and
/// for which rows from position `start` on were requested; `base64` is borrowed from the body.
///
/// The payload should have `tokens_total − 1 − start` rows. Two known deviations are accepted and
/// reported by [`RoutedRows::form`]: one surplus row at the end, and all rows from position 0.
/// Dense layers are dropped and ids are narrowed to the model's width. The length is checked before
/// anything is allocated.
///
/// # Errors
/// [`RoutingError`], with the absolute position and global layer, if the length, the header, the text
/// or any id is invalid. Missing rows are never padded.
pub fn decode(
    form: WireForm,
    base64: &[u8],
    shape: &ModelShape,
    start: usize,
    tokens_total: usize,
) -> Result<RoutedRows, RoutingError> {
    check_shape(shape)?;
    if start > tokens_total {
        return Err(RoutingError::StartBeyondEnd { start, tokens: tokens_total });
    }
    let asked = Asked { start, all: tokens_total.saturating_sub(1) };
    let text = Base64Text::new(base64);
    let payload = match form {
        WireForm::SglangI32 => sglang_payload(&text, shape, asked)?,
        WireForm::VllmNpy => npy_payload(&text, shape, asked)?,
    };
    decode_rows(&text, &payload, shape, asked)
}

/// Which rows were requested.
#[derive(Clone, Copy)]
struct Asked {
    /// First requested position.
    start: usize,
    /// Number of rows of the whole sequence.
    all: usize,
}

impl Asked {
    fn rows(self) -> usize {
        self.all.saturating_sub(self.start)
    }

    /// Form of a payload of `found` rows, and the index of the first requested row in it.
    fn classify(self, found: usize) -> Result<(PayloadForm, usize), Mismatch> {
        let rows = self.rows();
        if found == rows {
            return Ok((PayloadForm::Exact, 0));
        }
        // With start 1, one surplus row fits both deviations; a guess could misplace rows.
        if self.start == 1 && found == rows + 1 {
            return Err(Mismatch::Ambiguous);
        }
        if found == rows + 1 && rows > 0 {
            return Ok((PayloadForm::SurplusRow, 0));
        }
        if self.start > 1 && found == self.all {
            return Ok((PayloadForm::WholeSequence, self.start));
        }
        Err(Mismatch::Rows)
    }
}

/// Why a number of rows does not match any known form.
enum Mismatch {
    Ambiguous,
    Rows,
}

const AMBIGUOUS: &str = "; it may start at 0 or end one row late, which start 1 cannot tell apart";

/// Location and type of the rows in the decoded bytes.
struct Payload {
    form: PayloadForm,
    ids: WireId,
    /// Byte offset of the first requested row.
    at: usize,
}

fn sglang_payload(
    text: &Base64Text<'_>,
    shape: &ModelShape,
    asked: Asked,
) -> Result<Payload, RoutingError> {
    let row_bytes = shape.hidden_layers * shape.top_k * 4;
    let rows = asked.rows();
    let whole = text.decoded.is_multiple_of(row_bytes) && text.is_whole();
    let hint = match whole.then(|| asked.classify(text.decoded / row_bytes)) {
        Some(Ok((form, first))) => {
            return Ok(Payload { form, ids: WireId::I32, at: first * row_bytes });
        }
        Some(Err(Mismatch::Ambiguous)) => AMBIGUOUS,
        Some(Err(Mismatch::Rows)) | None => {
            let is = |ids: usize| rows > 0 && Some(text.decoded) == (rows * 4).checked_mul(ids);
            if !text.is_whole() {
                "; it is truncated or not padded"
            } else if (1..=4).any(|more| is(shape.hidden_layers * (shape.top_k + more))) {
                "; it has more columns than top-k: serve with --disable-shared-experts-fusion"
            } else if is(shape.moe_layers.len() * shape.top_k) {
                "; it has only the MoE layers, but a part for every hidden layer is expected"
            } else {
                ""
            }
        }
    };
    Err(RoutingError::Length {
        found: text.chars.len(),
        expected: rows.saturating_mul(row_bytes).div_ceil(3).saturating_mul(4),
        rows,
        layers: shape.hidden_layers,
        top_k: shape.top_k,
        hint,
    })
}

fn npy_payload(
    text: &Base64Text<'_>,
    shape: &ModelShape,
    asked: Asked,
) -> Result<Payload, RoutingError> {
    if !text.is_whole() {
        return Err(RoutingError::Npy("its base64 text is truncated or not padded"));
    }
    let mut scratch = Vec::new();
    let head = text
        .decode(0..text.decoded.min(npy::MAX_HEADER_BYTES), &mut scratch)
        .ok_or(RoutingError::Npy("its base64 text is invalid in the header"))?;
    let NpyHeader { data_at, ids, dims } = npy::parse(head)?;
    let [found, layers, top_k] = dims;
    let hint = if (layers, top_k) == (shape.hidden_layers, shape.top_k) {
        match asked.classify(found) {
            Ok((form, first)) => {
                if ids.bytes() < shape.id_bytes() {
                    return Err(RoutingError::Npy("ids of one byte cannot represent all experts"));
                }
                let row_bytes = layers * top_k * ids.bytes();
                // `decoded` comes from a text in memory, so neither side overflows.
                if found.checked_mul(row_bytes).and_then(|bytes| bytes.checked_add(data_at))
                    != Some(text.decoded)
                {
                    return Err(RoutingError::Npy("its length does not match its header"));
                }
                return Ok(Payload { form, ids, at: data_at + first * row_bytes });
            }
            Err(Mismatch::Ambiguous) => AMBIGUOUS,
            Err(Mismatch::Rows) => "",
        }
    } else if top_k > shape.top_k {
        "; it has more columns than top-k: serve without fused shared experts"
    } else if layers == shape.moe_layers.len() {
        "; it has only the MoE layers, but a part for every hidden layer is expected"
    } else {
        "; it belongs to another model"
    };
    Err(RoutingError::NpyShape {
        found: dims,
        rows: asked.rows(),
        layers: shape.hidden_layers,
        top_k: shape.top_k,
        hint,
    })
}

fn decode_rows(
    text: &Base64Text<'_>,
    payload: &Payload,
    shape: &ModelShape,
    asked: Asked,
) -> Result<RoutedRows, RoutingError> {
    let narrower = Narrower::new(payload.ids, shape);
    let wire_row = narrower.wire_row;
    let block_rows = (SCRATCH_BYTES / wire_row).clamp(1, crate::BLOCK_ROWS);
    let rows = asked.rows();
    let mut scratch = Vec::new();
    let mut watch = LayerWatch::new(shape, asked.start);
    let mut pieces = PieceWriter::new(asked.start, rows, shape.row_bytes());
    let mut at = payload.at;
    let mut position = asked.start;
    while let Some(piece) = pieces.next_piece() {
        let end = position + piece.rows;
        while position < end {
            let count = block_rows.min(end - position);
            let range = at..at + count * wire_row;
            let stored = if narrower.copies() {
                let before = piece.bytes.len();
                text.append(range, piece.bytes).ok_or(RoutingError::Base64 { position })?;
                let stored = piece.bytes.get(before..).unwrap_or_default();
                narrower.check(stored, position)?;
                stored
            } else if narrower.keeps_lowest_bytes() && base64::takes_low_bytes() {
                let before = piece.bytes.len();
                let is_wide = text
                    .append_low_bytes(range.clone(), piece.bytes, &mut scratch)
                    .ok_or(RoutingError::Base64 { position })?;
                let stored = piece.bytes.get(before..).unwrap_or_default();
                if is_wide || narrower.is_suspicious(stored) {
                    let wire = text.decode(range, &mut scratch);
                    explain(wire.unwrap_or_default(), payload.ids, shape, position)?;
                }
                stored
            } else {
                let wire =
                    text.decode(range, &mut scratch).ok_or(RoutingError::Base64 { position })?;
                narrower.rows(wire, position, piece.bytes)?
            };
            watch.observe(stored);
            at += count * wire_row;
            position += count;
        }
    }
    watch.finish()?;
    Ok(pieces.finish(payload.form))
}

/// Narrows and checks whole wire rows.
struct Narrower<'a> {
    shape: &'a ModelShape,
    ids: WireId,
    wire_row: usize,
    repeats: Repeats,
    /// Runs of consecutive layers of one kind, in order; together they make up a row. A model without
    /// dense layers has a single run.
    runs: Vec<Run>,
}

struct Run {
    moe: bool,
    wire_bytes: usize,
}

impl<'a> Narrower<'a> {
    fn new(ids: WireId, shape: &'a ModelShape) -> Self {
        let cell = shape.top_k * ids.bytes();
        let mut runs: Vec<Run> = Vec::new();
        let mut moe_layers = shape.moe_layers.iter().copied().peekable();
        for layer in 0..shape.hidden_layers {
            let moe = moe_layers.next_if_eq(&layer).is_some();
            match runs.last_mut() {
                Some(run) if run.moe == moe => run.wire_bytes += cell,
                Some(_) | None => runs.push(Run { moe, wire_bytes: cell }),
            }
        }
        let wire_row = shape.hidden_layers * cell;
        Self { shape, ids, wire_row, repeats: Repeats::new(shape), runs }
    }

    /// Whether the stored form equals the wire form.
    fn copies(&self) -> bool {
        let same = match self.ids {
            WireId::U8 => self.shape.id_bytes() == 1,
            WireId::U16 => self.shape.id_bytes() == 2,
            WireId::I16 | WireId::I32 => false,
        };
        same && matches!(*self.runs, [Run { moe: true, .. }])
    }

    /// Whether the stored form is the lowest byte of each word of 32 bits.
    fn keeps_lowest_bytes(&self) -> bool {
        self.ids == WireId::I32
            && self.shape.id_bytes() == 1
            && matches!(*self.runs, [Run { moe: true, .. }])
    }

    /// Whether stored rows may have an id that is out of range or repeated.
    fn is_suspicious(&self, stored: &[u8]) -> bool {
        any_above(stored, self.shape.id_bytes(), self.shape.experts - 1) || self.repeats.any(stored)
    }

    /// Checks rows whose stored form equals the wire form; the first has absolute position `position`.
    fn check(&self, stored: &[u8], position: usize) -> Result<(), RoutingError> {
        if self.is_suspicious(stored) {
            explain(stored, self.ids, self.shape, position)?;
        }
        Ok(())
    }

    /// Appends the MoE layers of whole wire rows to `bytes`, which has the capacity, and returns the
    /// appended part. The first row has absolute position `position`.
    fn rows<'b>(
        &self,
        wire: &[u8],
        position: usize,
        bytes: &'b mut Vec<u8>,
    ) -> Result<&'b [u8], RoutingError> {
        let before = bytes.len();
        let added = wire.len() / self.wire_row * self.shape.row_bytes();
        bytes.resize(before + added, 0);
        let stored = bytes.get_mut(before..).unwrap_or_default();
        let (width, limit) = (self.shape.id_bytes(), self.shape.experts - 1);
        let mut suspicious = false;
        if let [Run { moe: true, .. }] = *self.runs {
            suspicious |= narrow(self.ids, wire, width, stored, limit);
        } else {
            let mut wire = wire;
            let mut rest = &mut *stored;
            while !wire.is_empty() {
                for run in &self.runs {
                    let (part, later) = wire.split_at(run.wire_bytes.min(wire.len()));
                    wire = later;
                    if run.moe {
                        let ids = part.len() / self.ids.bytes();
                        let (out, later) = std::mem::take(&mut rest).split_at_mut(ids * width);
                        rest = later;
                        suspicious |= narrow(self.ids, part, width, out, limit);
                    } else {
                        suspicious |= any_set(part);
                    }
                }
            }
        }
        suspicious |= self.repeats.any(stored);
        if suspicious {
            explain(wire, self.ids, self.shape, position)?;
        }
        Ok(stored)
    }
}

/// A base64 text that can be decoded in parts.
struct Base64Text<'a> {
    chars: &'a [u8],
    /// Decoded length in bytes, assuming valid padding.
    decoded: usize,
}

impl<'a> Base64Text<'a> {
    fn new(chars: &'a [u8]) -> Self {
        let padding = chars.iter().rev().take(2).take_while(|&&c| c == b'=').count();
        let decoded = (chars.len() / GROUP_CHARS * GROUP_BYTES).saturating_sub(padding);
        Self { chars, decoded }
    }

    fn is_whole(&self) -> bool {
        self.chars.len().is_multiple_of(GROUP_CHARS)
    }

    /// Decodes the bytes `range` into `scratch` and returns them. `None` if one of their groups is not
    /// standard padded base64.
    fn decode<'b>(&self, range: Range<usize>, scratch: &'b mut Vec<u8>) -> Option<&'b [u8]> {
        let groups = range.start / GROUP_BYTES..range.end.div_ceil(GROUP_BYTES);
        let lead = range.start - groups.start * GROUP_BYTES;
        scratch.clear();
        self.append_groups(groups, scratch)?;
        scratch.get(lead..lead + range.len())
    }

    /// Like [`Base64Text::decode`], but appends to `out`; whole groups are decoded directly into it.
    fn append(&self, range: Range<usize>, out: &mut Vec<u8>) -> Option<()> {
        let first = range.start.next_multiple_of(GROUP_BYTES).min(range.end);
        let last = (range.end - range.end % GROUP_BYTES).max(first);
        let mut scratch = Vec::with_capacity(GROUP_BYTES);
        out.extend_from_slice(self.decode(range.start..first, &mut scratch)?);
        self.append_groups(first / GROUP_BYTES..last / GROUP_BYTES, out)?;
        out.extend_from_slice(self.decode(last..range.end, &mut scratch)?);
        Some(())
    }

    /// Appends the lowest byte of each word of 32 bits in `range` to `out`. Returns whether any other byte is
    /// set, and `None` as [`Base64Text::decode`].
    fn append_low_bytes(
        &self,
        range: Range<usize>,
        out: &mut Vec<u8>,
        scratch: &mut Vec<u8>,
    ) -> Option<bool> {
        // Words and groups begin together only at every 12th byte, and not at all in a text whose ids
        // begin within a word.
        const TOGETHER: usize = 4 * GROUP_BYTES;
        let first = if range.start.is_multiple_of(4) {
            range.start.next_multiple_of(TOGETHER).min(range.end)
        } else {
            range.end
        };
        let last = first + (range.end - first) / base64::WORDS_BYTES * base64::WORDS_BYTES;
        let mut is_wide = false;
        let mut decoded = |range: Range<usize>, out: &mut Vec<u8>| {
            let words = self.decode(range, scratch)?.as_chunks::<4>().0;
            is_wide |= words.iter().any(|[_, others @ ..]| *others != [0; 3]);
            out.extend(words.iter().map(|[lowest, ..]| lowest));
            Some(())
        };
        decoded(range.start..first, out)?;
        let chars = first / GROUP_BYTES * GROUP_CHARS..last / GROUP_BYTES * GROUP_CHARS;
        let blocks = base64::append_low_bytes(self.chars.get(chars)?, out)?;
        decoded(last..range.end, out)?;
        Some(is_wide | blocks)
    }

    fn append_groups(&self, groups: Range<usize>, out: &mut Vec<u8>) -> Option<()> {
        let promised = self.decoded.min(groups.end * GROUP_BYTES) - groups.start * GROUP_BYTES;
        let before = out.len();
        base64::append(self.chars.get(groups.start * GROUP_CHARS..groups.end * GROUP_CHARS)?, out)?;
        // Padding in the middle of the text yields fewer bytes than its length implies.
        (out.len() - before == promised).then_some(())
    }
}
