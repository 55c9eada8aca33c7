//! Valid inputs with a few changes: purely random bytes never get past a length check.

use libfuzzer_sys::arbitrary::{self, Arbitrary};
use orchestrate_types::ModelShape;

/// A small model, with expert counts at the limits of id widths.
#[derive(Debug, Clone, Arbitrary)]
pub struct Model {
    hidden: u8,
    moe: u16,
    experts: u8,
    top_k: u8,
    odd: u8,
}

impl Model {
    /// Its shape; one in thirty-two is invalid.
    pub fn shape(&self) -> ModelShape {
        const EXPERTS: [usize; 16] =
            [1, 2, 3, 4, 8, 12, 16, 64, 127, 128, 255, 256, 257, 300, 512, 65_536];
        let hidden_layers = 1 + usize::from(self.hidden) % 8;
        let experts = EXPERTS[usize::from(self.experts) % EXPERTS.len()];
        let mut moe_layers: Vec<usize> =
            (0..hidden_layers).filter(|layer| self.moe >> layer & 1 == 1).collect();
        let odd = self.odd % 32 == 31;
        if moe_layers.is_empty() && !odd {
            moe_layers = (0..hidden_layers).collect();
        }
        let top_k = usize::from(self.top_k);
        let top_k = if odd { top_k % 20 } else { 1 + top_k % experts.min(9) };
        ModelShape { hidden_layers, moe_layers, experts, top_k, vocab: 1000, context: 4096 }
    }
}

/// One generation and the rows sent for it.
#[derive(Debug, Clone, Arbitrary)]
pub struct Sent {
    rows: u8,
    start: u16,
    /// 0: all rows; 1: one too many; 2: one too few; otherwise exactly those requested.
    deviation: u8,
    seed: u32,
    ids: Vec<(u8, u8, u8, i32)>,
}

impl Sent {
    /// First position requested.
    pub fn start(&self) -> usize {
        // Reaches into the second block of 64 rows.
        usize::from(self.start) % 72
    }

    /// Number of tokens after the generation.
    pub fn tokens(&self) -> usize {
        self.start() + usize::from(self.rows) % 16 + usize::from(self.seed % 16 != 0)
    }

    /// Rows in the payload.
    pub fn sent_rows(&self) -> usize {
        let asked = self.tokens().saturating_sub(1).saturating_sub(self.start());
        match self.deviation % 8 {
            0 => self.tokens().saturating_sub(1),
            1 => asked + 1,
            2 => asked.saturating_sub(1),
            _ => asked,
        }
    }

    /// Ids as an engine would send them, `[rows, hidden layers, top_k]`, except for those changed.
    pub fn wire_ids(&self, shape: &ModelShape) -> Vec<i32> {
        let mut state = u64::from(self.seed) << 1 | 1;
        let mut next = || {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            (state >> 33) as usize
        };
        let k = shape.top_k;
        let mut ids = vec![0; self.sent_rows() * shape.hidden_layers * k];
        if k == 0 {
            return ids;
        }
        for (cell, out) in ids.chunks_exact_mut(k).enumerate() {
            if !shape.moe_layers.contains(&(cell % shape.hidden_layers)) {
                continue;
            }
            // An arithmetic progression modulo E repeats no id within its first E terms.
            let (first, step) = (next() % shape.experts, 1 + 2 * (next() % 4));
            let step = if shape.experts % step == 0 { 1 } else { step };
            for (slot, id) in out.iter_mut().enumerate() {
                *id = ((first + slot * step) % shape.experts) as i32;
            }
        }
        let length = ids.len();
        for &(row, layer, slot, value) in self.ids.iter().take(4) {
            let cell = usize::from(row) * shape.hidden_layers + usize::from(layer) % 8;
            let at = cell * k + usize::from(slot) % k;
            if at < length {
                // Mostly near the limit of what is allowed.
                ids[at] = if value % 4 == 0 { value } else { value % 4 + shape.experts as i32 - 1 };
            }
        }
        ids
    }
}

/// Rows in stored form, `[rows, moe layers, top_k]`, that repeat after `period` rows (0: never).
pub fn rows(shape: &ModelShape, rows: usize, seed: u32, period: usize) -> Vec<u8> {
    let mut stored: Vec<u8> = Vec::with_capacity(rows * shape.row_bytes());
    let mut state = u64::from(seed) << 1 | 1;
    for row in 0..rows {
        if period > 0 && row >= period {
            let at = (row - period) * shape.row_bytes();
            stored.extend_from_within(at..at + shape.row_bytes());
            continue;
        }
        for _ in &shape.moe_layers {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            let first = (state >> 33) as usize;
            for slot in 0..shape.top_k {
                let id = (first + slot) % shape.experts;
                stored.extend(id.to_le_bytes().iter().take(shape.id_bytes()));
            }
        }
    }
    stored
}

/// Draws numbers below their argument from bytes; 0 once there are no more.
pub fn draws(bytes: &[u8]) -> impl FnMut(usize) -> usize {
    let mut bytes = bytes.iter();
    move |below| usize::from(bytes.next().copied().unwrap_or(0)) % below.max(1)
}

/// One change of bytes.
#[derive(Debug, Clone, Arbitrary)]
pub enum Change {
    Set(u16, u8),
    Flip(u16, u8),
    Insert(u16, u8),
    Remove(u16),
    Cut(u16),
    Repeat(u16, u8),
}

/// Changes `bytes` in a few places.
pub fn change(bytes: &mut Vec<u8>, changes: &[Change]) {
    for change in changes.iter().take(8) {
        let (Change::Set(at, _)
        | Change::Flip(at, _)
        | Change::Insert(at, _)
        | Change::Remove(at)
        | Change::Cut(at)
        | Change::Repeat(at, _)) = *change;
        let at = usize::from(at) % (bytes.len() + 1);
        match *change {
            Change::Insert(_, byte) => bytes.insert(at, byte),
            Change::Cut(_) => bytes.truncate(at),
            Change::Repeat(_, count) => {
                let end = (at + usize::from(count)).min(bytes.len());
                bytes.extend_from_within(at..end);
            }
            Change::Set(..) | Change::Flip(..) | Change::Remove(_) if at == bytes.len() => {}
            Change::Set(_, byte) => bytes[at] = byte,
            Change::Flip(_, bits) => bytes[at] ^= bits,
            Change::Remove(_) => {
                bytes.remove(at);
            }
        }
    }
}

/// Standard padded base64.
pub fn base64(bytes: &[u8]) -> Vec<u8> {
    let mut text = Vec::with_capacity(bytes.len().div_ceil(3) * 4);
    for group in bytes.chunks(3) {
        let word =
            group.iter().fold(0u32, |word, &b| word << 8 | u32::from(b)) << (8 * (3 - group.len()));
        for at in 0..4 {
            let six = (word >> (18 - 6 * at) & 63) as usize;
            text.push(if at <= group.len() { crate::naive::ALPHABET[six] } else { b'=' });
        }
    }
    text
}
