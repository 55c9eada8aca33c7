"""Functions that several formulas share."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

Array = NDArray[np.float64]

#: Differences of log-probs are clamped to ± this before they are exponentiated, so that one extreme
#: token cannot overflow a step. verl bounds its ratios the same way. A clamped value is a constant,
#: so its derivative is 0.
LOG_RATIO_LIMIT = 20.0


def bounded_exp(log_ratio: ArrayLike) -> Array:
    """``exp`` of a log-ratio clamped to ±20."""
    return np.exp(np.clip(np.asarray(log_ratio, dtype=float), -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT))


def bounded_exp_slope(log_ratio: ArrayLike) -> Array:
    """Derivative of :func:`bounded_exp`: itself, or 0 beyond the bound."""
    inside = np.abs(np.asarray(log_ratio, dtype=float)) <= LOG_RATIO_LIMIT
    return np.where(inside, bounded_exp(log_ratio), 0.0)


def sigmoid(x: ArrayLike) -> Array:
    """The logistic function."""
    return 1.0 / (1.0 + np.exp(-np.asarray(x, dtype=float)))


def softmax(logits: ArrayLike) -> Array:
    """Softmax over the last axis."""
    logits = np.asarray(logits, dtype=float)
    weights = np.exp(logits - logits.max(axis=-1, keepdims=True))
    return weights / weights.sum(axis=-1, keepdims=True)


def numerical_gradient(function, at: Array, step: float = 1e-6) -> Array:
    """Central differences of a scalar function, entry by entry."""
    gradient = np.zeros_like(at)
    for place in np.ndindex(at.shape):
        above, below = at.copy(), at.copy()
        above[place] += step
        below[place] -= step
        gradient[place] = (function(above) - function(below)) / (2 * step)
    return gradient
