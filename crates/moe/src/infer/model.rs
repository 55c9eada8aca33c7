//! Incremental forward pass of Qwen3-MoE over tokens of many requests at once.
//!
//! Keys, values and routing rows live in a [`KvPool`] by *slot*, one slot per token position. A
//! request is a list of slots, so requests that share a prefix share its slots, including the
//! routing rows: a prefix hit never runs the router again.
#![expect(clippy::indexing_slicing, reason = "dense numeric code over checked shapes")]
#![expect(clippy::cast_possible_truncation, reason = "constants of the model are used in f32")]

use super::kernels::{Dense, KvView, attend, exp_shifted, gated_silu, rms_norm};
use super::matrix::{Matrix, WeightFormat};
use super::quantized::Quantized;
use crate::router::RouterFamily;
use crate::{CheckpointError, ModelConfig, Weights};
use orchestrate_cpu::Level;
use std::sync::Arc;

/// Token embedding `[vocab, hidden]`, read row by row.
#[derive(Debug)]
enum Embedding {
    Rows(Vec<f32>),
    Quantized(Arc<Quantized>),
}

#[derive(Debug)]
struct Expert {
    gate_up: Matrix,
    down: Matrix,
}

#[derive(Debug)]
struct Layer {
    input_norm: Vec<f32>,
    qkv: Matrix,
    q_norm: Vec<f32>,
    k_norm: Vec<f32>,
    output: Matrix,
    post_norm: Vec<f32>,
    router: Dense,
    /// Router predictor. Its output is added to the router logits to choose experts, but not to
    /// compute their gate weights.
    predictor: Option<Dense>,
    experts: Vec<Expert>,
}

/// Model weights packed for inference. Immutable: all state is in the caller's [`KvPool`] and
/// [`Scratch`].
#[derive(Debug)]
pub(crate) struct Model {
    config: ModelConfig,
    level: Level,
    embedding: Embedding,
    layers: Vec<Layer>,
    norm: Vec<f32>,
    head: Matrix,
    inverse_frequencies: Vec<f64>,
    family: RouterFamily,
}

/// Tokens of one request to run in a forward pass.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Chunk<'a> {
    /// New tokens, at positions `slots.len() - tokens.len()..slots.len()`.
    pub(crate) tokens: &'a [u32],
    /// Slots of all positions up to the last new token.
    pub(crate) slots: &'a [u32],
    /// Logits are computed for `tokens[logits_from..]`; `tokens.len()` means none.
    pub(crate) logits_from: usize,
}

/// Keys, values and routing rows of all cached token positions.
#[derive(Debug)]
pub(crate) struct KvPool {
    keys: Vec<Vec<f32>>,
    values: Vec<Vec<f32>>,
    routes: Vec<u16>,
    kv_width: usize,
    row_width: usize,
}

impl KvPool {
    /// Allocates `slots` positions. Memory pages are touched only once their slots are used.
    pub(crate) fn new(config: &ModelConfig, slots: usize) -> Self {
        let kv_width = config.num_key_value_heads * config.head_dim;
        let row_width = config.num_hidden_layers * config.num_experts_per_tok;
        let layer = || vec![0.0; slots * kv_width];
        Self {
            keys: (0..config.num_hidden_layers).map(|_| layer()).collect(),
            values: (0..config.num_hidden_layers).map(|_| layer()).collect(),
            routes: vec![0; slots * row_width],
            kv_width,
            row_width,
        }
    }

    /// Expert ids per routing row: layers × top-k.
    pub(crate) fn row_width(&self) -> usize {
        self.row_width
    }

    /// Routing row of a slot, `[layers, top_k]`, ordered by descending router weight.
    pub(crate) fn route(&self, slot: u32) -> &[u16] {
        let start = slot as usize * self.row_width;
        &self.routes[start..start + self.row_width]
    }
}

/// Buffers of the forward pass, reused between calls.
#[derive(Debug, Default)]
pub(crate) struct Scratch {
    x: Vec<f32>,
    h: Vec<f32>,
    qkv: Vec<f32>,
    attended: Vec<f32>,
    projected: Vec<f32>,
    router: Vec<f32>,
    predicted: Vec<f32>,
    ids: Vec<u16>,
    gates: Vec<f32>,
    order: Vec<usize>,
    gathered: Vec<f32>,
    gate_up: Vec<f32>,
    activated: Vec<f32>,
    expert_out: Vec<f32>,
    per_choice: Vec<f32>,
    scores: Vec<f32>,
    /// Sine and cosine of the RoPE angles, `[new tokens, head_dim / 2]`.
    angles: Vec<(f32, f32)>,
    /// Logits of the requested tokens in the order of the chunks, `[requested, vocab]`.
    pub(crate) logits: Vec<f32>,
}

