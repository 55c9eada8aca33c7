"""Policy losses, as functions of the log-probs of loss tokens. Minimise them.

All tokens of all sequences of a micro-batch are in one row of length ``n``; ``Tokens`` says which
sequence each belongs to. Denominators come from :class:`Totals`, the size of the whole optimizer
step, so neither micro-batches nor ranks change the objective.

Every loss is a row of token terms. The losses of a whole sequence (GSPO, GMPO, RSPO) give each
token the sequence's loss and the gradient of the token's own term, so a weight on a token scales
both its loss and its gradient. Without weights on single tokens the gradient is that of the
sequence's loss.

The formulas with their sources, and the golden vectors that these functions are tested against,
are in ``tests/reference`` of the repository.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .corrections import LOG_RATIO_LIMIT, Tokens, bounded_ratio

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

#: Largest value of a token's k3 term, as in verl's and slime's ``low_var_kl``. Without it one token
#: whose probability collapsed decides the direction of a whole step.
K3_LIMIT = 10.0


@dataclass(frozen=True)
class Totals:
    """Size of the whole optimizer step, over all ranks."""

    sequences: int
    loss_tokens: int
    #: Constant of ``token-sum-norm``, in tokens.
    norm_tokens: float = 1.0


@dataclass(frozen=True)
class Loss:
    """Terms of a loss before weights and sums, ``[n]``, and which tokens are clipped from above
    and from below, bool ``[n]``."""

    terms: Tensor
    clipped_high: Tensor
    clipped_low: Tensor


def aggregate(terms: Tensor, tokens: Tokens, totals: Totals, mode: str) -> Tensor:
    """The micro-batch's summand of the step's loss: ``terms`` ``[n]`` summed as ``mode`` says."""
    if mode == "token-mean":
        return terms.sum() / max(totals.loss_tokens, 1)
    if mode == "token-sum-norm":
        return terms.sum() / (max(totals.sequences, 1) * totals.norm_tokens)
    if mode == "seq-mean-token-sum":
        return terms.sum() / max(totals.sequences, 1)
    if mode == "seq-mean-token-mean":
        return tokens.means(terms).sum() / max(totals.sequences, 1)
    raise ValueError(f"unknown aggregation {mode!r}")


def _token_form(values: Tensor, tokens: Tokens) -> Tensor:
    """The mean of ``values`` ``[n]`` over each sequence on every token of it, ``[n]``, with the
    gradient of the token's own value instead of that of the mean."""
    mean = tokens.means(values.detach())[tokens.sequence]
    return mean + (values - values.detach())


def surrogate(
    log_ratio: Tensor, advantage: Tensor, low: float, high: float, dual: float | None = None
) -> Loss:
    """Clipped surrogate of each token (PPO, GRPO, DAPO, Dr. GRPO); ``dual`` bounds the loss of
    negative advantages at ``-dual · advantage``."""
    ratio = bounded_ratio(log_ratio)
    terms = torch.maximum(-advantage * ratio, -advantage * ratio.clamp(1 - low, 1 + high))
    over = (advantage > 0) & (ratio > 1 + high)
    under = (advantage < 0) & (ratio < 1 - low)
    if dual is not None:
        bounded = torch.minimum(terms, -advantage * dual)
        terms = torch.where(advantage < 0, bounded, terms)
    return Loss(terms, over, under)


def sequence_surrogate(
    log_ratio: Tensor, tokens: Tokens, advantage: Tensor, low: float, high: float
) -> Loss:
    """Clipped surrogate of each sequence's geometric mean ratio (GSPO), in its token form
    ``sg[s] π(y_t) / sg[π(y_t)]``; ``advantage`` is ``[S]``."""
    return surrogate(_token_form(log_ratio, tokens), advantage[tokens.sequence], low, high)


def geometric_mean(
    log_ratio: Tensor,
    tokens: Tokens,
    advantage: Tensor,
    low: float,
    high: float,
    log_shift: Tensor | None = None,
) -> Loss:
    """Geometric mean of ratios that are clipped token by token to ``[e^-low, e^high]`` (GMPO). The
    first version of RSPO adds ``log_shift`` ``[n]`` after the clip. ``advantage`` is ``[S]``."""
    each = advantage[tokens.sequence]
    over = (each > 0) & (log_ratio > high)
    under = (each < 0) & (log_ratio < -low)
    held = torch.where(over | under, log_ratio.clamp(-low, high), log_ratio)
    if log_shift is not None:
        held = held + log_shift
    return Loss(-each * bounded_ratio(_token_form(held, tokens)), over, under)


def cispo(logp: Tensor, old: Tensor, advantage: Tensor, low: float, high: float) -> Loss:
    """Log-prob times the clipped ratio, which is a constant: no token loses its gradient."""
    ratio = bounded_ratio(logp.detach() - old)
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
    """Log-prob times the capped ratio to the engine, which is a constant; tokens whose
    ratio to ``old`` is clipped are left out."""
    ratio = bounded_ratio(logp.detach() - old)
    over = (advantage > 0) & (ratio > 1 + high)
    under = (advantage < 0) & (ratio < 1 - low)
    weight = bounded_ratio(logp.detach() - rollout).clamp(max=cap)
    terms = -torch.where(over | under, 0.0, weight) * advantage * logp
    return Loss(terms, over, under)


def sapo(log_ratio: Tensor, advantage: Tensor, tau_positive: float, tau_other: float) -> Loss:
    """A sigmoid of the ratio, of slope 1 at ratio 1, in place of a clip."""
    tau = torch.full_like(log_ratio, tau_other).masked_fill(advantage > 0, tau_positive)
    gate = torch.sigmoid(tau * (bounded_ratio(log_ratio) - 1)) * 4 / tau
    never = torch.zeros_like(advantage, dtype=torch.bool)
    return Loss(-gate * advantage, never, never)


def router_shift(log_new: Tensor, log_old: Tensor, floor: float) -> tuple[Tensor, Tensor]:
    """RSPO's ``log γ`` and γ before the floor, ``[n]`` each, constants. The arguments are the
    routers' log-probs ``[n, L, K]`` of the experts that were executed at the old weights."""
    with torch.no_grad():
        raw = torch.exp(-(log_new - log_old).abs().mean(-1).mean(-1))
        return raw.clamp(min=floor).log(), raw


def kl_penalty(
    logp: Tensor, reference: Tensor, estimator: str, log_ratio: Tensor | None = None
) -> Tensor:
    """Divergence from a reference policy on each token, nats, ``[n]``.

    ``k = logp − reference`` is clamped to ±20, and the value of k3 is capped at 10; there is no
    gradient where a bound applies, but ``k3_plus`` always has that of k2. With ``log_ratio``
    the estimate is multiplied by the ratio and the gradient goes through both; the cap then applies
    to the product.
    """
    k = (logp - reference).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    if estimator == "k1":
        return k
    if estimator == "k2":
        return k * k / 2
    value = (-k).exp() - 1 + k
    if estimator == "k3_plus":
        square = k * k / 2
        return value.detach().clamp(max=K3_LIMIT) + (square - square.detach())
    if estimator != "k3":
        raise ValueError(f"unknown estimator {estimator!r}")
    if log_ratio is not None:
        value = value * bounded_ratio(log_ratio)
    return value.clamp(max=K3_LIMIT)
