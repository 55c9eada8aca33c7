//! The section `[algorithm]`: as written ([`AlgorithmSection`]), checked ([`AlgorithmSettings`]),
//! and as sent to a trainer ([`Hyperparameters`]).
//!
//! All three follow from `declaration.rs`. The checked form is a sum type: it has a variant for
//! each policy loss, correction, replay and aggregation, and a variant holds only the
//! hyperparameters that apply with it, so that a value without effect cannot be represented.

mod declaration;
mod describe;
mod hyperparameter;
mod macros;
#[cfg(test)]
mod python;

use crate::rules::refusals;
use crate::{AdvantageNorm, Overlong};
use describe::{applies_with, is_fixed, is_used};
use orchestrate_settings::{Problems, Section, SectionKeys};
use orchestrate_types::ConfigProblem;

pub(crate) use declaration::rules;
pub use declaration::{
    AggregationSettings, AlgorithmSection, BranchWeight, CorrectionSettings, Hyperparameters,
    ImportanceCorrection, ImportanceLevel, KlEstimator, KlEstimatorSettings, LossAggregation,
    LossSettings, PolicyLoss, ReplaySettings, RouterShift, RouterShiftSettings, RoutingReplay,
    TruncatedEpisodes,
};
pub(crate) use describe::applies;
pub(crate) use hyperparameter::{Choice, ChoiceOption, Field, Hyperparameter, Presence};

/// Names of the options of a hyperparameter; none if it is not a choice.
#[cfg(test)]
pub(crate) fn options(field: &str) -> Vec<&'static str> {
    let fields = Hyperparameters::fields();
    fields.into_iter().find(|known| known.name == field).map_or(Vec::new(), |known| known.options)
}

impl RoutingReplay {
    /// Whether the engine's rows are executed.
    pub fn replays_rollout(self) -> bool {
        match self {
            Self::Rollout | Self::Predictive => true,
            Self::None | Self::Recompute => false,
        }
    }
}

/// The divergence from the run's starting policy.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct KlSettings {
    /// Factor, above 0.
    pub coefficient: f64,
    /// Estimator.
    pub estimator: KlEstimatorSettings,
}

/// The optimizer, and how a batch is split for it.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct OptimizerSettings {
    /// Optimizer steps per batch, at least 1.
    pub mini_steps: u32,
    /// Maximum number of tokens in one forward and backward pass.
    pub micro_batch_tokens: usize,
    /// AdamW learning rate, above 0.
    pub learning_rate: f64,
    /// Optimizer steps over which the learning rate rises.
    pub warmup_steps: u32,
    /// AdamW decay rates, each from 0 to below 1.
    pub betas: (f64, f64),
    /// AdamW ε, above 0.
    pub adam_eps: f64,
    /// Decoupled weight decay, at least 0.
    pub weight_decay: f64,
    /// Global L2 norm that gradients are clipped to, above 0.
    pub max_grad_norm: f64,
}

/// The checked section `[algorithm]`: what applies, and nothing else.
#[derive(Debug, Clone, PartialEq)]
pub struct AlgorithmSettings {
    /// The policy loss.
    pub loss: LossSettings,
    /// How token losses are aggregated to one number.
    pub aggregation: AggregationSettings,
    /// Importance weight that corrects the mismatch between engine and trainer.
    pub correction: CorrectionSettings,
    /// Divergence from the starting policy; `None` = off.
    pub kl: Option<KlSettings>,
    /// Whose routes the trainer uses.
    pub replay: ReplaySettings,
    /// The optimizer.
    pub optimizer: OptimizerSettings,
    /// How rewards of a group become advantages; `None` = a value head gives them.
    pub advantage: Option<AdvantageNorm>,
    /// Weights of the branches of an episode.
    pub branch_weight: BranchWeight,
    /// How truncated episodes are used.
    pub truncated: TruncatedEpisodes,
    /// Penalty for long episodes; `None` = off.
    pub overlong: Option<Overlong>,
}

impl AlgorithmSettings {
    /// The hyperparameters of one step with rollouts sampled at `temperature`.
    pub fn hyperparameters(&self, temperature: f64, measure_no_replay: bool) -> Hyperparameters {
        let OptimizerSettings {
            mini_steps,
            micro_batch_tokens,
            learning_rate,
            warmup_steps,
            betas,
            adam_eps,
            weight_decay,
            max_grad_norm,
        } = self.optimizer;
        let mut h = Hyperparameters {
            dual_clip: None,
            mini_steps,
            micro_batch_tokens,
            learning_rate,
            warmup_steps,
            betas,
            adam_eps,
            weight_decay,
            max_grad_norm,
            temperature,
            measure_no_replay,
            ..Hyperparameters::default()
        };
        self.loss.write(&mut h);
        self.aggregation.write(&mut h);
        self.correction.write(&mut h);
        self.replay.write(&mut h);
        if let Some(kl) = &self.kl {
            h.kl_coefficient = kl.coefficient;
            kl.estimator.write(&mut h);
        }
        h
    }

    /// Whose routes the trainer uses.
    pub fn routing_replay(&self) -> RoutingReplay {
        self.replay.choice()
    }

    /// The policy loss.
    pub fn policy_loss(&self) -> PolicyLoss {
        self.loss.choice()
    }

    /// How rewards of a group become advantages. With a value head this only tells which groups
    /// carry a signal.
    pub fn advantage_norm(&self) -> AdvantageNorm {
        self.advantage.unwrap_or(AdvantageNorm::Std)
    }

