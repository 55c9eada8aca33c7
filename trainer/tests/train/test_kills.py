"""A trainer that is killed again and again ends where one that never was does, to the last bit.

`ORCHESTRATE_KILLS` is how often it is killed, `ORCHESTRATE_KILL_SEED` draws the moments.
"""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import needs  # noqa: F401

import torch  # isort: skip
from model_families import write_batch
from safetensors.torch import load_file
from test_processes import PACKAGE, alive, submitted
from test_service import Client, request

KILLS = int(os.environ.get("ORCHESTRATE_KILLS", "4"))
SEED = int(os.environ.get("ORCHESTRATE_KILL_SEED", "1"))
LENGTHS = (9, 12, 6)
#: All that a checkpoint can hold: the model, its optimizer, and both weights beside the model.
SETTINGS = {"policy_loss": "ppo", "routing_replay": "predictive", "mini_steps": 2}
#: One life in so many ends before the trainer listens.
START_UP = 5


#: A process that has imported everything and becomes a trainer as often as it is asked to: what is
#: killed is a process of its own, but need not spend its short life on imports.
BREEDER = """
import json, os, signal, sys
import transformers.models.qwen3_moe.modeling_qwen3_moe
from orchestrate_trainer import serve

# Nobody waits for those that are born here.
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
for line in sys.stdin:
    log, arguments = json.loads(line)
    born = os.fork()
    if born:
        print(born, flush=True)
        continue
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(output, 1)
    os.dup2(output, 2)
    status = serve.main(arguments)
    print("ended with", status, flush=True)
    os._exit(status)
"""


class Breeder:
    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", BREEDER],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": str(PACKAGE), "OMP_NUM_THREADS": "1"},
        )

    def bear(self, log: Path, arguments: list[str]) -> int:
        """Number of a new process."""
        print(json.dumps([str(log), arguments]), file=self._process.stdin, flush=True)
        return int(self._process.stdout.readline())

    def end(self) -> None:
        self._process.stdin.close()
        self._process.stdout.close()
        self._process.wait()


class Life:
    """One trainer, from its start to its end."""

    def __init__(self, breeder: Breeder, log: Path, arguments: list[str]) -> None:
        self._log = log
        log.unlink(missing_ok=True)
        self._pid = breeder.bear(log, arguments)

    def listen(self) -> "Life":
        while True:
            found = re.search(r"listening on http://127.0.0.1:(\d+)\s", self.log())
            if found:
                self.client = Client(int(found[1]))
                return self
            assert alive(self._pid), self.log()
            time.sleep(0.02)

    def log(self) -> str:
        return self._log.read_text() if self._log.exists() else ""

    def kill(self) -> None:
        os.kill(self._pid, signal.SIGKILL)
        self._gone()

    def end(self) -> None:
        """Ends it politely."""
        os.kill(self._pid, signal.SIGTERM)
        self._gone()
        assert "ended with 0" in self.log(), self.log()

    def _gone(self) -> None:
        while alive(self._pid):
            time.sleep(0.005)


class Run:
    """Steps 1, 2, 3 … of one trainer's folder."""

    def __init__(self, model: Path, folder: Path, breeder: Breeder) -> None:
        self.model, self.folder, self._breeder = model, folder, breeder
        self.checkpoints = folder / "checkpoints"
        folder.mkdir()

    def bear(self) -> Life:
        arguments = ["--model", str(self.model), "--checkpoint-dir", str(self.checkpoints)]
        fixed = ["--port", "0", "--device", "cpu", "--threads", "1", "--experts", "eager"]
        return Life(self._breeder, self.folder / "log", arguments + fixed)

    def start(self) -> Life:
        return self.bear().listen()

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
    breeder = Breeder()
    run = Run(folders["qwen3_moe"], tmp_path / "killed", breeder)
    run.start().kill()
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
            process = run.bear()
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
        print(f"killed {sum(moments.values())} times, {applied} steps applied", flush=True)
    # The step that was cut off last, and one more.
    for number in (applied + 1, applied + 2):
        result = submitted(process, run.step(number, shape))
        assert result["policy_version"] == number
    process.end()
    last = applied + 2
    print(f"killed {sum(moments.values())} times over {last} steps: {dict(moments)}")

    calm = Run(run.model, tmp_path / "calm", breeder)
    process = calm.start()
    for number in range(1, last + 1):
        submitted(process, calm.step(number, shape))
    process.end()
    breeder.end()
    found, wanted = (each.checkpoints / f"v{last:06}" for each in (run, calm))
    steps = json.loads((found / "trainer.json").read_text())["steps"]
    expected = [f"s{number}" for number in range(1, last + 1)][-len(steps) :]
    assert [step["step_id"] for step in steps] == expected
    assert [path.name for path in wanted.glob("*.safetensors")] == ["model.safetensors"]
    files = ["model.safetensors", "router_predictor.state", "value_head.state"]
    for name in files:
        one, two = load_file(found / name), load_file(wanted / name)
        assert one.keys() == two.keys()
        assert all(torch.equal(tensor, two[key]) for key, tensor in one.items()), name
