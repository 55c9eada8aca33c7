"""The trainer's folder of checkpoints: ``v000000``, ``v000001``, …

The newest complete checkpoint is the trainer's whole state: weights in the Hugging Face layout,
exact weights and optimizer state (``state/``), and the results of the steps that led to it
(``trainer.json``). A checkpoint is published by one rename, so a process that dies at any moment
neither loses a published step nor publishes one that was not applied.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO, Any, TypedDict, TypeVar, cast

import torch
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from .export import INDEX, tensor_files, write_weights
from .heads import HeadFileError
from .learner import Learner
from .policy import ModelError, reload_weights
from .world import World

__all__ = ["AppliedStep", "CheckpointStore", "Position", "StepResult"]

T = TypeVar("T")

log = logging.getLogger(__name__)

#: Describes a checkpoint; written last, so a folder without it is incomplete.
POSITION_FILE = "trainer.json"
#: Highest version ever published in the folder, and its lineage. Shows whether an older state was
#: restored.
HISTORY_FILE = "lineage.json"
#: Folder of chat templates with names.
ADDITIONAL_TEMPLATES = "additional_chat_templates"
#: Number of applied steps whose results are kept in a checkpoint.
REMEMBERED_STEPS = 64


class StepResult(TypedDict):
    """Result of an applied step: the protocol's ``StepResult``."""

    policy_version: int
    checkpoint: str
    metrics: dict[str, Any]


class AppliedStep(TypedDict):
    """A step that led to a checkpoint, as ``trainer.json`` lists it."""

    step_id: str
    batch_digest: str
    result: StepResult


@dataclass(frozen=True)
class Position:
    """The trainer's position: ``trainer.json`` of a checkpoint."""

    #: How often an older checkpoint was restored.
    lineage: int
    policy_version: int
    #: The last applied steps, oldest first.
    steps: list[AppliedStep] = field(default_factory=list)

    def applied(self, step_id: str) -> StepResult | None:
        """Result of step ``step_id``, or ``None`` if it is not among the last applied steps."""
        found = (step["result"] for step in self.steps if step["step_id"] == step_id)
        return next(found, None)

    def after(self, step: AppliedStep) -> Position:
        """The position after one more step."""
        steps = [*self.steps, step][-REMEMBERED_STEPS:]
        return replace(self, policy_version=step["result"]["policy_version"], steps=steps)


