//! One step of reinforcement learning: recompute, measurements, mini steps. No files, no HTTP.
//!
//! Invariant: recompute and update execute the same routes. Where a row is missing, the model's own
//! choice in the recompute pass is stored and replayed.

mod base;
mod batch;
mod error;
#[cfg(test)]
mod tests;
mod update;

use super::batch::PackedBatch;
use super::learner::Learner;
use super::model::TrainModel;
use super::pass::Pass;
use base::Base;
pub use batch::TrainBatch;
pub use error::StepError;
use orchestrate_handoff::protocol::{Disagreement, Hyperparameters, Mismatch, StepMetrics};
use orchestrate_handoff::rules::refusals;
use std::cmp::Reverse;
use update::Tally;

/// Measurements of a batch by a forward pass without an update.
#[derive(Debug, Clone, PartialEq)]
pub struct Measured {
    /// Per sequence, log-prob of each token given those before it, nats; 0.0 for the first. `[T]`
    pub logprobs: Vec<Vec<f32>>,
    /// Mismatch with the engine's log-probs, over loss tokens.
    pub mismatch: Mismatch,
    /// Route disagreement; `None` if routes were replayed.
    pub disagreement: Option<Disagreement>,
}

/// Log-probs of every token, with the batch's routes replayed or not. The model is not changed.
pub fn measure(
    model: &TrainModel<f32>,
    batch: &TrainBatch,
    replay: bool,
    temperature: f64,
) -> Measured {
    let every = batch.packed.with_all_scored();
    let all: Vec<usize> = (0..every.sequences()).collect();
    let replay = replay.then_some(&batch.routes);
    let outputs = model.forward(&every, Pass { replay, temperature, ..Pass::new(&all) });
    Measured {
        mismatch: batch.mismatch(&outputs),
        disagreement: replay.is_none().then(|| batch.disagreement(&outputs)),
        logprobs: outputs.into_iter().map(|o| o.logprobs).collect(),
    }
}

/// Checks the hyperparameters of a request.
///
/// # Errors
/// Lists every invalid hyperparameter with its remedy.
pub fn check_settings(settings: &Hyperparameters) -> Result<(), StepError> {
    let problems: Vec<String> = refusals(settings).iter().map(ToString::to_string).collect();
    if problems.is_empty() { Ok(()) } else { Err(StepError::Setting(problems.join("; "))) }
}

/// Called with each phase and the share of it that is done; returns whether to continue.
pub type StepProgress<'a> = dyn FnMut(&'static str, f64) -> bool + 'a;

/// Applies one step. `reference` is the policy that the divergence is measured from. After an error
/// the learner may be partly changed: the caller keeps a copy. The caller sets `seconds` of the
/// metrics.
///
/// # Errors
/// [`StepError`].
pub fn apply(
    learner: &mut Learner,
    reference: Option<&TrainModel<f32>>,
    batch: &TrainBatch,
    settings: &Hyperparameters,
    progress: &mut StepProgress<'_>,
) -> Result<StepMetrics, StepError> {
    check_settings(settings)?;
    let all: Vec<usize> = (0..batch.packed.sequences()).collect();
    let loss_tokens = batch.loss_tokens(&all);
    if loss_tokens == 0 {
        return Err(StepError::Empty);
    }
    let mut metrics = StepMetrics {
        loss_tokens: loss_tokens as u64,
        tokens: batch.tokens() as u64,
        ..StepMetrics::default()
    };
    let replays = settings.routing_replay.replays_rollout();
    if replays {
        metrics.routing_missing = batch.missing_routes();
        let pairs = batch.route_pairs().max(1) as f64;
        metrics.routing_missing_fraction = metrics.routing_missing as f64 / pairs;
    }
    let parts = mini_steps(&batch.packed, settings.mini_steps);
    if !progress("recompute", 0.0) {
        return Err(StepError::Stopped);
    }
    if settings.measure_no_replay && replays {
        let pass = Pass {
            temperature: settings.temperature,
            micro_batch_tokens: settings.micro_batch_tokens,
            ..Pass::new(&all)
        };
        let outputs = learner.model.forward(&batch.packed, pass);
        metrics.mismatch_no_replay = Some(batch.mismatch(&outputs));
        metrics.disagreement = Some(batch.disagreement(&outputs));
    }
    let base = Base::new(learner, reference, (batch, settings), parts.len())?;
    if let Some(outputs) = &base.outputs {
        base.measure(&learner.model, outputs, &mut metrics);
    }
    let mut tally = Tally::default();
    for (number, sequences) in parts.iter().enumerate() {
        if !progress("update", number as f64 / parts.len() as f64) {
            return Err(StepError::Stopped);
        }
        let last = number + 1 == parts.len();
        let outputs = base.mini_step(learner, sequences, (number + 1, last), &mut tally)?;
        if base.outputs.is_none() {
            base.measure(&learner.model, &outputs, &mut metrics);
        }
    }
    tally.finish(&mut metrics, parts.len());
    if let (Some(value), Some(stats)) = (base.explained_variance(), &mut metrics.value) {
        stats.explained_variance = value;
    }
    Ok(metrics)
}

/// Sequences of each mini step: the longest first, each to the mini step with the fewest tokens so
/// far. No mini step is empty.
fn mini_steps(packed: &PackedBatch, count: u32) -> Vec<Vec<usize>> {
    let mut order: Vec<usize> = (0..packed.sequences()).collect();
    order.sort_by_key(|&s| Reverse(packed.range(s).len()));
    let count = usize::try_from(count).unwrap_or(usize::MAX).min(order.len());
    let mut parts = vec![(0, Vec::new()); count];
    for sequence in order {
        if let Some(part) = parts.iter_mut().min_by_key(|part| part.0) {
            part.0 += packed.range(sequence).len();
            part.1.push(sequence);
        }
    }
    parts
        .into_iter()
        .map(|(_, mut sequences)| {
            sequences.sort_unstable();
            sequences
        })
        .collect()
}
