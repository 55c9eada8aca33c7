"""A scripted gateway, and real runs of the program."""

from __future__ import annotations

import importlib
import json
import os
import re
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

import orchestrate
from orchestrate.docker import Daemon

ROOT = Path(__file__).resolve().parents[3]
TASK = {
    "id": "sum__1",
    "environment": "plain",
    "family": "plain",
    "prompt": "1+1?",
    "image": "",
    "workdir": "",
    "files": {},
    "row": {"answer": "2"},
}
EPISODE: dict[str, Any] = {
    "lease": "L",
    "attempt": "t000001.00-a01",
    "task": TASK,
    "model": "policy",
    "context": 448,
    "api_key": "k",
    "openai_path": "/e/s/v1",
    "anthropic_path": "/e/s",
    "lease_s": 0.4,
    "time_s": 60.0,
    "added_later": 1,
}


class Scripted:
    """A gateway whose answers are a function of path and body: status and JSON, or `None` to break
    the connection."""

    def __init__(self, answer: Callable[[str, Any], tuple[int, Any] | None]) -> None:
        self.answer = answer
        self.requests: list[tuple[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                length = int(self.headers.get("content-length", 0))
                body = json.loads(self.rfile.read(length) or b"null")
                outer.requests.append((self.path, body))
                outer.headers.append({key.lower(): value for key, value in self.headers.items()})
                reply = answer(self.path, body)
                if reply is None:
                    self.close_connection = True
                    return
                data = b"" if reply[1] is None else json.dumps(reply[1]).encode()
                self.send_response(reply[0])
                self.send_header("content-length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *_: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        # The default interval of 0.5 s would delay the end of every test.
        serve = {"target": self._server.serve_forever, "kwargs": {"poll_interval": 0.01}}
        threading.Thread(**serve, daemon=True).start()

    def paths(self, end: str) -> list[Any]:
        """The bodies sent to routes with this ending."""
        return [body for path, body in self.requests if path.endswith(end)]

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture
def scripted() -> Iterator[Callable[..., Scripted]]:
    servers: list[Scripted] = []

    def start(answer: Callable[[str, Any], tuple[int, Any] | None]) -> Scripted:
        servers.append(Scripted(answer))
        return servers[-1]

    yield start
    for server in servers:
        server.close()


def program() -> Path:
    """The orchestrator's program; skips the test if it is missing."""
    named = [os.environ.get("ORCHESTRATE_BIN")]
    target = Path(os.environ.get("CARGO_TARGET_DIR", ROOT / "target"))
    built = [target / kind / "orchestrate" for kind in ("release", "debug")]
    for path in [*filter(None, named), *built]:
        if Path(path).exists():
            return Path(path)
    required = os.environ.get("ORCHESTRATE_REQUIRE", "")
    assert "embedded" not in required, "the program orchestrate is required, but not built"
    pytest.skip("the program orchestrate is not built: `cargo build`, or set ORCHESTRATE_BIN")


@pytest.fixture
def image() -> str:
    """The image of sandboxes; skips the test if there is no Docker or no image."""
    name = "orchestrate/micro"
    try:
        Daemon().call("GET", f"/images/{name}/json")
    except orchestrate.SandboxFailure as error:
        required = os.environ.get("ORCHESTRATE_REQUIRE", "").split(",")
        if "docker" in required:
            pytest.fail(f"Docker is required: {error}")
        pytest.skip(f"Docker with the image {name} is missing: {error}")
    return name


def is_gone(container: str) -> bool:
    """Whether Docker has no such container."""
    try:
        Daemon().call("GET", f"/containers/{container}/json")
    except orchestrate.SandboxFailure as error:
        if error.status != 404:
            raise
        return True
    return False


def wait_for(condition: Callable[[], bool], what: str, timeout: float = 240.0) -> None:
    end = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < end, f"not within {timeout} s: {what}"
        time.sleep(0.05)


class Clock:
    """A clock that is past every time limit once something has happened."""

    def __init__(self, has_happened: Callable[[], bool]) -> None:
        self._has_happened = has_happened

    def monotonic(self) -> float:
        return time.monotonic() + (1e6 if self._has_happened() else 0.0)


@pytest.fixture
def end_limits(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], bool]], None]:
    """Function that ends the time limits of environments and rewards once something has happened,
    so that no test waits for a limit and no slow machine exceeds one."""

    def end(has_happened: Callable[[], bool]) -> None:
        module = importlib.import_module("orchestrate.environment")
        monkeypatch.setattr(module, "time", Clock(has_happened))

    return end


class Run:
    """A run whose episodes are taken by workers."""

    def __init__(self, folder: Path, arguments: list[str], log: Path) -> None:
        self.folder = folder
        self._log = log
        self._start([*arguments, "--run-dir", str(folder)])

    def _start(self, arguments: list[str]) -> None:
        with self._log.open("ab") as log:
            begin = log.tell()
            self.process = subprocess.Popen(
                [program(), *arguments],
                cwd=ROOT,
                stdout=log,
                stderr=log,
                env={**os.environ, "NO_COLOR": "1", "GATEWAY_SECRET": "right"},
            )
        end = time.monotonic() + 240
        while time.monotonic() < end:
            text = self._log.read_bytes()[begin:].decode()
            found = re.search(r"workers take episodes at (https?://[\d.]+:\d+)", text)
            if found:
                self.url = found[1]
                return
            if self.process.poll() is not None:
                break
            time.sleep(0.1)
        raise AssertionError(self.log())

    def log(self) -> str:
        return self._log.read_text()

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()

    def resume(self, command: str = "run") -> None:
        self._start([command, "--run-dir", str(self.folder), "--resume"])

    def wait(self, timeout: float = 900) -> int:
        return self.process.wait(timeout)

    def rows(self, query: str) -> list[tuple[Any, ...]]:
        """Rows of the journal."""
        with sqlite3.connect(f"file:{self.folder / 'orchestrate.db'}?mode=ro", uri=True) as journal:
            return journal.execute(query).fetchall()

    def states(self) -> dict[str, int]:
        """Attempts by state."""
        return dict(self.rows("SELECT state, count(*) FROM attempts GROUP BY state"))


@pytest.fixture
def start_run(tmp_path: Path) -> Iterator[Callable[..., Run]]:
    runs: list[Run] = []

    def start(*arguments: str) -> Run:
        runs.append(Run(tmp_path / "run", list(arguments), tmp_path / "run.log"))
        return runs[-1]

    yield start
    for run in runs:
        if run.process.poll() is None:
            run.kill()


@pytest.fixture
def worker(tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen[bytes]]]:
    """Starts a worker's script as a process."""
    workers: list[subprocess.Popen[bytes]] = []

    def start(script: Path, *arguments: str, **variables: str) -> subprocess.Popen[bytes]:
        path = str(ROOT / "clients/python")
        environment = {**os.environ, "PYTHONPATH": path, **variables}
        command = [sys.executable, str(script), *arguments]
        workers.append(subprocess.Popen(command, env=environment))
        return workers[-1]

    yield start
    for process in workers:
        process.kill()
        process.wait()
