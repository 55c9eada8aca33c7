"""Constant weights that correct the mismatch between inference engine and trainer.

With ``rho = pi_train / pi_engine``, both at the weights of the rollout, the loss of each token is
multiplied by a constant ``w`` that is computed from ``rho``:

* TIS, truncated importance sampling (Yao et al. 2025): ``w = min(rho, high)``.
* MIS, masked importance sampling (Liu et al. 2025): ``w = rho`` where ``rho <= high``, else 0.
* IcePop (Ring team 2025): ``w = rho`` where ``low <= rho <= high``, else 0.
* Geometric mask: ``w = 1`` where the geometric mean of a sequence's ``rho`` is in
  ``[low, high]``, else 0.

At level ``token``, ``rho`` is each token's own; at level ``sequence`` it is the product over the
loss tokens of the sequence and all of them get the same weight. Masking tokens does not change any
denominator.

The off-policy sequence mask (DeepSeek-V3.2, arXiv 2512.02556) leaves out sequences that have a
negative advantage and that the policy has moved away from: the mean of ``log pi_old - log pi`` is
above ``delta``.
"""

from __future__ import annotations

import numpy as np

from basics import Array, bounded_exp

CORRECTIONS = ("none", "tis", "mis", "icepop", "geometric_mask")


def weights(
    correction: str, level: str, low: float, high: float, log_rho: Array
) -> tuple[Array, Array]:
    """Weights of one sequence's loss tokens, and which of them the correction changed."""
    n = len(log_rho)
    if correction == "none" or n == 0:
        return np.ones(n), np.zeros(n, dtype=bool)
    if correction == "geometric_mask":
        mean = bounded_exp(log_rho.mean())
        kept = bool(low <= mean <= high)
        return np.full(n, float(kept)), np.full(n, not kept)
    rho = bounded_exp(log_rho if level == "token" else np.full(n, log_rho.sum()))
    if correction == "tis":
        return np.minimum(rho, high), rho > high
    dropped = rho > high
    if correction == "icepop":
        dropped = dropped | (rho < low)
    return np.where(dropped, 0.0, rho), dropped


def is_off_policy(delta: float | None, advantage: float, new: Array, old: Array) -> bool:
    """Whether the off-policy mask leaves the sequence out."""
    if delta is None or len(new) == 0:
        return False
    return bool(advantage < 0 and (old - new).mean() > delta)
