"""Writes weights in the form that inference servers load: safetensors, Hugging Face layout.

The files have the tensor names of the starting model, even where transformers fuses tensors in
memory. Tensors that are not trained (multi-token prediction layers) are copied.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers.core_model_loading import revert_weight_conversion

from .policy import ModelError, Policy
from .world import World

__all__ = ["tensor_files", "write_weights"]

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"
#: Largest size of a weights file, in bytes; a larger tensor gets a file to itself.
FILE_BYTES = 4 << 30


def tensor_files(folder: Path) -> dict[str, str]:
    """File name of each tensor in a model folder.

    Raises :class:`ModelError` if it has no weights.
    """
    index = folder / INDEX
    try:
        if index.exists():
            return dict(json.loads(index.read_text())["weight_map"])
        with safe_open(folder / SINGLE, "pt") as file:
            return dict.fromkeys(file.keys(), SINGLE)
    except (OSError, ValueError, KeyError) as error:
        raise ModelError(f"{folder}: no safetensors weights found: {error}") from error


def write_weights(
    policy: Policy, base: Path, target: Path, dtype: torch.dtype, world: World
) -> None:
    """Writes the policy's weights into the folder ``target`` in ``dtype``.

    All processes must call this; the leader writes. Raises :class:`ModelError` if the tensor names
    differ from those in ``base``.
    """
    writer = _Writer(target) if world.is_leader else None
    known = tensor_files(base) if world.is_leader else {}
    written: set[str] = set()
    for tensors in _layers(policy, dtype, world):
        if writer is not None:
            named = revert_weight_conversion(policy.model, tensors)
            written |= named.keys()
            unknown = sorted(named.keys() - known.keys())
            if unknown:
                raise ModelError(
                    f"this version of transformers would write tensor `{unknown[0]}`, which {base} "
                    "does not have; install the versions in trainer/requirements.lock"
                )
            if policy.model.config.tie_word_embeddings and EMBEDDING in named:
                # SGLang builds a separate output head and needs its weights even if they are tied.
                named |= {HEAD: named[EMBEDDING]}
                written.add(HEAD)
            writer.add(named)
    if writer is not None:
        for name in sorted(known.keys() - written):
            with safe_open(base / known[name], "pt") as file:
                writer.add({name: file.get_tensor(name)})
        writer.close()


def _layers(policy: Policy, dtype: torch.dtype, world: World) -> Iterator[dict[str, Tensor]]:
    """Whole tensors of one layer after the other; empty in all processes but the leader."""
    model = policy.model
    persistent = model.state_dict().keys()
    # Buffers, such as the bias of sigmoid routers, keep their dtype.
    values: list[tuple[str, Any]] = list(model.named_parameters())
    values += [(name, b) for name, b in model.named_buffers() if name in persistent]
    layers: dict[str, list[tuple[str, Any]]] = {}
    for name, value in values:
        found = re.match(r"model\.layers\.\d+\.", name)
        layers.setdefault(found.group() if found else name, []).append((name, value))
    for members in layers.values():
        tensors = {}
        for name, value in members:
            value = value.detach()
            if hasattr(value, "full_tensor"):
                value = value.to(world.device).full_tensor().to(dtype)
            if world.is_leader:
                tensors[name] = value.cpu()
        yield tensors


class _Writer:
    """Writes files of at most about :data:`FILE_BYTES`, and their index."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._held: dict[str, Tensor] = {}
        self._files: list[list[str]] = []
        self._bytes = self._total = 0

    def add(self, tensors: dict[str, Tensor]) -> None:
        for name, tensor in tensors.items():
            size = tensor.numel() * tensor.element_size()
            if self._held and self._bytes + size > FILE_BYTES:
                self._flush()
            self._held[name] = tensor.contiguous()
            self._bytes += size
            self._total += size

    def close(self) -> None:
        self._flush()
        count = len(self._files)
        if count == 1:
            (self._folder / _part(0)).rename(self._folder / SINGLE)
            return
        names = [f"model-{number + 1:05}-of-{count:05}.safetensors" for number in range(count)]
        weights: dict[str, str] = {}
        for number, (name, members) in enumerate(zip(names, self._files, strict=True)):
            (self._folder / _part(number)).rename(self._folder / name)
            weights |= dict.fromkeys(members, name)
        index = {"metadata": {"total_size": self._total}, "weight_map": weights}
        (self._folder / INDEX).write_text(json.dumps(index, indent=1))

    def _flush(self) -> None:
        # Slices of a fused tensor share its memory, which safetensors refuses to write.
        held = {name: tensor.clone() for name, tensor in self._held.items()}
        save_file(held, self._folder / _part(len(self._files)), metadata={"format": "pt"})
        self._files.append(list(held))
        self._held, self._bytes = {}, 0


def _part(number: int) -> str:
    return f"part-{number:05}.safetensors"
