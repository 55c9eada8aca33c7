//! One mini step: forward and backward over part of the sequences, and an update.

use super::StepError;
use super::base::Base;
use crate::diagnostics::differing_experts;
use crate::loss::predictor::{Features, loss as predictor_loss};
use crate::loss::{Objective, Ratio, SequenceLoss, Totals, shift, value};
use crate::train::learner::Learner;
use crate::train::model::TrainModel;
use crate::train::optimizer::{AdamSettings, clip_global_norm};
use crate::train::pass::{Pass, SequenceOutput, TokenGradient, spread};
use orchestrate_handoff::protocol::{
    PolicyRatio, RouterShift, RouterShiftStats, RoutingReplay, StepMetrics, ValueStats,
};

/// Sums over all mini steps.
#[derive(Debug, Default)]
pub(super) struct Tally {
    loss: f64,
    grad_norm: f64,
    router_grad_norm: f64,
    learning_rate: f64,
    clipped: (usize, usize),
    ratio: f64,
    ratio_max: f64,
    value_loss: Option<f64>,
    predictor: (f64, u32),
    shift: f64,
    floored: usize,
    shifted: usize,
    drift: Option<f64>,
}

impl Tally {
    pub(super) fn finish(self, metrics: &mut StepMetrics, mini_steps: usize) {
        let steps = mini_steps.max(1) as f64;
        let tokens = metrics.loss_tokens.max(1) as f64;
        let share = |count: usize| count as f64 / tokens;
        metrics.loss = self.loss / steps;
        metrics.grad_norm = self.grad_norm / steps;
        metrics.router_grad_norm = self.router_grad_norm / steps;
        metrics.learning_rate = self.learning_rate;
        metrics.clip_fraction = share(self.clipped.0 + self.clipped.1);
        metrics.ratio = PolicyRatio {
            mean: self.ratio / tokens,
            max: self.ratio_max,
            clipped_low: share(self.clipped.0),
            clipped_high: share(self.clipped.1),
        };
        let explained_variance = 0.0;
        metrics.value =
            self.value_loss.map(|loss| ValueStats { loss: loss / steps, explained_variance });
        let (total, times) = self.predictor;
        metrics.predictor_loss = (times > 0).then(|| total / f64::from(times));
        metrics.router_shift = (self.shifted > 0).then(|| RouterShiftStats {
            mean: self.shift / self.shifted as f64,
            floored: self.floored as f64 / self.shifted as f64,
        });
        metrics.route_drift = self.drift;
    }
}

/// Loss of one sequence, including the value head.
struct SequenceTerms {
    policy: SequenceLoss<f32>,
    value_loss: f64,
    value_gradient: Vec<f32>,
}

