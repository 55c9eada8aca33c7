//! Divergence from a reference policy, estimated on tokens that the policy sampled.

use super::{LOG_RATIO_LIMIT, Ratio, Token};
use orchestrate_handoff::protocol::{Hyperparameters, KlEstimator};

/// Largest value of a token's k3 term, as in verl's and slime's `low_var_kl`. Without it one token
/// whose probability collapsed decides the direction of a whole step.
const K3_LIMIT: f64 = 10.0;

/// An estimate for one token and its derivative with respect to the token's log-prob.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Term {
    /// Estimate, nats.
    pub value: f64,
    /// Derivative with respect to the log-prob.
    pub gradient: f64,
}

/// Value and derivative of an estimator, with `k = logp − reference` clamped to ±20 and k3 capped
/// at 10. Where a bound holds the derivative is 0; the derivative of `k3_plus` is that of k2.
pub fn penalty(estimator: KlEstimator, logp: f64, reference: f64) -> Term {
    capped(estimator, uncapped(estimator, logp, reference))
}

/// A token's term of the loss; 0 for k1, which is subtracted from rewards instead.
pub(crate) fn term(h: &Hyperparameters, token: &Token, reference: f64) -> Term {
    if h.kl_estimator == KlEstimator::K1 {
        return Term { value: 0.0, gradient: 0.0 };
    }
    let plain = uncapped(h.kl_estimator, token.new, reference);
    if !h.kl_unbiased {
        return capped(h.kl_estimator, plain);
    }
    // The product is capped, not k3: the gradient left of a capped k3, `10 r`, would push the
    // token away from the reference.
    let ratio = Ratio::exp(token.log_ratio);
    let product = Term {
        value: ratio.value * plain.value,
        gradient: ratio.slope * plain.value + ratio.value * plain.gradient,
    };
    capped(h.kl_estimator, product)
}

fn uncapped(estimator: KlEstimator, logp: f64, reference: f64) -> Term {
    let free = logp - reference;
    let k = free.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT);
    let k3 = libm::exp(-k) - 1.0 + k;
    let (value, gradient) = match estimator {
        KlEstimator::K1 => (k, 1.0),
        KlEstimator::K2 => (k * k / 2.0, k),
        KlEstimator::K3 => (k3, 1.0 - libm::exp(-k)),
        KlEstimator::K3Plus => (k3, k),
    };
    Term { value, gradient: if free.abs() > LOG_RATIO_LIMIT { 0.0 } else { gradient } }
}

fn capped(estimator: KlEstimator, term: Term) -> Term {
    match estimator {
        KlEstimator::K3 if term.value > K3_LIMIT => Term { value: K3_LIMIT, gradient: 0.0 },
        KlEstimator::K1 | KlEstimator::K2 | KlEstimator::K3 => term,
        KlEstimator::K3Plus => Term { value: term.value.min(K3_LIMIT), ..term },
    }
}
