//! Every hyperparameter, every option, and every rule between them, each declared once.
//!
//! The section `[algorithm]`, the request to a trainer, the checks of both, their documentation and
//! the modules `settings.py` and `rules.py` of the PyTorch trainer follow from this file. A new
//! policy loss is one entry in `policy_loss` below, plus defaults and bounds where they differ.

use super::describe::describe_keys;
use super::hyperparameter::{Choice, OffAtZero};
use super::macros::{choice, hyperparameters, named};
use crate::AdvantageNorm;
use crate::condition::{Rule, always, constant, is, is_on, number, rule, when, within};
use orchestrate_settings::{above, at_least, between, setting_types};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

choice! {
    /// Which loss the update minimises. `r` is the probability ratio of new to old policy.
    policy_loss: PolicyLoss -> LossSettings, default Grpo {
        /// Clipped surrogate per token, with group-relative advantages.
        Grpo "grpo" { clip_low, clip_high, dual_clip, off_policy_delta }
            with { router_shift: RouterShiftSettings },
        /// Clipped surrogate of the sequence's geometric mean ratio.
        Gspo "gspo" { clip_low, clip_high, off_policy_delta } fixed { dual_clip = None }
            with { router_shift: RouterShiftSettings },
        /// Geometric mean over tokens, each clipped in log space.
        Gmpo "gmpo" { clip_low, clip_high, off_policy_delta }
            fixed { dual_clip = None, router_shift = RouterShift::None },
        /// GMPO with ratios that are lowered where the router moved.
        Rspo "rspo" { clip_low, clip_high, off_policy_delta } fixed { dual_clip = None }
            with { router_shift: RouterShiftSettings },
        /// Log-probability weighted by the clipped ratio as a constant: every token keeps its
        /// gradient.
        Cispo "cispo" { clip_low, clip_high, off_policy_delta }
            fixed { dual_clip = None, router_shift = RouterShift::None },
        /// Log-probability weighted by the ratio to the sampler as a constant; clipped tokens are
        /// left out.
        Minirl "minirl" { clip_low, clip_high, importance_high, off_policy_delta }
            fixed { dual_clip = None, router_shift = RouterShift::None },
        /// A sigmoid of the ratio instead of a clip.
        Sapo "sapo" { sapo_tau, off_policy_delta }
            fixed { dual_clip = None, router_shift = RouterShift::None },
        /// Clipped surrogate with advantages from a value head.
        Ppo "ppo" {
            clip_low, clip_high, dual_clip,
            gae_gamma, gae_lambda, value_clip, value_coefficient, value_rate,
        } fixed { off_policy_delta = None } with { router_shift: RouterShiftSettings },
    }
}

choice! {
    /// How token losses are aggregated to one number.
    aggregation: LossAggregation -> AggregationSettings, default TokenMean {
        /// Sum over all tokens, divided by the number of loss tokens.
        TokenMean "token-mean" {} fixed { loss_norm_tokens = 1.0 },
        /// Mean over sequences of their token mean.
        SeqMeanTokenMean "seq-mean-token-mean" {} fixed { loss_norm_tokens = 1.0 },
        /// Mean over sequences of their token sum.
        SeqMeanTokenSum "seq-mean-token-sum" {} fixed { loss_norm_tokens = 1.0 },
        /// Sum over all tokens, divided by (sequences × `loss_norm_tokens`).
        TokenSumNorm "token-sum-norm" { loss_norm_tokens },
    }
}

choice! {
    /// Whose routes the trainer's forward passes use.
    routing_replay: RoutingReplay -> ReplaySettings, default Rollout {
        /// The trainer's own, in every pass.
        None "none" {},
        /// Those of the recompute pass, in the update passes (R2).
        Recompute "recompute" {},
        /// Those of the inference engine, in recompute and update passes (R3).
        Rollout "rollout" {},
        /// As `rollout`, while the engine routes by the trainer's prediction of its next router
        /// (PR2).
        Predictive "predictive" { predictor_rate, predictor_tokens },
    }
}