impl Base<'_> {
    /// Updates the learner on `sequences`; `number` counts mini steps from 1.
    pub(super) fn mini_step(
        &self,
        learner: &mut Learner,
        sequences: &[usize],
        (number, last): (usize, bool),
        tally: &mut Tally,
    ) -> Result<Vec<SequenceOutput<f32>>, StepError> {
        let h = self.settings;
        let totals =
            Totals { sequences: sequences.len(), loss_tokens: self.batch.loss_tokens(sequences) };
        // The first mini step is at the weights of the rollout, where no router has moved.
        let moved = number > 1;
        let predictive = moved && h.routing_replay == RoutingReplay::Predictive;
        let shifted = moved && h.router_shift != RouterShift::None;
        let drifts = moved && last && self.routes().is_some();
        let head = self.estimates.as_ref().and(learner.auxiliary.value_head.as_ref());
        let head = head.map(|head| head.weights().to_vec());
        let pass = Pass {
            replay: self.routes(),
            value_head: head.as_deref(),
            router_logits: predictive || shifted || drifts,
            ..self.plain(sequences)
        };
        let model = &learner.model;
        let mut grads = vec![0.0; model.params().len() + head.as_ref().map_or(0, Vec::len)];
        let gradient = |output: &SequenceOutput<f32>| {
            let weights = shifted.then(|| self.shift_weights(model, output));
            let terms = self.terms(output, weights.as_deref(), totals);
            TokenGradient { logprobs: terms.policy.gradient, values: terms.value_gradient }
        };
        let (outputs, _) = model.forward_backward(&self.batch.packed, pass, &gradient, &mut grads);
        let mut loss = 0.0;
        for output in &outputs {
            let weights = shifted.then(|| self.shift_weights(model, output));
            let terms = self.terms(output, weights.as_deref(), totals);
            loss += terms.policy.value + h.value_coefficient * terms.value_loss;
            if head.is_some() {
                *tally.value_loss.get_or_insert(0.0) += terms.value_loss;
            }
            tally.clipped.0 += terms.policy.clipped.0;
            tally.clipped.1 += terms.policy.clipped.1;
            self.count_ratios(output, weights.as_deref(), tally);
        }
        let not_finite = |what| StepError::NotFinite { what, mini_step: number };
        if !loss.is_finite() {
            return Err(not_finite("the loss"));
        }
        let (grads, head_grads) = grads.split_at_mut(model.params().len());
        let routers = model.layout().layers.iter().map(|slots| slots.router.clone());
        let squares: f64 = routers
            .flat_map(|range| grads.get(range).unwrap_or_default())
            .map(|&g| f64::from(g) * f64::from(g))
            .sum();
        let grad_norm = clip_global_norm(grads, h.max_grad_norm);
        if !grad_norm.is_finite() {
            return Err(not_finite("the gradient"));
        }
        tally.loss += loss;
        tally.grad_norm += grad_norm;
        tally.router_grad_norm += squares.sqrt();
        if drifts {
            tally.drift = Some(drift(model, &outputs));
        }
        // Without loss tokens there is no gradient, and momentum alone must not move the weights.
        if totals.loss_tokens == 0 {
            return Ok(outputs);
        }
        let update = learner.next_update(h);
        tally.learning_rate = update.learning_rate;
        let with_rate = |rate: f64| AdamSettings {
            learning_rate: update.learning_rate * rate,
            weight_decay: 0.0,
            ..update
        };
        if predictive {
            tally.predictor.0 +=
                self.learn_to_predict(learner, &outputs, with_rate(h.predictor_rate));
            tally.predictor.1 += 1;
        }
        if head.is_some()
            && let Some(head) = &mut learner.auxiliary.value_head
        {
            head.update(with_rate(h.value_rate), head_grads, h.max_grad_norm);
        }
        learner.adam.update(update, learner.model.params_mut(), grads);
        Ok(outputs)
    }

    fn terms(
        &self,
        output: &SequenceOutput<f32>,
        shift: Option<&[f64]>,
        totals: Totals,
    ) -> SequenceTerms {
        let tokens = self.tokens(output, shift);
        let policy = Objective::new(self.settings, totals).sequence(tokens);
        let (mut value_loss, mut value_gradient) = (0.0, Vec::new());
        let estimates = self.estimates.as_ref().and_then(|all| all.get(output.sequence));
        if let (Some(estimates), Some(old)) = (estimates, self.old(output.sequence)) {
            value_gradient = vec![0.0; output.values.len()];
            let h = self.settings;
            let weight = 1.0 / totals.loss_tokens.max(1) as f64;
            let pairs = output.values.iter().zip(&old.values).zip(&estimates.returns);
            let slots = value_gradient.iter_mut().zip(pairs).zip(tokens.mask);
            for ((slot, ((&new, &old), &due)), _) in slots.filter(|(_, m)| **m) {
                let (loss, slope) = value::loss(f64::from(new), f64::from(old), due, h.value_clip);
                value_loss += weight * loss;
                *slot = to_f32(h.value_coefficient * weight * slope);
            }
        }
        SequenceTerms { policy, value_loss, value_gradient }
    }

    /// Router-shift weights of a sequence's tokens, at least the floor. Token `p` has the weight of
    /// row `p − 1`, which it is predicted from. `[T]`
    fn shift_weights(&self, model: &TrainModel<f32>, output: &SequenceOutput<f32>) -> Vec<f64> {
        let config = model.config();
        let (layers, floor) = (config.num_hidden_layers, self.settings.router_shift_floor);
        let Some(old) = self.old(output.sequence) else { return Vec::new() };
        let width = layers * config.num_experts;
        let rows =
            old.router_logits.chunks_exact(width).zip(output.router_logits.chunks_exact(width));
        let rows = rows.zip(old.routes.chunks_exact(layers * config.num_experts_per_tok));
        let weights = rows.map(|((old, new), ids)| shift::gamma(old, new, ids, layers).max(floor));
        std::iter::once(1.0).chain(weights).take(output.logprobs.len()).collect()
    }

    fn count_ratios(&self, output: &SequenceOutput<f32>, shift: Option<&[f64]>, tally: &mut Tally) {
        let tokens = self.tokens(output, None);
        let pairs = tokens.new.iter().zip(tokens.old).zip(tokens.mask);
        for ((&new, &old), _) in pairs.filter(|(_, m)| **m) {
            let ratio = Ratio::exp(f64::from(new) - f64::from(old)).value;
            tally.ratio += ratio;
            tally.ratio_max = tally.ratio_max.max(ratio);
        }
        let floor = self.settings.router_shift_floor;
        let weights = shift.unwrap_or_default().iter().zip(tokens.mask);
        for (&weight, _) in weights.filter(|(_, m)| **m) {
            tally.shift += weight;
            tally.shifted += 1;
            tally.floored += usize::from(weight <= floor);
        }
    }

    /// Updates the router predictor from how far the routers have moved since the rollout. Returns
    /// its loss before the update: mean over rows, sum over layers.
    fn learn_to_predict(
        &self,
        learner: &mut Learner,
        outputs: &[SequenceOutput<f32>],
        update: AdamSettings,
    ) -> f64 {
        let config = learner.model.config().clone();
        let (layers, experts) = (config.num_hidden_layers, config.num_experts);
        let (hidden, limit) = (config.hidden_size, self.settings.predictor_tokens);
        let predictor = learner.auxiliary.predictor(&config);
        let mut grads = vec![0.0; predictor.weights().len()];
        let (mut total, mut rows) = (0.0, 0);
        let per_layer = predictor.weights().chunks_exact(experts * hidden);
        for (layer, (weights, grads)) in
            per_layer.zip(grads.chunks_exact_mut(experts * hidden)).enumerate()
        {
            for output in outputs {
                let Some(old) = self.old(output.sequence) else { continue };
                let inputs = columns(&old.router_inputs, layers, hidden, layer);
                let kept = spread(output.logprobs.len(), limit);
                let (mut then, mut now) = (Vec::new(), Vec::new());
                for row in kept {
                    let at = (row * layers + layer) * experts;
                    then.extend(old.router_logits.get(at..at + experts).unwrap_or_default());
                    now.extend(output.router_logits.get(at..at + experts).unwrap_or_default());
                }
                let features = Features { inputs: &inputs, old: &then, new: &now };
                total += predictor_loss(features, experts, weights, grads);
                rows += usize::from(layer == 0) * (then.len() / experts);
            }
        }
        let scale = 1.0 / rows.max(1) as f64;
        for g in &mut grads {
            *g *= to_f32(scale);
        }
        predictor.update(update, &mut grads, self.settings.max_grad_norm);
        total * scale
    }
}

