"""Causal attention over packed sequences, registered with transformers under the name ``packed``.

No sequence sees another. Three kernels compute the same:

* ``varlen``: one call of PyTorch's flash attention for the whole pack (CUDA, bf16 or f16).
* ``flex``: one call of PyTorch's flex attention with a block mask: for what flash attention lacks,
  such as attention sinks, values of another width than keys, or f32. Compiled on CUDA. PyTorch
  has no backward of it on the CPU.
* ``loop``: one ``scaled_dot_product_attention`` per sequence, on any device; with a sliding window
  one per block of queries, with a mask of the keys that the block sees.

None of them has a tensor with a value for each pair of a query and a key of a sequence or a pack,
except ``flex`` where it is not compiled.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
from collections.abc import Callable
from functools import cache
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.flex_attention import (
    AuxRequest,
    BlockMask,
    flex_attention,
)
from transformers import AttentionInterface

from .compilation import uncompiled
from .cost import head_widths
from .data import on_device

__all__ = ["KERNELS", "NAME", "Packing", "choose_kernel", "obstacle"]

#: Name to pass to transformers as ``attn_implementation``.
NAME = "packed"
#: Kernels, the preferred one first.
KERNELS = ("varlen", "flex", "loop")
#: Tokens in a block of flex attention.
FLEX_BLOCK = 128
#: Fewest queries that ``loop`` computes at a time in a sliding window, which needs a mask.
WINDOW_BLOCK = 128
#: PyTorch's flash attention of packed sequences, which versions before 2.10 lack.
varlen_attn: Any = None
with contextlib.suppress(ImportError):
    varlen_attn = importlib.import_module("torch.nn.attention.varlen").varlen_attn


class Packing:
    """Where the sequences of a pack are, and the kernel that computes their attention.

    Not a dataclass: FSDP copies those, for every layer, to cast the tensors in them.
    """

    def __init__(self, lengths: tuple[int, ...], kernel: str, device: torch.device) -> None:
        """A pack of sequences of ``lengths`` tokens, on ``device``."""
        if kernel == "flex" and device.type == "cuda" and sum(lengths) < FLEX_BLOCK:
            # Its compiled form (PyTorch 2.11) refuses less than a block.
            kernel = "loop"
        self.lengths, self.kernel, self.device = lengths, kernel, device
        ends = F.pad(torch.tensor(lengths).cumsum(0), (1, 0))
        #: Offsets of the sequences, int32 ``[S + 1]``.
        self.offsets = on_device(ends.to(torch.int32), device)
        self._masks: dict[int | None, BlockMask] = {}

    def block_mask(self, window: int | None) -> BlockMask:
        """Which blocks of a flex attention see which, made once for all layers."""
        if window not in self._masks:
            self._masks[window] = self._make_block_mask(window)
        return self._masks[window]

    def _make_block_mask(self, window: int | None) -> BlockMask:
        """The same as PyTorch's ``create_block_mask``, but that looks at every pair of tokens.

        Between the first and the last block that a query sees there is none that it does not see.
        """
        tokens, counts = sum(self.lengths), torch.tensor(self.lengths)
        document = torch.arange(len(counts)).repeat_interleave(counts)
        first = (counts.cumsum(0) - counts)[document]
        if window is not None:
            first = torch.maximum(first, torch.arange(tokens) - window + 1)
        blocks = -(-tokens // FLEX_BLOCK)
        number = torch.arange(blocks)
        # The first block that any query of a block sees, and the first one that all of them see
        # whole. A last block that is not full counts as one that sees none of them whole.
        seen = first[number * FLEX_BLOCK] // FLEX_BLOCK
        whole = -(-first[FLEX_BLOCK - 1 :: FLEX_BLOCK] // FLEX_BLOCK)
        whole = torch.minimum(F.pad(whole, (0, blocks - len(whole)), value=tokens), number)
        document, number, seen, whole = (
            on_device(tensor, self.device) for tensor in (document, number, seen, whole)
        )
        column, row = number, number.unsqueeze(1)
        all_seen = (column >= whole.unsqueeze(1)) & (column < row)
        any_seen = (column >= seen.unsqueeze(1)) & (column <= row) & ~all_seen

        def visible(_batch: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            allowed = (document[query] == document[key]) & (key <= query)
            return allowed if window is None else allowed & (query - key < window)

        return BlockMask.from_kv_blocks(
            *_numbered(any_seen),
            *_numbered(all_seen),
            BLOCK_SIZE=FLEX_BLOCK,
            mask_mod=visible,
            seq_lengths=(tokens, tokens),
        )


def _numbered(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Number of set columns in each row, and the columns with the set ones first, int32
    ``[1, 1, R]`` and ``[1, 1, R, C]``."""
    order = blocks.int().argsort(dim=-1, descending=True, stable=True)
    return blocks.sum(-1, dtype=torch.int32)[None, None], order.int()[None, None]


