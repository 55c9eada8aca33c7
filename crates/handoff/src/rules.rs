//! Which hyperparameters make sense, alone and together. One list: the configuration is checked
//! with it, and so is every request that reaches a trainer.

use crate::hyperparameters::{
    Hyperparameters, ImportanceCorrection, ImportanceLevel, KlEstimator, LossAggregation,
    PolicyLoss, RouterShift, RoutingReplay,
};

/// A hyperparameter that cannot be used.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Refusal {
    /// Its name.
    pub field: &'static str,
    /// Its value, as text.
    pub value: String,
    /// Why, and what to write instead.
    pub remedy: &'static str,
}

/// Which optional settings the others give a meaning to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[expect(clippy::struct_excessive_bools, reason = "each says whether one setting is read")]
pub(crate) struct Uses {
    pub(crate) clip: bool,
    pub(crate) sapo_tau: bool,
    pub(crate) router_shift_floor: bool,
    pub(crate) importance_level: bool,
    pub(crate) importance_low: bool,
    pub(crate) importance_high: bool,
    pub(crate) kl: bool,
    pub(crate) values: bool,
    pub(crate) predictor: bool,
}

impl Uses {
    pub(crate) fn of(h: &Hyperparameters) -> Self {
        let correction = h.importance_correction;
        let (low, leveled) = match correction {
            ImportanceCorrection::None => (false, false),
            ImportanceCorrection::Tis | ImportanceCorrection::Mis => (false, true),
            ImportanceCorrection::Icepop | ImportanceCorrection::GeometricMask => (true, true),
        };
        Self {
            clip: h.policy_loss != PolicyLoss::Sapo,
            sapo_tau: h.policy_loss == PolicyLoss::Sapo,
            router_shift_floor: h.router_shift != RouterShift::None,
            importance_level: leveled,
            importance_low: low,
            importance_high: leveled || h.policy_loss == PolicyLoss::Minirl,
            kl: h.kl_coefficient > 0.0,
            values: h.policy_loss == PolicyLoss::Ppo,
            predictor: h.routing_replay == RoutingReplay::Predictive,
        }
    }
}

struct Refusals(Vec<Refusal>);

impl Refusals {
    fn require(
        &mut self,
        holds: bool,
        field: &'static str,
        value: impl std::fmt::Display,
        remedy: &'static str,
    ) {
        if !holds {
            self.0.push(Refusal { field, value: value.to_string(), remedy });
        }
    }

    fn positive(&mut self, field: &'static str, value: f64) {
        let holds = value.is_finite() && value > 0.0;
        self.require(holds, field, value, "use a number above 0");
    }

    fn not_negative(&mut self, field: &'static str, value: f64) {
        let holds = value.is_finite() && value >= 0.0;
        self.require(holds, field, value, "use 0 or a number above");
    }
}

/// Everything that is wrong with `h`; empty if it can be used.
pub fn refusals(h: &Hyperparameters) -> Vec<Refusal> {
    let mut found = Refusals(Vec::new());
    let r = &mut found;
    clips(h, r);
    sums(h, r);
    shift(h, r);
    importance(h, r);
    divergence(h, r);
    values(h, r);
    routes(h, r);
    optimizer(h, r);
    found.0
}

fn clips(h: &Hyperparameters, r: &mut Refusals) {
    match h.policy_loss {
        PolicyLoss::Grpo | PolicyLoss::Gspo | PolicyLoss::Minirl | PolicyLoss::Ppo => {
            let open = h.clip_low > 0.0 && h.clip_low < 1.0;
            r.require(open, "clip_low", h.clip_low, "use a number between 0 and 1");
        }
        PolicyLoss::Cispo => {
            let fits = h.clip_low > 0.0 && h.clip_low <= 1.0;
            let remedy = "use a number above 0; 1 leaves the ratio without a lower bound";
            r.require(fits, "clip_low", h.clip_low, remedy);
        }
        PolicyLoss::Gmpo | PolicyLoss::Rspo => r.positive("clip_low", h.clip_low),
        PolicyLoss::Sapo => {}
    }
    if h.policy_loss == PolicyLoss::Sapo {
        let (positive, other) = h.sapo_tau;
        let fine = [positive, other].iter().all(|t| t.is_finite() && *t > 0.0);
        let value = format!("[{positive}, {other}]");
        r.require(fine, "sapo_tau", value, "use two numbers above 0");
    } else {
        r.positive("clip_high", h.clip_high);
    }
    if let Some(c) = h.dual_clip {
        let remedy = "use a number above 1, or 0 to turn it off";
        r.require(c.is_finite() && c > 1.0, "dual_clip", c, remedy);
        let surrogate = match h.policy_loss {
            PolicyLoss::Grpo | PolicyLoss::Ppo => true,
            PolicyLoss::Gspo
            | PolicyLoss::Gmpo
            | PolicyLoss::Rspo
            | PolicyLoss::Cispo
            | PolicyLoss::Minirl
            | PolicyLoss::Sapo => false,
        };
        let remedy = "it bounds the clipped surrogate of grpo and ppo; leave it out with others";
        r.require(surrogate, "dual_clip", c, remedy);
    }
}

