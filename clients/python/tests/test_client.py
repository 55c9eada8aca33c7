"""The client against a scripted gateway."""

from __future__ import annotations

import asyncio
import json
import os
import runpy
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import EPISODE, ROOT, TASK, Scripted, wait_for

import orchestrate
from orchestrate import Gateway
from orchestrate.codes import ATTRIBUTION
from orchestrate.environment import run_function
from orchestrate.wire import check_reply

Start = Callable[..., Scripted]
EndLimits = Callable[[Callable[[], bool]], None]


def over(code: str, status: int = 410) -> tuple[int, Any]:
    return status, {"error": {"code": code, "message": f"it is {code}"}}


def plain(path: str, body: Any) -> tuple[int, Any]:
    """Offers episodes, and takes everything back."""
    return 200, EPISODE if path.endswith("take") else {"outcome": "scored"}


def beating() -> list[threading.Thread]:
    """The threads that send heartbeats."""
    return [thread for thread in threading.enumerate() if thread.name.startswith("heartbeats")]


def test_an_episode_has_its_task_and_urls_and_its_heartbeats(scripted: Start) -> None:
    server = scripted(plain)
    began = time.monotonic()
    with Gateway(server.url, "secret", worker="me") as gateway, gateway.take() as episode:
        assert (episode.task.id, episode.task.row["answer"]) == ("sum__1", "2")
        assert episode.openai_base_url == server.url + "/e/s/v1"
        assert (episode.anthropic_base_url, episode.api_key) == (server.url + "/e/s", "k")
        wait_for(lambda: len(server.paths("heartbeat")) >= 3, "heartbeats")
        episode.metrics["turns"] = 2
        assert episode.finish(0.5, {"length": 3}) == "scored"
        periods = (time.monotonic() - began) / (EPISODE["lease_s"] / 4)
        # Within one period of the end, a heartbeat may be under way.
        assert len(server.paths("heartbeat")) <= periods + 1, "heartbeats are more frequent"
        wait_for(lambda: not beating(), "the heartbeats end with the episode")
    assert server.paths("finish") == [{"reward": 0.5, "metrics": {"turns": 2.0, "length": 3.0}}]
    assert {header["authorization"] for header in server.headers} == {"Bearer secret"}


def test_requests_are_repeated_with_the_same_content_until_one_is_answered(scripted: Start) -> None:
    tries = {"take": 0, "finish": 0}

    def answer(path: str, body: Any) -> tuple[int, Any] | None:
        for name in tries:
            if path.endswith(name):
                tries[name] += 1
                if tries[name] == 1:
                    return None
                if tries[name] == 2:
                    return over("not_stored", 503)
        return plain(path, body)

    server = scripted(answer)
    with Gateway(server.url) as gateway, gateway.take() as episode:
        episode.finish(1.0)
    assert tries == {"take": 3, "finish": 3}
    assert len({body["take_id"] for body in server.paths("take")}) == 1
    assert server.paths("finish") == [{"reward": 1.0, "metrics": {}}] * 3


def test_rewards_outside_the_range_and_metrics_without_a_value_are_refused(scripted: Start) -> None:
    server = scripted(plain)
    with Gateway(server.url) as gateway, gateway.take() as episode:
        for reward in (float("nan"), float("inf"), -0.01, 1.01):
            with pytest.raises(ValueError, match="must be from 0 to 1"):
                episode.finish(reward)
        with pytest.raises(ValueError, match="must be finite"):
            episode.finish(1.0, {"a": float("nan")})
        # Text is refused, also if it reads like a number.
        for value in ("1", " 1e0 ", b"1"):
            text: Any = value
            with pytest.raises(ValueError, match=r"reward = .* must be a number"):
                episode.finish(text)
            with pytest.raises(ValueError, match=r"metric a = .* must be a number"):
                episode.finish(1.0, {"a": text})
        twice: Any = {1: 1.0, "1": 2.0}
        with pytest.raises(ValueError, match="two metrics have one name"):
            episode.finish(1.0, twice)
        assert server.paths("finish") == []
        episode.finish(1.0)


