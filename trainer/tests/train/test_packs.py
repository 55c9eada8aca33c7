"""Packs are balanced by cost, keep their limit, and change no result beyond rounding."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import needs  # noqa: F401

import pytest

import torch  # isort: skip
from model_families import TINY, draw_tokens, hyperparameters, write_batch
from test_replay import replaying, run
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from orchestrate_trainer.batch import Batch
from orchestrate_trainer.cost import ForwardCost
from orchestrate_trainer.data import distribute
from orchestrate_trainer.learner import Learner
from orchestrate_trainer.packs import lockstep_cost, plan_packs
from orchestrate_trainer.policy import ModelOptions, load_policy
from orchestrate_trainer.settings import Hyperparameters
from orchestrate_trainer.step import apply

#: Qwen3-30B-A3B: 56.9 million weights per token and layer, 32 heads of 128 values.
QWEN3_30B = ForwardCost(2 * 48 * 56_885_248.0, 2 * 32 * 256.0, {None: 48}, 2 * 2048 * 151_936.0)
RANKS, BUDGET = 8, 16_384
#: Forward, forward again, and a backward of twice a forward, at 400 TFLOP/s per rank.
SECONDS = 4 / 400e12


def episodes(mean: float, count: int = 128, seed: int = 0) -> list[int]:
    """Lengths of log-normal episodes (σ = 0.6) of at most 65,536 tokens."""
    draw = random.Random(seed)
    lengths = [draw.lognormvariate(0.0, 0.6) for _ in range(count)]
    scale = mean * count / sum(lengths)
    return [min(65_536, max(64, int(length * scale))) for length in lengths]


def in_index_order(lengths: list[int], ranks: int, budget: int) -> list[list[list[int]]]:
    """Packs balanced by tokens and filled in the batch's order."""
    plan = []
    for own in distribute(lengths, ranks):
        packs: list[list[int]] = []
        held = budget
        for number in own:
            if held + lengths[number] > budget:
                packs.append([])
                held = 0
            packs[-1].append(number)
            held += lengths[number]
        plan.append(packs)
    steps = max(map(len, plan))
    return [packs + [[]] * (steps - len(packs)) for packs in plan]


def checked(lengths: list[int], ranks: int, budget: int) -> list[list[list[int]]]:
    """A plan that has every sequence once, within the limit."""
    costs = [QWEN3_30B.sequence(length) for length in lengths]
    plan = plan_packs(lengths, costs, ranks, budget)
    assert len(plan) == ranks and len({len(packs) for packs in plan}) == 1
    numbers = [number for packs in plan for pack in packs for number in pack]
    assert sorted(numbers) == list(range(len(lengths)))
    for pack in (pack for packs in plan for pack in packs):
        assert len(pack) <= 1 or sum(lengths[number] for number in pack) <= budget
        assert pack == sorted(pack)
    assert plan == plan_packs(list(lengths), list(costs), ranks, budget)
    return plan


@pytest.mark.parametrize("mean", [12_000, 20_000, 28_000])
def test_lockstep_time_of_log_normal_episodes(mean: int) -> None:
    lengths = episodes(mean)
    costs = [QWEN3_30B.sequence(length) for length in lengths]
    before = in_index_order(lengths, RANKS, BUDGET)
    after = checked(lengths, RANKS, BUDGET)
    old, new = lockstep_cost(before, costs), lockstep_cost(after, costs)
    ideal = sum(costs) / RANKS
    report = f"{mean}: {old * SECONDS:.1f} s, {new * SECONDS:.1f} s, ideal {ideal * SECONDS:.1f} s"
    print(report)
    assert new <= 1.3 * ideal and old >= 1.4 * new, report
    assert len(after[0]) <= len(before[0])


@pytest.mark.parametrize(
    ("lengths", "ranks"),
    [([5], 4), ([5, 5, 5], 2), ([30, 1, 1, 1], 2), ([10] * 7, 3), ([20, 20, 20, 20], 1)],
)
def test_small_plans_are_complete(lengths: list[int], ranks: int) -> None:
    checked(lengths, ranks, 20)


