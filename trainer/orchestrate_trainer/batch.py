"""Reads the batch of one training step, format version 1.

.. code-block:: python

    batch = Batch.open("run/batches/step-000004")
    for sequence in batch.rank(rank, world_size, layers=range(0, 24)):
        sequence.token_ids       # uint32 [T]
        sequence.routed_experts  # uint8 or uint16 [T, 24, K], row t belongs to input token t

Arrays are views of memory-mapped files, so a rank that reads its own sequences reads nothing else.
"""

from __future__ import annotations

import heapq
import json
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from .shard import Array, BatchError, RowFormat, Shard, ShardInfo

if TYPE_CHECKING:
    import torch

__all__ = ["Batch", "BatchError", "Sequence"]

FORMAT_VERSION = 1
MANIFEST_FILE = "manifest.json"
#: Largest manifest that is read, in bytes. A real one has a few hundred per shard.
MANIFEST_LIMIT = 64 << 20

Verify = Literal["lazy", "never"]


@dataclass(frozen=True)
class Sequence:
    """One trajectory of ``T`` tokens.

    All arrays are views of the mapped file. Writing to one changes this process's memory, never
    the file.
    """

    #: Number in the batch, counted over all shards.
    index: int
    #: The episode it comes from, for example ``t000012.03``.
    episode_id: str
    #: Number of its group. The members of a group share a prompt and a baseline.
    group: int
    #: Advantage of the whole sequence.
    advantage: float
    #: Reward given by the grader.
    reward: float
    #: uint32 [T]
    token_ids: Array
    #: uint8 [T], 1 = the policy wrote the token and it is trained on
    loss_mask: Array
    #: float32 [T], nats; meaningful only where the mask is 1
    rollout_logprobs: Array
    #: int64 [T], the policy version that processed the token first
    policy_versions: Array
    #: uint8 [T], 1 = an engine recorded this row. Placeholder rows (0) hold the ids 0..K: let the
    #: router choose there, and leave them out of replay statistics. The last token's row is always
    #: a placeholder.
    routing_valid: Array
    #: Global numbers of the MoE layers in :attr:`routed_experts`, in order.
    layers: tuple[int, ...]
    _rows: Array
    _row_index: Array | None
    _columns: slice | None
    _positions: tuple[int, ...]

    def __len__(self) -> int:
        """Number of tokens."""
        return len(self.token_ids)

    @property
    def routed_experts(self) -> Array:
        """Expert ids, uint8 or uint16 ``[T, len(layers), K]``: a view of the file.

        In two cases this sequence's rows are copied, because one view cannot express them: shared
        prefix rows (:meth:`pieces` gives views of them), and layers that are not evenly spaced
        among the model's MoE layers (:meth:`experts` gives a view of each).
        """
        if self._columns is None:
            rows = self._rows if self._row_index is None else self._rows[self._row_index]
            return rows[:, list(self._positions)]
        pieces = [rows for _, rows in self.pieces()]
        return pieces[0] if len(pieces) == 1 else np.concatenate(pieces)

    def pieces(self) -> Iterator[tuple[int, Array]]:
        """First token and rows ``[n, len(layers), K]`` of each piece, in order; always views.

        There is one piece, or two if the rows of the group's prompt are shared. Raises
        ``ValueError`` if the layers are not evenly spaced.
        """
        if self._columns is None:
            raise ValueError(
                f"layers {list(self.layers)} are not evenly spaced, so one view cannot cover them; "
                "call experts(layer) for each, or read routed_experts for a copy"
            )
        if self._row_index is None:
            yield 0, self._rows[:, self._columns]
            return
        index = self._row_index.astype(np.int64)
        starts = [0, *(np.flatnonzero(np.diff(index) != 1) + 1).tolist()]
        for start, end in zip(starts, [*starts[1:], len(index)], strict=True):
            first = int(index[start])
            yield start, self._rows[first : first + end - start, self._columns]

    def experts(self, layer: int) -> Array:
        """Expert ids ``[T, K]`` of the MoE layer with global number ``layer``: a view of the file,
        or a copy if prefix rows are shared. Raises ``ValueError`` if the layer was not read."""
        if layer not in self.layers:
            raise ValueError(f"layer {layer} is not among the layers read: {list(self.layers)}")
        rows = self._rows[:, self._positions[self.layers.index(layer)]]
        return rows if self._row_index is None else rows[self._row_index]

    def torch(self) -> dict[str, torch.Tensor]:
        """The arrays as tensors that share memory with them.

        PyTorch has few operations on unsigned integers, so ``token_ids`` becomes int32 [T], and
        ``routed_experts`` of models with more than 256 experts becomes int16 [T, L, K] (the same
        bytes; every id fits). The other arrays keep their dtype.
        """
        import torch

        experts = self.routed_experts
        arrays = {
            "token_ids": self.token_ids.view(np.int32),
            "loss_mask": self.loss_mask,
            "rollout_logprobs": self.rollout_logprobs,
            "policy_versions": self.policy_versions,
            "routed_experts": experts if experts.dtype == np.uint8 else experts.view(np.int16),
            "routing_valid": self.routing_valid,
        }
        return {name: torch.from_numpy(array) for name, array in arrays.items()}