class Interrupt(BaseException):
    pass


@pytest.mark.parametrize(
    ("error", "sent"),
    [
        (
            None,
            {"failure": {"kind": "environment", "message": "the worker ended without a reward"}},
        ),
        (orchestrate.AgentFailure("no"), {"failure": {"kind": "agent", "message": "no"}}),
        (orchestrate.EpisodeEnded("turns"), {"reward": 0.0, "metrics": {}}),
        (Interrupt(), None),
        (ZeroDivisionError("mine"), "environment"),
    ],
)
def test_a_context_returns_its_episode_whatever_happens(
    scripted: Start, error: BaseException | None, sent: Any
) -> None:
    server = scripted(plain)

    def run() -> None:
        with Gateway(server.url) as gateway, gateway.take():
            if error is not None:
                raise error

    if error is None:
        run()
    else:
        with pytest.raises(type(error)):
            run()
    finished = server.paths("finish")
    if sent is None:
        assert finished == []
        assert len(server.paths("abandon")) == 1
    elif sent == "environment":
        assert finished[0]["failure"]["kind"] == "environment"
        assert "ZeroDivisionError: mine" in finished[0]["failure"]["message"]
    else:
        assert finished == [sent]


def test_a_lost_lease_is_known_and_its_result_raises(scripted: Start) -> None:
    server = scripted(
        lambda path, body: plain(path, body) if "take" in path else over("lease_over")
    )
    with Gateway(server.url) as gateway:
        episode = gateway.take()
        wait_for(lambda: episode.lost is not None, "the lease is known to be lost")
        with pytest.raises(orchestrate.LeaseOver), episode:
            episode.finish(1.0)
    assert len(server.paths("heartbeat")) == 1


def test_refusals_are_typed_and_not_repeated(scripted: Start) -> None:
    server = scripted(lambda path, body: over("unauthorized", 401))
    with Gateway(server.url) as gateway, pytest.raises(orchestrate.Refused) as refused:
        gateway.take()
    assert (refused.value.status, len(server.requests)) == (401, 1)
    ended = scripted(lambda path, body: over("run_over"))
    with Gateway(ended.url) as gateway, pytest.raises(orchestrate.RunOver):
        gateway.take()
    garbage = scripted(lambda path, body: (418, "tea"))
    with Gateway(garbage.url) as gateway, pytest.raises(orchestrate.Refused):
        gateway.take()
    absent = Gateway("http://127.0.0.1:9", patience=0.3)
    with pytest.raises(orchestrate.Unreachable, match=r"127\.0\.0\.1:9"):
        absent.take()
    none = scripted(lambda path, body: (204, None))
    with Gateway(none.url) as gateway, pytest.raises(TimeoutError):
        gateway.take(timeout=0.2)


def test_chat_reads_calls_and_tells_ends_apart(scripted: Start) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    broken = {"id": "d", "type": "function", "function": {"name": "add", "arguments": "{"}}
    message = {"role": "assistant", "content": None, "tool_calls": [call, broken]}
    replies = iter(
        [
            (503, {}),
            (200, {"choices": [{"message": message, "finish_reason": "tool_calls"}]}),
            (400, {"error": {"code": "episode_ended", "message": "all turns are used"}}),
            (404, {"error": {"code": "episode_unknown", "message": "no episode"}}),
        ]
    )
    server = scripted(
        lambda path, body: next(replies) if path.endswith("completions") else plain(path, body)
    )
    with Gateway(server.url) as gateway, gateway.take() as episode:
        reply = episode.chat([{"role": "user", "content": "hi"}], max_tokens=5)
        first, second = reply.tool_calls
        assert (first.name, first.arguments, second.text) == ("add", {"a": 1}, "{")
        with pytest.raises(orchestrate.MalformedCall, match="call of 'add' are not JSON"):
            assert second.arguments
        assert "content" not in reply.message
        with pytest.raises(orchestrate.EpisodeEnded, match="all turns"):
            episode.chat([])
        with pytest.raises(orchestrate.LeaseOver):
            episode.chat([])
        episode.finish(0.0)
    sent = server.paths("completions")[0]
    assert (sent["model"], sent["max_tokens"]) == ("policy", 5)


