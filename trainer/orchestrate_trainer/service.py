"""The trainer as a service: answers to requests, and the loop that trains.

:class:`TrainerService` lives in the leader and answers requests from other threads.
:func:`run_jobs` runs in the main thread of every process; the leader takes jobs from the service's
queue and sends them to the other processes.

A step is done only when its checkpoint is on disk. A step that fails leaves weights and optimizer
as they were: if they were changed, they are restored from the newest checkpoint. A process that
dies ends the others, and the step has no effect; the orchestrator submits it again.
"""

from __future__ import annotations

import logging
import os
import queue
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from blake3 import blake3

from .batch import Batch, BatchError
from .folders import NotAllowedError, batch_file
from .jobs import (
    LogprobsJob,
    LogprobsRequest,
    QueuedJob,
    StepJob,
    StepRequest,
    StepStatus,
)
from .learner import Learner
from .pack_size import PackLimit, measure_limit, weight_bytes
from .passes import StepError, measure_logprobs
from .policy import ModelOptions, Policy, load_policy
from .settings import ALGORITHMS, Hyperparameters, Unusable
from .step import apply
from .store import AppliedStep, CheckpointStore, Position
from .version import __version__
from .world import World

__all__ = ["ProtocolError", "Trainer", "TrainerService", "run_jobs"]

log = logging.getLogger(__name__)

PROTOCOL_VERSION = 1
#: Jobs that may wait: one step and a few measurements. A client with more ignores the replies.
QUEUE_CAPACITY = 4
#: Tokens of one forward pass in a measurement.
MEASURE_TOKENS = 16_384


class ProtocolError(Exception):
    """A request that is refused."""

    def __init__(self, status: int, code: str, message: str) -> None:
        """``status`` is the HTTP status, ``code`` is for programs, ``message`` for people."""
        super().__init__(message)
        self.status, self.code = status, code


@dataclass
class Trainer:
    """The state that every process holds."""

    world: World
    store: CheckpointStore
    learner: Learner
    position: Position
    options: ModelOptions
    #: How many tokens fit in a pack; ``None`` where the size does not depend on memory.
    limit: PackLimit | None = None
    _reference: Policy | None = None

    @classmethod
    def open(
        cls, model: Path, store: CheckpointStore, options: ModelOptions, world: World
    ) -> Trainer:
        """Continues from the newest checkpoint of ``store``, or starts with ``model``.

        Raises :class:`~orchestrate_trainer.policy.ModelError` if the model cannot be used or the
        device has no room for it.
        """
        position = store.open(model)
        version = position.policy_version
        policy = load_policy(store.folder(version), options, world)
        learner = Learner.of(policy, world, options.moments)
        if version > 0:
            store.restore(learner, version)
        limit = None
        if options.pack_tokens == "auto":
            limit = measure_limit(policy, learner.optimizer, options, world)
            if limit is not None and world.is_leader:
                log.info("packs of %d tokens: %s", limit.tokens, limit)
        return cls(world, store, learner, position, options, limit)

    @property
    def policy(self) -> Policy:
        """The model being trained."""
        return self.learner.policy

    def reference(self) -> Policy:
        """The starting weights, frozen. Loaded on the first call."""
        if self._reference is None:
            self._reference = load_policy(self.store.folder(0), self.options, self.world)
            self._reference.requires_grad_(False)
        return self._reference

    def sized(self, settings: Hyperparameters, longest: int) -> Hyperparameters:
        """``settings`` with the size of packs that this trainer uses for a batch whose longest
        sequence has ``longest`` tokens.

        Raises :class:`StepError` in all processes if that sequence does not fit.
        """
        asked, limit = self.options.pack_tokens, self.limit
        if isinstance(asked, int):
            return replace(settings, micro_batch_tokens=asked)
        if limit is None:
            return settings
        if settings.kl_coefficient > 0 or self._reference is not None:
            # The starting weights, which are loaded when they are first needed, and stay.
            limit = limit.without(weight_bytes(self.policy, self.options))
        problem = limit.problem(longest)
        if problem is not None:
            raise StepError(problem)
        return replace(settings, micro_batch_tokens=max(limit.tokens, 1))

    def measured(self) -> int:
        """Most tokens of a pack in a measurement, which needs less memory than a step."""
        return MEASURE_TOKENS if self.limit is None else min(MEASURE_TOKENS, self.limit.tokens)


