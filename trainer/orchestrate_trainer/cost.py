"""Arithmetic of a model's forward pass: what a sequence costs, for packing and for benchmarks."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

from .routers import RouterSpec

__all__ = ["ForwardCost"]


@dataclass(frozen=True)
class ForwardCost:
    """Floating-point operations of a forward pass.

    They are two per weight that a token uses, and those of attention scores and values. Norms,
    activations, softmax and the embedding's look-up are left out.
    """

    #: Per token: all weights of the layers that it uses.
    token: float
    #: Per pair of a query and a key that it sees, in one layer.
    pair: float
    #: Number of layers by their sliding window in tokens; ``None`` is full causal attention.
    windows: dict[int | None, int]
    #: Per token whose log-prob is computed.
    head: float

    @classmethod
    def of(cls, model: Any, spec: RouterSpec) -> ForwardCost:
        """The cost of a transformers model, whose parameters may be on the meta device."""
        embedding = model.get_input_embeddings().weight
        head = model.get_output_embeddings().weight
        weights = 0.0
        for name, parameter in model.named_parameters():
            multiplied = parameter.dim() > 1 and not name.endswith("bias")
            if not multiplied or parameter is embedding or parameter is head:
                continue
            used = spec.top_k / spec.experts if ".experts." in name else 1.0
            weights += parameter.numel() * used
        attention = [layer.self_attn for layer in model.model.layers]
        keys, values = head_widths(attention[0])
        return cls(
            token=2 * weights,
            pair=2.0 * model.config.num_attention_heads * (keys + values),
            windows=dict(Counter(getattr(part, "sliding_window", None) for part in attention)),
            head=2.0 * head.numel(),
        )

    def sequence(self, tokens: int) -> float:
        """Operations of the layers for one sequence. Without windows it is ``a T + b T (T + 1)``.

        The output head is left out, because which tokens are scored is not known from lengths.
        """
        pairs = sum(count * _pairs(tokens, window) for window, count in self.windows.items())
        return self.token * tokens + self.pair * pairs


def head_widths(attention: Any) -> tuple[int, int]:
    """Widths of a head's keys and values in an attention module of transformers."""
    keys = getattr(attention, "qk_head_dim", None) or attention.head_dim
    return int(keys), int(getattr(attention, "v_head_dim", None) or keys)


def _pairs(tokens: int, window: int | None) -> float:
    """Number of (query, key) pairs of causal attention over ``tokens`` tokens."""
    if window is None or window >= tokens:
        return tokens * (tokens + 1) / 2
    return window * tokens - window * (window - 1) / 2
