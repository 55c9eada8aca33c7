"""From rewards to advantages. The orchestrator computes those of a batch; those of a value head
are computed here."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["gae", "group_advantages", "overlong_penalty", "value_terms"]


def group_advantages(rewards: Tensor, norm: str, eps: float = 1e-6) -> Tensor:
    """Advantages ``[G]`` of one group: ``std`` (unbiased), ``population``, ``none`` (mean only,
    Dr.GRPO) or ``rloo``. A group whose rewards are equal, or a group of one, gets zeros."""
    centred = rewards - rewards.mean()
    if len(rewards) < 2 or bool((rewards == rewards[0]).all()):
        return torch.zeros_like(centred)
    if norm == "std":
        return centred / (rewards.std() + eps)
    if norm == "population":
        return centred / (rewards.std(correction=0) + eps)
    if norm == "rloo":
        return centred * len(rewards) / (len(rewards) - 1)
    if norm == "none":
        return centred
    raise ValueError(f"unknown norm {norm!r}")


def overlong_penalty(lengths: Tensor, max_length: int, cache: int) -> Tensor:
    """DAPO's soft punishment, ``[G]``, added to rewards: 0 up to ``max_length - cache``, falling
    to -1 at ``max_length``, -1 beyond."""
    return ((max_length - cache - lengths) / cache).clamp(-1.0, 0.0)


def gae(
    rewards: Tensor, values: Tensor, mask: Tensor, gamma: float, lam: float
) -> tuple[Tensor, Tensor]:
    """Advantages and returns ``[B, T]`` over loss tokens; others are passed over, whatever their
    values are, and get 0."""
    advantages = torch.zeros_like(values)
    later_value = values.new_zeros(len(values))
    later = values.new_zeros(len(values))
    for t in reversed(range(values.shape[1])):
        live = mask[:, t] > 0
        delta = rewards[:, t] + gamma * later_value - values[:, t]
        here = delta + gamma * lam * later
        later_value = torch.where(live, values[:, t], later_value)
        later = torch.where(live, here, later)
        advantages[:, t] = torch.where(live, here, 0.0)
    return advantages, (advantages + values) * (mask > 0)


def value_terms(values: Tensor, old: Tensor, returns: Tensor, clip: float) -> Tensor:
    """Half the larger of the plain and the clipped squared error of each token; minimise it."""
    clipped = torch.clamp(values, old - clip, old + clip)
    return 0.5 * torch.maximum((values - returns) ** 2, (clipped - returns) ** 2)
