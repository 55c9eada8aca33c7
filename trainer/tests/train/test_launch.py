"""Every command of the README that starts a trainer, and several machines in earnest."""

from __future__ import annotations

import os
import random
import re
import shlex
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import needs  # noqa: F401
from model_families import write_batch
from test_processes import LENGTHS, Process, submitted
from test_service import request
from torch.distributed.run import get_args_parser

from orchestrate_trainer import serve

ROOT = Path(__file__).resolve().parents[3]
SCRIPT = ROOT / "scripts" / "train-node"
README = ROOT / "trainer" / "README.md"


def commands() -> list[list[str]]:
    """Those of the README that start a trainer, split into words."""
    blocks = re.findall(r"```sh\n(.*?)```", README.read_text(), re.DOTALL)
    lines = "\n".join(blocks).replace("\\\n", " ").splitlines()
    split = (shlex.split(line, comments=True) for line in lines)
    starts = ("orchestrate-trainer", "torchrun", "train-node")
    return [words for words in split if any(word.endswith(starts) for word in words[:6])]


def launched(words: list[str], folder: Path) -> list[str]:
    """What a command hands to `torch.distributed.run`; the script runs with an interpreter that
    tells its arguments."""
    if words[0] == "torchrun":
        return words[1:]
    teller = folder / "python"
    teller.write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    teller.chmod(0o755)
    at = next(n for n, word in enumerate(words) if word.endswith("train-node"))
    given = dict(word.split("=", 1) for word in words[:at])
    told = subprocess.run(
        [SCRIPT, *words[at + 1 :]],
        env={**os.environ, **given, "PYTHON": str(teller)},
        capture_output=True,
        text=True,
        check=True,
    ).stdout.splitlines()
    assert told[:2] == ["-m", "torch.distributed.run"]
    return told[2:]


def test_every_command_of_the_readme_parses(tmp_path: Path) -> None:
    found = commands()
    assert len(found) >= 3
    nodes = set()
    for words in found:
        given = words[1:]
        if words[0] != "orchestrate-trainer":
            parsed = get_args_parser().parse_args(launched(words, tmp_path))
            assert parsed.module and parsed.training_script == "orchestrate_trainer.serve"
            nodes.add(parsed.nnodes if not parsed.standalone else "1")
            # Machines in a fixed order: number 0 answers.
            assert parsed.standalone or parsed.rdzv_backend == "static"
            given = parsed.training_script_args
        options = serve._parser().parse_args(given)
        assert options.model and options.checkpoint_dir
    assert "1" in nodes and len(nodes) > 1


def test_several_machines_need_a_number_and_an_address() -> None:
    plain = {name: value for name, value in os.environ.items() if name not in ("NODE", "HEAD")}
    for given, lacking in (({}, "NODE"), ({"NODE": "1"}, "HEAD")):
        refused = subprocess.run(
            [SCRIPT], env={**plain, **given, "NODES": "2"}, capture_output=True, text=True
        )
        assert refused.returncode != 0 and f"set {lacking} to" in refused.stderr


def free_port() -> str:
    """A port below those that the system gives out by itself, so that nobody else is given it."""
    for port in random.sample(range(20_000, 32_000), 200):
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return str(port)
    raise AssertionError("no free port")


def test_two_machines_train_together_and_number_0_answers(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    model, checkpoints = folders["qwen3_moe"], tmp_path / "ckpt"
    common: dict[str, Any] = {
        "launcher": [str(SCRIPT)],
        **{"PYTHON": sys.executable, "NODES": "2", "HEAD": "127.0.0.1", "PROCESSES": "1"},
        "PORT": free_port(),
    }
    # The second machine comes first: whoever is earlier must not become the one that answers.
    second = Process(model, checkpoints, 1, wait=False, NODE="1", **common)
    first = Process(model, checkpoints, 1, NODE="0", **common)
    client = first.client
    info = client.call("/v1/info")[1]
    assert info["world_size"] == 2
    manifest = write_batch(tmp_path / "batch", info["model"], LENGTHS, "s1")
    result = submitted(first, request(manifest, "s1", mini_steps=2))
    assert result["policy_version"] == 1
    # The one that answers is asked to stop; the other machine hears it from there.
    leader = first.pids()[1]
    os.kill(leader, signal.SIGTERM)
    assert (first.wait(), second.wait()) == (0, 0)
