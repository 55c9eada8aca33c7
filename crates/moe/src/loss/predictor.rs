//! PR2's predictor of one layer: how the router's logits will change within a batch, as a linear
//! function of the router's input. The prediction affects which experts are chosen; their weights
//! come from the router's own logits.

use crate::router::softmax;
use crate::train::real::Real;

/// Training data of the predictor for `N` tokens. Constants.
#[derive(Debug, Clone, Copy)]
pub struct Features<'a, T> {
    /// Router inputs at the weights of the rollout. `[N, hidden]`
    pub inputs: &'a [T],
    /// Router logits at the weights of the rollout. `[N, experts]`
    pub old: &'a [T],
    /// Router logits at the present weights. `[N, experts]`
    pub new: &'a [T],
}

/// Adds `inputs · Wᵀ` to one token's logits; `weights [experts, hidden]`.
pub fn add_prediction<T: Real>(weights: &[T], inputs: &[T], logits: &mut [T]) {
    for (logit, row) in logits.iter_mut().zip(weights.chunks_exact(inputs.len().max(1))) {
        *logit += row.iter().zip(inputs).map(|(&w, &h)| w * h).sum();
    }
}

/// Sum over tokens of `KL(softmax(new) ‖ softmax(old + h Wᵀ))`; adds its gradient by `weights` to
/// `gradient`, both `[experts, hidden]`.
pub fn loss<T: Real>(
    features: Features<'_, T>,
    experts: usize,
    weights: &[T],
    gradient: &mut [T],
) -> f64 {
    let hidden = weights.len() / experts.max(1);
    if hidden == 0 {
        return 0.0;
    }
    let logits = features.old.chunks_exact(experts).zip(features.new.chunks_exact(experts));
    let mut total = 0.0;
    for ((old, new), inputs) in logits.zip(features.inputs.chunks_exact(hidden)) {
        let mut predicted = old.to_vec();
        add_prediction(weights, inputs, &mut predicted);
        let (predicted, now) = (softmax(&predicted), softmax(new));
        for ((q, p), row) in predicted.iter().zip(&now).zip(gradient.chunks_exact_mut(hidden)) {
            let (from, to) = (p.to_f64(), q.to_f64());
            if from > 0.0 {
                total += from * (libm::log(from) - libm::log(to.max(f64::MIN_POSITIVE)));
            }
            for (slot, &h) in row.iter_mut().zip(inputs) {
                *slot += (*q - *p) * h;
            }
        }
    }
    total
}
