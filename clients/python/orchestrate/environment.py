"""Environments and rewards as functions, run in child processes."""

from __future__ import annotations

import contextlib
import functools
import multiprocessing
import os
import pickle
import signal
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection as Pipe
from multiprocessing.connection import wait
from typing import Any, overload

from .client import Connection, Episode
from .container import SandboxLimits
from .sandbox import SandboxOptions
from .wire import AgentFailure, EpisodeEnded, LeaseOver, OrchestrateError, Taken, number_of

#: What is returned for an episode: the reward, alone or with metrics.
Result = float | tuple[float, dict[str, float]]
#: An environment. It returns a `Result`, or what its reward function is to grade.
Function = Callable[[Episode], Any]
#: A reward. Its second argument is what the environment returned.
RewardFunction = Callable[[Episode, Any], Result]

#: Interval at which a running child is polled, in seconds.
POLL_S = 0.2
#: Time limit for a child to import its environment, in seconds.
START_S = 300.0


@dataclass(frozen=True)
class Verdict:
    """The end of an episode: a reward, work that is to be graded, or a failure with its text."""

    #: `reward`, `work`, or the kind of a failure: `environment`, `agent`, `timeout`.
    kind: str
    reward: float = 0.0
    metrics: dict[str, float] = field(default_factory=dict)
    message: str = ""
    #: What the environment returned, pickled.
    work: bytes = b""


class Environment:
    """A function that runs an episode and returns its reward; `environment` creates one.

    A direct call runs the function in this process. `work` runs it in child processes. A child that
    takes longer than `timeout` seconds is killed, with the processes that it started and its
    sandbox.
    """

    def __init__(self, function: Function, timeout: float, options: SandboxOptions) -> None:
        functools.update_wrapper(self, function)
        self.function = function
        self.timeout = timeout
        self.options = options
        self.reward_function: RewardFunction | None = None
        self.reward_timeout = 0.0

    def __call__(self, episode: Episode) -> Any:
        """Runs the function in this process."""
        return self.function(episode)

    def __reduce__(self) -> str:
        # Child processes import it by its name.
        return self.function.__qualname__

    @overload
    def reward(self, function: RewardFunction) -> RewardFunction: ...

    @overload
    def reward(self, *, timeout: float = 600.0) -> Callable[[RewardFunction], RewardFunction]: ...

    def reward(
        self, function: RewardFunction | None = None, *, timeout: float = 600.0
    ) -> RewardFunction | Callable[[RewardFunction], RewardFunction]:
        """Adds a reward function: `@sums.reward` or `@sums.reward(timeout=60)`.

        The function gets the episode and what the environment returned (anything that can be
        pickled), and returns the reward from 0 to 1, or the reward and a dictionary of metrics. It
        runs after the environment, in a fresh process with a sandbox of its own: nothing that the
        policy started or changed is left, except for what the environment returned. It cannot ask
        the policy. It ends in the same ways as an environment.
        """
        if function is None:
            return functools.partial(self.reward, timeout=timeout)
        if self.reward_function is not None:
            raise ValueError(f"{self.function.__qualname__} has a reward function already")
        self.reward_function = function
        self.reward_timeout = timeout
        return function

    def act(self, episode: Episode) -> Verdict:
        """Runs the environment's function."""
        episode.sandbox_options = replace(self.options, lifetime=self.timeout)
        if self.reward_function is None:
            return run_function(self.function, episode)

        def to_verdict(work: Any) -> Verdict:
            return Verdict("work", metrics=episode.metrics, work=pickle.dumps(work))

        return run_function(self.function, episode, to_verdict)

    def grade(self, episode: Episode, work: bytes) -> Verdict:
        """Runs the reward function on what the environment returned."""
        reward = self.reward_function
        assert reward is not None
        episode.sandbox_options = replace(self.options, lifetime=self.reward_timeout)
        episode.is_graded = True
        return run_function(lambda episode: reward(episode, pickle.loads(work)), episode)

    def main(self) -> None:
        """Runs workers as a program: see `orchestrate.main`."""
        from .workers import main

        main(self)


@overload
def environment(function: Function) -> Environment: ...


@overload
def environment(
    *,
    timeout: float = 600.0,
    image: str = "",
    limits: SandboxLimits | None = None,
    read_only: bool = False,
) -> Callable[[Function], Environment]: ...


