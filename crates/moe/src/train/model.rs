//! The trainer's model: forward over packed sequences, and backward of `Σ c · logp`.
//!
//! It is written by hand over flat buffers rather than with a tensor library: there is one fixed
//! architecture, its backward pass is short, and no gradient can be dropped silently. Each lane
//! runs its own sequences through the whole model with its own gradient buffer, so no operation is
//! threaded internally. As many lanes run at a time as there are threads; their gradients are added in
//! the order of the lanes, so the sum does not depend on that number. Losses are computed elsewhere: the caller turns the
//! log-probs of one sequence into `dL/dlogp` ([`crate::loss`]).
//!
//! Invariant: with replay, [`RouterFamily::select`] is not called for tokens that have a routing
//! row.
#![expect(clippy::indexing_slicing, reason = "dense numeric code over rows of known width")]

use super::attention::{attention, attention_backward};
use super::batch::PackedBatch;
use super::experts::{Balance, MoeShape, MoeTrace, balance_loss, moe, moe_backward, router_logits};
use super::head::{Head, ValueHead};
use super::layout::Layout;
use super::linalg::{View, ViewMut, matmul};
use super::norm::{
    HeadShape, Rope, add, norm_and_rotate, norm_and_rotate_backward, rms_norm, rms_norm_backward,
};
use super::part::{Part, RouterCapture, lanes};
use super::pass::{LossGradient, Pass, SequenceOutput};
use super::real::Real;
use crate::router::RouterFamily;
use crate::{CheckpointError, ModelConfig, Weights};
use camino::Utf8Path;
use rayon::prelude::*;

/// A trainable model: configuration and parameters in one flat buffer.
#[derive(Debug)]
pub struct TrainModel<T> {
    config: ModelConfig,
    layout: Layout,
    params: Vec<T>,
    heads: HeadShape,
    moe: MoeShape,
}

struct LayerTrace<T> {
    x: Vec<T>,
    normed: Vec<T>,
    raw: Vec<T>,
    qkv: Vec<T>,
    out: Vec<T>,
    lse: Vec<T>,
    middle: Vec<T>,
    moe_input: Vec<T>,
    moe: MoeTrace<T>,
}

/// Inputs shared by all layers while one part is processed.
struct Work<'a, T> {
    batch: &'a PackedBatch,
    pass: Pass<'a, T>,
    rope: &'a Rope<T>,
}

struct LaneResult<T> {
    outputs: Vec<SequenceOutput<T>>,
    balance: f64,
    grads: Vec<T>,
}

impl<T: Real> TrainModel<T> {
    /// Creates a model from weights.
    pub fn new(weights: &Weights) -> Self {
        let config = weights.config().clone();
        let layout = Layout::new(&config);
        let params = layout.flatten(weights);
        let heads = HeadShape {
            query_heads: config.num_attention_heads,
            key_heads: config.num_key_value_heads,
            head_dim: config.head_dim,
            eps: config.rms_norm_eps,
        };
        let moe = MoeShape {
            hidden: config.hidden_size,
            width: config.moe_intermediate_size,
            experts: config.num_experts,
            top_k: config.num_experts_per_tok,
            family: if config.norm_topk_prob {
                RouterFamily::SoftmaxRenormalised
            } else {
                RouterFamily::Softmax
            },
        };
        Self { config, layout, params, heads, moe }
    }

    /// Reads the model from a checkpoint folder.
    ///
    /// # Errors
    /// The errors of [`Weights::load`].
    pub fn load(folder: &Utf8Path) -> Result<Self, CheckpointError> {
        Ok(Self::new(&Weights::load(folder)?))
    }

    /// Architecture of the model.
    pub fn config(&self) -> &ModelConfig {
        &self.config
    }

    /// How the routers choose experts.
    pub(crate) fn family(&self) -> &RouterFamily {
        &self.moe.family
    }

    /// Offsets of each parameter in [`TrainModel::params`].
    pub fn layout(&self) -> &Layout {
        &self.layout
    }

    /// All parameters in one flat buffer; see [`TrainModel::layout`].
    pub fn params(&self) -> &[T] {
        &self.params
    }

    /// All parameters, mutable, for the optimizer.
    pub fn params_mut(&mut self) -> &mut [T] {
        &mut self.params
    }