fn sums(h: &Hyperparameters, r: &mut Refusals) {
    r.positive("loss_norm_tokens", h.loss_norm_tokens);
    let fits =
        !h.policy_loss.is_per_sequence() || h.aggregation == LossAggregation::SeqMeanTokenMean;
    let remedy = "gspo, gmpo and rspo are means over sequences: use \"seq-mean-token-mean\"";
    r.require(fits, "aggregation", word(&h.aggregation), remedy);
}

fn shift(h: &Hyperparameters, r: &mut Refusals) {
    let (loss, shift) = (h.policy_loss, h.router_shift);
    let name = word(&shift);
    match (loss, shift) {
        (PolicyLoss::Rspo, RouterShift::None) => {
            let remedy = "rspo is gmpo with router shift: use \"before_clip\" or \"after_clip\", or \
                          policy_loss = \"gmpo\"";
            r.require(false, "router_shift", name, remedy);
        }
        (PolicyLoss::Gmpo, RouterShift::BeforeClip | RouterShift::AfterClip) => {
            let remedy = "gmpo with router shift is policy_loss = \"rspo\"";
            r.require(false, "router_shift", name, remedy);
        }
        (PolicyLoss::Grpo | PolicyLoss::Gspo | PolicyLoss::Ppo, RouterShift::AfterClip) => {
            let remedy = "only rspo has a form with the weight after the clip: use \"before_clip\"";
            r.require(false, "router_shift", name, remedy);
        }
        (
            PolicyLoss::Cispo | PolicyLoss::Minirl | PolicyLoss::Sapo,
            RouterShift::BeforeClip | RouterShift::AfterClip,
        ) => {
            let remedy = "it is defined for grpo, gspo, ppo and rspo; use \"none\"";
            r.require(false, "router_shift", name, remedy);
        }
        (_, RouterShift::None)
        | (PolicyLoss::Rspo, RouterShift::BeforeClip | RouterShift::AfterClip)
        | (PolicyLoss::Grpo | PolicyLoss::Gspo | PolicyLoss::Ppo, RouterShift::BeforeClip) => {}
    }
    if shift == RouterShift::None {
        return;
    }
    let floor = h.router_shift_floor;
    let fits = floor > 0.0 && floor <= 1.0;
    r.require(fits, "router_shift_floor", floor, "use a number above 0, at most 1");
    let reach = if loss == PolicyLoss::Rspo { -floor.ln() } else { 1.0 - floor };
    let inside = shift == RouterShift::AfterClip || reach <= h.clip_low + 1e-9;
    let remedy =
        "a weight at the floor alone would pass the lower clip: raise the floor or clip_low";
    r.require(!fits || inside, "router_shift_floor", floor, remedy);
}

