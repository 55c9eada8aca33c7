"""Compiles decoder layers in place with ``torch.compile``.

Two calls of a layer stay outside: attention, which is one kernel for a pack, and the router, whose
choice depends on the micro-batch's replay. What is between them (norms, projections, rotary
embedding, experts) does not depend on a pack's sequences, but on its number of tokens only, which
is dynamic: no pack compiles anything again, except the first one of a single token. Layers of one
kind share what is compiled.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from .world import World

__all__ = ["compile_layers", "uncompiled"]

Function = TypeVar("Function", bound=Callable[..., Any])

log = logging.getLogger("orchestrate_trainer")


def uncompiled(function: Function) -> Function:
    """``function``, left out of compiled layers that call it."""
    left_out: Function = torch.compiler.disable(function)
    return left_out


def compile_layers(
    model: Any, trial: Callable[[], None], world: World, backend: str = "inductor"
) -> bool:
    """Compiles the layers of a transformers model and runs ``trial``.

    ``trial`` runs forward and backward, so that everything is compiled before the first step. If it
    fails in any process, a warning names the reason, and the layers are as before in all of them.
    Returns whether the layers are compiled.
    """
    problem = None
    for layer in model.model.layers:
        layer.forward = torch.compile(layer.forward, dynamic=True, backend=backend)
    try:
        trial()
    except Exception as error:  # Compilers raise errors of every kind.
        problem = _reason(error)
    problems = [found for found in world.gather(problem) if found is not None]
    if not problems:
        return True
    for layer in model.model.layers:
        del layer.forward
    if world.is_leader:
        log.warning("layers are not compiled, which is slower: %s", problems[0])
    return False


def _reason(error: Exception) -> str:
    """Kind of an error and the first paragraph of its message, in one line."""
    paragraph = str(error).strip().partition("\n\n")[0]
    return f"{type(error).__name__}: {' '.join(paragraph.split())}"
