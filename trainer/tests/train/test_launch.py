"""The commands of the README that start a trainer, and a run on two machines."""

from __future__ import annotations

import os
import random
import re
import shlex
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import needs  # noqa: F401

from model_families import write_batch
from test_processes import LENGTHS, Process, submitted
from test_service import request
from torch.distributed.run import get_args_parser

from orchestrate_trainer.cli import parser
from orchestrate_trainer.serve import stop_once

ROOT = Path(__file__).resolve().parents[3]
SCRIPT = ROOT / "scripts" / "train-node"
README = ROOT / "trainer" / "README.md"


def commands() -> list[list[str]]:
    """The commands of the README that start a trainer, as argument lists."""
    blocks = re.findall(r"```sh\n(.*?)```", README.read_text(), re.DOTALL)
    lines = "\n".join(blocks).replace("\\\n", " ").splitlines()
    split = (shlex.split(line, comments=True) for line in lines)
    starts = ("orchestrate-trainer", "torchrun", "train-node")
    return [command for command in split if any(part.endswith(starts) for part in command[:6])]


def launcher_arguments(command: list[str], folder: Path) -> list[str]:
    """Arguments that a command passes to ``torch.distributed.run``.

    The script runs with an interpreter that prints its arguments.
    """
    if command[0] == "torchrun":
        return command[1:]
    interpreter = folder / "python"
    interpreter.write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    interpreter.chmod(0o755)
    script = next(n for n, part in enumerate(command) if part.endswith("train-node"))
    environment = dict(part.split("=", 1) for part in command[:script])
    printed = subprocess.run(
        [SCRIPT, *command[script + 1 :]],
        env={**os.environ, **environment, "PYTHON": str(interpreter)},
        capture_output=True,
        text=True,
        check=True,
    ).stdout.splitlines()
    assert printed[:2] == ["-m", "torch.distributed.run"]
    return printed[2:]


def test_commands_of_the_readme_are_valid(tmp_path: Path) -> None:
    found = commands()
    assert len(found) >= 3
    nodes = set()
    for command in found:
        given = command[1:]
        if command[0] != "orchestrate-trainer":
            parsed = get_args_parser().parse_args(launcher_arguments(command, tmp_path))
            assert parsed.module and parsed.training_script == "orchestrate_trainer.serve"
            nodes.add(parsed.nnodes if not parsed.standalone else "1")
            # The order of the machines is fixed, so number 0 serves requests.
            assert parsed.standalone or parsed.rdzv_backend == "static"
            given = parsed.training_script_args
        options = parser().parse_args(given)
        assert options.model and options.checkpoint_dir
    assert "1" in nodes and len(nodes) > 1


def test_several_machines_require_a_number_and_an_address() -> None:
    plain = {name: value for name, value in os.environ.items() if name not in ("NODE", "HEAD")}
    for given, missing in (({}, "NODE"), ({"NODE": "1"}, "HEAD")):
        refused = subprocess.run(
            [SCRIPT], env={**plain, **given, "NODES": "2"}, capture_output=True, text=True
        )
        assert refused.returncode != 0 and f"set {missing} to" in refused.stderr


def free_port() -> str:
    """A free port below the range that the kernel assigns, so that no other process gets it."""
    for port in random.sample(range(20_000, 32_000), 200):
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return str(port)
    raise AssertionError("no free port")


def test_two_machines_train_together_and_number_0_serves(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    model, checkpoints = folders["qwen3_moe"], tmp_path / "ckpt"
    common: dict[str, Any] = {
        "launcher": [str(SCRIPT)],
        "PYTHON": sys.executable,
        "NODES": "2",
        "HEAD": "127.0.0.1",
        "PROCESSES": "1",
        "PORT": free_port(),
    }
    # Machine 1 starts first: the first to start must not become the one that serves.
    second = Process(model, checkpoints, 1, wait=False, NODE="1", **common)
    first = Process(model, checkpoints, 1, NODE="0", **common)
    client = first.client
    info = client.call("/v1/info")[1]
    assert info["world_size"] == 2
    manifest = write_batch(tmp_path / "batch", info["model"], LENGTHS, "s1")
    result = submitted(first, request(manifest, "s1", mini_steps=2))
    assert result["policy_version"] == 1
    # The leader is terminated and tells the other machine to stop.
    leader = first.pids()[1]
    os.kill(leader, signal.SIGTERM)
    assert (first.wait(), second.wait()) == (0, 0)


def test_a_second_signal_does_not_set_the_event_again() -> None:
    """Python runs the handler of a second signal inside that of the first, where the event's lock
    may be held."""

    class Interrupted(threading.Event):
        calls = 0

        def set(self) -> None:
            self.calls += 1
            if self.calls < 3:
                handle(signal.SIGTERM, None)
            super().set()

    stopping = Interrupted()
    handle = stop_once(stopping)
    handle(signal.SIGTERM, None)
    handle(signal.SIGINT, None)
    assert stopping.is_set() and stopping.calls == 1
