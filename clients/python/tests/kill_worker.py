"""A worker that runs each episode's agent as a process of its own, for `test_kills.py`.

Arguments: URL and folder; for an agent also the episode, as JSON. In the folder:

* `requests`: a line for each answered request of an agent, with the attempt and the sampled tokens;
* `results`: a line for each acknowledged result, with the attempt and its outcome;
* `killed`: a line for each agent that was killed, with its attempt;
* `kill`: the worker that removes it kills its agent;
* `permit`: the number of answered requests from which agents wait;
* `over`: there once the run is over.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

#: Requests of an agent in one episode.
REQUESTS = 6

#: Seconds for which something may be awaited.
PATIENCE_S = 240.0


def lines(file: Path) -> list[str]:
    """The lines of a file that may not be there yet."""
    return file.read_text().splitlines() if file.exists() else []


def wait_until(condition: Callable[[], bool], what: str) -> None:
    """Waits for something that sends no events."""
    end = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < end, what
        time.sleep(0.01)


class Process:
    """What worker and agent share."""

    def __init__(self, url: str, folder: Path) -> None:
        self.address, self.folder = url.removeprefix("http://"), folder

    def note(self, file: str, line: str) -> None:
        with (self.folder / file).open("a") as out:
            out.write(f"{line}\n")

    def post(self, path: str, body: Any, key: str = "", tries: int = 0) -> tuple[int, Any]:
        headers = {
            "content-type": "application/json",
            "authorization": f"Bearer {key}",
            "x-stainless-retry-count": str(tries),
        }
        connection = http.client.HTTPConnection(self.address, timeout=PATIENCE_S)
        try:
            connection.request("POST", path, json.dumps(body), headers)
            reply = connection.getresponse()
            return reply.status, json.loads(reply.read() or b"null")
        finally:
            connection.close()

    def persist(self, path: str, body: Any, key: str = "") -> tuple[int, Any]:
        """Sends a request again and again while the gateway is away or asks for it."""
        end, tries = time.monotonic() + PATIENCE_S, 0
        while not (self.folder / "over").exists():
            assert self.folder.exists() and time.monotonic() < end, "the gateway is away"
            try:
                status, answer = self.post(path, body, key, tries)
                if status < 500:
                    return status, answer
            except (OSError, http.client.HTTPException, ValueError):
                pass
            tries += 1
            time.sleep(0.1)
        return 410, None

    def work(self) -> None:
        """Takes episodes until the run is over."""
        number = 0
        while True:
            take = {"worker": f"w{os.getpid()}", "take_id": f"{os.getpid()}-{number}", "wait_s": 5}
            status, episode = self.persist("/v1/episodes/take", take)
            if status == 410:
                return
            number += 1
            if status == 200:
                self.run(episode)

    def run(self, episode: Any) -> None:
        """One episode: heartbeats, the agent, and the result."""
        attempt, path = episode["attempt"], f"/v1/episodes/{episode['lease']}"
        over = threading.Event()

        def beat() -> None:
            while not over.wait(episode["lease_s"] / 8):
                # A gateway that is away may be back for the next one.
                with contextlib.suppress(OSError, http.client.HTTPException, ValueError):
                    self.post(f"{path}/heartbeat", {})

        threading.Thread(target=beat, daemon=True).start()
        arguments = [f"http://{self.address}", str(self.folder), json.dumps(episode)]
        agent = subprocess.Popen([sys.executable, "-S", __file__, *arguments])
        was_killed = False
        while agent.poll() is None:
            try:
                (self.folder / "kill").unlink()
                agent.kill()
                was_killed = True
            except FileNotFoundError:
                time.sleep(0.01)
        if agent.returncode == 0:
            # Each group has both rewards, so that all of its episodes are trained on.
            result: dict[str, Any] = {"reward": float(int(attempt[8:10]) % 2)}
        else:
            failure = {"kind": "environment", "message": f"the agent ended: {agent.returncode}"}
            result = {"failure": failure}
            if was_killed:
                self.note("killed", attempt)
        status, answer = self.persist(f"{path}/finish", result)
        over.set()
        if status == 200:
            self.note("results", f"{attempt} {answer['outcome']}")
        else:
            assert status == 410, answer

    def is_permitted(self) -> bool:
        return len(lines(self.folder / "requests")) < int((self.folder / "permit").read_text())

    def act(self, episode: Any) -> None:
        """The agent: some requests in one of the three dialects."""
        attempt, openai = episode["attempt"], episode["openai_path"]
        dialect = sum(attempt.encode()) % 3
        # The attempt's name marks its tokens.
        history: list[Any] = [{"role": "user", "content": f"attempt {attempt} ?"}]
        for number in range(REQUESTS):
            wait_until(self.is_permitted, "requests are permitted")
            path, field, limit = [
                (f"{openai}/chat/completions", "messages", "max_completion_tokens"),
                (f"{openai}/responses", "input", "max_output_tokens"),
                (f"{episode['anthropic_path']}/v1/messages", "messages", "max_tokens"),
            ][dialect]
            body = {"model": episode["model"], field: history, limit: 24}
            status, reply = self.persist(path, body, episode["api_key"])
            if status in (404, 410):
                sys.exit(1)  # The lease is over, or the run.
            assert status == 200, reply
            counts = reply["usage"]
            sampled = counts["completion_tokens"] if dialect == 0 else counts["output_tokens"]
            self.note("requests", f"{attempt} {sampled}")
            if dialect == 0:
                history.append(reply["choices"][0]["message"])
            elif dialect == 1:
                history.extend(reply["output"])
            else:
                history.append({"role": "assistant", "content": reply["content"]})
            history.append({"role": "user", "content": f"go on {number}"})


if __name__ == "__main__":
    process = Process(sys.argv[1], Path(sys.argv[2]))
    if len(sys.argv) == 3:
        process.work()
    else:
        process.act(json.loads(sys.argv[3]))
