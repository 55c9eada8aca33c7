"""Router shift: how far the routers have moved since the rollout, as a weight per token.

RSPO, arXiv 2510.23027, eq (5) to (9), over L layers and the K experts that were executed at the
old weights:

    gamma = exp(-1/L sum_l 1/K sum_k | log p_new(e_k) - log p_old(e_k) |)

and the ratio of the token is multiplied by ``sg[max(gamma, floor)]`` (policy_losses.py).
Probabilities are those of the full router distribution, at least 1e-8 each. The weight of token p's
log-prob comes from routing row p - 1, which belongs to the input that predicted it.
"""

from __future__ import annotations

import numpy as np

from basics import Array
from routers import Router

LEAST_PROBABILITY = 1e-8


def gamma(spec: Router, old: Array, new: Array, executed: list[list[int]]) -> float:
    """Weight of one token from its old and new logits ``[L, E]``, before the floor is applied."""
    shifts = []
    for before, after, experts in zip(old, new, executed):
        p, q = spec.distribution(before), spec.distribution(after)
        logs = [np.log(np.maximum(each[experts], LEAST_PROBABILITY)) for each in (p, q)]
        shifts.append(np.abs(logs[1] - logs[0]).mean())
    return float(np.exp(-np.mean(shifts)))
