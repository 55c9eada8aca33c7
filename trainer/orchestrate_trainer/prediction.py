"""PR2: a linear predictor per layer of where the router will stand after the coming mini steps.

It learns in the trainer and chooses in the inference engine, at the next batch's rollout; the
trainer itself replays what was chosen. Nothing of it reaches the model.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from .data import MicroBatch
from .routers import RouterSpec

__all__ = ["Features", "learn", "predicted_route", "predictor_loss", "spread"]


def spread(rows: int, limit: int) -> Tensor:
    """At most ``limit`` of the first ``rows`` numbers, evenly spread, int64."""
    count = min(rows, limit)
    return torch.arange(count) * rows // max(count, 1)


def kept_rows(micro: MicroBatch, limit: int) -> Tensor:
    """Rows of a micro-batch that the predictor learns from: at most ``limit`` per sequence."""
    starts = [0, *torch.tensor(micro.lengths).cumsum(0).tolist()]
    if not micro.sequences:
        return torch.zeros(0, dtype=torch.long)
    rows = [spread(n, limit) + start for n, start in zip(micro.lengths, starts)]
    return torch.cat(rows)


@dataclass(frozen=True)
class Features:
    """Of some rows, at the weights of the rollout, on the CPU: the routers' inputs ``[R, L, d]``
    and logits ``[R, L, E]``."""

    inputs: Tensor
    logits: Tensor


def learn(old: Features, now: Tensor, predictor: Tensor) -> float:
    """Adds the gradient of the predictor ``[L, E, d]``; ``now`` ``[R, L, E]`` are the logits at the
    weights of now. Answers with the loss. Both are sums over rows and layers."""
    total = 0.0
    if len(now) == 0:
        return total
    for layer in range(len(predictor)):
        inputs, then = (part[:, layer].to(predictor) for part in (old.inputs, old.logits))
        # A layer at a time: the features of all may not fit beside the model.
        loss = predictor_loss(inputs, then, now[:, layer].to(predictor), predictor[layer].T)
        loss = loss * len(inputs)
        loss.backward()
        total += float(loss.detach())
    return total


def predicted_route(
    spec: RouterSpec, hidden: Tensor, logits: Tensor, predictor: Tensor, bias: Tensor | None = None
) -> Tensor:
    """Experts ``[T, K]`` chosen by ``logits`` ``[T, E]`` plus the predicted change
    ``hidden [T, d] @ predictor [d, E]``. It affects the choice only: weights come from the plain
    logits."""
    with torch.no_grad():
        return spec.select(logits + hidden @ predictor, bias)


def predictor_loss(
    hidden_old: Tensor, logits_old: Tensor, logits_new: Tensor, predictor: Tensor
) -> Tensor:
    """Mean over tokens of ``KL(softmax(logits_new) || softmax(logits_old + hidden_old @
    predictor))``; only the predictor gets a gradient."""
    target = F.log_softmax(logits_new.detach(), dim=-1)
    guess = F.log_softmax(logits_old.detach() + hidden_old.detach() @ predictor, dim=-1)
    return F.kl_div(guess, target, log_target=True, reduction="batchmean")
