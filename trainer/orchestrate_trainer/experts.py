"""The experts of a MoE layer, registered with transformers under the name ``packed``.

The hidden state of a token is copied once for each of its experts, in the order of the experts, so
that each expert multiplies consecutive rows. Copying and summing are each other's gradient: both
are gathers of whole rows and sums in a fixed order, so results and gradients are deterministic, and
no row is added to by index. A token is weighted where it is narrow, before the last product.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from .compilation import uncompiled

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
    def forward(ctx: Any, rows: Tensor, pairs: Tensor, places: Tensor, count: int) -> Tensor:
        ctx.save_for_backward(places)
        ctx.count = count
        return rows.index_select(0, pairs // count)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        (places,) = ctx.saved_tensors
        return _sum_places(gradients[0], places, ctx.count), None, None, None


class _Collect(torch.autograd.Function):
    """Sums ``[T, d]`` of the rows ``[T K, d]`` at the places of each token."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, pairs: Tensor, places: Tensor, top_k: int) -> Tensor:
        # Activation checkpointing runs a layer again up to its last saved tensor. If this were one,
        # the last product would be run again too.
        ctx.pairs, ctx.top_k = pairs, top_k
        return _sum_places(rows, places, top_k)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        return gradients[0].index_select(0, ctx.pairs // ctx.top_k), None, None, None


class _AddBias(torch.autograd.Function):
    """Adds to each row the bias ``[E, d]`` of its expert; ``owners`` ``[T K]`` are the experts."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, bias: Tensor, owners: Tensor, ends: Tensor) -> Tensor:
        ctx.save_for_backward(ends)
        return rows + bias.index_select(0, owners)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None, None]:
        (ends,) = ctx.saved_tensors
        (gradient,) = gradients
        ones = gradient.new_ones(len(gradient), ONES).t()
        sums = F.grouped_mm(ones, gradient.contiguous(), offs=ends)[:, 0]
        return gradient, _zero_idle(sums, ends), None, None


class _ZeroIdle(torch.autograd.Function):
    """Weights ``[E, ...]`` as they are; the gradient of an expert without tokens becomes 0.

    On some devices, such as Blackwell, the kernel leaves it undefined (PyTorch issue 172439).
    """

    @staticmethod
    def forward(ctx: Any, weights: Tensor, ends: Tensor) -> Tensor:
        ctx.save_for_backward(ends)
        return weights.view_as(weights)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (ends,) = ctx.saved_tensors
        # The gradient is the product's own result, which nothing else uses.
        return _zero_idle(gradients[0], ends), None


def packed_experts(experts: Any, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    """Outputs ``[T, d]`` of the experts ``chosen`` ``[T, K]``, weighted by ``weights`` ``[T, K]``.

    ``experts`` is a module of transformers; the signature is that of its expert functions. A
    replayed router keeps the order of its experts, so that a layer that activation checkpointing
    runs again does not sort again.
    """
    router = getattr(experts, "replayed_router", None)
    count = experts.num_experts
    order = ExpertOrder.of(chosen, count) if router is None else router.order(count)
    pairs, places, top_k = order.pairs, order.places, order.top_k
    rows = _Spread.apply(hidden, pairs, places, top_k)
    projected = _product(rows, experts.gate_up_proj, experts.is_transposed, order)
    if experts.has_bias:
        projected = _add_bias(projected, experts.gate_up_proj_bias, chosen, order)
    gated = experts._apply_gate(projected)
    gated = gated * _Spread.apply(weights.reshape(-1, 1).to(gated.dtype), pairs, places, 1)
    rows = _product(gated, experts.down_proj, experts.is_transposed, order)
    output: Tensor = _Collect.apply(rows, pairs, places, top_k)
    if experts.has_bias:
        # The weighted sum of the experts' biases, as a product.
        shares = weights.new_zeros(len(weights), count).scatter(1, chosen, weights)
        output = output + shares.to(output.dtype) @ experts.down_proj_bias
    return output


def _product(rows: Tensor, weights: Tensor, transposed: bool, order: ExpertOrder) -> Tensor:
    """Each row times the matrix of its expert; ``weights`` is ``[E, out, in]``, or ``[E, in, out]``
    if ``transposed``."""
    matrices = weights if transposed else weights.mT
    # PyTorch traces grouped products in bf16 only.
    traced = rows.dtype is torch.bfloat16 and _has_kernel(rows)
    return (_multiply if traced else _multiply_untraced)(rows, matrices, order)


def _multiply(rows: Tensor, matrices: Tensor, order: ExpertOrder) -> Tensor:
    if not _has_kernel(rows):
        parts = zip(rows.split(order.counts), matrices.unbind(), strict=True)
        return torch.cat([part @ matrix for part, matrix in parts])
    product: Tensor = F.grouped_mm(rows, _ZeroIdle.apply(matrices, order.ends), offs=order.ends)
    return product


_multiply_untraced = uncompiled(_multiply)


@uncompiled
def _add_bias(rows: Tensor, bias: Tensor, chosen: Tensor, order: ExpertOrder) -> Tensor:
    """Adds to each row the bias ``[E, d]`` of its expert."""
    owners = chosen.flatten().index_select(0, order.pairs)
    if not _has_kernel(rows):
        return rows + bias[owners]
    added: Tensor = _AddBias.apply(rows, bias, owners, order.ends)
    return added


def _zero_idle(gradient: Tensor, ends: Tensor) -> Tensor:
    """``gradient`` ``[E, ...]``, overwritten by 0 for each expert without tokens."""
    idle = ends.diff(prepend=ends.new_zeros(1)) == 0
    return gradient.masked_fill_(idle.view(-1, *[1] * (gradient.dim() - 1)), 0)


def _has_kernel(rows: Tensor) -> bool:
    return has_grouped_kernel(rows.dtype, rows.device.type, _capability(rows.device))


def _read_capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else (0, 0)


#: Compute capability of a device, a constant in compiled layers.
_capability: Callable[[torch.device], tuple[int, int]] = torch.compiler.assume_constant_result(
    _read_capability
)


def _sum_places(rows: Tensor, places: Tensor, count: int) -> Tensor:
    """Sums of each ``count`` consecutive pairs' rows, ``[N, d]``; sums of bf16 are in f32."""
    gathered = rows.index_select(0, places)
    return gathered.view(-1, count, rows.shape[-1]).sum(1)


ALL_EXPERTS_FUNCTIONS.register(NAME, packed_experts)
