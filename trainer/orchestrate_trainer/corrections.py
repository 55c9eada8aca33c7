"""Constant weights on the loss that correct the mismatch of inference engine and trainer.

Loss tokens of several sequences lie in one row of ``n``; :class:`Tokens` says which sequence each
belongs to.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

__all__ = ["LOG_RATIO_LIMIT", "Tokens", "bounded_ratio", "correction", "off_policy_keep"]


#: Log-ratios are clamped to ± this before they are exponentiated.
LOG_RATIO_LIMIT = 20.0


def bounded_ratio(log_ratio: Tensor) -> Tensor:
    """``exp`` of log-ratios clamped to ±20; without gradient where they are clamped."""
    return log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()


@dataclass(frozen=True)
class Tokens:
    """Which sequence each of ``n`` loss tokens belongs to."""

    #: Number of the token's sequence, int64 ``[n]``.
    sequence: Tensor
    #: Number of sequences S, including those without loss tokens.
    sequences: int

    @cached_property
    def counts(self) -> Tensor:
        """Loss tokens per sequence, int64 ``[S]``."""
        # Unlike bincount, this does not make the host wait for the device.
        zeros = self.sequence.new_zeros(self.sequences)
        return zeros.index_add(0, self.sequence, torch.ones_like(self.sequence))

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
    """Weights ``[n]``, and which of them the correction truncated or masked, bool ``[n]``.

    They come from ``ρ = exp(old − rollout)``, trainer over engine at the weights of the rollout.
    ``tis`` caps ρ at ``high``; ``mis`` masks what is above ``high``, ``icepop`` what is outside
    ``low`` to ``high``. ``level`` is ``token``, or ``sequence`` for the product of ρ over a
    sequence. ``geometric_mask`` keeps a sequence with weight 1 if its geometric mean of ρ is
    within the bounds.
    """
    log_ratio = (old - rollout).detach()
    if how == "none":
        return torch.ones_like(log_ratio), torch.zeros_like(log_ratio, dtype=torch.bool)
    if how == "geometric_mask":
        mean = bounded_ratio(tokens.means(log_ratio))[tokens.sequence]
        kept = (mean >= low) & (mean <= high)
        return kept.to(log_ratio.dtype), ~kept
    if level == "sequence":
        log_ratio = tokens.sums(log_ratio)[tokens.sequence]
    ratio = bounded_ratio(log_ratio)
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
    """1 or 0 per token ``[n]``: 0 in sequences that the off-policy mask leaves out, those with a
    negative ``advantage`` ``[S]`` and a mean ``old − logp`` above ``delta``."""
    drift = tokens.means((old - logp).detach())
    dropped = (advantage < 0) & (drift > delta)
    return (~dropped)[tokens.sequence].to(logp.dtype)
