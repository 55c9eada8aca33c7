"""The trainer as a service: what it answers, and the loop that trains.

:class:`Desk` lives in the leader and answers calls from its threads. :func:`work` runs in the main
thread of every process; the leader takes jobs from the desk and hands them to the others.

A step is done only when its checkpoint is on disk. One that fails leaves weights and optimizer as
they were: if they had been touched, they are read back from the newest checkpoint. A process that
dies takes the others with it, and nothing of the step remains; the orchestrator hands it over again.
"""

from __future__ import annotations

import logging
import os
import queue
import threading
import time
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from blake3 import blake3

from .batch import Batch, BatchError
from .learner import Learner
from .passes import StepError, measure
from .policy import ModelOptions, Policy, load_policy
from .settings import ALGORITHMS, Hyperparameters, Unusable
from .step import apply
from .store import CheckpointStore, Position
from .version import __version__
from .world import World

__all__ = ["Desk", "Refusal", "Trainer", "work"]

log = logging.getLogger(__name__)

PROTOCOL_VERSION = 1
#: Jobs that may wait: one step and a few measurements; more is a client that does not listen.
QUEUE = 4
#: Tokens of one forward pass in a measurement.
MEASURE_TOKENS = 16_384


class Refusal(Exception):
    """A call that is refused: HTTP status, a word for programs, a sentence for people."""

    def __init__(self, status: int, code: str, message: str) -> None:
        super().__init__(message)
        self.status, self.code = status, code


@dataclass
class Trainer:
    """What every process holds."""

    world: World
    store: CheckpointStore
    learner: Learner
    position: Position
    options: ModelOptions
    _reference: Policy | None = None

    @classmethod
    def open(
        cls, model: Path, store: CheckpointStore, options: ModelOptions, world: World
    ) -> "Trainer":
        """Continues from the newest checkpoint of ``store``, or begins with ``model``."""
        position = store.begin(model)
        version = position.policy_version
        policy = load_policy(store.folder(version), options, world)
        learner = Learner.of(policy, world)
        if version > 0:
            store.restore(learner, version)
        return cls(world, store, learner, position, options)

    @property
    def policy(self) -> Policy:
        """The model."""
        return self.learner.policy

    def reference(self) -> Policy:
        """The starting weights, frozen; read when a loss first asks for them."""
        if self._reference is None:
            self._reference = load_policy(self.store.folder(0), self.options, self.world)
            self._reference.requires_grad_(False)
        return self._reference


