//! Conversations drawn from a seed, and the reply bodies that an engine would send for them.

use base64_simd::STANDARD;
use orchestrate_routing::WireForm;
use orchestrate_types::ModelShape;
use rand::{RngExt as _, SeedableRng as _};
use rand_chacha::ChaCha8Rng;
use std::io::Write as _;
use std::ops::Range;
use std::sync::Arc;

/// Raw bytes encoded at a time, a multiple of three.
const ENCODE_BYTES: usize = 48 << 10;

/// Wire format of rows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Wire {
    /// SGLang: base64 of little-endian int32.
    SglangI32,
    /// vLLM up to 256 experts: base64 of a `.npy` file of bytes.
    VllmU8,
    /// vLLM with more experts: base64 of a `.npy` file of little-endian 16-bit ids.
    VllmU16,
}

impl Wire {
    pub(super) fn form(self) -> WireForm {
        match self {
            Self::SglangI32 => WireForm::SglangI32,
            Self::VllmU8 | Self::VllmU16 => WireForm::VllmNpy,
        }
    }
}

/// Which rows the engine sends in each turn.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Mode {
    /// Rows from the last one held.
    Delta,
    /// All rows from position 0, whatever was requested.
    Full,
}

/// Sizes of one conversation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Size {
    pub(super) tokens: usize,
    pub(super) turns: usize,
    pub(super) layers: usize,
    pub(super) experts: usize,
    pub(super) top_k: usize,
}

impl Size {
    pub(super) fn shape(&self) -> ModelShape {
        ModelShape {
            hidden_layers: self.layers,
            moe_layers: (0..self.layers).collect(),
            experts: self.experts,
            top_k: self.top_k,
            vocab: VOCAB as usize,
            context: self.tokens,
        }
    }
}

/// Vocabulary size of the drawn token ids, as large as that of current models.
pub(super) const VOCAB: u32 = 151_936;

/// One generation: the sequence has `prompt` tokens before it and `total` tokens after it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Turn {
    pub(super) prompt: usize,
    pub(super) total: usize,
}

/// A conversation of `T` tokens and the rows its engine chose.
#[derive(Debug)]
pub(super) struct Conversation {
    pub(super) shape: Arc<ModelShape>,
    pub(super) turns: Vec<Turn>,
    /// Rows `[T − 1, layers, top_k]` in stored form.
    pub(super) rows: Vec<u8>,
}

impl Conversation {
    /// Draws a conversation of equal turns, half observation and half generation.
    pub(super) fn draw(size: &Size, seed: u64) -> Self {
        Self::draw_after(size, 0, &[], seed)
    }

    /// Draws a conversation that starts with a prompt of `prompt` tokens, whose rows are at the start
    /// of `shared`; equal turns follow. With `prompt = 0`, the first turn contains one.
    pub(super) fn draw_after(size: &Size, prompt: usize, shared: &[u8], seed: u64) -> Self {
        let shape = Arc::new(size.shape());
        let mut turns = Vec::with_capacity(size.turns);
        let mut before = prompt;
        for turn in 1..=size.turns {
            let total = prompt + (size.tokens - prompt) * turn / size.turns;
            let observed = if before == prompt && prompt > 0 { 0 } else { (total - before) / 2 };
            turns.push(Turn { prompt: before + observed, total });
            before = total;
        }
        let (row_bytes, all) = (shape.row_bytes(), size.tokens.saturating_sub(1));
        let mut rows = shared.get(..prompt.min(all) * row_bytes).unwrap_or_default().to_vec();
        rows.extend(draw_rows(&shape, all - rows.len() / row_bytes, seed));
        Self { shape, turns, rows }
    }

    /// Size of a correct mask, in bytes.
    pub(super) fn mask_bytes(&self) -> u64 {
        self.rows.len() as u64
    }

    /// Overwrites `body` with the reply to `turn`, with rows from position `start`; returns the range
    /// of the base64 text.
    pub(super) fn write_reply(
        &self,
        wire: Wire,
        turn: Turn,
        start: usize,
        body: &mut Vec<u8>,
    ) -> anyhow::Result<Range<usize>> {
        body.clear();
        let row_bytes = self.shape.row_bytes();
        let rows = self
            .rows
            .get(start * row_bytes..turn.total.saturating_sub(1) * row_bytes)
            .unwrap_or_default();
        match wire {
            Wire::SglangI32 => write_sglang(&self.shape, turn, rows, body),
            Wire::VllmU8 | Wire::VllmU16 => write_vllm(&self.shape, wire, turn, rows, body),
        }
    }
}

