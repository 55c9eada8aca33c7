//! What an update depends on beside the batch. Which combinations make no sense is in
//! [`crate::rules`].

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// Which loss the update minimises. `r` is the probability ratio of new to old policy.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum PolicyLoss {
    /// Clipped surrogate, token by token, with group-relative advantages.
    #[default]
    Grpo,
    /// Clipped surrogate of the sequence's geometric mean ratio.
    Gspo,
    /// Geometric mean over tokens that are clipped one by one in log space.
    Gmpo,
    /// GMPO whose ratios are lowered where the router moved.
    Rspo,
    /// Log-prob weighted by the clipped ratio as a constant: no token loses its gradient.
    Cispo,
    /// Log-prob weighted by the ratio to the sampler as a constant, clipped tokens left out.
    Minirl,
    /// A sigmoid of the ratio in the place of the clip.
    Sapo,
    /// Clipped surrogate with advantages from a value head.
    Ppo,
}

impl PolicyLoss {
    /// All of them.
    pub const ALL: [Self; 8] = [
        Self::Grpo,
        Self::Gspo,
        Self::Gmpo,
        Self::Rspo,
        Self::Cispo,
        Self::Minirl,
        Self::Sapo,
        Self::Ppo,
    ];

    /// Its name on the wire and in configurations.
    pub fn name(self) -> &'static str {
        match self {
            Self::Grpo => "grpo",
            Self::Gspo => "gspo",
            Self::Gmpo => "gmpo",
            Self::Rspo => "rspo",
            Self::Cispo => "cispo",
            Self::Minirl => "minirl",
            Self::Sapo => "sapo",
            Self::Ppo => "ppo",
        }
    }

    /// Whether the loss is one number per sequence, a mean over sequences by definition.
    pub fn is_per_sequence(self) -> bool {
        match self {
            Self::Gspo | Self::Gmpo | Self::Rspo => true,
            Self::Grpo | Self::Cispo | Self::Minirl | Self::Sapo | Self::Ppo => false,
        }
    }
}

/// How token losses become one number.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum LossAggregation {
    /// Sum over all tokens / number of loss tokens.
    #[default]
    TokenMean,
    /// Mean over sequences of their token mean.
    SeqMeanTokenMean,
    /// Mean over sequences of their token sum.
    SeqMeanTokenSum,
    /// Sum over all tokens / (sequences × `loss_norm_tokens`).
    TokenSumNorm,
}

/// Whose routes the trainer's forward passes use.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum RoutingReplay {
    /// Its own, in every pass.
    None,
    /// Its own of the recompute pass, in the update passes (R2).
    Recompute,
    /// The inference engine's, in recompute and update (R3).
    #[default]
    Rollout,
    /// As `rollout`, where the engine routes by the trainer's prediction of its next router (PR2).
    Predictive,
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

/// Where the router-shift weight γ enters the ratio. γ = exp(−mean |Δ log router probability|)
/// over the layers and the experts that were executed at the old weights; a constant.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum RouterShift {
    /// Nowhere.
    #[default]
    None,
    /// The ratio is multiplied by it before it is clipped.
    BeforeClip,
    /// After it is clipped (the first published form of RSPO).
    AfterClip,
}

/// A constant weight on the loss, from ρ = trainer / sampler at the weights of the rollout.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum ImportanceCorrection {
    /// 1.
    #[default]
    None,
    /// min(ρ, high): truncated importance sampling.
    Tis,
    /// ρ where ρ ≤ high, else 0: masked importance sampling.
    Mis,
    /// ρ where low ≤ ρ ≤ high, else 0.
    Icepop,
    /// 1 where the sequence's geometric mean of ρ lies between low and high, else 0.
    GeometricMask,
}

/// What ρ is taken over.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum ImportanceLevel {
    /// Each token by itself.
    #[default]
    Token,
    /// The product over a sequence's loss tokens, one weight for all of them.
    Sequence,
}

/// Estimator of the divergence from the reference policy, with k = log-prob − reference.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum KlEstimator {
    /// k, taken off the reward of each token: as a loss its gradient is noise around 0.
    K1,
    /// k² / 2 in the loss.
    K2,
    /// e^−k − 1 + k in the loss.
    #[default]
    K3,
    /// The value of k3 with the gradient of k2, in the loss.
    K3Plus,
}

