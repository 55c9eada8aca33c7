"""What the blocking client and the one for `asyncio` have in common: everything but waiting."""

from __future__ import annotations

import os
import ssl
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import httpx

from .wire import (
    AgentFailure,
    EpisodeEnded,
    Taken,
    default_worker,
    failure_body,
    finish_body,
)

#: Pauses between the tries of a request, in seconds; the last one is repeated.
PAUSES_S = (0.1, 0.3, 1.0, 2.0, 5.0)

#: Pauses between the tries of a request to the policy that the gateway answers with a failure.
CHAT_PAUSES_S = PAUSES_S[:3]

#: Seconds for which a gateway that does not answer is asked again.
PATIENCE_S = 60.0

#: Requests that cannot be sent, e.g. because the secret has a line break.
NEVER_SENT = (httpx.LocalProtocolError, httpx.UnsupportedProtocol)


def pauses() -> Iterator[float]:
    """The pauses between tries, without end."""
    yield from PAUSES_S
    while True:
        yield PAUSES_S[-1]


def client_options(verify: Any, cert: Any) -> dict[str, Any]:
    """Arguments of an `httpx` client. Variables for proxies are ignored."""
    if isinstance(verify, str | os.PathLike):
        verify = ssl.create_default_context(cafile=verify)
    if isinstance(cert, tuple):
        if verify is True:
            verify = httpx.create_ssl_context(trust_env=False)
        verify.load_cert_chain(*cert)
    return {
        "timeout": httpx.Timeout(90.0, connect=10.0),
        "limits": httpx.Limits(max_connections=None, keepalive_expiry=5.0),
        "verify": verify,
        "trust_env": False,
    }


def problem_of(outcome: httpx.Response | httpx.TransportError) -> str:
    """Why a request is sent again; empty if it was answered.

    Raises:
        httpx.TransportError: The request cannot be sent at all.
    """
    if isinstance(outcome, httpx.TransportError):
        if isinstance(outcome, NEVER_SENT):
            raise outcome
        return f"{type(outcome).__name__}: {outcome}"
    status = outcome.status_code
    if status in (408, 425, 429) or status >= 500:
        return f"status {status}: {outcome.text[:300]}"
    return ""


class ChatTries:
    """When a request to the policy is sent again.

    That is a few times if the gateway answers with a failure, and for `patience` seconds if it does
    not answer, because its run may be resumed.
    """

    def __init__(self, patience: float) -> None:
        self._patience = patience
        self._failures = iter(CHAT_PAUSES_S)
        self._pauses = pauses()
        self._end: float | None = None

    def pause(self, outcome: httpx.Response | httpx.TransportError) -> float | None:
        """Seconds to wait before the next try; `None` if there is none."""
        if isinstance(outcome, httpx.Response):
            return next(self._failures, None)
        if self._end is None:
            self._end = time.monotonic() + self._patience
        pause = next(self._pauses)
        return pause if time.monotonic() + pause <= self._end else None


class GatewayBase:
    """The settings of a gateway's client; see `Gateway`."""

    def __init__(
        self,
        url: str,
        secret: str | None = None,
        *,
        worker: str | None = None,
        patience: float = PATIENCE_S,
        verify: Any = True,
        cert: Any = None,
    ) -> None:
        self.url = url.rstrip("/")
        self.worker = worker or default_worker()
        self.patience = patience
        self.headers = {"authorization": f"Bearer {secret}"} if secret else {}
        self._connect(verify, cert)

    def _connect(self, verify: Any, cert: Any) -> None:
        raise NotImplementedError


class EpisodeBase:
    """What a worker knows of its episode."""

    def __init__(self, taken: Taken, url: str) -> None:
        self.taken = taken
        self.task = taken.task
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
        self._lost: str | None = None

    @property
    def lost(self) -> str | None:
        """Why the episode is no longer this worker's; `None` while it is."""
        return self._lost

    def _path(self, what: str) -> str:
        return f"/v1/episodes/{self.taken.lease}/{what}"

    def _chat_request(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        max_tokens: int | None,
    ) -> dict[str, Any]:
        """Arguments of the request to the policy."""
        body: dict[str, Any] = {"model": self.model, "messages": list(messages)}
        if tools:
            body["tools"] = list(tools)
        if max_tokens is not None:
            body["max_tokens"] = max_tokens
        return {
            "url": f"{self.openai_base_url}/chat/completions",
            "json": body,
            "headers": {"authorization": f"Bearer {self.api_key}"},
            # A reply may take long; the episode's own time limit ends it.
            "timeout": httpx.Timeout(self.taken.time_s + 60.0, connect=10.0),
        }

    def _result(self, reward: float, metrics: Mapping[str, float] | None) -> dict[str, Any]:
        """The body of a result, with the metrics so far."""
        return finish_body(reward, {**self.metrics, **(metrics or {})})

    def _ending(self, error: BaseException | None) -> tuple[str, dict[str, Any]]:
        """What is returned when the episode's context is left, with `error` or without: the route
        and the body."""
        if error is None:
            return "finish", failure_body("environment", "the worker ended without a reward")
        if isinstance(error, EpisodeEnded):
            return "finish", self._result(0.0, None)
        if isinstance(error, AgentFailure):
            return "finish", failure_body("agent", str(error))
        if isinstance(error, Exception):
            text = "".join(traceback.format_exception(error))
            return "finish", failure_body("environment", text)
        return "abandon", {}
