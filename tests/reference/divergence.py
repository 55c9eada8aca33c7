"""Divergence from a reference policy, estimated on sampled tokens.

Schulman 2020, "Approximating KL divergence", with ``k = log pi - log pi_ref``:

* ``k1 = k``: unbiased, but the expected gradient of ``k1`` as a loss is 0; it is subtracted from
  rewards instead.
* ``k2 = k^2 / 2``: its gradient ``k`` is an unbiased gradient of ``KL(pi || pi_ref)``.
* ``k3 = e^-k - 1 + k``: GRPO's estimator, arXiv 2402.03300, eq (4); gradient ``1 - e^-k``.
* ``k3_plus``: the value of k3 with the gradient of k2 (verl).

``k`` is clamped to ±20. In the loss, the value of a k3 term is capped at 10, as in verl's and
slime's ``low_var_kl``, and a capped term has no gradient: without the cap, one token whose
probability collapsed (``k = -20`` gives 4.9e8) would decide the direction of the whole step. The
gradient of ``k3_plus`` is ``k`` and needs no cap.

The unbiased form (DeepSeek-V3.2, arXiv 2512.02556) multiplies k3 by ``r = pi / pi_old`` and takes
the gradient through both. The cap applies to the product, as in slime: if it applied to k3
alone, the remaining gradient, ``10 r``, would push a token away from the reference.
"""

from __future__ import annotations

import numpy as np

from basics import LOG_RATIO_LIMIT, Array, bounded_exp, bounded_exp_slope

ESTIMATORS = ("k1", "k2", "k3", "k3_plus")
#: Largest value of a token's k3 term.
K3_LIMIT = 10.0


def penalty(
    estimator: str, new: Array, reference: Array, log_ratio: Array | None = None
) -> tuple[Array, Array]:
    """Value of each token and its derivative with respect to ``new``. Passing
    ``log_ratio = new - old`` selects the unbiased form."""
    free = new - reference
    k = np.clip(free, -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    inside = (np.abs(free) <= LOG_RATIO_LIMIT).astype(float)
    if estimator == "k1":
        return k, inside
    if estimator == "k2":
        return k**2 / 2, k * inside
    value, slope = np.exp(-k) - 1 + k, (1 - np.exp(-k)) * inside
    if log_ratio is not None:
        ratio = bounded_exp(log_ratio)
        slope = bounded_exp_slope(log_ratio) * value + ratio * slope
        value = ratio * value
    slope = np.where(value <= K3_LIMIT, slope, 0.0)
    value = np.minimum(value, K3_LIMIT)
    return (value, k * inside) if estimator == "k3_plus" else (value, slope)
