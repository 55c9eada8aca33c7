"""The expert kernels ``grouped_mm`` and ``eager`` agree, in every router family.

``grouped_mm`` is the default of transformers, and so of the trainer on CUDA; ``eager`` runs one
expert after the other. Both compute the same float32 products but add them up in another order, so
they agree up to rounding. Log-probs of these models are up to 10 nats and float32 has 24 bits, so
differences around 1e-6 are expected; the tolerances leave a factor of about 10.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import needs  # noqa: F401

import pytest
import torch
from model_families import TINY, draw_routes, draw_tokens, hyperparameters, write_batch
from test_replay import LENGTHS, replaying, run
from transformers.integrations import moe

from orchestrate_trainer.batch import Batch
from orchestrate_trainer.learner import Learner
from orchestrate_trainer.policy import ModelError, ModelOptions, Policy, load_policy
from orchestrate_trainer.settings import Hyperparameters
from orchestrate_trainer.step import apply

#: Log-probs, nats, absolute and relative.
FORWARD = 2e-5
#: Gradients, as the error's norm over the norm of a parameter's gradient.
GRADIENT = 1e-4
#: Metrics of a step, relative; absolute below this size.
METRICS = 1e-4
#: Weights after a step with a learning rate of 1e-3, absolute.
WEIGHTS = 2e-5

families = pytest.mark.parametrize("family", list(TINY))
replay = pytest.mark.parametrize("replay", [True, False], ids=["replay", "own routes"])


def both(folder: Path, world: Any) -> list[Policy]:
    return [load_policy(folder, ModelOptions(experts=kernel), world) for kernel in KERNELS]


KERNELS = ("eager", "grouped_mm")


def gradients(policy: Policy, routes: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Log-probs of a pack, and the gradients of a weighted sum of them."""
    tokens = draw_tokens(LENGTHS)
    weights = torch.linspace(-1, 1, len(tokens) - 1)
    with replaying(policy, routes):
        logp = run(policy, tokens)
        (logp * weights).sum().backward()
    found = {
        name: parameter.grad.full_tensor()
        for name, parameter in policy.named_parameters()
        if parameter.grad is not None
    }
    return logp.detach(), found


def test_grouped_mm_is_the_default(folders: dict[str, Path], world: Any) -> None:
    policy = load_policy(folders["qwen3_moe"], ModelOptions(), world)
    assert policy.model.config._experts_implementation == "grouped_mm"


@families
def test_each_kernel_is_the_one_that_runs(
    family: str, folders: dict[str, Path], world: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []
    real = moe.grouped_mm_experts_forward

    def counting(*arguments: Any, **options: Any) -> Any:
        calls.append(1)
        return real(*arguments, **options)

    monkeypatch.setitem(moe.ALL_EXPERTS_FUNCTIONS, "grouped_mm", counting)
    for policy, expected in zip(both(folders[family], world), (False, True), strict=True):
        calls.clear()
        with torch.no_grad(), replaying(policy):
            run(policy, draw_tokens(LENGTHS))
        assert bool(calls) == expected


@families
@replay
def test_kernels_agree_on_log_probs_and_gradients(
    family: str, replay: bool, folders: dict[str, Path], world: Any
) -> None:
    eager, grouped = both(folders[family], world)
    layers = len(eager.routing.layers)
    routes = draw_routes(sum(LENGTHS), layers, seed=1) if replay else None
    (logp, wanted), (other, found) = (gradients(policy, routes) for policy in (eager, grouped))
    torch.testing.assert_close(other, logp, rtol=FORWARD, atol=FORWARD)
    assert wanted.keys() == found.keys()
    largest = max(float(gradient.norm()) for gradient in wanted.values())
    for name, gradient in wanted.items():
        # A gradient that is nearly zero is compared with the model's largest.
        size = max(float(gradient.norm()), 1e-3 * largest)
        assert float((found[name] - gradient).norm()) <= GRADIENT * size, name


@families
def test_attention_kernels_agree_on_log_probs(
    family: str, folders: dict[str, Path], world: Any
) -> None:
    """Sinks, sliding windows, grouped heads and values of another width come from the families.
    Flex attention has no backward on the CPU."""
    tokens = draw_tokens(LENGTHS)
    policy = load_policy(folders[family], ModelOptions(experts="eager"), world)
    routes = draw_routes(len(tokens), len(policy.routing.layers), seed=1)
    found = []
    for kernel in ("loop", "flex"):
        policy.attention_kernel = kernel
        with torch.no_grad(), replaying(policy, routes):
            found.append(run(policy, tokens))
    torch.testing.assert_close(found[1], found[0], rtol=FORWARD, atol=FORWARD)


def test_attention_kernel_that_cannot_run_is_refused(folders: dict[str, Path], world: Any) -> None:
    with pytest.raises(ModelError, match=r"requires a CUDA device .*; choose another --attention"):
        load_policy(folders["qwen3_moe"], ModelOptions(attention="varlen"), world)


@families
@pytest.mark.parametrize("mode", ["none", "recompute", "rollout", "predictive"])
def test_kernels_agree_on_a_whole_step(
    family: str, mode: str, folders: dict[str, Path], world: Any, tmp_path: Path
) -> None:
    results = []
    # With Adam's usual epsilon, a gradient that is only rounding would move a weight as far as a
    # large one.
    changed: dict[str, Any] = {
        "routing_replay": mode,
        "mini_steps": 2,
        "kl_coefficient": 0.1,
        "learning_rate": 1e-3,
        "adam_eps": 1e-3,
        "predictor_rate": 1.0,
    }
    settings = Hyperparameters.parse(hyperparameters(**changed))
    for number, policy in enumerate(both(folders[family], world)):
        learner = Learner.of(policy, world)
        manifest = write_batch(tmp_path / str(number), policy.shape, (12, 7, 19, 10, 5))

        def reference(kernel: str = KERNELS[number]) -> Policy:
            return load_policy(folders[family], ModelOptions(experts=kernel), world)

        batch = Batch.open(manifest)
        metrics = apply(learner, reference, batch, settings, world, lambda *_: True)
        weights = [p.full_tensor().detach() for p in policy.parameters()]
        results.append((metrics, weights))
    (wanted, weights), (found, others) = results
    agree(wanted, found)
    for one, two in zip(weights, others, strict=True):
        torch.testing.assert_close(two, one, rtol=0, atol=WEIGHTS)


def agree(one: Any, two: Any, name: str = "metrics") -> None:
    """Compares metrics; histograms may differ by one value at the boundary of a bin."""
    if isinstance(one, dict):
        assert one.keys() == two.keys(), name
        for key in one:
            agree(one[key], two[key], f"{name}.{key}")
    elif name.endswith("probability_grid"):
        cells = [{(a, b): count for a, b, count in grid} for grid in (one, two)]
        assert moved(*cells) <= 1, name
    elif "mismatch" in name and name.endswith("histogram"):
        assert moved(dict(enumerate(one)), dict(enumerate(two))) <= 1, name
    elif isinstance(one, list):
        for pair in zip(one, two, strict=True):
            agree(*pair, name)
    else:
        assert two == (one if one is None else pytest.approx(one, rel=METRICS, abs=METRICS)), name


def moved(one: dict[Any, int], two: dict[Any, int]) -> int:
    """How many values were counted in another bin."""
    assert sum(one.values()) == sum(two.values())
    return sum(abs(one.get(key, 0) - two.get(key, 0)) for key in one.keys() | two.keys()) // 2