    /// Copies the parameters into weights that can be saved.
    ///
    /// # Errors
    /// Never for a model that was created from weights of its own configuration.
    pub fn weights(&self) -> Result<Weights, CheckpointError> {
        self.layout.weights(&self.config, &self.params)
    }

    /// Runs the forward pass. Returns log-probs, entropy and executed routes of each sequence, in
    /// the order of `pass.sequences`.
    pub fn forward(&self, batch: &PackedBatch, pass: Pass<'_, T>) -> Vec<SequenceOutput<T>> {
        self.run(batch, pass, None).0
    }

    /// Runs forward and backward: adds `Σ_t c_t · dlogp_t/dθ` to `grads`, with `c` from `loss`.
    /// `grads` is laid out as the parameters, followed by those of the value head if there is one.
    /// Returns the outputs of the forward pass and the balance loss (mean over tokens, sum over
    /// layers; 0 if `balance_per_token` is 0).
    pub fn forward_backward(
        &self,
        batch: &PackedBatch,
        pass: Pass<'_, T>,
        loss: &LossGradient<'_, T>,
        grads: &mut [T],
    ) -> (Vec<SequenceOutput<T>>, f64) {
        self.run(batch, pass, Some((loss, grads)))
    }

    fn run(
        &self,
        batch: &PackedBatch,
        pass: Pass<'_, T>,
        mut backward: Option<(&LossGradient<'_, T>, &mut [T])>,
    ) -> (Vec<SequenceOutput<T>>, f64) {
        let longest = pass.sequences.iter().map(|&s| batch.range(s).len()).max().unwrap_or(0);
        let rope = Rope::new(self.config.rope_base(), self.config.head_dim, longest);
        let work = Work { batch, pass, rope: &rope };
        let value_weights = pass.value_head.map_or(0, <[T]>::len);
        let loss = backward.as_ref().map(|(loss, _)| *loss);
        let run_lane = |parts: &Vec<Part>| {
            let mut grads = match loss {
                Some(_) => vec![T::ZERO; self.params.len() + value_weights],
                None => Vec::new(),
            };
            let (mut outputs, mut balance) = (Vec::new(), 0.0);
            for part in parts {
                let backward = loss.map(|loss| (loss, grads.as_mut_slice()));
                balance += self.run_part(&work, part, backward, &mut outputs);
            }
            LaneResult { outputs, balance, grads }
        };
        let mut outputs = Vec::with_capacity(pass.sequences.len());
        let mut balance = 0.0;
        for lanes in lanes(batch, &pass).chunks(rayon::current_num_threads().max(1)) {
            let results: Vec<LaneResult<T>> = lanes.par_iter().map(run_lane).collect();
            for result in results {
                outputs.extend(result.outputs);
                balance += result.balance;
                if let Some((_, grads)) = &mut backward {
                    add(grads, &result.grads);
                }
            }
        }
        let mut order = vec![0; batch.sequences()];
        for (rank, &sequence) in pass.sequences.iter().enumerate() {
            order[sequence] = rank;
        }
        outputs.sort_by_key(|o| order[o.sequence]);
        (outputs, balance)
    }

    fn run_part(
        &self,
        work: &Work<'_, T>,
        part: &Part,
        backward: Option<(&LossGradient<'_, T>, &mut [T])>,
        outputs: &mut Vec<SequenceOutput<T>>,
    ) -> f64 {
        let hidden = self.config.hidden_size;
        let embedding = &self.params[self.layout.embedding.clone()];
        let mut x = Vec::with_capacity(part.places.len() * hidden);
        for &place in &part.places {
            let token = work.batch.tokens()[place] as usize;
            x.extend_from_slice(&embedding[token * hidden..(token + 1) * hidden]);
        }
        let layers = self.config.num_hidden_layers;
        let mut captured = RouterCapture::new(part, layers, &self.moe, work.pass);
        let mut traces = Vec::new();
        let mut balance = 0.0;
        for layer in 0..layers {
            let trace = self.layer_forward(work, part, layer, &mut x);
            captured.take(layer, (&trace.moe.ids, &trace.moe.logits, &trace.moe_input));
            if backward.is_some() {
                if work.pass.balance_per_token > 0.0 {
                    balance += balance_loss(&self.moe, &trace.moe) * part.places.len() as f64;
                }
                traces.push(trace);
            }
        }
        let norm = &self.params[self.layout.norm.clone()];
        let mut last = vec![T::ZERO; x.len()];
        rms_norm(&x, norm, self.config.rms_norm_eps, &mut last);
        let head = Head {
            weight: &self.params[self.layout.head.clone()],
            hidden,
            sharpness: 1.0 / work.pass.temperature,
        };
        let targets = part.targets(work.batch);
        let scores = head.forward(&last, &targets);
        let value_head = work.pass.value_head.map(|weights| ValueHead { weights });
        let values = value_head.map(|head| head.forward(&last, &targets));

        let first = outputs.len();
        let scored = (&scores.logprobs[..], &scores.entropy[..], values.as_deref());
        part.collect(&targets, scored, captured, outputs);
        if let Some((loss, grads)) = backward {
            let (mut by_logprob, mut by_value) = (Vec::new(), Vec::new());
            for gradient in outputs[first..].iter().map(loss) {
                by_logprob.extend(gradient.logprobs);
                by_value.extend(gradient.values);
            }
            let coefficients = part.gather(&targets, &by_logprob);
            let (grads, d_value_head) = grads.split_at_mut(self.params.len());
            let mut d_last = vec![T::ZERO; x.len()];
            if let Some(head) = value_head {
                let slopes = part.gather(&targets, &by_value);
                head.backward(&last, &targets, &slopes, &mut d_last, d_value_head);
            }
            let d_head = &mut grads[self.layout.head.clone()];
            head.backward(&last, (&targets, &scores), &coefficients, &mut d_last, d_head);
            let mut dx = vec![T::ZERO; x.len()];
            let d_norm = &mut grads[self.layout.norm.clone()];
            rms_norm_backward(&x, norm, self.config.rms_norm_eps, &d_last, &mut dx, d_norm);
            for (layer, trace) in traces.iter().enumerate().rev() {
                self.layer_backward(work, part, (layer, trace), &mut dx, grads);
            }
            let d_embedding = &mut grads[self.layout.embedding.clone()];
            for (&place, d) in part.places.iter().zip(dx.chunks_exact(hidden)) {
                let token = work.batch.tokens()[place] as usize;
                add(&mut d_embedding[token * hidden..(token + 1) * hidden], d);
            }
        }
        balance
    }

    fn layer_forward(
        &self,
        work: &Work<'_, T>,
        part: &Part,
        layer: usize,
        x: &mut Vec<T>,
    ) -> LayerTrace<T> {
        let slots = &self.layout.layers[layer];
        let (params, eps, heads) = (&self.params, self.config.rms_norm_eps, self.heads);
        let (rows, hidden, width) = (part.places.len(), self.config.hidden_size, heads.width());
        let out_width = heads.query_heads * heads.head_dim;

        let mut normed = vec![T::ZERO; x.len()];
        rms_norm(x, &params[slots.attention_norm.clone()], eps, &mut normed);
        let mut raw = vec![T::ZERO; rows * width];
        matmul(
            ViewMut::new(&mut raw, rows, width),
            false,
            1.0,
            View::new(&normed, rows, hidden),
            View::new(&params[slots.qkv.clone()], width, hidden).t(),
        );
        let mut qkv = vec![T::ZERO; raw.len()];
        let norms = (&params[slots.query_norm.clone()], &params[slots.key_norm.clone()]);
        norm_and_rotate(heads, work.rope, &part.positions, norms, &raw, &mut qkv);
        let mut out = vec![T::ZERO; rows * out_width];
        let mut lse = vec![T::ZERO; rows * heads.query_heads];
        attention(heads, &part.ranges, &qkv, &mut out, &mut lse);
        let mut middle = x.clone();
        matmul(
            ViewMut::new(&mut middle, rows, hidden),
            true,
            1.0,
            View::new(&out, rows, out_width),
            View::new(&params[slots.output.clone()], hidden, out_width).t(),
        );

        let mut moe_input = vec![T::ZERO; middle.len()];
        rms_norm(&middle, &params[slots.moe_norm.clone()], eps, &mut moe_input);
        #[cfg_attr(not(test), expect(unused_mut, reason = "tests shift the logits"))]
        let mut logits = router_logits(&self.moe, &params[slots.router.clone()], &moe_input);
        #[cfg(test)]
        part.shift(&self.moe, layer, (work.batch, work.pass), &mut logits);
        let ids = self.choose(work, part, layer, &logits);
        let mut next = middle.clone();
        let moe = moe(&self.moe, (params, slots), &moe_input, (logits, ids), &mut next);
        let x = std::mem::replace(x, next);
        LayerTrace { x, normed, raw, qkv, out, lse, middle, moe_input, moe }
    }

    /// Experts to execute `[rows, top_k]`: the recorded ones for tokens with a routing row, else
    /// those that the router selects.
    fn choose(&self, work: &Work<'_, T>, part: &Part, layer: usize, logits: &[T]) -> Vec<u16> {
        let mut ids = vec![0; part.places.len() * self.moe.top_k];
        let rows = logits.chunks_exact(self.moe.experts).zip(ids.chunks_exact_mut(self.moe.top_k));
        for ((logits, ids), &place) in rows.zip(&part.places) {
            match work.pass.replay.filter(|routes| routes.is_valid(place)) {
                Some(routes) => ids.copy_from_slice(routes.layer(place, layer)),
                None => self.moe.family.select(logits, ids),
            }
        }
        ids
    }

    /// Converts the gradient of a layer's output into that of its input, in place.
    fn layer_backward(
        &self,
        work: &Work<'_, T>,
        part: &Part,
        (layer, trace): (usize, &LayerTrace<T>),
        dx: &mut [T],
        grads: &mut [T],
    ) {
        let slots = &self.layout.layers[layer];
        let (params, eps, heads) = (&self.params, self.config.rms_norm_eps, self.heads);
        let (rows, hidden, width) = (part.places.len(), self.config.hidden_size, heads.width());
        let out_width = heads.query_heads * heads.head_dim;

        let per_token = work.pass.balance_per_token;
        let balance = (per_token > 0.0).then_some(Balance { per_token });
        let mut d_input = vec![T::ZERO; dx.len()];
        moe_backward(
            &self.moe,
            (params, slots, grads),
            (&trace.moe, &trace.moe_input),
            (dx, balance),
            &mut d_input,
        );
        let weight = &params[slots.moe_norm.clone()];
        let d_weight = &mut grads[slots.moe_norm.clone()];
        rms_norm_backward(&trace.middle, weight, eps, &d_input, dx, d_weight);

        let mut d_out = vec![T::ZERO; rows * out_width];
        let d_rows = View::new(dx, rows, hidden);
        let output = View::new(&params[slots.output.clone()], hidden, out_width);
        matmul(ViewMut::new(&mut d_out, rows, out_width), false, 1.0, d_rows, output);
        let into = ViewMut::new(&mut grads[slots.output.clone()], hidden, out_width);
        matmul(into, true, 1.0, d_rows.t(), View::new(&trace.out, rows, out_width));

        let mut d_qkv = vec![T::ZERO; trace.qkv.len()];
        let forward = (&trace.qkv[..], &trace.out[..], &trace.lse[..]);
        attention_backward(heads, &part.ranges, forward, &d_out, &mut d_qkv);
        let norms = &mut grads[slots.query_norm.start..slots.key_norm.end];
        let (d_query, d_key) = norms.split_at_mut(heads.head_dim);
        let query = &params[slots.query_norm.clone()];
        let key = &params[slots.key_norm.clone()];
        let norms = (query, key, d_query, d_key);
        norm_and_rotate_backward(heads, work.rope, &part.positions, norms, &trace.raw, &mut d_qkv);

        let mut d_normed = vec![T::ZERO; dx.len()];
        let d_raw = View::new(&d_qkv, rows, width);
        let projection = View::new(&params[slots.qkv.clone()], width, hidden);
        matmul(ViewMut::new(&mut d_normed, rows, hidden), false, 1.0, d_raw, projection);
        let into = ViewMut::new(&mut grads[slots.qkv.clone()], width, hidden);
        matmul(into, true, 1.0, d_raw.t(), View::new(&trace.normed, rows, hidden));
        let weight = &params[slots.attention_norm.clone()];
        let d_weight = &mut grads[slots.attention_norm.clone()];
        rms_norm_backward(&trace.x, weight, eps, &d_normed, dx, d_weight);
    }
}