/// Rows of ids in stored form, drawn uniformly and distinct within a layer.
fn draw_rows(shape: &ModelShape, rows: usize, seed: u64) -> Vec<u8> {
    let mut random = ChaCha8Rng::seed_from_u64(seed);
    let experts = u32::try_from(shape.experts).unwrap_or(u32::MAX);
    let mut data = Vec::with_capacity(rows * shape.row_bytes());
    let mut cell: Vec<u32> = Vec::with_capacity(shape.top_k);
    for _ in 0..rows * shape.moe_layers.len() {
        cell.clear();
        while cell.len() < shape.top_k.min(shape.experts) {
            let id = random.random_range(0..experts);
            if !cell.contains(&id) {
                cell.push(id);
                data.extend(id.to_le_bytes().iter().take(shape.id_bytes()));
            }
        }
    }
    data
}

/// The fields of a `/generate` reply in the engine's order; the mask is near the end.
fn write_sglang(
    shape: &ModelShape,
    turn: Turn,
    rows: &[u8],
    body: &mut Vec<u8>,
) -> anyhow::Result<Range<usize>> {
    let (prompt, outputs) = (turn.prompt, turn.total - turn.prompt);
    body.extend_from_slice(b"{\"text\":\"");
    for _ in 0..outputs {
        body.extend_from_slice(b" tok");
    }
    body.extend_from_slice(b"\",\"output_ids\":[");
    for_each_output(turn, body, |body, _, id| write!(body, "{id}"))?;
    write!(
        body,
        "],\"meta_info\":{{\"id\":\"5e56db09df74417b929322ad7b7faea7\",\"finish_reason\":\
         {{\"type\":\"stop\",\"matched\":2}},\"prompt_tokens\":{prompt},\"weight_version\":\"0\",\
         \"num_retractions\":0,\"input_token_logprobs\":[],\"output_token_logprobs\":["
    )?;
    for_each_output(turn, body, |body, at, id| {
        write!(body, "[-{}.{:06},{id},null]", at % 4, at * 7919 % 1_000_000)
    })?;
    write!(
        body,
        "],\"completion_tokens\":{outputs},\"cached_tokens\":{},\"weight_versions\":[{{\
         \"version\":\"0\",\"start\":0,\"end\":{outputs}}}],\"routed_experts\":\"",
        prompt.saturating_sub(1)
    )?;
    let begin = body.len();
    let mut text = Base64::new(body);
    let mut wire = Vec::with_capacity(4 * shape.ids_per_row());
    for row in rows.chunks_exact(shape.row_bytes()) {
        wire.clear();
        for id in row.chunks_exact(shape.id_bytes()) {
            let mut word = [0; 4];
            word.iter_mut().zip(id).for_each(|(to, from)| *to = *from);
            wire.extend_from_slice(&word);
        }
        text.push(&wire);
    }
    text.finish();
    let payload = begin..body.len();
    body.extend_from_slice(b"\",\"dp_rank\":null,\"e2e_latency\":0.10995077100005801}}");
    Ok(payload)
}

/// The fields of a `/inference/v1/generate` reply in the engine's order; log-probs follow the mask.
fn write_vllm(
    shape: &ModelShape,
    wire: Wire,
    turn: Turn,
    rows: &[u8],
    body: &mut Vec<u8>,
) -> anyhow::Result<Range<usize>> {
    let (prompt, outputs) = (turn.prompt, turn.total - turn.prompt);
    write!(
        body,
        "{{\"request_id\":\"generate-tokens-b7a7746b92d1edf1\",\"model\":\"m\",\"created\":\
         1795171588,\"usage\":{{\"prompt_tokens\":{prompt},\"total_tokens\":{},\
         \"completion_tokens\":{outputs},\"prompt_tokens_details\":{{\"cached_tokens\":{}}}}},\
         \"prompt_logprobs\":null,\"kv_transfer_params\":null,\"choices\":[{{\"index\":0,\
         \"finish_reason\":\"stop\",\"stop_reason\":2,\"token_ids\":[",
        turn.total,
        prompt.saturating_sub(1)
    )?;
    for_each_output(turn, body, |body, _, id| write!(body, "{id}"))?;
    body.extend_from_slice(b"],\"routed_experts\":\"");
    let begin = body.len();
    let mut text = Base64::new(body);
    text.push(&npy_header(shape, wire, rows.len() / shape.row_bytes()));
    rows.chunks(ENCODE_BYTES).for_each(|part| text.push(part));
    text.finish();
    let payload = begin..body.len();
    write!(
        body,
        "\",\"sampling_mask\":null,\"weight_versions\":[{{\"version\":\"0\",\"start\":0,\"end\":\
         {outputs}}}],\"logprobs\":{{\"content\":["
    )?;
    for_each_output(turn, body, |body, at, id| {
        let logprob = at * 7919 % 1_000_000;
        write!(
            body,
            "{{\"token_id\":{id},\"logprob\":-0.{logprob:06},\"rank\":1,\"top_logprobs\":\
             [{{\"token_id\":{id},\"logprob\":-0.{logprob:06},\"rank\":1}}]}}"
        )
    })?;
    body.extend_from_slice(b"]}}]}");
    Ok(payload)
}