def obstacle(kernel: str, model: Any, dtype: torch.dtype, device: torch.device) -> str | None:
    """Why ``kernel`` cannot compute the attention of a transformers model, or ``None``."""
    if kernel == "loop":
        return None
    if kernel == "flex":
        if device.type != "cuda" or not torch.utils._triton.has_triton():
            return "flex attention requires a CUDA device and Triton"
        return None
    if kernel != "varlen":
        return f"unknown kernel; choose one of {', '.join(KERNELS)}"
    if varlen_attn is None or not {"scale", "window_size"} <= _varlen_options():
        return "this version of PyTorch has no varlen attention with windows"
    if device.type != "cuda" or torch.cuda.get_device_capability(device) < (8, 0):
        return "varlen attention requires a CUDA device of compute capability 8.0 or higher"
    if dtype not in (torch.bfloat16, torch.float16):
        return "varlen attention computes in bf16 or f16 only"
    attention = model.model.layers[0].self_attn
    keys, values = head_widths(attention)
    if hasattr(attention, "sinks"):
        return "varlen attention has no attention sinks"
    if keys != values or keys % 8 or keys > 256:
        return "varlen attention requires keys and values of one width, a multiple of 8 up to 256"
    return None


def choose_kernel(asked: str, model: Any, dtype: torch.dtype, device: torch.device) -> str:
    """The kernel ``asked`` for, or with ``auto`` the best one for model, dtype and device.

    Raises ``ValueError`` if the kernel cannot be used. ``auto`` is ``loop`` on the CPU.
    """
    if asked == "auto":
        if device.type != "cuda":
            return "loop"
        return next(name for name in KERNELS if obstacle(name, model, dtype, device) is None)
    problem = obstacle(asked, model, dtype, device)
    if problem is not None:
        raise ValueError(f"attention kernel `{asked}`: {problem}")
    return asked


@uncompiled
def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    packing: Packing,
    scaling: float | None = None,
    sliding_window: int | None = None,
    s_aux: Tensor | None = None,
    **_: object,
) -> tuple[Tensor, None]:
    """Attention outputs ``[1, T, H, D_v]`` of packed sequences.

    ``query`` is ``[1, H, T, D]``, ``key`` and ``value`` are ``[1, H_kv, T, D]``; ``s_aux`` ``[H]``
    are attention sinks. The signature is that of transformers' attention functions.
    """
    if scaling is None:
        scaling = query.shape[-1] ** -0.5
    if packing.kernel == "varlen":
        assert s_aux is None, "the kernel was chosen for a model without attention sinks"
        return _varlen(query, key, value, packing, scaling, sliding_window), None
    if packing.kernel == "flex":
        output = _flex(query, key, value, packing, scaling, sliding_window, s_aux)
    else:
        parts = (tensor.split(packing.lengths, dim=2) for tensor in (query, key, value))
        outputs = [
            _attend(q, k, v, scaling, sliding_window, s_aux) for q, k, v in zip(*parts, strict=True)
        ]
        output = torch.cat(outputs, dim=2)
    return output.transpose(1, 2).contiguous(), None


