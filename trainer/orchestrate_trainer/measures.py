"""Diagnostics of a step: how far the trainer is from the engine, in probabilities and in routes.

Each class sums over one process's tokens, on their device and without making the host wait; its
``finish`` combines the processes, after :func:`~orchestrate_trainer.counts.read_sums` has read the
sums of all measurements at once. ``device`` is by default the CPU.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from .corrections import Tokens, bounded_ratio
from .counts import DeviceSums, HalfDecades, ProbabilityGrid, count, load_curve
from .world import World

__all__ = ["Disagreement", "Load", "Mismatch", "Ratio", "differing", "k3"]

#: Thresholds τ of the extreme-token fraction, as text and number.
TAUS = {"1.05": 1.05, "1.2": 1.2, "1.5": 1.5, "2": 2.0, "5": 5.0, "10": 10.0}


def k3(trainer: Tensor, sampler: Tensor) -> Tensor:
    """``ρ − 1 − ln ρ`` of each token, with ``ln ρ = trainer − sampler``; not capped, unlike the
    term of a loss."""
    log_ratio = trainer - sampler
    return torch.expm1(log_ratio) - log_ratio


def extreme(trainer: Tensor, sampler: Tensor, tau: float) -> Tensor:
    """Whether ``max(ρ, 1/ρ) > tau``, strictly, decided in log space."""
    return (trainer - sampler).abs() > math.log(tau)


def differing(sampler: Tensor, trainer: Tensor) -> Tensor:
    """How many experts of ``sampler`` ``[..., K]`` are not in ``trainer`` ``[..., K]``, int64
    ``[...]``; the order within K does not matter."""
    same = sampler.unsqueeze(-1) == trainer.unsqueeze(-2)
    return sampler.shape[-1] - same.any(-1).sum(-1)


class Mismatch(DeviceSums):
    """Mismatch of log-probs between sampler and trainer, over loss tokens."""

    def __init__(self, device: torch.device | None = None) -> None:
        self._sums = _zeros(device, 6 + len(TAUS))
        self._largest = _zeros(device)
        self._by_token, self._by_sequence = HalfDecades(device), HalfDecades(device)
        self._grid = ProbabilityGrid(device)

    def add(self, trainer: Tensor, sampler: Tensor, tokens: Tokens) -> None:
        """Adds log-probs of the loss tokens of whole sequences, nats, ``[n]``."""
        trainer, sampler = trainer.detach().double(), sampler.double()
        self._grid.add(sampler, trainer)
        # Beyond this the square of ρ is infinite, which JSON cannot hold.
        sampler = sampler.clamp(trainer - 300, trainer + 300)
        ratio = (trainer - sampler).exp()
        parts = [
            torch.ones_like(ratio),
            k3(trainer, sampler),
            (trainer - sampler).abs(),
            (trainer.exp() - sampler.exp()).abs(),
            ratio,
            ratio * ratio,
            *(extreme(trainer, sampler, tau) for tau in TAUS.values()),
        ]
        self._sums += torch.stack([part.double().sum() for part in parts])
        if len(ratio):
            self._largest = torch.maximum(self._largest, ratio.max())
        sizes = (trainer - sampler).abs()
        self._by_token.add(sizes)
        self._by_sequence.add(tokens.means(sizes), tokens.present)

    def finish(self, world: World) -> tuple[dict[str, Any], dict[str, float]]:
        """The protocol's ``Mismatch``, and the moments of ρ for its ``RolloutRatio``."""
        number, *sums = world.sum(self._sums.tolist())
        divergence, difference, probability, first, second, *beyond = (
            value / max(number, 1) for value in sums
        )
        mismatch = {
            "kl_k3": divergence,
            "mean_abs_logprob_diff": difference,
            "mean_abs_prob_diff": probability,
            "extreme_token_fraction": dict(zip(TAUS, beyond)),
            "token_histogram": self._by_token.finish(world),
            "sequence_histogram": self._by_sequence.finish(world),
            "probability_grid": self._grid.finish(world),
        }
        ratio = {
            "mean": first,
            "max": max(world.gather(float(self._largest))),
            "effective_share": first * first / second if second > 0 else 0.0,
        }
        return mismatch, ratio


