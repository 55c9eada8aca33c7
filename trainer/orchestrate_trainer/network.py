"""Who may reach the trainer's server, and what one connection may cost."""

from __future__ import annotations

import asyncio
import hmac
import ipaddress
import socket
import ssl
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

__all__ = ["BoundedProtocol", "Guard", "NetworkOptions", "OpenAddressError", "error_reply"]

#: Longest time for the headers of a request, and between two requests of a connection, in seconds.
HEADER_TIME = 10.0
#: Largest headers of a request, in bytes.
HEADER_LIMIT = 32 << 10

#: Reply to a connection over the limit.
TOO_MANY = (
    b"HTTP/1.1 503 Service Unavailable\r\nretry-after: 1\r\n"
    b"connection: close\r\ncontent-length: 0\r\n\r\n"
)


class OpenAddressError(ValueError):
    """Other hosts reach an address, and would be answered without a secret."""


@dataclass(frozen=True)
class NetworkOptions:
    """Where the server listens, and who may reach it."""

    host: str = "127.0.0.1"
    #: 0 chooses a free port.
    port: int = 0
    #: Bearer token that every request must carry.
    token: str | None = None
    #: PEM files of the server's certificate and its private key: serve HTTPS.
    tls_cert: Path | None = None
    tls_key: Path | None = None
    #: PEM file with the authorities whose clients are served (mutual TLS).
    tls_client_ca: Path | None = None
    #: Host names by which requests may address the server, besides ``localhost`` and IP addresses.
    allowed_hosts: tuple[str, ...] = ()
    #: Listen on any address, even without a token or client certificates.
    insecure: bool = False
    #: Number of open connections; a further one is answered with status 503.
    max_connections: int = 64

    def __repr__(self) -> str:
        """Leaves out the token."""
        return f"NetworkOptions(host={self.host!r}, port={self.port})"

    @property
    def is_loopback(self) -> bool:
        """Whether only this machine reaches the address. An unknown name counts as open."""
        try:
            found = socket.getaddrinfo(self.host or None, None, type=socket.SOCK_STREAM)
        except OSError:
            return False
        addresses = {str(address[4][0]).partition("%")[0] for address in found}
        return bool(self.host) and all(ipaddress.ip_address(a).is_loopback for a in addresses)

    @property
    def authenticates(self) -> bool:
        """Whether only clients that have a secret are answered."""
        return self.token is not None or self.tls_client_ca is not None

    def check(self) -> None:
        """Raises :class:`OpenAddressError` for an address that other hosts reach, if anybody would
        be answered there, and ``ValueError`` for TLS files that do not belong together."""
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ValueError("--tls-cert and --tls-key belong together; set both")
        if self.tls_client_ca is not None and self.tls_cert is None:
            raise ValueError("--tls-client-ca requires --tls-cert and --tls-key")
        if not (self.authenticates or self.insecure or self.is_loopback):
            raise OpenAddressError(
                f"{self.host} is reachable from other hosts, and anybody there could train; "
                "require a secret (--token-env) or client certificates (--tls-client-ca), or "
                "insist with --insecure"
            )

    def uvicorn_settings(self) -> dict[str, Any]:
        """Settings of uvicorn's ``Config``."""
        settings: dict[str, Any] = {
            "host": self.host,
            "port": self.port,
            "http": BoundedProtocol,
            "ws": "none",
            # The protocol itself refuses the connection after the last one that is allowed.
            "limit_concurrency": self.max_connections + 1,
            "timeout_keep_alive": 5,
            "h11_max_incomplete_event_size": HEADER_LIMIT,
            "server_header": False,
        }
        if self.tls_cert is not None:
            settings |= {"ssl_certfile": self.tls_cert, "ssl_keyfile": self.tls_key}
        if self.tls_client_ca is not None:
            settings |= {"ssl_ca_certs": self.tls_client_ca, "ssl_cert_reqs": ssl.CERT_REQUIRED}
        return settings


