//! Divergence from a reference policy, estimated on tokens the policy drew.

use super::{LOG_RATIO_LIMIT, Token};
use orchestrate_handoff::protocol::{Hyperparameters, KlEstimator};

/// An estimate for one token and its derivative by the token's log-prob.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Term {
    /// Estimate, nats.
    pub value: f64,
    /// Derivative.
    pub gradient: f64,
}

/// Value and derivative of an estimator, with `k = logp − reference` clamped to ±20.
pub fn penalty(estimator: KlEstimator, logp: f64, reference: f64) -> Term {
    let k = (logp - reference).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT);
    let k3 = (-k).exp() - 1.0 + k;
    match estimator {
        KlEstimator::K1 => Term { value: k, gradient: 1.0 },
        KlEstimator::K2 => Term { value: k * k / 2.0, gradient: k },
        KlEstimator::K3 => Term { value: k3, gradient: 1.0 - (-k).exp() },
        KlEstimator::K3Plus => Term { value: k3, gradient: k },
    }
}

/// A token's term of the loss. K1 is taken off rewards before, so it adds nothing here.
pub(crate) fn term(h: &Hyperparameters, token: &Token, reference: f64) -> Term {
    let plain = penalty(h.kl_estimator, token.new, reference);
    if h.kl_estimator == KlEstimator::K1 {
        return Term { value: 0.0, gradient: 0.0 };
    }
    if !h.kl_unbiased {
        return plain;
    }
    let ratio = token.log_ratio.exp();
    // d(r f)/dlogp = r (f + f').
    Term { value: ratio * plain.value, gradient: ratio * (plain.value + plain.gradient) }
}