class Disagreement(DeviceSums):
    """Disagreement of recorded experts and the trainer's own, over tokens that have a row."""

    def __init__(self, layers: int, top_k: int, device: torch.device | None = None) -> None:
        self._pairs = _zeros(device, top_k + 1)
        self._by_layer = _zeros(device, layers)
        self._tokens = _zeros(device, layers + 1)
        self._sequences = HalfDecades(device)
        #: Number of sequences; sums over them of the mean number of differing routers and experts.
        self._sums = _zeros(device, 3)

    def add(self, recorded: Tensor, own: Tensor, valid: Tensor, tokens: Tokens) -> None:
        """Adds packed sequences of ``T`` tokens: experts ``[T, L, K]`` of both, which tokens have a
        row, bool ``[T]``, and the sequence of each of the ``T`` tokens."""
        found = differing(recorded.to(torch.int16), own.to(torch.int16))
        weights = valid.double()
        moved = (found > 0).double()
        routers = moved.sum(-1)
        count(self._pairs, found.flatten(), weights.unsqueeze(1).expand_as(found).flatten())
        count(self._tokens, routers.long(), weights)
        self._by_layer += weights @ moved
        rows = tokens.sums(weights)
        present = rows > 0
        per_token = torch.stack([weights, routers * weights, found.sum(-1) * weights])
        means = [tokens.sums(part) / rows.clamp(min=1) for part in per_token]
        self._sequences.add(means[1] / found.shape[1], present)
        self._sums += torch.stack([part.sum() for part in means])

    def finish(self, world: World) -> dict[str, Any]:
        """The protocol's ``Disagreement``."""
        pairs = world.sum(self._pairs.tolist())
        by_layer = world.sum(self._by_layer.tolist())
        by_token = world.sum(self._tokens.tolist())
        sequences, routers, experts = world.sum(self._sums.tolist())
        tokens = max(sum(by_token), 1)
        return {
            "router": sum(pairs[1:]) / max(sum(pairs), 1),
            "token": sum(by_token[1:]) / tokens,
            "sequence_mean": routers / max(sequences, 1),
            "sequence_mean_experts": experts / max(sequences, 1),
            "histogram": [n / max(sum(pairs), 1) for n in pairs],
            "by_layer": [n / tokens for n in by_layer],
            "token_histogram": [n / tokens for n in by_token],
            "sequence_histogram": self._sequences.finish(world),
        }


class Load(DeviceSums):
    """How evenly the experts of each MoE layer are used."""

    def __init__(self, layers: int, experts: int, device: torch.device | None = None) -> None:
        self._counts = _zeros(device, layers, experts)

    def add(self, executed: Tensor, counted: Tensor | None = None) -> None:
        """Adds executed experts ``[T, L, K]``, or those of the tokens where ``counted`` bool
        ``[T]`` is set."""
        layers, experts = self._counts.shape
        offsets = torch.arange(layers, device=executed.device).view(1, -1, 1) * experts
        places = executed.long() + offsets
        if counted is not None:
            counted = counted.view(-1, 1, 1).expand_as(places).flatten()
        count(self._counts.view(-1), places.flatten(), counted)

    def finish(self, world: World) -> dict[str, Any]:
        """Per layer: the entropy of the experts' shares, 1 = evenly used, and their curve."""
        counts = torch.tensor(world.sum(self._counts.flatten().tolist()), dtype=torch.float64)
        counts = counts.view(self._counts.shape)
        shares = counts / counts.sum(-1, keepdim=True).clamp(min=1)
        entropy = -torch.special.xlogy(shares, shares).sum(-1)
        return {
            "expert_load_entropy": (entropy / math.log(max(shares.shape[1], 2))).tolist(),
            "expert_load": [load_curve(layer) for layer in counts],
        }


class Ratio(DeviceSums):
    """Ratio of the updated policy to the one at the weights of the rollout, over loss tokens."""

    def __init__(self, device: torch.device | None = None) -> None:
        #: Number of tokens of this process.
        self.count = 0
        self._sums = _zeros(device, 3)
        self._largest = _zeros(device)

    def add(self, log_ratio: Tensor, clipped_high: Tensor, clipped_low: Tensor) -> None:
        """Adds loss tokens of one mini step, ``[n]``."""
        if len(log_ratio) == 0:
            return
        ratio = bounded_ratio(log_ratio.detach().double())
        self.count += len(ratio)
        self._sums += torch.stack([ratio.sum(), clipped_high.sum(), clipped_low.sum()])
        self._largest = torch.maximum(self._largest, ratio.max())

    def finish(self, world: World) -> dict[str, float]:
        """The protocol's ``PolicyRatio``."""
        tokens, total, high, low = world.sum([float(self.count), *self._sums.tolist()])
        tokens = max(tokens, 1)
        return {
            "mean": total / tokens,
            "max": max(world.gather(float(self._largest))),
            "clipped_high": high / tokens,
            "clipped_low": low / tokens,
        }


def _zeros(device: torch.device | None, *shape: int) -> Tensor:
    """Sums of ``shape``, float64."""
    return torch.zeros(shape, dtype=torch.float64, device=device)
