"""Policy losses, to be minimised: one term per loss token of a sequence.

Notation: ``r = pi / pi_old`` of a token, A its advantage, n the loss tokens of the sequence, and
``sg[.]`` a constant with respect to the parameters (stop-gradient).

Every loss is written as token terms ``l_t`` whose mean over the sequence is the loss of the
sequence, and each ``l_t`` depends only on its own ``log pi(y_t)``; everything else is under ``sg``.
A constant weight on a token (corrections.py) therefore scales both its loss and its gradient. For
sequence-level losses this is the token form that the GSPO paper gives for weights and advantages of
single tokens, eq (13) and (14); without such weights its value and its gradient are those of the
sequence form (selfcheck.py).

``held`` is the log-probs where they are under ``sg``. It equals ``new``; it is a separate argument
only so that finite differences can keep it fixed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from basics import Array, bounded_exp, bounded_exp_slope, sigmoid

POLICY_LOSSES = ("grpo", "gspo", "gmpo", "rspo", "cispo", "minirl", "sapo", "ppo")
PER_SEQUENCE = ("gspo", "gmpo", "rspo")


@dataclass(frozen=True)
class Tokens:
    """Loss tokens of one sequence, ``[n]`` each: log-probs under the updated policy, under the
    trainer and the inference engine at the weights of the rollout, advantages, and the
    router-shift weight."""

    new: Array
    old: Array
    sampler: Array
    advantage: Array
    gamma: Array


@dataclass(frozen=True)
class Terms:
    """Loss of each token, its derivative with respect to the token's log-prob, and which tokens are
    clipped from below and from above."""

    loss: Array
    slope: Array
    low: Array
    high: Array


def terms(settings: dict[str, Any], tokens: Tokens, held: Array | None = None) -> Terms:
    """Terms of one sequence under the protocol's hyperparameters."""
    held = tokens.new if held is None else held
    function = {
        "grpo": clipped_surrogate,
        "ppo": clipped_surrogate,
        "gspo": gspo,
        "gmpo": geometric_mean,
        "rspo": geometric_mean,
        "cispo": cispo,
        "minirl": minirl,
        "sapo": sapo,
    }[settings["policy_loss"]]
    return function(settings, tokens, held)


def _surrogate(settings: dict[str, Any], log_ratio: Array, advantage: Array) -> Terms:
    low, high = settings["clip_low"], settings["clip_high"]
    ratio = bounded_exp(log_ratio)
    free, clipped = -advantage * ratio, -advantage * np.clip(ratio, 1 - low, 1 + high)
    above = (advantage > 0) & (ratio > 1 + high)
    below = (advantage < 0) & (ratio < 1 - low)
    slope = np.where(above | below, 0.0, -advantage * bounded_exp_slope(log_ratio))
    return Terms(np.maximum(free, clipped), slope, below, above)


def _shift(settings: dict[str, Any], tokens: Tokens, where: str) -> Array:
    on = settings["router_shift"] == where
    return np.log(tokens.gamma) if on else np.zeros_like(tokens.gamma)


def clipped_surrogate(settings: dict[str, Any], tokens: Tokens, held: Array) -> Terms:
    """PPO, arXiv 1707.06347, eq (7), and GRPO, arXiv 2402.03300, eq (3):
    ``max(-A r, -A clip(r, 1 - low, 1 + high))``; Clip-Higher is DAPO, arXiv 2503.14476, eq (10).

    Dual clip (Ye et al. 2019, arXiv 1912.09729) bounds the loss at ``-A c`` for A < 0. With router
    shift (RSPO, arXiv 2510.23027, eq (11)) the ratio is ``r sg[gamma]``.
    """
    found = _surrogate(
        settings, tokens.new - tokens.old + _shift(settings, tokens, "before_clip"),
        tokens.advantage,
    )
    bound = settings["dual_clip"]
    if bound is None:
        return found
    most = -tokens.advantage * bound
    beyond = (tokens.advantage < 0) & (found.loss > most)
    return Terms(
        np.where(beyond, most, found.loss), np.where(beyond, 0.0, found.slope), found.low,
        found.high,
    )