choice! {
    /// Where the router-shift weight γ enters the ratio. γ = exp(−mean |Δ log router probability|)
    /// over the layers and the experts that were executed at the old weights; a constant.
    router_shift: RouterShift -> RouterShiftSettings, default None {
        /// Nowhere.
        None "none" {},
        /// The ratio is multiplied by it before it is clipped.
        BeforeClip "before_clip" { router_shift_floor },
        /// The ratio is multiplied by it after it is clipped (the first published form of RSPO).
        AfterClip "after_clip" { router_shift_floor },
    }
}

choice! {
    /// A constant weight on the loss, from ρ = trainer / sampler at the weights of the rollout.
    importance_correction: ImportanceCorrection -> CorrectionSettings, default None {
        /// 1.
        None "none" {},
        /// min(ρ, high): truncated importance sampling.
        Tis "tis" { importance_level, importance_high },
        /// ρ where ρ ≤ high, else 0: masked importance sampling.
        Mis "mis" { importance_level, importance_high },
        /// ρ where low ≤ ρ ≤ high, else 0.
        Icepop "icepop" { importance_low, importance_high }
            fixed { importance_level = ImportanceLevel::Token },
        /// 1 where the sequence's geometric mean of ρ lies between low and high, else 0.
        GeometricMask "geometric_mask" { importance_low, importance_high }
            fixed { importance_level = ImportanceLevel::Sequence },
    }
}

named! {
    /// Tokens over which ρ is taken.
    ImportanceLevel, default Token {
        /// Each token by itself.
        Token "token",
        /// The product over a sequence's loss tokens, one weight for all of them.
        Sequence "sequence",
    }
}

choice! {
    /// Estimator of the divergence from the reference policy, with k = log-prob − reference.
    kl_estimator: KlEstimator -> KlEstimatorSettings, default K3 {
        /// k, subtracted from the reward of each token: as a loss its gradient is noise around 0.
        K1 "k1" {} fixed { kl_unbiased = false },
        /// k² / 2 in the loss.
        K2 "k2" {} fixed { kl_unbiased = false },
        /// e^−k − 1 + k in the loss.
        K3 "k3" { kl_unbiased },
        /// The value of k3 with the gradient of k2, in the loss.
        K3Plus "k3_plus" {} fixed { kl_unbiased = false },
    }
}

/// Every choice that decides which hyperparameters apply.
pub(crate) const CHOICES: &[Choice] = &[
    PolicyLoss::CHOICE,
    LossAggregation::CHOICE,
    RoutingReplay::CHOICE,
    RouterShift::CHOICE,
    ImportanceCorrection::CHOICE,
    KlEstimator::CHOICE,
];

/// Keys that apply while a number is above 0: the key and the number.
pub(crate) const GATES: &[(&str, &str)] = &[("kl_estimator", "kl_coefficient")];

/// What happens with episodes that a limit ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum TruncatedEpisodes {
    /// They are trained on with their reward.
    Train,
    /// They count towards the group's baseline, but their tokens are not trained on.
    Mask,
}

/// Weights of the branches of an episode whose conversation forked.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum BranchWeight {
    /// Each branch has the episode's advantage: every sampled token counts alike.
    Full,
    /// Each branch has the episode's advantage divided by the number of branches.
    Shared,
}

impl BranchWeight {
    /// The advantage of each branch of an episode with `branches` branches and the advantage
    /// `episode`.
    pub fn advantage(self, episode: f64, branches: usize) -> f64 {
        match self {
            Self::Full => episode,
            Self::Shared => episode / branches.max(1) as f64,
        }
    }
}

setting_types!(AdvantageNorm, BranchWeight, TruncatedEpisodes);

