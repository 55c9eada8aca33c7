//! The section `[algorithm]`.

use crate::protocol::{
    Hyperparameters, ImportanceCorrection, ImportanceLevel, KlEstimator, LossAggregation,
    PolicyLoss, RouterShift, RoutingReplay,
};
use crate::rules::{Uses, refusals};
use crate::{AdvantageNorm, Overlong};
use orchestrate_types::ConfigProblem;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// What becomes of episodes that a limit cut short.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum TruncatedEpisodes {
    /// They are trained on with their reward.
    Train,
    /// They count in the group's baseline, but their tokens are not trained on.
    Mask,
}

/// How rewards become an update of the weights.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct AlgorithmSection {
    /// Policy loss. Default: "grpo".
    pub policy_loss: Option<PolicyLoss>,
    /// Lower clip of the probability ratio, 0 to 1; of its logarithm for gmpo and rspo. Default:
    /// 0.2; gspo 3e-4 (0.2 with router shift), gmpo and rspo 0.4, cispo 1 (no lower bound).
    pub clip_low: Option<f64>,
    /// Upper clip of the probability ratio; above `clip_low` it is Clip-Higher. Default: 0.28;
    /// gspo 4e-4 (0.28 with router shift), gmpo and rspo 0.4, cispo 4, minirl 0.27.
    pub clip_high: Option<f64>,
    /// Bound of the ratio for negative advantages, above 1; 0 turns it off. Default: 3 for grpo
    /// and ppo; others have none.
    pub dual_clip: Option<f64>,
    /// How token losses become one number. Default: "token-mean"; gspo, gmpo, rspo and sapo
    /// "seq-mean-token-mean", minirl "seq-mean-token-sum".
    pub aggregation: Option<LossAggregation>,
    /// Constant of "token-sum-norm", in tokens; required there, not used elsewhere.
    pub loss_norm_tokens: Option<f64>,
    /// Sapo's sigmoid thresholds for positive and other advantages. Default: [1, 1.05].
    pub sapo_tau: Option<[f64; 2]>,
    /// Where the router-shift weight enters the ratio. Default: "none"; for rspo `before_clip`.
    pub router_shift: Option<RouterShift>,
    /// Least router-shift weight, 0 to 1. Default: 0.8.
    pub router_shift_floor: Option<f64>,
    /// Weight against the mismatch of sampler and trainer. Default: "none".
    pub importance_correction: Option<ImportanceCorrection>,
    /// Whether it looks at tokens or at whole sequences. Default: "token"; "sequence" for
    /// `geometric_mask`, and for gmpo and rspo.
    pub importance_level: Option<ImportanceLevel>,
    /// Lower bound of icepop (default 0.5) and `geometric_mask` (default 0.99).
    pub importance_low: Option<f64>,
    /// Upper bound. Default: 2; icepop, minirl and sequence-level tis 5, `geometric_mask` 1.01.
    pub importance_high: Option<f64>,
    /// Sequences with a negative advantage are left out once the policy moved away from them by
    /// this mean log-prob; 0 turns it off. Default: 0.
    pub off_policy_delta: Option<f64>,
    /// Factor on the divergence from the run's starting policy; 0 turns it off. Default: 0.
    pub kl_coefficient: Option<f64>,
    /// Estimator of that divergence. Default: "k3"; "k1" is taken off ppo's rewards.
    pub kl_estimator: Option<KlEstimator>,
    /// Multiply k3 by the ratio of new to old policy: unbiased off policy. Default: false.
    pub kl_unbiased: Option<bool>,
    /// Ppo's discount per loss token, 0 to 1. Default: 1.
    pub gae_gamma: Option<f64>,
    /// Ppo's λ, 0 to 1. Default: 1.
    pub gae_lambda: Option<f64>,
    /// How far ppo's new value may move from the old one. Default: 0.2.
    pub value_clip: Option<f64>,
    /// Factor on ppo's value loss. Default: 0.1.
    pub value_coefficient: Option<f64>,
    /// Learning rate of ppo's value head, as a multiple of `learning_rate`. Default: 10.
    pub value_rate: Option<f64>,
    /// How rewards of a group become advantages. Default: "std".
    pub advantage_normalisation: Option<AdvantageNorm>,
    /// Whose routes the trainer's forward passes use. Default: "rollout" (R3).
    pub routing_replay: Option<RoutingReplay>,
    /// Learning rate of PR2's predictor, as a multiple of `learning_rate`. Default: 100.
    pub predictor_rate: Option<f64>,
    /// Tokens per sequence that PR2's predictor learns from at most. Default: 2048.
    pub predictor_tokens: Option<usize>,
    /// Optimizer steps that one batch is split into. Default: 1.
    pub mini_steps: Option<u32>,
    /// AdamW learning rate. Default: 1e-6.
    pub learning_rate: Option<f64>,
    /// Optimizer steps over which the learning rate rises to its value. Default: 0.
    pub warmup_steps: Option<u32>,
    /// AdamW decay rates of the first and second moment. Default: [0.9, 0.999].
    pub betas: Option<[f64; 2]>,
    /// AdamW ε. Default: 1e-8.
    pub adam_eps: Option<f64>,
    /// Decoupled weight decay. Default: 0.01.
    pub weight_decay: Option<f64>,
    /// Global L2 norm that gradients are clipped to. Default: 1.
    pub max_grad_norm: Option<f64>,
    /// Most tokens in one forward and backward pass; gradients accumulate. Default: 16384.
    pub micro_batch_tokens: Option<usize>,
    /// What becomes of episodes that a limit cut short. Default: "train".
    pub truncated: Option<TruncatedEpisodes>,
    /// An episode with more response tokens loses 1 of its reward. Default: none does.
    pub overlong_max_tokens: Option<u64>,
    /// Tokens before `overlong_max_tokens` over which that loss grows from 0.
    pub overlong_cache_tokens: Option<u64>,
}