@pytest.mark.parametrize("client", ["blocking", "asyncio"])
def test_a_request_is_sent_again_for_as_long_as_the_gateway_is_away(
    scripted: Start, client: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("orchestrate.shared.PAUSES_S", (0.01,))
    message = {"role": "assistant", "content": "ok"}
    reply = {"choices": [{"message": message, "finish_reason": "stop"}]}
    replies = iter([None] * 10 + [(200, reply)])
    server = scripted(
        lambda path, body: next(replies) if path.endswith("completions") else plain(path, body)
    )

    def blocking() -> str:
        with Gateway(server.url) as gateway, gateway.take() as episode:
            return episode.chat([]).content

    async def awaited() -> str:
        async with orchestrate.AsyncGateway(server.url) as gateway, await gateway.take() as episode:
            return (await episode.chat([])).content

    assert (blocking() if client == "blocking" else asyncio.run(awaited())) == "ok"
    assert len(server.paths("completions")) == 11


MALFORMED = ["", "{", "[1]", "null", '"{}"', '{"a": NaN}', '{"a": ' + "[" * 100_000, "9" * 5000]


@pytest.mark.parametrize("client", ["blocking", "asyncio"])
@pytest.mark.parametrize("text", MALFORMED, ids=range(len(MALFORMED)))
def test_malformed_arguments_are_the_policys_result_and_never_an_empty_object(
    scripted: Start, client: str, text: str
) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "add", "arguments": text}}
    message = {"role": "assistant", "content": None, "tool_calls": [call]}
    reply = {"choices": [{"message": message, "finish_reason": "tool_calls"}]}
    server = scripted(
        lambda path, body: (200, reply) if path.endswith("completions") else plain(path, body)
    )

    def blocking() -> None:
        with Gateway(server.url) as gateway, gateway.take() as episode:
            assert episode.chat([]).tool_calls[0].arguments

    async def awaited() -> None:
        async with orchestrate.AsyncGateway(server.url) as gateway, await gateway.take() as episode:
            reply = await episode.chat([])
            assert reply.tool_calls[0].arguments

    with pytest.raises(orchestrate.MalformedCall):
        blocking() if client == "blocking" else asyncio.run(awaited())
    (sent,) = server.paths("finish")
    assert sent["failure"]["kind"] == "agent" and "'add'" in sent["failure"]["message"]


def error(code: str, status: int) -> tuple[int, Any]:
    return status, {"error": {"code": code, "message": f"it is {code}"}}


#: What the client raises for each code, whatever the status.
RAISED: dict[str, type[Exception]] = {
    "policy": orchestrate.EpisodeEnded,
    "environment": orchestrate.Refused,
    "infrastructure": orchestrate.Refused,
    "lease": orchestrate.LeaseOver,
}
CODES = [*ATTRIBUTION.items(), ("a_code_of_a_later_version", "environment")]


@pytest.mark.parametrize("status", [400, 404, 413, 422])
@pytest.mark.parametrize(("code", "whose"), CODES)
def test_the_code_of_an_error_decides_what_it_means(code: str, whose: str, status: int) -> None:
    text = json.dumps(error(code, status)[1])
    with pytest.raises(RAISED[whose]) as raised:
        check_reply(status, text)
    assert type(raised.value) is RAISED[whose]
    assert f"it is {code}" in str(raised.value)


