"""Causal attention over packed sequences, registered with transformers under the name ``packed``.

Each sequence of a pack gets its own call of PyTorch's ``scaled_dot_product_attention``, so no
sequence sees another. PyTorch uses its flash kernel for that on CUDA in bf16, and a blocked kernel
on the CPU. A mask for the whole pack is never built; sliding-window layers build one per sequence.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface

__all__ = ["NAME"]

#: Name to pass to transformers as ``attn_implementation``.
NAME = "packed"


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    packed_lengths: tuple[int, ...],
    scaling: float | None = None,
    sliding_window: int | None = None,
    s_aux: Tensor | None = None,
    **_: object,
) -> tuple[Tensor, None]:
    """Attention outputs ``[1, T, H, D_v]`` of sequences with ``packed_lengths`` tokens each.

    ``query`` is ``[1, H, T, D]``, ``key`` and ``value`` are ``[1, H_kv, T, D]``; ``s_aux`` ``[H]``
    are attention sinks. The signature is that of transformers' attention functions.
    """
    if scaling is None:
        scaling = query.shape[-1] ** -0.5
    outputs = [
        _attend(q, k, v, scaling, sliding_window, s_aux)
        for q, k, v in zip(
            query.split(packed_lengths, dim=2),
            key.split(packed_lengths, dim=2),
            value.split(packed_lengths, dim=2),
            strict=True,
        )
    ]
    return torch.cat(outputs, dim=2).transpose(1, 2).contiguous(), None


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scaling: float,
    window: int | None,
    sinks: Tensor | None,
) -> Tensor:
    """Attention within one sequence."""
    if sinks is not None:
        query, key, value = _with_sink(query, key, value, scaling, sinks)
    tokens = query.shape[2]
    mask = None
    if window is not None and window < tokens:
        position = torch.arange(tokens, device=query.device)
        distance = position.unsqueeze(1) - position
        mask = (distance >= 0) & (distance < window)
        if sinks is not None:
            mask[:, 0] = True
    output = F.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=mask,
        is_causal=mask is None,
        scale=scaling,
        enable_gqa=query.shape[1] != key.shape[1],
    )
    return output if sinks is None else output[:, :, 1:, : value.shape[-1]]


def _with_sink(
    query: Tensor, key: Tensor, value: Tensor, scaling: float, sinks: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Prepends a token that stands for the attention sink.

    A sink is a logit in the softmax's denominator that carries no value. Here it is a first token
    with value 0, whose score is the sink's logit in every row by means of extra dimensions.
    """
    heads = query.shape[1]
    if key.shape[1] != heads:
        key = key.repeat_interleave(heads // key.shape[1], dim=1)
        value = value.repeat_interleave(heads // value.shape[1], dim=1)
    # The kernels need the last dimension to be a multiple of 8.
    query, key = F.pad(query, (0, 8, 1, 0)), F.pad(key, (0, 8, 1, 0))
    place = query.shape[-1] - 8
    ones = torch.zeros_like(query)
    ones[..., place] = 1
    scores = torch.zeros_like(key)
    scores[:, :, 0, place] = (sinks / scaling).to(key.dtype)
    return query + ones, key + scores, F.pad(value, (0, 0, 1, 0))


AttentionInterface.register(NAME, packed_attention)
AttentionMaskInterface.register(NAME, lambda *_, **__: None)
