//! The mixture-of-experts block: router, SwiGLU experts over tokens grouped by expert, and their
//! backward pass. The caller chooses the experts; replay means passing recorded ids.
#![expect(clippy::indexing_slicing, reason = "dense numeric code over rows of known width")]

use super::layout::LayerSlots;
use super::linalg::{View, ViewMut, add_scaled, dot, matmul};
use super::real::Real;
use crate::router::{RouterFamily, softmax};
use orchestrate_cpu::kernel;
use std::ops::Range;

/// Dimensions of the block.
#[derive(Debug, Clone)]
pub(crate) struct MoeShape {
    pub(crate) hidden: usize,
    pub(crate) width: usize,
    pub(crate) experts: usize,
    pub(crate) top_k: usize,
    pub(crate) family: RouterFamily,
}

/// Intermediate results that the backward pass needs.
#[derive(Debug)]
pub(crate) struct MoeTrace<T> {
    /// Router logits `[N, E]`.
    pub(crate) logits: Vec<T>,
    /// Executed experts `[N, K]`.
    pub(crate) ids: Vec<u16>,
    gates: Vec<T>,
    /// Slots `token · K + k`, stably sorted by expert.
    order: Vec<usize>,
    /// Range of each expert's slots in `order`.
    groups: Vec<Range<usize>>,
    /// Gate and up projections of each sorted slot `[N·K, 2·width]`.
    gate_up: Vec<T>,
}

/// Router logits `[N, E]` of normed inputs `h [N, hidden]`.
pub(crate) fn router_logits<T: Real>(shape: &MoeShape, router: &[T], h: &[T]) -> Vec<T> {
    let rows = h.len() / shape.hidden;
    let mut logits = vec![T::ZERO; rows * shape.experts];
    matmul(
        ViewMut::new(&mut logits, rows, shape.experts),
        false,
        1.0,
        View::new(h, rows, shape.hidden),
        View::new(router, shape.experts, shape.hidden).t(),
    );
    logits
}

/// Adds the block's output to `x [N, hidden]`, executing the experts `ids [N, K]`.
pub(crate) fn moe<T: Real>(
    shape: &MoeShape,
    (params, slots): (&[T], &LayerSlots),
    h: &[T],
    (logits, ids): (Vec<T>, Vec<u16>),
    x: &mut [T],
) -> MoeTrace<T> {
    let (hidden, width, top_k) = (shape.hidden, shape.width, shape.top_k);
    let mut gates = vec![T::ZERO; ids.len()];
    let tokens = logits.chunks_exact(shape.experts).zip(ids.chunks_exact(top_k));
    for ((logits, ids), gates) in tokens.zip(gates.chunks_exact_mut(top_k)) {
        shape.family.gates(logits, ids, gates);
    }
    let (order, groups) = sort_by_expert(&ids, shape.experts);
    let sorted = gather(h, hidden, &order, top_k);
    let mut gate_up = vec![T::ZERO; order.len() * 2 * width];
    let mut activation = Vec::new();
    let mut out = Vec::new();
    for (expert, group) in slots.experts.iter().zip(&groups) {
        let rows = group.len();
        let projected = &mut gate_up[group.start * 2 * width..group.end * 2 * width];
        matmul(
            ViewMut::new(projected, rows, 2 * width),
            false,
            1.0,
            View::new(&sorted[group.start * hidden..], rows, hidden),
            View::new(&params[expert.gate_up.clone()], 2 * width, hidden).t(),
        );
        activation.resize(rows * width, T::ZERO);
        out.resize(rows * hidden, T::ZERO);
        activate(width, projected, &mut activation);
        matmul(
            ViewMut::new(&mut out, rows, hidden),
            false,
            1.0,
            View::new(&activation, rows, width),
            View::new(&params[expert.down.clone()], hidden, width).t(),
        );
        scatter(shape, &order[group.clone()], Some(&gates), &out, x);
    }
    MoeTrace { logits, ids, gates, order, groups, gate_up }
}

kernel! {
    /// SwiGLU of each row of `projected [rows, 2·width]`, the gate before the up projection.
    fn activate<T: Real>(width: usize, projected: &[T], activation: &mut [T]) {
        let rows = projected.chunks_exact(2 * width).zip(activation.chunks_exact_mut(width));
        for (both, act) in rows {
            let (gate, up) = both.split_at(width);
            for ((a, &g), &u) in act.iter_mut().zip(gate).zip(up) {
                *a = g * u / (T::ONE + (-g).exp());
            }
        }
    }
}