/// A checked `[algorithm]`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Algorithm {
    /// How rewards of a group become advantages.
    pub advantage: AdvantageNorm,
    /// What becomes of truncated episodes.
    pub truncated: TruncatedEpisodes,
    /// Punishment of long episodes.
    pub overlong: Option<Overlong>,
    settings: Hyperparameters,
}

impl Algorithm {
    /// What the trainer is told for one step, for rollouts sampled at `temperature`.
    pub fn hyperparameters(&self, temperature: f64, measure_no_replay: bool) -> Hyperparameters {
        Hyperparameters { temperature, measure_no_replay, ..self.settings.clone() }
    }

    /// Whose routes the trainer uses.
    pub fn routing_replay(&self) -> RoutingReplay {
        self.settings.routing_replay
    }

    /// The policy loss.
    pub fn policy_loss(&self) -> PolicyLoss {
        self.settings.policy_loss
    }

    /// The section that says the same with every default written out.
    pub fn section(&self) -> AlgorithmSection {
        let h = &self.settings;
        let uses = Uses::of(h);
        AlgorithmSection {
            policy_loss: Some(h.policy_loss),
            clip_low: uses.clip.then_some(h.clip_low),
            clip_high: uses.clip.then_some(h.clip_high),
            dual_clip: Some(h.dual_clip.unwrap_or(0.0)),
            aggregation: Some(h.aggregation),
            loss_norm_tokens: Some(h.loss_norm_tokens),
            sapo_tau: uses.sapo_tau.then_some([h.sapo_tau.0, h.sapo_tau.1]),
            router_shift: Some(h.router_shift),
            router_shift_floor: uses.router_shift_floor.then_some(h.router_shift_floor),
            importance_correction: Some(h.importance_correction),
            importance_level: uses.importance_level.then_some(h.importance_level),
            importance_low: uses.importance_low.then_some(h.importance_low),
            importance_high: uses.importance_high.then_some(h.importance_high),
            off_policy_delta: Some(h.off_policy_delta.unwrap_or(0.0)),
            kl_coefficient: Some(h.kl_coefficient),
            kl_estimator: uses.kl.then_some(h.kl_estimator),
            kl_unbiased: uses.kl.then_some(h.kl_unbiased),
            gae_gamma: uses.values.then_some(h.gae_gamma),
            gae_lambda: uses.values.then_some(h.gae_lambda),
            value_clip: uses.values.then_some(h.value_clip),
            value_coefficient: uses.values.then_some(h.value_coefficient),
            value_rate: uses.values.then_some(h.value_rate),
            advantage_normalisation: (!uses.values).then_some(self.advantage),
            routing_replay: Some(h.routing_replay),
            predictor_rate: uses.predictor.then_some(h.predictor_rate),
            predictor_tokens: uses.predictor.then_some(h.predictor_tokens),
            mini_steps: Some(h.mini_steps),
            learning_rate: Some(h.learning_rate),
            warmup_steps: Some(h.warmup_steps),
            betas: Some([h.betas.0, h.betas.1]),
            adam_eps: Some(h.adam_eps),
            weight_decay: Some(h.weight_decay),
            max_grad_norm: Some(h.max_grad_norm),
            micro_batch_tokens: Some(h.micro_batch_tokens),
            truncated: Some(self.truncated),
            overlong_max_tokens: self.overlong.map(|o| o.max_tokens),
            overlong_cache_tokens: self.overlong.map(|o| o.cache_tokens),
        }
    }
}