/// Calls `write` for position and id of each sampled token of `turn`, separated by commas.
fn for_each_output(
    turn: Turn,
    body: &mut Vec<u8>,
    write: impl Fn(&mut Vec<u8>, usize, usize) -> std::io::Result<()>,
) -> std::io::Result<()> {
    for at in turn.prompt..turn.total {
        if at > turn.prompt {
            body.push(b',');
        }
        write(body, at, at * 7919 % VOCAB as usize)?;
    }
    Ok(())
}

/// Magic, version and header length of a `.npy` file.
const PREAMBLE: usize = 10;

/// The header of a `.npy` file in format 1.0, padded to 64 bytes.
fn npy_header(shape: &ModelShape, wire: Wire, rows: usize) -> Vec<u8> {
    let descr = if wire == Wire::VllmU16 { "<u2" } else { "|u1" };
    let dictionary = format!(
        "{{'descr': '{descr}', 'fortran_order': False, 'shape': ({rows}, {}, {}), }}",
        shape.hidden_layers, shape.top_k
    );
    let length = (PREAMBLE + dictionary.len() + 1).next_multiple_of(64) - PREAMBLE;
    let mut header = b"\x93NUMPY\x01\x00".to_vec();
    header.extend(u16::try_from(length).unwrap_or(u16::MAX).to_le_bytes());
    header.extend(dictionary.bytes());
    header.resize(PREAMBLE + length - 1, b' ');
    header.push(b'\n');
    header
}

/// Appends base64 text to a body, from chunks of any length.
struct Base64<'a> {
    pending: Vec<u8>,
    out: &'a mut Vec<u8>,
}

impl<'a> Base64<'a> {
    fn new(out: &'a mut Vec<u8>) -> Self {
        Self { pending: Vec::with_capacity(2 * ENCODE_BYTES), out }
    }

    fn push(&mut self, bytes: &[u8]) {
        self.pending.extend_from_slice(bytes);
        let whole = self.pending.len() / ENCODE_BYTES * ENCODE_BYTES;
        if let Some(ready) = self.pending.get(..whole).filter(|ready| !ready.is_empty()) {
            STANDARD.encode_append(ready, self.out);
            self.pending.drain(..whole);
        }
    }

    fn finish(self) {
        STANDARD.encode_append(&self.pending, self.out);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SIZE: Size = Size { tokens: 200, turns: 3, layers: 3, experts: 12, top_k: 4 };

    #[test]
    fn conversation_depends_only_on_its_seed() {
        let conversation = Conversation::draw(&SIZE, 7);
        assert_eq!(conversation.rows, Conversation::draw(&SIZE, 7).rows);
        assert_ne!(conversation.rows, Conversation::draw(&SIZE, 8).rows);
        assert_eq!(conversation.rows.len(), 199 * 12);
        assert_eq!(conversation.turns.last(), Some(&Turn { prompt: 166, total: 200 }));
    }

    #[test]
    fn replies_are_json_with_the_requested_rows() {
        let conversation = Conversation::draw(&SIZE, 7);
        let (turn, mut body) = (conversation.turns[1], Vec::new());
        for (wire, pointer, width) in [
            (Wire::SglangI32, "/meta_info/routed_experts", 4),
            (Wire::VllmU8, "/choices/0/routed_experts", 1),
        ] {
            let payload = conversation.write_reply(wire, turn, 60, &mut body).unwrap();
            let reply: serde_json::Value = serde_json::from_slice(&body).unwrap();
            let text = reply.pointer(pointer).unwrap().as_str().unwrap();
            assert_eq!(text.as_bytes(), &body[payload]);
            let raw = STANDARD.decode_to_vec(text).unwrap();
            let rows = (turn.total - 1 - 60) * 12;
            let ids: Vec<u8> =
                raw[raw.len() - rows * width..].iter().step_by(width).copied().collect();
            assert_eq!(ids, conversation.rows[60 * 12..(turn.total - 1) * 12]);
            assert_eq!(raw.len() - rows * width, if wire == Wire::VllmU8 { 128 } else { 0 });
        }
    }
}
