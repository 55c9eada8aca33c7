"""PPO: a linear value head on the final hidden states, advantages and returns from its values."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from .advantages import gae, value_terms
from .corrections import Tokens
from .data import MicroBatch
from .losses import kl_penalty
from .settings import Hyperparameters
from .world import World

__all__ = ["Estimates", "Old", "Returns", "estimate", "values_of", "whiten"]


def values_of(hidden: Tensor, head: Tensor) -> Tensor:
    """Values, float32 ``[n]``, of what comes before each scored token: ``hidden`` ``[n, d]``
    is that of its row, ``head`` ``[d + 1]`` has the bias last."""
    return hidden.float() @ head[:-1] + head[-1]


@dataclass(frozen=True)
class Old:
    """One micro-batch at the weights of the rollout, on the CPU: values and log-probs of its loss
    tokens, and log-probs under the reference policy, ``[n]``."""

    micro: MicroBatch
    values: Tensor
    logp: Tensor
    reference: Tensor | None = None


@dataclass(frozen=True)
class Returns:
    """What the value head's part of a micro-batch's loss depends on, ``[n]`` each."""

    advantages: Tensor
    #: What the value head should have said, and what it said.
    returns: Tensor
    old: Tensor

    def to(self, device: torch.device) -> "Returns":
        return Returns(*(part.to(device) for part in vars(self).values()))

    def loss(self, values: Tensor, clip: float, loss_tokens: int) -> Tensor:
        """The micro-batch's summand of the value loss."""
        terms = value_terms(values, self.old, self.returns, clip)
        return terms.sum() / max(loss_tokens, 1)


@dataclass(frozen=True)
class Estimates:
    """Of this process's micro-batches, in their order."""

    parts: list[Returns]
    #: Share of the returns' variance that the old values explain, over all processes.
    explained_variance: float


def estimate(olds: list[Old], settings: Hyperparameters, world: World) -> Estimates:
    """Generalised advantages of a batch, whitened over all its loss tokens, and returns."""
    parts = [_returns(old, settings) for old in olds]
    live = [part for part, old in zip(parts, olds) if old.micro.live]
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
        for part, old in zip(parts, olds)
    ]
    due, left = (_moments(of, world)[2] for of in (returns, returns - values))
    return Estimates(finished, 1 - left / due if due > 0 else 0.0)


def whiten(advantages: Tensor, world: World) -> Tensor:
    """Advantages ``[n]`` of this process's loss tokens, shifted and scaled so that those of all
    processes have mean 0 and unbiased variance 1."""
    count, mean, squares = _moments(advantages, world)
    return (advantages - mean) * (squares / max(count - 1, 1) + 1e-8) ** -0.5


def _returns(old: Old, settings: Hyperparameters) -> Returns:
    """Advantages, not whitened, and returns, both float64."""
    micro = old.micro
    if not micro.live:
        nothing = torch.zeros(len(old.values), dtype=torch.float64)
        return Returns(nothing, nothing, old.values)
    tokens = Tokens(micro.owner, len(micro.sequences))
    counts = tokens.counts.tolist()
    rewards = torch.zeros(len(micro.owner), dtype=torch.float64)
    # A sequence's reward comes with its last loss token.
    last = tokens.counts.cumsum(0)[tokens.present] - 1
    rewards[last] = micro.rewards.double()[tokens.present]
    if settings.kl_in_reward and old.reference is not None:
        penalty = kl_penalty(old.logp.double(), old.reference.double(), "k1")
        rewards -= settings.kl_coefficient * penalty

    def padded(row: Tensor) -> Tensor:
        return pad_sequence(list(row.double().split(counts)), batch_first=True)

    mask = padded(torch.ones(len(micro.owner)))
    found = gae(
        padded(rewards), padded(old.values), mask, settings.gae_gamma, settings.gae_lambda
    )
    advantages, returns = (values[mask > 0] for values in found)
    return Returns(advantages, returns, old.values)


def _moments(values: Tensor, world: World) -> tuple[float, float, float]:
    """Number of values in all processes, their mean, and the sum of squares around it."""
    count, total = world.sum([float(len(values)), float(values.sum())])
    mean = total / max(count, 1)
    (squares,) = world.sum([float(((values - mean) ** 2).sum())])
    return count, mean, squares