impl AlgorithmSection {
    /// Fills in defaults and checks every value, and all of them together.
    ///
    /// # Errors
    /// All problems at once.
    pub fn check(&self) -> Result<Algorithm, Vec<ConfigProblem>> {
        let settings = self.filled();
        let mut problems: Vec<ConfigProblem> = refusals(&settings)
            .into_iter()
            .map(|r| ConfigProblem::new(format!("algorithm.{}", r.field), r.value, r.remedy))
            .collect();
        let sum_norm = settings.aggregation == LossAggregation::TokenSumNorm;
        if sum_norm && self.loss_norm_tokens.is_none() {
            problems.push(ConfigProblem::missing(
                "algorithm.loss_norm_tokens",
                "aggregation \"token-sum-norm\" divides by it: give the longest sequence in tokens",
            ));
        }
        if settings.learning_rate == 0.0 {
            let (key, remedy) = ("algorithm.learning_rate", "use a number above 0");
            problems.push(ConfigProblem::new(key, settings.learning_rate, remedy));
        }
        problems.extend(self.without_effect(&Uses::of(&settings)));
        let overlong = match (self.overlong_max_tokens, self.overlong_cache_tokens) {
            (None, None) => None,
            (Some(max_tokens), Some(cache_tokens)) => {
                if cache_tokens == 0 || cache_tokens > max_tokens {
                    problems.push(ConfigProblem::new(
                        "algorithm.overlong_cache_tokens",
                        cache_tokens,
                        "use at least 1, at most overlong_max_tokens",
                    ));
                }
                Some(Overlong { max_tokens, cache_tokens })
            }
            (Some(_), None) => {
                let remedy = "say over how many tokens before overlong_max_tokens the loss grows";
                problems.push(ConfigProblem::missing("algorithm.overlong_cache_tokens", remedy));
                None
            }
            (None, Some(_)) => {
                let remedy = "say from how many tokens on an episode loses its whole point";
                problems.push(ConfigProblem::missing("algorithm.overlong_max_tokens", remedy));
                None
            }
        };
        if problems.is_empty() {
            Ok(Algorithm {
                advantage: self.advantage_normalisation.unwrap_or(AdvantageNorm::Std),
                truncated: self.truncated.unwrap_or(TruncatedEpisodes::Train),
                overlong,
                settings,
            })
        } else {
            Err(problems)
        }
    }

