"""Levels of activation checkpointing differ in what backward computes again and in nothing else."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import needs  # noqa: F401

import pytest

import torch  # isort: skip
from model_families import TINY, draw_routes, draw_tokens
from test_kernels import gradients
from test_replay import LENGTHS, replaying, run
from torch.utils._python_dispatch import TorchDispatchMode

from orchestrate_trainer.checkpointing import LEVELS
from orchestrate_trainer.policy import ModelOptions, Policy, load_policy


def with_level(folder: Path, world: Any, level: Any, compute: Any = "f32") -> Policy:
    options = ModelOptions(activation_checkpointing=level, compute=compute)
    return load_policy(folder, options, world)


@pytest.mark.parametrize("family", list(TINY))
@pytest.mark.parametrize("compute", ["f32", "bf16"])
def test_levels_agree_to_the_bit(
    family: str, compute: str, folders: dict[str, Path], world: Any
) -> None:
    found = []
    for level in LEVELS:
        policy = with_level(folders[family], world, level, compute)
        routes = draw_routes(sum(LENGTHS), len(policy.routing.layers), seed=1)
        found.append(gradients(policy, routes))
    (logp, wanted), *others = found
    for other, gradient in others:
        assert torch.equal(other, logp) and wanted.keys() == gradient.keys()
        for name in wanted:
            assert torch.equal(gradient[name], wanted[name]), name


class Operators(TorchDispatchMode):
    """Counts operators by name, and all attention under one."""

    def __init__(self) -> None:
        super().__init__()
        self.counts = Counter[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if "attention" in name and "backward" not in name:
            name = "attention"
        self.counts[name] += 1
        return func(*args, **(kwargs or {}))


def test_levels_compute_again_what_they_say(folders: dict[str, Path], world: Any) -> None:
    counts = {}
    for level in LEVELS:
        policy = with_level(folders["qwen3_moe"], world, level)
        layers = len(policy.routing.layers)
        tokens = draw_tokens(LENGTHS)
        with replaying(policy, draw_routes(len(tokens), layers)), Operators() as counter:
            run(policy, tokens).sum().backward()
        counts[level] = counter.counts
    none, selective, full = (counts[level] for level in LEVELS)
    for name, again in (("mm", 4 + 1), ("_grouped_mm", 1), ("attention", len(LENGTHS))):
        assert selective[name] == none[name], name
        # Four projections, the router, and the first of the experts' two products.
        assert full[name] == none[name] + again * layers, name
    assert none["rsqrt"] < selective["rsqrt"] == full["rsqrt"]
    # Experts are neither chosen nor sorted again.
    assert none["sort"] == selective["sort"] == full["sort"] == layers


def test_full_keeps_far_less_than_none(folders: dict[str, Path], world: Any) -> None:
    kept = {}
    for level in ("none", "full"):
        policy = with_level(folders["qwen3_moe"], world, level)
        tokens = draw_tokens(LENGTHS)
        routes = draw_routes(len(tokens), len(policy.routing.layers))
        storages: dict[int, int] = {}

        def note(tensor: torch.Tensor, storages: dict[int, int] = storages) -> torch.Tensor:
            storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        with replaying(policy, routes), torch.autograd.graph.saved_tensors_hooks(note, lambda t: t):
            logp = run(policy, tokens)
        kept[level] = sum(storages.values())
        del logp
    assert kept["none"] > 2 * kept["full"]


def test_an_unknown_level_is_refused(folders: dict[str, Path], world: Any) -> None:
    with pytest.raises(ValueError, match="choose one of none, selective, full"):
        with_level(folders["qwen3_moe"], world, "some")
