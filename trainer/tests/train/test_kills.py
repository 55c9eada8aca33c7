"""A trainer that is killed again and again ends where one that never was does, to the last bit.

`ORCHESTRATE_KILLS` is how often it is killed, `ORCHESTRATE_KILL_SEED` draws the moments.
"""

from __future__ import annotations

import json
import os
import random
import time
from collections import Counter
from pathlib import Path
from typing import Any

import needs  # noqa: F401

import torch  # isort: skip
from model_families import write_batch
from safetensors.torch import load_file
from test_processes import Process, submitted
from test_service import request

KILLS = int(os.environ.get("ORCHESTRATE_KILLS", "4"))
SEED = int(os.environ.get("ORCHESTRATE_KILL_SEED", "1"))
LENGTHS = (9, 12, 6)
#: All that a checkpoint can hold: the model, its optimizer, and both weights beside the model.
SETTINGS = {"policy_loss": "ppo", "routing_replay": "predictive", "mini_steps": 2}
#: One life in so many ends before the trainer listens.
START_UP = 5


class Run:
    """Steps 1, 2, 3 … of one trainer's folder."""

    def __init__(self, model: Path, folder: Path) -> None:
        self.model, self.folder = model, folder
        self.checkpoints = folder / "checkpoints"
        folder.mkdir()

    def start(self) -> Process:
        return Process(self.model, self.checkpoints, 1)

    def step(self, number: int, shape: dict[str, Any]) -> dict[str, Any]:
        """The request for a step; the batch depends on its number alone."""
        name = f"s{number}"
        manifest = self.folder / name / "manifest.json"
        if not manifest.exists():
            write_batch(manifest.parent, shape, LENGTHS, name, seed=number)
        return request(manifest, name, number - 1, **SETTINGS)


def test_death_at_any_moment_loses_no_step_and_applies_none_twice(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    draw = random.Random(SEED)
    run = Run(folders["qwen3_moe"], tmp_path / "killed")
    begun = time.monotonic()
    process = run.start()
    start_up = time.monotonic() - begun
    shape = process.client.call("/v1/info")[1]["model"]
    begun = time.monotonic()
    submitted(process, run.step(1, shape))
    duration = time.monotonic() - begun
    #: Steps whose end a client was told of.
    applied = 1
    moments: Counter[str] = Counter()
    for life in range(KILLS):
        # How long is waited decides where death strikes, and nothing else.
        body = run.step(applied + 1, shape)
        status, answer = process.client.call("/v1/steps", body)
        assert status == 200, answer
        time.sleep(draw.uniform(0, 1.2 * duration))
        state = process.client.call(f"/v1/steps/{body['step_id']}")[1]
        process.kill()
        moments[state.get("phase", state["state"])] += 1
        if state["state"] == "done":
            assert state["result"]["policy_version"] == applied + 1
            applied += 1
        if life % START_UP == START_UP - 1:
            process = Process(run.model, run.checkpoints, 1, wait=False)
            time.sleep(draw.uniform(0, start_up))
            process.kill()
            moments["start-up"] += 1
        process = run.start()
        info = process.client.call("/v1/info")[1]
        assert info["lineage"] == 0
        # The step under way was applied whole or not at all; one that was told of stays.
        assert info["policy_version"] in (applied, applied + 1)
        assert info["last_step_id"] == f"s{info['policy_version']}"
        assert not list(run.checkpoints.glob(".v*"))
        applied = info["policy_version"]
    # The step that was cut off last, and one more.
    for number in (applied + 1, applied + 2):
        result = submitted(process, run.step(number, shape))
        assert result["policy_version"] == number
    assert process.end() == 0
    last = applied + 2
    print(f"killed {sum(moments.values())} times over {last} steps: {dict(moments)}")

    calm = Run(run.model, tmp_path / "calm")
    process = calm.start()
    for number in range(1, last + 1):
        submitted(process, calm.step(number, shape))
    assert process.end() == 0
    found, wanted = (each.checkpoints / f"v{last:06}" for each in (run, calm))
    steps = json.loads((found / "trainer.json").read_text())["steps"]
    expected = [f"s{number}" for number in range(1, last + 1)][-len(steps) :]
    assert [step["step_id"] for step in steps] == expected
    files = sorted(path.name for path in wanted.glob("*.safetensors"))
    assert files == ["model.safetensors", "router_predictor.safetensors", "value_head.safetensors"]
    for name in files:
        one, two = load_file(found / name), load_file(wanted / name)
        assert one.keys() == two.keys()
        assert all(torch.equal(tensor, two[key]) for key, tensor in one.items()), name
