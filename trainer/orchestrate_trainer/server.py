"""HTTP interface of the trainer: trainer protocol version 1."""

from __future__ import annotations

import asyncio
import json
import math
import re
import threading
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from .jobs import LogprobsRequest, StepRequest
from .network import Guard, NetworkOptions, error_reply
from .service import ProtocolError, TrainerService

__all__ = ["Server", "app"]

#: Largest request body, in bytes. Requests name files and carry no data.
BODY_LIMIT = 1 << 20
#: Longest time for the body of a request, in seconds.
BODY_TIME = 30.0
#: Valid step ids, which appear in paths and file names.
STEP_ID = re.compile(r"[A-Za-z0-9._-]{1,128}")
#: How error messages name a type.
KINDS = {
    str: "a string",
    int: "an integer",
    dict: "an object",
    bool: "a boolean",
    float: "a number",
}
#: Fields of a request and the types of their values.
STEP_FIELDS = {"step_id": str, "base_version": int, "manifest": str, "hyperparameters": dict}
LOGPROBS_FIELDS = {"manifest": str, "replay": bool, "temperature": float}


def app(service: TrainerService, options: NetworkOptions) -> Starlette:
    """The protocol's routes, answered by ``service`` to requests that ``options`` permit."""

    async def info(_: Request) -> Response:
        return JSONResponse(service.info())

    async def submit(request: Request) -> Response:
        step = StepRequest(**_fields(await _body(request), STEP_FIELDS))
        if not STEP_ID.fullmatch(step.step_id):
            message = "step_id must be 1 to 128 letters, digits, `.`, `_` or `-`"
            raise ProtocolError(400, "bad_step_id", message)
        # Reads files, so it runs off the event loop.
        return JSONResponse(await run_in_threadpool(service.submit, step))

    async def status(request: Request) -> Response:
        return JSONResponse(service.status(request.path_params["step_id"]))

    async def logprobs(request: Request) -> Response:
        wanted = LogprobsRequest(**_fields(await _body(request), LOGPROBS_FIELDS))
        # Waits for the measurement, so it runs off the event loop.
        return JSONResponse(await run_in_threadpool(service.logprobs, wanted))

    async def checkpoint(_: Request) -> Response:
        return JSONResponse(service.checkpoint())

    async def refused(_: Request, error: Exception) -> Response:
        assert isinstance(error, ProtocolError)
        return error_reply(error.status, error.code, str(error))

    async def not_found(_: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        if error.status_code == 405:
            return error_reply(405, "method_not_allowed", "method not allowed for this path")
        return error_reply(error.status_code, "not_found", "path not found")

    async def internal(_: Request, error: Exception) -> Response:
        return error_reply(500, "internal", f"internal error: {error!r}")

    return Starlette(
        routes=[
            Route("/v1/info", info),
            Route("/v1/steps", submit, methods=["POST"]),
            Route("/v1/steps/{step_id}", status),
            Route("/v1/logprobs", logprobs, methods=["POST"]),
            Route("/v1/checkpoints", checkpoint, methods=["POST"]),
        ],
        middleware=[Middleware(Guard, options=options)],
        exception_handlers={
            ProtocolError: refused,
            HTTPException: not_found,
            Exception: internal,
        },
    )


async def _body(request: Request) -> Any:
    """The JSON value of a request's body."""
    try:
        body = await asyncio.wait_for(_read(request), BODY_TIME)
    except (TimeoutError, asyncio.TimeoutError):
        message = "the request body did not arrive in time"
        raise ProtocolError(408, "body_timed_out", message) from None
    try:
        return json.loads(bytes(body))
    except (ValueError, RecursionError) as error:
        raise ProtocolError(
            400, "bad_request", f"the request body is not valid JSON: {error}"
        ) from error


async def _read(request: Request) -> bytearray:
    """The bytes of a request's body."""
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > BODY_LIMIT:
            message = f"the request body must have at most {BODY_LIMIT} bytes"
            raise ProtocolError(413, "body_too_large", message)
    return body


def _fields(body: Any, kinds: dict[str, type]) -> dict[str, Any]:
    """The fields of a request, whose values must have the types in ``kinds``."""
    if not isinstance(body, dict):
        raise ProtocolError(400, "bad_request", "the request body must be an object")
    found: dict[str, Any] = {}
    for name, kind in kinds.items():
        value: Any = body.get(name)
        if kind is float and type(value) is int:
            value = float(value)
        finite = not isinstance(value, float) or math.isfinite(value)
        if type(value) is not kind or not finite:
            raise ProtocolError(400, "bad_request", f"field `{name}` must be {KINDS[kind]}")
        found[name] = value
    return found


class Server:
    """An HTTP server that runs in a separate thread."""

    def __init__(self, service: TrainerService, options: NetworkOptions) -> None:
        """Binds the address, so that an address in use is an error here, and starts the thread.

        Raises ``ValueError`` for an address that other hosts reach without a secret, and
        ``OSError`` for TLS files that cannot be used.
        """
        options.check()
        config = uvicorn.Config(
            app(service, options),
            log_level="warning",
            access_log=False,
            **options.uvicorn_settings(),
        )
        config.load()
        self._socket = config.bind_socket()
        # Requests made before the thread runs wait instead of being refused.
        self._socket.listen()
        #: Port that the server listens on.
        self.port: int = self._socket.getsockname()[1]
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(
            target=self._server.run, kwargs={"sockets": [self._socket]}, name="http", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """Accepts no new requests and waits up to 10 s for those in progress."""
        self._server.should_exit = True
        self._thread.join(timeout=10)
