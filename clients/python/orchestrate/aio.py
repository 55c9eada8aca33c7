"""The client for programs that use `asyncio`."""

from __future__ import annotations

import asyncio
import time
import traceback
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any

import httpx

from .client import NEVER_SENT, PAUSES_S, is_passing, pauses
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
    Unreachable,
    check,
    check_reply,
    default_worker,
    failure_body,
    finish_body,
)


class AsyncGateway:
    """Like `Gateway`, with methods to await."""

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
        self.http = httpx.AsyncClient(
            timeout=httpx.Timeout(90.0, connect=10.0),
            limits=httpx.Limits(max_connections=None, keepalive_expiry=5.0),
            verify=verify,
            cert=cert,
            trust_env=False,
        )

    async def take(self, timeout: float | None = None) -> AsyncEpisode:
        """Takes an episode; see `Gateway.take`."""
        request = TakeRequest(self.worker)
        end = None if timeout is None else time.monotonic() + timeout
        while True:
            wait = WAIT_S if end is None else min(WAIT_S, end - time.monotonic())
            body = await self.post("/v1/episodes/take", request.body(wait))
            if body is not None:
                return AsyncEpisode(Taken.read(body), self)
            if end is not None and time.monotonic() >= end:
                raise TimeoutError(f"no episode was offered within {timeout} s")

    async def post(self, path: str, body: Mapping[str, Any], patience: float | None = None) -> Any:
        """Sends a request, again and again while the gateway does not answer."""
        end = time.monotonic() + (self.patience if patience is None else patience)
        for pause in pauses():
            try:
                reply = await self.http.post(self.url + path, json=body, headers=self.headers)
                if not is_passing(reply.status_code):
                    return check(reply.status_code, reply.text)
                problem = f"status {reply.status_code}: {reply.text[:300]}"
            except httpx.TransportError as error:
                if isinstance(error, NEVER_SENT):
                    raise
                problem = f"{type(error).__name__}: {error}"
            if time.monotonic() + pause > end:
                raise Unreachable(f"the gateway {self.url} does not answer: {problem}")
            await asyncio.sleep(pause)
        raise AssertionError("the pauses have no end")

    async def aclose(self) -> None:
        """Closes the connections."""
        await self.http.aclose()

    async def __aenter__(self) -> AsyncGateway:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()


class AsyncEpisode:
    """Like `Episode`, with methods to await. Heartbeats are sent while it is open as a context."""

    def __init__(self, taken: Taken, gateway: AsyncGateway) -> None:
        self.taken = taken
        self.task = taken.task
        self.model = taken.model
        self.context = taken.context
        self.api_key = taken.api_key
        self.openai_base_url = gateway.url + taken.openai_path
        self.anthropic_base_url = gateway.url + taken.anthropic_path
        self.metrics: dict[str, float] = {}
        self._gateway = gateway
        self._is_open = True
        self._lost: str | None = None
        self._beating: asyncio.Task[None] | None = None

    @property
    def lost(self) -> str | None:
        """Why the episode is no longer this worker's; `None` while it is."""
        return self._lost

    async def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        max_tokens: int | None = None,
    ) -> Reply:
        """Asks the policy; see `Episode.chat`."""
        body: dict[str, Any] = {"model": self.model, "messages": list(messages)}
        if tools:
            body["tools"] = list(tools)
        if max_tokens is not None:
            body["max_tokens"] = max_tokens
        problem = ""
        for pause in (*PAUSES_S[:3], None):
            try:
                reply = await self._gateway.http.post(
                    f"{self.openai_base_url}/chat/completions",
                    json=body,
                    headers={"authorization": f"Bearer {self.api_key}"},
                    timeout=httpx.Timeout(self.taken.time_s + 60.0, connect=10.0),
                )
                if not is_passing(reply.status_code):
                    return check_reply(reply.status_code, reply.text)
                problem = f"status {reply.status_code}: {reply.text[:300]}"
            except httpx.TransportError as error:
                if isinstance(error, NEVER_SENT):
                    raise
                problem = f"{type(error).__name__}: {error}"
            if pause is not None:
                await asyncio.sleep(pause)
        raise Unreachable(f"the policy does not answer: {problem}")

    async def finish(self, reward: float, metrics: Mapping[str, float] | None = None) -> str:
        """Returns the reward; see `Episode.finish`."""
        return await self._return(
            "finish", finish_body(reward, {**self.metrics, **(metrics or {})})
        )

    async def fail(self, kind: str, message: str) -> str:
        """Returns a failure; see `Episode.fail`."""
        return await self._return("finish", failure_body(kind, message))

    async def abandon(self) -> None:
        """Gives the episode back; see `Episode.abandon`."""
        await self._return("abandon", {})

    async def _return(self, what: str, body: Mapping[str, Any]) -> str:
        try:
            reply = await self._gateway.post(f"/v1/episodes/{self.taken.lease}/{what}", body)
        finally:
            self._is_open = False
        return str((reply or {}).get("outcome", ""))

    async def _beat(self) -> None:
        path = f"/v1/episodes/{self.taken.lease}/heartbeat"
        period = self.taken.lease_s / 4
        while self._is_open:
            await asyncio.sleep(period)
            try:
                await self._gateway.post(path, {}, patience=period)
            except (LeaseOver, RunOver, Refused) as error:
                self._lost = str(error)
                return
            except Unreachable:
                pass

    async def __aenter__(self) -> AsyncEpisode:
        self._beating = asyncio.create_task(self._beat())
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            if self._is_open and not isinstance(error, LeaseOver):
                await self._end(error)
        finally:
            self._is_open = False
            if self._beating is not None:
                self._beating.cancel()

    async def _end(self, error: BaseException | None) -> None:
        try:
            if error is None:
                await self.fail("environment", "the worker ended without a reward")
            elif isinstance(error, EpisodeEnded):
                await self.finish(0.0)
            elif isinstance(error, AgentFailure):
                await self.fail("agent", str(error))
            elif isinstance(error, Exception):
                await self.fail("environment", "".join(traceback.format_exception(error)))
            else:
                await asyncio.shield(self.abandon())
        except OrchestrateError:
            # The run repeats the attempt; the error under way says more.
            if error is None:
                raise