hyperparameters! {
    amend: describe_keys;
    sent {
        /// Policy loss.
        policy_loss: PolicyLoss = PolicyLoss::default(), required;
        /// How token losses are aggregated to one number.
        aggregation: LossAggregation = default_aggregation(policy_loss), required;
        /// Constant of `token-sum-norm`, in tokens: usually the longest sequence. Required there.
        loss_norm_tokens: f64 = 1.0, required, always(above(0.0));
        /// Whose routes the trainer's forward passes use.
        routing_replay: RoutingReplay = RoutingReplay::default(), required;
        /// Where the router-shift weight enters the ratio.
        router_shift: RouterShift = default_router_shift(policy_loss), optional;
        /// Smallest router-shift weight.
        router_shift_floor: f64 = 0.8, optional, above(0.0).at_most(1.0);
        /// Lower clip of the ratio; of its logarithm for `gmpo` and `rspo`.
        clip_low: f64 = default_clip(policy_loss, router_shift).0, required,
            when(is("policy_loss", &["grpo", "gspo", "minirl", "ppo"]), above(0.0).below(1.0)),
            when(
                is("policy_loss", &["cispo"]),
                above(0.0).at_most(1.0).hint("1 leaves the ratio without a lower bound"),
            ),
            when(is("policy_loss", &["gmpo", "rspo"]), above(0.0));
        /// Upper clip of the ratio; above `clip_low` it is Clip-Higher.
        clip_high: f64 = default_clip(policy_loss, router_shift).1, required, above(0.0);
        /// Bound of the ratio for negative advantages; 0 turns it off.
        dual_clip: OffAtZero = default_dual_clip(policy_loss), nullable,
            always(above(1.0).hint("0 turns it off"));
        /// Thresholds of `sapo`'s sigmoid for positive and for other advantages.
        sapo_tau: (f64, f64) = (1.0, 1.05), optional, above(0.0);
        /// Importance weight that corrects the mismatch between engine and trainer.
        importance_correction: ImportanceCorrection = ImportanceCorrection::default(), optional;
        /// Whether the weight is taken over single tokens or whole sequences.
        importance_level: ImportanceLevel = default_level(policy_loss, importance_correction),
            optional;
        /// Upper bound of the weight, and of `minirl`'s ratio.
        importance_high: f64 =
            default_bounds(policy_loss, importance_correction, importance_level).1, optional,
            above(0.0);
        /// Lower bound of the weight.
        importance_low: f64 =
            default_bounds(policy_loss, importance_correction, importance_level).0, optional,
            at_least(0.0);
        /// Sequences with a negative advantage are left out once the policy moved away from them by
        /// this mean log-prob; 0 turns it off.
        off_policy_delta: OffAtZero = OffAtZero(None), nullable, always(above(0.0));
        /// Factor on the divergence from the run's starting policy; 0 turns it off.
        kl_coefficient: f64 = 0.0, optional, at_least(0.0);
        /// Estimator of that divergence.
        kl_estimator: KlEstimator = KlEstimator::default(), optional;
        /// Multiply k3 by the ratio of new to old policy, and take the gradient through both:
        /// unbiased off policy.
        kl_unbiased: bool = false, optional;
        /// Discount of `ppo`'s advantages per loss token.
        gae_gamma: f64 = 1.0, optional, between(0.0, 1.0);
        /// λ of `ppo`'s advantages.
        gae_lambda: f64 = 1.0, optional, between(0.0, 1.0);
        /// How far `ppo`'s new value may move from the old one.
        value_clip: f64 = 0.2, optional, above(0.0);
        /// Factor on `ppo`'s value loss.
        value_coefficient: f64 = 0.1, optional, above(0.0);
        /// Learning rate of `ppo`'s value head, as a multiple of `learning_rate`.
        value_rate: f64 = 10.0, optional, above(0.0);
        /// Learning rate of the router predictor, as a multiple of `learning_rate`.
        predictor_rate: f64 = 100.0, optional, above(0.0);
        /// Maximum number of tokens per sequence that the router predictor learns from, evenly spread.
        predictor_tokens: usize = 2048, optional, at_least(1.0);
        /// Optimizer steps that one batch is split into.
        mini_steps: u32 = 1, required, always(at_least(1.0));
        /// Maximum number of tokens in one forward and backward pass; gradients accumulate over passes.
        micro_batch_tokens: usize = 16_384, required,
            at_least(1.0).hint("a longer sequence is a pass by itself");
        /// AdamW learning rate. A run requires at least 1e-12.
        learning_rate: f64 = 1e-6, required, at_least(0.0).at_most(100.0);
        /// Optimizer steps over which the learning rate rises: step `k` has `k / warmup_steps` of it.
        warmup_steps: u32 = 0, optional;
        /// AdamW decay rates of the first and second moment.
        betas: (f64, f64) = (0.9, 0.999), required, at_least(0.0).below(1.0);
        /// AdamW ε.
        adam_eps: f64 = 1e-8, required, above(0.0);
        /// Decoupled weight decay.
        weight_decay: f64 = 0.01, required, at_least(0.0);
        /// Global L2 norm that gradients are clipped to.
        max_grad_norm: f64 = 1.0, required, above(0.0);
    }
    kept {
        /// How the rewards of a group become advantages. Not with `ppo`, whose advantages come from
        /// its value head.
        advantage_normalisation: AdvantageNorm = AdvantageNorm::Std;
        /// Weights of the branches of an episode whose conversation forked. With `full` the weights
        /// do not depend on how often an agent rewrites its history, and with `token-mean` an
        /// episode counts by its sampled tokens, as one without forks does. With a mean over
        /// sequences, each branch is a sequence; `shared` then gives all of them together the
        /// weight of one. Not with `ppo`.
        branch_weight: BranchWeight = BranchWeight::Full;
        /// How episodes that were ended by a limit are used.
        truncated: TruncatedEpisodes = TruncatedEpisodes::Train;
        /// Response tokens above which an episode loses 1 of its reward.
        overlong_max_tokens: Option<u64> = None => "no episode does";
        /// Tokens before `overlong_max_tokens` over which this loss of reward grows from 0 to 1. Required
        /// with `overlong_max_tokens`.
        overlong_cache_tokens: Option<u64> = None => "none";
    }
    per_step {
        /// Sampling temperature of the rollouts; log-probs are taken at it.
        temperature: f64 = 1.0, above(0.0);
        /// Also measure the mismatch in a forward pass without replay.
        measure_no_replay: bool = false;
    }
}

