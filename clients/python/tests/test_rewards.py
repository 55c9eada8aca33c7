"""Environments with sandboxes, and rewards, in worker processes."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import EPISODE, Scripted, is_gone, wait_for

import orchestrate

Start = Callable[..., Scripted]
EndLimits = Callable[[Callable[[], bool]], None]


class Work:
    """What an environment returns, of a class of its own."""

    def __init__(self, value: str) -> None:
        self.value = value


@orchestrate.environment(timeout=600)
def graded(episode: orchestrate.Episode) -> Any:
    """Returns what the row says for the reward, or fails as it says."""
    episode.metrics["pid"] = os.getpid()
    episode.metrics["both"] = 1
    what = episode.task.row["do"]
    if what == "agent early":
        raise orchestrate.AgentFailure("it gave up")
    if what == "lambda":
        return lambda: what
    return Work(what)


@graded.reward(timeout=600)
def grade(episode: orchestrate.Episode, work: Work) -> float | tuple[float, dict[str, float]]:
    """Does what the environment returned."""
    assert episode.task.row["do"] == work.value
    match work.value:
        case "good":
            return 0.5, {"reward_pid": os.getpid(), "both": 2}
        case "hang":
            Path(episode.task.row["file"]).touch()
            time.sleep(600)
        case "die":
            os._exit(3)
        case "nan":
            return float("nan")
        case "agent":
            raise orchestrate.AgentFailure("it does not compile")
        case "chat":
            episode.chat([])
    raise KeyError(work.value)


@orchestrate.environment(timeout=600, image="orchestrate/micro")
def boxed(episode: orchestrate.Episode) -> str:
    """Opens a sandbox, writes its id to a file, and ends as the row says."""
    assert episode.run("echo begun > /begun").exit_code == 0
    log(episode)
    match episode.task.row["do"]:
        case "die":
            os._exit(3)
        case "bug":
            raise KeyError("mine")
        case "agent":
            episode.sandbox.read_file("nosuch")
    return episode.sandbox.id


@boxed.reward
def boxed_reward(episode: orchestrate.Episode, container: str) -> float:
    """Uses a sandbox of its own."""
    is_new = episode.run("test ! -e /begun").exit_code == 0
    log(episode)
    return float(is_new and episode.sandbox.id != container)


@orchestrate.environment(timeout=600, image="orchestrate/micro")
def slow(episode: orchestrate.Episode) -> float:
    """Opens a sandbox and hangs."""
    episode.run("setsid sleep 1000 >/dev/null 2>&1 &")
    log(episode)
    episode.run("sleep 1000", timeout=1000)
    return 1.0


@orchestrate.environment(timeout=600, image="orchestrate/nosuch")
def imageless(episode: orchestrate.Episode) -> float:
    """Needs an image that does not exist."""
    return float(episode.run("true").exit_code == 0)


def has_line(file: Path) -> bool:
    return file.exists() and file.read_text().endswith("\n")


def log(episode: orchestrate.Episode) -> None:
    with Path(episode.task.row["file"]).open("a") as file:
        print(episode.sandbox.id, file=file)


def work(
    scripted: Start,
    environment: orchestrate.Environment,
    names: list[str],
    file: Path = Path(),
    **task: Any,
) -> list[Any]:
    """Runs one episode per name. Returns what was sent for each."""
    left = iter(names)

    def answer(path: str, body: Any) -> tuple[int, Any]:
        if not path.endswith("take"):
            return 200, {"outcome": "scored"}
        name = next(left, None)
        if name is None:
            return 410, {"error": {"code": "run_over", "message": "it is over"}}
        row = {"do": name, "file": str(file)}
        return 200, {**EPISODE, "task": {**EPISODE["task"], "row": row, **task}}

    server = scripted(answer)
    with orchestrate.Gateway(server.url) as gateway:
        assert orchestrate.work(environment, gateway) == len(names)
    return server.paths("finish")


def kinds(sent: list[Any]) -> list[str]:
    return [body.get("failure", {}).get("kind", "reward") for body in sent]


def test_a_reward_runs_in_a_fresh_process_and_its_failures_are_typed(
    scripted: Start, tmp_path: Path, end_limits: EndLimits
) -> None:
    hung = tmp_path / "hung"
    end_limits(hung.exists)
    names = ["good", "hang", "good", "die", "nan", "agent", "bug", "chat", "lambda", "agent early"]
    sent = work(scripted, graded, names, hung)
    assert kinds(sent) == [
        *("reward", "timeout", "reward", "agent", "environment"),
        *("agent", "environment", "environment", "environment", "agent"),
    ]
    first, second = sent[0]["metrics"], sent[2]["metrics"]
    assert (sent[0]["reward"], first["both"]) == (0.5, 2.0)
    # The process of the environment goes on, that of the reward does not.
    assert first["pid"] == second["pid"]
    assert len({first["pid"], first["reward_pid"], second["reward_pid"], os.getpid()}) == 4
    assert "the reward took longer than 600 s" in sent[1]["failure"]["message"]
    assert "the reward's process ended with exit code 3" in sent[3]["failure"]["message"]
    assert "cannot ask the policy" in sent[7]["failure"]["message"]


def test_a_reward_runs_in_the_notebooks_process_too(scripted: Start) -> None:
    server = scripted(
        lambda path, body: (
            (200, {**EPISODE, "task": {**EPISODE["task"], "row": {"do": "good"}}})
            if path.endswith("take")
            else (200, {"outcome": "scored"})
        )
    )
    with orchestrate.Gateway(server.url) as gateway:
        assert orchestrate.work(graded, gateway, episodes=1, in_process=True) == 1
    (sent,) = server.paths("finish")
    assert (sent["reward"], sent["metrics"]["reward_pid"]) == (0.5, os.getpid())


def test_an_environment_has_one_reward() -> None:
    with pytest.raises(ValueError, match="graded has a reward function already"):
        graded.reward(grade)


def test_sandboxes_end_with_their_episode_however_it_ends(
    scripted: Start, image: str, tmp_path: Path
) -> None:
    file = tmp_path / "containers"
    sent = work(scripted, boxed, ["good", "bug", "die", "agent", "good"], file)
    assert kinds(sent) == ["reward", "environment", "agent", "agent", "reward"]
    assert (sent[0]["reward"], sent[4]["reward"]) == (1.0, 1.0)
    assert "cannot read nosuch" in sent[3]["failure"]["message"]
    containers = file.read_text().split()
    assert len(set(containers)) == len(containers) == 7
    for container in containers:
        wait_for(lambda container=container: is_gone(container), "the container is removed")


def test_a_time_limit_of_an_environment_removes_its_sandbox(
    scripted: Start, image: str, tmp_path: Path, end_limits: EndLimits
) -> None:
    file = tmp_path / "containers"
    end_limits(lambda: has_line(file))
    assert kinds(work(scripted, slow, ["hang"], file)) == ["timeout"]
    (container,) = file.read_text().split()
    wait_for(lambda: is_gone(container), "the container is removed")


def test_a_missing_image_is_a_failure_of_the_environment(scripted: Start, image: str) -> None:
    (sent,) = work(scripted, imageless, ["any"])
    assert sent["failure"]["kind"] == "environment"
    assert "run `docker pull orchestrate/nosuch`" in sent["failure"]["message"]


@orchestrate.environment
def of_the_task(episode: orchestrate.Episode) -> float:
    """Uses the task's image, folder and files."""
    done = episode.run("pwd; cat a.txt")
    return float(done.stdout == "/work\nhello")


def test_a_sandbox_has_the_image_the_folder_and_the_files_of_its_task(
    scripted: Start, image: str
) -> None:
    task = {"image": image, "workdir": "/work", "files": {"a.txt": "hello"}}
    (sent,) = work(scripted, of_the_task, ["any"], **task)
    assert sent["reward"] == 1.0
    (sent,) = work(scripted, of_the_task, ["any"])
    assert "task sum__1 has no image; name one" in sent["failure"]["message"]
