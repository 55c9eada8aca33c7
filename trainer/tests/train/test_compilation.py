"""Compiled layers agree with plain ones, and no pack compiles anything again.

The backend is ``aot_eager``, which captures graphs of forward and backward as ``inductor`` does but
generates no code, which would take minutes.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import needs  # noqa: F401

import pytest

import torch  # isort: skip
from model_families import draw_routes, draw_tokens
from test_replay import replaying, run
from torch._dynamo.utils import counters

from orchestrate_trainer import policy as policies
from orchestrate_trainer.compilation import compile_layers
from orchestrate_trainer.policy import ModelError, ModelOptions, Policy, load_policy, try_pack

PACKS = ((9, 14, 5), (3, 4), (20, 1), (17,))
#: Relative to the norm of log-probs or of a parameter's gradient.
TOLERANCE = 1e-5


def results(policy: Policy, lengths: tuple[int, ...]) -> list[torch.Tensor]:
    """Log-probs without and with gradients, and the gradients."""
    tokens = draw_tokens(lengths)
    routes = draw_routes(len(tokens), len(policy.routing.layers), seed=1)
    with torch.no_grad(), replaying(policy, routes):
        first = run(policy, tokens, lengths)
    with replaying(policy, routes):
        second = run(policy, tokens, lengths)
        second.sum().backward()
    gradients = [parameter.grad.full_tensor() for parameter in policy.parameters()]
    policy.zero_grad()
    return [first, second.detach(), *gradients]


def test_compiled_layers_agree_and_no_pack_compiles_again(
    folders: dict[str, Path], world: Any
) -> None:
    torch._dynamo.reset()
    counters.clear()
    plain = load_policy(folders["qwen3_moe"], ModelOptions(), world)
    compiled = load_policy(folders["qwen3_moe"], ModelOptions(), world)
    assert compile_layers(
        compiled.model, lambda: try_pack(compiled, world), world, backend="aot_eager"
    )
    graphs = counters["stats"]["unique_graphs"]
    assert graphs > 0
    for lengths in PACKS:
        for wanted, found in zip(results(plain, lengths), results(compiled, lengths), strict=True):
            assert float((found - wanted).norm()) <= TOLERANCE * float(wanted.norm())
    assert counters["stats"]["unique_graphs"] == graphs


def test_levels_that_compiled_layers_cannot_keep_are_refused(
    folders: dict[str, Path], world: Any
) -> None:
    options = ModelOptions(compile=True, activation_checkpointing="selective")
    with pytest.raises(ModelError, match="choose none or full"):
        load_policy(folders["qwen3_moe"], options, world)


def test_layers_that_cannot_be_compiled_run_as_before(
    folders: dict[str, Path], world: Any, monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    def failing(*_: object) -> None:
        raise RuntimeError("no C++ compiler")

    def compile_failing(model: Any, trial: Any, world: Any) -> bool:
        return compile_layers(model, trial, world, backend=failing)

    torch._dynamo.reset()
    monkeypatch.setattr(policies, "compile_layers", compile_failing)
    plain = load_policy(folders["qwen3_moe"], ModelOptions(), world)
    with caplog.at_level(logging.WARNING, "orchestrate_trainer"):
        policy = load_policy(folders["qwen3_moe"], ModelOptions(compile=True), world)
    (record,) = [r for r in caplog.records if r.name == "orchestrate_trainer"]
    assert "not compiled" in record.message and "no C++ compiler" in record.message
    assert all(map(torch.equal, results(plain, PACKS[0]), results(policy, PACKS[0])))
