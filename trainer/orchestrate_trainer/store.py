"""The trainer's folder of checkpoints: ``v000000``, ``v000001``, …, and where it stands.

The newest complete folder is the trainer's whole state: weights in the Hugging Face layout, exact
weights and optimizer (``state/``), and the results of the steps that led there (``trainer.json``).
It appears by one rename, so losing a process at any moment loses nothing that was published and
publishes nothing that was not applied.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import shutil
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO, Any, Callable

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from .export import INDEX, tensor_files, write_weights
from .learner import Learner
from .policy import UnusableModel, refill
from .side import UnusableSide
from .world import World

__all__ = ["CheckpointStore", "Position"]

log = logging.getLogger(__name__)

#: Tells what a checkpoint is; written last.
POSITION_FILE = "trainer.json"
#: Highest version ever published here and its lineage: how a restored older state is noticed.
HISTORY_FILE = "lineage.json"
#: Applied steps whose results are remembered.
REMEMBERED_STEPS = 64


@dataclass(frozen=True)
class Position:
    """Where a trainer stands: ``trainer.json`` of a checkpoint."""

    #: Counts restorations of older checkpoints.
    lineage: int
    policy_version: int
    #: The last applied steps, oldest first: ``step_id``, ``batch_digest``, ``result``.
    steps: list[dict[str, Any]] = field(default_factory=list)

    def applied(self, step_id: str) -> dict[str, Any] | None:
        """Result of a step that led here."""
        found = (step["result"] for step in self.steps if step["step_id"] == step_id)
        return next(found, None)

    def after(self, step: dict[str, Any]) -> "Position":
        """The position after one more step."""
        steps = [*self.steps, step][-REMEMBERED_STEPS:]
        return replace(self, policy_version=step["result"]["policy_version"], steps=steps)


class CheckpointStore:
    """The folder. Methods that touch weights are called by all processes, alike."""

    def __init__(
        self, root: Path, world: World, keep: int = 3, dtype: torch.dtype = torch.float32
    ) -> None:
        """``keep`` newest checkpoints stay, beside ``v000000``; ``dtype`` is that of exports."""
        self.root = root.absolute()
        self._world = world
        self._keep = max(keep, 1)
        self._dtype = dtype
        self._claim: IO[str] | None = None

    def folder(self, version: int) -> Path:
        """Folder of a version."""
        return self.root / f"v{version:06}"

    def claim(self) -> None:
        """Makes the folder this trainer's alone until its process ends. Raises
        :class:`UnusableModel` if another one has it."""

        def lock() -> None:
            self.root.mkdir(parents=True, exist_ok=True)
            self._claim = open(self.root / ".lock", "w")
            try:
                fcntl.flock(self._claim, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise UnusableModel(
                    f"{self.root}: another trainer uses this folder: end it, or take another one"
                ) from None

        self._led(lock)

    def begin(self, model: Path) -> Position:
        """Where the newest checkpoint stands; without one, ``model`` becomes ``v000000``."""
        return self._led(lambda: self._begin(model))

    def restore(self, learner: Learner, version: int) -> None:
        """Puts the weights and optimizer states of ``version`` into the learner."""
        policy, optimizer = learner.policy, learner.optimizer
        optimizer.zero_grad(set_to_none=True)
        learner.side.clear()
        state = self.folder(version) / "state"
        if not state.exists():
            optimizer.state.clear()
            refill(policy, self.folder(version), self._world)
            return
        self._alike(lambda: learner.side.load(self.folder(version)))
        weights, moments = get_state_dict(policy, optimizer)
        held = {"model": weights, "optimizer": moments}
        dcp.load(held, checkpoint_id=state, process_group=self._world.control)
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
        """Writes a checkpoint whole. ``position`` is asked for last, in the leader, when everything
        else is on disk."""
        policy, optimizer = learner.policy, learner.optimizer
        target = self.folder(version)
        partial = self.root / f".{target.name}.partial"
        base = self.folder(0)

        def prepare() -> None:
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
            for file in _companions(base):
                shutil.copy2(file, partial / file.name)

        self._led(prepare)
        weights, moments = get_state_dict(policy, optimizer)
        held = {"model": weights, "optimizer": moments}
        dcp.save(held, checkpoint_id=partial / "state", process_group=self._world.control)
        write_weights(policy, base, partial, self._dtype, self._world)

        def publish() -> Position:
            learner.side.write(partial)
            reached = position()
            _write_json(partial / POSITION_FILE, vars(reached))
            _publish(partial, target)
            # The step is applied from here on: what follows must not turn it into a failure.
            try:
                self._note(reached)
                self._prune()
            except OSError as error:
                log.warning("the checkpoint is written, older ones were not tidied up: %s", error)
            return reached

        return self._led(publish)

    def _led(self, work: Callable[[], Any]) -> Any:
        """The leader's ``work``, its result or error everywhere."""
        result = error = None
        if self._world.leads:
            try:
                result = work()
            except (OSError, ValueError) as raised:
                error = raised
        result, error = self._world.share((result, error))
        if error is not None:
            raise error
        return result

    def _alike(self, work: Callable[[], None]) -> None:
        """Every process's ``work``; an error of one is everybody's."""
        problem = None
        try:
            work()
        except UnusableSide as error:
            problem = str(error)
        found = next((each for each in self._world.gather(problem) if each is not None), None)
        if found is not None:
            raise UnusableModel(found)

    def _begin(self, model: Path) -> Position:
        self.root.mkdir(parents=True, exist_ok=True)
        for leftover in self.root.glob(".v*.partial"):
            shutil.rmtree(leftover, ignore_errors=True)
        history = _read_json(self.root / HISTORY_FILE)
        versions = self._versions()
        if versions:
            return self._reopened(versions[-1], history)
        # All checkpoints were taken away: that is a restoration too.
        position = Position(lineage=0 if history is None else history["lineage"] + 1, policy_version=0)
        partial = self.root / ".v000000.partial"
        partial.mkdir()
        for name in sorted({*tensor_files(model).values()}):
            _link(model / name, partial / name)
        for file in _companions(model):
            _link(file, partial / file.name)
        _write_json(partial / POSITION_FILE, vars(position))
        _publish(partial, self.folder(0))
        self._note(position)
        return position

    def _reopened(self, version: int, history: dict[str, Any] | None) -> Position:
        path = self.folder(version) / POSITION_FILE
        position = Position(**(_read_json(path) or {}))
        if position.policy_version != version:
            raise UnusableModel(
                f"{path} says version {position.policy_version}: was the folder renamed?"
            )
        if history is not None:
            abandoned = int(history["highest_version"] > version)
            position = replace(
                position, lineage=max(position.lineage, history["lineage"] + abandoned)
            )
        self._note(position)
        return position

    def _versions(self) -> list[int]:
        """Versions of the complete checkpoints, ascending."""
        folders = (path.parent.name for path in self.root.glob(f"v*/{POSITION_FILE}"))
        return sorted(int(name[1:]) for name in folders if name[1:].isdigit())

    def _prune(self) -> None:
        for version in self._versions()[: -self._keep]:
            if version != 0:
                shutil.rmtree(self.folder(version))

    def _note(self, position: Position) -> None:
        path = self.root / HISTORY_FILE
        partial = self.root / f".{HISTORY_FILE}.partial"
        history = {"lineage": position.lineage, "highest_version": position.policy_version}
        _write_json(partial, history)
        os.replace(partial, path)
        _sync(self.root)


def _companions(folder: Path) -> list[Path]:
    """Configuration, tokenizer and whatever else belongs to a model beside its weights."""
    files = (path for path in sorted(folder.iterdir()) if path.is_file())
    weights = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".state")
    return [
        path
        for path in files
        if path.suffix not in weights
        and path.name != POSITION_FILE
        and not (path.name.endswith(".index.json") and path.name != INDEX)
        and not (path.name == INDEX and folder.name.startswith("v"))
        and not path.name.startswith(".")
    ]


def _link(source: Path, target: Path) -> None:
    """The same file under another name where the file system can, else a copy."""
    source = source.resolve()
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)


def _publish(partial: Path, target: Path) -> None:
    for folder, _, files in os.walk(partial):
        for name in files:
            _sync(Path(folder) / name)
        _sync(Path(folder))
    os.rename(partial, target)
    _sync(target.parent)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _write_json(path: Path, value: Any) -> None:
    with open(path, "w", encoding="utf-8") as file:
        json.dump(value, file, indent=1)
        file.flush()
        os.fsync(file.fileno())


def _read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise UnusableModel(f"{path} is not readable: {error}") from error