class Desk:
    """Answers for a running trainer; its methods may be called from any thread."""

    def __init__(self, trainer: Trainer, devices: list[str], batch_root: Path | None) -> None:
        self._trainer = trainer
        self._devices = devices
        self._batch_root = batch_root
        self._lock = threading.Lock()
        self._position = trainer.position
        #: The step under way, or the last that failed.
        self._current: dict[str, Any] | None = None
        self.jobs: queue.Queue[dict[str, Any]] = queue.Queue(QUEUE)
        self.stopping = threading.Event()

    def info(self) -> dict[str, Any]:
        with self._lock:
            position = self._position
        return {
            "protocol_version": PROTOCOL_VERSION,
            "trainer": f"orchestrate-trainer {__version__} (torch {torch.__version__})",
            "model": self._trainer.policy.shape,
            "algorithms": list(ALGORITHMS),
            "policy_version": position.policy_version,
            "lineage": position.lineage,
            "last_step_id": position.steps[-1]["step_id"] if position.steps else None,
            "checkpoint": str(self._trainer.store.folder(position.policy_version)),
            "world_size": self._trainer.world.size,
            "devices": self._devices,
        }

    def checkpoint(self) -> dict[str, Any]:
        """The newest checkpoint: every applied step has written one."""
        info = self.info()
        return {name: info[name] for name in ("checkpoint", "policy_version")}

    def submit(self, request: dict[str, Any]) -> dict[str, Any]:
        """Accepts a step, or says where it stands. A step that failed may be submitted again."""
        step_id, base = request["step_id"], request["base_version"]
        with self._lock:
            standing = self._standing(step_id)
        if standing is not None:
            return standing
        try:
            settings = Hyperparameters.parse(request["hyperparameters"])
        except Unusable as error:
            raise Refusal(422, "does_not_fit", str(error)) from error
        manifest = request["manifest"]
        batch = self._read(manifest)
        found = batch.manifest.get("step_id")
        if found != step_id:
            message = f"manifest {manifest} belongs to step {found}, not {step_id}"
            raise Refusal(409, "other_step", message)
        digest = blake3(batch.path.read_bytes()).hexdigest()
        with self._lock:
            # Asked again under the lock: another call may have been faster.
            standing = self._standing(step_id)
            if standing is not None:
                return standing
            has = self._position.policy_version
            if base != has:
                error = (
                    f"step {step_id} is for weights of version {base}, this trainer holds "
                    f"version {has}"
                )
                self._current = {"step_id": step_id, "state": "failed", "error": error}
                return self._current
            path = str(batch.path)
            self._put(
                {"step_id": step_id, "manifest": path, "settings": settings, "digest": digest}
            )
            self._current = {"step_id": step_id, "state": "queued"}
            return self._current

    def status(self, step_id: str) -> dict[str, Any]:
        with self._lock:
            known = self._known(step_id)
        if known is None:
            message = f"no step {step_id} is known: it was never submitted, or is too long ago"
            raise Refusal(404, "unknown_step", message)
        return known

    def logprobs(self, request: dict[str, Any]) -> dict[str, Any]:
        """Waits for a measurement's answer."""
        if not request["temperature"] > 0:
            raise Refusal(422, "does_not_fit", "temperature must be > 0")
        batch = self._read(request["manifest"])
        answer: Future[dict[str, Any]] = Future()
        with self._lock:
            self._put({**request, "manifest": str(batch.path), "answer": answer})
        try:
            return answer.result()
        except StepError as error:
            raise Refusal(422, "does_not_fit", str(error)) from error

    def note(self, step_id: str, state: dict[str, Any]) -> None:
        """Takes down where the step under way stands."""
        with self._lock:
            self._current = {"step_id": step_id, **state}

    def reached(self, position: Position) -> None:
        """Takes down that a step was applied."""
        with self._lock:
            self._position, self._current = position, None

    def _known(self, step_id: str) -> dict[str, Any] | None:
        result = self._position.applied(step_id)
        if result is not None:
            return {"step_id": step_id, "state": "done", "result": result}
        current = self._current
        return current if current is not None and current["step_id"] == step_id else None

    def _standing(self, step_id: str) -> dict[str, Any] | None:
        """The answer that needs no new work: the step is known and has not failed."""
        known = self._known(step_id)
        if known is not None and known["state"] != "failed":
            return known
        current = self._current
        if current is not None and current["state"] in ("queued", "running"):
            raise Refusal(503, "busy", f"busy with step {current['step_id']}: ask again later")
        return None

    def _put(self, job: dict[str, Any]) -> None:
        if self.stopping.is_set():
            raise Refusal(503, "shutting_down", "the trainer is shutting down")
        try:
            self.jobs.put_nowait(job)
        except queue.Full:
            raise Refusal(503, "busy", "busy with earlier calls: ask again later") from None

    def _read(self, manifest: str) -> Batch:
        """Opens a batch and compares its digests: nothing of a damaged one reaches the weights."""
        path = Path(manifest)

        def refuse(problem: str) -> Refusal:
            return Refusal(400, "bad_manifest_path", f"manifest {manifest}: {problem}")

        if ".." in path.parts:
            raise refuse("must not contain `..`")
        if path.name != "manifest.json":
            raise refuse("must name a file `manifest.json`")
        try:
            real = path.resolve(strict=True)
        except OSError:
            raise refuse("cannot be found or read") from None
        if self._batch_root is not None and not real.is_relative_to(self._batch_root.resolve()):
            raise refuse("lies outside the folder this trainer reads batches from")
        try:
            batch = Batch.open(real)
        except BatchError as error:
            raise Refusal(400, "bad_batch", f"manifest {manifest}: {error}") from error
        try:
            batch.require_model(self._trainer.policy.shape)
        except BatchError as error:
            raise Refusal(422, "does_not_fit", str(error)) from error
        try:
            batch.verify()
        except BatchError as error:
            raise Refusal(400, "bad_batch", f"manifest {manifest}: {error}") from error
        return batch


