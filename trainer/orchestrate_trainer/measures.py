"""Diagnostics of a step: how far the trainer is from the engine, in probabilities and in routes.

Each class sums over one process's tokens; its ``finish`` combines the processes.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from .corrections import Tokens, bounded_ratio
from .counts import HalfDecades, ProbabilityGrid, load_curve
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


class Mismatch:
    """Mismatch of log-probs between sampler and trainer, over loss tokens."""

    def __init__(self) -> None:
        self._sums = torch.zeros(6 + len(TAUS), dtype=torch.float64)
        self._largest = 0.0
        self._by_token, self._by_sequence = HalfDecades(), HalfDecades()
        self._grid = ProbabilityGrid()

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
        self._sums += torch.stack([part.double().sum() for part in parts]).cpu()
        if len(ratio):
            self._largest = max(self._largest, float(ratio.max()))
        sizes = (trainer - sampler).abs()
        self._by_token.add(sizes)
        self._by_sequence.add(tokens.means(sizes)[tokens.present])

    def finish(self, world: World) -> tuple[dict[str, Any], dict[str, float]]:
        """The protocol's ``Mismatch``, and the moments of ρ for its ``RolloutRatio``."""
        count, *sums = world.sum(self._sums.tolist())
        divergence, difference, probability, first, second, *beyond = (
            value / max(count, 1) for value in sums
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
            "max": max(world.gather(self._largest)),
            "effective_share": first * first / second if second > 0 else 0.0,
        }
        return mismatch, ratio


class Disagreement:
    """Disagreement of recorded experts and the trainer's own, over tokens that have a row."""

    def __init__(self, layers: int, top_k: int) -> None:
        self._pairs = torch.zeros(top_k + 1, dtype=torch.float64)
        self._by_layer = torch.zeros(layers, dtype=torch.float64)
        self._tokens = torch.zeros(layers + 1, dtype=torch.float64)
        self._sequences = HalfDecades()
        #: Number of sequences; sums over them of the mean number of differing routers and experts.
        self._sums = [0.0] * 3

    def add(self, recorded: Tensor, own: Tensor) -> None:
        """Adds one sequence: experts ``[t, L, K]`` of its tokens that have a row."""
        if len(recorded) == 0:
            return
        found = differing(recorded.to(torch.int16), own.to(torch.int16)).cpu()
        routers = (found > 0).sum(-1)
        self._pairs += torch.bincount(found.flatten(), minlength=len(self._pairs))
        self._by_layer += (found > 0).sum(0)
        self._tokens += torch.bincount(routers, minlength=len(self._tokens))
        self._sequences.add(routers.sum(0, keepdim=True) / found.numel())
        means = (1.0, float(routers.double().mean()), float(found.sum(-1).double().mean()))
        self._sums = [a + b for a, b in zip(self._sums, means)]

    def finish(self, world: World) -> dict[str, Any]:
        """The protocol's ``Disagreement``."""
        pairs = world.sum(self._pairs.tolist())
        by_layer = world.sum(self._by_layer.tolist())
        by_token = world.sum(self._tokens.tolist())
        sequences, routers, experts = world.sum(self._sums)
        tokens = max(sum(by_token), 1)
        return {
            "router": sum(pairs[1:]) / max(sum(pairs), 1),
            "token": sum(by_token[1:]) / tokens,
            "sequence_mean": routers / max(sequences, 1),
            "sequence_mean_experts": experts / max(sequences, 1),
            "histogram": [count / max(sum(pairs), 1) for count in pairs],
            "by_layer": [count / tokens for count in by_layer],
            "token_histogram": [count / tokens for count in by_token],
            "sequence_histogram": self._sequences.finish(world),
        }


class Load:
    """How evenly the experts of each MoE layer are used."""

    def __init__(self, layers: int, experts: int) -> None:
        self._counts = torch.zeros(layers, experts, dtype=torch.float64)

    def add(self, executed: Tensor) -> None:
        """Adds executed experts ``[T, L, K]``."""
        layers, experts = self._counts.shape
        offsets = torch.arange(layers, device=executed.device).view(1, -1, 1) * experts
        places = (executed.long() + offsets).flatten()
        self._counts += torch.bincount(places, minlength=layers * experts).view(layers, -1).cpu()

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


class Ratio:
    """Ratio of the updated policy to the one at the weights of the rollout, over loss tokens."""

    def __init__(self) -> None:
        self._sums = [0.0] * 4
        self._largest = 0.0

    def add(self, log_ratio: Tensor, clipped_high: Tensor, clipped_low: Tensor) -> None:
        """Adds loss tokens of one mini step, ``[n]``."""
        if len(log_ratio) == 0:
            return
        ratio = bounded_ratio(log_ratio.detach().double())
        parts = [ratio.sum(), clipped_high.sum(), clipped_low.sum()]
        values = [float(len(ratio)), *map(float, parts)]
        self._sums = [a + b for a, b in zip(self._sums, values)]
        self._largest = max(self._largest, float(ratio.max()))

    @property
    def count(self) -> int:
        """Number of tokens of this process."""
        return int(self._sums[0])

    def finish(self, world: World) -> dict[str, float]:
        """The protocol's ``PolicyRatio``."""
        count, total, high, low = world.sum(self._sums)
        count = max(count, 1)
        return {
            "mean": total / count,
            "max": max(world.gather(self._largest)),
            "clipped_high": high / count,
            "clipped_low": low / count,
        }