    /// The section that says the same, with every default written out.
    pub fn section(&self) -> AlgorithmSection {
        let h = self.hyperparameters(1.0, false);
        let mut section = AlgorithmSection::sending(&h);
        for key in section.given() {
            if !is_used(key, &h) {
                section.clear(key);
            }
        }
        AlgorithmSection {
            advantage_normalisation: self.advantage,
            branch_weight: self.advantage.map(|_| self.branch_weight),
            truncated: Some(self.truncated),
            overlong_max_tokens: self.overlong.map(|overlong| overlong.max_tokens),
            overlong_cache_tokens: self.overlong.map(|overlong| overlong.cache_tokens),
            ..section
        }
    }
}

impl AlgorithmSection {
    /// Fills in defaults and checks each value, and all of them together.
    ///
    /// # Errors
    /// All problems at once.
    pub fn check(&self) -> Result<AlgorithmSettings, Vec<ConfigProblem>> {
        let mut problems = Problems::new(Self::NAME);
        let mut read = self.clone();
        for (key, why) in self.without_effect() {
            problems.refuse_unread(self, &[key], &why);
            read.clear(key);
        }
        let values = read.fill();
        let h = values.sent();
        refuse_values(&h, &mut problems);
        if matches!(values.aggregation, LossAggregation::TokenSumNorm)
            && read.loss_norm_tokens.is_none()
        {
            let remedy = "must be given with aggregation = \"token-sum-norm\", which divides by \
                          it: usually the longest sequence in tokens";
            problems.missing("loss_norm_tokens", remedy);
        }
        let overlong = self.overlong(&mut problems);
        let by_value_head = matches!(values.policy_loss, PolicyLoss::Ppo);
        let settings = AlgorithmSettings {
            loss: LossSettings::read(&h),
            aggregation: AggregationSettings::read(&h),
            correction: CorrectionSettings::read(&h),
            kl: (h.kl_coefficient > 0.0).then(|| KlSettings {
                coefficient: h.kl_coefficient,
                estimator: KlEstimatorSettings::read(&h),
            }),
            replay: ReplaySettings::read(&h),
            optimizer: OptimizerSettings {
                mini_steps: h.mini_steps,
                micro_batch_tokens: h.micro_batch_tokens,
                learning_rate: h.learning_rate,
                warmup_steps: h.warmup_steps,
                betas: h.betas,
                adam_eps: h.adam_eps,
                weight_decay: h.weight_decay,
                max_grad_norm: h.max_grad_norm,
            },
            advantage: (!by_value_head).then_some(values.advantage_normalisation),
            branch_weight: values.branch_weight,
            truncated: values.truncated,
            overlong,
        };
        problems.into_result(settings)
    }

    /// The keys that have a value, but no effect with the chosen options, and why.
    fn without_effect(&self) -> Vec<(&'static str, String)> {
        let h = self.fill().sent();
        let why = |key: &str| {
            let of_groups = ["advantage_normalisation", "branch_weight"].contains(&key);
            if of_groups && h.policy_loss == PolicyLoss::Ppo {
                let why = "does not apply with policy_loss = \"ppo\", whose advantages come from its \
                           value head";
                return Some(why.to_owned());
            }
            if is_used(key, &h) && !is_fixed(key, &h) {
                return None;
            }
            applies_with(key).map(|options| format!("only applies with {options}"))
        };
        self.given().into_iter().filter_map(|key| Some((key, why(key)?))).collect()
    }

    fn overlong(&self, problems: &mut Problems) -> Option<Overlong> {
        match (self.overlong_max_tokens, self.overlong_cache_tokens) {
            (None, None) => None,
            (Some(max_tokens), Some(cache_tokens)) => {
                problems.require(
                    (1..=max_tokens).contains(&cache_tokens),
                    "overlong_cache_tokens",
                    cache_tokens,
                    format!("must be from 1 to overlong_max_tokens, {max_tokens}"),
                );
                Some(Overlong { max_tokens, cache_tokens })
            }
            (Some(_), None) => {
                let remedy = "must be given with overlong_max_tokens: the tokens before it over \
                              which the loss grows";
                problems.missing("overlong_cache_tokens", remedy);
                None
            }
            (None, Some(_)) => {
                let remedy = "must be given with overlong_cache_tokens: the tokens above which an \
                              episode loses 1 of its reward";
                problems.missing("overlong_max_tokens", remedy);
                None
            }
        }
    }
}

impl Section for AlgorithmSection {
    type Settings = AlgorithmSettings;

    fn check_section(&self) -> Result<AlgorithmSettings, Vec<ConfigProblem>> {
        self.check()
    }

    fn from_settings(settings: &AlgorithmSettings) -> Self {
        settings.section()
    }

    fn value_problems(&self) -> Vec<ConfigProblem> {
        let mut problems = Problems::new(Self::NAME);
        refuse_values(&self.fill().sent(), &mut problems);
        problems.into_found()
    }
}

/// Smallest learning rate of a run: steps of AdamW are about as large as it, and those below are lost in the
/// rounding of all but the smallest weights.
const LOWEST_LEARNING_RATE: f64 = 1e-12;

/// Refuses what a trainer would refuse, and a learning rate that changes no weights.
fn refuse_values(h: &Hyperparameters, problems: &mut Problems) {
    for refusal in refusals(h) {
        problems.refuse(refusal.field, refusal.value, refusal.remedy);
    }
    if (0.0..LOWEST_LEARNING_RATE).contains(&h.learning_rate) {
        let remedy = format!(
            "must be at least {LOWEST_LEARNING_RATE:e}: smaller steps are lost in the rounding of the weights"
        );
        problems.refuse("learning_rate", h.learning_rate, remedy);
    }
}
