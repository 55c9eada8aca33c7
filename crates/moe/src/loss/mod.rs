//! Losses without a tensor library: log-probs in, loss and `dL/dlogp` out, in closed form.
//!
//! Losses are minimised. Each function handles one sequence; denominators are those of the whole
//! optimizer step ([`Totals`]), so micro-batches do not change the result. Every policy loss is a
//! mean of token terms. The losses of a whole sequence (GSPO, GMPO, RSPO) give each token the
//! sequence's loss and the gradient of the token's own term, so that a weight on a token scales its
//! loss and its gradient alike.
//!
//! | Module | Contents |
//! |---|---|
//! | [`surrogate`] | GRPO and PPO, with router shift |
//! | [`sequence`] | GSPO |
//! | [`geometric`] | GMPO, RSPO |
//! | [`weighted`] | CISPO, `MiniRL` |
//! | [`smooth`] | SAPO |
//! | [`divergence`] | KL divergence from a reference policy |
//! | [`importance`], [`shift`] | constant weights |
//! | [`value`] | advantages and loss of a value head |
//! | [`predictor`] | PR2's router predictor |
//!
//! The formulas with their sources, and the golden vectors that all of this is tested against, are
//! in `tests/reference`.

pub mod divergence;
pub mod geometric;
#[cfg(test)]
mod golden_tests;
pub mod importance;
pub mod predictor;
pub mod sequence;
pub mod shift;
pub mod smooth;
pub mod surrogate;
pub mod value;
pub mod weighted;

use crate::train::real::Real;
use orchestrate_handoff::protocol::{
    Hyperparameters, ImportanceCorrection, LossAggregation, PolicyLoss,
};

/// Log-ratios are clamped to ±20 before they are exponentiated.
const LOG_RATIO_LIMIT: f64 = 20.0;

/// `e^x` with `x` clamped to ±[`LOG_RATIO_LIMIT`].
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Ratio {
    pub(crate) value: f64,
    /// Derivative with respect to `x`: the value itself, or 0 where `x` is clamped.
    pub(crate) slope: f64,
}

impl Ratio {
    pub(crate) fn exp(log_ratio: f64) -> Self {
        let value = libm::exp(log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT));
        let slope = if log_ratio.abs() > LOG_RATIO_LIMIT { 0.0 } else { value };
        Self { value, slope }
    }
}

/// Size of the whole optimizer step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Totals {
    /// Number of sequences, including those without loss tokens.
    pub sequences: usize,
    /// Number of loss tokens over all sequences.
    pub loss_tokens: usize,
}

/// Advantages of one sequence.
#[derive(Debug, Clone, Copy)]
pub enum Advantages<'a> {
    /// One for all its tokens.
    Sequence(f64),
    /// One per token. `[T]`
    Tokens(&'a [f64]),
}

/// Inputs of the loss of one sequence of `T` tokens. All but `new` are constants.
#[derive(Debug, Clone, Copy)]
pub struct SequenceTokens<'a, T> {
    /// Log-probs under the policy that is updated, nats. `[T]`
    pub new: &'a [T],
    /// Log-probs under the trainer at the weights of the rollout. `[T]`
    pub old: &'a [T],
    /// Log-probs under the inference engine that sampled. `[T]`
    pub sampler: &'a [T],
    /// Log-probs under the reference policy. `[T]`
    pub reference: Option<&'a [T]>,
    /// Router-shift weights, above 0 to 1; `None` = 1 everywhere. `[T]`
    pub shift: Option<&'a [f64]>,
    /// Which tokens have a loss. `[T]`
    pub mask: &'a [bool],
    /// Advantages.
    pub advantages: Advantages<'a>,
}

/// A sequence's share of the loss.
#[derive(Debug, Clone, PartialEq)]
pub struct SequenceLoss<T> {
    /// Its summand of the step's loss.
    pub value: f64,
    /// `dL/dlogp`, 0 for tokens without a loss. `[T]`
    pub gradient: Vec<T>,
    /// Number of tokens clipped from below and from above.
    pub clipped: (usize, usize),
}

/// One loss token.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Token {
    /// Log-prob under the policy that is updated, nats.
    pub(crate) new: f64,
    /// `new − old`.
    pub(crate) log_ratio: f64,
    /// `new − sampler`.
    pub(crate) log_sampler_ratio: f64,
    /// Logarithm of the router-shift weight, at most 0.
    pub(crate) log_shift: f64,
    pub(crate) advantage: f64,
}

/// Which bound of the clip holds a token.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Clip {
    Inside,
    Below,
    Above,
}

/// Loss of one token and its derivative with respect to the token's log-prob.
#[derive(Debug, Clone, Copy)]
pub(crate) struct TokenLoss {
    pub(crate) loss: f64,
    pub(crate) gradient: f64,
    pub(crate) clip: Clip,
}

/// The loss of one optimizer step under its settings.
#[derive(Debug, Clone, Copy)]
pub struct Objective<'a> {
    settings: &'a Hyperparameters,
    totals: Totals,
}

