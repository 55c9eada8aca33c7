"""PR2: a linear predictor per layer of where the router will stand after the coming mini steps."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from .routers import RouterSpec

__all__ = ["predicted_route", "predictor_loss"]


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