def environment(
    function: Function | None = None,
    *,
    timeout: float = 600.0,
    image: str = "",
    limits: SandboxLimits | None = None,
    read_only: bool = False,
) -> Environment | Callable[[Function], Environment]:
    """Turns a function into an environment, as `@environment` or `@environment(timeout=60)`.

    The function gets an `Episode`, asks the policy, and returns the reward from 0 to 1, or the
    reward and a dictionary of metrics. With a reward function (`Environment.reward`), it returns
    what that grades. `episode.run` runs a command in a sandbox of `image`, by default the task's,
    with `limits`; with `read_only`, its root cannot be written. Other ways to end:

    * It raises `AgentFailure`: the policy's result, reward 0.
    * It does not catch `EpisodeEnded`: the policy has no turns or tokens left, reward 0, truncated.
    * It takes longer than `timeout` seconds, or its process dies: once the policy has replied, this
      is the policy's result, reward 0. Otherwise the attempt is retried.
    * It raises anything else: a failure of the environment. The attempt is retried, never
      rewarded, and the run stops if there are many such failures.
    """
    options = SandboxOptions(image, limits, read_only)
    if function is None:
        return functools.partial(Environment, timeout=timeout, options=options)
    return Environment(function, timeout, options)


def run_function(
    function: Function,
    episode: Episode,
    to_verdict: Callable[[Any], Verdict] | None = None,
) -> Verdict:
    """Runs a function on an episode, and turns its result or exception into a verdict."""
    try:
        result = function(episode)
        if to_verdict is not None:
            return to_verdict(result)
        reward, metrics = result if isinstance(result, tuple) else (result, {})
        return Verdict("reward", number_of(reward, "reward"), {**episode.metrics, **metrics})
    except AgentFailure as error:
        return Verdict("agent", message=str(error))
    except EpisodeEnded:
        return Verdict("reward", 0.0, episode.metrics)
    except LeaseOver:
        raise
    except Exception as error:
        return Verdict("environment", message="".join(traceback.format_exception(error)))


def run_here(function: Function | Environment, episode: Episode) -> Verdict:
    """Runs a function in this process, and then its reward function if it has one."""
    if not isinstance(function, Environment):
        return run_function(function, episode)
    verdict = function.act(episode)
    if verdict.kind != "work":
        return verdict
    episode.close_sandbox()
    return function.grade(episode, verdict.work)


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
        if not self._await_ready():
            self.kill()
            raise OrchestrateError(
                "the environment's process did not start; its message is on standard error"
            )
        self._is_ready = True

    def _await_ready(self) -> bool:
        """Waits until the process can run an episode."""
        try:
            return bool(self._pipe.poll(START_S) and self._pipe.recv())
        except (EOFError, OSError):
            return False

    def run(
        self, taken: Taken, timeout: float, stop: threading.Event, work: bytes | None = None
    ) -> Verdict | None:
        """Runs the environment, or the reward on `work`. Returns `None` if `stop` was set or the
        lease is over. The child is dead after `stop`, after a timeout, and after it ended by
        itself."""
        name = "environment" if work is None else "reward"
        # It may still be closing the last episode's sandbox, which does not count towards this one.
        if not self._is_ready and not self._await_ready():
            self.kill()
            return Verdict("environment", message="the environment's process is unusable")
        self._is_ready = False
        end = time.monotonic() + timeout
        try:
            self._pipe.send((taken, work))
            while not stop.is_set():
                if self._pipe.poll(min(POLL_S, max(0.0, end - time.monotonic()))):
                    verdict: Verdict | None = self._pipe.recv()
                    if verdict is not None:
                        return verdict
                    # The lease is over.
                    return None
                if time.monotonic() >= end:
                    self.kill()
                    return Verdict("timeout", message=f"the {name} took longer than {timeout} s")
        except (EOFError, OSError):
            if stop.is_set():
                self.kill()
                return None
            self._process.join(1.0)
            code = self._process.exitcode
            self.kill()
            return Verdict("agent", message=f"the {name}'s process ended with exit code {code}")
        self.kill()
        return None

    @property
    def is_alive(self) -> bool:
        """Whether it can run another episode."""
        return self._process.is_alive()

    def kill(self) -> None:
        """Kills the process and everything that it started. A second call does nothing: another
        process may have its number by then."""
        if self._pipe.closed:
            return
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
    while True:
        try:
            pipe.send(True)
            taken, work = pipe.recv()
        except (EOFError, OSError):
            return
        episode = Episode(taken, url, http, connection.patience)
        try:
            pipe.send(function.act(episode) if work is None else function.grade(episode, work))
        except LeaseOver:
            pipe.send(None)
        finally:
            episode.close_sandbox()


def grade_apart(
    environment: Environment,
    connection: Connection,
    url: str,
    taken: Taken,
    acted: Verdict,
    stop: threading.Event,
) -> Verdict | None:
    """Runs the reward function in a fresh process. Returns `None` as `Child.run` does."""
    try:
        child = Child(environment, connection, url)
    except OrchestrateError as error:
        return Verdict("environment", metrics=acted.metrics, message=f"the reward: {error}")
    try:
        graded = child.run(taken, environment.reward_timeout, stop, acted.work)
    finally:
        child.kill()
    if graded is None:
        return None
    return replace(graded, metrics={**acted.metrics, **graded.metrics})


def _end_with(sentinel: int) -> None:
    """Kills this process group once the parent has exited."""
    wait([sentinel])
    os.killpg(0, signal.SIGKILL)
