"""Weights as an inference server loads them: safetensors in the Hugging Face layout.

The result has the tensor names of the starting model, whatever transformers fuses in memory, and
carries over the tensors that are not trained here (multi-token prediction layers).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers.core_model_loading import revert_weight_conversion

from .policy import Policy, UnusableModel
from .world import World

__all__ = ["tensor_files", "write_weights"]

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"
#: Size of a file at which the next one begins, in bytes.
FILE_BYTES = 4 << 30


def tensor_files(folder: Path) -> dict[str, str]:
    """File of each tensor in a model folder. Raises :class:`UnusableModel` where there is none."""
    index = folder / INDEX
    try:
        if index.exists():
            return dict(json.loads(index.read_text())["weight_map"])
        with safe_open(folder / SINGLE, "pt") as file:
            return dict.fromkeys(file.keys(), SINGLE)
    except (OSError, ValueError, KeyError) as error:
        raise UnusableModel(f"{folder}: no safetensors weights here: {error}") from error


def write_weights(
    policy: Policy, base: Path, target: Path, dtype: torch.dtype, world: World
) -> None:
    """Writes the policy into the folder ``target``, in ``dtype``; all processes call it, the leader
    writes. Raises :class:`UnusableModel` if names differ from those in ``base``."""
    writer = _Writer(target) if world.leads else None
    known = tensor_files(base) if world.leads else {}
    written: set[str] = set()
    for tensors in _layers(policy, dtype, world):
        if writer is not None:
            named = revert_weight_conversion(policy.model, tensors)
            written |= named.keys()
            strange = sorted(named.keys() - known.keys())
            if strange:
                raise UnusableModel(
                    f"this version of transformers would write tensor `{strange[0]}`, which {base} "
                    "does not have: install the versions of trainer/requirements.lock"
                )
            if policy.model.config.tie_word_embeddings and EMBEDDING in named:
                # SGLang builds an output head of its own and looks for its weights, tied or not.
                named |= {HEAD: named[EMBEDDING]}
                written.add(HEAD)
            writer.add(named)
    if writer is not None:
        left = known.keys() - written
        for name in sorted(left):
            with safe_open(base / known[name], "pt") as file:
                writer.add({name: file.get_tensor(name)})
        writer.close()


def _layers(policy: Policy, dtype: torch.dtype, world: World) -> Iterator[dict[str, Tensor]]:
    """Whole tensors of one layer after the other; empty where nothing is written."""
    model = policy.model
    persistent = model.state_dict().keys()
    # Buffers, such as the bias of sigmoid routers, keep their dtype.
    values = list(model.named_parameters())
    values += [(name, b) for name, b in model.named_buffers() if name in persistent]
    layers: dict[str, list[tuple[str, Tensor]]] = {}
    for name, value in values:
        found = re.match(r"model\.layers\.\d+\.", name)
        layers.setdefault(found.group() if found else name, []).append((name, value))
    for members in layers.values():
        tensors = {}
        for name, value in members:
            value = value.detach()
            if hasattr(value, "full_tensor"):
                value = value.to(world.device).full_tensor().to(dtype)
            if world.leads:
                tensors[name] = value.cpu()
        yield tensors


class _Writer:
    """Files of at most about :data:`FILE_BYTES`, and their index."""

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
        weights = {}
        for number, (name, members) in enumerate(zip(names, self._files)):
            (self._folder / _part(number)).rename(self._folder / name)
            weights |= dict.fromkeys(members, name)
        index = {"metadata": {"total_size": self._total}, "weight_map": weights}
        (self._folder / INDEX).write_text(json.dumps(index, indent=1))

    def _flush(self) -> None:
        # Slices of one fused tensor share its memory; a file holds each by itself.
        held = {name: tensor.clone() for name, tensor in self._held.items()}
        save_file(held, self._folder / _part(len(self._files)), metadata={"format": "pt"})
        self._files.append(list(held))
        self._held, self._bytes = {}, 0


def _part(number: int) -> str:
    return f"part-{number:05}.safetensors"