    /// Settings that were given although the others leave them without effect.
    fn without_effect(&self, uses: &Uses) -> Vec<ConfigProblem> {
        let corrected = "it needs an importance_correction that has it; leave it out";
        let bounds = "it bounds icepop and geometric_mask; leave it out with others";
        let clip = "sapo has no clip: leave it out, and see sapo_tau";
        let shift = "it needs router_shift; leave it out";
        let kl = "it needs kl_coefficient above 0; leave it out";
        let ppo = "it belongs to policy_loss = \"ppo\"; leave it out";
        let pr2 = "it belongs to routing_replay = \"predictive\"; leave it out";
        let values = "ppo's advantages come from its value head: leave it out";
        let given = [
            ("clip_low", self.clip_low.is_some(), uses.clip, clip),
            ("clip_high", self.clip_high.is_some(), uses.clip, clip),
            (
                "sapo_tau",
                self.sapo_tau.is_some(),
                uses.sapo_tau,
                "it belongs to policy_loss = \"sapo\"; leave it out",
            ),
            (
                "router_shift_floor",
                self.router_shift_floor.is_some(),
                uses.router_shift_floor,
                shift,
            ),
            ("importance_level", self.importance_level.is_some(), uses.importance_level, corrected),
            ("importance_low", self.importance_low.is_some(), uses.importance_low, bounds),
            ("importance_high", self.importance_high.is_some(), uses.importance_high, corrected),
            ("kl_estimator", self.kl_estimator.is_some(), uses.kl, kl),
            ("kl_unbiased", self.kl_unbiased.is_some(), uses.kl, kl),
            ("gae_gamma", self.gae_gamma.is_some(), uses.values, ppo),
            ("gae_lambda", self.gae_lambda.is_some(), uses.values, ppo),
            ("value_clip", self.value_clip.is_some(), uses.values, ppo),
            ("value_coefficient", self.value_coefficient.is_some(), uses.values, ppo),
            ("value_rate", self.value_rate.is_some(), uses.values, ppo),
            (
                "advantage_normalisation",
                self.advantage_normalisation.is_some(),
                !uses.values,
                values,
            ),
            ("predictor_rate", self.predictor_rate.is_some(), uses.predictor, pr2),
            ("predictor_tokens", self.predictor_tokens.is_some(), uses.predictor, pr2),
        ];
        given
            .into_iter()
            .filter(|(_, given, used, _)| *given && !used)
            .map(|(field, _, _, remedy)| {
                ConfigProblem::new(format!("algorithm.{field}"), "(given)", remedy)
            })
            .collect()
    }

    fn filled(&self) -> Hyperparameters {
        let base = Hyperparameters::default();
        let loss = self.policy_loss.unwrap_or_default();
        let router_shift = self.router_shift.unwrap_or(match loss {
            PolicyLoss::Rspo => RouterShift::BeforeClip,
            PolicyLoss::Grpo
            | PolicyLoss::Gspo
            | PolicyLoss::Gmpo
            | PolicyLoss::Cispo
            | PolicyLoss::Minirl
            | PolicyLoss::Sapo
            | PolicyLoss::Ppo => RouterShift::None,
        });
        let (clip_low, clip_high) = default_clip(loss, router_shift);
        let correction = self.importance_correction.unwrap_or_default();
        let level = self.importance_level.unwrap_or(default_level(loss, correction));
        let (low, high) = default_bounds(loss, correction, level);
        let dual_clip = self.dual_clip.or(match loss {
            PolicyLoss::Grpo | PolicyLoss::Ppo => Some(3.0),
            PolicyLoss::Gspo
            | PolicyLoss::Gmpo
            | PolicyLoss::Rspo
            | PolicyLoss::Cispo
            | PolicyLoss::Minirl
            | PolicyLoss::Sapo => None,
        });
        let on = |value: &f64| value.abs() >= f64::EPSILON;
        let pair = |given: Option<[f64; 2]>, default| given.map_or(default, |[a, b]| (a, b));
        Hyperparameters {
            policy_loss: loss,
            clip_low: self.clip_low.unwrap_or(clip_low),
            clip_high: self.clip_high.unwrap_or(clip_high),
            dual_clip: dual_clip.filter(on),
            aggregation: self.aggregation.unwrap_or(match loss {
                PolicyLoss::Gspo | PolicyLoss::Gmpo | PolicyLoss::Rspo | PolicyLoss::Sapo => {
                    LossAggregation::SeqMeanTokenMean
                }
                PolicyLoss::Minirl => LossAggregation::SeqMeanTokenSum,
                PolicyLoss::Grpo | PolicyLoss::Cispo | PolicyLoss::Ppo => {
                    LossAggregation::TokenMean
                }
            }),
            loss_norm_tokens: self.loss_norm_tokens.unwrap_or(base.loss_norm_tokens),
            sapo_tau: pair(self.sapo_tau, base.sapo_tau),
            router_shift,
            router_shift_floor: self.router_shift_floor.unwrap_or(base.router_shift_floor),
            importance_correction: correction,
            importance_level: level,
            importance_low: self.importance_low.unwrap_or(low),
            importance_high: self.importance_high.unwrap_or(high),
            off_policy_delta: self.off_policy_delta.filter(on),
            kl_coefficient: self.kl_coefficient.unwrap_or(base.kl_coefficient),
            kl_estimator: self.kl_estimator.unwrap_or_default(),
            kl_unbiased: self.kl_unbiased.unwrap_or(base.kl_unbiased),
            gae_gamma: self.gae_gamma.unwrap_or(base.gae_gamma),
            gae_lambda: self.gae_lambda.unwrap_or(base.gae_lambda),
            value_clip: self.value_clip.unwrap_or(base.value_clip),
            value_coefficient: self.value_coefficient.unwrap_or(base.value_coefficient),
            value_rate: self.value_rate.unwrap_or(base.value_rate),
            routing_replay: self.routing_replay.unwrap_or_default(),
            predictor_rate: self.predictor_rate.unwrap_or(base.predictor_rate),
            predictor_tokens: self.predictor_tokens.unwrap_or(base.predictor_tokens),
            mini_steps: self.mini_steps.unwrap_or(base.mini_steps),
            micro_batch_tokens: self.micro_batch_tokens.unwrap_or(base.micro_batch_tokens),
            learning_rate: self.learning_rate.unwrap_or(base.learning_rate),
            warmup_steps: self.warmup_steps.unwrap_or(base.warmup_steps),
            betas: pair(self.betas, base.betas),
            adam_eps: self.adam_eps.unwrap_or(base.adam_eps),
            weight_decay: self.weight_decay.unwrap_or(base.weight_decay),
            max_grad_norm: self.max_grad_norm.unwrap_or(base.max_grad_norm),
            temperature: base.temperature,
            measure_no_replay: base.measure_no_replay,
        }
    }
}