@pytest.mark.parametrize(
    "text", ["", "null", "[]", "<html>", "{}", '{"error": 1}', '{"detail": []}']
)
def test_an_error_without_a_code_is_never_the_policys(text: str) -> None:
    for status in (400, 401, 404, 413, 422):
        with pytest.raises(orchestrate.Refused):
            check_reply(status, text)


@pytest.mark.parametrize(("code", "whose"), CODES)
@pytest.mark.parametrize("client", ["blocking", "asyncio"])
def test_only_the_policys_codes_give_a_reward_of_0(
    scripted: Start, client: str, code: str, whose: str
) -> None:
    def answer(path: str, body: Any) -> tuple[int, Any]:
        return error(code, 400) if path.endswith("completions") else plain(path, body)

    server = scripted(answer)

    def blocking() -> None:
        with Gateway(server.url) as gateway, gateway.take() as episode:
            episode.chat([])

    async def main() -> None:
        async with orchestrate.AsyncGateway(server.url) as gateway, await gateway.take() as episode:
            await episode.chat([])

    with pytest.raises(RAISED[whose]):
        blocking() if client == "blocking" else asyncio.run(main())
    sent = server.paths("finish")
    if whose == "policy":
        assert sent == [{"reward": 0.0, "metrics": {}}]
    elif whose == "lease":
        assert sent == []
    else:
        assert [body["failure"]["kind"] for body in sent] == ["environment"]


@pytest.mark.parametrize(("code", "whose"), CODES)
def test_an_environment_that_meets_an_error_has_the_verdict_of_its_code(
    scripted: Start, code: str, whose: str
) -> None:
    server = scripted(
        lambda path, body: error(code, 400) if path.endswith("completions") else plain(path, body)
    )
    with Gateway(server.url) as gateway, gateway.take() as episode:
        ask = lambda episode: float(bool(episode.chat([])))  # noqa: E731
        if whose == "lease":
            with pytest.raises(orchestrate.LeaseOver):
                run_function(ask, episode)
        else:
            verdict = run_function(ask, episode)
            assert verdict.kind == ("reward" if whose == "policy" else "environment")
            assert verdict.reward == 0.0
        episode.finish(0.0)


def test_text_that_is_not_unicode_is_sent(scripted: Start) -> None:
    printed = b"caf\xe9".decode(errors="surrogateescape")
    message = {"role": "assistant", "content": "ok"}
    reply = {"choices": [{"message": message, "finish_reason": "stop"}]}
    server = scripted(
        lambda path, body: (200, reply) if path.endswith("completions") else plain(path, body)
    )
    with Gateway(server.url) as gateway, gateway.take() as episode:
        assert episode.chat([{"role": "user", "content": printed}]).content == "ok"
        episode.finish(0.0)

    async def main() -> None:
        async with orchestrate.AsyncGateway(server.url) as gateway, await gateway.take() as episode:
            assert (await episode.chat([{"role": "user", "content": printed}])).content == "ok"
            await episode.finish(0.0)

    asyncio.run(main())
    sent = [body["messages"][0]["content"] for body in server.paths("completions")]
    assert sent == [printed, printed]


def test_the_client_to_await_does_the_same(scripted: Start) -> None:
    server = scripted(plain)

    async def main() -> None:
        async with orchestrate.AsyncGateway(server.url) as gateway:
            async with await gateway.take() as episode:
                await reached(lambda: len(server.paths("heartbeat")) >= 3)
                assert await episode.finish(0.25) == "scored"
            with pytest.raises(ZeroDivisionError):
                async with await gateway.take():
                    raise ZeroDivisionError
            taken = asyncio.Event()
            running = asyncio.create_task(hang(gateway, taken))
            await taken.wait()
            running.cancel()
            with pytest.raises(asyncio.CancelledError):
                await running

    async def hang(gateway: orchestrate.AsyncGateway, taken: asyncio.Event) -> None:
        async with await gateway.take():
            taken.set()
            await asyncio.Event().wait()

    async def reached(condition: Callable[[], bool]) -> None:
        await asyncio.to_thread(wait_for, condition, "heartbeats")

    asyncio.run(main())
    assert server.paths("finish")[0] == {"reward": 0.25, "metrics": {}}
    assert server.paths("finish")[1]["failure"]["kind"] == "environment"
    assert len(server.paths("abandon")) == 1


