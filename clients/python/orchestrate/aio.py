"""The client for programs that use `asyncio`."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any

import httpx

from .shared import (
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


async def post(http: httpx.AsyncClient, **request: Any) -> httpx.Response | httpx.TransportError:
    """Sends a request; a failure of the connection is returned."""
    try:
        return await http.post(**encoded(request))
    except httpx.TransportError as error:
        return error


class AsyncGateway(GatewayBase):
    """Like `Gateway`, with methods to await."""

    def _connect(self, verify: Any, cert: Any) -> None:
        self.http = httpx.AsyncClient(**client_options(verify, cert))

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
            reply = await post(self.http, url=self.url + path, json=body, headers=self.headers)
            problem = problem_of(reply)
            if isinstance(reply, httpx.Response) and not problem:
                return check(reply.status_code, reply.text)
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


class AsyncEpisode(EpisodeBase):
    """Like `Episode`, with methods to await. Heartbeats are sent while it is open as a context."""

    def __init__(self, taken: Taken, gateway: AsyncGateway) -> None:
        super().__init__(taken, gateway.url)
        self._gateway = gateway
        self._is_open = True
        self._beating: asyncio.Task[None] | None = None

    async def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        max_tokens: int | None = None,
    ) -> Reply:
        """Asks the policy; see `Episode.chat`."""
        request = self._chat_request(messages, tools, max_tokens)
        tries = ChatTries(self._gateway.patience)
        while True:
            reply = await post(self._gateway.http, **request)
            problem = problem_of(reply)
            if isinstance(reply, httpx.Response) and not problem:
                return check_reply(reply.status_code, reply.text)
            pause = tries.pause(reply)
            if pause is None:
                url = self._gateway.url
                raise Unreachable(f"the policy at {url} does not answer: {problem}")
            await asyncio.sleep(pause)

    async def finish(self, reward: float, metrics: Mapping[str, float] | None = None) -> str:
        """Returns the reward; see `Episode.finish`."""
        return await self._return("finish", self._result(reward, metrics))

    async def fail(self, kind: str, message: str) -> str:
        """Returns a failure; see `Episode.fail`."""
        return await self._return("finish", failure_body(kind, message))

    async def abandon(self) -> None:
        """Gives the episode back; see `Episode.abandon`."""
        await self._return("abandon", {})

    async def _return(self, what: str, body: Mapping[str, Any]) -> str:
        try:
            reply = await self._gateway.post(self._path(what), body)
        finally:
            self._is_open = False
        return str((reply or {}).get("outcome", ""))

    async def _beat(self) -> None:
        period = self.taken.lease_s / 4
        while self._is_open:
            await asyncio.sleep(period)
            try:
                await self._gateway.post(self._path("heartbeat"), {}, patience=period)
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
                # A cancelled worker still returns its episode.
                await asyncio.shield(self._return(*self._ending(error)))
        except OrchestrateError:
            # The run repeats the attempt; the error under way says more.
            if error is None:
                raise
        finally:
            self._is_open = False
            if self._beating is not None:
                self._beating.cancel()
