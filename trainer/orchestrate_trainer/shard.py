"""One memory-mapped shard of a batch.

The safetensors header is parsed here rather than by the safetensors package, because the arrays
must be views of the memory map: no part of a shard is in memory until it is read, and then only
the pages that were read.
"""

from __future__ import annotations

import json
import math
import mmap
import os
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

#: An array of any dtype; each field's own comment states the dtype and shape.
Array = npt.NDArray[Any]

#: Longest header that is read, in bytes. A real one has about twenty bytes per sequence.
HEADER_LIMIT = 64 << 20

#: Bytes hashed at a time. The file is read, not mapped, so that verifying a shard needs no more
#: memory than this.
HASH_BYTES = 4 << 20

DTYPES: dict[str, np.dtype[Any]] = {
    "I64": np.dtype("<i8"),
    "F32": np.dtype("<f4"),
    "U32": np.dtype("<u4"),
    "U16": np.dtype("<u2"),
    "U8": np.dtype("u1"),
}


class BatchError(Exception):
    """A batch that cannot be used. Names the file, the problem and a remedy."""

    def __init__(self, file: Path, problem: str, remedy: str = "write the batch again") -> None:
        """``file`` is the manifest or shard at fault."""
        super().__init__(f"batch file {file}: {problem}; {remedy}")
        self.file = file
        self.problem = problem
        self.remedy = remedy


@dataclass(frozen=True)
class ShardInfo:
    """The manifest's entry for a shard."""

    #: File name within the batch folder.
    file: str
    sequences: int
    tokens: int
    #: Rows of ``routed_experts``; fewer than ``tokens`` if prefix rows are shared.
    rows: int
    #: Size of the file.
    bytes: int
    #: BLAKE3 digest of the file, in hexadecimal.
    blake3: str


@dataclass(frozen=True)
class RowFormat:
    """Form of the routing rows, the same in every shard of a batch."""

    #: ``u8`` or ``u16``.
    dtype: str
    #: Global numbers of the MoE layers, ascending.
    layers: tuple[int, ...]
    top_k: int
    #: Name of the tensor that maps tokens to rows; ``None`` if row ``t`` belongs to token ``t``.
    row_index: str | None