@orchestrate.environment(timeout=600)
def behaving(episode: orchestrate.Episode) -> float | tuple[float, dict[str, float]]:
    """Does what the row says."""
    what = episode.task.row["do"]
    if what == "pid":
        return 1.0, {"pid": os.getpid()}
    if what == "ask":
        return float(episode.chat([]).content == "")
    if what == "hang":
        child = subprocess.Popen(["sleep", "600"])
        file = Path(episode.task.row["file"])
        file.with_suffix(".new").write_text(str(child.pid))
        file.with_suffix(".new").rename(file)
        while True:  # Also while the interpreter is busy.
            pass
    if what == "die":
        os._exit(3)
    if what == "nan":
        return float("nan")
    if what == "agent":
        raise orchestrate.AgentFailure("it deleted everything")
    if what == "ended":
        raise orchestrate.EpisodeEnded("no turns")
    raise KeyError(what)


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def behaviours(server: Start, names: list[str], file: str = "") -> Scripted:
    left = iter(names)
    lock = threading.Lock()

    def answer(path: str, body: Any) -> tuple[int, Any]:
        if not path.endswith("take"):
            return 200, {"outcome": "scored"}
        with lock:
            name = next(left, None)
        if name is None:
            return over("run_over")
        task = {**EPISODE["task"], "row": {"do": name, "file": file}}
        return 200, {**EPISODE, "task": task}

    return server(answer)


def test_an_environment_that_hangs_or_dies_is_ended_and_replaced(
    scripted: Start, tmp_path: Path, end_limits: EndLimits
) -> None:
    file = tmp_path / "pid"
    end_limits(file.exists)
    names = ["pid", "pid", "agent", "ended", "nan", "bug", "pid", "die", "pid", "hang", "pid"]
    server = behaviours(scripted, names, str(file))
    with Gateway(server.url) as gateway:
        assert orchestrate.work(behaving, gateway) == len(names)
    sent = server.paths("finish")
    kinds = [body.get("failure", {}).get("kind", "reward") for body in sent]
    assert kinds == [
        *("reward", "reward", "agent", "reward", "environment", "environment", "reward"),
        *("agent", "reward", "timeout", "reward"),
    ]
    pids = [body["metrics"]["pid"] for body in sent if body.get("metrics")]
    # One process runs all episodes, until it is replaced.
    assert pids[0] == pids[1] == pids[2] != pids[3] != pids[4] != os.getpid()
    assert "KeyError: 'bug'" in sent[5]["failure"]["message"]
    assert "exit code 3" in sent[7]["failure"]["message"]
    started = int(file.read_text())
    wait_for(lambda: not is_alive(started), "what the environment started ends with it")


def test_an_environment_asks_for_as_long_as_its_gateway_has_patience(scripted: Start) -> None:
    offered = behaviours(scripted, ["ask"])
    server = scripted(
        lambda path, body: None if path.endswith("completions") else offered.answer(path, body)
    )
    with Gateway(server.url, patience=0.5) as gateway:
        assert orchestrate.work(behaving, gateway) == 1
    # The third pause, of a second, would be too long.
    assert 1 <= len(server.paths("completions")) <= 3
    (sent,) = server.paths("finish")
    assert sent["failure"]["kind"] == "environment"
    assert "does not answer" in sent["failure"]["message"]


def test_a_worker_program_ends_when_its_patience_does() -> None:
    script = ROOT / "examples/external-agent/agent.py"
    command = [sys.executable, str(script), "--url", "http://127.0.0.1:9", "--patience", "0.3"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "clients/python")}
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 1, ended.stderr
    assert "error: the gateway http://127.0.0.1:9 does not answer" in ended.stderr