fn importance(h: &Hyperparameters, r: &mut Refusals) {
    let correction = h.importance_correction;
    let name = word(&correction);
    let uses = Uses::of(h);
    if uses.importance_high {
        r.positive("importance_high", h.importance_high);
    }
    if uses.importance_low {
        r.not_negative("importance_low", h.importance_low);
        let remedy = "use a number below importance_high";
        r.require(h.importance_low < h.importance_high, "importance_low", h.importance_low, remedy);
    }
    if correction == ImportanceCorrection::None {
        return;
    }
    let remedy = "minirl's ratio is already that to the sampler: use \"none\", and bound it by \
                  importance_high";
    r.require(h.policy_loss != PolicyLoss::Minirl, "importance_correction", &name, remedy);
    let level = word(&h.importance_level);
    let by_sequence = matches!(h.policy_loss, PolicyLoss::Gmpo | PolicyLoss::Rspo);
    match (correction, h.importance_level) {
        (ImportanceCorrection::Icepop, ImportanceLevel::Sequence) => {
            let remedy = "icepop looks at each token: use \"token\", or the correction \
                          \"geometric_mask\"";
            r.require(false, "importance_level", level, remedy);
        }
        (ImportanceCorrection::GeometricMask, ImportanceLevel::Token) => {
            let remedy = "geometric_mask looks at whole sequences: use \"sequence\"";
            r.require(false, "importance_level", level, remedy);
        }
        (ImportanceCorrection::Icepop, ImportanceLevel::Token) => {
            let remedy = "icepop looks at each token, gmpo and rspo have one factor per sequence: \
                          use tis, mis or geometric_mask";
            r.require(!by_sequence, "importance_correction", name, remedy);
        }
        (_, ImportanceLevel::Token) => {
            let remedy = "gmpo and rspo have one factor per sequence: use \"sequence\"";
            r.require(!by_sequence, "importance_level", level, remedy);
        }
        (_, ImportanceLevel::Sequence) => {}
    }
}

fn divergence(h: &Hyperparameters, r: &mut Refusals) {
    if let Some(delta) = h.off_policy_delta {
        r.positive("off_policy_delta", delta);
        let remedy = "it needs one advantage per sequence, ppo has one per token: leave it out";
        r.require(h.policy_loss != PolicyLoss::Ppo, "off_policy_delta", delta, remedy);
    }
    r.not_negative("kl_coefficient", h.kl_coefficient);
    if !Uses::of(h).kl {
        return;
    }
    let in_reward = h.kl_estimator == KlEstimator::K1;
    let remedy = "k1 is taken off the reward of each token, which only ppo has; in a loss its \
                  gradient says nothing: use \"k3\" or \"k2\"";
    let fits = !in_reward || h.policy_loss == PolicyLoss::Ppo;
    r.require(fits, "kl_estimator", word(&h.kl_estimator), remedy);
    let remedy = "the ratio makes the gradient of k3 unbiased; use it with kl_estimator = \"k3\"";
    let fits = !h.kl_unbiased || h.kl_estimator == KlEstimator::K3;
    r.require(fits, "kl_unbiased", h.kl_unbiased, remedy);
}

fn values(h: &Hyperparameters, r: &mut Refusals) {
    if !Uses::of(h).values {
        return;
    }
    for (field, value) in [("gae_gamma", h.gae_gamma), ("gae_lambda", h.gae_lambda)] {
        r.require((0.0..=1.0).contains(&value), field, value, "use a number from 0 to 1");
    }
    r.positive("value_clip", h.value_clip);
    r.positive("value_coefficient", h.value_coefficient);
    r.positive("value_rate", h.value_rate);
}

fn routes(h: &Hyperparameters, r: &mut Refusals) {
    if !Uses::of(h).predictor {
        return;
    }
    let remedy = "the predictor learns from the second mini step on: use at least 2, or \
                  routing_replay = \"rollout\"";
    r.require(h.mini_steps >= 2, "mini_steps", h.mini_steps, remedy);
    r.positive("predictor_rate", h.predictor_rate);
    r.require(h.predictor_tokens > 0, "predictor_tokens", h.predictor_tokens, "use at least 1");
}

fn optimizer(h: &Hyperparameters, r: &mut Refusals) {
    r.require(h.mini_steps > 0, "mini_steps", h.mini_steps, "use at least 1");
    let unit = |beta: f64| (0.0..1.0).contains(&beta);
    let (beta1, beta2) = h.betas;
    let betas = format!("[{beta1}, {beta2}]");
    r.require(unit(beta1) && unit(beta2), "betas", betas, "use two numbers from 0 to below 1");
    r.not_negative("weight_decay", h.weight_decay);
    let remedy = "use at least 1; a longer sequence forms a pass of its own";
    r.require(h.micro_batch_tokens > 0, "micro_batch_tokens", h.micro_batch_tokens, remedy);
    r.not_negative("learning_rate", h.learning_rate);
    r.positive("adam_eps", h.adam_eps);
    r.positive("max_grad_norm", h.max_grad_norm);
    r.positive("temperature", h.temperature);
}

/// An enum's name on the wire.
fn word<T: serde::Serialize>(value: &T) -> String {
    let name = serde_json::to_value(value).unwrap_or_default();
    name.as_str().unwrap_or_default().to_owned()
}
