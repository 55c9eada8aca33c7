//! Output head: log-probabilities and entropy of given next tokens, and their backward pass. Logits
//! are computed for [`CHUNK`] rows at a time, to bound memory.
#![expect(clippy::indexing_slicing, reason = "dense numeric code over rows of known width")]

use super::linalg::{View, ViewMut, add_scaled, dot, largest, matmul, sum};
use super::real::Real;
use orchestrate_cpu::kernel;

/// Number of rows whose logits are computed at once.
const CHUNK: usize = 128;

/// Scored rows of the final hidden states `[N, hidden]`, and the token that each must predict.
#[derive(Debug, Default)]
pub(crate) struct Targets {
    pub(crate) rows: Vec<usize>,
    pub(crate) tokens: Vec<u32>,
}

/// Log-prob and entropy (in nats, at the sampling temperature) and log-sum-exp of the logits, per
/// target.
#[derive(Debug)]
pub(crate) struct HeadTrace<T> {
    pub(crate) logprobs: Vec<T>,
    pub(crate) entropy: Vec<T>,
    lse: Vec<T>,
}

/// Output head weights `[V, hidden]` and the inverse temperature.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Head<'a, T> {
    pub(crate) weight: &'a [T],
    pub(crate) hidden: usize,
    pub(crate) sharpness: f64,
}

impl<T: Real> Head<'_, T> {
    fn vocab(&self) -> usize {
        self.weight.len() / self.hidden
    }

    /// Computes log-prob and entropy of each target.
    pub(crate) fn forward(&self, x: &[T], targets: &Targets) -> HeadTrace<T> {
        let count = targets.rows.len();
        let mut trace = HeadTrace {
            logprobs: Vec::with_capacity(count),
            entropy: Vec::with_capacity(count),
            lse: Vec::with_capacity(count),
        };
        let mut logits = Vec::new();
        for (rows, tokens) in targets.rows.chunks(CHUNK).zip(targets.tokens.chunks(CHUNK)) {
            self.logits(&self.pick(x, rows), rows.len(), &mut logits);
            score(self.vocab(), tokens, &mut logits, &mut trace);
        }
        trace
    }

    /// Adds the gradients of `x` and of the head weights, given `coefficients = dL/dlogprob` per
    /// target. Targets with coefficient 0 are skipped.
    pub(crate) fn backward(
        &self,
        x: &[T],
        (targets, trace): (&Targets, &HeadTrace<T>),
        coefficients: &[T],
        dx: &mut [T],
        d_weight: &mut [T],
    ) {
        let active: Vec<usize> =
            (0..coefficients.len()).filter(|&i| coefficients[i] != T::ZERO).collect();
        let mut logits = Vec::new();
        let mut d_rows = Vec::new();
        for chunk in active.chunks(CHUNK) {
            let rows: Vec<usize> = chunk.iter().map(|&i| targets.rows[i]).collect();
            let picked = self.pick(x, &rows);
            self.logits(&picked, rows.len(), &mut logits);
            let c = (coefficients, T::from_f64(self.sharpness));
            logits_backward(self.vocab(), chunk, c, (targets, trace), &mut logits);
            let d_logits = View::new(&logits, rows.len(), self.vocab());
            d_rows.resize(rows.len() * self.hidden, T::ZERO);
            let weight = View::new(self.weight, self.vocab(), self.hidden);
            let into = ViewMut::new(&mut d_rows, rows.len(), self.hidden);
            matmul(into, false, 1.0, d_logits, weight);
            let into = ViewMut::new(d_weight, self.vocab(), self.hidden);
            matmul(into, true, 1.0, d_logits.t(), View::new(&picked, rows.len(), self.hidden));
            for (&row, d) in rows.iter().zip(d_rows.chunks_exact(self.hidden)) {
                add_scaled(&mut dx[row * self.hidden..(row + 1) * self.hidden], T::ONE, d);
            }
        }
    }

    fn pick(&self, x: &[T], rows: &[usize]) -> Vec<T> {
        let hidden = self.hidden;
        rows.iter().flat_map(|&row| &x[row * hidden..(row + 1) * hidden]).copied().collect()
    }

    fn logits(&self, picked: &[T], rows: usize, logits: &mut Vec<T>) {
        logits.resize(rows * self.vocab(), T::ZERO);
        matmul(
            ViewMut::new(logits, rows, self.vocab()),
            false,
            self.sharpness,
            View::new(picked, rows, self.hidden),
            View::new(self.weight, self.vocab(), self.hidden).t(),
        );
    }
}

