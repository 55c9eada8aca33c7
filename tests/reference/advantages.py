"""Advantages from the rewards of a group, and the soft penalty for overlong responses.

* GRPO: Shao et al. 2024, arXiv 2402.03300, eq (3): ``(R_i - mean R) / std R``. The paper does not
  say which standard deviation; ``std`` divides by G - 1, ``population_std`` by G. Both add 1e-6 to
  the denominator, as verl and slime do.
* Dr. GRPO: Liu et al. 2025, arXiv 2503.20783: ``R_i - mean R`` (``none``).
* RLOO: Ahmadian et al. 2024, arXiv 2402.14740: the reward minus the mean of the *other* rewards.
* DAPO: Yu et al. 2025, arXiv 2503.14476: dynamic sampling, eq (11), drops a group whose
  rewards are all equal; the overlong penalty is eq (13). Rewards that differ by rounding are equal.
"""

from __future__ import annotations

import numpy as np

from basics import Array

#: Added to the standard deviation.
EPSILON = 1e-6
#: Rewards that differ by no more than this are equal.
EQUAL_REWARDS = 1e-6
NORMALISATIONS = ("std", "population_std", "none", "rloo")


def group_advantages(rewards: Array, normalisation: str) -> Array:
    """Advantages of one group of at least two responses; zeros where all rewards are equal."""
    if not has_signal(rewards):
        return np.zeros_like(rewards)
    if normalisation == "rloo":
        others = [np.delete(rewards, i).mean() for i in range(len(rewards))]
        return rewards - np.array(others)
    centred = rewards - rewards.mean()
    if normalisation == "none":
        return centred
    freedom = {"std": 1, "population_std": 0}[normalisation]
    return centred / (rewards.std(ddof=freedom) + EPSILON)


def has_signal(rewards: Array) -> bool:
    """Whether dynamic sampling keeps the group."""
    return bool(rewards.max() - rewards.min() > EQUAL_REWARDS)


def overlong_penalty(length: int, max_length: int, cache: int) -> float:
    """Added to the reward of a response of ``length`` tokens, -1 to 0."""
    if length <= max_length - cache:
        return 0.0
    if length <= max_length:
        return ((max_length - cache) - length) / cache
    return -1.0