/// The published clip of a loss; where the router-shift weight enters, one that it fits into.
fn default_clip(loss: PolicyLoss, shift: RouterShift) -> (f64, f64) {
    match (loss, shift) {
        (PolicyLoss::Gspo, RouterShift::None) => (3e-4, 4e-4),
        (PolicyLoss::Gspo, RouterShift::BeforeClip | RouterShift::AfterClip)
        | (PolicyLoss::Grpo | PolicyLoss::Ppo | PolicyLoss::Sapo, _) => (0.2, 0.28),
        (PolicyLoss::Gmpo | PolicyLoss::Rspo, _) => (0.4, 0.4),
        (PolicyLoss::Cispo, _) => (1.0, 4.0),
        (PolicyLoss::Minirl, _) => (0.2, 0.27),
    }
}

fn default_level(loss: PolicyLoss, correction: ImportanceCorrection) -> ImportanceLevel {
    match (correction, loss) {
        (ImportanceCorrection::GeometricMask, _)
        | (
            ImportanceCorrection::Tis | ImportanceCorrection::Mis,
            PolicyLoss::Gmpo | PolicyLoss::Rspo,
        ) => ImportanceLevel::Sequence,
        (
            ImportanceCorrection::None
            | ImportanceCorrection::Tis
            | ImportanceCorrection::Mis
            | ImportanceCorrection::Icepop,
            _,
        ) => ImportanceLevel::Token,
    }
}

fn default_bounds(
    loss: PolicyLoss,
    correction: ImportanceCorrection,
    level: ImportanceLevel,
) -> (f64, f64) {
    match (correction, level) {
        (ImportanceCorrection::None, _) if loss == PolicyLoss::Minirl => (0.5, 5.0),
        (ImportanceCorrection::GeometricMask, _) => (0.99, 1.01),
        (ImportanceCorrection::Icepop, _)
        | (ImportanceCorrection::Tis, ImportanceLevel::Sequence) => (0.5, 5.0),
        (
            ImportanceCorrection::None | ImportanceCorrection::Tis | ImportanceCorrection::Mis,
            ImportanceLevel::Token | ImportanceLevel::Sequence,
        ) => (0.5, 2.0),
    }
}
