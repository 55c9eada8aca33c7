"""Advantages from rewards.

The orchestrator computes the advantages of a batch. Those of a value head (``ppo``) are computed
here, because they depend on the trainer's weights.
"""

from __future__ import annotations

import torch
from torch import Tensor

#: Rewards of a group that differ by no more than this are equal: the rest is rounding.
EQUAL_REWARDS = 1e-6

__all__ = ["gae", "group_advantages", "overlong_penalty", "value_terms"]


def group_advantages(rewards: Tensor, norm: str, eps: float = 1e-6) -> Tensor:
    """Advantages ``[G]`` of one group from its rewards ``[G]``.

    ``norm`` is ``std`` (unbiased), ``population``, ``none`` (mean only, Dr. GRPO) or ``rloo``. A
    group whose rewards are all equal up to rounding, or a group of one, gets zeros.
    """
    centred = rewards - rewards.mean()
    if len(rewards) < 2 or bool(rewards.max() - rewards.min() <= EQUAL_REWARDS):
        return torch.zeros_like(centred)
    if norm == "std":
        return centred / (rewards.std() + eps)
    if norm == "population":
        return centred / (rewards.std(correction=0) + eps)
    if norm == "rloo":
        return centred * len(rewards) / (len(rewards) - 1)
    if norm == "none":
        return centred
    raise ValueError(f"unknown norm {norm!r}: must be std, population, rloo or none")


def overlong_penalty(lengths: Tensor, max_length: int, cache: int) -> Tensor:
    """DAPO's soft overlong penalty ``[G]``, to be added to the rewards.

    It is 0 up to ``max_length - cache`` tokens, falls linearly to -1 at ``max_length``, and stays
    -1 beyond.
    """
    return ((max_length - cache - lengths) / cache).clamp(-1.0, 0.0)


def gae(
    rewards: Tensor, values: Tensor, mask: Tensor, gamma: float, lam: float
) -> tuple[Tensor, Tensor]:
    """Generalised advantages and returns, ``[B, T]`` each.

    Only tokens with ``mask > 0`` count; the recursion skips the others, and they get 0.
    """
    advantages = torch.zeros_like(values)
    next_value = values.new_zeros(len(values))
    next_advantage = values.new_zeros(len(values))
    for t in reversed(range(values.shape[1])):
        live = mask[:, t] > 0
        delta = rewards[:, t] + gamma * next_value - values[:, t]
        advantage = delta + gamma * lam * next_advantage
        next_value = torch.where(live, values[:, t], next_value)
        next_advantage = torch.where(live, advantage, next_advantage)
        advantages[:, t] = torch.where(live, advantage, 0.0)
    return advantages, (advantages + values) * (mask > 0)


def value_terms(values: Tensor, old: Tensor, returns: Tensor, clip: float) -> Tensor:
    """Value loss of each token: half the larger of the plain and the clipped squared error.

    ``values`` are the value head's outputs, ``old`` those at the rollout weights; the clip keeps
    ``values`` within ``clip`` of ``old``.
    """
    clipped = torch.clamp(values, old - clip, old + clip)
    return 0.5 * torch.maximum((values - returns) ** 2, (clipped - returns) ** 2)
