"""Attacks over the network on the trainer's server: each is answered as it should be."""

from __future__ import annotations

import json
import shutil
import socket
import ssl
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import needs  # noqa: F401

import pytest

from orchestrate_trainer import network, server
from orchestrate_trainer.folders import NotAllowedError, batch_file
from orchestrate_trainer.network import NetworkOptions, OpenAddressError
from orchestrate_trainer.server import BODY_LIMIT, Server

TOKEN = "canary-of-the-trainer"


class FakeService:
    """Stands in for the trainer: what is attacked is the server in front of it."""

    def info(self) -> dict[str, Any]:
        return {"trainer": "fake"}

    def submit(self, step: Any) -> dict[str, Any]:
        return {"step_id": step.step_id, "state": "queued"}

    def checkpoint(self) -> dict[str, Any]:
        return {}


@pytest.fixture
def serve() -> Iterator[Any]:
    """Function that starts a server with the given options."""
    running: list[Server] = []

    def start(**options: Any) -> Server:
        service: Any = FakeService()
        running.append(Server(service, NetworkOptions(**options)))
        return running[-1]

    yield start
    for one in running:
        one.close()


#: Longest wait for a server, in seconds; much longer than any takes, also on a slow machine.
PATIENCE = 300.0


def connect(port: int) -> socket.socket:
    """A new connection to the server."""
    return socket.create_connection(("127.0.0.1", port), timeout=PATIENCE)


def exchange(port: int, text: str | bytes) -> bytes:
    """What the server answers to the bytes of a request until it closes the connection."""
    with connect(port) as connection:
        connection.sendall(text.encode() if isinstance(text, str) else text)
        return received(connection)


def received(connection: socket.socket) -> bytes:
    answer = b""
    try:
        while part := connection.recv(65536):
            answer += part
    except ConnectionResetError:
        pass
    return answer


def status(answer: bytes) -> int:
    return int(answer.split(b" ", 2)[1]) if answer else 0


def request(port: int, line: str = "GET /v1/info", body: str | None = None, **headers: str) -> int:
    fields = {
        "Host": f"127.0.0.1:{port}",
        "Connection": "close",
        "Authorization": f"Bearer {TOKEN}",
    }
    if body is not None:
        fields |= {"Content-Type": "application/json", "Content-Length": str(len(body))}
    fields |= {name.replace("_", "-"): value for name, value in headers.items()}
    text = "".join(f"{name}: {value}\r\n" for name, value in fields.items() if value)
    return status(exchange(port, f"{line} HTTP/1.1\r\n{text}\r\n{body or ''}"))


STEP = json.dumps({"step_id": "s1", "base_version": 0, "manifest": "/m", "hyperparameters": {}})


def test_open_addresses_are_refused_without_a_secret(serve: Any, tmp_path: Path) -> None:
    for host in ("0.0.0.0", "::", "192.0.2.1", ""):
        with pytest.raises(OpenAddressError, match="--insecure"):
            NetworkOptions(host=host).check()
        NetworkOptions(host=host, token="t").check()
        NetworkOptions(host=host, insecure=True).check()
    files = {"tls_cert": tmp_path / "cert.pem", "tls_key": tmp_path / "key.pem"}
    with pytest.raises(OpenAddressError):
        NetworkOptions(host="0.0.0.0", **files).check()
    NetworkOptions(host="0.0.0.0", tls_client_ca=tmp_path / "ca.pem", **files).check()
    for loopback in ("127.0.0.1", "::1", "localhost"):
        NetworkOptions(host=loopback).check()
    with pytest.raises(OpenAddressError):
        serve(host="0.0.0.0")
    assert TOKEN not in repr(NetworkOptions(token=TOKEN))


def test_requests_are_denied_before_they_are_parsed(serve: Any) -> None:
    port = serve(token=TOKEN).port
    assert request(port) == 200
    assert request(port, "POST /v1/steps", STEP) == 200
    assert request(port, Authorization="") == 401
    assert request(port, Authorization="Bearer wrong") == 401
    assert request(port, Host="evil.example") == 403
    assert request(port, Host="10.1.2.3") == 403
    assert request(port, Origin="http://evil.example") == 403
    assert request(port, Origin="null") == 403
    assert request(port, Sec_Fetch_Site="cross-site") == 403
    assert request(port, Host="localhost", Origin="http://localhost") == 200
    assert request(port, "POST /v1/steps", STEP, Content_Type="text/plain") == 415
    assert request(port, "POST /v1/steps", STEP, Content_Type="") == 415
    large = " " * (BODY_LIMIT + 1)
    assert request(port, "POST /v1/steps", large) == 413
    assert request(port, "GET /" + "a" * (1 << 20)) in (0, 400, 431)
    named = serve(token=TOKEN, allowed_hosts=("Trainer",)).port
    assert request(named, Host="trainer:30100") == 200


