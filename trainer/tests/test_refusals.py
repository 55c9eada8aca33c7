"""Incomplete, foreign and damaged batches are refused, and the error names the file."""

from __future__ import annotations

import builtins
import json
import struct
import warnings
from pathlib import Path
from typing import Any

import pytest
from conftest import change_manifest

from orchestrate_trainer import Batch, BatchError


def shard_of(folder: Path) -> Path:
    return folder / "0000.safetensors"


def read_all(folder: Path, verify: Any = "lazy") -> None:
    for sequence in Batch.open(folder, verify=verify).rank(0, 1):
        assert sequence.routed_experts.shape[0] == len(sequence)


def test_folder_without_manifest_is_refused(copied):
    (copied / "manifest.json").unlink()
    with pytest.raises(BatchError, match="no manifest found, so the batch is incomplete") as caught:
        Batch.open(copied)
    assert caught.value.file == copied / "manifest.json"


def test_newer_format_is_refused(copied):
    change_manifest(copied, lambda m: m.update(format_version=2, unknown=True))
    with pytest.raises(BatchError, match="format version is 2, this package reads 1; install"):
        Batch.open(copied)


def test_batch_of_another_model_is_refused(copied):
    model = json.loads((copied / "manifest.json").read_text())["model"]
    Batch.open(copied, model=model)
    Batch.open(copied, model={"moe_layers": range(1, 4), "experts": 8})
    for field, value in [("moe_layers", [0, 1, 2]), ("experts", 9), ("top_k", 4), ("vocab", 7)]:
        with pytest.raises(BatchError, match=f"another model: {field} is"):
            Batch.open(copied, model={**model, field: value})


@pytest.mark.parametrize(
    "change",
    [
        lambda m: m.pop("model"),
        lambda m: m.pop("records"),
        lambda m: m["records"].append(m["records"][0]),
        lambda m: m["records"][0].update(dtype="u16"),
        lambda m: m["records"][0].update(layers=[0, 1, 2]),
        lambda m: m["records"][0].update(row_index="token_ids"),
        lambda m: m["model"].update(experts=300),
        lambda m: m["model"].update(top_k=0),
        lambda m: m["model"].update(moe_layers=[3, 2, 1]),
        lambda m: m["model"].update(hidden_layers=3),
        lambda m: m.update(tokens=71),
        lambda m: m["shards"].pop(),
        lambda m: m["shards"][0].update(file="../batch/0000.safetensors"),
        lambda m: m["shards"][0].update(tokens="many"),
        lambda m: m["shards"][0].update(tokens=-1),
    ],
)
def test_inconsistent_manifest_is_refused(copied, change):
    change_manifest(copied, change)
    with pytest.raises(BatchError) as caught:
        Batch.open(copied)
    assert caught.value.file == copied / "manifest.json"


def test_records_of_unknown_kinds_are_ignored(copied):
    other = {"kind": "indexer", "tensor": "indexer_ids", "dtype": "u16", "layers": [0]}
    change_manifest(copied, lambda m: m["records"].insert(0, other))
    read_all(copied)


@pytest.mark.parametrize("text", ["", "[]", "{", "3", "[" * 100_000])
def test_invalid_manifest_is_refused(copied, text):
    (copied / "manifest.json").write_text(text)
    with pytest.raises(BatchError):
        Batch.open(copied)


def test_missing_or_truncated_shard_is_refused(copied):
    path = shard_of(copied)
    good = path.read_bytes()
    for end in [0, 7, 8, 100, len(good) - 1]:
        path.write_bytes(good[:end])
        with pytest.raises(BatchError, match=f"it has {end} bytes") as caught:
            read_all(copied)
        assert caught.value.file == path
    path.unlink()
    with pytest.raises(BatchError, match="cannot be opened"):
        read_all(copied)


def test_changed_bytes_are_detected(copied):
    pytest.importorskip("blake3")
    path = shard_of(copied)
    good = path.read_bytes()
    for at in range(0, len(good), 7):
        bad = bytearray(good)
        bad[at] ^= 0x10
        path.write_bytes(bad)
        with pytest.raises(BatchError) as caught:
            read_all(copied)
        assert caught.value.file == path
        with pytest.raises(BatchError):
            Batch.open(copied).verify()
    path.write_bytes(good)
    Batch.open(copied).verify()


