"""PPO: advantages and returns from the values of a linear head on the final hidden states."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from .advantages import gae, value_terms
from .data import MicroBatch, on_device
from .losses import kl_penalty
from .settings import Hyperparameters
from .world import World

__all__ = ["Estimates", "Returns", "RolloutValues", "estimate", "values_of", "whiten"]


def values_of(hidden: Tensor, head: Tensor) -> Tensor:
    """Values of the state before each scored token, float32 ``[n]``.

    ``hidden`` ``[n, d]`` are the hidden states that the scored tokens are predicted from; ``head``
    ``[d + 1]`` has the bias last.
    """
    return hidden.float() @ head[:-1] + head[-1]


@dataclass(frozen=True)
class RolloutValues:
    """One micro-batch at the rollout weights; its tensors ``[n]`` are on the CPU."""

    micro: MicroBatch
    #: Outputs of the value head.
    values: Tensor
    #: Log-probs, nats.
    logp: Tensor
    #: Log-probs under the reference policy, nats.
    reference: Tensor | None = None


@dataclass(frozen=True)
class Returns:
    """Advantages and value targets of a micro-batch, ``[n]`` each."""

    advantages: Tensor
    #: Targets of the value head.
    returns: Tensor
    #: Outputs of the value head at the rollout weights.
    old: Tensor

    def to(self, device: torch.device) -> Returns:
        """The same with its tensors on ``device``."""
        return Returns(*(on_device(part, device) for part in vars(self).values()))

    def loss(self, values: Tensor, clip: float, loss_tokens: int) -> Tensor:
        """The micro-batch's part of the value loss of a mini step with ``loss_tokens`` tokens."""
        terms = value_terms(values, self.old, self.returns, clip)
        return terms.sum() / max(loss_tokens, 1)


@dataclass(frozen=True)
class Estimates:
    """Advantages and returns of a step."""

    #: For each of this process's micro-batches, in order.
    parts: list[Returns]
    #: Fraction of the returns' variance that the old values explain, over all processes.
    explained_variance: float


def estimate(olds: list[RolloutValues], settings: Hyperparameters, world: World) -> Estimates:
    """Generalised advantages of a batch, whitened over all its loss tokens, and returns."""
    parts = [_returns(old, settings) for old in olds]
    live = [part for part, old in zip(parts, olds, strict=True) if old.micro.live]
    advantages, returns, values = (
        torch.cat([getattr(part, name) for part in live] or [torch.zeros(0)]).double()
        for name in ("advantages", "returns", "old")
    )
    whitened = iter(whiten(advantages, world).split([len(part.old) for part in live]))
    finished = [
        Returns(
            (next(whitened) if old.micro.live else part.advantages).float(),
            part.returns.float(),
            part.old,
        )
        for part, old in zip(parts, olds, strict=True)
    ]
    total, residual = (_moments(of, world)[2] for of in (returns, returns - values))
    return Estimates(finished, 1 - residual / total if total > 0 else 0.0)


def whiten(advantages: Tensor, world: World) -> Tensor:
    """Shifts and scales advantages ``[n]`` to mean 0 and unbiased variance 1 over all processes.

    ``advantages`` are those of this process's loss tokens.
    """
    count, mean, squares = _moments(advantages, world)
    scale: float = (squares / max(count - 1, 1) + 1e-8) ** -0.5
    return (advantages - mean) * scale


def _returns(old: RolloutValues, settings: Hyperparameters) -> Returns:
    """Advantages before whitening, and returns, both float64."""
    micro = old.micro
    if not micro.live:
        zeros = torch.zeros(len(old.values), dtype=torch.float64)
        return Returns(zeros, zeros, old.values)
    scored = [sequence for sequence in micro.sequences if len(sequence.scored)]
    counts = [len(sequence.scored) for sequence in scored]
    rewards = torch.zeros(sum(counts), dtype=torch.float64)
    # A sequence's reward is given to its last loss token.
    last = torch.tensor(counts).cumsum(0) - 1
    rewards[last] = torch.tensor([sequence.reward for sequence in scored]).double()
    if settings.kl_in_reward and old.reference is not None:
        penalty = kl_penalty(old.logp.double(), old.reference.double(), "k1")
        rewards -= settings.kl_coefficient * penalty

    def padded(row: Tensor) -> Tensor:
        return pad_sequence(list(row.double().split(counts)), batch_first=True)

    mask = padded(torch.ones(len(rewards)))
    found = gae(padded(rewards), padded(old.values), mask, settings.gae_gamma, settings.gae_lambda)
    advantages, returns = (values[mask > 0] for values in found)
    return Returns(advantages, returns, old.values)


def _moments(values: Tensor, world: World) -> tuple[float, float, float]:
    """Count, mean, and sum of squared deviations of the values of all processes."""
    count, total = world.sum([float(len(values)), float(values.sum())])
    mean = total / max(count, 1)
    (squares,) = world.sum([float(((values - mean) ** 2).sum())])
    return count, mean, squares
