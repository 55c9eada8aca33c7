//! Everything that is computed before the first mini step, at the weights of the rollout.

use super::{StepError, TrainBatch};
use crate::ModelConfig;
use crate::diagnostics::RolloutRatioSum;
use crate::loss::divergence::penalty;
use crate::loss::value::{Estimates, estimates, whiten};
use crate::loss::{Advantages, SequenceTokens, importance, log_rollout_ratios};
use crate::train::batch::{BatchError, Routes};
use crate::train::learner::Learner;
use crate::train::model::TrainModel;
use crate::train::pass::{Pass, SequenceOutput};
use orchestrate_handoff::protocol::{
    Hyperparameters, KlEstimator, PolicyLoss, RouterShift, RoutingReplay, StepMetrics,
};

/// A batch at the weights of the rollout.
#[derive(Debug)]
pub(super) struct Base<'a> {
    pub(super) batch: &'a TrainBatch,
    pub(super) settings: &'a Hyperparameters,
    /// Outputs of the recompute pass, in batch order; `None` with one mini step, whose own forward
    /// pass is at the same weights.
    pub(super) outputs: Option<Vec<SequenceOutput<f32>>>,
    /// Routes that the recompute pass executed, with missing rows filled in.
    executed: Option<Routes>,
    /// Log-probs under the reference policy, nats. `[S][T]`
    references: Option<Vec<Vec<f32>>>,
    /// Advantages, whitened, and returns from the value head, per sequence.
    pub(super) estimates: Option<Vec<Estimates>>,
}

impl<'a> Base<'a> {
    pub(super) fn new(
        learner: &mut Learner,
        reference: Option<&TrainModel<f32>>,
        (batch, settings): (&'a TrainBatch, &'a Hyperparameters),
        mini_steps: usize,
    ) -> Result<Self, StepError> {
        let config = learner.model.config().clone();
        let values = settings.policy_loss == PolicyLoss::Ppo;
        let head = values.then(|| learner.auxiliary.value_head(&config).weights().to_vec());
        let predictive = settings.routing_replay == RoutingReplay::Predictive;
        if predictive {
            learner.auxiliary.predictor(&config);
        }
        let mut base = Self {
            batch,
            settings,
            outputs: None,
            executed: None,
            references: None,
            estimates: None,
        };
        let all: Vec<usize> = (0..batch.packed.sequences()).collect();
        if settings.kl_coefficient > 0.0 {
            let model = reference.ok_or(StepError::NoReference)?;
            let outputs = model.forward(&batch.packed, base.plain(&all));
            base.references = Some(outputs.into_iter().map(|o| o.logprobs).collect());
        }
        // With one mini step the forward pass of the update is at the weights of the rollout: its
        // log-probs are the old ones, and a recompute pass would only repeat it. The advantages of
        // a value head are needed before the update.
        if mini_steps == 1 && !values {
            return Ok(base);
        }
        let pass = Pass {
            replay: base.replayed(),
            value_head: head.as_deref(),
            router_logits: predictive || settings.router_shift != RouterShift::None,
            router_inputs: if predictive { settings.predictor_tokens } else { 0 },
            ..base.plain(&all)
        };
        let outputs = learner.model.forward(&batch.packed, pass);
        base.executed = match settings.routing_replay {
            RoutingReplay::None => None,
            RoutingReplay::Recompute | RoutingReplay::Rollout | RoutingReplay::Predictive => {
                Some(executed_routes(&config, &outputs)?)
            }
        };
        base.estimates = values.then(|| base.estimate(&outputs));
        base.outputs = Some(outputs);
        Ok(base)
    }