def test_long_sequences_run_at_the_same_time() -> None:
    # In the batch's order each rank would wait for the other's long sequence.
    plan = checked([100, 10, 10, 100, 10, 10], 2, 100)
    assert [sorted(map(len, step)) for step in zip(*plan, strict=True)] == [[1, 1], [2, 2]]
    assert {plan[0][0][0], plan[1][0][0]} == {0, 3}


@pytest.mark.parametrize("family", list(TINY))
def test_cost_equals_the_operations_that_run(
    family: str, folders: dict[str, Path], world: Any
) -> None:
    """Every matrix product is counted; PyTorch counts attention without its causal mask."""
    tokens = 12
    policy = load_policy(folders[family], ModelOptions(experts="eager"), world)
    with (
        torch.no_grad(),
        replaying(policy),
        sdpa_kernel(SDPBackend.MATH),
        FlopCounterMode(display=False) as counter,
    ):
        run(policy, draw_tokens((tokens,)), (tokens,))
    cost = policy.cost
    layers = sum(cost.windows.values())
    assert layers == policy.shape["hidden_layers"]
    attention = cost.pair * tokens**2 * layers
    # The loop widens values to the width of keys.
    if family in ("deepseek_v2", "deepseek_v3"):
        config = json.loads((folders[family] / "config.json").read_text())
        keys = config["qk_nope_head_dim"] + config["qk_rope_head_dim"]
        assert keys > config["v_head_dim"]
        attention *= 2 * keys / (keys + config["v_head_dim"])
    if family == "gpt_oss":
        assert cost.windows == {5: 1, None: 1}
        # For the sinks the loop adds a token, and 8 dimensions to queries and keys.
        attention = 2.0 * 4 * (16 + 16) * (tokens + 1) ** 2 * layers
    wanted = cost.token * tokens + cost.head * (tokens - 1)
    # The angles of the positions are a product, too.
    found = counter.get_total_flops() - attention
    assert wanted <= found <= wanted + 2 * tokens * 8


def test_the_order_of_packs_changes_only_rounding(
    folders: dict[str, Path], world: Any, tmp_path: Path
) -> None:
    """A step in balanced packs equals one with a pack for each sequence, in weights and metrics."""
    lengths = (12, 7, 19, 10, 5, 23, 3, 8, 16)
    (wanted, weights), (found, others) = (
        one_step(folders["qwen3_moe"], world, tmp_path / str(budget), lengths, budget)
        for budget in (1, 40)
    )
    for name in ("loss", "grad_norm", "entropy", "clip_fraction"):
        assert found[name] == pytest.approx(wanted[name], rel=1e-5, abs=1e-5), name
    assert found["mismatch"]["kl_k3"] == pytest.approx(wanted["mismatch"]["kl_k3"], rel=1e-5)
    for one, two in zip(weights, others, strict=True):
        torch.testing.assert_close(two, one, rtol=1e-5, atol=1e-5)


def one_step(
    model: Path, world: Any, batch: Path, lengths: tuple[int, ...], budget: int
) -> tuple[dict[str, Any], list[torch.Tensor]]:
    """Metrics and weights after a step in packs of at most ``budget`` tokens."""
    policy = load_policy(model, ModelOptions(experts="eager"), world)
    # With Adam's usual epsilon, a gradient that is only rounding would move a weight as far as a
    # large one.
    given = hyperparameters(mini_steps=2, micro_batch_tokens=budget, adam_eps=1e-3)
    manifest = write_batch(batch, policy.shape, lengths)
    settings, learner = Hyperparameters.parse(given), Learner.of(policy, world)
    metrics = apply(learner, lambda: policy, Batch.open(manifest), settings, world, lambda *_: True)
    return metrics, [p.full_tensor().detach() for p in policy.parameters()]
