"""Distributions in bounded size, as the trainer protocol has them: counts that processes and steps
can add up."""

from __future__ import annotations

import torch
from torch import Tensor

from .world import World

__all__ = ["HalfDecades", "ProbabilityGrid", "load_curve"]

ROOT_OF_TEN = 3.1622776601683795
#: Where one count of sizes ends and the next begins.
EDGES = torch.tensor(
    [step * float(f"1e-{n}") for n in range(7, 0, -1) for step in (1.0, ROOT_OF_TEN)]
    + [1.0, ROOT_OF_TEN, 10.0],
    dtype=torch.float64,
)
#: Bins of an axis of the grid, and where each but the first begins, in ``-log p``.
BINS = 32
BEGINNINGS = (torch.arange(1, BINS, dtype=torch.float64) / 8) ** 2
#: Most values of a curve of expert use.
CURVE_POINTS = 16


class HalfDecades:
    """How many values are how large, in half decades: 18 counts, the first below 1e-7, the last 10
    and above; none before anything was added."""

    def __init__(self) -> None:
        self._counts = torch.zeros(len(EDGES) + 1, dtype=torch.float64)

    def add(self, values: Tensor) -> None:
        """Sizes, at least 0, ``[n]``."""
        places = torch.bucketize(values.detach().double().cpu(), EDGES, right=True)
        self._counts += torch.bincount(places, minlength=len(self._counts))

    def finish(self, world: World) -> list[int]:
        """The counts over all processes."""
        counts = [int(count) for count in world.sum(self._counts.tolist())]
        return counts if any(counts) else []


class ProbabilityGrid:
    """Tokens by their probability under sampler and trainer. Bin ``b`` of an axis holds ``-log p``
    from ``(b / 8)²`` to ``((b + 1) / 8)²``, the last all that is above."""

    def __init__(self) -> None:
        self._counts = torch.zeros(BINS * BINS, dtype=torch.float64)

    def add(self, sampler: Tensor, trainer: Tensor) -> None:
        """Log-probs of the same tokens, nats, ``[n]``."""
        places = _bins(sampler) * BINS + _bins(trainer)
        self._counts += torch.bincount(places, minlength=BINS * BINS)

    def finish(self, world: World) -> list[list[int]]:
        """``[sampler's bin, trainer's bin, tokens]`` of each pair of bins that has some."""
        counts = world.sum(self._counts.tolist())
        return [[*divmod(pair, BINS), int(n)] for pair, n in enumerate(counts) if n > 0]


def load_curve(counts: Tensor) -> list[float]:
    """Use of a layer's experts ``[E]`` from the busiest to the idlest, 1 = even: at most 16 groups
    of equal size, the mean of each, to three decimals."""
    experts = len(counts)
    even = max(float(counts.sum()), 1.0) / max(experts, 1)
    groups = counts.sort(descending=True).values.split(max(-(-experts // CURVE_POINTS), 1))
    # To the nearest, halves up: as the embedded trainer rounds.
    return [int(float(group.mean()) / even * 1e3 + 0.5) / 1e3 for group in groups]


def _bins(logprobs: Tensor) -> Tensor:
    return torch.bucketize(-logprobs.detach().double().cpu(), BEGINNINGS, right=True)
