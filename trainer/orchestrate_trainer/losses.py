"""Policy losses, as functions of the log-probs of loss tokens. Minimise them.

All tokens of all sequences at hand lie in one row of ``n``; ``sequence`` says whose each is.
Denominators come from :class:`Totals`, the size of the whole optimizer step, so that neither
micro-batches nor ranks change the objective.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .corrections import LOG_RATIO_LIMIT, Tokens

__all__ = [
    "Loss",
    "Totals",
    "aggregate",
    "cispo",
    "geometric_mean",
    "kl_penalty",
    "minirl",
    "router_shift",
    "sapo",
    "sequence_surrogate",
    "surrogate",
]

@dataclass(frozen=True)
class Totals:
    """Size of the whole optimizer step, over all ranks."""

    sequences: int
    loss_tokens: int
    #: Constant of ``token-sum-norm``, in tokens.
    norm_tokens: float = 1.0


@dataclass(frozen=True)
class Loss:
    """Terms of a loss, before weights and sums: one per token ``[n]`` or one per sequence ``[S]``,
    and which tokens were held back from above and from below, bool ``[n]``."""

    terms: Tensor
    clipped_high: Tensor
    clipped_low: Tensor
    per_sequence: bool = False


def aggregate(terms: Tensor, tokens: Tokens, totals: Totals, mode: str) -> Tensor:
    """This share of the step's loss: token terms ``[n]`` summed with the weights of ``mode``."""
    if mode == "token-mean":
        return terms.sum() / max(totals.loss_tokens, 1)
    if mode == "token-sum-norm":
        return terms.sum() / (max(totals.sequences, 1) * totals.norm_tokens)
    if mode == "seq-mean-token-sum":
        return terms.sum() / max(totals.sequences, 1)
    if mode == "seq-mean-token-mean":
        return tokens.means(terms).sum() / max(totals.sequences, 1)
    raise ValueError(f"unknown aggregation {mode!r}")


def _ratio(log_ratio: Tensor) -> Tensor:
    return log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()


def _surrogate(
    log_ratio: Tensor, advantage: Tensor, low: float, high: float
) -> tuple[Tensor, Tensor, Tensor]:
    ratio = _ratio(log_ratio)
    terms = torch.maximum(-advantage * ratio, -advantage * ratio.clamp(1 - low, 1 + high))
    over = (advantage > 0) & (ratio > 1 + high)
    under = (advantage < 0) & (ratio < 1 - low)
    return terms, over, under


def surrogate(
    log_ratio: Tensor, advantage: Tensor, low: float, high: float, dual: float | None = None
) -> Loss:
    """Clipped surrogate of each token (PPO, GRPO, DAPO, Dr.GRPO); ``dual`` bounds the loss of
    negative advantages at ``-dual · advantage``."""
    terms, over, under = _surrogate(log_ratio, advantage, low, high)
    if dual is not None:
        bounded = torch.minimum(terms, -advantage * dual)
        terms = torch.where(advantage < 0, bounded, terms)
    return Loss(terms, over, under)


def sequence_surrogate(
    log_ratio: Tensor, tokens: Tokens, advantage: Tensor, low: float, high: float
) -> Loss:
    """Clipped surrogate of each sequence's geometric mean ratio (GSPO); ``advantage`` is ``[S]``."""
    terms, over, under = _surrogate(tokens.means(log_ratio), advantage, low, high)
    each = tokens.sequence
    return Loss(terms * tokens.present, over[each], under[each], per_sequence=True)


def geometric_mean(
    log_ratio: Tensor,
    tokens: Tokens,
    advantage: Tensor,
    low: float,
    high: float,
    log_shift: Tensor | None = None,
) -> Loss:
    """Geometric mean of ratios clipped one by one to ``[e^-low, e^high]`` (GMPO); RSPO's first form
    adds ``log_shift`` ``[n]`` to them after the clip. ``advantage`` is ``[S]``."""
    each = advantage[tokens.sequence]
    over = (each > 0) & (log_ratio > high)
    under = (each < 0) & (log_ratio < -low)
    held = torch.where(over | under, log_ratio.clamp(-low, high), log_ratio)
    if log_shift is not None:
        held = held + log_shift
    terms = -advantage * _ratio(tokens.means(held)) * tokens.present
    return Loss(terms, over, under, per_sequence=True)


def cispo(logp: Tensor, old: Tensor, advantage: Tensor, low: float, high: float) -> Loss:
    """Log-prob times a ratio that is clipped and then a constant: no token loses its gradient."""
    ratio = _ratio(logp.detach() - old)
    terms = -ratio.clamp(1 - low, 1 + high) * advantage * logp
    return Loss(terms, ratio > 1 + high, ratio < 1 - low)


def minirl(
    logp: Tensor,
    old: Tensor,
    rollout: Tensor,
    advantage: Tensor,
    low: float,
    high: float,
    cap: float,
) -> Loss:
    """Log-prob times the capped ratio to the sampler, a constant; tokens beyond the clip of the
    ratio to ``old`` are left out."""
    ratio = _ratio(logp.detach() - old)
    over = (advantage > 0) & (ratio > 1 + high)
    under = (advantage < 0) & (ratio < 1 - low)
    weight = _ratio(logp.detach() - rollout).clamp(max=cap)
    terms = -torch.where(over | under, 0.0, weight) * advantage * logp
    return Loss(terms, over, under)


def sapo(log_ratio: Tensor, advantage: Tensor, tau_positive: float, tau_other: float) -> Loss:
    """A sigmoid of the ratio with slope 1 at ratio 1 in the place of the clip."""
    tau = torch.full_like(log_ratio, tau_other).masked_fill(advantage > 0, tau_positive)
    gate = torch.sigmoid(tau * (_ratio(log_ratio) - 1)) * 4 / tau
    never = torch.zeros_like(advantage, dtype=torch.bool)
    return Loss(-gate * advantage, never, never)


def router_shift(log_new: Tensor, log_old: Tensor, floor: float) -> tuple[Tensor, Tensor]:
    """RSPO's ``(log γ, γ before the floor)``, ``[n]``, constants, from the routers' log-probs
    ``[n, L, K]`` of the experts that were executed at the old weights."""
    with torch.no_grad():
        raw = torch.exp(-(log_new - log_old).abs().mean(-1).mean(-1))
        return raw.clamp(min=floor).log(), raw


def kl_penalty(
    logp: Tensor, reference: Tensor, estimator: str, log_ratio: Tensor | None = None
) -> Tensor:
    """Divergence from a reference policy on each token, ``[n]``; with ``log_ratio`` multiplied by
    the ratio, the gradient going through both."""
    k = (logp - reference).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    if estimator == "k1":
        value = k
    elif estimator == "k2":
        value = k * k / 2
    else:
        value = (-k).exp() - 1 + k
        if estimator == "k3_plus":
            square = k * k / 2
            value = value.detach() + square - square.detach()
        elif estimator != "k3":
            raise ValueError(f"unknown estimator {estimator!r}")
    return value if log_ratio is None else value * _ratio(log_ratio)
