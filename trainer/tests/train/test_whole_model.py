"""A whole Qwen3-MoE against worked numbers: forward, replay, mismatch, loss and gradients."""

from __future__ import annotations

from typing import Any

import needs  # noqa: F401

import pytest

import torch  # isort: skip
from golden_vectors import REFERENCE, vectors
from model_families import tiny_model
from test_replay import replaying, run

from orchestrate_trainer.measures import extreme, k3
from orchestrate_trainer.policy import ModelOptions, load_policy
from orchestrate_trainer.replay import Routing
from orchestrate_trainer.routers import UnknownRouterError


def test_dense_model_is_refused() -> None:
    model = tiny_model("mixtral")
    del model.model.layers
    with pytest.raises(UnknownRouterError, match="no supported router"):
        Routing(model)


def test_worked_numbers_of_a_whole_model(world: Any) -> None:
    cases = {case["name"]: case for case in vectors("whole_model")["cases"]}
    policy = load_policy(REFERENCE / "vectors" / "whole_model", ModelOptions(), world)
    own, engine, replay, step = (
        cases[name]
        for name in (
            "forward_own_routing",
            "inference_engine",
            "training_engine_with_replay",
            "policy_gradient_step",
        )
    )
    tokens = torch.tensor(own["inputs"]["input_ids"])
    lengths = (len(tokens),)
    sampler = torch.tensor(engine["expected"]["token_logprobs"])
    routes = torch.tensor(replay["inputs"]["idx_infer"])
    close: dict[str, Any] = {"rtol": 1e-3, "atol": 5e-4}
    with torch.no_grad():
        with replaying(policy):
            plain = run(policy, tokens, lengths)
            assert policy.routing.executed().tolist() == own["expected"]["idx_own"]
        with replaying(policy, routes):
            replayed = run(policy, tokens, lengths)
    torch.testing.assert_close(plain, torch.tensor(own["expected"]["token_logprobs"]), **close)
    expected = replay["expected"]
    torch.testing.assert_close(replayed, torch.tensor(expected["token_logprobs"]), **close)
    answer = slice(replay["inputs"]["prompt_len"] - 1, None)
    for logp, name in ((plain, "no_replay"), (replayed, "replay")):
        found = k3(logp[answer], sampler[answer]).mean()
        assert found == pytest.approx(expected[f"kl_k3_{name}"], rel=1e-3)
        share = extreme(logp[answer], sampler[answer], 2.0).double().mean()
        assert share == pytest.approx(expected[f"F_2_{name}"])
    # Replay must lower the mismatch; rows moved by one position must not.
    with torch.no_grad(), replaying(policy, routes.roll(1, 0)):
        shifted = run(policy, tokens, lengths)
    difference = [
        (logp[answer] - sampler[answer]).abs().mean() for logp in (plain, replayed, shifted)
    ]
    assert difference[1] < difference[0] < difference[2]

    inputs, expected = step["inputs"], step["expected"]
    with replaying(policy, routes):
        logp = run(policy, tokens, lengths)[answer]
        ratio = (logp - torch.tensor(inputs["logp_old"])[answer]).exp()
        bounded = ratio.clamp(1 - inputs["eps_low"], 1 + inputs["eps_high"])
        loss = -(torch.minimum(ratio, bounded) * inputs["advantage"]).mean()
        loss.backward()
    assert loss.item() == pytest.approx(expected["loss"], rel=1e-3)
    norm = torch.nn.utils.clip_grad_norm_(policy.parameters(), 1e9).full_tensor()
    assert norm.item() == pytest.approx(expected["grad_norm_all"], rel=1e-3)
    gradients = {
        name.removeprefix("model."): parameter.grad.full_tensor()
        for name, parameter in policy.named_parameters()
    }
    wanted = {name: torch.tensor(values) for name, values in expected["grads"].items()}
    for layer in range(routes.shape[1]):
        fuse_experts(
            wanted,
            f"model.layers.{layer}.mlp.experts.",
            len(wanted["model.layers.0.mlp.gate.weight"]),
        )
    assert gradients.keys() == wanted.keys()
    for name, values in wanted.items():
        torch.testing.assert_close(gradients[name], values, rtol=2e-3, atol=1e-3)


def fuse_experts(tensors: dict[str, torch.Tensor], at: str, experts: int) -> None:
    """Stacks the experts' tensors of a checkpoint as transformers holds them."""
    parts = {
        part: torch.stack([tensors.pop(f"{at}{e}.{part}_proj.weight") for e in range(experts)])
        for part in ("gate", "up", "down")
    }
    tensors[f"{at}gate_up_proj"] = torch.cat([parts["gate"], parts["up"]], dim=1)
    tensors[f"{at}down_proj"] = parts["down"]
