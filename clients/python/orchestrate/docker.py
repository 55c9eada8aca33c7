"""A Docker daemon, by the HTTP API that it serves on a Unix socket."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
from collections.abc import Iterator, Mapping
from typing import Any

import httpcore
import httpx

from .wire import EnvironmentFailure

DEFAULT_HOST = "unix:///var/run/docker.sock"

#: Time limit of one call, in seconds. A loaded daemon takes long to start a container.
CALL_S = 120.0

#: Bytes before each piece of output: the stream, three zeros, and the length.
HEADER_BYTES = 8


class SandboxFailure(EnvironmentFailure):
    """Docker cannot do what a sandbox needs: the daemon does not answer, the image is missing, or
    the host's disk is full. It is never the policy's doing, so the attempt is retried."""

    def __init__(self, message: str, status: int = 0) -> None:
        super().__init__(message)
        #: Status of the daemon's reply; 0 if there was none.
        self.status = status


class Daemon:
    """A Docker daemon.

    Args:
        host: `unix://` and the path of its socket; by default the variable `DOCKER_HOST`, or the
            usual socket.
    """

    def __init__(self, host: str | None = None) -> None:
        self.host = host or os.environ.get("DOCKER_HOST") or DEFAULT_HOST
        if not self.host.startswith("unix://"):
            raise SandboxFailure(
                f"DOCKER_HOST = {self.host}: sandboxes of the Python client need a socket of this "
                "machine, e.g. unix:///var/run/docker.sock; forward one with ssh -L"
            )
        transport = httpx.HTTPTransport(uds=self.host.removeprefix("unix://"), verify=False)
        self._http = httpx.Client(
            transport=transport, base_url="http://docker", trust_env=False, timeout=CALL_S
        )

    def call(self, method: str, path: str, body: Any = None, **parameters: str) -> Any:
        """Sends a request. Returns the reply's JSON, or `None` if it is empty.

        Raises:
            SandboxFailure: The daemon does not answer, or refuses the request.
        """
        with self._failures():
            reply = self._http.request(method, path, json=body, params=parameters)
        return self._check(reply)

    def events(self, container: str, since: float, until: float) -> list[str]:
        """What happened to a container between two Unix times, e.g. `oom` and `die`."""
        filters = json.dumps({"container": [container], "type": ["container"]})
        times = {"since": f"{since:.3f}", "until": f"{until:.3f}"}
        with self._failures():
            reply = self._http.get("/events", params={**times, "filters": filters})
        self._check(reply, is_json=False)
        return [json.loads(line)["Action"] for line in reply.text.splitlines()]

    def open_stream(self, path: str, body: Mapping[str, Any] | None = None) -> Stream:
        """Sends a request whose connection then carries the streams of a process."""
        upgrade = {"connection": "Upgrade", "upgrade": "tcp"}
        with self._failures():
            request = self._http.build_request("POST", path, json=body, headers=upgrade)
            reply = self._http.send(request, stream=True)
            if reply.status_code != 101:
                reply.read()
                reply.close()
        if reply.status_code != 101:
            self._check(reply)
            raise SandboxFailure(f"{self.host} did not open a stream: status {reply.status_code}")
        return Stream(reply)

    def close(self) -> None:
        """Closes the connections."""
        self._http.close()

    @contextlib.contextmanager
    def _failures(self) -> Iterator[None]:
        try:
            yield
        except httpx.TransportError as error:
            raise SandboxFailure(
                f"the Docker daemon at {self.host} does not answer ({type(error).__name__}: "
                f"{error}); start it, or set DOCKER_HOST"
            ) from error

    def _check(self, reply: httpx.Response, is_json: bool = True) -> Any:
        if reply.status_code < 300:
            return reply.json() if is_json and reply.content else None
        try:
            message = str(reply.json()["message"])
        except (ValueError, KeyError, TypeError):
            message = reply.text[:300]
        raise SandboxFailure(f"Docker: {message}", reply.status_code)


class Stream:
    """A connection that carries the input and the output of a process."""

    def __init__(self, reply: httpx.Response) -> None:
        self._reply = reply
        self._network: httpcore.NetworkStream = reply.extensions["network_stream"]
        self._socket: socket.socket = self._network.get_extra_info("socket")
        self._buffer = bytearray()

    def feed(self, data: bytes) -> None:
        """Sends all input and then its end, in a thread."""
        # A copy, because the time limit of a Python socket is for both directions.
        other = self._socket.dup()

        def send() -> None:
            # The process may end, or close its input, before it has read everything.
            with contextlib.suppress(OSError), other:
                other.settimeout(CALL_S)
                view = memoryview(data)
                while view:
                    view = view[other.send(view) :]
                other.shutdown(socket.SHUT_WR)

        threading.Thread(target=send, daemon=True).start()

    def read(self, seconds: float) -> list[tuple[int, bytes]] | None:
        """The output that arrived, as pieces of stream 1 or 2; `None` at its end. Waits until there
        is some, but not longer than `seconds`."""
        try:
            data = self._network.read(1 << 18, timeout=max(0.001, seconds))
        except httpcore.ReadTimeout:
            return []
        except httpcore.NetworkError:
            return None
        self._buffer += data
        return list(self._pieces()) if data else None

    def _pieces(self) -> Iterator[tuple[int, bytes]]:
        start = 0
        while len(self._buffer) >= start + HEADER_BYTES:
            length = int.from_bytes(self._buffer[start + 4 : start + HEADER_BYTES], "big")
            end = start + HEADER_BYTES + length
            if len(self._buffer) < end:
                break
            yield self._buffer[start], bytes(self._buffer[start + HEADER_BYTES : end])
            start = end
        del self._buffer[:start]

    def close(self) -> None:
        """Ends the connection, also for a thread that is sending."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._reply.close()
