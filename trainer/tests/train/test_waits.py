"""The host waits for the device once per mini step and once per step, however many packs there are.

On a machine without a GPU the waits are counted by what operations do with tensors that would be on
the device; ``test_gpu.py`` counts PyTorch's own reports.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import Any

import needs  # noqa: F401

import pytest

import torch  # isort: skip
from model_families import TINY, hyperparameters, write_batch

from orchestrate_trainer import experts, update
from orchestrate_trainer.batch import Batch
from orchestrate_trainer.data import on_device, on_host
from orchestrate_trainer.learner import Learner
from orchestrate_trainer.policy import ModelOptions, load_policy
from orchestrate_trainer.settings import Hyperparameters
from orchestrate_trainer.step import apply
from orchestrate_trainer.waits import Waits, count_waits, counted_device

CPU = torch.device("cpu")
#: Stands for a GPU.
DEVICE = counted_device(CPU)
LENGTHS = (12, 7, 19, 10, 5, 16)


def waits_of_a_step(
    folder: Path, world: Any, batch: Path, experts: str = "packed", **changed: Any
) -> Waits:
    # As on a GPU: in f32 its expert products would wait.
    policy = load_policy(folder, ModelOptions(experts=experts, compute="bf16"), world)
    learner = Learner.of(policy, world)
    path = batch if batch.exists() else write_batch(batch.parent, policy.shape, LENGTHS)
    settings = Hyperparameters.parse(hyperparameters(**changed))
    held = chain(policy.parameters(), policy.buffers())
    world = dataclasses.replace(world, device=counted_device(world.device))
    with count_waits(world.device, held) as waits:
        apply(learner, lambda: policy, Batch.open(path), settings, world, lambda *_: True)
    return waits


@pytest.mark.parametrize(
    "changed",
    [
        {},
        {"mini_steps": 2},
        {"mini_steps": 2, "routing_replay": "none"},
        {"mini_steps": 2, "routing_replay": "recompute", "router_shift": "before_clip",
         "policy_loss": "rspo", "aggregation": "seq-mean-token-mean", "router_shift_floor": 0.99},
        {"mini_steps": 2, "routing_replay": "predictive"},
        {"kl_coefficient": 0.1, "importance_correction": "icepop", "off_policy_delta": 0.1},
        {"policy_loss": "gspo", "aggregation": "seq-mean-token-mean"},
    ],
    ids=str,
)  # fmt: skip
def test_a_step_waits_once_per_mini_step_and_once_at_its_end(
    changed: dict[str, Any], folders: dict[str, Path], world: Any, tmp_path: Path
) -> None:
    batch = tmp_path / "batch" / "manifest.json"
    for tokens in (20, 80):
        waits = waits_of_a_step(
            folders["qwen3_moe"], world, batch, micro_batch_tokens=tokens, **changed
        )
        assert waits.total == changed.get("mini_steps", 1) + 1, waits.by_cause


def test_a_value_head_waits_once_more(folders: dict[str, Path], world: Any, tmp_path: Path) -> None:
    batch = tmp_path / "batch" / "manifest.json"
    for tokens in (20, 80):
        waits = waits_of_a_step(
            folders["qwen3_moe"], world, batch, policy_loss="ppo", micro_batch_tokens=tokens
        )
        assert waits.total == 3, waits.by_cause


@pytest.mark.parametrize("family", list(TINY))
def test_no_family_waits_inside_a_micro_batch(
    family: str, folders: dict[str, Path], world: Any, tmp_path: Path
) -> None:
    waits = waits_of_a_step(folders[family], world, tmp_path / "batch" / "manifest.json")
    assert waits.total == 2, waits.by_cause


def test_a_read_in_every_micro_batch_is_found(
    folders: dict[str, Path], world: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    backward = update.Updater._backward

    def reading(self: Any, *arguments: Any) -> torch.Tensor:
        sums = backward(self, *arguments)
        assert float(sums[0]) == sums.tolist()[0]
        return sums

    monkeypatch.setattr(update.Updater, "_backward", reading)
    batch = tmp_path / "batch" / "manifest.json"
    few, many = (
        waits_of_a_step(folders["qwen3_moe"], world, batch, micro_batch_tokens=tokens).total
        for tokens in (80, 20)
    )
    assert few == 2 + 2 * 1 and many > few


def test_experts_that_run_one_by_one_are_found(
    folders: dict[str, Path], world: Any, tmp_path: Path
) -> None:
    """transformers' ``eager`` kernel asks which experts were chosen."""
    batch = tmp_path / "batch" / "manifest.json"
    waits = waits_of_a_step(folders["qwen3_moe"], world, batch, experts="eager")
    assert waits.total > 2 and any("nonzero" in cause for cause in waits.by_cause)