class CheckpointStore:
    """A folder of checkpoints. All processes must call its methods, in the same order."""

    def __init__(
        self, root: Path, world: World, keep: int = 3, dtype: torch.dtype = torch.float32
    ) -> None:
        """Keeps ``v000000`` and the ``keep`` newest checkpoints; exports weights in ``dtype``."""
        self.root = root.absolute()
        self._world = world
        self._keep = max(keep, 1)
        self._dtype = dtype
        self._lock: IO[str] | None = None

    def folder(self, version: int) -> Path:
        """Folder of checkpoint ``version``."""
        return self.root / f"v{version:06}"

    def lock(self) -> None:
        """Locks the folder until this process ends.

        Raises :class:`ModelError` if another trainer holds the lock.
        """

        def lock() -> None:
            self.root.mkdir(parents=True, exist_ok=True)
            self._lock = open(self.root / ".lock", "w")  # noqa: SIM115
            try:
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise ModelError(
                    f"{self.root}: another trainer uses this folder; stop it or choose another "
                    "--checkpoint-dir"
                ) from None

        self._on_leader(lock)

    def open(self, model: Path) -> Position:
        """Position of the newest checkpoint. If there is none, ``model`` becomes ``v000000``.

        Raises :class:`ModelError` if ``model`` or the checkpoint cannot be used.
        """
        return self._on_leader(lambda: self._open(model))

    def restore(self, learner: Learner, version: int) -> None:
        """Replaces the learner's state by that of checkpoint ``version``.

        Raises :class:`ModelError` if the checkpoint is damaged.
        """
        policy, optimizer = learner.policy, learner.optimizer
        optimizer.zero_grad(set_to_none=True)
        learner.heads.clear()
        state = self.folder(version) / "state"
        if not state.exists():
            optimizer.state.clear()
            reload_weights(policy, self.folder(version), self._world)
            return
        self._in_all(lambda: learner.heads.load(self.folder(version)))
        weights, moments = get_state_dict(policy, optimizer)
        held: dict[str, Any] = {"model": weights, "optimizer": moments}
        state_dict_loader.load(held, checkpoint_id=state, process_group=self._world.control)
        own = optimizer.param_groups[0]
        for group in held["optimizer"]["param_groups"]:
            # The kernel of this device, not that of the device that wrote the checkpoint.
            group.update({name: own[name] for name in ("foreach", "fused") if name in own})
        set_state_dict(
            policy,
            optimizer,
            model_state_dict=held["model"],
            optim_state_dict=held["optimizer"],
        )

    def save(
        self,
        learner: Learner,
        version: int,
        position: Callable[[], Position],
    ) -> Position:
        """Writes and publishes checkpoint ``version``; returns its position.

        ``position`` is called last, in the leader, when everything else is on disk.
        """
        policy, optimizer = learner.policy, learner.optimizer
        target = self.folder(version)
        partial = self.root / f".{target.name}.partial"
        base = self.folder(0)

        def prepare() -> None:
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
            _keep_others(base, partial, shutil.copy2)

        self._on_leader(prepare)
        weights, moments = get_state_dict(policy, optimizer)
        held: dict[str, Any] = {"model": weights, "optimizer": moments}
        state_dict_saver.save(
            held, checkpoint_id=partial / "state", process_group=self._world.control
        )
        write_weights(policy, base, partial, self._dtype, self._world)

        def publish() -> Position:
            learner.heads.write(partial)
            reached = position()
            _write_json(partial / POSITION_FILE, vars(reached))
            _publish(partial, target)
            # The step is applied from here on, so a later error must not make it fail.
            try:
                self._write_history(reached)
                self._prune()
            except OSError as error:
                log.warning(
                    "checkpoint %s was written, but older ones were not removed: %s", target, error
                )
            return reached

        return self._on_leader(publish)

    def _on_leader(self, work: Callable[[], T]) -> T:
        """Runs ``work`` in the leader; returns its result, or raises its error, in all
        processes."""
        result: T | None = None
        error: Exception | None = None
        if self._world.is_leader:
            try:
                result = work()
            except (OSError, ValueError) as raised:
                error = raised
        result, error = self._world.broadcast((result, error))
        if error is not None:
            raise error
        return cast("T", result)

    def _in_all(self, work: Callable[[], None]) -> None:
        """Runs ``work`` in every process; an error in one is raised in all."""
        problem = None
        try:
            work()
        except HeadFileError as error:
            problem = str(error)
        found = next((each for each in self._world.gather(problem) if each is not None), None)
        if found is not None:
            raise ModelError(found)

    def _open(self, model: Path) -> Position:
        self.root.mkdir(parents=True, exist_ok=True)
        for leftover in self.root.glob(".v*.partial"):
            shutil.rmtree(leftover, ignore_errors=True)
        history = _read_json(self.root / HISTORY_FILE)
        versions = self._versions()
        if versions:
            return self._reopen(versions[-1], history)
        # If there is a history, all checkpoints were removed, which counts as a restoration.
        lineage = 0 if history is None else history["lineage"] + 1
        position = Position(lineage=lineage, policy_version=0)
        partial = self.root / ".v000000.partial"
        partial.mkdir()
        for name in sorted({*tensor_files(model).values()}):
            _link_or_copy(model / name, partial / name)
        _keep_others(model, partial, _link_or_copy)
        _write_json(partial / POSITION_FILE, vars(position))
        _publish(partial, self.folder(0))
        self._write_history(position)
        return position

    def _reopen(self, version: int, history: dict[str, Any] | None) -> Position:
        path = self.folder(version) / POSITION_FILE
        position = Position(**(_read_json(path) or {}))
        if position.policy_version != version:
            raise ModelError(
                f"{path} states version {position.policy_version}, but its folder is named "
                f"{path.parent.name}; was the folder renamed?"
            )
        if history is not None:
            abandoned = int(history["highest_version"] > version)
            position = replace(
                position, lineage=max(position.lineage, history["lineage"] + abandoned)
            )
        self._write_history(position)
        return position

    def _versions(self) -> list[int]:
        """Versions of the complete checkpoints, ascending."""
        folders = (path.parent.name for path in self.root.glob(f"v*/{POSITION_FILE}"))
        return sorted(int(name[1:]) for name in folders if name[1:].isdigit())

    def _prune(self) -> None:
        for version in self._versions()[: -self._keep]:
            if version != 0:
                shutil.rmtree(self.folder(version))

    def _write_history(self, position: Position) -> None:
        path = self.root / HISTORY_FILE
        partial = self.root / f".{HISTORY_FILE}.partial"
        history = {"lineage": position.lineage, "highest_version": position.policy_version}
        _write_json(partial, history)
        os.replace(partial, path)
        _fsync(self.root)


def _keep_others(source: Path, target: Path, keep: Callable[[Path, Path], object]) -> None:
    """Has ``keep`` put a model's files other than weights from ``source`` into ``target``."""
    for file in _other_files(source):
        place = target / file.relative_to(source)
        place.parent.mkdir(exist_ok=True)
        keep(file, place)


def _other_files(folder: Path) -> list[Path]:
    """A model's files other than weights: configuration, tokenizer, chat templates and the like."""
    files = [path for path in sorted(folder.iterdir()) if path.is_file()]
    weights = (
        *(".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".gguf"),
        *(".h5", ".msgpack", ".onnx", ".npz", ".state"),
    )
    others = [
        path
        for path in files
        if path.suffix not in weights
        and path.name != POSITION_FILE
        and not (path.name.endswith(".index.json") and path.name != INDEX)
        and not (path.name == INDEX and folder.name.startswith("v"))
        and not path.name.startswith(".")
    ]
    return others + sorted((folder / ADDITIONAL_TEMPLATES).glob("*.jinja"))


def _link_or_copy(source: Path, target: Path) -> None:
    """Makes a hard link if the file system can, else a copy."""
    source = source.resolve()
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)


def _publish(partial: Path, target: Path) -> None:
    """Flushes a folder to disk and gives it its final name."""
    for folder, _, files in os.walk(partial):
        for name in files:
            _fsync(Path(folder) / name)
        _fsync(Path(folder))
    os.rename(partial, target)
    _fsync(target.parent)


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _write_json(path: Path, value: Any) -> None:
    """Writes JSON and flushes it to disk."""
    with open(path, "w", encoding="utf-8") as file:
        json.dump(value, file, indent=1)
        file.flush()
        os.fsync(file.fileno())


def _read_json(path: Path) -> Any:
    """The JSON value in a file, or ``None`` if there is no file."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise ModelError(f"{path} cannot be parsed: {error}") from error