fn default_aggregation(loss: PolicyLoss) -> LossAggregation {
    match loss {
        PolicyLoss::Gspo | PolicyLoss::Gmpo | PolicyLoss::Rspo | PolicyLoss::Sapo => {
            LossAggregation::SeqMeanTokenMean
        }
        PolicyLoss::Minirl => LossAggregation::SeqMeanTokenSum,
        PolicyLoss::Grpo | PolicyLoss::Cispo | PolicyLoss::Ppo => LossAggregation::TokenMean,
    }
}

fn default_router_shift(loss: PolicyLoss) -> RouterShift {
    if loss == PolicyLoss::Rspo { RouterShift::BeforeClip } else { RouterShift::None }
}

/// The published clip of a loss; with router shift, a clip that the weight fits into.
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

fn default_dual_clip(loss: PolicyLoss) -> OffAtZero {
    let bounded = matches!(loss, PolicyLoss::Grpo | PolicyLoss::Ppo);
    OffAtZero(bounded.then_some(3.0))
}

fn default_level(loss: PolicyLoss, correction: ImportanceCorrection) -> ImportanceLevel {
    let by_sequence = matches!(loss, PolicyLoss::Gmpo | PolicyLoss::Rspo);
    match correction {
        ImportanceCorrection::GeometricMask => ImportanceLevel::Sequence,
        ImportanceCorrection::Tis | ImportanceCorrection::Mis if by_sequence => {
            ImportanceLevel::Sequence
        }
        ImportanceCorrection::None
        | ImportanceCorrection::Tis
        | ImportanceCorrection::Mis
        | ImportanceCorrection::Icepop => ImportanceLevel::Token,
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

/// The rules between several hyperparameters: the one that is refused, when, and the remedy.
pub(crate) fn rules() -> Vec<Rule> {
    let loss = |names| is("policy_loss", names);
    let mut rules = vec![
        rule(
            "aggregation",
            loss(&["gspo", "gmpo", "rspo"]) & !is("aggregation", &["seq-mean-token-mean"]),
            "must be \"seq-mean-token-mean\": gspo, gmpo and rspo are means over sequences",
        ),
        rule(
            "dual_clip",
            is_on("dual_clip") & !loss(&["grpo", "ppo"]),
            "must be left out: it bounds the clipped surrogate of grpo and ppo",
        ),
        rule(
            "off_policy_delta",
            is_on("off_policy_delta") & loss(&["ppo"]),
            "must be left out: it needs one advantage per sequence, and ppo has one per token",
        ),
        rule(
            "kl_estimator",
            number("kl_coefficient").exceeds(constant(0.0))
                & is("kl_estimator", &["k1"])
                & !loss(&["ppo"]),
            "must be \"k2\", \"k3\" or \"k3_plus\": k1 is subtracted from the reward of each \
             token, which only ppo has, and as a loss term its expected gradient is zero",
        ),
        rule(
            "kl_unbiased",
            number("kl_coefficient").exceeds(constant(0.0))
                & is_on("kl_unbiased")
                & !is("kl_estimator", &["k3"]),
            "must be false, unless kl_estimator is \"k3\": the ratio makes its gradient unbiased",
        ),
        rule(
            "mini_steps",
            is("routing_replay", &["predictive"]) & constant(2.0).exceeds(number("mini_steps")),
            "must be at least 2 with routing_replay = \"predictive\": the predictor learns from \
             the second mini step on",
        ),
    ];
    rules.extend(router_shift_rules());
    rules.extend(correction_rules());
    rules
}

fn router_shift_rules() -> Vec<Rule> {
    let loss = |names| is("policy_loss", names);
    let shift = |names| is("router_shift", names);
    let floor = || number("router_shift_floor");
    let floor_fits = || within("router_shift_floor", above(0.0).at_most(1.0));
    let past_clip = "must be so large, or clip_low so large, that the weight alone does not pass \
                     the lower clip";
    vec![
        rule(
            "router_shift",
            loss(&["rspo"]) & shift(&["none"]),
            "must be \"before_clip\" or \"after_clip\": rspo without router shift is policy_loss = \
             \"gmpo\"",
        ),
        rule(
            "router_shift",
            loss(&["gmpo"]) & !shift(&["none"]),
            "must be \"none\": gmpo with router shift is policy_loss = \"rspo\"",
        ),
        rule(
            "router_shift",
            loss(&["grpo", "gspo", "ppo"]) & shift(&["after_clip"]),
            "must be \"before_clip\" or \"none\": only rspo has a form with the weight after the \
             clip",
        ),
        rule(
            "router_shift",
            loss(&["cispo", "minirl", "sapo"]) & !shift(&["none"]),
            "must be \"none\": it is defined for grpo, gspo, ppo and rspo",
        ),
        rule(
            "router_shift_floor",
            loss(&["rspo"])
                & shift(&["before_clip"])
                & floor_fits()
                & (-floor().ln()).exceeds(number("clip_low") + constant(1e-9)),
            past_clip,
        ),
        rule(
            "router_shift_floor",
            !loss(&["rspo"])
                & shift(&["before_clip"])
                & floor_fits()
                & (constant(1.0) - floor()).exceeds(number("clip_low") + constant(1e-9)),
            past_clip,
        ),
    ]
}

fn correction_rules() -> Vec<Rule> {
    let loss = |names| is("policy_loss", names);
    let corrected = |names| is("importance_correction", names);
    let by_sequence = || is("policy_loss", &["gmpo", "rspo"]);
    vec![
        rule(
            "importance_correction",
            loss(&["minirl"]) & !corrected(&["none"]),
            "must be \"none\": minirl's ratio is already that to the sampler, and importance_high \
             bounds it",
        ),
        rule(
            "importance_correction",
            by_sequence() & corrected(&["icepop"]) & is("importance_level", &["token"]),
            "must be \"tis\", \"mis\" or \"geometric_mask\": gmpo and rspo have one factor per \
             sequence, and icepop looks at each token",
        ),
        rule(
            "importance_level",
            corrected(&["icepop"]) & is("importance_level", &["sequence"]),
            "must be \"token\": icepop looks at each token; for sequences there is \
             importance_correction = \"geometric_mask\"",
        ),
        rule(
            "importance_level",
            corrected(&["geometric_mask"]) & is("importance_level", &["token"]),
            "must be \"sequence\": geometric_mask looks at whole sequences",
        ),
        rule(
            "importance_level",
            by_sequence() & corrected(&["tis", "mis"]) & is("importance_level", &["token"]),
            "must be \"sequence\": gmpo and rspo have one factor per sequence",
        ),
        rule(
            "importance_low",
            corrected(&["icepop", "geometric_mask"])
                & !number("importance_high").exceeds(number("importance_low")),
            "must be below importance_high",
        ),
    ]
}
