"""Histograms of bounded size, in the trainer protocol's form: counts that processes and steps can
add up.

Counts stay on the device of what is counted until :func:`read_sums` or ``finish``: adding never
makes the host wait.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from .data import on_device
from .world import World

__all__ = ["DeviceSums", "HalfDecades", "ProbabilityGrid", "count", "load_curve", "read_sums"]

ROOT_OF_TEN = 3.1622776601683795
#: Boundaries between the bins of :class:`HalfDecades`; a boundary belongs to the bin above it.
EDGES = torch.tensor(
    [step * float(f"1e-{n}") for n in range(7, 0, -1) for step in (1.0, ROOT_OF_TEN)]
    + [1.0, ROOT_OF_TEN, 10.0],
    dtype=torch.float64,
)
#: Bins on each axis of :class:`ProbabilityGrid`.
BINS = 32
#: Lower boundaries of all bins but the first, in ``-log p``.
GRID_EDGES = (torch.arange(1, BINS, dtype=torch.float64) / 8) ** 2
#: Largest number of points of an expert-load curve.
CURVE_POINTS = 16


class DeviceSums:
    """Base of what is summed on the device: its float64 tensors, those in its dictionaries, and
    those of the :class:`DeviceSums` that it holds."""

    def _places(self) -> Iterator[tuple[dict[str, Any], str]]:
        """The dictionary and key of every tensor."""
        for owner in (vars(self), *(v for v in vars(self).values() if isinstance(v, dict))):
            for name, value in owner.items():
                if isinstance(value, Tensor):
                    yield owner, name
                elif isinstance(value, DeviceSums):
                    yield from value._places()


def read_sums(*measured: DeviceSums) -> None:
    """Moves ``measured`` to the CPU by a single copy, so that the host waits for the device once.

    Nothing can be added on the device afterwards.
    """
    places = [place for sums in measured for place in sums._places()]
    tensors = [owner[name] for owner, name in places]
    parts = torch.cat([tensor.flatten() for tensor in tensors]).cpu()
    for (owner, name), tensor, part in zip(
        places, tensors, parts.split([tensor.numel() for tensor in tensors]), strict=True
    ):
        owner[name] = part.view(tensor.shape)


def count(counts: Tensor, places: Tensor, weights: Tensor | None = None) -> None:
    """Adds ``weights`` ``[n]``, or 1 each, to ``counts`` float64 ``[m]`` at ``places`` ``[n]``."""
    if weights is None:
        weights = counts.new_ones(len(places))
    counts.index_add_(0, places, weights.to(counts.dtype))


class HalfDecades(DeviceSums):
    """Histogram of sizes in half decades: 18 counts, the first for sizes below 1e-7, the last for
    sizes of 10 and above."""

    def __init__(self, device: torch.device | None = None) -> None:
        """``device`` is that of the sizes, by default the CPU."""
        self._edges = EDGES if device is None else on_device(EDGES, device)
        self._counts = torch.zeros(len(EDGES) + 1, dtype=torch.float64, device=device)

    def add(self, values: Tensor, counted: Tensor | None = None) -> None:
        """Counts sizes ``[n]``, each at least 0, or those where ``counted`` bool ``[n]`` is set."""
        bins = torch.bucketize(values.detach().double(), self._edges, right=True)
        count(self._counts, bins, counted)

    def finish(self, world: World) -> list[int]:
        """The counts over all processes; an empty list if nothing was added."""
        counts = [int(n) for n in world.sum(self._counts.tolist())]
        return counts if any(counts) else []


class ProbabilityGrid(DeviceSums):
    """Histogram of tokens by their probability under the sampler and under the trainer.

    Bin ``b`` of an axis holds ``-log p`` from ``(b / 8)²`` to ``((b + 1) / 8)²``; the last bin
    holds everything above.
    """

    def __init__(self, device: torch.device | None = None) -> None:
        """``device`` is that of the log-probs, by default the CPU."""
        self._edges = GRID_EDGES if device is None else on_device(GRID_EDGES, device)
        self._counts = torch.zeros(BINS * BINS, dtype=torch.float64, device=device)

    def add(self, sampler: Tensor, trainer: Tensor) -> None:
        """Counts tokens by their log-probs under both, nats, ``[n]`` each."""
        count(self._counts, self._bins(sampler) * BINS + self._bins(trainer))

    def finish(self, world: World) -> list[list[int]]:
        """``[sampler's bin, trainer's bin, tokens]`` of every cell that is not empty."""
        counts = world.sum(self._counts.tolist())
        return [[*divmod(cell, BINS), int(n)] for cell, n in enumerate(counts) if n > 0]

    def _bins(self, logprobs: Tensor) -> Tensor:
        return torch.bucketize(-logprobs.detach().double(), self._edges, right=True)


def load_curve(counts: Tensor) -> list[float]:
    """Use of a layer's experts, from the busiest to the idlest, where 1 means even use.

    ``counts`` is ``[E]``. Experts are merged into at most 16 groups of equal size; each group's
    mean is rounded to three decimals.
    """
    experts = len(counts)
    even = max(float(counts.sum()), 1.0) / max(experts, 1)
    groups = counts.sort(descending=True).values.split(max(-(-experts // CURVE_POINTS), 1))
    # Half is rounded up, as in the embedded trainer.
    return [int(float(group.mean()) / even * 1e3 + 0.5) / 1e3 for group in groups]