class Batch:
    """A batch folder, opened by :meth:`open`."""

    def __init__(self, path: Path, manifest: dict[str, Any], verify: Verify) -> None:
        """Checks the manifest. Raises :class:`BatchError`. Call :meth:`open` instead."""
        self.path = path
        #: The manifest as it was read.
        self.manifest = manifest
        self._verify = verify
        try:
            self._read_manifest()
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise BatchError(path, f"not a valid manifest ({error!r})") from error
        self._shards: dict[int, Shard] = {}
        self._verified: set[int] = set()

    @classmethod
    def open(
        cls,
        folder: str | Path,
        *,
        verify: Verify = "lazy",
        model: dict[str, Any] | None = None,
    ) -> Batch:
        """Opens ``folder`` (or its ``manifest.json``) and checks the manifest.

        ``verify="lazy"`` compares a shard's BLAKE3 digest when one of its sequences is first read,
        provided that the package ``blake3`` is installed; otherwise a warning is given once. Sizes
        are always compared. Verifying reads whole shards, so if several ranks share a machine, let
        one call :meth:`verify` and the others open with ``verify="never"``.

        ``model`` describes the reader's own model by any of ``hidden_layers``, ``moe_layers``,
        ``experts``, ``top_k`` and ``vocab``; a batch of another model is refused.

        Raises :class:`BatchError` if the folder does not hold a complete, matching batch.
        """
        if verify not in ("lazy", "never"):
            raise ValueError(f'verify = {verify!r}: must be "lazy" or "never"')
        path = Path(folder)
        if path.name != MANIFEST_FILE:
            path = path / MANIFEST_FILE
        try:
            if path.stat().st_size > MANIFEST_LIMIT:
                raise BatchError(
                    path, f"larger than {MANIFEST_LIMIT} bytes, too large for a manifest"
                )
            manifest = json.loads(path.read_bytes())
        except FileNotFoundError as error:
            problem = "no manifest found, so the batch is incomplete"
            raise BatchError(path, problem) from error
        except (OSError, ValueError, RecursionError) as error:
            raise BatchError(path, f"not a valid manifest: {error}") from error
        version = manifest.get("format_version") if isinstance(manifest, dict) else None
        if version != FORMAT_VERSION:
            raise BatchError(
                path,
                f"its format version is {version}, this package reads {FORMAT_VERSION}",
                "install the version of orchestrate-trainer that matches the orchestrator",
            )
        batch = cls(path, manifest, verify)
        if model is not None:
            batch.require_model(model)
        return batch

    def __len__(self) -> int:
        """Number of sequences."""
        return self._sequences

    @property
    def layers(self) -> tuple[int, ...]:
        """Global numbers of the model's MoE layers, ascending."""
        return self._rows.layers

    def lengths(self) -> Array:
        """Tokens of each sequence, int64 ``[len(batch)]``. Reads only the offsets."""
        shards = (self._shard(number) for number in range(len(self._infos)))
        return np.concatenate([np.diff(shard.cu_seqlens) for shard in shards])

    def require_model(self, model: dict[str, Any]) -> None:
        """Raises :class:`BatchError` if ``model`` (see :meth:`open`) differs from the batch's."""
        for field, expected in model.items():
            found = self.manifest["model"].get(field)
            if found != (list(expected) if isinstance(expected, (tuple, range)) else expected):
                raise BatchError(
                    self.path,
                    f"written for another model: {field} is {found}, expected {expected}",
                    "train the model that the run samples from",
                )

    def verify(self) -> None:
        """Compares every shard's BLAKE3 digest with the manifest's.

        Raises :class:`BatchError` if one differs, or if the package ``blake3`` is not installed.
        """
        for number in range(len(self._infos)):
            if not self._shard(number).verify():
                raise BatchError(
                    self.path,
                    "digests cannot be verified without the package blake3",
                    "pip install blake3",
                )
            self._verified.add(number)

    def sequence(self, index: int, layers: Iterable[int] | None = None) -> Sequence:
        """Sequence ``index``, counted over all shards; ``layers`` as in :meth:`rank`.

        Raises ``IndexError`` if there is no such sequence.
        """
        if not 0 <= index < self._sequences:
            raise IndexError(
                f"sequence {index} is out of range: the batch has {self._sequences} sequences"
            )
        number = 0
        first = 0
        while index >= first + self._infos[number].sequences:
            first += self._infos[number].sequences
            number += 1
        return self._sequence(number, index - first, index, self._select(layers))

    def rank(
        self, rank: int, world_size: int, layers: Iterable[int] | None = None
    ) -> list[Sequence]:
        """The sequences that rank ``rank`` of ``world_size`` trains on, in the batch's order.

        Every sequence belongs to exactly one rank. Sequences are distributed by tokens, longest
        first, each to the rank with the fewest tokens so far; every rank computes the same
        distribution without communicating.

        ``layers`` are *global* layer numbers (those of the checkpoint, dense layers counted), for
        a rank that holds some of the model's layers. Dense layers among them have no rows and are
        skipped. The default is all layers.
        """
        if not 0 <= rank < world_size:
            raise ValueError(f"rank = {rank}: must be at least 0 and below {world_size}")
        selected = self._select(layers)
        own = _distribute(self.lengths(), world_size)[rank]
        sequences = []
        first = 0
        for number, info in enumerate(self._infos):
            start, end = np.searchsorted(own, [first, first + info.sequences])
            for index in own[start:end]:
                sequences.append(self._sequence(number, int(index) - first, int(index), selected))
            first += info.sequences
        return sequences

    def _read_manifest(self) -> None:
        manifest = self.manifest
        model = manifest["model"]
        records = [record for record in manifest["records"] if record["kind"] == "experts"]
        if len(records) != 1:
            raise ValueError("must have exactly one record of kind `experts`")
        record = records[0]
        dtype = "u8" if model["experts"] <= 256 else "u16"
        layers = tuple(model["moe_layers"])
        row_index = record.get("row_index")
        if (
            record["dtype"] != dtype
            or tuple(record["layers"]) != layers
            or record["per_layer"] != model["top_k"]
            or not all(type(layer) is int for layer in layers)
            or not 0 < model["top_k"] <= model["experts"] <= 1 << 16
            or not layers
            or not all(a < b for a, b in pairwise(layers))
            or not 0 <= layers[0] <= layers[-1] < model["hidden_layers"]
            or row_index not in (None, "routed_row")
        ):
            raise ValueError("its record of kind `experts` does not match the model")
        self._rows = RowFormat(dtype, layers, model["top_k"], row_index)
        self._infos = [
            ShardInfo(s["file"], s["sequences"], s["tokens"], s["rows"], s["bytes"], s["blake3"])
            for s in manifest["shards"]
        ]
        for info in self._infos:
            counts = (info.sequences, info.tokens, info.rows, info.bytes)
            if not all(type(count) is int and count >= 0 for count in counts):
                raise ValueError("a shard's counts must be integers of at least 0")
            if type(info.file) is not str or Path(info.file).name != info.file:
                raise ValueError("a shard's file name must not contain a path")
        self._sequences = sum(info.sequences for info in self._infos)
        if (self._sequences, sum(info.tokens for info in self._infos)) != (
            manifest["sequences"],
            manifest["tokens"],
        ):
            raise ValueError("its totals differ from the sums over its shards")

    def _shard(self, number: int) -> Shard:
        shard = self._shards.get(number)
        if shard is None:
            info = self._infos[number]
            shard = Shard(self.path.parent / info.file, info, self._rows)
            self._shards[number] = shard
        return shard

    def _verified_shard(self, number: int) -> Shard:
        shard = self._shard(number)
        if self._verify == "lazy" and number not in self._verified:
            self._verified.add(number)
            if not shard.verify():
                self._verify = "never"
                warnings.warn(
                    "digests of batch files are not verified, because the package blake3 is not "
                    "installed; pip install blake3",
                    stacklevel=3,
                )
        return shard

    def _select(self, layers: Iterable[int] | None) -> tuple[int, ...]:
        """Positions of global layer numbers among the stored layers."""
        if layers is None:
            return tuple(range(len(self.layers)))
        wanted = list(layers)
        depth = self.manifest["model"]["hidden_layers"]
        unknown = [layer for layer in wanted if not 0 <= layer < depth]
        if unknown:
            raise ValueError(f"layers {unknown} do not exist: the model has {depth}")
        position = {layer: number for number, layer in enumerate(self.layers)}
        return tuple(position[layer] for layer in wanted if layer in position)

    def _sequence(
        self, number: int, local: int, index: int, positions: tuple[int, ...]
    ) -> Sequence:
        shard = self._verified_shard(number)
        start, end = int(shard.cu_seqlens[local]), int(shard.cu_seqlens[local + 1])
        span = slice(start, end)
        row_index = None if shard.routed_row is None else shard.routed_row[span]
        if row_index is not None and int(row_index.max()) >= shard.info.rows:
            raise BatchError(shard.path, "tensor `routed_row` refers to a row past the end")
        return Sequence(
            index=index,
            episode_id=shard.episode_ids[local],
            group=int(shard.group_ids[local]),
            advantage=float(shard.advantages[local]),
            reward=float(shard.rewards[local]),
            token_ids=shard.token_ids[span],
            loss_mask=shard.loss_mask[span],
            rollout_logprobs=shard.rollout_logprobs[span],
            policy_versions=shard.policy_versions[span],
            routing_valid=shard.routing_valid[span],
            layers=tuple(self.layers[position] for position in positions),
            _rows=shard.routed_experts[span] if row_index is None else shard.routed_experts,
            _row_index=row_index,
            _columns=_evenly_spaced(positions),
            _positions=positions,
        )


def _evenly_spaced(positions: tuple[int, ...]) -> slice | None:
    """The slice that selects ``positions``, or ``None`` if they are not evenly spaced."""
    if not positions:
        return slice(0, 0)
    step = positions[1] - positions[0] if len(positions) > 1 else 1
    if step < 1 or any(b - a != step for a, b in pairwise(positions)):
        return None
    return slice(positions[0], positions[-1] + 1, step)


def _distribute(tokens: Array, world_size: int) -> list[Array]:
    """Numbers of each rank's sequences, ascending, from the sequences' token counts."""
    ranks: list[list[int]] = [[] for _ in range(world_size)]
    load = [(0, rank) for rank in range(world_size)]
    for index in np.argsort(-tokens, kind="stable"):
        held, rank = heapq.heappop(load)
        ranks[rank].append(int(index))
        heapq.heappush(load, (held + int(tokens[index]), rank))
    return [np.array(sorted(own), dtype=np.int64) for own in ranks]
