"""Routing replay in models of every router family, with both expert kernels.

``eager`` runs one expert after the other. ``packed``, the default, sorts tokens by expert and
multiplies them in groups, so it sums in another order.
"""

from __future__ import annotations

from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import needs  # noqa: F401

import pytest

import torch  # isort: skip
from model_families import EXPERTS, TINY, TOP_K, draw_routes, draw_tokens
from transformers import AutoModelForCausalLM

from orchestrate_trainer.checkpointing import LEVELS
from orchestrate_trainer.policy import ModelOptions, Policy, load_policy

LENGTHS = (9, 14, 5)

pytestmark = pytest.mark.parametrize("family", list(TINY))


def patched(spec: Any, select: Any) -> Any:
    """A router spec with another function for the choice."""
    return SimpleNamespace(select=select, weights=spec.weights, kind=spec.kind)


def flipping(spec: Any, calls: list[int], layers: int) -> Any:
    """A choice that prefers the lowest scores once every layer has chosen; counts its calls."""

    def select(logits: Any, bias: Any = None) -> torch.Tensor:
        calls.append(1)
        chosen: torch.Tensor = spec.select(logits if len(calls) <= layers else -logits, bias)
        return chosen

    return select


def run(policy: Policy, tokens: torch.Tensor, lengths: tuple[int, ...] = LENGTHS) -> torch.Tensor:
    """Log-probs of every token of the pack but the first."""
    positions = torch.cat([torch.arange(n) for n in lengths])
    rows = torch.arange(len(tokens) - 1)
    logp: torch.Tensor = policy(tokens[None], positions[None], lengths, rows, tokens[1:], 1.0)[0]
    return logp


@contextmanager
def replaying(policy: Policy, routes: Any = None) -> Any:
    """Replays ``routes``, or lets the routers choose."""
    if routes is None:
        with policy.routing.micro_batch():
            yield
        return
    rows = torch.as_tensor(routes)
    with policy.routing.micro_batch(rows):
        yield


@pytest.fixture
def policy(family: str, kernel: str, folders: dict[str, Path], world: Any) -> Policy:
    return load_policy(folders[family], ModelOptions(experts=kernel), world)


def test_replaying_own_routes_changes_no_bit(policy: Policy) -> None:
    tokens = draw_tokens(LENGTHS)
    with replaying(policy):
        plain = run(policy, tokens)
        plain.sum().backward()
        own = policy.routing.executed()
    gradients = [p.grad.full_tensor().clone() for p in policy.parameters()]
    policy.zero_grad()
    with replaying(policy, own):
        replayed = run(policy, tokens)
        replayed.sum().backward()
        assert torch.equal(policy.routing.executed(), own)
    assert torch.equal(plain, replayed)
    for before, parameter in zip(gradients, policy.parameters(), strict=True):
        assert torch.equal(before, parameter.grad.full_tensor())


def test_policy_without_replay_equals_the_transformers_model(
    policy: Policy, family: str, folders: dict[str, Path]
) -> None:
    tokens = draw_tokens(LENGTHS)
    plain = AutoModelForCausalLM.from_pretrained(
        folders[family], dtype=torch.float32, attn_implementation="eager"
    ).eval()
    with torch.no_grad(), replaying(policy):
        found = run(policy, tokens)
        each = [plain(input_ids=part[None]).logits[0] for part in tokens.split(LENGTHS)]
    wanted = torch.cat(each).log_softmax(-1)[:-1].gather(-1, tokens[1:, None]).squeeze(-1)
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)


