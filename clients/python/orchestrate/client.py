"""The blocking client: take an episode, run anything, return a reward."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import httpx

from .sandbox import CommandResult, Sandbox, SandboxOptions
from .shared import (
    PATIENCE_S,
    ChatTries,
    EpisodeBase,
    GatewayBase,
    client_options,
    pauses,
    problem_of,
)
from .wire import (
    WAIT_S,
    LeaseOver,
    OrchestrateError,
    Refused,
    Reply,
    RunOver,
    Taken,
    TakeRequest,
    Unreachable,
    check,
    check_reply,
    encoded,
    failure_body,
)


@dataclass(frozen=True)
class Connection:
    """How a gateway is connected to."""

    verify: Any = True
    cert: Any = None
    #: Seconds for which a gateway that does not answer is asked again.
    patience: float = PATIENCE_S

    def client(self) -> httpx.Client:
        """A new client. Variables for proxies are ignored."""
        return httpx.Client(**client_options(self.verify, self.cert))


def post(http: httpx.Client, **request: Any) -> httpx.Response | httpx.TransportError:
    """Sends a request; a failure of the connection is returned."""
    try:
        return http.post(**encoded(request))
    except httpx.TransportError as error:
        return error


class Gateway(GatewayBase):
    """A run's gateway, as one worker process sees it. Threads may share it.

    Args:
        url: Address of the gateway, e.g. `http://127.0.0.1:4170`.
        secret: The token of `gateway.secret_env`, if the run asks for one.
        worker: Name of this worker in the run's messages; by default host and process.
        patience: Seconds for which a gateway that does not answer is asked again: it may be
            starting, or its run may be resumed after a kill.
        verify: A PEM file with the authorities whose certificates are trusted; by default those of
            `certifi`. An `ssl.SSLContext` works, too, but not for environments, because other
            processes connect as well.
        cert: PEM files with the certificate and the key of this client, for a gateway that asks for
            them.
    """

    def _connect(self, verify: Any, cert: Any) -> None:
        #: How connections are made; another process can make its own with it.
        self.connection = Connection(verify, cert, self.patience)
        self.http = self.connection.client()

    def take(self, timeout: float | None = None) -> Episode:
        """Takes an episode, and waits for one if there is none.

        Raises:
            TimeoutError: No episode was offered within `timeout` seconds.
            RunOver: The run has ended.
            Unreachable: The gateway does not answer.
            Refused: The secret is wrong, for example.
        """
        request = TakeRequest(self.worker)
        end = None if timeout is None else time.monotonic() + timeout
        while True:
            wait = WAIT_S if end is None else min(WAIT_S, end - time.monotonic())
            body = self.post("/v1/episodes/take", request.body(wait))
            if body is not None:
                return Episode(Taken.read(body), self.url, self.http, self.patience, self)
            if end is not None and time.monotonic() >= end:
                raise TimeoutError(f"no episode was offered within {timeout} s")

    def post(self, path: str, body: Mapping[str, Any], patience: float | None = None) -> Any:
        """Sends a request, again and again while the gateway does not answer."""
        end = time.monotonic() + (self.patience if patience is None else patience)
        for pause in pauses():
            reply = post(self.http, url=self.url + path, json=body, headers=self.headers)
            problem = problem_of(reply)
            if isinstance(reply, httpx.Response) and not problem:
                return check(reply.status_code, reply.text)
            if time.monotonic() + pause > end:
                raise Unreachable(f"the gateway {self.url} does not answer: {problem}")
            time.sleep(pause)
        raise AssertionError("the pauses have no end")

    def close(self) -> None:
        """Closes the connections."""
        self.http.close()

    def __enter__(self) -> Gateway:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Episode(EpisodeBase):
    """An episode that this worker runs. Heartbeats are sent while it is open.

    Used as a context manager, it is returned in any case: an exception is a failure of the
    environment (`AgentFailure`: of the policy), and an interrupt gives the episode back.
    """

    def __init__(
        self,
        taken: Taken,
        url: str,
        http: httpx.Client,
        patience: float,
        gateway: Gateway | None = None,
    ) -> None:
        super().__init__(taken, url)
        self._url = url
        self._patience = patience
        self._gateway = gateway
        self._http = http
        self._over = threading.Event()
        #: How the sandbox is made; an environment sets it.
        self.sandbox_options = SandboxOptions()
        self._sandbox: Sandbox | None = None
        #: Whether the policy's work is over and being graded.
        self.is_graded = False
        if gateway is not None:
            name = f"heartbeats of {taken.attempt}"
            threading.Thread(target=self._beat, args=(gateway,), name=name, daemon=True).start()

    @property
    def is_open(self) -> bool:
        """Whether nothing was returned yet."""
        return not self._over.is_set()

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        max_tokens: int | None = None,
    ) -> Reply:
        """Asks the policy, by Chat Completions. `messages` is the whole history.

        Raises:
            EpisodeEnded: The policy has no turns, tokens or time left.
            Refused: The request is invalid. If that is not caught, the attempt is retried.
            LeaseOver: The episode is no longer this worker's.
            Unreachable: The gateway does not answer.
        """
        if self.is_graded:
            raise OrchestrateError("a reward function cannot ask the policy")
        request = self._chat_request(messages, tools, max_tokens)
        tries = ChatTries(self._patience)
        while True:
            reply = post(self._http, **request)
            problem = problem_of(reply)
            if isinstance(reply, httpx.Response) and not problem:
                return check_reply(reply.status_code, reply.text)
            pause = tries.pause(reply)
            if pause is None:
                raise Unreachable(f"the policy at {self._url} does not answer: {problem}")
            time.sleep(pause)

    @property
    def sandbox(self) -> Sandbox:
        """The episode's sandbox, with the task's files. It is opened when it is first used, and
        closed when the episode ends.

        Raises:
            SandboxFailure: The image is missing, or Docker failed.
        """
        if self._sandbox is None:
            self._sandbox = self.sandbox_options.open(self.task)
        return self._sandbox

    def run(
        self,
        command: str | Sequence[str],
        *,
        timeout: float = 60.0,
        input: str | bytes = b"",  # noqa: A002
        env: Mapping[str, str] | None = None,
    ) -> CommandResult:
        """Runs a command in the episode's sandbox; see `Sandbox.run`."""
        return self.sandbox.run(command, timeout=timeout, input=input, env=env)

    def close_sandbox(self) -> None:
        """Removes the sandbox, if one was opened."""
        sandbox, self._sandbox = self._sandbox, None
        if sandbox is not None:
            sandbox.close()

    def finish(self, reward: float, metrics: Mapping[str, float] | None = None) -> str:
        """Returns the reward, from 0 to 1, and further numbers. The outcome in the run's journal is
        `scored`, or `truncated` if the policy reached a limit. Calling it again with the same
        values does nothing.

        Raises:
            ValueError: The reward is not from 0 to 1, or a metric is not finite.
            LeaseOver: The episode is no longer this worker's.
            Unreachable: The gateway does not answer.
        """
        return self._return("finish", self._result(reward, metrics))

    def fail(self, kind: str, message: str) -> str:
        """Returns a failure: `environment` (the attempt is repeated), `agent` or `timeout` (the
        policy's doing, reward 0).

        Raises:
            LeaseOver: The episode is no longer this worker's.
            Unreachable: The gateway does not answer.
        """
        return self._return("finish", failure_body(kind, message))

    def abandon(self) -> None:
        """Gives the episode back. Another worker takes it; if the policy was asked already, that
        costs an attempt."""
        self._return("abandon", {})

    def _return(self, what: str, body: Mapping[str, Any]) -> str:
        if self._gateway is None:
            raise OrchestrateError("an environment returns its reward; it does not call finish")
        try:
            reply = self._gateway.post(self._path(what), body)
        finally:
            self._over.set()
        return str((reply or {}).get("outcome", ""))

    def _beat(self, gateway: Gateway) -> None:
        period = self.taken.lease_s / 4
        while not self._over.wait(period):
            try:
                gateway.post(self._path("heartbeat"), {}, patience=period)
            except (LeaseOver, RunOver, Refused) as error:
                if not self._over.is_set():
                    self._lost = str(error)
                return
            except Unreachable:
                pass
            except RuntimeError:  # The client was closed.
                return

    def __enter__(self) -> Episode:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            if self.is_open and not isinstance(error, LeaseOver):
                self._return(*self._ending(error))
        except OrchestrateError:
            # The run repeats the attempt; the error under way says more.
            if error is None:
                raise
        finally:
            self._over.set()
            self.close_sandbox()
