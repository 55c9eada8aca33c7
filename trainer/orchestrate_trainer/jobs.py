"""Requests of the trainer protocol, and the jobs that the training processes run for them."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from .settings import Hyperparameters
from .store import StepResult

__all__ = [
    "Job",
    "LogprobsJob",
    "LogprobsRequest",
    "QueuedJob",
    "StepJob",
    "StepRequest",
    "StepStatus",
]


@dataclass(frozen=True)
class StepRequest:
    """A request to apply a step; the fields are the protocol's."""

    step_id: str
    #: Policy version that the step is based on.
    base_version: int
    #: Path of the batch's manifest.
    manifest: str
    hyperparameters: dict[str, Any]


@dataclass(frozen=True)
class LogprobsRequest:
    """A request for the log-probs of a batch; the fields are the protocol's."""

    #: Path of the batch's manifest.
    manifest: str
    #: Whether the batch's routes are replayed.
    replay: bool
    temperature: float


@dataclass(frozen=True)
class StepJob:
    """A step that was accepted."""

    step_id: str
    #: Path of the batch's manifest, checked.
    manifest: str
    settings: Hyperparameters
    #: BLAKE3 of the manifest, in hexadecimal.
    digest: str


@dataclass(frozen=True)
class LogprobsJob:
    """A measurement that was accepted."""

    #: Path of the batch's manifest, checked.
    manifest: str
    replay: bool
    temperature: float


#: What all processes do together. The leader sends it to the others.
Job: TypeAlias = StepJob | LogprobsJob


@dataclass(frozen=True)
class QueuedJob:
    """A job in the leader's queue."""

    job: Job
    #: Receives the reply of a measurement; ``None`` for a step, whose status is polled.
    reply: Future[dict[str, Any]] | None = None


@dataclass(frozen=True)
class StepStatus:
    """Status of a step: the protocol's ``StepStatus``."""

    step_id: str
    state: Literal["queued", "running", "done", "failed"]
    #: What a running step does.
    phase: str | None = None
    #: Fraction of the phase that is done, 0 to 1.
    progress: float | None = None
    #: Why a step failed.
    error: str | None = None
    #: What a step that is done resulted in.
    result: StepResult | None = None

    @property
    def active(self) -> bool:
        """Whether the step still has to run or is running."""
        return self.state in ("queued", "running")

    def to_json(self) -> dict[str, Any]:
        """The status as the protocol sends it: only the fields of its state."""
        return {name: value for name, value in vars(self).items() if value is not None}