    /// A pass over `sequences` without replay and without captures.
    pub(super) fn plain<'p>(&self, sequences: &'p [usize]) -> Pass<'p, f32> {
        Pass {
            temperature: self.settings.temperature,
            micro_batch_tokens: self.settings.micro_batch_tokens,
            ..Pass::new(sequences)
        }
    }

    /// Routes of the rollout, if they are replayed.
    fn replayed(&self) -> Option<&'a Routes> {
        self.settings.routing_replay.replays_rollout().then_some(&self.batch.routes)
    }

    /// Routes that the update passes replay.
    pub(super) fn routes(&self) -> Option<&Routes> {
        self.executed.as_ref().or(self.replayed())
    }

    /// Output of the recompute pass for a sequence.
    pub(super) fn old(&self, sequence: usize) -> Option<&SequenceOutput<f32>> {
        self.outputs.as_ref().and_then(|all| all.get(sequence))
    }

    /// Inputs of the loss of a sequence. Without a recompute pass the old log-probs are the new
    /// ones.
    pub(super) fn tokens<'t>(
        &'t self,
        output: &'t SequenceOutput<f32>,
        shift: Option<&'t [f64]>,
    ) -> SequenceTokens<'t, f32> {
        let sequence = output.sequence;
        let reference = self.references.as_ref().and_then(|all| all.get(sequence));
        SequenceTokens {
            new: &output.logprobs,
            old: self.old(sequence).map_or(&output.logprobs, |old| &old.logprobs),
            sampler: self.batch.sampler(sequence),
            reference: reference.map(Vec::as_slice),
            shift,
            mask: self.batch.mask(sequence),
            advantages: match self.estimates.as_ref().and_then(|all| all.get(sequence)) {
                Some(estimates) => Advantages::Tokens(&estimates.advantages),
                None => Advantages::Sequence(
                    self.batch.advantages.get(sequence).copied().unwrap_or(0.0),
                ),
            },
        }
    }

    /// Advantages and returns of every sequence. A k1 divergence is subtracted from the rewards.
    fn estimate(&self, outputs: &[SequenceOutput<f32>]) -> Vec<Estimates> {
        let h = self.settings;
        let in_reward = h.kl_coefficient > 0.0 && h.kl_estimator == KlEstimator::K1;
        let mut all: Vec<Estimates> = outputs
            .iter()
            .map(|output| {
                let mask = self.batch.mask(output.sequence);
                let mut rewards = vec![0.0; mask.len()];
                let last = mask.iter().rposition(|&m| m);
                if let Some(slot) = last.and_then(|last| rewards.get_mut(last)) {
                    *slot = self.batch.rewards.get(output.sequence).copied().unwrap_or(0.0);
                }
                let references = self.references.as_ref().filter(|_| in_reward);
                if let Some(reference) = references.and_then(|all| all.get(output.sequence)) {
                    let pairs = output.logprobs.iter().zip(reference);
                    for (reward, (&old, &reference)) in rewards.iter_mut().zip(pairs) {
                        let term = penalty(KlEstimator::K1, f64::from(old), f64::from(reference));
                        *reward -= h.kl_coefficient * term.value;
                    }
                }
                let values: Vec<f64> = output.values.iter().map(|&v| f64::from(v)).collect();
                estimates(&rewards, &values, mask, (h.gae_gamma, h.gae_lambda))
            })
            .collect();
        let mut live: Vec<&mut f64> = all
            .iter_mut()
            .zip(outputs)
            .flat_map(|(estimates, output)| {
                let mask = self.batch.mask(output.sequence);
                estimates.advantages.iter_mut().zip(mask).filter(|(_, m)| **m).map(|(a, _)| a)
            })
            .collect();
        whiten(&mut live);
        all
    }

    /// Share of the returns' variance that the value head explains; `None` without one.
    pub(super) fn explained_variance(&self) -> Option<f64> {
        let (estimates, outputs) = (self.estimates.as_ref()?, self.outputs.as_ref()?);
        let (mut due, mut left) = (Vec::new(), Vec::new());
        for (estimates, output) in estimates.iter().zip(outputs) {
            let mask = self.batch.mask(output.sequence);
            let pairs = estimates.returns.iter().zip(&output.values).zip(mask);
            for ((&returned, &value), _) in pairs.filter(|(_, m)| **m) {
                due.push(returned);
                left.push(returned - f64::from(value));
            }
        }
        let variance = |values: &[f64]| {
            let count = values.len().max(1) as f64;
            let mean = values.iter().sum::<f64>() / count;
            values.iter().map(|v| (v - mean).powi(2)).sum::<f64>() / count
        };
        let all = variance(&due);
        Some(if all > 0.0 { 1.0 - variance(&left) / all } else { 0.0 })
    }

    /// Measurements from a forward pass over the whole batch at the weights of the rollout.
    pub(super) fn measure(
        &self,
        model: &TrainModel<f32>,
        outputs: &[SequenceOutput<f32>],
        metrics: &mut StepMetrics,
    ) {
        let (batch, h) = (self.batch, self.settings);
        metrics.entropy = batch.entropy(outputs);
        metrics.mismatch = batch.mismatch(outputs);
        let load = batch.load(outputs, model.config().num_experts);
        metrics.expert_load_entropy = load.entropy();
        metrics.expert_load = load.curves();
        let mut ratios = RolloutRatioSum::default();
        let (mut divergence, mut tokens) = (0.0, 0.0);
        for output in outputs {
            let now = self.tokens(output, None);
            // With one mini step the weights have been updated since, but these outputs are older.
            let at_base = SequenceTokens { old: &output.logprobs, ..now };
            let logs = log_rollout_ratios(&at_base);
            let (weights, corrected) = importance::weights(h, &logs);
            ratios.add(&logs, &weights, corrected);
            tokens += logs.len() as f64;
            if let Some(reference) = now.reference {
                let pairs = output.logprobs.iter().zip(reference).zip(now.mask);
                for ((&logp, &reference), _) in pairs.filter(|(_, m)| **m) {
                    let (logp, reference) = (f64::from(logp), f64::from(reference));
                    divergence += penalty(h.kl_estimator, logp, reference).value;
                }
            }
        }
        metrics.rollout_ratio = ratios.finish();
        metrics.kl_reference = self.references.as_ref().map(|_| divergence / f64::max(tokens, 1.0));
        if !h.routing_replay.replays_rollout() {
            metrics.disagreement = Some(batch.disagreement(outputs));
            if h.measure_no_replay {
                metrics.mismatch_no_replay = Some(metrics.mismatch.clone());
            }
        }
    }
}

/// Routes that the recompute pass executed, in batch order; every row is valid.
fn executed_routes(
    config: &ModelConfig,
    outputs: &[SequenceOutput<f32>],
) -> Result<Routes, BatchError> {
    let (layers, top_k) = (config.num_hidden_layers, config.num_experts_per_tok);
    let ids: Vec<u16> = outputs.iter().flat_map(|o| o.routes.iter().copied()).collect();
    let rows = ids.len() / (layers * top_k);
    Routes::new(ids, vec![true; rows], (layers, top_k, config.num_experts))
}