impl<'a> Objective<'a> {
    /// For one optimizer step of the given size.
    pub fn new(settings: &'a Hyperparameters, totals: Totals) -> Self {
        Self { settings, totals }
    }

    /// Loss and gradient of one sequence.
    pub fn sequence<T: Real>(&self, tokens: SequenceTokens<'_, T>) -> SequenceLoss<T> {
        let live = live(&tokens);
        let losses = self.policy(&live);
        let constant = self.constant_weights(&tokens, &live);
        let weight = self.token_weight(live.len());
        let mut result = SequenceLoss {
            value: 0.0,
            gradient: vec![T::ZERO; tokens.mask.len()],
            clipped: (0, 0),
        };
        let beta = self.settings.kl_coefficient;
        let places = tokens.mask.iter().enumerate().filter(|(_, m)| **m).map(|(p, _)| p);
        for (((place, token), loss), constant) in places.zip(&live).zip(losses).zip(constant) {
            let mut value = constant * loss.loss;
            let mut slope = constant * loss.gradient;
            if let Some(reference) = tokens.reference.and_then(|all| all.get(place)) {
                let term = divergence::term(self.settings, token, reference.to_f64());
                value += beta * term.value;
                slope += beta * term.gradient;
            }
            result.value += weight * value;
            if let Some(gradient) = result.gradient.get_mut(place) {
                *gradient = T::from_f64(weight * slope);
            }
            match loss.clip {
                Clip::Inside => {}
                Clip::Below => result.clipped.0 += 1,
                Clip::Above => result.clipped.1 += 1,
            }
        }
        result
    }

    fn policy(&self, live: &[Token]) -> Vec<TokenLoss> {
        let h = self.settings;
        match h.policy_loss {
            PolicyLoss::Grpo | PolicyLoss::Ppo => {
                live.iter().map(|token| surrogate::token(h, token)).collect()
            }
            PolicyLoss::Gspo => sequence::losses(h, live),
            PolicyLoss::Gmpo | PolicyLoss::Rspo => geometric::losses(h, live),
            PolicyLoss::Cispo => live.iter().map(|token| weighted::cispo(h, token)).collect(),
            PolicyLoss::Minirl => live.iter().map(|token| weighted::minirl(h, token)).collect(),
            PolicyLoss::Sapo => live.iter().map(|token| smooth::token(h, token)).collect(),
        }
    }

    /// Importance weights, one per loss token; all 0 for a sequence that the off-policy mask
    /// leaves out.
    fn constant_weights<T: Real>(
        &self,
        tokens: &SequenceTokens<'_, T>,
        live: &[Token],
    ) -> Vec<f64> {
        let h = self.settings;
        if importance::is_off_policy(h.off_policy_delta, live) {
            return vec![0.0; live.len()];
        }
        if h.importance_correction == ImportanceCorrection::None {
            return vec![1.0; live.len()];
        }
        importance::weights(h, &log_rollout_ratios(tokens)).0
    }

    /// Factor on each token term of a sequence with `loss_tokens` of them.
    fn token_weight(&self, loss_tokens: usize) -> f64 {
        let sequences = self.totals.sequences.max(1) as f64;
        match self.settings.aggregation {
            LossAggregation::TokenMean => 1.0 / self.totals.loss_tokens.max(1) as f64,
            LossAggregation::SeqMeanTokenMean => 1.0 / (sequences * loss_tokens.max(1) as f64),
            LossAggregation::SeqMeanTokenSum => 1.0 / sequences,
            LossAggregation::TokenSumNorm => 1.0 / (sequences * self.settings.loss_norm_tokens),
        }
    }
}

/// `ln ρ = old − sampler` of each loss token: trainer over engine at the weights of the rollout.
pub(crate) fn log_rollout_ratios<T: Real>(tokens: &SequenceTokens<'_, T>) -> Vec<f64> {
    let pairs = tokens.old.iter().zip(tokens.sampler).zip(tokens.mask);
    pairs.filter(|(_, m)| **m).map(|((old, roll), _)| old.to_f64() - roll.to_f64()).collect()
}

fn live<T: Real>(tokens: &SequenceTokens<'_, T>) -> Vec<Token> {
    let logprobs = tokens.new.iter().zip(tokens.old).zip(tokens.sampler);
    let masked = logprobs.zip(tokens.mask).enumerate().filter(|(_, (_, masked))| **masked);
    masked
        .map(|(place, (((new, old), sampler), _))| {
            let new = new.to_f64();
            let shift = tokens.shift.and_then(|all| all.get(place)).copied().unwrap_or(1.0);
            Token {
                new,
                log_ratio: new - old.to_f64(),
                log_sampler_ratio: new - sampler.to_f64(),
                log_shift: libm::log(shift),
                advantage: match tokens.advantages {
                    Advantages::Sequence(advantage) => advantage,
                    Advantages::Tokens(all) => all.get(place).copied().unwrap_or(0.0),
                },
            }
        })
        .collect()
}
