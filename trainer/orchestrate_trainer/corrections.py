"""Loss tokens in one row, and constant weights on their loss against the mismatch of engines."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

__all__ = ["LOG_RATIO_LIMIT", "Tokens", "correction", "off_policy_keep"]


#: Differences of log-probs are clamped to this before they are exponentiated.
LOG_RATIO_LIMIT = 20.0


@dataclass(frozen=True)
class Tokens:
    """Whose the ``n`` loss tokens of ``sequences`` sequences are."""

    #: Number of its sequence, int64 ``[n]``.
    sequence: Tensor
    sequences: int

    @cached_property
    def counts(self) -> Tensor:
        """Loss tokens per sequence, int64 ``[S]``."""
        return torch.bincount(self.sequence, minlength=self.sequences)

    @cached_property
    def present(self) -> Tensor:
        """Whether a sequence has loss tokens, bool ``[S]``."""
        return self.counts > 0

    def sums(self, values: Tensor) -> Tensor:
        """Sum of ``values`` ``[n]`` per sequence, ``[S]``."""
        return values.new_zeros(self.sequences).index_add(0, self.sequence, values)

    def means(self, values: Tensor) -> Tensor:
        """Mean of ``values`` ``[n]`` per sequence, ``[S]``; 0 for a sequence without tokens."""
        return self.sums(values) / self.counts.clamp(min=1)


def correction(
    old: Tensor, rollout: Tensor, tokens: Tokens, how: str, level: str, low: float, high: float
) -> tuple[Tensor, Tensor]:
    """Weights ``[n]`` from ``ρ = exp(old − rollout)``, trainer over sampler at the weights of the
    rollout: ``tis`` caps, ``mis`` and ``icepop`` drop what lies outside, at ``level`` ``token`` or
    ``sequence`` (the product over its tokens); ``geometric_mask`` keeps or drops sequences by
    their geometric mean. Also tells which weights are not ρ (the mask: which are 0), bool ``[n]``.
    """
    log_ratio = (old - rollout).detach()
    if how == "none":
        return torch.ones_like(log_ratio), torch.zeros_like(log_ratio, dtype=torch.bool)
    if how == "geometric_mask":
        mean = tokens.means(log_ratio).exp()[tokens.sequence]
        kept = (mean >= low) & (mean <= high)
        return kept.to(log_ratio.dtype), ~kept
    if level == "sequence":
        log_ratio = tokens.sums(log_ratio)[tokens.sequence]
    ratio = log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()
    over, under = ratio > high, ratio < low
    if how == "tis":
        return ratio.clamp(max=high), over
    if how == "mis":
        return torch.where(over, 0.0, ratio), over
    if how == "icepop":
        return torch.where(over | under, 0.0, ratio), over | under
    raise ValueError(f"unknown importance correction {how!r}")


def off_policy_keep(
    logp: Tensor, old: Tensor, tokens: Tokens, advantage: Tensor, delta: float
) -> Tensor:
    """1 or 0 per token ``[n]``: sequences with a negative ``advantage`` ``[S]`` whose mean
    ``old − logp`` exceeds ``delta`` are left out."""
    drift = tokens.means((old - logp).detach())
    dropped = (advantage < 0) & (drift > delta)
    return (~dropped)[tokens.sequence].to(logp.dtype)