def gspo(settings: dict[str, Any], tokens: Tokens, held: Array) -> Terms:
    """GSPO, arXiv 2507.18071: the surrogate of ``s = exp(mean log r)``, eq (5) and (7), in the
    token form of eq (14), ``s_t = sg[s] pi(y_t) / sg[pi(y_t)]``."""
    shift = _shift(settings, tokens, "before_clip")
    mean = (held - tokens.old + shift).mean() if len(held) else 0.0
    return _surrogate(settings, mean + (tokens.new - held), tokens.advantage)


def geometric_mean(settings: dict[str, Any], tokens: Tokens, held: Array) -> Terms:
    """GMPO, arXiv 2507.20673: ``-A exp(mean k)`` with ``k = log r`` clipped token by token to
    ``[-low, high]`` on the side that the advantage would reward.

    RSPO, arXiv 2510.23027, adds ``log sg[gamma]`` to ``k``: before the clip, eq (11), or after it
    (its first version). Clipped tokens have no gradient of their own but still scale the mean.
    """
    low, high = settings["clip_low"], settings["clip_high"]
    shift = _shift(settings, tokens, "before_clip")
    log_ratio = tokens.new - tokens.old + shift
    above = (tokens.advantage > 0) & (log_ratio > high)
    below = (tokens.advantage < 0) & (log_ratio < -low)

    def k(new: Array) -> Array:
        inside = np.where(above, high, np.where(below, -low, new - tokens.old + shift))
        return inside + _shift(settings, tokens, "after_clip")

    mean = k(held).mean() if len(held) else 0.0
    log_mean = mean + (k(tokens.new) - k(held))
    slope = np.where(above | below, 0.0, -tokens.advantage * bounded_exp_slope(log_mean))
    return Terms(-tokens.advantage * bounded_exp(log_mean), slope, below, above)


def cispo(settings: dict[str, Any], tokens: Tokens, held: Array) -> Terms:
    """CISPO, arXiv 2506.13585, eq (4) and (5): ``-sg[clip(r, 1 - low, 1 + high)] A log pi``. The
    clip bounds the weight; no token loses its gradient."""
    low, high = settings["clip_low"], settings["clip_high"]
    ratio = bounded_exp(held - tokens.old)
    slope = -np.clip(ratio, 1 - low, 1 + high) * tokens.advantage
    return Terms(slope * tokens.new, slope, ratio < 1 - low, ratio > 1 + high)


def minirl(settings: dict[str, Any], tokens: Tokens, held: Array) -> Terms:
    """MiniRL, arXiv 2512.01374: ``-M sg[min(pi / pi_engine, cap)] A log pi``, where M = 0 for the
    tokens that PPO would clip. The cap on the ratio is ``importance_high``."""
    low, high = settings["clip_low"], settings["clip_high"]
    ratio = bounded_exp(held - tokens.old)
    above = (tokens.advantage > 0) & (ratio > 1 + high)
    below = (tokens.advantage < 0) & (ratio < 1 - low)
    weight = np.minimum(bounded_exp(held - tokens.sampler), settings["importance_high"])
    slope = np.where(above | below, 0.0, -weight * tokens.advantage)
    return Terms(slope * tokens.new, slope, below, above)


def sapo(settings: dict[str, Any], tokens: Tokens, held: Array) -> Terms:
    """SAPO, arXiv 2511.20347: ``-A (4 / tau) sigmoid(tau (r - 1))``, of slope 1 at r = 1, with one
    ``tau`` for positive advantages and one for the others."""
    positive, other = settings["sapo_tau"]
    tau = np.where(tokens.advantage > 0, positive, other)
    log_ratio = tokens.new - tokens.old
    gate = sigmoid(tau * (bounded_exp(log_ratio) - 1))
    slope = -tokens.advantage * 4 * gate * (1 - gate) * bounded_exp_slope(log_ratio)
    never = np.zeros(len(tokens.new), dtype=bool)
    return Terms(-tokens.advantage * 4 / tau * gate, slope, never, never)
