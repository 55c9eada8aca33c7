"""The expert kernels agree, in every router family.

``packed`` is the trainer's default and ``grouped_mm`` that of transformers; ``eager`` runs one
expert after the other. All compute the same float32 products but add them up in another order, so
they agree up to rounding. Log-probs of these models are up to 10 nats and float32 has 24 bits, so
differences around 1e-6 are expected; the tolerances leave a factor of about 10.
"""

from __future__ import annotations

from collections import Counter
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import needs  # noqa: F401

import pytest
import torch
import torch.nn.functional as F
from model_families import (
    EXPERTS,
    TINY,
    TOP_K,
    draw_routes,
    draw_tokens,
    hyperparameters,
    tiny_model,
    write_batch,
)
from test_replay import LENGTHS, replaying, run
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.integrations import moe

from orchestrate_trainer import experts
from orchestrate_trainer.batch import Batch
from orchestrate_trainer.experts import ExpertOrder, packed_experts
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


KERNELS = ("eager", "packed")


def all_kernels(folder: Path, world: Any, names: tuple[str, ...] = KERNELS) -> list[Policy]:
    return [load_policy(folder, ModelOptions(experts=kernel), world) for kernel in names]


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


def test_packed_is_the_default(folders: dict[str, Path], world: Any) -> None:
    policy = load_policy(folders["qwen3_moe"], ModelOptions(), world)
    assert policy.model.config._experts_implementation == "packed"