def test_experts_without_a_kernel_are_counted_once_per_layer(
    folders: dict[str, Path], world: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Forward, backward and the forward of activation checkpointing read the bounds once."""
    monkeypatch.setattr(experts, "has_grouped_kernel", lambda *_: False)
    batch = tmp_path / "batch" / "manifest.json"
    waits = waits_of_a_step(
        folders["qwen3_moe"], world, batch, micro_batch_tokens=80, measure_no_replay=False
    )
    assert waits.total == 2 + 2 and waits.by_cause.most_common(1)[0][1] == 2, waits.by_cause


def grouped(t: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A product of two groups of rows."""
    rows, matrices = t.new_ones(3, 8, dtype=dtype), t.new_ones(2, 8, 8, dtype=dtype)
    ends = t.new_ones(2, dtype=torch.int32).cumsum(0, dtype=torch.int32)
    return torch.nn.functional.grouped_mm(rows, matrices, offs=ends)


READS: dict[str, Callable[[torch.Tensor], Any]] = {
    "float": float,
    "bool": lambda t: bool(t > 0),
    "item": lambda t: t.item(),
    "tolist": lambda t: t.view(1).tolist(),
    "cpu": lambda t: t.cpu(),
    "to": lambda t: t.to("cpu"),
    "to keyword": lambda t: t.to(device="cpu"),
    "to a device": lambda t: t.to(CPU),
    "to a device, by keyword": lambda t: t.to(device=CPU, dtype=torch.float64),
    "read once, used twice": lambda t: (h := t.to(CPU), float(h), float(h)),
    "copied to the host": lambda t: float(torch.zeros(()).copy_(t)),
    "copied from the host": lambda t: t.clone().copy_(torch.zeros(())),
    "moved from the host": lambda t: torch.ones(2).to(DEVICE),
    "made from a number": lambda t: torch.tensor(1.0, device=DEVICE),
    "made from numbers": lambda t: torch.as_tensor([1.0, 2.0], device=t.device),
    "made like another": lambda t: t.new_tensor([1.0], device=DEVICE),
    "made on the device, read": lambda t: float(torch.zeros((), device=DEVICE)),
    "f32 grouped product": lambda t: grouped(t, torch.float32),
    "numpy": lambda t: t.numpy(),
    "nonzero": lambda t: t.nonzero(),
    "where": lambda t: torch.where(t.view(1) > 0),
    "masked_select": lambda t: t.masked_select(t > 0),
    "mask": lambda t: t.view(1)[t.view(1) > 0],
    "mask, written": lambda t: t.repeat(2).index_put_((t.repeat(2) > 0,), t.repeat(2)),
    "unique": lambda t: t.unique(),
    "bincount": lambda t: t.view(1).long().bincount(),
    "equal": lambda t: torch.equal(t, t),
    "repeats": lambda t: t.view(1).repeat_interleave(t.view(1).long()),
    "gradient": lambda t: float(torch.autograd.grad((u := t.requires_grad_()) ** 2, u)[0]),
}
FREE: dict[str, Callable[[torch.Tensor], Any]] = {
    "arithmetic": lambda t: (t + 1).sum(),
    "cast": lambda t: t.to(torch.int16),
    "to the device of another": lambda t: t.to((t + 1).device),
    "copied on the device": lambda t: t.clone().copy_(t + 1),
    "copied to the host without waiting": lambda t: torch.zeros(()).copy_(t, non_blocking=True),
    "kept on the host": lambda t: on_host(t),
    "copied from the host without waiting": lambda t: t.clone().copy_(
        torch.zeros(()), non_blocking=True
    ),
    "made on the device": lambda t: (
        torch.zeros(3, device=t.device) + torch.arange(3, device=DEVICE)
    ),
    "bf16 grouped product": lambda t: grouped(t, torch.bfloat16),
    "copy without waiting": lambda t: t.to("cpu", non_blocking=True),
    "fill by mask": lambda t: t.view(1).index_put_((t.view(1) > 0,), torch.tensor(0.0)),
    "integer index": lambda t: t.view(1)[t.view(1).long() * 0],
    "repeats of known sum": lambda t: t.view(1).repeat_interleave(t.long().view(1), output_size=2),
    "host": lambda t: float(torch.ones(1)),
}


def test_a_copy_on_the_host_has_memory_of_its_own_which_is_pinned_for_a_gpu_only() -> None:
    values = torch.arange(3.0)
    copied = on_host(values)
    assert torch.equal(copied, values) and copied.data_ptr() != values.data_ptr()
    assert not copied.is_pinned()


@pytest.mark.parametrize("name", list(READS))
def test_each_read_is_counted(name: str) -> None:
    with count_waits(CPU) as waits:
        READS[name](on_device(torch.tensor(2.0), CPU) * 1)
    assert waits.total == 1, waits.by_cause


@pytest.mark.parametrize("name", list(FREE))
def test_what_does_not_wait_is_not_counted(name: str) -> None:
    with count_waits(CPU) as waits:
        FREE[name](on_device(torch.tensor(2.0), CPU) * 1)
    assert waits.total == 0, waits.by_cause
