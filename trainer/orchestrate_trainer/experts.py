"""The experts of a MoE layer, registered with transformers under the name ``packed``.

The hidden state of a token is copied once for each of its experts, in the order of the experts, so
that each expert multiplies consecutive rows. Copying and summing are each other's gradient: both
are gathers of whole rows and sums in a fixed order, so results and gradients are deterministic, and
no row is added to by index. A token is weighted where it is narrow, before the last product.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

__all__ = ["NAME", "ExpertOrder", "has_grouped_kernel", "packed_experts"]

#: Name to pass to transformers as ``experts_implementation``.
NAME = "packed"
#: Rows of ones in a product that sums the rows of a matrix; kernels need strides of 16 bytes.
ONES = 8
#: Major compute capabilities for which PyTorch has a kernel of all groups' products.
GROUPED_CAPABILITIES = (9, 10)


def has_grouped_kernel(dtype: torch.dtype, kind: str, capability: tuple[int, int]) -> bool:
    """Whether :func:`packed_experts` multiplies the rows of all experts at once.

    ``kind`` is that of a device, and ``capability`` its compute capability on CUDA, where PyTorch
    has such a kernel for bf16 only. Without one its ``grouped_mm`` multiplies one expert after the
    other, for which the host reads their bounds in every call; this package reads them once.
    """
    if kind != "cuda":
        return True  # The same loop, but the bounds are in host memory.
    return dtype is torch.bfloat16 and capability[0] in GROUPED_CAPABILITIES


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

    @cached_property
    def counts(self) -> list[int]:
        """Number of each expert's pairs; the host waits for them, once."""
        counts: list[int] = self.ends.diff(prepend=self.ends.new_zeros(1)).tolist()
        return counts


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
        ctx.order = order
        return rows + bias.index_select(0, chosen.flatten().index_select(0, order.pairs))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None, None]:
        (gradient,) = gradients
        return gradient, _sums(gradient, ctx.order), None, None


class _ZeroIdle(torch.autograd.Function):
    """Weights ``[E, ...]`` as they are; the gradient of an expert without tokens becomes 0.

    On some devices, such as Blackwell, the kernel leaves it undefined (PyTorch issue 172439).
    """

    @staticmethod
    def forward(ctx: Any, weights: Tensor, order: ExpertOrder) -> Tensor:
        ctx.order = order
        return weights.view_as(weights)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (gradient,) = gradients
        # The gradient is the product's own result, which nothing else uses.
        return _zero_idle(gradient, ctx.order), None


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
    matrices = weights if transposed else weights.mT
    if _has_kernel(rows):
        product: Tensor = F.grouped_mm(rows, _ZeroIdle.apply(matrices, order), offs=order.ends)
        return product
    parts = zip(rows.split(order.counts), matrices.unbind(), strict=True)
    return torch.cat([part @ matrix for part, matrix in parts])


def _sums(rows: Tensor, order: ExpertOrder) -> Tensor:
    """Sum ``[E, d]`` of each expert's rows ``[T K, d]``."""
    if not _has_kernel(rows):
        return torch.stack([part.sum(0) for part in rows.split(order.counts)])
    ones = rows.new_ones(len(rows), ONES).t()
    return _zero_idle(F.grouped_mm(ones, rows.contiguous(), offs=order.ends)[:, 0], order)


def _zero_idle(gradient: Tensor, order: ExpertOrder) -> Tensor:
    """``gradient`` ``[E, ...]``, overwritten by 0 for each expert without tokens."""
    idle = order.ends.diff(prepend=order.ends.new_zeros(1)) == 0
    return gradient.masked_fill_(idle.view(-1, *[1] * (gradient.dim() - 1)), 0)


def _has_kernel(rows: Tensor) -> bool:
    kind = rows.device.type
    capability = torch.cuda.get_device_capability(rows.device) if kind == "cuda" else (0, 0)
    return has_grouped_kernel(rows.dtype, kind, capability)


def _sum_places(rows: Tensor, order: ExpertOrder, count: int) -> Tensor:
    """Sums of each ``count`` consecutive pairs' rows, ``[N, d]``; sums of bf16 are in f32."""
    gathered = rows.index_select(0, order.places)
    return gathered.view(-1, count, rows.shape[-1]).sum(1)


ALL_EXPERTS_FUNCTIONS.register(NAME, packed_experts)