@families
def test_each_kernel_is_the_one_that_runs(
    family: str, folders: dict[str, Path], world: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []
    for name in ("grouped_mm", "packed"):
        real = moe.ALL_EXPERTS_FUNCTIONS[name]

        def counting(*arguments: Any, name: str = name, real: Any = real) -> Any:
            calls.append(name)
            return real(*arguments)

        monkeypatch.setitem(moe.ALL_EXPERTS_FUNCTIONS, name, counting)
    names = ("eager", "grouped_mm", "packed")
    for policy, name in zip(all_kernels(folders[family], world, names), names, strict=True):
        calls.clear()
        with torch.no_grad(), replaying(policy):
            run(policy, draw_tokens(LENGTHS))
        assert set(calls) == {name} - {"eager"}


@families
@replay
def test_kernels_agree_on_log_probs_and_gradients(
    family: str, replay: bool, folders: dict[str, Path], world: Any
) -> None:
    eager, *others = all_kernels(folders[family], world, ("eager", "grouped_mm", "packed"))
    layers = len(eager.routing.layers)
    routes = draw_routes(sum(LENGTHS), layers, seed=1) if replay else None
    logp, wanted = gradients(eager, routes)
    largest = max(float(gradient.norm()) for gradient in wanted.values())
    for policy in others:
        other, found = gradients(policy, routes)
        torch.testing.assert_close(other, logp, rtol=FORWARD, atol=FORWARD)
        assert wanted.keys() == found.keys()
        for name, gradient in wanted.items():
            # A gradient that is nearly zero is compared with the model's largest.
            size = max(float(gradient.norm()), 1e-3 * largest)
            assert float((found[name] - gradient).norm()) <= GRADIENT * size, name


@families
def test_packed_experts_agree_in_bf16(family: str, folders: dict[str, Path], world: Any) -> None:
    """As close to float32 as transformers' own kernel, and the gradients point the same way."""
    routes = None
    found = {}
    for kernel, compute in (("packed", "f32"), ("packed", "bf16"), ("grouped_mm", "bf16")):
        options = ModelOptions(experts=kernel, compute=compute)
        policy = load_policy(folders[family], options, world)
        if routes is None:
            routes = draw_routes(sum(LENGTHS), len(policy.routing.layers), seed=1)
        found[kernel, compute] = gradients(policy, routes)
    exact, ours, theirs = (logp for logp, _ in found.values())
    assert (ours - exact).norm() <= 1.5 * (theirs - exact).norm()
    flat = [torch.cat([part.flatten() for part in grads.values()]) for _, grads in found.values()]
    assert F.cosine_similarity(flat[1], flat[2], dim=0) >= 0.999


@pytest.mark.parametrize("experts", [1, 3, 200])
def test_experts_are_sorted_stably(experts: int) -> None:
    """Pairs of one expert stay in token order, and every pair finds its place; some experts have
    no token."""
    chosen = torch.randint(experts, (50, 4), generator=torch.Generator().manual_seed(0))
    order = ExpertOrder.of(chosen, experts)
    flat = chosen.flatten()
    wanted = flat.sort(stable=True).indices
    assert torch.equal(order.pairs.long(), wanted)
    assert torch.equal(order.pairs[order.places].long(), torch.arange(200))
    assert torch.equal(order.ends.long(), flat.bincount(minlength=experts).cumsum(0))


class UndefinedForIdle(TorchDispatchMode):
    """A grouped product that writes no gradient of an expert without rows."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.overloadpacket.__name__ == "_grouped_mm" and args[1].dim() == 2:
            idle = args[2].diff(prepend=args[2].new_zeros(1)) == 0
            assert idle.sum() == 1
            result[idle] = torch.nan
        return result


@families
@pytest.mark.parametrize("path", ["one kernel", "undefined for idle experts", "one by one"])
def test_packed_experts_equal_a_plain_sum(
    family: str, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One module against the formula, where one expert has no token, also with a kernel that
    leaves the gradient of such an expert undefined, and without a kernel."""
    undefined = UndefinedForIdle() if path == "undefined for idle experts" else nullcontext()
    if path == "one by one":
        monkeypatch.setattr(experts, "has_grouped_kernel", lambda *_: False)
        monkeypatch.delattr(F, "grouped_mm")
    module = next(m for m in tiny_model(family).modules() if hasattr(m, "gate_up_proj"))
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(11, 16, generator=generator)
    chosen = torch.rand(11, EXPERTS - 1, generator=generator).argsort(-1)[:, :TOP_K]
    weights = torch.rand(11, TOP_K, generator=generator)
    hidden.requires_grad_()
    weights.requires_grad_()
    inputs = [hidden, weights, *module.parameters()]
    results = []
    for function in (plain_experts, packed_experts):
        with undefined:
            output = function(module, hidden, chosen, weights)
            gradients = torch.autograd.grad((output * torch.arange(16)).sum(), inputs)
        results.append([output, *gradients])
    for wanted, found in zip(*results, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-4)
    for parameter, gradient in zip(module.parameters(), results[1][3:], strict=True):
        assert gradient.shape == parameter.shape and (gradient[EXPERTS - 1] == 0).all()


def test_grouped_products_have_a_kernel_in_bf16_on_hopper_and_blackwell() -> None:
    bf16, f32 = torch.bfloat16, torch.float32
    on_cuda = {
        (dtype, major): experts.has_grouped_kernel(dtype, "cuda", (major, 0))
        for dtype in (bf16, f32)
        for major in (7, 8, 9, 10, 11, 12)
    }
    assert {case for case, fast in on_cuda.items() if fast} == {(bf16, 9), (bf16, 10)}
    assert experts.has_grouped_kernel(f32, "cpu", (0, 0))


def plain_experts(module: Any, hidden: Any, chosen: Any, weights: Any) -> torch.Tensor:
    outputs = []
    for token, ids, scales in zip(hidden, chosen.tolist(), weights, strict=True):
        total = torch.zeros_like(token)
        for expert, scale in zip(ids, scales, strict=True):
            up, down = module.gate_up_proj[expert], module.down_proj[expert]
            if not module.is_transposed:
                up, down = up.T, down.T
            inner = token @ up
            inner = inner + module.gate_up_proj_bias[expert] if module.has_bias else inner
            output = module._apply_gate(inner) @ down
            output = output + module.down_proj_bias[expert] if module.has_bias else output
            total = total + scale * output
        outputs.append(total)
    return torch.stack(outputs)


def test_packed_experts_add_nothing_by_index(folders: dict[str, Path], world: Any) -> None:
    """Forward and backward are gathers and products: what adds rows by index is not deterministic
    on a GPU, or sorts the indices once more. A layer that is run again does not sort again."""
    for family in ("qwen3_moe", "gpt_oss"):
        policy = load_policy(folders[family], ModelOptions(), world)
        counts = Counter[str]()

        class Names(TorchDispatchMode):
            def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None):
                counts[func.overloadpacket.__name__] += 1  # noqa: B023
                return func(*args, **(kwargs or {}))

        tokens = draw_tokens(LENGTHS)
        routes = draw_routes(len(tokens), len(policy.routing.layers))
        with replaying(policy, routes), Names():
            run(policy, tokens).sum().backward()
        assert counts["sort"] == len(policy.routing.layers) == 2
        # Routers scatter to distinct experts only, which no order changes.
        assert not {"index_add", "index_add_"} & counts.keys()
        # The rows of the output head are picked by index, once.
        assert counts["index_put"] + counts["index_put_"] + counts["_index_put_impl_"] <= 1, counts


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
    for number, policy in enumerate(all_kernels(folders[family], world)):
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
