"""A whole run with agents that do with their histories what agents do: edit, shorten and summarise
them, ask several times at once, go away and ask again, in three dialects, while weights change.

The engine's rows and log-probabilities are functions of the tokens (`oracle_servers.py`), so every
row, every log-probability and every label of every batch is checked, and every token that an agent
got is trained on exactly once. `ORCHESTRATE_ORACLE_REQUESTS` sets the number of requests.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import random
import re
import socket
import struct
import threading
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
from conftest import ROOT, Run
from oracle_servers import OracleEngine, OracleTrainer, prefixes

import orchestrate

POLICY = ROOT / "environments/micro/policy"
TOOL = {
    "type": "object",
    "properties": {"command": {"type": "string"}},
    "required": ["command"],
}
#: Agents at a time.
WORKERS = 6
#: Requests of one episode, and episodes of one step.
REQUESTS = 12
STEP_EPISODES = 8
#: What one reply shows of itself.
NAME = re.compile(r"\[(\d+)\]")

Entry = tuple[str, Any]


class Dialect:
    """How a history is sent, and a reply is read."""

    def __init__(self, path: str, key: str) -> None:
        self.path, self.key = path, key

    def body(self, history: list[Entry], system: str) -> dict[str, Any]:
        raise NotImplementedError

    def replies(self, answer: Any) -> list[tuple[Any, list[str]]]:
        """Each reply as it is sent back, and the ids of its calls."""
        raise NotImplementedError


class Chat(Dialect):
    def body(self, history: list[Entry], system: str) -> dict[str, Any]:
        messages: list[Any] = [{"role": "system", "content": system}]
        for kind, value in history:
            if kind == "user":
                messages.append({"role": "user", "content": value})
            elif kind == "result":
                call, text = value
                messages.append({"role": "tool", "tool_call_id": call, "content": text})
            else:
                messages.append(value)
        tool = {"name": "bash", "description": "Runs it.", "parameters": TOOL}
        return {"messages": messages, "tools": [{"type": "function", "function": tool}]}

    def replies(self, answer: Any) -> list[tuple[Any, list[str]]]:
        messages = [choice["message"] for choice in answer["choices"]]
        return [(m, [call["id"] for call in m.get("tool_calls") or []]) for m in messages]


class Responses(Dialect):
    def body(self, history: list[Entry], system: str) -> dict[str, Any]:
        items: list[Any] = []
        for kind, value in history:
            if kind == "user":
                items.append({"role": "user", "content": value})
            elif kind == "result":
                call, text = value
                items.append({"type": "function_call_output", "call_id": call, "output": text})
            else:
                items.extend(value)
        tool = {"type": "function", "name": "bash", "description": "Runs it.", "parameters": TOOL}
        return {"instructions": system, "input": items, "tools": [tool]}

    def replies(self, answer: Any) -> list[tuple[Any, list[str]]]:
        items = answer["output"]
        return [(items, [i["call_id"] for i in items if i["type"] == "function_call"])]


class Messages(Dialect):
    def body(self, history: list[Entry], system: str) -> dict[str, Any]:
        messages: list[Any] = []
        for kind, value in history:
            if kind == "user":
                messages.append({"role": "user", "content": value})
            elif kind == "result":
                call, text = value
                result = {"type": "tool_result", "tool_use_id": call, "content": text}
                messages.append({"role": "user", "content": [result]})
            else:
                messages.append({"role": "assistant", "content": value})
        tool = {"name": "bash", "description": "Runs it.", "input_schema": TOOL}
        return {"system": system, "messages": messages, "tools": [tool], "max_tokens": 1000}

    def replies(self, answer: Any) -> list[tuple[Any, list[str]]]:
        blocks = answer["content"]
        return [(blocks, [b["id"] for b in blocks if b["type"] == "tool_use"])]


def dialects(episode: Any) -> list[Dialect]:
    openai, anthropic = episode.openai_base_url, episode.anthropic_base_url
    return [
        Chat(f"{openai}/chat/completions", episode.api_key),
        Responses(f"{openai}/responses", episode.api_key),
        Messages(f"{anthropic}/v1/messages", episode.api_key),
    ]


class Over(Exception):
    """The episode takes no more requests."""


class Agent:
    """An agent with a random loop."""

    def __init__(self, episode: Any, draw: random.Random) -> None:
        self.draw, self.model = draw, episode.model
        self.dialect: Dialect = draw.choice(dialects(episode))
        self.http = httpx.Client(timeout=120)
        self.known: list[tuple[str, list[Entry]]] = []
        self.asked: list[dict[str, Any]] = []
        #: Numbers of the replies that the agent got.
        self.got: set[str] = set()

    def run(self) -> None:
        with self.http, contextlib.suppress(Over):
            for _ in range(REQUESTS):
                self.step()

    def step(self) -> None:
        draw = self.draw
        system, history = self.prompt()
        body = {"model": self.model, **self.dialect.body(history, system)}
        how = draw.choices(("once", "again", "several", "n", "gone"), (8, 1, 2, 1, 2))[0]
        if how == "again" and self.asked:
            self.ask(draw.choice(self.asked), system, None)
        elif how == "several":
            threads = [
                threading.Thread(target=self.ask_safely, args=(body, system, history))
                for _ in range(2)
            ]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        elif how == "n" and isinstance(self.dialect, Chat):
            self.ask({**body, "n": 2}, system, history)
        elif how == "gone":
            self.leave(body)
            self.ask(body, system, history)
        else:
            self.ask(body, system, history)
        self.asked.append(body)

    def prompt(self) -> tuple[str, list[Entry]]:
        """A history to send: one that is known, with what an agent adds or changes."""
        draw = self.draw
        if not self.known or draw.random() < 0.1:
            return f"s{draw.randrange(3)}", [("user", f"begin {draw.randrange(100)}")]
        system, history = draw.choice(self.known[-3:])
        history = list(history)
        if len(history) > 6 or draw.random() < 0.1:
            return system, [("user", f"so far {draw.randrange(100)}")]
        if draw.random() < 0.15:
            replies = [index for index, (kind, _) in enumerate(history) if kind == "reply"]
            # After an earlier reply with its results, something else.
            end = draw.choice(replies) + 1
            while end < len(history) and history[end][0] == "result":
                end += 1
            history = history[:end]
        if history[-1][0] != "result":
            history.append(("user", f"go on {draw.randrange(100)}"))
        return system, history

    def ask(self, body: dict[str, Any], system: str, history: list[Entry] | None) -> None:
        headers = {"authorization": f"Bearer {self.dialect.key}", "x-api-key": self.dialect.key}
        answer = self.http.post(self.dialect.path, json=body, headers=headers)
        if answer.status_code != 200:
            text = answer.text
            assert "context_length_exceeded" in text, text
            raise Over
        for reply, calls in self.dialect.replies(answer.json()):
            self.got.update(NAME.findall(json.dumps(reply)))
            if history is None:
                continue
            results: list[Entry] = [("result", (call, f"out {call[-3:]}")) for call in calls]
            self.known.append((system, [*history, ("reply", reply), *results]))

    def ask_safely(self, body: dict[str, Any], system: str, history: list[Entry]) -> None:
        with contextlib.suppress(Over):
            self.ask(body, system, history)

    def leave(self, body: dict[str, Any]) -> None:
        """Sends a request, and closes the connection before its reply is read."""
        url = httpx.URL(self.dialect.path)
        connection = http.client.HTTPConnection(url.host, url.port or 80, timeout=120)
        headers = {
            "content-type": "application/json",
            "authorization": f"Bearer {self.dialect.key}",
            "x-api-key": self.dialect.key,
        }
        connection.request("POST", url.raw_path.decode(), json.dumps(body), headers)
        if self.draw.random() < 0.5 and connection.sock is not None:
            connection.sock.recv(10)
            # Unread bytes make the close a reset, as when a process is killed.
            connection.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        connection.close()


class Batches:
    """Checks every batch, and keeps what was trained on."""

    def __init__(self, engine: OracleEngine) -> None:
        self.engine = engine
        self.texts = engine.vocabulary.texts
        self.rows, self.tokens, self.sequences = 0, 0, 0
        self.versions: Counter[int] = Counter()
        #: Names of trained replies by episode.
        self.trained: dict[str, Counter[str]] = {}

    def check(self, manifest: Path) -> tuple[int, int]:
        """Checks a batch; returns its tokens and loss tokens."""
        tokens = loss_tokens = 0
        for shard in json.loads(manifest.read_text())["shards"]:
            for episode, sequence in sequences(manifest.parent / shard["file"]):
                tokens += len(sequence["token_ids"])
                loss_tokens += self._check(episode, sequence)
        return tokens, loss_tokens

    def _check(self, episode: str, s: dict[str, Any]) -> int:
        model = self.engine.model
        self.sequences += 1
        text, loss_tokens, last = "", 0, len(s["token_ids"]) - 1
        for at, prefix in enumerate(prefixes(s["token_ids"])):
            version = s["policy_versions"][at]
            where = f"{episode}, token {at} of {last + 1}, version {version}"
            assert s["routing_valid"][at] == (at < last), f"{where}: validity"
            if at < last:
                # Its experts were chosen by the weights that sampled, or read, the next token.
                read_by, row = s["policy_versions"][at + 1], s["routed_experts"][at]
                if row != model.row(read_by, prefix):
                    others = range(self.engine.version + 1)
                    found = [other for other in others if row == model.row(other, prefix)]
                    raise AssertionError(f"{where}: a row of version {found}, not {read_by}")
                self.rows += 1
            if not s["loss_mask"][at]:
                text += "\n"
                continue
            logprob = model.logprob(version, prefix)
            assert s["rollout_logprobs"][at] == logprob, f"{where}: log-probability"
            loss_tokens += 1
            self.versions[version] += 1
            text += self.texts.get(s["token_ids"][at], "\n")
        self.tokens += loss_tokens
        self.trained.setdefault(episode, Counter()).update(NAME.findall(text))
        return loss_tokens


def sequences(shard: Path) -> list[tuple[str, dict[str, Any]]]:
    """Episode and tensors of every sequence of a shard."""
    data = shard.read_bytes()
    (length,) = struct.unpack_from("<Q", data)
    header = json.loads(data[8 : 8 + length])
    kinds = {"U8": "B", "U32": "I", "I64": "q", "F32": "f"}

    def values(name: str) -> list[Any]:
        begin, end = header[name]["data_offsets"]
        kind = kinds[header[name]["dtype"]]
        part = data[8 + length + begin : 8 + length + end]
        return list(struct.unpack(f"<{len(part) // struct.calcsize(kind)}{kind}", part))

    names = ("token_ids", "loss_mask", "rollout_logprobs", "policy_versions", "routing_valid")
    tensors = {name: values(name) for name in names}
    experts = values("routed_experts")
    width = len(experts) // len(tensors["token_ids"])
    tensors["routed_experts"] = [experts[i : i + width] for i in range(0, len(experts), width)]
    bounds = values("cu_seqlens")
    episodes = json.loads(header["__metadata__"]["episode_ids"])
    ends = zip(episodes, bounds[:-1], bounds[1:], strict=True)
    return [(e, {name: t[a:b] for name, t in tensors.items()}) for e, a, b in ends]


def work(run: Run, number: int, got: dict[str, set[str]], faults: list[str]) -> None:
    """Takes episodes until the run is over, with both rewards in each group. A fault ends it."""
    try:
        with orchestrate.Gateway(run.url) as gateway:
            while True:
                try:
                    episode = gateway.take()
                except orchestrate.RunOver:
                    return
                except orchestrate.Unreachable:
                    # It ended between two requests; its exit code says how.
                    run.wait()
                    return
                with episode:
                    attempt = episode.taken.attempt
                    agent = Agent(episode, random.Random(f"{number} {attempt}"))
                    agent.run()
                    got[attempt] = agent.got
                    episode.finish(reward=float(int(attempt[8:10]) % 2))
    except Exception as error:
        faults.append("".join(traceback.format_exception(error)))
        run.process.terminate()


def test_every_row_label_and_token_of_a_run_with_random_agents_is_right(
    start_run: Callable[..., Run], tmp_path: Path
) -> None:
    requests = int(os.environ.get("ORCHESTRATE_ORACLE_REQUESTS", "500"))
    steps = max(3, requests // (STEP_EPISODES * REQUESTS))
    engine = OracleEngine(POLICY)
    batches = Batches(engine)
    shape, checkpoints = engine.model.shape(), tmp_path / "checkpoints"
    trainer = OracleTrainer(POLICY, checkpoints, shape, batches.check)
    assignments = [
        f'engine.url="{engine.server.url}"',
        f'trainer.url="{trainer.server.url}"',
        'gateway.listen="127.0.0.1:0"',
        f"run.steps={steps}",
        "run.max_staleness=1",
        "rollout.groups_per_step=2",
        "rollout.max_groups_per_step=2",
        "rollout.max_turns=1000",
        "rollout.max_sequence_tokens=1000",
        "rollout.max_response_tokens=120",
        'rollout.episode_timeout="20m"',
    ]
    settings = [word for assignment in assignments for word in ("--set", assignment)]
    config = str(ROOT / "examples/python-environment/run.toml")
    run = start_run("run", "--config", config, *settings)
    got: dict[str, set[str]] = {}
    faults: list[str] = []
    workers = [
        threading.Thread(target=work, args=(run, number, got, faults)) for number in range(WORKERS)
    ]
    for worker in workers:
        worker.start()
    code = run.wait(600 + requests)
    for worker in workers:
        worker.join(60)
    faults += engine.server.faults + trainer.server.faults
    assert not faults, "\n".join([*faults, run.log()])
    assert code == 0, run.log()
    assert run.rows("SELECT state, count(*) FROM steps GROUP BY 1") == [("applied", steps)]
    sealed = run.rows("SELECT episode_id, attempt_id FROM attempts WHERE state = 'sealed'")
    assert len(sealed) == steps * STEP_EPISODES
    for episode, attempt in sealed:
        trained = batches.trained[episode]
        assert set(trained.values()) == {1}, f"{attempt}: trained twice"
        assert got[attempt] <= set(trained), f"{attempt}: not trained"
    # With at most one version of staleness, the third step is not sampled by the first weights.
    assert len(batches.versions) > 1, "the weights change"
    print(
        f"{len(sealed)} episodes, {batches.sequences} sequences, {batches.rows} rows, "
        f"{batches.tokens} trained tokens, {engine.updates} updates, {engine.aborted} aborts"
    )
