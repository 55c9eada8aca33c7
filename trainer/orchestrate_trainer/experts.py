"""The experts of a MoE layer, registered with transformers under the name ``packed``.

The hidden state of a token is copied once for each of its experts, in the order of the experts, so
that each expert multiplies consecutive rows. Copying and summing are each other's gradient: both
are gathers of whole rows and sums in a fixed order, so results and gradients are deterministic, and
no row is added to by index. A token is weighted where it is narrow, before the last product.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

__all__ = ["NAME", "ExpertOrder", "packed_experts"]

#: Name to pass to transformers as ``experts_implementation``.
NAME = "packed"
#: Rows of ones in a product that sums the rows of a matrix; kernels need strides of 16 bytes.
ONES = 8


@dataclass(frozen=True)
class ExpertOrder:
    """The pairs of a token and one of its ``K`` experts, numbered ``token · K + k`` and sorted by
    expert."""

    #: Experts per token.
    top_k: int
    #: Number of the pair at each place, int32 ``[T K]``.
    pairs: Tensor
    #: Place of each pair, int32 ``[T K]``.
    places: Tensor
    #: Place after the last pair of each expert, int32 ``[E]``.
    ends: Tensor

    @classmethod
    @torch.no_grad()
    def of(cls, chosen: Tensor, experts: int) -> ExpertOrder:
        """The order of experts ``chosen`` ``[T, K]``; pairs of one expert stay in token order."""
        # Narrow keys take fewer passes to sort.
        ids, order = chosen.flatten().to(torch.int16).sort(stable=True)
        numbers = torch.arange(len(order), dtype=torch.int32, device=order.device)
        places = torch.empty_like(numbers).scatter_(0, order, numbers)
        bounds = torch.arange(experts, dtype=ids.dtype, device=ids.device)
        ends = torch.searchsorted(ids, bounds, right=True, out_int32=True)
        return cls(chosen.shape[1], order.int(), places, ends)


class _Spread(torch.autograd.Function):
    """Rows ``[N, d]`` of the tokens or pairs that each place belongs to; ``count`` is the number of
    places per row."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, order: ExpertOrder, count: int) -> Tensor:
        ctx.order, ctx.count = order, count
        return rows.index_select(0, order.pairs // count)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        (gradient,) = gradients
        return _sum_places(gradient, ctx.order, ctx.count), None, None


class _Collect(torch.autograd.Function):
    """Sums ``[T, d]`` of the rows ``[T K, d]`` at the places of each token."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, order: ExpertOrder) -> Tensor:
        ctx.order = order
        return _sum_places(rows, order, order.top_k)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (gradient,) = gradients
        return gradient.index_select(0, ctx.order.pairs // ctx.order.top_k), None


class _AddBias(torch.autograd.Function):
    """Adds to each row the bias ``[E, d]`` of its expert."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, bias: Tensor, chosen: Tensor, order: ExpertOrder) -> Tensor:
        ctx.ends = order.ends
        return rows + bias.index_select(0, chosen.flatten().index_select(0, order.pairs))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None, None]:
        (gradient,) = gradients
        ones = gradient.new_ones(len(gradient), ONES).t()
        sums = F.grouped_mm(ones, gradient.contiguous(), offs=ctx.ends)
        return gradient, sums[:, 0], None, None


def packed_experts(experts: Any, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    """Outputs ``[T, d]`` of the experts ``chosen`` ``[T, K]``, weighted by ``weights`` ``[T, K]``.

    ``experts`` is a module of transformers; the signature is that of its expert functions. A
    replayed router keeps the order of its experts, so that a layer that activation checkpointing
    runs again does not sort again.
    """
    router = getattr(experts, "replayed_router", None)
    count = experts.num_experts
    order = ExpertOrder.of(chosen, count) if router is None else router.order(count)
    rows = _Spread.apply(hidden, order, order.top_k)
    projected = _product(rows, experts.gate_up_proj, experts.is_transposed, order)
    if experts.has_bias:
        projected = _AddBias.apply(projected, experts.gate_up_proj_bias, chosen, order)
    gated = experts._apply_gate(projected)
    gated = gated * _Spread.apply(weights.reshape(-1, 1).to(gated.dtype), order, 1)
    output: Tensor = _Collect.apply(
        _product(gated, experts.down_proj, experts.is_transposed, order), order
    )
    if experts.has_bias:
        # The weighted sum of the experts' biases, as a product.
        shares = weights.new_zeros(len(weights), count).scatter(1, chosen, weights)
        output = output + shares.to(output.dtype) @ experts.down_proj_bias
    return output


def _product(rows: Tensor, weights: Tensor, transposed: bool, order: ExpertOrder) -> Tensor:
    """Each row times the matrix of its expert; ``weights`` is ``[E, out, in]``, or ``[E, in, out]``
    if ``transposed``."""
    product: Tensor = F.grouped_mm(
        rows, weights if transposed else weights.transpose(-2, -1), offs=order.ends
    )
    return product


def _sum_places(rows: Tensor, order: ExpertOrder, count: int) -> Tensor:
    """Sums of each ``count`` consecutive pairs' rows, ``[N, d]``; sums of bf16 are in f32."""
    gathered = rows.index_select(0, order.places)
    return gathered.view(-1, count, rows.shape[-1]).sum(1)


ALL_EXPERTS_FUNCTIONS.register(NAME, packed_experts)