/// Everything the update depends on beside the batch. Fields without a default were there from
/// the beginning; the others may be absent in a request.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Hyperparameters {
    /// The loss.
    pub policy_loss: PolicyLoss,
    /// Lower clip ε of the ratio (of its logarithm for `gmpo` and `rspo`).
    pub clip_low: f64,
    /// Upper clip ε (Clip-Higher when above `clip_low`).
    pub clip_high: f64,
    /// Dual-clip constant `c` for negative advantages; `None` = off.
    pub dual_clip: Option<f64>,
    /// Aggregation.
    pub aggregation: LossAggregation,
    /// Constant `C` of `token-sum-norm`, in tokens.
    pub loss_norm_tokens: f64,
    /// Thresholds of `sapo`'s sigmoid for positive and other advantages.
    #[serde(default = "sapo_tau")]
    pub sapo_tau: (f64, f64),
    /// Where the router-shift weight enters.
    #[serde(default)]
    pub router_shift: RouterShift,
    /// Least router-shift weight.
    #[serde(default = "router_shift_floor")]
    pub router_shift_floor: f64,
    /// Weight against the mismatch of sampler and trainer.
    #[serde(default)]
    pub importance_correction: ImportanceCorrection,
    /// What it is taken over.
    #[serde(default)]
    pub importance_level: ImportanceLevel,
    /// Lower bound of `icepop` and `geometric_mask`.
    #[serde(default = "importance_low")]
    pub importance_low: f64,
    /// Upper bound of every correction, and cap of `minirl`'s ratio.
    #[serde(default = "importance_high")]
    pub importance_high: f64,
    /// Sequences with a negative advantage whose mean `old − new` log-prob exceeds this are left
    /// out; `None` = off.
    #[serde(default)]
    pub off_policy_delta: Option<f64>,
    /// β of the divergence from the reference policy (the trainer's starting weights); 0 = off.
    #[serde(default)]
    pub kl_coefficient: f64,
    /// Its estimator.
    #[serde(default)]
    pub kl_estimator: KlEstimator,
    /// Multiply it by the ratio, and take the gradient through both.
    #[serde(default)]
    pub kl_unbiased: bool,
    /// Discount of `ppo`'s advantages, per loss token.
    #[serde(default = "one")]
    pub gae_gamma: f64,
    /// λ of `ppo`'s advantages.
    #[serde(default = "one")]
    pub gae_lambda: f64,
    /// Range a new value may differ from the old one in `ppo`'s value loss.
    #[serde(default = "value_clip")]
    pub value_clip: f64,
    /// Factor on the value loss.
    #[serde(default = "value_coefficient")]
    pub value_coefficient: f64,
    /// Learning rate of the value head, in learning rates.
    #[serde(default = "value_rate")]
    pub value_rate: f64,
    /// Routes.
    pub routing_replay: RoutingReplay,
    /// Learning rate of PR2's predictor, in learning rates.
    #[serde(default = "predictor_rate")]
    pub predictor_rate: f64,
    /// Most tokens per sequence the predictor learns from, evenly spread.
    #[serde(default = "predictor_tokens")]
    pub predictor_tokens: usize,
    /// Optimizer steps this batch is split into.
    pub mini_steps: u32,
    /// Most tokens in one forward and backward pass; gradients accumulate beyond.
    pub micro_batch_tokens: usize,
    /// AdamW learning rate.
    pub learning_rate: f64,
    /// Optimizer steps over which the learning rate rises to it: step `k` has `k / warmup_steps`.
    #[serde(default)]
    pub warmup_steps: u32,
    /// AdamW decay rates.
    pub betas: (f64, f64),
    /// AdamW ε.
    pub adam_eps: f64,
    /// Decoupled weight decay.
    pub weight_decay: f64,
    /// Global L2 norm the gradient is clipped to.
    pub max_grad_norm: f64,
    /// Sampling temperature of the rollouts; log-probs are taken at it.
    pub temperature: f64,
    /// Also measure the mismatch in a forward without replay.
    pub measure_no_replay: bool,
}

impl Default for Hyperparameters {
    fn default() -> Self {
        Self {
            policy_loss: PolicyLoss::default(),
            clip_low: 0.2,
            clip_high: 0.28,
            dual_clip: Some(3.0),
            aggregation: LossAggregation::default(),
            loss_norm_tokens: 1.0,
            sapo_tau: sapo_tau(),
            router_shift: RouterShift::default(),
            router_shift_floor: router_shift_floor(),
            importance_correction: ImportanceCorrection::default(),
            importance_level: ImportanceLevel::default(),
            importance_low: importance_low(),
            importance_high: importance_high(),
            off_policy_delta: None,
            kl_coefficient: 0.0,
            kl_estimator: KlEstimator::default(),
            kl_unbiased: false,
            gae_gamma: one(),
            gae_lambda: one(),
            value_clip: value_clip(),
            value_coefficient: value_coefficient(),
            value_rate: value_rate(),
            routing_replay: RoutingReplay::default(),
            predictor_rate: predictor_rate(),
            predictor_tokens: predictor_tokens(),
            mini_steps: 1,
            micro_batch_tokens: 16_384,
            learning_rate: 1e-6,
            warmup_steps: 0,
            betas: (0.9, 0.999),
            adam_eps: 1e-8,
            weight_decay: 0.01,
            max_grad_norm: 1.0,
            temperature: 1.0,
            measure_no_replay: false,
        }
    }
}

fn sapo_tau() -> (f64, f64) {
    (1.0, 1.05)
}

fn router_shift_floor() -> f64 {
    0.8
}

fn importance_low() -> f64 {
    0.5
}

fn importance_high() -> f64 {
    2.0
}

fn one() -> f64 {
    1.0
}

fn value_clip() -> f64 {
    0.2
}

fn value_coefficient() -> f64 {
    0.1
}

fn value_rate() -> f64 {
    10.0
}

fn predictor_rate() -> f64 {
    100.0
}

fn predictor_tokens() -> usize {
    2048
}
