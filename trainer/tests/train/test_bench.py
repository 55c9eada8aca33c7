"""The benchmark runs, on a model that is too small for its times to mean anything."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import needs  # noqa: F401

import pytest

import torch  # isort: skip

from model_families import hyperparameters, write_batch

from orchestrate_trainer import bench, bench_parts
from orchestrate_trainer.batch import Batch
from orchestrate_trainer.bench_parts import PARTS, PartTimes, StepFloors, timed_parts
from orchestrate_trainer.learner import Learner
from orchestrate_trainer.policy import ModelOptions, load_policy
from orchestrate_trainer.settings import Hyperparameters
from orchestrate_trainer.step import apply

#: Parts of a forward pass.
FORWARD = ("attention", "routers", "experts", "layers, rest", "head and loss")
PACKAGE = Path(__file__).resolve().parents[2]
SHAPE = {
    "--model-slice": 2, "--hidden": 32, "--heads": 4, "--kv-heads": 2, "--head-width": 8,
    "--experts": 8, "--top-k": 2, "--expert-width": 16, "--vocab": 61, "--sequences": 4,
    "--tokens": 24, "--sampled": 8, "--micro-batch-tokens": 48, "--repeat": 2, "--device": "cpu",
    "--peak-tflops": 1, "--peak-gbps": 100,
}  # fmt: skip
STEPS = {"step_replay", "step_own_routes", "step_unpacked"}
ARMS = STEPS | {
    "forward_replay", "forward_own_routes", "train_replay", "train_own_routes",
    "train_plain_transformers",
}  # fmt: skip


@pytest.mark.parametrize("sampler", ["bf16", "fp8"])
def test_benchmark_reports_every_arm(tmp_path: Path, sampler: str) -> None:
    out, table = tmp_path / "bench.json", tmp_path / "bench.md"
    arguments = [str(part) for pair in SHAPE.items() for part in pair]
    command = [sys.executable, "-m", "orchestrate_trainer.bench", *arguments]
    done = subprocess.run(
        [
            *command,
            "--sampler",
            sampler,
            "--out",
            str(out),
            "--markdown",
            str(table),
            *(["--expect"] if sampler == "fp8" else []),
        ],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(PACKAGE), "OMP_NUM_THREADS": "1"},
    )
    judged = [line for line in done.stdout.splitlines() if line.startswith(("met: ", "MISSED: "))]
    assert len(judged) == (5 if sampler == "fp8" else 0)
    missed = any(line.startswith("MISSED") for line in judged)
    assert done.returncode == int(missed), done.stderr
    report = json.loads(out.read_text())
    assert set(report["rows"]) == ARMS and report["failed"] == {}
    for row in report["rows"].values():
        assert row["repetitions"] == 2
        assert 0 < row["least_seconds"] <= row["seconds"] <= row["most_seconds"]
        assert row["tokens_per_s"] > 0 and 0 < row["mfu"] < 1
    assert report["attention"] == "loop" and report["versions"]["torch"] == torch.__version__
    # Two layers: weights, 4 heads of 8 values over half of 24 tokens, and a head for 8 of 24.
    weights = 32 * 8 * (4 + 2 + 2 + 4) + 32 * 8 + 2 * 3 * 32 * 16
    forward = 2 * (2 * weights + 2 * 4 * 16 * 25 / 2) + 2 * 32 * 61 / 3
    assert report["flops_per_token"] == pytest.approx(3 * forward)
    assert 0 < report["attention_share"] < 1
    mismatch = report["mismatch"]
    assert mismatch["replay"] > 0 and mismatch["own_routes"] > 0, (
        "the sampler is less precise than the trainer"
    )
    check_parts(report["parts"])
    lines = table.read_text().splitlines()
    assert done.stdout.splitlines() == lines + judged
    rows = [line for line in lines if line.startswith("| ")]
    arms, parts = rows[: 1 + len(ARMS)], rows[1 + len(ARMS) :]
    assert len({row.count("|") for row in arms}) == len({row.count("|") for row in parts}) == 1
    assert len(parts) == 1 + len(PARTS)
    assert "torch " in lines[0] and any(line.startswith("Replay changes") for line in lines)


def check_parts(parts: dict[str, Any]) -> None:
    """Parts divide the time of a step, and each part that works has a least time."""
    rows = parts["rows"]
    assert list(rows) == list(PARTS) and parts["repetitions"] == 2
    seconds = {part: row["seconds"] for part, row in rows.items()}
    assert all(value >= 0 for value in seconds.values())
    assert sum(seconds.values()) <= parts["seconds"]
    assert sum(row["share"] for row in rows.values()) <= 1
    working = [part for part, value in seconds.items() if value > 0]
    assert working == list(PARTS)
    for row in rows.values():
        least = max(row["flops"] / 1e12, row["bytes"] / 100e9)
        assert row["least_seconds"] == pytest.approx(least)
    flops = {part: row["flops"] for part, row in rows.items()}
    forward = sum(flops[part] for part in FORWARD)
    assert flops["backward"] == pytest.approx(forward)
    assert 0 < flops["repeated forward"] < forward / 2
    assert flops["optimizer"] == 0 < rows["optimizer"]["bytes"]


def test_whole_steps_are_compared_alone(tmp_path: Path) -> None:
    """With and without replay, packed and unpacked, in turn."""
    out = tmp_path / "bench.json"
    arguments = [str(part) for pair in SHAPE.items() for part in pair]
    command = [sys.executable, "-m", "orchestrate_trainer.bench", *arguments]
    done = subprocess.run(
        [*command, "--ratios", "--activation-checkpointing", "none", "--json", str(out)],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(PACKAGE), "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    report = json.loads(out.read_text())
    assert set(report["rows"]) == STEPS and report["time_of_plain"] is None
    replay, packed = report["replay_cost"], report["time_of_packed"]
    assert replay["forward"] is None and replay["train"] is None
    for ratio in (replay["step"], packed):
        assert 0 < ratio["least"] <= ratio["median"] <= ratio["most"]
    for text in ("Replay changes the time of step by", "A packed step takes"):
        assert any(line.startswith(text) for line in done.stdout.splitlines())
    repeated = report["parts"]["rows"]["repeated forward"]
    assert repeated["seconds"] == repeated["flops"] == 0


def test_floors_add_up_to_the_operations_of_a_step(folders: dict[str, Path], world: Any) -> None:
    """As counted for utilisation, in every family."""
    for family, folder in folders.items():
        learner = Learner.of(load_policy(folder, ModelOptions(), world), world)
        cost = learner.policy.cost
        floors = StepFloors.of(learner, "none", [9, 14], 5, packs=1, forwards=2)
        forward = cost.sequence(9) + cost.sequence(14) + cost.head * 5
        found = sum(floors.flops[part] for part in FORWARD)
        assert found == pytest.approx(2 * forward), family
        assert floors.flops["backward"] == pytest.approx(2 * forward)
        # Weights, gradients and both moments in f32, which are written but for the gradient.
        parameters = sum(parameter.numel() for parameter in learner.policy.parameters())
        assert floors.bytes["optimizer"] == 28 * parameters
        assert floors.seconds("optimizer", None, 1e9) is None
        small = Learner.of(learner.policy, world, "bf16")
        for parameter in learner.policy.parameters():
            parameter.grad = torch.zeros_like(parameter)
        small.optimizer.step()
        again = StepFloors.of(small, "none", [9, 14], 5, packs=1, forwards=2)
        assert again.bytes["optimizer"] == 20 * parameters


def test_marks_divide_time_without_gaps(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([1.0, 2.5, 3.0, 7.0, 8.0])
    monkeypatch.setattr(bench_parts.time, "perf_counter", lambda: next(clock))
    times = PartTimes(torch.device("cpu"))
    for part in ("other", "experts", "other", "optimizer", "other"):
        times.begin(part)
    found = times.seconds()
    assert list(found) == list(PARTS)
    worked = {part: seconds for part, seconds in found.items() if seconds}
    assert worked == {"other": 5.5, "experts": 0.5, "optimizer": 1.0}


@pytest.mark.parametrize("level", ["none", "selective", "full"])
def test_measuring_parts_changes_nothing(
    level: Any, folders: dict[str, Path], world: Any, tmp_path: Path
) -> None:
    """Neither metrics nor weights, and no hook stays."""
    plain_backward = torch.Tensor.backward
    options = ModelOptions(activation_checkpointing=level)
    plain, marked = (
        Learner.of(load_policy(folders["deepseek_v3"], options, world), world) for _ in range(2)
    )
    policy = marked.policy
    batch = Batch.open(write_batch(tmp_path / "batch", policy.shape, (12, 7, 19, 10, 5)))
    settings = Hyperparameters.parse(hyperparameters(mini_steps=2))
    hooks = hooks_of(policy)

    def step(learner: Learner) -> dict[str, Any]:
        return apply(learner, lambda: policy, batch, settings, world, lambda *_: True)

    wanted = step(plain)
    with timed_parts(marked, world.device) as times:
        found = step(marked)
    assert found == wanted
    weights = zip(plain.policy.parameters(), policy.parameters(), strict=True)
    assert all(torch.equal(one.full_tensor(), two.full_tensor()) for one, two in weights)
    seconds = times.seconds()
    assert (seconds["repeated forward"] > 0) == (level != "none")
    assert all(seconds[part] > 0 for part in PARTS if part != "repeated forward")
    assert torch.Tensor.backward is plain_backward
    assert not {"tolist", "item", "cpu", "numpy"} & vars(torch.Tensor).keys()
    assert hooks_of(policy) == hooks


def hooks_of(module: torch.nn.Module) -> list[int]:
    """Numbers of hooks of a module and all in it."""
    return [len(part._forward_hooks) + len(part._forward_pre_hooks) for part in module.modules()]


def test_a_step_of_the_benchmark_waits_for_the_device_once_per_mini_step() -> None:
    arguments = [str(part) for pair in SHAPE.items() for part in pair]
    command = [sys.executable, "-m", "orchestrate_trainer.bench", *arguments]
    for kernel, status in (("packed", 0), ("eager", 1)):
        done = subprocess.run(
            [*command, "--check-sync", "--kernel", kernel],
            capture_output=True,
            text=True,
            env={**os.environ, "PYTHONPATH": str(PACKAGE), "OMP_NUM_THREADS": "1"},
        )
        assert done.returncode == status, done.stderr
        count = int(done.stdout.split()[0])
        assert count == 3 if kernel == "packed" else count > 4, done.stdout


def test_a_step_is_the_same_on_the_same_device() -> None:
    """Deterministic to the bit; ``--check-devices`` compares two kinds of device."""
    script = (
        "import sys; from orchestrate_trainer import bench;"
        "print(bench.compare_devices(bench.parser().parse_args(sys.argv[1:]), ('cpu', 'cpu')))"
    )
    arguments = [str(part) for pair in SHAPE.items() for part in pair]
    done = subprocess.run(
        [sys.executable, "-c", script, *arguments],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(PACKAGE), "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    assert "{'weights': 0.0, 'loss': 0.0, 'grad_norm': 0.0}" in done.stdout


MET: dict[str, Any] = {
    "rows": {"train_replay": {"mfu": 0.31}},
    "failed": {},
    "replay_cost": {"train": {"median": 1.009}},
    "time_of_plain": {"median": 1.2},
    "mismatch": {"replay": 1e-5, "own_routes": 1e-4},
}


@pytest.mark.parametrize(
    ("changed", "missed"),
    [
        ({}, []),
        ({"rows": {"train_replay": {"mfu": 0.29}}}, ["MFU of train replay: 29.0%"]),
        ({"rows": {"train_replay": {"mfu": None}}}, ["MFU of train replay: unknown"]),
        ({"replay_cost": {"train": {"median": 1.02}}}, ["time added by replay: +2.00%"]),
        ({"time_of_plain": {"median": 0.7}}, ["time of plain transformers"]),
        ({"time_of_plain": None}, ["time of plain transformers over the trainer's: unknown"]),
        ({"mismatch": {"replay": 1e-4, "own_routes": 1e-4}}, ["mismatch with the sampler"]),
        (
            {
                "rows": {},
                "failed": {"train_replay": "out of memory"},
                "replay_cost": {"train": None},
            },
            ["arms that ran out of memory: train_replay", "MFU", "time added by replay: unknown"],
        ),
    ],
)
def test_each_target_is_judged(changed: dict[str, Any], missed: list[str]) -> None:
    judged = bench.expectations(MET | changed)
    assert len(judged) == 5
    found = [text for text, met in judged if not met]
    assert len(found) == len(missed)
    assert all(map(str.startswith, found, missed)), found


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["--sampled", "0"], "--sampled must be"),
        (["--sampled", "8192"], "--sampled must be"),
        (["--model-slice", "0"], "--layers must be at least 1"),
        (["--repeat", "0"], "--repeat must be at least 1"),
        (["--attention", "paged"], "invalid choice"),
        (["--ratios", "--expect"], "give only one of them"),
        (["--model-slice", "four"], "invalid int"),
    ],
)
def test_invalid_arguments_are_refused(
    arguments: list[str], problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as raised:
        bench.main(arguments)
    assert raised.value.code == 2 and problem in capsys.readouterr().err


def test_the_default_is_a_slice_of_qwen3_30b_a3b() -> None:
    given = bench.parser().parse_args(["--model-slice", "3"])
    shape = (given.hidden, given.heads, given.kv_heads, given.head_width, given.experts)
    assert given.layers == 3 and shape == (2048, 32, 4, 128, 128)
    assert (given.top_k, given.expert_width, given.vocab) == (8, 768, 151_936)


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_a_missing_gpu_is_reported(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        bench.main(["--device", "cuda"])
    assert "PyTorch finds no GPU" in capsys.readouterr().err
