"""Workers and real runs: the examples, kills of either side, and what is refused.

Needs the orchestrator's program: `ORCHESTRATE_BIN`, or one below `target/`.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import socket
import ssl
import subprocess
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from conftest import ROOT, Run, program, wait_for

import orchestrate

Start = Callable[..., Run]
Worker = Callable[..., "subprocess.Popen[bytes]"]

EXAMPLES = ROOT / "examples"
CONFIG = ("--config", str(EXAMPLES / "python-environment/run.toml"))
SLOW = Path(__file__).parent / "slow_worker.py"


def free_port() -> int:
    """A free port below the range that the kernel assigns: no other process gets it while the run
    is away."""
    for port in random.sample(range(20_000, 32_000), 200):
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise AssertionError("no free port")


def listen(port: int = 0) -> tuple[str, str]:
    return "--set", f"gateway.listen=127.0.0.1:{port}"


def settings(*assignments: str) -> list[str]:
    return [word for assignment in assignments for word in ("--set", assignment)]


def check_journal(run: Run) -> None:
    """Every episode has one result, every attempt one state, and no batch has one twice."""
    assert run.rows("SELECT count(*) FROM attempts WHERE state = 'intended'") == [(0,)]
    sealed = "SELECT episode_id FROM attempts WHERE state = 'sealed'"
    assert run.rows(f"SELECT count(*) FROM ({sealed} GROUP BY 1 HAVING count(*) > 1)") == [(0,)]
    assert run.rows("SELECT count(*) FROM episodes WHERE state = 'open'") == [(0,)]
    member = "SELECT count(*) FROM batch_members WHERE episode_id NOT IN"
    assert run.rows(f"{member} ({sealed})") == [(0,)]


def test_the_python_environment_trains_the_bundled_policy(start_run: Start, worker: Worker) -> None:
    run = start_run("run", *CONFIG, *listen())
    script = EXAMPLES / "python-environment/environment.py"
    process = worker(script, "--workers", "3", ORCHESTRATE_URL=run.url)
    assert run.wait() == 0, run.log()
    assert process.wait(300) == 0
    check_journal(run)
    lines = [json.loads(line) for line in (run.folder / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "reward_mean" in line]
    assert len(steps) == 3, run.log()
    for line in steps:
        assert 0.0 < line["reward_mean"] < 1.0
        assert line["worker_metrics"]["messages"] >= 2
        assert line["routing_missing"] == 0
    assert run.states().keys() == {"sealed"}


def test_a_python_environment_with_sandboxes_trains_the_bundled_policy(
    start_run: Start, worker: Worker, image: str
) -> None:
    config = str(EXAMPLES / "python-sandbox/run.toml")
    run = start_run("run", "--config", config, *listen(), *settings("run.steps=1"))
    script = EXAMPLES / "python-sandbox/environment.py"
    process = worker(script, "--workers", "2", ORCHESTRATE_URL=run.url)
    assert run.wait(600) == 0, run.log()
    assert process.wait(300) == 0
    check_journal(run)
    lines = [json.loads(line) for line in (run.folder / "metrics.jsonl").read_text().splitlines()]
    (step,) = [line for line in lines if "reward_mean" in line]
    assert 0.0 < step["reward_mean"] < 1.0
    assert step["routing_missing"] == 0
    assert run.states().keys() == {"sealed"}


def test_the_external_agent_trains_the_bundled_policy_and_outlives_a_kill(
    start_run: Start, worker: Worker
) -> None:
    run = start_run("run", *CONFIG, *listen(free_port()), *settings("run.steps=6"))
    script = EXAMPLES / "external-agent/agent.py"
    process = worker(script, "--url", run.url, "--workers", "4", "--patience", "240")
    wait_for(lambda: run.states().get("sealed", 0) >= 8, "episodes have ended")
    run.kill()
    run.resume()
    assert run.wait() == 0, run.log()
    assert process.wait(300) == 0
    check_journal(run)
    lines = [json.loads(line) for line in (run.folder / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "reward_mean" in line]
    assert [line["global_step"] for line in steps] == [1, 2, 3, 4, 5, 6]
    for line in steps:
        assert 0.0 < line["reward_mean"] < 1.0
        assert line["groups_kept"] == 3
        assert line["grad_norm"] > 0.0
        assert line["routing_missing"] == 0


def test_the_external_agent_is_evaluated(start_run: Start, worker: Worker) -> None:
    rows = EXAMPLES / "python-environment/rows.jsonl"
    arguments = ("gateway", "--tasks", str(rows), "--listen", "127.0.0.1:0")
    run = start_run(*arguments, *settings("engine.model=environments/micro/policy"))
    process = worker(EXAMPLES / "external-agent/agent.py", "--url", run.url)
    assert run.wait() == 0, run.log()
    assert process.wait(300) == 0
    check_journal(run)
    count = len(rows.read_text().splitlines())
    assert run.states() == {"sealed": count}
    outcomes = [json.loads(row[0]) for row in run.rows("SELECT outcome FROM attempts")]
    assert {outcome["reward"] for outcome in outcomes} == {0.0, 1.0}


def test_a_verifiers_environment_trains_the_bundled_policy(start_run: Start) -> None:
    python = os.environ.get("ORCHESTRATE_VERIFIERS_PYTHON")
    if python is None:
        pytest.skip("ORCHESTRATE_VERIFIERS_PYTHON is not a Python with verifiers, httpx and uv")
    config = EXAMPLES / "verifiers/run.toml"
    run = start_run("run", "--config", str(config), *listen(), *settings("run.steps=2"))
    path = f"{EXAMPLES / 'verifiers'}{os.pathsep}{ROOT / 'clients/python'}"
    programs = f"{Path(python).parent}{os.pathsep}{os.environ['PATH']}"
    script, model = EXAMPLES / "verifiers/worker.py", ROOT / "environments/micro/policy"
    process = subprocess.Popen(
        [python, str(script), "--url", run.url, "--model", str(model)],
        env=os.environ | {"PYTHONPATH": path, "PATH": programs},
    )
    try:
        assert run.wait() == 0, run.log()
        assert process.wait(300) == 0
    finally:
        process.kill()
    check_journal(run)
    assert run.states().keys() == {"sealed"}
    lines = [json.loads(line) for line in (run.folder / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "reward_mean" in line]
    assert [line["routing_missing"] for line in steps] == [0, 0]
    # Prompts from another renderer still continue the sampled tokens.
    assert all(line.get("forks") is None for line in steps)


def test_a_killed_worker_costs_one_attempt(
    start_run: Start, worker: Worker, tmp_path: Path
) -> None:
    lease = settings("gateway.lease=10s", "run.steps=1", "run.retry_pause=0s")
    run = start_run("run", *CONFIG, *listen(), *lease)
    held, done = tmp_path / "held", tmp_path / "done"
    killed = worker(SLOW, run.url, str(held), "600")
    with orchestrate.Gateway(run.url) as gateway:
        mine = gateway.take()
        mine.chat([{"role": "user", "content": mine.task.prompt}])
        wait_for(lambda: gateway_count(run) >= 2, "the other worker has an episode")
        time.sleep(0.5)
        killed.kill()
        wait_for(lambda: run.states().get("broken", 0) == 1, "the attempt is broken")
        (outcome,) = run.rows("SELECT outcome FROM attempts WHERE state = 'broken'")
        assert "sent no heartbeat" in outcome[0]
        # The worker whose heartbeats went on has lost nothing.
        assert mine.finish(1.0) == "scored"
    worker(SLOW, run.url, str(done), "0")
    assert run.wait() == 0, run.log()
    check_journal(run)
    assert run.states()["broken"] == 1
    again = "SELECT count(*) FROM attempts WHERE state = 'sealed' AND attempt = 2"
    assert run.rows(again) == [(1,)]


def gateway_count(run: Run) -> int:
    leased: int = httpx.get(f"{run.url}/v1/episodes").json()["leased"]
    return leased


def test_a_killed_run_loses_no_acknowledged_result_and_doubles_none(
    start_run: Start, worker: Worker, tmp_path: Path
) -> None:
    run = start_run("run", *CONFIG, *listen(free_port()), *settings("run.retry_pause=0s"))
    files = [tmp_path / f"worker-{number}" for number in range(3)]
    processes = [worker(SLOW, run.url, str(file), "0.1") for file in files]

    def lines() -> list[str]:
        return [line for file in files if file.exists() for line in file.read_text().splitlines()]

    for wanted in (12, 24, 36):
        wait_for(
            lambda wanted=wanted: run.process.poll() is not None or len(lines()) > wanted,
            "progress",
        )
        if run.process.poll() is not None:
            break
        run.kill()
        run.resume()
    assert run.wait() == 0, run.log()
    for process in processes:
        assert process.wait(300) == 0
    check_journal(run)
    results = [line.split(" ", 1) for line in lines()]
    acknowledged = [attempt for what, attempt in results if what in ("scored", "truncated")]
    states = dict(run.rows("SELECT attempt_id, state FROM attempts"))
    assert len(acknowledged) == len(set(acknowledged)) > 12
    assert {states[attempt] for attempt in acknowledged} == {"sealed"}
    assert set(states.values()) <= {"sealed", "lost"}
    # No reply that a worker got is lost: its episode goes on after the kill.
    asked = {attempt for what, attempt in results if what == "asked"}
    assert {states[attempt] for attempt in asked} == {"sealed"}


def told(command: str, run: Run, *arguments: str) -> Any:
    """What the program says of a run."""
    words = [program(), command, run.folder, *arguments, "--json"]
    return json.loads(subprocess.run(words, capture_output=True, check=True, timeout=120).stdout)


def test_what_is_shown_of_a_run_is_true_before_and_after_a_kill(start_run: Start) -> None:
    run = start_run("run", *CONFIG, *listen(free_port()), *settings("run.retry_pause=0s"))

    def state(episode: orchestrate.Episode) -> str:
        newest = told("show", run, "--last", "100")["newest"]
        (found,) = [row["state"] for row in newest if row["id"] == episode.taken.attempt]
        assert isinstance(found, str)
        return found

    def ended() -> int:
        status = told("status", run)["status"]
        return -1 if status is None else int(status["counts"]["ended"])

    with orchestrate.Gateway(run.url, patience=240.0) as gateway:
        goes_on, is_cut, is_over = gateway.take(), gateway.take(), gateway.take()
        for episode in (goes_on, is_cut, is_over):
            episode.chat([{"role": "user", "content": episode.task.prompt}])
        assert is_over.finish(1.0) == "scored"
        assert [state(each) for each in (goes_on, is_cut, is_over)] == ["running"] * 2 + ["sealed"]
        wait_for(lambda: ended() == 1, "the status counts the episode that has ended")
        run.kill()
        (run.folder / "turns" / f"{is_cut.taken.attempt}.turns").write_bytes(b"\x07")
        states = [state(each) for each in (goes_on, is_cut, is_over)]
        assert states == ["resumable", "lost", "sealed"]
        assert told("status", run)["state"] == "stopped"
        assert told("show", run, goes_on.taken.attempt) == {
            "id": goes_on.taken.attempt,
            "state": "resumable",
        }
        assert told("show", run, is_over.taken.attempt)["attempt"] == is_over.taken.attempt
        run.resume()
        wait_for(lambda: state(goes_on) == "running", "the attempt goes on")
        assert state(is_cut) == "lost"
        assert "was killed before a worker got the attempt" in run.log()
        wait_for(lambda: ended() == 1, "the status counts what had ended before the kill")
        assert goes_on.finish(0.0) == "scored"
        wait_for(lambda: ended() == 2, "the status counts each episode once")
        assert [state(each) for each in (goes_on, is_cut, is_over)] == ["sealed", "lost", "sealed"]
        with contextlib.suppress(orchestrate.OrchestrateError):
            is_cut.abandon()


def test_a_killed_run_continues_the_episodes_of_its_workers(start_run: Start) -> None:
    run = start_run("run", *CONFIG, *listen(free_port()), *settings("run.retry_pause=0s"))

    def kill(change: Callable[[], object] = lambda: None) -> None:
        run.kill()
        change()
        run.resume()

    def go_on(reply: orchestrate.Reply) -> list[dict[str, Any]]:
        calls = reply.message.get("tool_calls") or []
        results = [{"role": "tool", "tool_call_id": call["id"], "content": "ok"} for call in calls]
        return [reply.message, *results, {"role": "user", "content": "go on"}]

    with orchestrate.Gateway(run.url, patience=240.0) as gateway:
        episode, damaged = gateway.take(), gateway.take()
        attempt, broken = episode.taken.attempt, damaged.taken.attempt
        history: list[dict[str, Any]] = [{"role": "user", "content": episode.task.prompt}]
        first = episode.chat(history, max_tokens=24)
        damaged.chat(history, max_tokens=24)
        history += go_on(first)
        kill()
        second = episode.chat(history, max_tokens=24)
        kill()
        # It asks again, as if the kill had come before it got the reply.
        again = episode.chat(history, max_tokens=24)
        assert (again.content, again.tool_calls) == (second.content, second.tool_calls)
        history += go_on(second)
        # A request that is on its way, wherever it is.
        with ThreadPoolExecutor() as threads:
            third = threads.submit(episode.chat, history, max_tokens=24)
            file = run.folder / "turns" / f"{broken}.turns"

            def damage() -> None:
                data = bytearray(file.read_bytes())
                data[len(data) // 2] ^= 1
                file.write_bytes(data)

            kill(damage)
            third.result()
        assert (run.folder / "turns" / f"{attempt}.turns").exists()
        assert episode.finish(1.0) == "scored"
        assert not (run.folder / "turns" / f"{attempt}.turns").exists()
        # The damaged one is named, and its episode is run again.
        assert f"{broken}.turns is damaged" in run.log()
        with pytest.raises(orchestrate.LeaseOver):
            damaged.chat(history)
        with pytest.raises(orchestrate.LeaseOver):
            damaged.finish(1.0)
    states = dict(run.rows("SELECT attempt_id, state FROM attempts"))
    assert (states[attempt], states[broken]) == ("sealed", "lost")
    ((text,),) = run.rows(f"SELECT summary FROM attempts WHERE attempt_id = '{attempt}'")
    summary = json.loads(text)
    assert summary["turns"] == 3
    assert not summary.get("forks")


def test_secrets_are_checked_and_agents_never_get_the_workers_secret(start_run: Start) -> None:
    secret = settings("gateway.secret_env=GATEWAY_SECRET", "run.retry_pause=0s")
    run = start_run("run", *CONFIG, *listen(), *secret)
    for wrong in (None, "wrong", "righ", "rightt"):
        with (
            orchestrate.Gateway(run.url, wrong) as gateway,
            pytest.raises(orchestrate.Refused) as e,
        ):
            gateway.take()
        assert e.value.status == 401
    with orchestrate.Gateway(run.url, "right") as gateway:
        episode = gateway.take()
        headers = {"authorization": f"Bearer {episode.api_key}"}
        take = {"worker": "w", "take_id": "t"}
        url = f"{run.url}/v1/episodes/take"
        assert httpx.post(url, json=take, headers=headers).status_code == 401
        chat = f"{episode.openai_base_url}/chat/completions"
        for key in ("right", "none"):
            reply = httpx.post(chat, json={}, headers={"authorization": f"Bearer {key}"})
            assert reply.status_code == 401
        other = chat.replace(episode.api_key, "0" * 48)
        assert httpx.post(other, json={}, headers=headers).status_code == 404
        # Another site's page, and garbage.
        page = {"authorization": "Bearer right", "origin": "http://evil.example"}
        assert httpx.post(url, json=take, headers=page).status_code == 403
        right = {"authorization": "Bearer right"}
        assert httpx.post(url, content=b"\x00", headers=right).status_code == 415
        as_json = {**right, "content-type": "application/json"}
        assert httpx.post(url, content=b"\x00", headers=as_json).status_code == 400
        # Abandoned before the policy was asked, it is offered again at no cost.
        attempt = episode.taken.attempt
        episode.abandon()
        taken = [gateway.take() for _ in range(8)]
        assert attempt in {one.taken.attempt for one in taken}
        # A reward without a question to the policy is not a result.
        assert taken[0].finish(1.0) == "broken"
        assert taken[1].fail("agent", "before the policy said anything") == "broken"
        taken[2].chat([{"role": "user", "content": "hello"}])
        assert taken[2].fail("agent", "it broke everything") == "truncated"
        taken[3].chat([{"role": "user", "content": "hello"}])
        assert taken[3].fail("timeout", "it took too long") == "truncated"
        taken[4].chat([{"role": "user", "content": "hello"}])
        assert taken[4].fail("environment", "mine") == "broken"
        outcomes = run.rows("SELECT attempt_id, outcome FROM attempts WHERE outcome IS NOT NULL")
        by_attempt = {attempt: json.loads(outcome) for attempt, outcome in outcomes}
        truncated = by_attempt[taken[2].taken.attempt]
        assert (truncated["limit"], truncated["reward"]) == ("agent_failure", 0.0)
        assert by_attempt[taken[3].taken.attempt]["limit"] == "episode_time"
        assert "mine" in by_attempt[taken[4].taken.attempt]["error"]


def test_an_environment_that_always_fails_stops_the_run_with_its_traceback(
    start_run: Start, worker: Worker, tmp_path: Path
) -> None:
    script = tmp_path / "broken.py"
    script.write_text(
        "import orchestrate\n"
        "@orchestrate.environment\n"
        "def broken(episode):\n"
        "    episode.chat([{'role': 'user', 'content': 'hello'}])\n"
        "    raise KeyError('my own mistake')\n"
        "if __name__ == '__main__':\n"
        "    broken.main()\n"
    )
    run = start_run("run", *CONFIG, *listen(), *settings("run.retry_pause=0s"))
    process = worker(script, "--workers", "4", ORCHESTRATE_URL=run.url)
    assert run.wait() == 5
    assert "KeyError: 'my own mistake'" in run.log()
    assert "did not stop in time" not in run.log()
    # The workers end with the run, although it failed.
    assert process.wait(30) == 0
    assert run.states().keys() <= {"broken", "intended"}


def certificate(folder: Path, name: str, address: str = "127.0.0.1") -> tuple[Path, Path]:
    """A new certificate that is its own authority, and its key, as PEM files."""
    if shutil.which("openssl") is None:
        pytest.skip("openssl is not installed")
    cert, key = folder / f"{name}.pem", folder / f"{name}-key.pem"
    made = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2"]
    names = ["-subj", f"/CN={name}", "-addext", f"subjectAltName=IP:{address}"]
    usage = ["-addext", "basicConstraints=critical,CA:FALSE"]
    files = ["-keyout", str(key), "-out", str(cert)]
    subprocess.run([*made, *names, *usage, *files], check=True, capture_output=True)
    return cert, key


def test_tls_is_served_and_an_open_address_needs_a_secret(start_run: Start, tmp_path: Path) -> None:
    cert, key = certificate(tmp_path, "gateway")
    tls = settings(f"gateway.tls_cert={cert}", f"gateway.tls_key={key}")
    run = start_run("run", *CONFIG, *listen(), *tls)
    assert run.url.startswith("https://")
    with orchestrate.Gateway(run.url, verify=ssl.create_default_context(cafile=cert)) as gateway:
        episode = gateway.take()
        assert episode.chat([{"role": "user", "content": "hello"}]).finish_reason
        assert episode.finish(0.0) == "scored"
    distrusting = orchestrate.Gateway(run.url, patience=0.2)
    with distrusting, pytest.raises(orchestrate.Unreachable, match="certificate"):
        distrusting.take()
    run.kill()
    command = [program(), "run", *CONFIG, *settings("gateway.listen=0.0.0.0:0")]
    command = [*command, "--run-dir", tmp_path / "open"]
    refused = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert refused.returncode == 3, refused.stderr
    assert "is reachable from other hosts" in refused.stderr


def test_workers_reach_a_gateway_with_mutual_tls(
    start_run: Start, worker: Worker, tmp_path: Path
) -> None:
    cert, key = certificate(tmp_path, "gateway")
    own, own_key = certificate(tmp_path, "worker")
    tls = {"tls_cert": cert, "tls_key": key, "tls_client_ca": own}
    assignments = [f"gateway.{name}={file}" for name, file in tls.items()]
    run = start_run("run", *CONFIG, *listen(), *settings(*assignments))
    # An environment: the processes in which it runs connect by themselves.
    script = tmp_path / "worker.py"
    script.write_text(
        "import orchestrate\n\n"
        "@orchestrate.environment\n"
        "def hello(episode):\n"
        "    episode.chat([{'role': 'user', 'content': 'hello'}])\n"
        "    return 0.5\n\n"
        "if __name__ == '__main__':\n"
        "    hello.main()\n"
    )
    files = ("--tls-ca", cert, "--tls-cert", own, "--tls-key", own_key)
    process = worker(script, *map(str, files), "--patience", "30", ORCHESTRATE_URL=run.url)
    wait_for(lambda: run.states().get("sealed", 0) >= 1, "an episode has ended")
    assert process.poll() is None
    context = ssl.create_default_context(cafile=cert)
    with (
        orchestrate.Gateway(run.url, patience=0.2, verify=context) as gateway,
        pytest.raises(TypeError, match="SSLContext"),
    ):
        orchestrate.work(orchestrate.environment(lambda _: 0.0), gateway)
    with (
        orchestrate.Gateway(run.url, patience=0.2, verify=str(cert)) as anonymous,
        pytest.raises(orchestrate.Unreachable),
    ):
        anonymous.take()