class BoundedProtocol(H11Protocol):
    """HTTP/1.1 with a limit on open connections and on the time of headers, which uvicorn lacks."""

    _deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Refuses the connection if too many are open."""
        super().connection_made(transport)
        if self.limit_concurrency is not None and len(self.connections) >= self.limit_concurrency:
            transport.write(TOO_MANY)
            transport.close()
        else:
            self._expect_headers()

    def data_received(self, data: bytes) -> None:
        """Stops the time once a request has begun."""
        super().data_received(data)
        self._expect_headers()

    def on_response_complete(self) -> None:
        """Starts the time for the next request."""
        super().on_response_complete()
        self._expect_headers()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stops the time."""
        self._stop_time()
        super().connection_lost(exc)

    def _expect_headers(self) -> None:
        if self.cycle is not None and not self.cycle.response_complete:
            self._stop_time()
        elif self._deadline is None and not self.transport.is_closing():
            self._deadline = self.loop.call_later(HEADER_TIME, self.transport.close)

    def _stop_time(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None


class Guard:
    """Middleware that checks host, origin, token and content type before a request is parsed."""

    def __init__(self, app: ASGIApp, options: NetworkOptions) -> None:
        self._app = app
        token = options.token
        self._expected = None if token is None else f"Bearer {token}".encode()
        self._names = {"localhost", *(name.lower() for name in options.allowed_hosts)}
        self._loopback = options.is_loopback
        self._any_host = not self._loopback and options.authenticates and not options.allowed_hosts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers a request that is denied, and passes on the others."""
        if scope["type"] == "http":
            denied = self._denial(scope["headers"])
            if denied is not None:
                await denied(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _denial(self, headers: Iterable[tuple[bytes, bytes]]) -> Response | None:
        named: dict[bytes, list[bytes]] = {}
        for name, value in headers:
            named.setdefault(name, []).append(value)

        def first(name: bytes) -> bytes:
            return named.get(name, [b""])[0]

        hosts = named.get(b"host", [])
        if len(hosts) != 1:
            return error_reply(400, "bad_request", "the request must name its host")
        host = hosts[0].decode("latin-1").lower()
        if not self._any_host and not self._allows(_without_port(host)):
            message = (
                f"host `{host[:100]}` is not allowed; use localhost or an IP address, or start the "
                "server with --allowed-host"
            )
            return error_reply(403, "host_not_allowed", message)
        origin, site = first(b"origin").decode("latin-1").lower(), first(b"sec-fetch-site")
        from_page = origin and origin not in (f"http://{host}", f"https://{host}")
        if from_page or site not in (b"", b"same-origin", b"none"):
            message = "requests from pages of other sites are not allowed"
            return error_reply(403, "cross_site", message)
        if self._expected is not None and not hmac.compare_digest(
            first(b"authorization"), self._expected
        ):
            return error_reply(401, "unauthorized", "a valid bearer token is required")
        has_body = b"transfer-encoding" in named or first(b"content-length") not in (b"", b"0")
        kind = first(b"content-type").partition(b";")[0].strip().lower()
        if has_body and kind != b"application/json":
            message = "a request with a body must have `content-type: application/json`"
            return error_reply(415, "content_type", message)
        return None

    def _allows(self, host: str) -> bool:
        """Whether requests may address the server by a host. A page whose name resolves to this
        machine (DNS rebinding) addresses it by that name."""
        try:
            address = ipaddress.ip_address(host)
        except ValueError:
            return host in self._names
        return address.is_loopback or not self._loopback


def _without_port(host: str) -> str:
    """The host of a ``Host`` header."""
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.rpartition(":")[0] if ":" in host else host


def error_reply(status: int, code: str, message: str) -> Response:
    """An error in the protocol's format."""
    return JSONResponse({"error": {"code": code, "message": message}}, status)
