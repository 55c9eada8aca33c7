"""Opening a batch and reading one rank's rows makes no copies."""

from __future__ import annotations

import mmap
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import change_manifest, write_sparse

from orchestrate_trainer import Batch

LAYERS, TOP_K = 48, 8
LENGTHS = [8192] * 64 + [2048] * 16


def base_of(array: np.ndarray) -> object:
    """The object that owns an array's memory."""
    base: Any = array
    while isinstance(base, np.ndarray) and base.base is not None:
        base = base.base
    return base.obj if isinstance(base, memoryview) else base


def resident_kib() -> int:
    """Resident memory of this process."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1])
    raise AssertionError("/proc/self/status has no line VmRSS")


@pytest.fixture
def large(tmp_path: Path) -> Path:
    write_sparse(tmp_path / "batch", LENGTHS, LAYERS, TOP_K)
    shard = tmp_path / "batch" / "0000.safetensors"
    assert shard.stat().st_size > 200 << 20
    return tmp_path / "batch"


def test_arrays_are_views_of_the_memory_map(golden):
    folder, expected = golden
    shared = folder.name.endswith("_shared")
    batch = Batch.open(folder)
    names = ["token_ids", "loss_mask", "rollout_logprobs", "policy_versions", "routing_valid"]
    layers = expected["model"]["moe_layers"][:2]
    for sequence in batch.rank(0, 1, layers):
        for name in names:
            assert isinstance(base_of(getattr(sequence, name)), mmap.mmap)
        for _, rows in sequence.pieces():
            assert isinstance(base_of(rows), mmap.mmap)
        whole = batch.sequence(sequence.index)
        for _, rows in sequence.pieces():
            assert rows.size == 0 or np.shares_memory(rows, whole._rows)
        if not shared:
            assert np.shares_memory(sequence.routed_experts, whole.routed_experts)
            assert np.shares_memory(sequence.experts(layers[0]), whole.routed_experts)


def test_writing_to_an_array_does_not_change_the_file(copied):
    before = sorted((path.name, path.read_bytes()) for path in copied.iterdir())
    sequence = Batch.open(copied).sequence(0)
    sequence.routed_experts[:] = 7
    assert (sequence.routed_experts == 7).all()
    assert before == sorted((path.name, path.read_bytes()) for path in copied.iterdir())
    assert (Batch.open(copied).sequence(0).routed_experts != 7).any()


def test_opening_and_slicing_reads_no_rows(large):
    tracemalloc.start()
    held, resident = tracemalloc.get_traced_memory()[0], resident_kib()
    sequences = Batch.open(large, verify="never").rank(3, 8, layers=range(24))
    views = [sequence.routed_experts for sequence in sequences]
    allocated = tracemalloc.get_traced_memory()[1] - held
    grown = resident_kib() - resident
    tracemalloc.stop()
    tokens = sum(len(sequence) for sequence in sequences)
    assert tokens == sum(LENGTHS) // 8
    assert sum(view.nbytes for view in views) == tokens * 24 * TOP_K
    assert allocated < 1 << 20, "no array is allocated"
    assert grown < 4 << 10, f"resident memory grew by {grown} KiB"


def test_reading_one_rank_touches_only_its_rows(large):
    sequences = Batch.open(large, verify="never").rank(0, 8)
    own = sum(sequence.routed_experts.nbytes for sequence in sequences)
    tracemalloc.start()
    resident = resident_kib()
    total = sum(int(sequence.routed_experts.max()) for sequence in sequences)
    allocated = tracemalloc.get_traced_memory()[1]
    grown = (resident_kib() - resident) << 10
    tracemalloc.stop()
    assert total == 0
    assert allocated < 1 << 20
    assert grown > own // 2, "the measurement must see the pages that were read"
    # The kernel may also map neighbouring pages.
    assert grown < own * 1.25 + (8 << 20), f"{grown} of {own} bytes"
    assert own * 8 == sum(LENGTHS) * LAYERS * TOP_K


def test_tensors_of_one_rank_are_created_without_reading_rows(large):
    torch = pytest.importorskip("torch")
    torch.from_numpy(np.zeros(1))  # the first use loads further libraries
    sequences = Batch.open(large, verify="never").rank(3, 8, layers=range(24))
    resident = resident_kib()
    tensors = [sequence.torch()["routed_experts"] for sequence in sequences]
    grown = resident_kib() - resident
    assert sum(tensor.numel() for tensor in tensors) == sum(LENGTHS) // 8 * 24 * TOP_K
    assert all(
        np.shares_memory(t.numpy(), s._rows) for t, s in zip(tensors, sequences, strict=True)
    )
    assert grown < 4 << 10, f"resident memory grew by {grown} KiB"


def test_verifying_a_shard_needs_a_few_mebibytes(large):
    blake3 = pytest.importorskip("blake3")
    digest = blake3.blake3((large / "0000.safetensors").read_bytes()).hexdigest()
    change_manifest(large, lambda m: m["shards"][0].update(blake3=digest))
    batch = Batch.open(large)
    tracemalloc.start()
    resident = resident_kib()
    batch.verify()
    allocated = tracemalloc.get_traced_memory()[1]
    grown = resident_kib() - resident
    tracemalloc.stop()
    assert allocated < 8 << 20
    assert grown < 16 << 10, f"resident memory grew by {grown} KiB"
