"""A trainer that is killed repeatedly ends with the same bits as one that is never killed.

``ORCHESTRATE_KILLS`` is the number of kills and ``ORCHESTRATE_KILL_SEED`` the seed of their times.
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
#: With these a checkpoint holds everything it can: model, optimizer and both heads.
SETTINGS = {"policy_loss": "ppo", "routing_replay": "predictive", "mini_steps": 2}
#: After this many kills, one more process is killed before it listens.
KILLS_PER_STARTUP_KILL = 5


#: A process that has imported everything and forks a trainer on request, so that a killed trainer
#: need not spend its short life on imports.
FORK_SERVER = """
import json, os, signal, sys
import transformers.models.qwen3_moe.modeling_qwen3_moe
from orchestrate_trainer import cli, serve

# The children are never waited for.
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
for line in sys.stdin:
    log, arguments = json.loads(line)
    child = os.fork()
    if child:
        print(child, flush=True)
        continue
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(output, 1)
    os.dup2(output, 2)
    status = cli.main(arguments)
    print("ended with", status, flush=True)
    os._exit(status)
"""


class ForkServer:
    """The process that forks trainers."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", FORK_SERVER],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": str(PACKAGE), "OMP_NUM_THREADS": "1"},
        )

        assert self._process.stdin is not None and self._process.stdout is not None
        self._requests, self._replies = self._process.stdin, self._process.stdout

    def fork(self, log: Path, arguments: list[str]) -> int:
        """Starts a trainer; returns its process id."""
        print(json.dumps([str(log), arguments]), file=self._requests, flush=True)
        return int(self._replies.readline())

    def close(self) -> None:
        self._requests.close()
        self._replies.close()
        self._process.wait()


class TrainerProcess:
    """One trainer process."""

    client: Client

    def __init__(self, server: ForkServer, log: Path, arguments: list[str]) -> None:
        self._log = log
        log.unlink(missing_ok=True)
        self._pid = server.fork(log, arguments)

    def wait_until_listening(self) -> TrainerProcess:
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
        self._wait()

    def terminate(self) -> None:
        os.kill(self._pid, signal.SIGTERM)
        self._wait()
        assert "ended with 0" in self.log(), self.log()

    def _wait(self) -> None:
        while alive(self._pid):
            time.sleep(0.005)


class Run:
    """A trainer's folder, and steps 1, 2, 3 … for it."""

    def __init__(self, model: Path, folder: Path, server: ForkServer) -> None:
        self.model, self.folder, self._server = model, folder, server
        self.checkpoints = folder / "checkpoints"
        folder.mkdir()

    def fork(self) -> TrainerProcess:
        arguments = ["--model", str(self.model), "--checkpoint-dir", str(self.checkpoints)]
        arguments += ["--batch-root", str(self.folder)]
        fixed = ["--port", "0", "--device", "cpu", "--threads", "1", "--experts", "eager"]
        return TrainerProcess(self._server, self.folder / "log", arguments + fixed)

    def start(self) -> TrainerProcess:
        return self.fork().wait_until_listening()

    def step(self, number: int, shape: dict[str, Any]) -> dict[str, Any]:
        """Request for a step; the batch depends only on its number."""
        name = f"s{number}"
        manifest = self.folder / name / "manifest.json"
        if not manifest.exists():
            write_batch(manifest.parent, shape, LENGTHS, name, seed=number)
        return request(manifest, name, number - 1, **SETTINGS)


def test_kill_at_any_moment_loses_no_step_and_applies_none_twice(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    draw = random.Random(SEED)
    server = ForkServer()
    run = Run(folders["qwen3_moe"], tmp_path / "killed", server)
    run.start().kill()
    started = time.monotonic()
    process = run.start()
    startup = time.monotonic() - started
    shape = process.client.call("/v1/info")[1]["model"]
    started = time.monotonic()
    submitted(process, run.step(1, shape))
    duration = time.monotonic() - started
    #: Steps that the client knows to be applied.
    applied = 1
    moments: Counter[str] = Counter()
    for number in range(KILLS):
        # The wait decides only when the process is killed.
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
        if number % KILLS_PER_STARTUP_KILL == KILLS_PER_STARTUP_KILL - 1:
            process = run.fork()
            time.sleep(draw.uniform(0, startup))
            process.kill()
            moments["startup"] += 1
        process = run.start()
        info = process.client.call("/v1/info")[1]
        assert info["lineage"] == 0
        # The current step was applied completely or not at all; a step reported as done stays.
        assert info["policy_version"] in (applied, applied + 1)
        assert info["last_step_id"] == f"s{info['policy_version']}"
        assert not list(run.checkpoints.glob(".v*"))
        applied = info["policy_version"]
        print(f"killed {sum(moments.values())} times, {applied} steps applied", flush=True)
    # The step that was interrupted last, and one more.
    for number in (applied + 1, applied + 2):
        result = submitted(process, run.step(number, shape))
        assert result["policy_version"] == number
    process.terminate()
    last = applied + 2
    print(f"killed {sum(moments.values())} times over {last} steps: {dict(moments)}")

    undisturbed = Run(run.model, tmp_path / "undisturbed", server)
    process = undisturbed.start()
    for number in range(1, last + 1):
        submitted(process, undisturbed.step(number, shape))
    process.terminate()
    server.close()
    found, wanted = (each.checkpoints / f"v{last:06}" for each in (run, undisturbed))
    steps = json.loads((found / "trainer.json").read_text())["steps"]
    expected = [f"s{number}" for number in range(1, last + 1)][-len(steps) :]
    assert [step["step_id"] for step in steps] == expected
    assert [path.name for path in wanted.glob("*.safetensors")] == ["model.safetensors"]
    files = ["model.safetensors", "router_predictor.state", "value_head.state"]
    for name in files:
        one, two = load_file(found / name), load_file(wanted / name)
        assert one.keys() == two.keys()
        assert all(torch.equal(tensor, two[key]) for key, tensor in one.items()), name