def _varlen(
    query: Tensor, key: Tensor, value: Tensor, packing: Packing, scaling: float, window: int | None
) -> Tensor:
    """Attention of all sequences by one flash attention call, ``[1, T, H, D]``."""
    options: dict[str, Any] = {"enable_gqa": query.shape[1] != key.shape[1]}
    if "enable_gqa" not in _varlen_options():
        del options["enable_gqa"]
        repeats = query.shape[1] // key.shape[1]
        key, value = (t.repeat_interleave(repeats, dim=1) for t in (key, value))
    longest = max(packing.lengths)
    output: Tensor = varlen_attn(
        *(tensor[0].transpose(0, 1) for tensor in (query, key, value)),
        packing.offsets,
        packing.offsets,
        longest,
        longest,
        scale=scaling,
        # Counted without the token itself.
        window_size=(-1 if window is None else window - 1, 0),
        **options,
    )
    return output.unsqueeze(0)


def _flex(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    packing: Packing,
    scaling: float,
    window: int | None,
    sinks: Tensor | None,
) -> Tensor:
    """Attention of all sequences by one flex attention call, ``[1, H, T, D_v]``."""
    output, aux = _on_cuda_compiled(flex_attention, query.device)(
        query,
        key,
        value,
        block_mask=packing.block_mask(window),
        scale=scaling,
        enable_gqa=query.shape[1] != key.shape[1],
        return_aux=AuxRequest(lse=True),
    )
    if sinks is None:
        return cast("Tensor", output)
    # A sink is a further term of the softmax's denominator, so it scales the output.
    kept = torch.sigmoid(aux.lse - sinks.to(aux.lse).view(1, -1, 1))
    return cast("Tensor", output * kept.unsqueeze(-1).to(output.dtype))


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scaling: float,
    window: int | None,
    sinks: Tensor | None,
) -> Tensor:
    """Attention within one sequence. Its memory is linear in the number of tokens."""
    tokens = query.shape[2]
    if window is None or window >= tokens:
        return _attend_part(query, key, value, None, scaling, sinks)
    outputs = []
    size = max(window, WINDOW_BLOCK)
    for start in range(0, tokens, size):
        end, first = min(start + size, tokens), max(start - window + 1, 0)
        position = torch.arange(first, end, device=query.device)
        distance = position[start - first :].unsqueeze(1) - position
        visible = (distance >= 0) & (distance < window)
        seen = key[:, :, first:end], value[:, :, first:end]
        outputs.append(_attend_part(query[:, :, start:end], *seen, visible, scaling, sinks))
    return torch.cat(outputs, dim=2)


def _attend_part(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    visible: Tensor | None,
    scaling: float,
    sinks: Tensor | None,
) -> Tensor:
    """Attention of some queries to some keys: those that are ``visible`` ``[Q, K]``, or causal."""
    width = value.shape[-1]
    if sinks is not None:
        query, key, value = _with_sink(query, key, value, scaling, sinks)
        visible = None if visible is None else F.pad(visible, (1, 0, 1, 0), value=True)
    # With keys and values of different widths PyTorch would compute all scores at once on the CPU.
    widest = max(query.shape[-1], value.shape[-1])
    query, key, value = (F.pad(t, (0, widest - t.shape[-1])) for t in (query, key, value))
    output = F.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=visible,
        is_causal=visible is None,
        scale=scaling,
        enable_gqa=query.shape[1] != key.shape[1],
    )
    return output[:, :, 0 if sinks is None else 1 :, :width]


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


@cache
def _varlen_options() -> frozenset[str]:
    """Parameters of PyTorch's function, which differ between versions."""
    return frozenset(inspect.signature(varlen_attn).parameters)


def _on_cuda_compiled(function: Callable[..., Any], device: torch.device) -> Callable[..., Any]:
    """``function``, compiled if it is for a CUDA device."""
    return _compiled(function) if device.type == "cuda" else function


@cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(function, dynamic=True)


# Without a mask function of this name, transformers makes no mask. With one it would first look for
# packed sequences in the positions, for which the host waits for the device.
AttentionInterface.register(NAME, packed_attention)