def test_recorded_routes_are_executed(policy: Policy) -> None:
    tokens = draw_tokens(LENGTHS)
    routes = draw_routes(len(tokens), len(policy.routing.layers), seed=1)
    with torch.no_grad():
        with replaying(policy):
            plain = run(policy, tokens)
        with replaying(policy, routes):
            other = run(policy, tokens)
            assert policy.routing.executed().tolist() == routes.tolist()
        # A log-prob depends only on the routes of earlier tokens of the same sequence.
        changed = routes.copy()
        changed[LENGTHS[0]] = changed[LENGTHS[0], :, ::-1]
        changed[12] = (changed[12] + 1) % EXPERTS
        with replaying(policy, changed):
            third = run(policy, tokens)
    assert not torch.allclose(plain, other, atol=1e-3)
    torch.testing.assert_close(third[:12], other[:12], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(third[23:], other[23:], rtol=1e-5, atol=1e-5)
    assert not torch.allclose(third[12:22], other[12:22], atol=1e-4)


def test_placeholder_rows_use_the_routers_own_choice(policy: Policy) -> None:
    tokens = draw_tokens(LENGTHS)
    routes = torch.as_tensor(draw_routes(len(tokens), len(policy.routing.layers)))
    valid = torch.arange(len(tokens)) % 3 > 0
    free = (~valid).nonzero().squeeze(-1)
    with torch.no_grad(), policy.routing.micro_batch(routes, free, compare=True):
        run(policy, tokens)
        executed, own = policy.routing.executed(), policy.routing.own()
    assert torch.equal(executed[valid], routes[valid])
    assert torch.equal(executed[~valid].short(), own[~valid])
    with torch.no_grad(), policy.routing.micro_batch(routes, free):
        run(policy, tokens)
        assert torch.equal(policy.routing.executed(), executed)
        with pytest.raises(RuntimeError, match="did not record"):
            policy.routing.own()


def test_gradients_reach_the_router_rows_of_replayed_experts(policy: Policy, family: str) -> None:
    """Every token runs experts 0 and 1. The other rows of the router get no gradient in families
    that renormalise, and get one in the others."""
    tokens = draw_tokens(LENGTHS)
    layers = len(policy.routing.layers)
    routes = torch.arange(TOP_K).repeat(len(tokens), layers, 1)
    with replaying(policy, routes):
        run(policy, tokens).sum().backward()
    reaches_all = family in ("qwen2_moe", "olmoe", "deepseek_v2")
    for router in policy.routing.parameters():
        rows = router.grad.full_tensor().flatten(1) if router.dim() > 1 else None
        if rows is None:
            continue
        touched = rows.abs().sum(-1) > 0
        assert touched[:TOP_K].all()
        assert touched[TOP_K:].all() if reaches_all else not touched[TOP_K:].any()


def test_checkpointed_forward_executes_the_same_experts_again(
    family: str, kernel: str, folders: dict[str, Path], world: Any
) -> None:
    """With activation checkpointing layers run twice. Even if the routers would choose other
    experts the second time, the gradients equal those of a forward that kept its activations."""
    tokens = draw_tokens(LENGTHS)
    gradients, flipped = [], []
    for level in LEVELS:
        options = ModelOptions(experts=kernel, activation_checkpointing=level)
        policy = load_policy(folders[family], options, world)
        routers = policy.routing._routers
        layers = len(routers)
        calls: list[int] = []
        for router in routers:
            router.spec = patched(router.spec, flipping(router.spec, calls, layers))
        with replaying(policy):
            run(policy, tokens).sum().backward()
        flipped.append(len(calls))
        gradients.append([p.grad.full_tensor() for p in policy.parameters()])
    assert flipped == [layers] * len(LEVELS), "experts were chosen again during backward"
    for kept, *others in zip(*gradients, strict=True):
        for again in others:
            torch.testing.assert_close(kept, again, rtol=1e-4, atol=1e-5)


def test_bf16_model_has_f32_routers(
    family: str, kernel: str, folders: dict[str, Path], world: Any
) -> None:
    policy = load_policy(folders[family], ModelOptions(compute="bf16", experts=kernel), world)
    seen = []
    router = policy.routing._routers[0]
    weights = router.spec.weights
    spec = patched(router.spec, router.spec.select)

    def recording(logits: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        seen.append(logits.dtype)
        return weights(logits, chosen)

    spec.weights = recording
    router.spec = spec
    tokens = draw_tokens(LENGTHS)
    with replaying(policy):
        logp = run(policy, tokens)
        logp.sum().backward()
    assert set(seen) == {torch.float32} and logp.dtype == torch.float32
    assert all(p.dtype == p.grad.dtype == torch.float32 for p in policy.parameters())
    exact = load_policy(folders[family], ModelOptions(experts="eager"), world)
    with torch.no_grad(), replaying(exact):
        wanted = run(exact, tokens)
    assert 0 < (logp - wanted).abs().mean() < 0.3
