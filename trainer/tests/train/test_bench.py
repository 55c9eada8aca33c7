"""The benchmark runs, on a model that is too small for its times to mean anything."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import needs  # noqa: F401

import pytest

PACKAGE = Path(__file__).resolve().parents[2]
SHAPE = {
    "--layers": 2, "--hidden": 32, "--heads": 4, "--kv-heads": 2, "--head-width": 8,
    "--experts": 8, "--top-k": 2, "--expert-width": 16, "--vocab": 61, "--sequences": 3,
    "--tokens": 24, "--sampled": 8, "--repeat": 1, "--device": "cpu", "--peak-tflops": 1,
}  # fmt: skip


@pytest.mark.parametrize("sampler", ["bf16", "fp8"])
def test_benchmark_reports_every_row(tmp_path: Path, sampler: str) -> None:
    out = tmp_path / "bench.json"
    arguments = [str(part) for pair in SHAPE.items() for part in pair]
    command = [sys.executable, "-m", "orchestrate_trainer.bench", *arguments]
    done = subprocess.run(
        [*command, "--sampler", sampler, "--out", str(out)],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(PACKAGE), "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    report = json.loads(out.read_text())
    assert set(report["rows"]) == {
        "plain_forward_backward",
        *(f"{kind}_{mode}" for kind in ("recompute", "update") for mode in ("replay", "no_replay")),
    }
    for row in report["rows"].values():
        assert row["seconds"] > 0 and row["tokens_per_s"] > 0 and 0 < row["mfu"] < 1
    mismatch = report["mismatch"]
    assert mismatch["replay"] > 0 and mismatch["no_replay"] > 0, (
        "the sampler is less precise than the trainer"
    )
