"""Environments as functions, run in child processes."""

from __future__ import annotations

import contextlib
import functools
import multiprocessing
import os
import signal
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection as Pipe
from multiprocessing.connection import wait
from typing import overload

from .client import Connection, Episode
from .wire import AgentFailure, EpisodeEnded, LeaseOver, OrchestrateError, Taken

#: What an environment returns: the reward, alone or with metrics.
Result = float | tuple[float, dict[str, float]]
Function = Callable[[Episode], Result]

#: Interval at which a running child is polled, in seconds.
POLL_S = 0.2
#: Time limit for a child to import its environment, in seconds.
START_S = 300.0


@dataclass(frozen=True)
class Verdict:
    """The end of an episode: a reward, or a failure with its text."""

    #: `reward`, or the kind of a failure: `environment`, `agent`, `timeout`.
    kind: str
    reward: float = 0.0
    metrics: dict[str, float] | None = None
    message: str = ""


class Environment:
    """A function that runs an episode and returns its reward; `environment` creates one.

    A direct call runs the function in this process. `work` runs it in child processes. A child that
    takes longer than `timeout` seconds is killed, with the processes that it started.
    """

    def __init__(self, function: Function, timeout: float) -> None:
        functools.update_wrapper(self, function)
        self.function = function
        self.timeout = timeout

    def __call__(self, episode: Episode) -> Result:
        """Runs the function in this process."""
        return self.function(episode)

    def __reduce__(self) -> str:
        # Child processes import it by its name.
        return self.function.__qualname__

    def main(self) -> None:
        """Runs workers as a program: see `orchestrate.main`."""
        from .workers import main

        main(self)


@overload
def environment(function: Function) -> Environment: ...


@overload
def environment(*, timeout: float = 600.0) -> Callable[[Function], Environment]: ...


def environment(
    function: Function | None = None, *, timeout: float = 600.0
) -> Environment | Callable[[Function], Environment]:
    """Turns a function into an environment, as `@environment` or `@environment(timeout=60)`.

    The function gets an `Episode`, asks the policy, and returns the reward from 0 to 1, or the
    reward and a dictionary of metrics. Other ways to end:

    * It raises `AgentFailure`: the policy's result, reward 0.
    * It does not catch `EpisodeEnded`: the policy has no turns or tokens left, reward 0, truncated.
    * It takes longer than `timeout` seconds, or its process dies: once the policy has replied, this
      is the policy's result, reward 0. Otherwise the attempt is retried.
    * It raises anything else: a failure of the environment. The attempt is retried, never
      rewarded, and the run stops if there are many such failures.
    """
    if function is None:
        return functools.partial(Environment, timeout=timeout)
    return Environment(function, timeout)


def run_function(function: Function, episode: Episode) -> Verdict:
    """Runs a function on an episode, and turns its result or exception into a verdict."""
    try:
        result = function(episode)
        reward, metrics = result if isinstance(result, tuple) else (result, {})
        return Verdict("reward", float(reward), {**episode.metrics, **metrics})
    except AgentFailure as error:
        return Verdict("agent", message=str(error))
    except EpisodeEnded:
        return Verdict("reward", 0.0, episode.metrics)
    except LeaseOver:
        raise
    except Exception as error:
        return Verdict("environment", message="".join(traceback.format_exception(error)))


def return_verdict(episode: Episode, verdict: Verdict) -> None:
    """Returns an episode to the gateway with its verdict."""
    if verdict.kind != "reward":
        episode.fail(verdict.kind, verdict.message)
        return
    try:
        episode.finish(verdict.reward, verdict.metrics)
    except ValueError as error:
        episode.fail("environment", f"the environment returned an invalid result: {error}")


class Child:
    """A process that runs an environment, one episode after another."""

    def __init__(self, function: Environment, connection: Connection, url: str) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, other = context.Pipe()
        arguments = (function, connection, url, other)
        self._process = context.Process(target=_serve, args=arguments)
        self._process.start()
        other.close()
        try:
            is_ready = self._pipe.poll(START_S) and self._pipe.recv()
        except (EOFError, OSError):
            is_ready = False
        if not is_ready:
            self.kill()
            raise OrchestrateError(
                "the environment's process did not start; its message is on standard error"
            )

    def run(self, taken: Taken, timeout: float, stop: threading.Event) -> Verdict | None:
        """Runs an episode. Returns `None` if `stop` was set or the lease is over. The child is dead
        after `stop`, after a timeout, and after it ended by itself."""
        end = time.monotonic() + timeout
        try:
            self._pipe.send(taken)
            while not stop.is_set():
                if self._pipe.poll(min(POLL_S, max(0.0, end - time.monotonic()))):
                    verdict: Verdict | None = self._pipe.recv()
                    if verdict is not None:
                        return verdict
                    # The lease is over.
                    return None
                if time.monotonic() >= end:
                    self.kill()
                    return Verdict("timeout", message=f"it took longer than {timeout} s")
        except (EOFError, OSError):
            self._process.join(1.0)
            code = self._process.exitcode
            self.kill()
            return Verdict(
                "agent", message=f"the environment's process ended with exit code {code}"
            )
        self.kill()
        return None

    @property
    def is_alive(self) -> bool:
        """Whether it can run another episode."""
        return self._process.is_alive()

    def kill(self) -> None:
        """Kills the process and everything that it started."""
        pid = self._process.pid
        if pid is not None:
            with contextlib.suppress(OSError):
                os.killpg(pid, signal.SIGKILL)
        self._process.kill()
        self._process.join(5.0)
        self._pipe.close()


def _serve(function: Environment, connection: Connection, url: str, pipe: Pipe) -> None:
    """The child's main function."""
    # A process group of its own, so that it can be killed with everything that it starts.
    os.setpgid(0, 0)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    assert parent is not None
    threading.Thread(target=_end_with, args=(parent.sentinel,), daemon=True).start()
    http = connection.client()
    pipe.send(True)
    while True:
        try:
            taken: Taken = pipe.recv()
        except EOFError:
            return
        episode = Episode(taken, url, http, None)
        try:
            pipe.send(run_function(function.function, episode))
        except LeaseOver:
            pipe.send(None)


def _end_with(sentinel: int) -> None:
    """Kills this process group once the parent has exited."""
    wait([sentinel])
    os.killpg(0, signal.SIGKILL)
