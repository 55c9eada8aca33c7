"""HTTP face of the trainer: trainer protocol version 1."""

from __future__ import annotations

import hmac
import json
import math
import re
import threading
from collections.abc import Callable
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from .service import Desk, Refusal

__all__ = ["Server", "app"]

#: Largest request body: requests name files, they carry no data.
BODY_LIMIT = 1 << 20
#: Ids appear in paths and file names.
PLAIN_ID = re.compile(r"[A-Za-z0-9._-]{1,128}")
STEP = {"step_id": str, "base_version": int, "manifest": str, "hyperparameters": dict}
LOGPROBS = {"manifest": str, "replay": bool, "temperature": float}


def app(desk: Desk, token: str | None) -> Starlette:
    """The calls of the protocol, answered by ``desk``; ``token`` is asked of every one."""

    async def info(_: Request) -> Response:
        return JSONResponse(desk.info())

    async def submit(request: Request) -> Response:
        body = _fields(await _body(request), STEP)
        if not PLAIN_ID.fullmatch(body["step_id"]):
            message = "step_id must be 1 to 128 letters, digits, `.`, `_` or `-`"
            raise Refusal(400, "bad_step_id", message)
        return await _off(desk.submit, body)

    async def status(request: Request) -> Response:
        return JSONResponse(desk.status(request.path_params["step_id"]))

    async def logprobs(request: Request) -> Response:
        return await _off(desk.logprobs, _fields(await _body(request), LOGPROBS))

    async def checkpoint(_: Request) -> Response:
        return JSONResponse(desk.checkpoint())

    async def refused(_: Request, error: Exception) -> Response:
        assert isinstance(error, Refusal)
        return _problem(error.status, error.code, str(error))

    async def missing(_: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        if error.status_code == 405:
            return _problem(405, "method_not_allowed", "no such method here")
        return _problem(error.status_code, "not_found", "no such path")

    async def broken(_: Request, error: Exception) -> Response:
        return _problem(500, "internal", f"call lost: {error!r}")

    return Starlette(
        routes=[
            Route("/v1/info", info),
            Route("/v1/steps", submit, methods=["POST"]),
            Route("/v1/steps/{step_id}", status),
            Route("/v1/logprobs", logprobs, methods=["POST"]),
            Route("/v1/checkpoints", checkpoint, methods=["POST"]),
        ],
        middleware=[Middleware(_Authorised, token=token)],
        exception_handlers={Refusal: refused, HTTPException: missing, Exception: broken},
    )


class _Authorised:
    """Asks for the bearer token before anything else is looked at."""

    def __init__(self, app: ASGIApp, token: str | None) -> None:
        self._app = app
        self._expected = None if token is None else f"Bearer {token}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and self._expected is not None:
            sent = dict(scope["headers"]).get(b"authorization", b"")
            if not hmac.compare_digest(sent, self._expected):
                answer = _problem(401, "unauthorized", "a valid bearer token is needed")
                await answer(scope, receive, send)
                return
        await self._app(scope, receive, send)


async def _body(request: Request) -> Any:
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > BODY_LIMIT:
            message = f"the body must be whole and at most {BODY_LIMIT} bytes"
            raise Refusal(413, "body_too_large", message)
    try:
        return json.loads(bytes(body))
    except (ValueError, RecursionError) as error:
        raise Refusal(400, "bad_request", f"the body is not JSON: {error}") from error


def _fields(body: Any, kinds: dict[str, type]) -> dict[str, Any]:
    """The fields of a request, with the types that they must have."""
    if not isinstance(body, dict):
        raise Refusal(400, "bad_request", "the body must be an object")
    found = {}
    for name, kind in kinds.items():
        value = body.get(name)
        if kind is float and type(value) is int:
            value = float(value)
        if type(value) is not kind or (kind is float and not math.isfinite(value)):
            wanted = "a number" if kind is float else f"a {kind.__name__}"
            raise Refusal(400, "bad_request", f"field `{name}` must be {wanted}")
        found[name] = value
    return found


async def _off(call: Callable[[dict[str, Any]], dict[str, Any]], body: dict[str, Any]) -> Response:
    """Reads files or waits: off the event loop."""
    return JSONResponse(await run_in_threadpool(call, body))


def _problem(status: int, code: str, message: str) -> Response:
    return JSONResponse({"error": {"code": code, "message": message}}, status)


class Server:
    """Serves a desk from a thread."""

    def __init__(self, desk: Desk, host: str, port: int, token: str | None) -> None:
        """Binds the address at once, so that one that is taken is an error here."""
        config = uvicorn.Config(
            app(desk, token), host=host, port=port, log_level="warning", access_log=False
        )
        self._socket = config.bind_socket()
        # Calls made before the thread is up wait instead of being turned away.
        self._socket.listen()
        #: Where it listens.
        self.port: int = self._socket.getsockname()[1]
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(
            target=self._server.run, kwargs={"sockets": [self._socket]}, name="http", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """Takes no new calls and waits a little for those under way."""
        self._server.should_exit = True
        self._thread.join(timeout=10)
