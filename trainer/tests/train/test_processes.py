"""Real processes: two that train together equal one, and a kill at any moment loses nothing."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Protocol

import needs  # noqa: F401

import pytest

import torch  # isort: skip
from model_families import write_batch
from safetensors.torch import load_file
from test_service import Client, request

LENGTHS = (12, 7, 19, 10, 5)
PACKAGE = Path(__file__).parents[2]
#: The launcher gives up on machines that do not respond. These limits are so long that a busy test
#: machine, which may delay its processes by minutes, does not look lost.
RENDEZVOUS = "timeout=86400,join_timeout=86400,read_timeout=86400,keep_alive_max_attempt=17280"
ENVIRONMENT = {"PYTHONPATH": str(PACKAGE), "OMP_NUM_THREADS": "1", "PET_RDZV_CONF": RENDEZVOUS}


class Process:
    """A trainer started from the command line, with ``size`` processes or by ``launcher``."""

    client: Client

    def __init__(
        self,
        model: Path,
        checkpoints: Path,
        size: int,
        wait: bool = True,
        launcher: list[str] | None = None,
        **environment: str,
    ) -> None:
        start = [sys.executable, "-m"]
        if size > 1:
            start += ["torch.distributed.run", "--standalone", f"--nproc-per-node={size}", "-m"]
        self._log = open(checkpoints.with_suffix(".log"), "a+")  # noqa: SIM115
        listening = len(re.findall("listening", self.log()))
        self._process = subprocess.Popen(
            [
                *(launcher or [*start, "orchestrate_trainer.serve"]),
                *("--model", str(model), "--checkpoint-dir", str(checkpoints), "--port", "0"),
                *("--device", "cpu", "--threads", "1", "--experts", "eager"),
                *("--batch-root", "/"),
            ],
            stdout=self._log,
            stderr=self._log,
            env={**os.environ, **ENVIRONMENT, **environment},
            start_new_session=True,
        )
        if wait:
            self.client = Client(self._port(listening))

    def _port(self, skip: int) -> int:
        """Port that the trainer listens on. Waits for it as long as the process lives."""
        while True:
            found = re.findall(r"listening on http://127.0.0.1:(\d+)\s", self.log())
            if len(found) > skip:
                return int(found[-1])
            assert self._process.poll() is None, self.log()
            time.sleep(0.1)

    def log(self) -> str:
        return Path(self._log.name).read_text()

    def pids(self) -> list[int]:
        """All processes: the launcher, if there is one, and the trainers."""
        pid = self._process.pid
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        return [pid, *map(int, children)]

    def kill(self) -> None:
        """Kills all processes, as a power loss does."""
        pids = self.pids()
        for pid in pids:
            # The trainers end when their launcher dies, so one may be gone already.
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._process.wait()
        while any(map(alive, pids)):
            time.sleep(0.01)

    def terminate(self) -> int:
        """Terminates the trainer; returns its exit status."""
        self._process.terminate()
        return self.wait()

    def wait(self) -> int:
        """Waits for the trainer to end; returns its exit status."""
        return self._process.wait()


def alive(pid: int) -> bool:
    """Whether a process runs. A zombie does not, unless threads of it are still ending: these keep
    its port and the lock on its folder."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        return state != "Z" or len(os.listdir(f"/proc/{pid}/task")) > 1
    except (FileNotFoundError, ProcessLookupError):
        return False


class HasClient(Protocol):
    client: Client


def submitted(process: HasClient, body: dict[str, Any]) -> dict[str, Any]:
    """Submits a step and waits for its result."""
    assert process.client.call("/v1/steps", body)[0] == 200
    status = process.client.finished(body["step_id"])
    assert status["state"] == "done", status
    result: dict[str, Any] = status["result"]
    return result


def test_two_processes_equal_one_and_a_kill_changes_nothing(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    model = folders["qwen3_moe"]
    alone = Process(model, tmp_path / "one", 1)
    shape = alone.client.call("/v1/info")[1]["model"]
    # In some mini steps of the second batch a process has no sequences.
    batches = [
        write_batch(tmp_path / "b1", shape, LENGTHS, "s1"),
        write_batch(tmp_path / "b2", shape, (8, 9, 7), "s2", seed=3),
    ]
    settings = {"mini_steps": 2, "micro_batch_tokens": 20, "kl_coefficient": 0.1}
    steps = [
        request(manifest, f"s{number + 1}", number, **settings)
        for number, manifest in enumerate(batches)
    ]
    wanted = [submitted(alone, step) for step in steps]
    assert alone.terminate() == 0

    together = Process(model, tmp_path / "two", 2)
    assert together.client.call("/v1/info")[1]["world_size"] == 2
    found = [submitted(together, steps[0])]
    # Killed during the second step, at a moment that varies.
    together.client.call("/v1/steps", steps[1])
    for _ in range(2000):
        state = together.client.call("/v1/steps/s2")[1]
        if state["state"] != "queued":
            break
        time.sleep(0.002)
    together.kill()
    with pytest.raises(OSError):
        together.client.call("/v1/info")
    again = Process(model, tmp_path / "two", 2)
    info = again.client.call("/v1/info")[1]
    assert info["policy_version"] in (1, 2) and info["lineage"] == 0
    found.append(submitted(again, steps[1]))
    measurement = {"manifest": str(batches[0]), "replay": True, "temperature": 1.0}
    status, reply = again.client.call("/v1/logprobs", measurement)
    assert status == 200 and [len(row) for row in reply["logprobs"]] == list(LENGTHS)
    workers = again.pids()[1:]
    # If the launcher is killed, the trainers end by themselves.
    os.kill(again.pids()[0], signal.SIGKILL)
    for _ in range(10_000):
        if not any(map(alive, workers)):
            break
        time.sleep(0.1)
    assert not any(map(alive, workers))

    for one, two in zip(wanted, found, strict=True):
        assert one["policy_version"] == two["policy_version"]
        compare(one["metrics"], two["metrics"])
        weights = [
            load_file(Path(result["checkpoint"]) / "model.safetensors") for result in (one, two)
        ]
        assert weights[0].keys() == weights[1].keys()
        for name, tensor in weights[0].items():
            torch.testing.assert_close(weights[1][name], tensor, rtol=1e-5, atol=1e-5)


def compare(one: Any, two: Any, name: str = "") -> None:
    """Compares metrics of the same step within 1e-5, ignoring how long it took."""
    if isinstance(one, dict):
        assert one.keys() == two.keys()
        for key in one.keys() - {"seconds"}:
            compare(one[key], two[key], key)
    elif isinstance(one, list):
        for pair in zip(one, two, strict=True):
            compare(*pair, name)
    else:
        assert two == (one if one is None else pytest.approx(one, rel=1e-5, abs=1e-5)), name