kernel! {
    /// Adds each row of one expert to its token's row of `sums [N, hidden]`, weighted by its slot's gate if
    /// there are `gates`.
    fn scatter<T: Real>(shape: &MoeShape, slots: &[usize], gates: Option<&[T]>, rows: &[T], sums: &mut [T]) {
        let hidden = shape.hidden;
        for (&slot, row) in slots.iter().zip(rows.chunks_exact(hidden)) {
            let token = slot / shape.top_k;
            let gate = gates.map_or(T::ONE, |gates| gates[slot]);
            add_scaled(&mut sums[token * hidden..(token + 1) * hidden], gate, row);
        }
    }
}

/// Backward of [`moe`] and [`router_logits`]: adds to `d_h [N, hidden]` and to `grads`, given the
/// gradient `dy [N, hidden]` of the output.
pub(crate) fn moe_backward<T: Real>(
    shape: &MoeShape,
    (params, slots, grads): (&[T], &LayerSlots, &mut [T]),
    (trace, h): (&MoeTrace<T>, &[T]),
    (dy, balance): (&[T], Option<Balance>),
    d_h: &mut [T],
) {
    let (hidden, width, top_k) = (shape.hidden, shape.width, shape.top_k);
    let rows_all = h.len() / hidden;
    let sorted = gather(h, hidden, &trace.order, top_k);
    let d_sorted = gather(dy, hidden, &trace.order, top_k);
    let mut d_gates = vec![T::ZERO; trace.ids.len()];
    let (mut d_act, mut weighted, mut d_in) = (Vec::new(), Vec::new(), Vec::new());
    for (expert, group) in slots.experts.iter().zip(&trace.groups) {
        let rows = group.len();
        let gate_up = &trace.gate_up[group.start * 2 * width..group.end * 2 * width];
        let d_out = View::new(&d_sorted[group.start * hidden..], rows, hidden);
        d_act.resize(rows * width, T::ZERO);
        weighted.resize(rows * width, T::ZERO);
        matmul(
            ViewMut::new(&mut d_act, rows, width),
            false,
            1.0,
            d_out,
            View::new(&params[expert.down.clone()], hidden, width),
        );
        let mut d_gate_up = vec![T::ZERO; rows * 2 * width];
        let sources = &trace.order[group.clone()];
        let gradients = (&mut d_gate_up[..], &mut d_gates[..]);
        let routed = (sources, &trace.gates[..]);
        activate_backward(shape, routed, gate_up, &d_act, &mut weighted, gradients);
        let d_gate_up = View::new(&d_gate_up, rows, 2 * width);
        let inputs = View::new(&sorted[group.start * hidden..], rows, hidden);
        let gate_up_weight = View::new(&params[expert.gate_up.clone()], 2 * width, hidden);
        d_in.resize(rows * hidden, T::ZERO);
        matmul(ViewMut::new(&mut d_in, rows, hidden), false, 1.0, d_gate_up, gate_up_weight);
        let into = ViewMut::new(&mut grads[expert.gate_up.clone()], 2 * width, hidden);
        matmul(into, true, 1.0, d_gate_up.t(), inputs);
        let into = ViewMut::new(&mut grads[expert.down.clone()], hidden, width);
        matmul(into, true, 1.0, d_out.t(), View::new(&weighted, rows, width));
        scatter(shape, sources, None, &d_in, d_h);
    }

    let mut d_logits = vec![T::ZERO; trace.logits.len()];
    let tokens = trace.logits.chunks_exact(shape.experts).zip(trace.ids.chunks_exact(top_k));
    let tokens = tokens.zip(d_gates.chunks_exact(top_k));
    for (((logits, ids), d_gates), d) in tokens.zip(d_logits.chunks_exact_mut(shape.experts)) {
        shape.family.gates_backward(logits, ids, d_gates, d);
    }
    if let Some(balance) = balance {
        balance_backward(shape, trace, balance, &mut d_logits);
    }
    let d_logits = View::new(&d_logits, rows_all, shape.experts);
    let router = View::new(&params[slots.router.clone()], shape.experts, hidden);
    matmul(ViewMut::new(d_h, rows_all, hidden), true, 1.0, d_logits, router);
    let into = ViewMut::new(&mut grads[slots.router.clone()], shape.experts, hidden);
    matmul(into, true, 1.0, d_logits.t(), View::new(h, rows_all, hidden));
}

