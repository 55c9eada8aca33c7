"""PR2: a linear predictor per layer of how the router's logits change over the coming mini steps.

The predictor is trained here and used by the inference engine, which chooses experts by it in the
next rollout. The trainer then replays what the engine chose. The predictor does not affect the
model's weights.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from .data import MicroBatch, on_device, on_host
from .routers import RouterSpec

__all__ = [
    "Features",
    "accumulate_gradient",
    "evenly_spaced",
    "predicted_route",
    "predictor_loss",
    "predictor_rows",
]


def evenly_spaced(rows: int, limit: int) -> Tensor:
    """At most ``limit`` of the numbers ``0..rows``, evenly spaced, int64."""
    count = min(rows, limit)
    return torch.arange(count) * rows // max(count, 1)


def predictor_rows(micro: MicroBatch, limit: int) -> Tensor:
    """Rows of a micro-batch that train the predictor, int64: at most ``limit`` per sequence."""
    starts = [0, *torch.tensor(micro.lengths).cumsum(0).tolist()]
    if not micro.sequences:
        return torch.zeros(0, dtype=torch.long)
    rows = [
        evenly_spaced(n, limit) + start for n, start in zip(micro.lengths, starts[:-1], strict=True)
    ]
    return torch.cat(rows)


@dataclass(frozen=True)
class Features:
    """Router inputs and logits of ``R`` rows at the rollout weights, on the CPU.

    The host never reads them: copies there and back are in the order of the device's work.
    """

    #: ``[L, R, d]``
    inputs: Tensor
    #: ``[L, R, E]``
    logits: Tensor

    @classmethod
    def on_host(cls, inputs: Tensor, logits: Tensor) -> Features:
        """Copies ``[R, L, d]`` and ``[R, L, E]`` from the device without waiting for it."""
        # Contiguous before the copy, because a strided one would wait.
        return cls(*(on_host(part.transpose(0, 1).contiguous()) for part in (inputs, logits)))


def accumulate_gradient(old: Features, logits: Tensor, predictor: Tensor) -> Tensor:
    """Adds the loss's gradient to that of ``predictor`` ``[L, E, d]`` and returns the loss.

    ``logits`` ``[R, L, E]`` are the routers' logits at the current weights. Loss and gradient are
    sums over rows and layers.
    """
    total = predictor.new_zeros((), dtype=torch.float64)
    if len(logits) == 0:
        return total
    for layer in range(len(predictor)):
        # One layer at a time: the features of all layers may not fit on the device.
        # Converting before the copy would read the host's copy, which may not be complete.
        inputs, before = (
            on_device(part[layer], predictor.device).to(predictor)
            for part in (old.inputs, old.logits)
        )
        loss = predictor_loss(inputs, before, logits[:, layer].to(predictor), predictor[layer].T)
        loss = loss * len(inputs)
        loss.backward()
        total += loss.detach()
    return total


def predicted_route(
    spec: RouterSpec, hidden: Tensor, logits: Tensor, predictor: Tensor, bias: Tensor | None = None
) -> Tensor:
    """Experts ``[T, K]`` chosen by ``logits`` ``[T, E]`` plus the predicted change.

    The predicted change is ``hidden`` ``[T, d]`` times ``predictor`` ``[d, E]``. It affects the
    choice only; the experts' weights are computed from ``logits``.
    """
    with torch.no_grad():
        return spec.select(logits + hidden @ predictor, bias)


def predictor_loss(
    hidden_old: Tensor, logits_old: Tensor, logits_new: Tensor, predictor: Tensor
) -> Tensor:
    """Divergence of the predicted router distribution from the actual one, a mean over tokens.

    It is ``KL(softmax(logits_new) || softmax(logits_old + hidden_old @ predictor))``. Only the
    predictor gets a gradient.
    """
    target = F.log_softmax(logits_new.detach(), dim=-1)
    guess = F.log_softmax(logits_old.detach() + hidden_old.detach() @ predictor, dim=-1)
    return F.kl_div(guess, target, log_target=True, reduction="batchmean")