/// One layer's values of `[rows, layers, width]`.
fn columns(all: &[f32], layers: usize, width: usize, layer: usize) -> Vec<f32> {
    all.chunks_exact(width).skip(layer).step_by(layers).flatten().copied().collect()
}

/// Share of (token, layer) pairs whose own choice differs from the executed one, last tokens
/// excepted.
fn drift(model: &TrainModel<f32>, outputs: &[SequenceOutput<f32>]) -> f64 {
    let (experts, top_k) = (model.config().num_experts, model.config().num_experts_per_tok);
    let layers = model.config().num_hidden_layers;
    let (mut pairs, mut left) = (0u64, 0u64);
    let mut own = vec![0; top_k];
    for output in outputs {
        let inputs = output.logprobs.len().saturating_sub(1) * layers;
        let routers =
            output.router_logits.chunks_exact(experts).zip(output.routes.chunks_exact(top_k));
        for (logits, executed) in routers.take(inputs) {
            model.family().select(logits, &mut own);
            pairs += 1;
            left += u64::from(differing_experts(executed, &own) > 0);
        }
    }
    left as f64 / pairs.max(1) as f64
}

#[expect(clippy::cast_possible_truncation, reason = "gradients are f32")]
fn to_f32(value: f64) -> f32 {
    value as f32
}