/// The first `len` values of `buffer`, which grows if needed; their contents are unspecified.
fn sized(buffer: &mut Vec<f32>, len: usize) -> &mut [f32] {
    if buffer.len() < len {
        buffer.resize(len, 0.0);
    }
    &mut buffer[..len]
}

impl Model {
    /// Packs checkpoint weights in the given format.
    pub(crate) fn build(weights: &Weights, format: WeightFormat) -> Result<Self, CheckpointError> {
        let config = weights.config().clone();
        let c = &config;
        let weight = |name: &str| {
            let missing =
                || CheckpointError::new(name.into(), "this tensor is missing from the weights");
            weights.get(name).ok_or_else(missing)
        };
        let (d, f) = (c.hidden_size, c.moe_intermediate_size);
        let q_width = c.num_attention_heads * c.head_dim;
        let kv_width = c.num_key_value_heads * c.head_dim;
        let mut layers = Vec::with_capacity(c.num_hidden_layers);
        for i in 0..c.num_hidden_layers {
            let get = |name: &str| weight(&format!("model.layers.{i}.{name}"));
            let qkv = [
                get("self_attn.q_proj.weight")?,
                get("self_attn.k_proj.weight")?,
                get("self_attn.v_proj.weight")?,
            ]
            .concat();
            let mut experts = Vec::with_capacity(c.num_experts);
            for e in 0..c.num_experts {
                let gate = get(&format!("mlp.experts.{e}.gate_proj.weight"))?;
                let up = get(&format!("mlp.experts.{e}.up_proj.weight"))?;
                let down = get(&format!("mlp.experts.{e}.down_proj.weight"))?;
                experts.push(Expert {
                    gate_up: Matrix::pack(format, &[gate, up].concat(), 2 * f, d),
                    down: Matrix::pack(format, down, d, f),
                });
            }
            layers.push(Layer {
                input_norm: get("input_layernorm.weight")?.to_vec(),
                qkv: Matrix::pack(format, &qkv, q_width + 2 * kv_width, d),
                q_norm: get("self_attn.q_norm.weight")?.to_vec(),
                k_norm: get("self_attn.k_norm.weight")?.to_vec(),
                output: Matrix::pack(format, get("self_attn.o_proj.weight")?, d, q_width),
                post_norm: get("post_attention_layernorm.weight")?.to_vec(),
                router: Dense::pack(get("mlp.gate.weight")?, c.num_experts, d),
                predictor: None,
                experts,
            });
        }
        let embedding = weight("model.embed_tokens.weight")?;
        let table = Matrix::pack(format, embedding, c.vocab_size, d);
        let (head, embedding) = match (c.tie_word_embeddings, table) {
            (true, Matrix::Quantized(table)) => {
                (Matrix::Quantized(Arc::clone(&table)), Embedding::Quantized(table))
            }
            (true, Matrix::Dense(table)) => {
                (Matrix::Dense(table), Embedding::Rows(embedding.to_vec()))
            }
            (false, table) => {
                let head = Matrix::pack(format, weight("lm_head.weight")?, c.vocab_size, d);
                match table {
                    Matrix::Quantized(table) => (head, Embedding::Quantized(table)),
                    Matrix::Dense(_) => (head, Embedding::Rows(embedding.to_vec())),
                }
            }
        };
        let norm = weight("model.norm.weight")?.to_vec();
        let inverse_frequencies = rope_frequencies(c);
        let family = if c.norm_topk_prob {
            RouterFamily::SoftmaxRenormalised
        } else {
            RouterFamily::Softmax
        };
        Ok(Self {
            config,
            level: Level::current(),
            embedding,
            layers,
            norm,
            head,
            inverse_frequencies,
            family,
        })
    }

    /// Chooses experts by predicted router logits from now on. `weights [layers, experts, hidden]`
    /// are those of a linear predictor on the router inputs.
    pub(crate) fn predict_routes(&mut self, weights: &[f32]) {
        let (experts, hidden) = (self.config.num_experts, self.config.hidden_size);
        for (layer, weights) in self.layers.iter_mut().zip(weights.chunks_exact(experts * hidden)) {
            layer.predictor = Some(Dense::pack(weights, experts, hidden));
        }
    }

    /// Architecture of the model.
    pub(crate) fn config(&self) -> &ModelConfig {
        &self.config
    }

