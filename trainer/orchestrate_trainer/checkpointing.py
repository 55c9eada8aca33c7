"""Activation checkpointing: what of a layer's forward runs again during backward.

* ``none`` keeps all activations.
* ``selective`` keeps the results of matrix products and attention, which take most of the time, and
  runs the rest again: norms, rotary embedding, activation functions, copies of rows.
* ``full`` keeps a layer's input only.

The kept results do not depend on the level, so neither do losses and gradients.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

__all__ = ["LEVELS", "enable"]

#: Levels, the one that needs the most memory first.
LEVELS = ("none", "selective", "full")
#: Operators whose results ``selective`` keeps, by name.
KEPT = {
    "mm", "addmm", "bmm", "_varlen_attn", "flex_attention",
    "_scaled_dot_product_flash_attention", "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_efficient_attention", "_scaled_dot_product_cudnn_attention",
}  # fmt: skip


def enable(model: Any, level: str) -> None:
    """Sets the level of a transformers model, one of :data:`LEVELS`."""
    if level not in LEVELS:
        raise ValueError(f"unknown level {level!r}; choose one of {', '.join(LEVELS)}")
    if level == "none":
        return
    options: dict[str, Any] = {"use_reentrant": False}
    if level == "selective":
        options["context_fn"] = lambda: create_selective_checkpoint_contexts(_policy())
    model.gradient_checkpointing_enable(options)


def _policy() -> Callable[..., CheckpointPolicy]:
    """Decides for each operator of one layer whether its result is kept."""
    products = Counter[bool]()

    def decide(context: Any, operator: Any, *_: Any, **__: Any) -> CheckpointPolicy:
        name = getattr(operator, "overloadpacket", operator).__name__
        if name == "_grouped_mm":
            # A layer has two. Backward needs no result of the second, and does not run it again.
            products[context.is_recompute] += 1
            kept = products[context.is_recompute] == 1
        else:
            kept = name in KEPT
        return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE

    return decide
