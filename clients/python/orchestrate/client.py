"""The blocking client: take an episode, run anything, return a reward."""

from __future__ import annotations

import threading
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import httpx

from .wire import (
    WAIT_S,
    AgentFailure,
    EpisodeEnded,
    LeaseOver,
    OrchestrateError,
    Refused,
    Reply,
    RunOver,
    Taken,
    TakeRequest,
    Task,
    Unreachable,
    check,
    check_reply,
    default_worker,
    failure_body,
    finish_body,
)

#: Pauses between the tries of a request, in seconds; the last one is repeated.
PAUSES_S = (0.1, 0.3, 1.0, 2.0, 5.0)

#: Requests that cannot be sent, e.g. because the secret has a line break.
NEVER_SENT = (httpx.LocalProtocolError, httpx.UnsupportedProtocol)


def is_passing(status: int) -> bool:
    """Whether the same request may be answered later."""
    return status in (408, 425, 429) or status >= 500


def pauses() -> Iterator[float]:
    """The pauses between tries, without end."""
    yield from PAUSES_S
    while True:
        yield PAUSES_S[-1]


@dataclass(frozen=True)
class Connection:
    """How a gateway is connected to."""

    verify: Any = True
    cert: Any = None

    def client(self) -> httpx.Client:
        """A new client. Variables for proxies are ignored."""
        return httpx.Client(
            timeout=httpx.Timeout(90.0, connect=10.0),
            limits=httpx.Limits(max_connections=None, keepalive_expiry=5.0),
            verify=self.verify,
            cert=self.cert,
            trust_env=False,
        )


class Gateway:
    """A run's gateway, as one worker process sees it. Threads may share it.

    Args:
        url: Address of the gateway, e.g. `http://127.0.0.1:4170`.
        secret: The token of `gateway.secret_env`, if the run asks for one.
        worker: Name of this worker in the run's messages; by default host and process.
        patience: Seconds for which a gateway that does not answer is asked again: it may be
        starting. verify: What `httpx` verifies certificates with.
        cert: Certificate and key of this client, for a gateway that asks for one.
    """

    def __init__(
        self,
        url: str,
        secret: str | None = None,
        *,
        worker: str | None = None,
        patience: float = 60.0,
        verify: Any = True,
        cert: Any = None,
    ) -> None:
        self.url = url.rstrip("/")
        self.worker = worker or default_worker()
        self.patience = patience
        self.headers = {"authorization": f"Bearer {secret}"} if secret else {}
        #: How connections are made; another process can make its own with it.
        self.connection = Connection(verify, cert)
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
                return Episode(Taken.read(body), self.url, self.http, self)
            if end is not None and time.monotonic() >= end:
                raise TimeoutError(f"no episode was offered within {timeout} s")

    def post(self, path: str, body: Mapping[str, Any], patience: float | None = None) -> Any:
        """Sends a request, again and again while the gateway does not answer."""
        end = time.monotonic() + (self.patience if patience is None else patience)
        for pause in pauses():
            try:
                reply = self.http.post(self.url + path, json=body, headers=self.headers)
                if not is_passing(reply.status_code):
                    return check(reply.status_code, reply.text)
                problem = f"status {reply.status_code}: {reply.text[:300]}"
            except httpx.TransportError as error:
                if isinstance(error, NEVER_SENT):
                    raise
                problem = f"{type(error).__name__}: {error}"
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


class Episode:
    """An episode that this worker runs. Heartbeats are sent while it is open.

    Used as a context manager, it is returned in any case: an exception is a failure of the
    environment (`AgentFailure`: of the policy), and an interrupt gives the episode back.
    """

    def __init__(self, taken: Taken, url: str, http: httpx.Client, gateway: Gateway | None) -> None:
        self.taken = taken
        self.task: Task = taken.task
        #: Name of the policy in requests.
        self.model = taken.model
        #: Longest sequence of the policy, in tokens.
        self.context = taken.context
        #: Key of the episode's requests.
        self.api_key = taken.api_key
        #: Base URL for OpenAI's clients: Chat Completions and Responses.
        self.openai_base_url = url + taken.openai_path
        #: Base URL for Anthropic's clients: Messages.
        self.anthropic_base_url = url + taken.anthropic_path
        #: Numbers that are returned with the reward.
        self.metrics: dict[str, float] = {}
        self._url = url
        self._gateway = gateway
        self._http = http
        self._over = threading.Event()
        self._lost: str | None = None
        if gateway is not None:
            thread = threading.Thread(target=self._beat, args=(gateway,), daemon=True)
            thread.start()

    @property
    def lost(self) -> str | None:
        """Why the episode is no longer this worker's; `None` while it is."""
        return self._lost

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
            LeaseOver: The episode is no longer this worker's.
            Unreachable: The gateway does not answer.
        """
        body: dict[str, Any] = {"model": self.model, "messages": list(messages)}
        if tools:
            body["tools"] = list(tools)
        if max_tokens is not None:
            body["max_tokens"] = max_tokens
        # A reply may take long; the episode's own time limit ends it.
        timeout = httpx.Timeout(self.taken.time_s + 60.0, connect=10.0)
        headers = {"authorization": f"Bearer {self.api_key}"}
        problem = ""
        for pause in (*PAUSES_S[:3], None):
            try:
                reply = self._http.post(
                    f"{self.openai_base_url}/chat/completions",
                    json=body,
                    headers=headers,
                    timeout=timeout,
                )
                if not is_passing(reply.status_code):
                    return check_reply(reply.status_code, reply.text)
                problem = f"status {reply.status_code}: {reply.text[:300]}"
            except httpx.TransportError as error:
                if isinstance(error, NEVER_SENT):
                    raise
                problem = f"{type(error).__name__}: {error}"
            if pause is not None:
                time.sleep(pause)
        raise Unreachable(f"the policy at {self._url} does not answer: {problem}")

    def finish(self, reward: float, metrics: Mapping[str, float] | None = None) -> str:
        """Returns the reward, from 0 to 1, and further numbers. The outcome in the run's journal is
        `scored`, or `truncated` if the policy reached a limit. Calling it again with the same
        values does nothing.

        Raises:
            ValueError: The reward is not from 0 to 1, or a metric is not finite.
            LeaseOver: The episode is no longer this worker's.
            Unreachable: The gateway does not answer.
        """
        return self._return("finish", finish_body(reward, {**self.metrics, **(metrics or {})}))

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
            reply = self._gateway.post(f"/v1/episodes/{self.taken.lease}/{what}", body)
        finally:
            self._over.set()
        return str((reply or {}).get("outcome", ""))

    def _beat(self, gateway: Gateway) -> None:
        path = f"/v1/episodes/{self.taken.lease}/heartbeat"
        period = self.taken.lease_s / 4
        while not self._over.wait(period):
            try:
                gateway.post(path, {}, patience=period)
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
        if not self.is_open or isinstance(error, LeaseOver):
            self._over.set()
            return
        try:
            if error is None:
                self.fail("environment", "the worker ended without a reward")
            elif isinstance(error, EpisodeEnded):
                self.finish(0.0)
            elif isinstance(error, AgentFailure):
                self.fail("agent", str(error))
            elif isinstance(error, Exception):
                self.fail("environment", "".join(traceback.format_exception(error)))
            else:
                self.abandon()
        except OrchestrateError:
            # The run repeats the attempt; the error under way says more.
            if error is None:
                raise
        finally:
            self._over.set()