def test_slow_clients_and_many_connections_are_cut_off(
    serve: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(network, "HEADER_TIME", 1.0)
    monkeypatch.setattr(server, "BODY_TIME", 1.0)
    port = serve(max_connections=4).port
    # Headers that never end, also on a connection that has been used before.
    assert exchange(port, "GET /v1/info HTTP/1.1\r\nHost: localhost\r\n") == b""
    whole = "GET /v1/info HTTP/1.1\r\nHost: localhost\r\n\r\n"
    assert status(exchange(port, whole + "GET /v1/in")) == 200
    body = "POST /v1/steps HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    assert status(exchange(port, body + "Content-Length: 100\r\n\r\n{")) == 408
    for connection in [connect(port) for _ in range(4)]:
        assert received(connection) == b""
    assert request(port) == 200
    # None is cut off while the limit is reached. Connections are accepted in their order.
    monkeypatch.setattr(network, "HEADER_TIME", 3600.0)
    held = [connect(port) for _ in range(4)]
    assert status(exchange(port, "")) == 503
    for connection in held:
        connection.close()
    deadline = time.monotonic() + PATIENCE
    while (found := request(port)) == 503 and time.monotonic() < deadline:
        time.sleep(0.05)
    assert found == 200


def test_paths_outside_of_the_roots_are_refused_alike(tmp_path: Path) -> None:
    root, outside = tmp_path / "root", tmp_path / "outside"
    for folder in (root / "b", root / "linked", outside / "b"):
        folder.mkdir(parents=True)
        (folder / "manifest.json").write_text("{}")
    (root / "linked" / "0000.safetensors").symlink_to(outside / "b" / "manifest.json")
    (root / "out").symlink_to(outside / "b")
    manifest = root / "b" / "manifest.json"
    assert batch_file(manifest, [root]) == manifest.resolve()
    refusals = set()
    for path in (
        outside / "b" / "manifest.json",
        outside / "missing" / "manifest.json",
        root / "missing" / "manifest.json",
        root / "out" / "manifest.json",
        root / "linked" / "manifest.json",
        Path("/proc/self/root") / str(manifest)[1:],
        Path("a\0b"),
    ):
        with pytest.raises(NotAllowedError) as refusal:
            batch_file(path, [root])
        refusals.add(str(refusal.value))
    assert len(refusals) == 1
    assert batch_file(outside / "b" / "manifest.json", None)


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with an authority, a server's and a client's certificate, and another authority."""
    if shutil.which("openssl") is None:
        pytest.skip("openssl is not installed")
    folder = tmp_path_factory.mktemp("tls")

    def openssl(*line: str) -> None:
        subprocess.run(["openssl", *line], cwd=folder, check=True, capture_output=True)

    key = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
    for name in ("ca", "other"):
        root = ("req", "-x509", "-days", "2", "-subj", f"/CN={name}")
        openssl(*root, "-keyout", f"{name}-key.pem", "-out", f"{name}.pem", *key)
    (folder / "server.ext").write_text("subjectAltName=IP:127.0.0.1\n")
    (folder / "client.ext").write_text("extendedKeyUsage=clientAuth\n")
    for name in ("server", "client"):
        asked = ("req", "-subj", f"/CN={name}", "-keyout", f"{name}-key.pem")
        openssl(*asked, "-out", f"{name}.csr", *key)
        signed = ("x509", "-req", "-in", f"{name}.csr", "-extfile", f"{name}.ext", "-days", "2")
        authority = ("-CA", "ca.pem", "-CAkey", "ca-key.pem", "-CAcreateserial")
        openssl(*signed, *authority, "-out", f"{name}.pem")
    return folder


def test_tls_requires_the_right_authority_and_a_client_certificate(
    serve: Any, certificates: Path
) -> None:
    port = serve(
        tls_cert=certificates / "server.pem",
        tls_key=certificates / "server-key.pem",
        tls_client_ca=certificates / "ca.pem",
    ).port

    def ask(authority: str, client: str | None) -> int:
        context = ssl.create_default_context(cafile=str(certificates / authority))
        if client is not None:
            context.load_cert_chain(
                certificates / f"{client}.pem", certificates / f"{client}-key.pem"
            )
        with (
            connect(port) as plain,
            context.wrap_socket(plain, server_hostname="127.0.0.1") as connection,
        ):
            text = f"GET /v1/info HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nConnection: close\r\n\r\n"
            connection.sendall(text.encode())
            return status(received(connection))

    assert ask("ca.pem", "client") == 200
    for authority, client in (("other.pem", "client"), ("ca.pem", None), ("ca.pem", "other")):
        try:
            answered = ask(authority, client)
        except (ssl.SSLError, ConnectionError):
            continue
        assert answered == 0, (authority, client)
    assert b"200" not in exchange(port, "GET /v1/info HTTP/1.1\r\nHost: localhost\r\n\r\n")