    /// Runs all chunks. Writes their keys, values and routing rows to the pool, and the requested
    /// logits to `scratch.logits`.
    pub(crate) fn forward(&self, pool: &mut KvPool, chunks: &[Chunk<'_>], scratch: &mut Scratch) {
        let d = self.config.hidden_size;
        let rows: usize = chunks.iter().map(|c| c.tokens.len()).sum();
        let tokens = chunks.iter().flat_map(|c| c.tokens);
        let x = sized(&mut scratch.x, rows * d);
        for (out, &token) in x.chunks_exact_mut(d).zip(tokens) {
            self.embed(token, out);
        }
        scratch.angles.clear();
        for chunk in chunks {
            for position in chunk.slots.len() - chunk.tokens.len()..chunk.slots.len() {
                // In f64, as in the trainer: f32 angles would be inaccurate.
                scratch.angles.extend(self.inverse_frequencies.iter().map(|f| {
                    let (sin, cos) = libm::sincos(position as f64 * f);
                    (sin as f32, cos as f32)
                }));
            }
        }
        for index in 0..self.layers.len() {
            self.attention(index, pool, chunks, rows, scratch);
            self.experts(index, pool, chunks, rows, scratch);
        }
        self.logits(chunks, scratch);
    }

    fn embed(&self, token: u32, out: &mut [f32]) {
        let token = token as usize;
        match &self.embedding {
            Embedding::Rows(rows) => {
                out.copy_from_slice(&rows[token * out.len()..(token + 1) * out.len()]);
            }
            Embedding::Quantized(rows) => rows.row(token, out),
        }
    }

    fn attention(
        &self,
        index: usize,
        pool: &mut KvPool,
        chunks: &[Chunk<'_>],
        rows: usize,
        scratch: &mut Scratch,
    ) {
        let c = &self.config;
        let (layer, level) = (&self.layers[index], self.level);
        let (d, hd, eps) = (c.hidden_size, c.head_dim, c.rms_norm_eps as f32);
        let q_width = c.num_attention_heads * hd;
        let width = q_width + 2 * pool.kv_width;
        let x = sized(&mut scratch.x, rows * d);
        let h = sized(&mut scratch.h, rows * d);
        let qkv = sized(&mut scratch.qkv, rows * width);
        rms_norm(level, x, &layer.input_norm, eps, h);
        layer.qkv.apply(level, h, qkv);

        let (keys, values) = (&mut pool.keys[index], &mut pool.values[index]);
        let mut normed = vec![0.0; hd];
        let angles = scratch.angles.chunks_exact(hd / 2);
        for ((row, angles), &slot) in qkv.chunks_exact_mut(width).zip(angles).zip(new_slots(chunks))
        {
            let (heads, value) = row.split_at_mut(q_width + pool.kv_width);
            for (i, head) in heads.chunks_exact_mut(hd).enumerate() {
                let norm = if i < c.num_attention_heads { &layer.q_norm } else { &layer.k_norm };
                rms_norm(level, head, norm, eps, &mut normed);
                rotate(&normed, angles, head);
            }
            let at = slot as usize * pool.kv_width;
            keys[at..at + pool.kv_width].copy_from_slice(&heads[q_width..]);
            values[at..at + pool.kv_width].copy_from_slice(value);
        }

        let attended = sized(&mut scratch.attended, rows * q_width);
        let mut each = qkv.chunks_exact(width).zip(attended.chunks_exact_mut(q_width));
        for chunk in chunks {
            let first = chunk.slots.len() - chunk.tokens.len();
            for position in first..chunk.slots.len() {
                let Some((row, out)) = each.next() else { break };
                let kv = KvView {
                    keys,
                    values,
                    slots: &chunk.slots[..=position],
                    kv_heads: c.num_key_value_heads,
                    head_dim: hd,
                };
                attend(level, kv, &row[..q_width], &mut scratch.scores, out);
            }
        }
        let projected = sized(&mut scratch.projected, rows * d);
        layer.output.apply(level, attended, projected);
        add(x, projected);
    }

    fn experts(
        &self,
        index: usize,
        pool: &mut KvPool,
        chunks: &[Chunk<'_>],
        rows: usize,
        scratch: &mut Scratch,
    ) {
        let config = &self.config;
        let (layer, level) = (&self.layers[index], self.level);
        let (d, inner) = (config.hidden_size, config.moe_intermediate_size);
        let top_k = config.num_experts_per_tok;
        let x = sized(&mut scratch.x, rows * d);
        let h = sized(&mut scratch.h, rows * d);
        rms_norm(level, x, &layer.post_norm, config.rms_norm_eps as f32, h);
        let router = sized(&mut scratch.router, rows * config.num_experts);
        layer.router.apply(level, h, router);
        let keys = match &layer.predictor {
            None => &*router,
            Some(predictor) => {
                let keys = sized(&mut scratch.predicted, rows * config.num_experts);
                predictor.apply(level, h, keys);
                add(keys, router);
                &*keys
            }
        };
        let (ids, gates) = (&mut scratch.ids, &mut scratch.gates);
        ids.resize(rows * top_k, 0);
        gates.resize(rows * top_k, 0.0);
        let chosen = ids.chunks_exact_mut(top_k).zip(gates.chunks_exact_mut(top_k));
        let logits = router.chunks_exact(config.num_experts);
        let keys = keys.chunks_exact(config.num_experts);
        for ((logits, keys), (ids, gates)) in logits.zip(keys).zip(chosen) {
            self.family.select(keys, ids);
            self.family.gates(logits, ids, gates);
        }
        for (ids, &slot) in ids.chunks_exact(top_k).zip(new_slots(chunks)) {
            let at = slot as usize * pool.row_width + index * top_k;
            pool.routes[at..at + top_k].copy_from_slice(ids);
        }

        // Each expert runs once over all tokens that chose it.
        let order = &mut scratch.order;
        order.clear();
        order.extend(0..ids.len());
        order.sort_by_key(|&i| ids[i]);
        let per_choice = sized(&mut scratch.per_choice, rows * top_k * d);
        for mine in order.chunk_by(|&a, &b| ids[a] == ids[b]) {
            let expert = &layer.experts[usize::from(ids[mine[0]])];
            let gathered = sized(&mut scratch.gathered, mine.len() * d);
            for (out, &choice) in gathered.chunks_exact_mut(d).zip(mine) {
                let row = choice / top_k;
                out.copy_from_slice(&h[row * d..(row + 1) * d]);
            }
            let gate_up = sized(&mut scratch.gate_up, mine.len() * 2 * inner);
            expert.gate_up.apply(level, gathered, gate_up);
            let activated = sized(&mut scratch.activated, mine.len() * inner);
            gated_silu(level, gate_up, inner, activated);
            let out = sized(&mut scratch.expert_out, mine.len() * d);
            expert.down.apply(level, activated, out);
            for (out, &choice) in out.chunks_exact(d).zip(mine) {
                per_choice[choice * d..(choice + 1) * d].copy_from_slice(out);
            }
        }
        // Summed in the order of choice, so that the result does not depend on the grouping by
        // expert.
        let gates = gates.chunks_exact(top_k);
        let outputs = per_choice.chunks_exact(top_k * d);
        for ((x, outputs), gates) in x.chunks_exact_mut(d).zip(outputs).zip(gates) {
            for (output, &gate) in outputs.chunks_exact(d).zip(gates) {
                for (x, &o) in x.iter_mut().zip(output) {
                    *x += gate * o;
                }
            }
        }
    }

    fn logits(&self, chunks: &[Chunk<'_>], scratch: &mut Scratch) {
        let d = self.config.hidden_size;
        let mut wanted = 0;
        let mut first = 0;
        let h = &mut scratch.h;
        for chunk in chunks {
            for row in first + chunk.logits_from..first + chunk.tokens.len() {
                let out = &mut h[wanted * d..(wanted + 1) * d];
                let eps = self.config.rms_norm_eps as f32;
                rms_norm(self.level, &scratch.x[row * d..(row + 1) * d], &self.norm, eps, out);
                wanted += 1;
            }
            first += chunk.tokens.len();
        }
        scratch.logits.resize(wanted * self.config.vocab_size, 0.0);
        self.head.apply(self.level, &h[..wanted * d], &mut scratch.logits);
    }

    /// Replaces `logits` by probabilities at temperature `1 / scale` and returns the logarithm of
    /// the normaliser: `ln p[i] = scale * logit[i] - normaliser`.
    pub(crate) fn probabilities(&self, logits: &mut [f32], scale: f32) -> f32 {
        let mut stats = [0.0; 2];
        exp_shifted(self.level, logits, scale, &mut stats);
        for p in logits {
            *p /= stats[1];
        }
        stats[0] + libm::logf(stats[1])
    }
}

fn rope_frequencies(config: &ModelConfig) -> Vec<f64> {
    let half = config.head_dim / 2;
    (0..half).map(|i| libm::pow(config.rope_base(), -(i as f64) / half as f64)).collect()
}

/// Slots of the new tokens of all chunks.
fn new_slots<'a>(chunks: &'a [Chunk<'a>]) -> impl Iterator<Item = &'a u32> {
    chunks.iter().flat_map(|c| &c.slots[c.slots.len() - c.tokens.len()..])
}

fn add(x: &mut [f32], y: &[f32]) {
    for (x, &y) in x.iter_mut().zip(y) {
        *x += y;
    }
}

/// Applies RoPE (rotate-half): both halves of a head use the same angles.
fn rotate(x: &[f32], angles: &[(f32, f32)], out: &mut [f32]) {
    let (low, high) = x.split_at(angles.len());
    let (out_low, out_high) = out.split_at_mut(angles.len());
    for (i, &(sin, cos)) in angles.iter().enumerate() {
        out_low[i] = low[i] * cos - high[i] * sin;
        out_high[i] = high[i] * cos + low[i] * sin;
    }
}

#[cfg(test)]
pub(crate) mod tests;