class TrainerService:
    """Answers requests to a running trainer. Methods may be called from any thread."""

    def __init__(
        self, trainer: Trainer, devices: list[str], batch_roots: Sequence[Path] | None
    ) -> None:
        """``devices`` are shown to clients; batches must lie in a folder of ``batch_roots``, or
        anywhere if it is ``None``."""
        self._trainer = trainer
        self._devices = devices
        self._batch_roots = batch_roots
        self._lock = threading.Lock()
        self._position = trainer.position
        #: The step that is queued or running, or the last one if it failed.
        self._current: StepStatus | None = None
        self.jobs: queue.Queue[QueuedJob] = queue.Queue(QUEUE_CAPACITY)
        self.stopping = threading.Event()

    def info(self) -> dict[str, Any]:
        """The protocol's ``TrainerInfo``."""
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
        """The newest checkpoint. Every applied step has written one, so nothing is written now."""
        info = self.info()
        return {name: info[name] for name in ("checkpoint", "policy_version")}

    def submit(self, request: StepRequest) -> dict[str, Any]:
        """Accepts a step, or returns its status if it is known.

        A step that failed may be submitted again. Raises :class:`ProtocolError`.
        """
        step_id, base = request.step_id, request.base_version
        with self._lock:
            known = self._without_new_work(step_id)
        if known is not None:
            return known.to_json()
        try:
            settings = Hyperparameters.parse(request.hyperparameters)
        except Unusable as error:
            raise ProtocolError(422, "does_not_fit", str(error)) from error
        manifest = request.manifest
        batch = self._open_batch(manifest)
        found = batch.manifest.get("step_id")
        if found != step_id:
            message = f"manifest {manifest} belongs to step {found}, not {step_id}"
            raise ProtocolError(409, "other_step", message)
        digest = blake3(batch.path.read_bytes()).hexdigest()
        with self._lock:
            # Checked again: another request may have been accepted meanwhile.
            known = self._without_new_work(step_id)
            if known is not None:
                return known.to_json()
            version = self._position.policy_version
            if base != version:
                problem = (
                    f"step {step_id} is based on policy version {base}, but this trainer is at "
                    f"version {version}"
                )
                self._current = StepStatus(step_id, "failed", error=problem)
            else:
                self._enqueue(QueuedJob(StepJob(step_id, str(batch.path), settings, digest)))
                self._current = StepStatus(step_id, "queued")
            return self._current.to_json()

    def status(self, step_id: str) -> dict[str, Any]:
        """Status of a step. Raises :class:`ProtocolError` if the step is unknown."""
        with self._lock:
            known = self._known(step_id)
        if known is None:
            message = (
                f"step {step_id} is unknown: it was never submitted, or is no longer remembered"
            )
            raise ProtocolError(404, "unknown_step", message)
        return known.to_json()

    def logprobs(self, request: LogprobsRequest) -> dict[str, Any]:
        """Measures the log-probs of a batch and waits for the result.

        Raises :class:`ProtocolError`.
        """
        if not request.temperature > 0:
            message = f"temperature = {request.temperature:g}: must be above 0"
            raise ProtocolError(422, "does_not_fit", message)
        batch = self._open_batch(request.manifest)
        reply: Future[dict[str, Any]] = Future()
        job = LogprobsJob(str(batch.path), request.replay, request.temperature)
        with self._lock:
            self._enqueue(QueuedJob(job, reply))
        try:
            return reply.result()
        except StepError as error:
            raise ProtocolError(422, "does_not_fit", str(error)) from error

    def set_status(self, status: StepStatus) -> None:
        """Records the status of the current step."""
        with self._lock:
            self._current = status

    def set_applied(self, position: Position) -> None:
        """Records that the current step was applied and led to ``position``."""
        with self._lock:
            self._position, self._current = position, None

    def _known(self, step_id: str) -> StepStatus | None:
        result = self._position.applied(step_id)
        if result is not None:
            return StepStatus(step_id, "done", result=result)
        current = self._current
        return current if current is not None and current.step_id == step_id else None

    def _without_new_work(self, step_id: str) -> StepStatus | None:
        """Status of a step that is known and has not failed; ``None`` if it has to be run.

        Raises :class:`ProtocolError` if another step is queued or running.
        """
        known = self._known(step_id)
        if known is not None and known.state != "failed":
            return known
        current = self._current
        if current is not None and current.active:
            message = f"busy with step {current.step_id}; try again later"
            raise ProtocolError(503, "busy", message)
        return None

    def _enqueue(self, job: QueuedJob) -> None:
        if self.stopping.is_set():
            raise ProtocolError(503, "shutting_down", "the trainer is shutting down")
        try:
            self.jobs.put_nowait(job)
        except queue.Full:
            message = "busy with earlier requests; try again later"
            raise ProtocolError(503, "busy", message) from None

    def _open_batch(self, manifest: str) -> Batch:
        """Opens a batch and verifies its digests, so that a damaged batch never reaches the
        weights. Raises :class:`ProtocolError`."""
        path = Path(manifest)

        def invalid_path(problem: str) -> ProtocolError:
            return ProtocolError(400, "bad_manifest_path", f"manifest {manifest}: {problem}")

        if ".." in path.parts:
            raise invalid_path("the path must not contain `..`")
        if path.name != "manifest.json":
            raise invalid_path("the file name must be `manifest.json`")
        try:
            real = batch_file(path, self._batch_roots)
        except NotAllowedError as error:
            raise invalid_path(str(error)) from None
        try:
            batch = Batch.open(real)
        except BatchError as error:
            raise ProtocolError(400, "bad_batch", f"manifest {manifest}: {error}") from error
        try:
            batch.require_model(self._trainer.policy.shape)
        except BatchError as error:
            raise ProtocolError(422, "does_not_fit", str(error)) from error
        try:
            batch.verify()
        except BatchError as error:
            raise ProtocolError(400, "bad_batch", f"manifest {manifest}: {error}") from error
        return batch