def test_missing_blake3_gives_one_warning(copied, monkeypatch):
    real = builtins.__import__

    def absent(name, *args, **kwargs):
        if name == "blake3":
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", absent)
    with pytest.warns(UserWarning, match="pip install blake3") as caught:
        read_all(copied)
    assert len(caught) == 1
    with pytest.raises(BatchError, match=r"cannot be verified without .*; pip install blake3"):
        Batch.open(copied).verify()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        read_all(copied, verify="never")


def header_of(data: bytes | bytearray) -> tuple[dict[str, Any], int]:
    """Header of a safetensors file, and where its data starts."""
    end = 8 + struct.unpack_from("<Q", data)[0]
    return json.loads(data[8:end]), end


@pytest.mark.parametrize(
    "change",
    [
        lambda h: h.pop("cu_seqlens"),
        lambda h: h["token_ids"].update(dtype="F32"),
        lambda h: h["routed_experts"].update(dtype="U16"),
        lambda h: h["routed_experts"].update(shape=[38, 2, 3]),
        lambda h: h["loss_mask"].update(data_offsets=[0, 39]),
        lambda h: h["loss_mask"].update(data_offsets=[-38, 0]),
        lambda h: h["routed_experts"].update(data_offsets=[10**9, 10**9 + 228]),
        lambda h: h["token_ids"].update(data_offsets=[1, 153]),
        lambda h: h["token_ids"].update(data_offsets=["0", "152"]),
        lambda h: h["loss_mask"].update(data_offsets=[0.0, 38.0]),
        lambda h: h["__metadata__"].update(format_version="2"),
        lambda h: h["__metadata__"].update(moe_layers="[0,1,2]"),
        lambda h: h["__metadata__"].update(episode_ids="[]"),
        lambda h: h["__metadata__"].update(episode_ids="x"),
        lambda h: h.update(__metadata__=3),
        lambda h: h.update(loss_mask=None),
    ],
)
def test_inconsistent_shard_header_is_refused_without_verifying_digests(copied, change):
    path = shard_of(copied)
    data = path.read_bytes()
    header, end = header_of(data)
    change(header)
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    forged = struct.pack("<Q", len(text)) + text + data[end:]
    path.write_bytes(forged)
    change_manifest(copied, lambda m: m["shards"][0].update(bytes=len(forged)))
    with pytest.raises(BatchError) as caught:
        read_all(copied, verify="never")
    assert caught.value.file == path


@pytest.mark.parametrize("length", [0, 1, 2**31, 2**63, 2**64 - 1])
def test_header_length_out_of_range_is_refused(copied, length):
    path = shard_of(copied)
    path.write_bytes(struct.pack("<Q", length) + path.read_bytes()[8:])
    with pytest.raises(BatchError):
        read_all(copied, verify="never")


def test_offsets_that_do_not_rise_are_refused(copied):
    path = shard_of(copied)
    data = bytearray(path.read_bytes())
    header, end = header_of(data)
    start = end + header["cu_seqlens"]["data_offsets"][0]
    for index, value in [(0, 1), (1, -1), (1, 0), (1, 99), (3, 37)]:
        bad = bytearray(data)
        struct.pack_into("<q", bad, start + 8 * index, value)
        path.write_bytes(bad)
        with pytest.raises(BatchError, match="cu_seqlens"):
            read_all(copied, verify="never")


def test_rank_and_index_out_of_range_are_refused(copied):
    batch = Batch.open(copied)
    for rank, world_size in [(-1, 2), (2, 2), (0, 0)]:
        with pytest.raises(ValueError, match="rank"):
            batch.rank(rank, world_size)
    for index in [-1, 8]:
        with pytest.raises(IndexError, match="the batch has 8 sequences"):
            batch.sequence(index)
    with pytest.raises(ValueError, match="verify"):
        Batch.open(copied, verify="sometimes")  # type: ignore[arg-type]