class Shard:
    """A mapped shard of ``S`` sequences, ``N`` tokens and ``M`` rows (``M == N`` unless shared).

    Every array is a little-endian view of the map:

    ``cu_seqlens`` int64 [S+1], ``group_ids`` int64 [S], ``policy_versions`` int64 [N],
    ``advantages`` and ``rewards`` float32 [S], ``rollout_logprobs`` float32 [N],
    ``token_ids`` uint32 [N], ``loss_mask`` and ``routing_valid`` uint8 [N],
    ``routed_experts`` uint8 or uint16 [M, L, K], ``routed_row`` uint32 [N] or ``None``.
    """

    def __init__(self, path: Path, info: ShardInfo, rows: RowFormat) -> None:
        """Maps the file and checks its header against the manifest.

        Raises :class:`BatchError` if the file is missing or does not match.
        """
        self.path = path
        self.info = info
        self._map = _map(path, info.bytes)
        entries, metadata, data = self._header()
        s, n = info.sequences, info.tokens

        def view(name: str, dtype: str, shape: tuple[int, ...]) -> Array:
            return self._view(entries, data, name, dtype, shape)

        self.cu_seqlens = view("cu_seqlens", "I64", (s + 1,))
        self.group_ids = view("group_ids", "I64", (s,))
        self.policy_versions = view("policy_versions", "I64", (n,))
        self.advantages = view("advantages", "F32", (s,))
        self.rewards = view("rewards", "F32", (s,))
        self.rollout_logprobs = view("rollout_logprobs", "F32", (n,))
        self.token_ids = view("token_ids", "U32", (n,))
        self.loss_mask = view("loss_mask", "U8", (n,))
        self.routing_valid = view("routing_valid", "U8", (n,))
        shape = (info.rows, len(rows.layers), rows.top_k)
        self.routed_experts = view("routed_experts", rows.dtype.upper(), shape)
        self.routed_row = view(rows.row_index, "U32", (n,)) if rows.row_index else None
        self.episode_ids: list[str] = self._list(metadata, "episode_ids", s)
        layers = self._list(metadata, "moe_layers", len(rows.layers))
        if metadata.get("format_version") != "1" or tuple(layers) != rows.layers:
            raise BatchError(path, "its header does not match the manifest")
        offsets = self.cu_seqlens
        if offsets[0] != 0 or offsets[-1] != n or bool(np.any(np.diff(offsets) <= 0)):
            raise BatchError(path, f"tensor `cu_seqlens` does not rise from 0 to {n}")

    def verify(self) -> bool:
        """Compares the file's BLAKE3 digest with the manifest's.

        Returns ``False`` if the package ``blake3`` is not installed. Raises :class:`BatchError` if
        the digests differ.
        """
        try:
            import blake3
        except ImportError:
            return False
        hasher = blake3.blake3()
        buffer = bytearray(HASH_BYTES)
        view = memoryview(buffer)
        with open(self.path, "rb", buffering=0) as file:
            while count := file.readinto(buffer):
                hasher.update(view[:count])
        if hasher.hexdigest() != self.info.blake3:
            raise BatchError(self.path, "its digest differs from the manifest's")
        return True

    def _header(self) -> tuple[dict[str, Any], dict[str, str], int]:
        """Tensor entries, metadata, and the file offset of the data."""
        size = len(self._map)
        length = struct.unpack_from("<Q", self._map)[0] if size >= 8 else size
        if length > min(HEADER_LIMIT, size - 8):
            raise BatchError(self.path, "not a valid safetensors file")
        try:
            header = json.loads(self._map[8 : 8 + length])
            metadata = header.pop("__metadata__", {})
        except (ValueError, AttributeError, TypeError, RecursionError) as error:
            raise BatchError(self.path, "its safetensors header cannot be parsed") from error
        if not isinstance(metadata, dict):
            raise BatchError(self.path, "its safetensors header cannot be parsed")
        return header, metadata, 8 + length

    def _view(
        self,
        entries: dict[str, Any],
        data: int,
        name: str,
        dtype: str,
        shape: tuple[int, ...],
    ) -> Array:
        """View of tensor ``name``, whose entry must state ``dtype`` and ``shape``."""
        expected = f"{dtype} {list(shape)}"
        entry = entries.get(name)
        if not isinstance(entry, dict):
            raise BatchError(self.path, f"tensor `{name}` is missing, expected {expected}")
        if entry.get("dtype") != dtype or entry.get("shape") != list(shape):
            found = f"{entry.get('dtype')} {entry.get('shape')}"
            raise BatchError(self.path, f"tensor `{name}` is {found}, expected {expected}")
        count = math.prod(shape)
        offsets = entry.get("data_offsets")
        item = DTYPES[dtype].itemsize
        if (
            not isinstance(offsets, list)
            or len(offsets) != 2
            or not all(type(offset) is int for offset in offsets)
            or not 0 <= offsets[0] <= offsets[1] <= len(self._map) - data
            or offsets[1] - offsets[0] != count * item
        ):
            raise BatchError(self.path, f"tensor `{name}` has invalid offsets in the header")
        if (data + offsets[0]) % item:
            raise BatchError(self.path, f"tensor `{name}` is not aligned in the file")
        if count == 0:
            return np.empty(shape, DTYPES[dtype])
        array: Array = np.frombuffer(self._map, DTYPES[dtype], count, data + offsets[0])
        return array.reshape(shape)

    def _list(self, metadata: dict[str, str], name: str, length: int) -> list[Any]:
        """The JSON list ``name`` of the metadata, which must have ``length`` items."""
        try:
            values = json.loads(metadata[name])
        except (KeyError, ValueError, TypeError, RecursionError):
            values = None
        if not isinstance(values, list) or len(values) != length:
            raise BatchError(self.path, f"its header does not list {length} {name}")
        return values


def _map(path: Path, size: int) -> mmap.mmap:
    """Maps a file privately, so that tensors sharing its memory can be written to without changing
    the file."""
    try:
        with open(path, "rb") as file:
            found = os.fstat(file.fileno()).st_size
            if found != size or size < 8:
                problem = f"it has {found} bytes, the manifest says {size}"
                raise BatchError(path, problem)
            return mmap.mmap(file.fileno(), size, access=mmap.ACCESS_COPY)
    except OSError as error:
        raise BatchError(path, f"it cannot be opened: {error}") from error