@pytest.mark.parametrize("line", ["1.0", "[1]", "0", "9", "null", '"1"'])
def test_the_examples_leave_a_call_without_a_valid_line_to_the_policy(
    scripted: Start, line: str
) -> None:
    arguments = f'{{"path": "a.py", "line": {line}, "new": "return 2"}}'
    function = {"name": "edit", "arguments": arguments}
    message = {"role": "assistant", "tool_calls": [{"id": "c", "function": function}]}
    reply = {"choices": [{"message": message, "finish_reason": "tool_calls"}]}
    row = {"module": "return 1", "fixed": "return 2"}
    episode = {**EPISODE, "task": {**TASK, "row": row}}
    server = scripted(
        lambda path, body: (
            (200, reply)
            if path.endswith("completions")
            else (200, episode if path.endswith("take") else {"outcome": "scored"})
        )
    )
    repair = runpy.run_path(str(ROOT / "examples/external-agent/agent.py"))["repair"]
    with Gateway(server.url) as gateway:
        assert orchestrate.work(repair, gateway, episodes=1) == 1
    assert server.paths("finish") == [{"reward": 0.0, "metrics": {}}]
    act = runpy.run_path(str(ROOT / "examples/python-environment/environment.py"))["act"]
    lines = ["return 1"]
    call = orchestrate.ToolCall("c", "edit", arguments)
    assert act(call, lines, ["return 2"]) == "edit call is not valid"
    assert lines == ["return 1"]


def test_functions_run_in_threads_and_work_stops_after_so_many(scripted: Start) -> None:
    server = behaviours(scripted, ["a"] * 100)
    with Gateway(server.url) as gateway:
        assert orchestrate.work(lambda episode: 0.5, gateway, workers=3, episodes=7) == 7
        assert orchestrate.work(behaving, gateway, episodes=1, in_process=True) == 1
    assert [body["reward"] for body in server.paths("finish")[:7]] == [0.5] * 7
    assert json.dumps(server.paths("finish")[7]).count("KeyError") == 2


#: A worker's script. Its first argument is a file that tells that a child has started.
SCRIPT = """
import os, sys
from pathlib import Path
import orchestrate
from orchestrate import workers

workers.STOP_S = 0.0

@orchestrate.environment
def idle(episode):
    return 0.0

if __name__ == "__main__":
    idle.main()
else:
    Path(os.environ["CHILDREN"], str(os.getpid())).touch()
"""


@pytest.mark.parametrize("interrupt", [None, signal.SIGTERM, signal.SIGINT])
def test_workers_that_get_no_episode_end_with_their_children(
    scripted: Start, tmp_path: Path, interrupt: signal.Signals | None
) -> None:
    # Either the secret is wrong, or the gateway is away for as long as the test takes.
    server = scripted(lambda *_: (403, {}) if interrupt is None else (503, {}))
    script, children = tmp_path / "idle.py", tmp_path / "children"
    script.write_text(SCRIPT)
    children.mkdir()
    process = subprocess.Popen(
        [sys.executable, str(script), "--workers", "2", "--url", server.url],
        env={**os.environ, "PYTHONPATH": str(ROOT / "clients/python"), "CHILDREN": str(children)},
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        if interrupt is not None:
            wait_for(lambda: len(server.requests) >= 2, "both workers ask for an episode")
            process.send_signal(interrupt)
        _, printed = process.communicate(timeout=240)
    finally:
        process.kill()
    assert process.returncode == (1 if interrupt is None else 130), printed
    assert "Traceback" not in printed
    assert ("error: " in printed) == (interrupt is None)
    pids = [int(file.name) for file in children.iterdir()]
    assert pids
    wait_for(lambda: not any(map(is_alive, pids)), "the children end")
