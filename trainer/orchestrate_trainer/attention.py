"""Causal attention over packed sequences, registered with transformers as ``packed``.

One call of PyTorch's ``scaled_dot_product_attention`` per sequence: on CUDA in bf16 that is its
flash kernel, on the CPU its blocked one, and no sequence sees another. No mask of the whole pack
exists; only sliding-window layers build one, per sequence.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface

__all__ = ["NAME"]

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
    """``query`` ``[1, H, T, D]``, ``key`` and ``value`` ``[1, H_kv, T, D]`` of sequences with
    ``packed_lengths`` tokens each; ``s_aux`` ``[H]`` are attention sinks. Returns
    ``[1, T, H, D_v]``."""
    if scaling is None:
        scaling = query.shape[-1] ** -0.5
    outputs = [
        _sequence(q, k, v, scaling, sliding_window, s_aux)
        for q, k, v in zip(
            query.split(packed_lengths, dim=2),
            key.split(packed_lengths, dim=2),
            value.split(packed_lengths, dim=2),
        )
    ]
    return torch.cat(outputs, dim=2).transpose(1, 2).contiguous(), None


def _sequence(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scaling: float,
    window: int | None,
    sinks: Tensor | None,
) -> Tensor:
    if sinks is not None:
        query, key, value = _with_sink(query, key, value, scaling, sinks)
    tokens = query.shape[2]
    mask = None
    if window is not None and window < tokens:
        at = torch.arange(tokens, device=query.device)
        distance = at.unsqueeze(1) - at
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
    """A sink is a logit in the softmax's denominator that carries no value: here a first token
    with value 0 whose score is the sink in every row, through one more dimension."""
    heads = query.shape[1]
    if key.shape[1] != heads:
        key = key.repeat_interleave(heads // key.shape[1], dim=1)
        value = value.repeat_interleave(heads // value.shape[1], dim=1)
    # Kernels want a multiple of 8 in the last dimension.
    query, key = F.pad(query, (0, 8, 1, 0)), F.pad(key, (0, 8, 1, 0))
    place = query.shape[-1] - 8
    ones = torch.zeros_like(query)
    ones[..., place] = 1
    scores = torch.zeros_like(key)
    scores[:, :, 0, place] = (sinks / scaling).to(key.dtype)
    return query + ones, key + scores, F.pad(value, (0, 0, 1, 0))


AttentionInterface.register(NAME, packed_attention)
AttentionMaskInterface.register(NAME, lambda *_, **__: None)