kernel! {
    /// Appends log-prob, entropy and log-sum-exp of each row of `logits [tokens, V]` to `trace`; the logits are
    /// overwritten.
    fn score<T: Real>(vocab: usize, tokens: &[u32], logits: &mut [T], trace: &mut HeadTrace<T>) {
        for (row, &token) in logits.chunks_exact_mut(vocab).zip(tokens) {
            let top = largest(row);
            let chosen = row[token as usize] - top;
            // Accumulates the entropy term in the same loop.
            let mut weighted = [T::ZERO; 16];
            let (lanes, rest) = row.as_chunks_mut::<16>();
            for lane in lanes {
                for i in 0..16 {
                    let z = lane[i] - top;
                    lane[i] = z.exp();
                    weighted[i] += lane[i] * z;
                }
            }
            let mut inner: T = weighted.into_iter().sum();
            for value in rest {
                let z = *value - top;
                *value = z.exp();
                inner += *value * z;
            }
            let total = sum(row);
            let log_total = total.ln();
            trace.logprobs.push(chosen - log_total);
            trace.entropy.push(log_total - inner / total);
            trace.lse.push(top + log_total);
        }
    }
}

kernel! {
    /// Replaces the logits of the targets `chosen` by their gradient, given all targets' coefficients and the
    /// inverse temperature.
    fn logits_backward<T: Real>(
        vocab: usize,
        chosen: &[usize],
        slopes: (&[T], T),
        forward: (&Targets, &HeadTrace<T>),
        logits: &mut [T],
    ) {
        let ((coefficients, sharpness), (targets, trace)) = (slopes, forward);
        for (row, &i) in logits.chunks_exact_mut(vocab).zip(chosen) {
            let c = coefficients[i] * sharpness;
            let lse = trace.lse[i];
            for value in &mut *row {
                *value = -c * (*value - lse).exp();
            }
            row[targets.tokens[i] as usize] += c;
        }
    }
}

/// A linear value head on the final hidden states: `hidden` weights, then the bias.
#[derive(Debug, Clone, Copy)]
pub(crate) struct ValueHead<'a, T> {
    pub(crate) weights: &'a [T],
}

impl<T: Real> ValueHead<'_, T> {
    fn hidden(&self) -> usize {
        self.weights.len() - 1
    }

    /// Computes the value at each target's row.
    pub(crate) fn forward(&self, x: &[T], targets: &Targets) -> Vec<T> {
        let hidden = self.hidden();
        let (weights, bias) = self.weights.split_at(hidden);
        let value = |&row: &usize| dot(&x[row * hidden..(row + 1) * hidden], weights) + bias[0];
        targets.rows.iter().map(value).collect()
    }

    /// Adds the gradients of `x` and of the weights, given `dL/dvalue` per target.
    pub(crate) fn backward(
        &self,
        x: &[T],
        targets: &Targets,
        slopes: &[T],
        dx: &mut [T],
        d_weights: &mut [T],
    ) {
        let hidden = self.hidden();
        for (&row, &slope) in targets.rows.iter().zip(slopes) {
            let place = row * hidden..(row + 1) * hidden;
            add_scaled(&mut dx[place.clone()], slope, &self.weights[..hidden]);
            add_scaled(&mut d_weights[..hidden], slope, &x[place]);
            d_weights[hidden] += slope;
        }
    }
}
