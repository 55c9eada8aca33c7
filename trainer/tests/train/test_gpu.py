"""What can be tested on a GPU only. The kernels of attention are in ``test_attention.py``.

Neither the trainer's server nor its tests' models are needed, so that this module also runs where
only PyTorch and transformers are installed, such as on a borrowed GPU machine.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

for package in ("torch", "transformers"):
    pytest.importorskip(package, reason=f"package {package} is not installed: scripts/test-python")

import torch  # isort: skip  # noqa: E402

from orchestrate_trainer.corrections import Tokens  # noqa: E402
from orchestrate_trainer.data import on_host  # noqa: E402
from orchestrate_trainer.measures import Disagreement, Load, Mismatch, Ratio  # noqa: E402
from orchestrate_trainer.routers import RouterSpec, _top  # noqa: E402

PACKAGE = Path(__file__).resolve().parents[2]
SHAPE = {
    "--model-slice": 2, "--hidden": 256, "--heads": 8, "--kv-heads": 2, "--head-width": 64,
    "--experts": 16, "--top-k": 4, "--expert-width": 128, "--vocab": 1000, "--sequences": 4,
    "--tokens": 256, "--sampled": 32, "--micro-batch-tokens": 512, "--repeat": 1,
}  # fmt: skip

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def test_counting_never_waits_for_the_gpu() -> None:
    device = torch.device("cuda")
    draw = torch.Generator().manual_seed(0)
    owner = Tokens(torch.tensor([0, 0, 2], device=device), 3)
    logp = torch.tensor([-0.5, -1.0, -2.0], device=device)
    rows = torch.randint(8, (3, 3, 2), generator=draw).to(device, torch.uint8)
    valid = torch.tensor([True, True, False], device=device)
    logits = torch.randn(3, 8, generator=draw).to(device)
    measures = Mismatch(device), Disagreement(3, 2, device), Load(3, 8, device), Ratio(device)
    spec = RouterSpec("softmax", 8, 2)
    spec.select(logits)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        measures[0].add(logp, logp - 0.1, owner)
        measures[1].add(rows, rows, valid, owner)
        measures[2].add(rows, valid)
        measures[3].add(logp, valid, ~valid)
        spec.select(logits)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_a_copy_on_the_host_is_pinned_and_does_not_wait() -> None:
    values = torch.arange(3.0, device="cuda")
    torch.cuda.set_sync_debug_mode("error")
    try:
        copied = on_host(values)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    assert copied.is_pinned() and copied.tolist() == [0, 1, 2]


def test_the_choice_equals_a_stable_sort_on_the_gpu() -> None:
    few = torch.tensor([-torch.inf, -1.5, -0.0, 0.0, 0.25, 0.25000003, 3.0])
    keys = few[torch.randint(len(few), (4000, 128), generator=torch.Generator().manual_seed(0))]
    wanted = keys.sort(dim=-1, descending=True, stable=True).indices[:, :8]
    assert torch.equal(_top(keys.cuda(), 8).cpu(), wanted)


@pytest.mark.parametrize("check", ["--check-sync", "--check-devices"])
def test_a_step_seldom_waits_and_agrees_with_the_cpu(check: str) -> None:
    """One wait per mini step and one per step; the same weights in f32."""
    arguments = [str(part) for pair in SHAPE.items() for part in pair]
    done = subprocess.run(
        [sys.executable, "-m", "orchestrate_trainer.bench", *arguments, check],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(PACKAGE)},
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("kernel", ["varlen", "flex", "loop"])
def test_benchmark_runs_with_every_attention_kernel(tmp_path: Path, kernel: str) -> None:
    """The whole trainer in bf16: replay, gradients, optimizer and metrics."""
    out = tmp_path / "bench.json"
    arguments = [str(part) for pair in SHAPE.items() for part in pair]
    command = [sys.executable, "-m", "orchestrate_trainer.bench", *arguments]
    done = subprocess.run(
        [*command, "--attention", kernel, "--out", str(out)],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(PACKAGE)},
    )
    assert done.returncode == 0, done.stderr
    report = json.loads(out.read_text())
    assert report["attention"] == kernel and report["failed"] == {} and len(report["rows"]) == 8
    assert all(row["peak_gib"] > 0 for row in report["rows"].values())
    parts = report["parts"]["rows"].values()
    assert 0 < sum(row["seconds"] for row in parts) <= 1.01 * report["parts"]["seconds"]
    assert all(row["least_seconds"] is not None for row in parts)
    # A wrong mask or offset would move log-probs by whole nats, rounding does not.
    assert all(0 < value < 1e-2 for value in report["mismatch"].values())