def work(trainer: Trainer, desk: Desk | None) -> None:
    """Does jobs until the leader is told to stop. Called by all processes, the leader with its
    desk."""
    world = trainer.world
    while True:
        job, answer = _next(desk) if desk is not None else (None, None)
        job = world.share(job)
        if job is None:
            return
        if "step_id" in job:
            _step(trainer, desk, job)
        else:
            _measure(trainer, job, answer)


def _next(desk: Desk) -> tuple[dict[str, Any] | None, Future[dict[str, Any]] | None]:
    while not desk.stopping.is_set():
        try:
            job = desk.jobs.get(timeout=0.2)
        except queue.Empty:
            continue
        return job, job.pop("answer", None)
    return None, None


def _open(job: dict[str, Any]) -> Batch:
    # The leader has compared the digests; reading the files once is enough.
    return Batch.open(job["manifest"], verify="never")


def _measure(
    trainer: Trainer, job: dict[str, Any], answer: Future[dict[str, Any]] | None
) -> None:
    try:
        batch = _open(job)
        found = measure(
            trainer.policy, batch, job["replay"], job["temperature"], MEASURE_TOKENS, trainer.world
        )
    except StepError as error:
        if answer is not None:
            answer.set_exception(error)
        return
    if answer is not None:
        answer.set_result({"policy_version": trainer.position.policy_version, **found})


def _step(trainer: Trainer, desk: Desk | None, job: dict[str, Any]) -> None:
    world, step_id = trainer.world, job["step_id"]
    started = time.monotonic()

    def progress(phase: str, share: float) -> bool:
        if desk is not None:
            desk.note(step_id, {"state": "running", "phase": phase, "progress": share})
        return not world.share(desk is not None and desk.stopping.is_set())

    moved = True
    try:
        try:
            metrics = apply(
                trainer.learner,
                trainer.reference,
                _open(job),
                job["settings"],
                world,
                progress,
            )
            position = _save(trainer, job, metrics, started, desk)
        except StepError as error:
            moved = error.moved
            raise
        except Exception:
            # The other processes wait in a collective call and cannot be told.
            if world.size > 1:
                log.exception("step %s failed in process %d: giving up", step_id, world.rank)
                os._exit(1)
            raise
    except Exception as error:
        if not isinstance(error, StepError):
            log.exception("step %s failed", step_id)
        if moved:
            trainer.store.restore(trainer.learner, trainer.position.policy_version)
        if desk is not None:
            log.warning("step %s failed, weights are as before: %s", step_id, error)
            desk.note(step_id, {"state": "failed", "error": str(error) or repr(error)})
        return
    trainer.position = position
    if desk is not None:
        desk.reached(position)
        result = position.steps[-1]["result"]
        log.info(
            "step %s applied: version %d, loss %.6g, gradient %.4g, %d tokens, %.1f s",
            step_id,
            position.policy_version,
            *(result["metrics"][name] for name in ("loss", "grad_norm", "tokens", "seconds")),
        )


def _save(
    trainer: Trainer,
    job: dict[str, Any],
    metrics: dict[str, Any],
    started: float,
    desk: Desk | None,
) -> Position:
    store, version = trainer.store, trainer.position.policy_version + 1
    if desk is not None:
        state = {"state": "running", "phase": "checkpoint", "progress": 1.0}
        desk.note(job["step_id"], state)

    def position() -> Position:
        metrics["seconds"] = time.monotonic() - started
        result = {
            "policy_version": version,
            "checkpoint": str(store.folder(version)),
            "metrics": metrics,
        }
        step = {"step_id": job["step_id"], "batch_digest": job["digest"], "result": result}
        return trainer.position.after(step)

    return store.save(trainer.learner, version, position)
