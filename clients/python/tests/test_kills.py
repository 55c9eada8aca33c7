"""`kill -9` of the run with its gateway, of workers, of agents and of the engine: nothing is lost
or doubled, and no token of a dead attempt is trained on.

Each kill comes after a drawn number of requests of agents, whatever the machine's speed: agents
send no more than a few further requests until it is done. `ORCHESTRATE_GATEWAY_KILLS` sets the
number of kills of each.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import socket
import struct
import subprocess
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT, Run, program
from kill_worker import REQUESTS, lines, wait_until

Start = Callable[..., Run]
Worker = Callable[..., "subprocess.Popen[bytes]"]

#: Episodes of one step: two groups of four.
STEP_EPISODES = 8
WORKERS = 3
VICTIMS = ("agent", "worker", "run", "engine")
POLICY = "environments/micro/policy"
SCRIPT = Path(__file__).parent / "kill_worker.py"


class Forwarder:
    """An address that leads to a server, wherever that listens after its last start."""

    def __init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self.target: str | None = None
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            client, _ = self._listener.accept()
            try:
                host, port = (self.target or "").removeprefix("http://").split(":")
                server = socket.create_connection((host, int(port)))
            except (OSError, ValueError):
                client.close()
                continue
            for ends in ((client, server), (server, client)):
                threading.Thread(target=self._carry, args=ends, daemon=True).start()

    @staticmethod
    def _carry(source: socket.socket, sink: socket.socket) -> None:
        try:
            while data := source.recv(1 << 16):
                sink.sendall(data)
        except OSError:
            pass
        for end, how in ((sink, socket.SHUT_WR), (source, socket.SHUT_RD)):
            with contextlib.suppress(OSError):
                end.shutdown(how)


class Engine:
    """The engine as a process, behind an address that stays."""

    def __init__(self, folder: Path) -> None:
        self._folder, self.forwarder = folder, Forwarder()
        self.start()

    def start(self) -> None:
        log = self._folder / f"engine-{random.random()}.log"
        roots = ("--checkpoint-root", str(self._folder), "--checkpoint-root", "environments/micro")
        with log.open("wb") as out:
            self.process = subprocess.Popen(
                [program(), "serve-engine", "--model", POLICY, *roots, "--listen", "127.0.0.1:0"],
                cwd=ROOT,
                stderr=out,
            )
        found: list[str] = []

        def is_up() -> bool:
            found.extend(re.findall(r"http://[\d.]+:\d+", log.read_text()))
            assert found or self.process.poll() is None, log.read_text()
            return bool(found)

        wait_until(is_up, "the engine starts")
        self.forwarder.target = found[0]

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        self.forwarder.target = None


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Engine]:
    engine = Engine(tmp_path)
    yield engine
    engine.kill()


def byte_values() -> dict[str, int]:
    """The byte that each character of a byte-level vocabulary stands for."""
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [byte for byte in range(256) if byte not in shown]
    return {chr(byte): byte for byte in shown} | {
        chr(256 + index): byte for index, byte in enumerate(hidden)
    }


def vocabulary() -> dict[int, bytes]:
    """The bytes of every token of the policy."""
    tokenizer = json.loads((ROOT / POLICY / "tokenizer.json").read_text())
    values = byte_values()
    tokens = {
        number: bytes(values[character] for character in token)
        for token, number in tokenizer["model"]["vocab"].items()
        if all(character in values for character in token)
    }
    return tokens | {token["id"]: b"" for token in tokenizer["added_tokens"]}


def sequences(batches: Path) -> Iterator[tuple[str, list[int], list[int]]]:
    """Episode, token ids and loss mask of every sequence of every batch."""
    for shard in sorted(batches.glob("*/*.safetensors")):
        data = shard.read_bytes()
        (length,) = struct.unpack_from("<Q", data)
        header = json.loads(data[8 : 8 + length])

        def values(name: str, kind: str, data: bytes = data, header: Any = header) -> list[int]:
            begin, end = header[name]["data_offsets"]
            start = 8 + struct.unpack_from("<Q", data)[0]
            part = data[start + begin : start + end]
            return list(struct.unpack(f"<{len(part) // struct.calcsize(kind)}{kind}", part))

        bounds, tokens, mask = (
            values("cu_seqlens", "q"),
            values("token_ids", "I"),
            values("loss_mask", "B"),
        )
        episodes = json.loads(header["__metadata__"]["episode_ids"])
        for episode, begin, end in zip(episodes, bounds[:-1], bounds[1:], strict=True):
            yield episode, tokens[begin:end], mask[begin:end]


def check(run: Run, folder: Path, steps: int) -> None:
    """What must hold, whatever was killed."""
    assert run.rows("SELECT state, count(*) FROM steps GROUP BY 1") == [("applied", steps)]
    episodes = steps * STEP_EPISODES
    assert run.rows("SELECT state, count(*) FROM episodes GROUP BY 1") == [("sealed", episodes)]
    states = dict(run.rows("SELECT attempt_id, state FROM attempts"))
    assert "intended" not in states.values()
    sealed = {name.rpartition("-")[0]: name for name, state in states.items() if state == "sealed"}
    assert list(states.values()).count("sealed") == len(sealed) == episodes
    # What a worker was told to be stored is stored, and once.
    acknowledged = [line.split()[0] for line in lines(folder / "results") if "broken" not in line]
    assert len(acknowledged) == len(set(acknowledged))
    assert {states[attempt] for attempt in acknowledged} == {"sealed"}
    assert all(states[attempt] != "sealed" for attempt in lines(folder / "killed"))
    # Every sealed episode is in one batch, with all tokens of its sealed attempt and no others.
    members = [name for (name,) in run.rows("SELECT episode_id FROM batch_members")]
    assert sorted(members) == sorted(sealed)
    sampled: Counter[str] = Counter()
    for line in lines(folder / "requests"):
        attempt, tokens = line.split()
        sampled[attempt] += int(tokens)
    texts, trained = vocabulary(), Counter[str]()
    for episode, tokens, mask in sequences(run.folder / "batches"):
        text = b"".join(texts[token] for token in tokens).decode(errors="replace")
        assert re.findall(r"attempt (t\d+\.\d+-a\d+) \?", text) == [sealed[episode]], text
        trained[sealed[episode]] += sum(mask)
    assert trained == Counter({attempt: sampled[attempt] for attempt in sealed.values()})
    print(f"attempts: {Counter(states.values())}, acknowledged: {len(acknowledged)}")
    print(f"agents killed: {len(lines(folder / 'killed'))}, tokens trained: {trained.total()}")


def permit(folder: Path, requests: int) -> None:
    new = folder / "permit.new"
    new.write_text(str(requests))
    new.rename(folder / "permit")


def kill_agent(folder: Path) -> None:
    """Has any worker kill its agent."""
    before = len(lines(folder / "killed"))

    def is_killed() -> bool:
        (folder / "kill").touch()
        return len(lines(folder / "killed")) > before

    wait_until(is_killed, "a worker kills its agent")
    (folder / "kill").unlink(missing_ok=True)


def test_kills_of_run_worker_agent_and_engine_lose_and_double_nothing(
    start_run: Start, worker: Worker, engine: Engine, tmp_path: Path
) -> None:
    rounds = int(os.environ.get("ORCHESTRATE_GATEWAY_KILLS", "1"))
    steps, draw = 2 * rounds, random.Random(21)
    assignments = [
        f'engine.url="{engine.forwarder.url}"',
        'engine.probe_interval="200ms"',
        'gateway.listen="127.0.0.1:0"',
        'gateway.lease="4s"',
        f"run.steps={steps}",
        'run.retry_pause="0s"',
        "run.max_broken_share=1.0",
        "run.keep_batches=100000",
        "rollout.max_attempts=1000",
        "rollout.groups_per_step=2",
        "rollout.max_groups_per_step=2",
        'rollout.episode_timeout="20m"',
    ]
    settings = [word for assignment in assignments for word in ("--set", assignment)]
    permit(tmp_path, 0)
    config = str(ROOT / "examples/python-environment/run.toml")
    run = start_run("run", "--config", config, *settings)
    gateway = Forwarder()
    gateway.target = run.url

    def start() -> subprocess.Popen[bytes]:
        return worker(SCRIPT, gateway.url, str(tmp_path))

    workers = [start() for _ in range(WORKERS)]
    kills = rounds * len(VICTIMS)
    spacing = steps * STEP_EPISODES * REQUESTS // (kills + 1)
    for number in range(kills):
        # Earlier attempts are repeated, so there are at least this many requests.
        point = spacing * number + 1 + draw.randrange(spacing)
        permit(tmp_path, point + WORKERS)

        def is_reached(point: int = point) -> bool:
            assert run.process.poll() is None, run.log()
            return len(lines(tmp_path / "requests")) >= point

        wait_until(is_reached, "agents make requests")
        victim = VICTIMS[number % len(VICTIMS)]
        if victim == "agent":
            kill_agent(tmp_path)
        elif victim == "worker":
            index = draw.randrange(WORKERS)
            workers[index].kill()
            workers[index].wait()
            workers[index] = start()
        elif victim == "run":
            run.kill()
            gateway.target = None
            run.resume()
            gateway.target = run.url
        else:
            engine.kill()
            engine.start()
    permit(tmp_path, 1 << 60)
    assert run.wait() == 0, run.log()
    (tmp_path / "over").touch()
    for process in workers:
        assert process.wait(120) == 0
    check(run, tmp_path, steps)