def run_jobs(trainer: Trainer, service: TrainerService | None) -> None:
    """Runs jobs until the leader is told to stop.

    Called by all processes; the leader passes its service, the others ``None``.
    """
    world = trainer.world
    while True:
        queued = None if service is None else _next_job(service)
        job = world.broadcast(None if queued is None else queued.job)
        match job:
            case StepJob():
                _run_step(trainer, service, job)
            case LogprobsJob():
                _run_logprobs(trainer, job, None if queued is None else queued.reply)
            case _:
                return


def _next_job(service: TrainerService) -> QueuedJob | None:
    """Waits for a job; ``None`` when the service is stopping."""
    while not service.stopping.is_set():
        try:
            return service.jobs.get(timeout=0.2)
        except queue.Empty:
            continue
    return None


def _open_checked(manifest: str) -> Batch:
    # The leader has verified the digests, so the files need not be read twice.
    return Batch.open(manifest, verify="never")


def _run_logprobs(trainer: Trainer, job: LogprobsJob, reply: Future[dict[str, Any]] | None) -> None:
    try:
        found = measure_logprobs(
            trainer.policy,
            _open_checked(job.manifest),
            job.replay,
            job.temperature,
            trainer.measured(),
            trainer.world,
        )
    except StepError as error:
        if reply is not None:
            reply.set_exception(error)
        return
    if reply is not None:
        reply.set_result({"policy_version": trainer.position.policy_version, **found})


def _run_step(trainer: Trainer, service: TrainerService | None, job: StepJob) -> None:
    world, step_id = trainer.world, job.step_id
    started = time.monotonic()

    def progress(phase: str, fraction: float) -> bool:
        if service is not None:
            service.set_status(StepStatus(step_id, "running", phase, fraction))
        return not world.broadcast(service is not None and service.stopping.is_set())

    moved = True
    try:
        try:
            batch = _open_checked(job.manifest)
            metrics = apply(
                trainer.learner,
                trainer.reference,
                batch,
                trainer.sized(job.settings, max(batch.lengths().tolist(), default=0)),
                world,
                progress,
            )
            position = _save(trainer, job, metrics, started, service)
        except StepError as error:
            moved = error.moved
            raise
        except Exception:
            # The other processes wait in a collective call and cannot be notified.
            if world.size > 1:
                log.exception("step %s failed in process %d; exiting", step_id, world.rank)
                os._exit(1)
            raise
    except Exception as error:
        if not isinstance(error, StepError):
            log.exception("step %s failed", step_id)
        if moved:
            trainer.store.restore(trainer.learner, trainer.position.policy_version)
        if service is not None:
            log.warning("step %s failed and the weights are unchanged: %s", step_id, error)
            service.set_status(StepStatus(step_id, "failed", error=str(error) or repr(error)))
        return
    trainer.position = position
    if service is not None:
        service.set_applied(position)
        metrics = position.steps[-1]["result"]["metrics"]
        log.info(
            "step %s applied: policy version %d, loss %.6g, gradient norm %.4g, %d tokens, %.1f s",
            step_id,
            position.policy_version,
            *(metrics[name] for name in ("loss", "grad_norm", "tokens", "seconds")),
        )


def _save(
    trainer: Trainer,
    job: StepJob,
    metrics: dict[str, Any],
    started: float,
    service: TrainerService | None,
) -> Position:
    """Writes the checkpoint of an applied step; returns the position that it leads to."""
    store, version = trainer.store, trainer.position.policy_version + 1
    if service is not None:
        service.set_status(StepStatus(job.step_id, "running", "checkpoint", 1.0))

    def position() -> Position:
        metrics["seconds"] = time.monotonic() - started
        step: AppliedStep = {
            "step_id": job.step_id,
            "batch_digest": job.digest,
            "result": {
                "policy_version": version,
                "checkpoint": str(store.folder(version)),
                "metrics": metrics,
            },
        }
        return trainer.position.after(step)

    return store.save(trainer.learner, version, position)
