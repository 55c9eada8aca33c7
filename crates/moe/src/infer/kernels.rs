//! Numeric kernels of the engine: matrix products, attention, norms.
//!
//! Invariant: each row of a result is computed from its own input row by a fixed sequence of
//! operations, whatever else is in the batch. This makes a request independent of the rest of its
//! batch, a cached prefix equal to a computed one, and an episode reproducible bit by bit from its
//! seed. Each kernel is written once and compiled for several instruction sets, which give the same
//! bits; the widest one that the processor has is chosen at start-up.
#![expect(
    clippy::indexing_slicing,
    reason = "dense numeric code; lengths are asserted at the entry of each kernel"
)]
#![expect(unsafe_code, reason = "calling code compiled for a wider instruction set than the base")]
#![expect(
    clippy::inline_always,
    reason = "a body is compiled for an instruction set only where it is inlined into its wrapper"
)]

use crate::fused::fused;
use crate::train::real::Real;
use orchestrate_cpu::Level;

/// Number of values in one [`Lanes`].
const LANES: usize = 16;
/// Number of columns computed together; a panel of this many columns and 128 rows fits the L1
/// cache.
const PANEL: usize = 2 * LANES;

/// Compiles `$body::<FUSED, WIDE>` for every instruction set and calls the one in `level`.
macro_rules! dispatch {
    ($(#[$doc:meta])* $vis:vis $name:ident => $body:ident ( $($arg:ident : $ty:ty),* $(,)? )) => {
        $(#[$doc])*
        $vis fn $name(level: Level, $($arg: $ty),*) {
            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx2,fma")]
            fn wide($($arg: $ty),*) {
                $body::<true, true>($($arg),*);
            }
            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx2,fma")]
            fn middle($($arg: $ty),*) {
                $body::<true, false>($($arg),*);
            }
            match level.set() {
                #[cfg(target_arch = "x86_64")]
                // SAFETY: this `Level` exists only if the CPU has the features.
                orchestrate_cpu::InstructionSet::Avx512 => unsafe { wide($($arg),*) },
                #[cfg(target_arch = "x86_64")]
                // SAFETY: as above.
                orchestrate_cpu::InstructionSet::Avx2 => unsafe { middle($($arg),*) },
                _ => $body::<{ $crate::fused::BASE_HAS_FMA }, false>($($arg),*),
            }
        }
    };
}

pub(super) use dispatch;

/// One register of values. Its loops use indices because those reliably compile to vector code;
/// iterator chains do not.
#[derive(Clone, Copy)]
struct Lanes([f32; LANES]);

impl Lanes {
    const ZERO: Self = Self([0.0; LANES]);

    #[inline(always)]
    fn pair(values: &[f32; PANEL]) -> (Self, Self) {
        let (mut a, mut b) = ([0.0; LANES], [0.0; LANES]);
        a.copy_from_slice(&values[..LANES]);
        b.copy_from_slice(&values[LANES..]);
        (Self(a), Self(b))
    }

    /// Takes at most [`LANES`] values and fills the rest with zeros.
    #[inline(always)]
    fn partial(values: &[f32]) -> Self {
        let mut all = [0.0; LANES];
        all[..values.len()].copy_from_slice(values);
        Self(all)
    }

    /// `self + other`.
    #[inline(always)]
    fn add(mut self, other: Self) -> Self {
        let mut j = 0;
        while j < LANES {
            self.0[j] += other.0[j];
            j += 1;
        }
        self
    }

    /// `self + value * other`.
    #[inline(always)]
    fn add_scaled<const FUSED: bool>(mut self, value: f32, other: Self) -> Self {
        let mut j = 0;
        while j < LANES {
            self.0[j] = fused::<FUSED>(value, other.0[j], self.0[j]);
            j += 1;
        }
        self
    }

    /// `self + a * b`.
    #[inline(always)]
    fn add_product<const FUSED: bool>(mut self, a: Self, b: Self) -> Self {
        let mut j = 0;
        while j < LANES {
            self.0[j] = fused::<FUSED>(a.0[j], b.0[j], self.0[j]);
            j += 1;
        }
        self
    }

    /// Sum of all values, added pairwise by halves.
    #[inline(always)]
    fn sum(mut self) -> f32 {
        let mut half = LANES / 2;
        while half > 0 {
            let mut j = 0;
            while j < half {
                self.0[j] += self.0[j + half];
                j += 1;
            }
            half /= 2;
        }
        self.0[0]
    }
}

/// A weight matrix `[n, k]` in f32, stored as panels of [`PANEL`] columns of its transpose.
#[derive(Debug)]
pub(crate) struct Dense {
    n: usize,
    k: usize,
    panels: Vec<f32>,
}

impl Dense {
    /// Packs `rows`, `[n, k]` row-major as in a checkpoint.
    pub(crate) fn pack(rows: &[f32], n: usize, k: usize) -> Self {
        assert_eq!(rows.len(), n * k);
        let mut panels = vec![0.0; n.div_ceil(PANEL) * PANEL * k];
        for (column, row) in rows.chunks_exact(k.max(1)).enumerate() {
            let base = column / PANEL * PANEL * k + column % PANEL;
            for (i, &value) in row.iter().enumerate() {
                panels[base + i * PANEL] = value;
            }
        }
        Self { n, k, panels }
    }

    /// `out[r] = W · x[r]` for rows of `x`, `[rows, k]`; `out` is `[rows, n]`.
    pub(crate) fn apply(&self, level: Level, x: &[f32], out: &mut [f32]) {
        assert_eq!(x.len() / self.k.max(1), out.len() / self.n.max(1));
        dense(level, self, x, out);
    }
}

dispatch!(dense => dense_body(matrix: &Dense, x: &[f32], out: &mut [f32]));

#[inline(always)]
fn dense_body<const FUSED: bool, const WIDE: bool>(matrix: &Dense, x: &[f32], out: &mut [f32]) {
    let (n, k) = (matrix.n, matrix.k);
    for (index, panel) in matrix.panels.chunks_exact(PANEL * k).enumerate() {
        let column = index * PANEL;
        // The narrower instruction sets do not have enough registers for four rows.
        if WIDE {
            tiles::<4, FUSED>(x, k, panel, out, n, column);
        } else {
            tiles::<2, FUSED>(x, k, panel, out, n, column);
        }
    }
}

#[inline(always)]
fn tiles<const ROWS: usize, const FUSED: bool>(
    x: &[f32],
    k: usize,
    panel: &[f32],
    out: &mut [f32],
    n: usize,
    column: usize,
) {
    let mut xs = x.chunks_exact(ROWS * k);
    let mut outs = out.chunks_exact_mut(ROWS * n);
    for (x, out) in xs.by_ref().zip(outs.by_ref()) {
        tile::<ROWS, FUSED>(x, k, panel, out, n, column);
    }
    let rest = outs.into_remainder();
    for (x, out) in xs.remainder().chunks_exact(k).zip(rest.chunks_exact_mut(n)) {
        tile::<1, FUSED>(x, k, panel, out, n, column);
    }
}

/// Computes [`PANEL`] output columns of `ROWS` rows; all partial sums stay in registers.
#[inline(always)]
fn tile<const ROWS: usize, const FUSED: bool>(
    x: &[f32],
    k: usize,
    panel: &[f32],
    out: &mut [f32],
    n: usize,
    column: usize,
) {
    let rows: [&[f32]; ROWS] = std::array::from_fn(|r| &x[r * k..(r + 1) * k]);
    let mut low = [Lanes::ZERO; ROWS];
    let mut high = [Lanes::ZERO; ROWS];
    let (weights, _) = panel.as_chunks::<PANEL>();
    for (i, weights) in weights[..k].iter().enumerate() {
        let (first, second) = Lanes::pair(weights);
        for r in 0..ROWS {
            let value = rows[r][i];
            low[r] = low[r].add_scaled::<FUSED>(value, first);
            high[r] = high[r].add_scaled::<FUSED>(value, second);
        }
    }
    let width = PANEL.min(n - column);
    for r in 0..ROWS {
        let start = r * n + column;
        let both = [low[r].0, high[r].0];
        out[start..start + width].copy_from_slice(&both.as_flattened()[..width]);
    }
}

dispatch!(
    /// RMSNorm of every row of `x` (`[rows, weight.len()]`) into `out`.
    pub(crate) rms_norm => rms_norm_body(x: &[f32], weight: &[f32], eps: f32, out: &mut [f32])
);

#[inline(always)]
fn rms_norm_body<const FUSED: bool, const WIDE: bool>(
    x: &[f32],
    weight: &[f32],
    eps: f32,
    out: &mut [f32],
) {
    let width = weight.len();
    for (x, out) in x.chunks_exact(width).zip(out.chunks_exact_mut(width)) {
        let scale = 1.0 / (dot::<FUSED>(x, x) / width as f32 + eps).sqrt();
        for ((o, &v), &w) in out.iter_mut().zip(x).zip(weight) {
            *o = v * scale * w;
        }
    }
}

/// Dot product over [`LANES`] independent sums.
#[inline(always)]
fn dot<const FUSED: bool>(a: &[f32], b: &[f32]) -> f32 {
    let (xs, x_rest) = a.as_chunks::<LANES>();
    let (ys, y_rest) = b.as_chunks::<LANES>();
    let mut sums = Lanes::ZERO;
    for (x, y) in xs.iter().zip(ys) {
        sums = sums.add_product::<FUSED>(Lanes(*x), Lanes(*y));
    }
    if !x_rest.is_empty() {
        sums = sums.add_product::<FUSED>(Lanes::partial(x_rest), Lanes::partial(y_rest));
    }
    sums.sum()
}

dispatch!(
    /// `silu(gate) * up` for rows `[gate | up]` of `x`, `[rows, 2 * width]`; `out` is `[rows,
    /// width]`.
    pub(crate) gated_silu => gated_silu_body(x: &[f32], width: usize, out: &mut [f32])
);

#[inline(always)]
fn gated_silu_body<const FUSED: bool, const WIDE: bool>(x: &[f32], width: usize, out: &mut [f32]) {
    for (x, out) in x.chunks_exact(2 * width).zip(out.chunks_exact_mut(width)) {
        let (gate, up) = x.split_at(width);
        for ((o, &g), &u) in out.iter_mut().zip(gate).zip(up) {
            *o = g / (1.0 + Real::exp(-g)) * u;
        }
    }
}

dispatch!(
    /// Replaces logits by `exp(logit - max)` after scaling and writes `[max, sum]` to `stats`.
    pub(crate) exp_shifted => exp_shifted_body(x: &mut [f32], scale: f32, stats: &mut [f32; 2])
);

#[inline(always)]
fn exp_shifted_body<const FUSED: bool, const WIDE: bool>(
    x: &mut [f32],
    scale: f32,
    stats: &mut [f32; 2],
) {
    let (lanes, rest) = x.as_chunks_mut::<LANES>();
    let mut largest = Lanes([f32::NEG_INFINITY; LANES]);
    for lane in lanes {
        let mut j = 0;
        while j < LANES {
            lane[j] *= scale;
            let keep = largest.0[j];
            largest.0[j] = if lane[j] > keep { lane[j] } else { keep };
            j += 1;
        }
    }
    let mut max = largest.0.into_iter().fold(f32::NEG_INFINITY, Real::max);
    for v in rest {
        *v *= scale;
        max = Real::max(max, *v);
    }
    for v in x.iter_mut() {
        *v = Real::exp(*v - max);
    }
    let (lanes, rest) = x.as_chunks::<LANES>();
    let mut sums = Lanes::partial(rest);
    for lane in lanes {
        sums = sums.add(Lanes(*lane));
    }
    *stats = [max, sums.sum()];
}

/// Keys and values that attention reads, stored by slot: `[slots, kv_heads * head_dim]`.
#[derive(Debug, Clone, Copy)]
pub(crate) struct KvView<'a> {
    /// Keys after RoPE.
    pub(crate) keys: &'a [f32],
    /// Values, in the same layout as `keys`.
    pub(crate) values: &'a [f32],
    /// Slot of each attended position, in order.
    pub(crate) slots: &'a [u32],
    /// Number of key and value heads.
    pub(crate) kv_heads: usize,
    /// Width of one head.
    pub(crate) head_dim: usize,
}

dispatch!(
    /// Attention of one token: `query` and `out` are `[heads * head_dim]`; `scores` is scratch.
    pub(crate) attend => attend_body(kv: KvView<'_>, query: &[f32], scores: &mut Vec<f32>, out: &mut [f32])
);

#[inline(always)]
fn attend_body<const FUSED: bool, const WIDE: bool>(
    kv: KvView<'_>,
    query: &[f32],
    scores: &mut Vec<f32>,
    out: &mut [f32],
) {
    let KvView { keys, values, slots, kv_heads, head_dim } = kv;
    let stride = kv_heads * head_dim;
    let group = query.len() / stride;
    let scale = 1.0 / (head_dim as f32).sqrt();
    let mut stats = [0.0; 2];
    scores.resize(group * slots.len(), 0.0);
    for head in 0..kv_heads {
        let from = head * group * head_dim;
        let queries = &query[from..from + group * head_dim];
        let outs = &mut out[from..from + group * head_dim];
        for (position, &slot) in slots.iter().enumerate() {
            let start = slot as usize * stride + head * head_dim;
            let key = &keys[start..start + head_dim];
            for (g, query) in queries.chunks_exact(head_dim).enumerate() {
                scores[g * slots.len() + position] = dot::<FUSED>(query, key);
            }
        }
        for weights in scores.chunks_exact_mut(slots.len()) {
            exp_shifted_body::<FUSED, WIDE>(weights, scale, &mut stats);
            let inverse = 1.0 / stats[1];
            for w in weights {
                *w *= inverse;
            }
        }
        for (g, out) in outs.chunks_exact_mut(head_dim).enumerate() {
            let weights = &scores[g * slots.len()..(g + 1) * slots.len()];
            let offset = head * head_dim;
            let mut done = 0;
            while done + PANEL <= head_dim {
                let start = offset + done;
                let sums = weighted::<2, FUSED>(values, slots, weights, stride, start);
                out[done..done + PANEL].copy_from_slice(sums.map(|s| s.0).as_flattened());
                done += PANEL;
            }
            if done + LANES <= head_dim {
                let [sum] = weighted::<1, FUSED>(values, slots, weights, stride, offset + done);
                out[done..done + LANES].copy_from_slice(&sum.0);
                done += LANES;
            }
            for (i, out) in out.iter_mut().enumerate().skip(done) {
                let value = |slot: u32| values[slot as usize * stride + offset + i];
                *out = slots.iter().zip(weights).map(|(&s, &w)| w * value(s)).sum();
            }
        }
    }
}

/// Weighted sum over positions of `PARTS` registers of their values, starting at offset `start`.
#[inline(always)]
fn weighted<const PARTS: usize, const FUSED: bool>(
    values: &[f32],
    slots: &[u32],
    weights: &[f32],
    stride: usize,
    start: usize,
) -> [Lanes; PARTS] {
    let mut sums = [Lanes::ZERO; PARTS];
    for (&slot, &weight) in slots.iter().zip(weights) {
        let at = slot as usize * stride + start;
        let (lanes, _) = values[at..at + PARTS * LANES].as_chunks::<LANES>();
        for part in 0..PARTS {
            sums[part] = sums[part].add_scaled::<FUSED>(weight, Lanes(lanes[part]));
        }
    }
    sums
}
