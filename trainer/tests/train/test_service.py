"""The trainer protocol over HTTP: steps, refused requests and restarts."""

from __future__ import annotations

import json
import shutil
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import needs  # noqa: F401

import pytest

import torch  # isort: skip
from model_families import hyperparameters, write_batch

from orchestrate_trainer.network import NetworkOptions
from orchestrate_trainer.policy import ModelOptions
from orchestrate_trainer.server import BODY_LIMIT, Server
from orchestrate_trainer.service import Trainer, TrainerService, run_jobs
from orchestrate_trainer.step import apply
from orchestrate_trainer.store import CheckpointStore

LENGTHS = (9, 12, 6)


class Client:
    """Client of a trainer, without time limits."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.token: str | None = None

    def call(self, path: str, body: Any = None, method: str | None = None) -> tuple[int, Any]:
        """HTTP status and JSON body of the reply."""
        data = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
        url = f"http://127.0.0.1:{self.port}{path}"
        request = urllib.request.Request(url, data, method=method)
        if data is not None:
            request.add_header("Content-Type", "application/json")
        if self.token is not None:
            request.add_header("Authorization", f"Bearer {self.token}")
        try:
            with urllib.request.urlopen(request) as answer:
                return answer.status, json.load(answer)
        except urllib.error.HTTPError as error:
            return error.code, json.load(error)

    def refused(
        self, path: str, body: Any = None, method: str | None = None
    ) -> tuple[int, str, str]:
        """HTTP status, error code and message of a refused request."""
        status, answer = self.call(path, body, method)
        return status, answer["error"]["code"], answer["error"]["message"]

    def finished(self, step_id: str) -> dict[str, Any]:
        """Polls until a step is done or has failed, and returns its status."""
        # Counts polls, not time: a busy machine may stop this process for minutes.
        for poll in range(100_000):
            code, status = self.call(f"/v1/steps/{step_id}")
            assert code == 200 and status["step_id"] == step_id
            if status["state"] in ("done", "failed"):
                found: dict[str, Any] = status
                return found
            # The steps of tests take milliseconds.
            time.sleep(min(0.05, 0.002 * (poll + 1)))
        raise AssertionError(f"step {step_id} did not end")


class Running:
    """A trainer that runs in threads of this process."""

    def __init__(self, trainer: Trainer, batch_root: Path | None, token: str | None) -> None:
        self.trainer = trainer
        self.service = TrainerService(
            trainer, trainer.world.device_names(), [batch_root] if batch_root else None
        )
        self.server = Server(self.service, NetworkOptions(token=token))
        self.client = Client(self.server.port)
        self._thread = threading.Thread(target=run_jobs, args=(trainer, self.service))
        self._thread.start()

    def stop(self) -> None:
        self.service.stopping.set()
        self._thread.join()
        self.server.close()


@pytest.fixture
def start(folders: dict[str, Path], world: Any, tmp_path: Path) -> Iterator[Any]:
    """Function that starts a trainer; all of them use one folder of checkpoints."""
    running: list[Running] = []

    def open_trainer(batch_root: Path | None = None, token: str | None = None) -> Running:
        store = CheckpointStore(tmp_path / "ckpt", world)
        options = ModelOptions(experts="eager")
        trainer = Trainer.open(folders["qwen3_moe"], store, options, world)
        running.append(Running(trainer, batch_root, token))
        return running[-1]

    yield open_trainer
    for one in running:
        one.stop()


def request(manifest: Path, step_id: str = "s1", base: int = 0, **changed: Any) -> dict[str, Any]:
    """Body of a request to apply a step."""
    return {
        "step_id": step_id,
        "base_version": base,
        "manifest": str(manifest),
        "hyperparameters": hyperparameters(**changed),
    }


def test_step_is_applied_once_however_often_it_is_submitted(start: Any, tmp_path: Path) -> None:
    first = start()
    client = first.client
    status, info = client.call("/v1/info")
    assert status == 200
    assert info["model"] == first.trainer.policy.shape
    assert (info["protocol_version"], info["policy_version"], info["lineage"]) == (1, 0, 0)
    assert info["last_step_id"] is None and info["world_size"] == 1
    assert Path(info["checkpoint"], "config.json").exists()
    manifest = write_batch(tmp_path / "b1", info["model"], LENGTHS, "s1")
    assert client.call("/v1/steps", request(manifest))[1]["state"] in ("queued", "running")
    done = client.finished("s1")
    result = done["result"]
    assert result["policy_version"] == 1 and Path(result["checkpoint"]).name == "v000001"
    assert result["metrics"]["tokens"] == sum(LENGTHS) and result["metrics"]["seconds"] > 0
    assert client.call("/v1/steps", request(manifest)) == (200, done)
    info = client.call("/v1/info")[1]
    assert (info["policy_version"], info["last_step_id"]) == (1, "s1")
    newest = {"checkpoint": result["checkpoint"], "policy_version": 1}
    assert client.call("/v1/checkpoints", {}) == (200, newest)
    first.stop()
    again = start().client
    assert again.call("/v1/steps", request(manifest)) == (200, done)
    assert again.call("/v1/steps/s1") == (200, done)
    manifest = write_batch(tmp_path / "b2", info["model"], LENGTHS, "s2")
    again.call("/v1/steps", request(manifest, "s2", base=1))
    assert again.finished("s2")["result"]["policy_version"] == 2


def test_step_for_another_policy_version_fails_and_changes_nothing(
    start: Any, tmp_path: Path
) -> None:
    client = start().client
    shape = client.call("/v1/info")[1]["model"]
    manifest = write_batch(tmp_path / "b", shape, LENGTHS, "s1")
    status, answer = client.call("/v1/steps", request(manifest, base=5))
    assert status == 200 and answer["state"] == "failed"
    assert "version 5" in answer["error"] and "version 0" in answer["error"]
    assert client.call("/v1/steps/s1")[1] == answer
    # The corrected step may be submitted again.
    client.call("/v1/steps", request(manifest))
    assert client.finished("s1")["state"] == "done"


def test_step_that_fails_midway_leaves_the_weights(
    start: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    running = start()
    client, trainer = running.client, running.trainer
    shape = client.call("/v1/info")[1]["model"]
    steps = []
    for number in (1, 2):
        manifest = write_batch(tmp_path / f"b{number}", shape, LENGTHS, f"s{number}")
        steps.append(request(manifest, f"s{number}", number - 1, mini_steps=2))
    client.call("/v1/steps", steps[0])
    client.finished("s1")
    before = [p.full_tensor().detach().clone() for p in trainer.policy.parameters()]
    real = trainer.learner.optimizer.step
    calls = []

    def broken() -> None:
        real()
        calls.append(1)
        if len(calls) == 2:
            raise RuntimeError("the device is gone")

    monkeypatch.setattr(trainer.learner.optimizer, "step", broken)
    client.call("/v1/steps", steps[1])
    failed = client.finished("s2")
    assert failed["state"] == "failed" and "the device is gone" in failed["error"]
    after = [p.full_tensor() for p in trainer.policy.parameters()]
    assert all(map(torch.equal, before, after))
    assert client.call("/v1/info")[1]["policy_version"] == 1
    assert not list(trainer.store.root.glob(".v*"))
    client.call("/v1/steps", steps[1])
    assert client.finished("s2")["state"] == "done"


def test_second_step_is_refused_while_one_runs(
    start: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = threading.Event()

    def wait(*given: Any) -> Any:
        gate.wait()
        return apply(*given)

    monkeypatch.setattr("orchestrate_trainer.service.apply", wait)
    client = start().client
    shape = client.call("/v1/info")[1]["model"]
    paths = [write_batch(tmp_path / name, shape, LENGTHS, name) for name in ("s1", "s2")]
    client.call("/v1/steps", request(paths[0], "s1"))
    assert client.call("/v1/steps", request(paths[0], "s1"))[1]["state"] in ("queued", "running")
    assert client.refused("/v1/steps", request(paths[1], "s2"))[:2] == (503, "busy")
    gate.set()
    assert client.finished("s1")["state"] == "done"


def test_measuring_log_probs_changes_nothing(start: Any, tmp_path: Path) -> None:
    client = start().client
    shape = client.call("/v1/info")[1]["model"]
    manifest = write_batch(tmp_path / "b", shape, LENGTHS, "any")
    body = {"manifest": str(manifest), "replay": True, "temperature": 1}
    status, replayed = client.call("/v1/logprobs", body)
    assert status == 200 and replayed["policy_version"] == 0
    assert [len(row) for row in replayed["logprobs"]] == list(LENGTHS)
    assert replayed["disagreement"] is None
    own = client.call("/v1/logprobs", body | {"replay": False})[1]
    assert own["logprobs"] != replayed["logprobs"] and own["disagreement"]["router"] > 0
    assert client.call("/v1/logprobs", body)[1] == replayed
    assert client.refused("/v1/logprobs", body | {"temperature": 0})[:2] == (422, "does_not_fit")


def test_invalid_batches_are_refused_and_named(start: Any, tmp_path: Path) -> None:
    running = start(batch_root=tmp_path / "batches")
    client = running.client
    shape = client.call("/v1/info")[1]["model"]
    good = write_batch(tmp_path / "batches" / "b", shape, LENGTHS, "s1")
    outside = write_batch(tmp_path / "elsewhere", shape, LENGTHS, "s1")

    def damaged(name: str) -> Path:
        return Path(shutil.copytree(good.parent, tmp_path / "batches" / name))

    def refusal(manifest: Path, **changed: Any) -> tuple[int, str, str]:
        refused: tuple[int, str, str] = client.refused("/v1/steps", request(manifest) | changed)
        return refused

    path = "bad_manifest_path"
    assert refusal(good.parent / "nothing.json")[:2] == (400, path)
    assert refusal(good.parent / ".." / "b" / "manifest.json")[:2] == (400, path)
    assert refusal(tmp_path / "batches" / "absent" / "manifest.json")[:2] == (400, path)
    status, code, message = refusal(outside)
    assert (status, code) == (400, path) and "not below a folder" in message
    status, code, message = refusal(good, step_id="s9")
    assert (status, code) == (409, "other_step") and "s1" in message and "s9" in message

    gone = damaged("gone")
    (gone / "0001.safetensors").unlink()
    status, code, message = refusal(gone / "manifest.json")
    assert (status, code) == (400, "bad_batch") and "0001.safetensors" in message
    flipped = damaged("flipped")
    content = bytearray((flipped / "0000.safetensors").read_bytes())
    content[-1] ^= 1
    (flipped / "0000.safetensors").write_bytes(content)
    status, code, message = refusal(flipped / "manifest.json")
    assert (status, code) == (400, "bad_batch")
    assert "0000.safetensors" in message and "digest" in message
    newer = damaged("newer")
    manifest = json.loads(good.read_text())
    (newer / "manifest.json").write_text(json.dumps(manifest | {"format_version": 2}))
    status, code, message = refusal(newer / "manifest.json")
    assert (status, code) == (400, "bad_batch") and "format version" in message
    for field, value in (("top_k", 1), ("experts", 9), ("vocab", 60), ("hidden_layers", 3)):
        other = damaged(f"other-{field}")
        changed = json.loads(good.read_text())
        changed["model"][field] = value
        if field == "top_k":
            changed["records"][0]["per_layer"] = value
        (other / "manifest.json").write_text(json.dumps(changed))
        status, code, message = refusal(other / "manifest.json")
        assert (status, code) == (422, "does_not_fit")
        assert "another model" in message and field in message
    status, code, message = refusal(good, hyperparameters=hyperparameters(clip_low=7))
    assert (status, code) == (422, "does_not_fit") and "clip_low" in message
    status, code, message = refusal(good, hyperparameters=hyperparameters(policy_loss="x"))
    assert (status, code) == (422, "does_not_fit") and "policy_loss" in message
    assert client.call("/v1/info")[1]["policy_version"] == 0
    assert client.refused("/v1/steps/s1")[:2] == (404, "unknown_step")
    assert client.call("/v1/steps", request(good))[0] == 200


def test_malformed_requests_are_refused(start: Any) -> None:
    client = start().client
    assert client.refused("/v2/info")[:2] == (404, "not_found")
    assert client.refused("/v1/steps", method="PUT")[:2] == (405, "method_not_allowed")
    assert client.refused("/v1/steps/never")[:2] == (404, "unknown_step")
    for body in (b"{", b"[]", b"{}", b"\xff", b"[" * 100_000):
        assert client.refused("/v1/steps", body)[:2] == (400, "bad_request")
    status, code, message = client.refused("/v1/steps", request(Path("m")) | {"base_version": "0"})
    assert (status, code) == (400, "bad_request") and "base_version" in message
    for step_id in ("", "a/b", "..\\", "x" * 129, "ä"):
        named = request(Path("m"), step_id)
        assert client.refused("/v1/steps", named)[:2] == (400, "bad_step_id")
    # The server stops reading the body, so the client may see a broken pipe instead.
    try:
        large = client.refused("/v1/steps", b" " * (BODY_LIMIT + 1))
        assert large[:2] == (413, "body_too_large")
    except (urllib.error.URLError, ConnectionError):
        pass
    assert client.call("/v1/info")[0] == 200


def test_every_request_requires_the_token(start: Any) -> None:
    client = start(token="secret").client
    for token in (None, "", "secre", "secret2", "sécret"):
        client.token = token if token != "sécret" else None
        for path, method in (("/v1/info", "GET"), ("/v1/checkpoints", "POST"), ("/x", "GET")):
            assert client.refused(path, method=method)[:2] == (401, "unauthorized")
    client.token = "secret"
    assert client.call("/v1/info")[0] == 200