kernel! {
    /// Backward of [`activate`] and of the product with the gates, given the gradient `d_act [rows, width]` of
    /// the activations before that product. Also computes the activations after it, `weighted [rows, width]`.
    fn activate_backward<T: Real>(
        shape: &MoeShape,
        routed: (&[usize], &[T]),
        gate_up: &[T],
        d_act: &[T],
        weighted: &mut [T],
        gradients: (&mut [T], &mut [T]),
    ) {
        let ((slots, gates), (d_gate_up, d_gates)) = (routed, gradients);
        let width = shape.width;
        let rows = gate_up.chunks_exact(2 * width).zip(d_gate_up.chunks_exact_mut(2 * width));
        let rows = rows.zip(d_act.chunks_exact(width).zip(weighted.chunks_exact_mut(width)));
        for (((both, d_both), (d_act, act)), &slot) in rows.zip(slots) {
            let weight = gates[slot];
            let (gate, up) = both.split_at(width);
            let (d_gate, d_up) = d_both.split_at_mut(width);
            for i in 0..width {
                let s = T::ONE / (T::ONE + (-gate[i]).exp());
                let silu = gate[i] * s;
                act[i] = silu * up[i];
                let d = d_act[i] * weight;
                d_up[i] = d * silu;
                d_gate[i] = d * up[i] * s * (T::ONE + gate[i] - silu);
            }
            // Computes <dy, E(x)> without E(x) by applying the transposed projection to dy.
            d_gates[slot] = dot(d_act, act);
            for a in act {
                *a = *a * weight;
            }
        }
    }
}

/// The auxiliary loss that balances tokens over experts; used in supervised training only.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Balance {
    /// Factor on the loss of each token: the coefficient divided by the number of tokens of the
    /// step.
    pub(crate) per_token: f64,
}

/// Balance loss `E · Σ_e f_e · P_e` of one layer, where f is the share of assignments and P the
/// mean router probability. 1 when perfectly balanced.
pub(crate) fn balance_loss<T: Real>(shape: &MoeShape, trace: &MoeTrace<T>) -> f64 {
    let share = trace.shares();
    let mut total = 0.0;
    for logits in trace.logits.chunks_exact(shape.experts) {
        let p = softmax(logits);
        total += p.iter().zip(&share).map(|(p, f)| p.to_f64() * f).sum::<f64>();
    }
    let tokens = trace.logits.len() / shape.experts;
    total * shape.experts as f64 / tokens as f64
}

fn balance_backward<T: Real>(
    shape: &MoeShape,
    trace: &MoeTrace<T>,
    balance: Balance,
    d_logits: &mut [T],
) {
    let share = trace.shares();
    let factor = balance.per_token * shape.experts as f64;
    let tokens = trace.logits.chunks_exact(shape.experts);
    for (logits, d) in tokens.zip(d_logits.chunks_exact_mut(shape.experts)) {
        let p = softmax(logits);
        let mean: f64 = p.iter().zip(&share).map(|(p, f)| p.to_f64() * f).sum();
        for ((d, p), f) in d.iter_mut().zip(&p).zip(&share) {
            *d += T::from_f64(factor * p.to_f64() * (f - mean));
        }
    }
}

impl<T> MoeTrace<T> {
    /// Each expert's share of all assignments.
    fn shares(&self) -> Vec<f64> {
        self.groups.iter().map(|g| g.len() as f64 / self.order.len() as f64).collect()
    }
}

/// Sorts slots by expert (counting sort); also returns the range of each expert's slots.
fn sort_by_expert(ids: &[u16], experts: usize) -> (Vec<usize>, Vec<Range<usize>>) {
    let mut counts = vec![0; experts];
    for &e in ids {
        counts[usize::from(e)] += 1;
    }
    let mut groups = Vec::with_capacity(experts);
    let mut start = 0;
    for count in counts {
        groups.push(start..start + count);
        start += count;
    }
    let mut next: Vec<usize> = groups.iter().map(|g| g.start).collect();
    let mut order = vec![0; ids.len()];
    for (slot, &e) in ids.iter().enumerate() {
        order[next[usize::from(e)]] = slot;
        next[usize::from(e)] += 1;
    }
    (order, groups)
}

fn gather<T: Real>(rows: &[T], width: usize, order: &[usize], top_k: usize) -> Vec<T> {
    let mut out = Vec::with_capacity(order.len() * width);
    for &slot in order {
        let token = slot / top_k;
        out.extend_from_slice(&rows[token * width..(token + 1) * width]);
    }
    out
}
