"""Python reads what Rust wrote."""

from __future__ import annotations

import numpy as np
import pytest

from orchestrate_trainer import Batch, Sequence

ARRAYS = {
    "token_ids": "<u4",
    "loss_mask": "u1",
    "rollout_logprobs": "<f4",
    "policy_versions": "<i8",
    "routing_valid": "u1",
}


def dtype_of(expected):
    return np.dtype("u1") if expected["model"]["experts"] <= 256 else np.dtype("<u2")


def assert_equal(sequence: Sequence, listed) -> None:
    assert sequence.episode_id == listed["episode_id"]
    assert sequence.group == listed["group"]
    assert sequence.advantage == listed["advantage"]
    assert sequence.reward == listed["reward"]
    assert len(sequence) == len(listed["token_ids"])
    for name, dtype in ARRAYS.items():
        array = getattr(sequence, name)
        assert array.dtype == np.dtype(dtype)
        assert array.tolist() == listed[name]


def test_every_sequence_is_as_listed(golden):
    folder, expected = golden
    batch = Batch.open(folder)
    assert len(batch) == len(expected["sequences"])
    for sequence, listed in zip(batch.rank(0, 1), expected["sequences"]):
        assert_equal(sequence, listed)
        assert sequence.routed_experts.dtype == dtype_of(expected)
        assert sequence.routed_experts.tolist() == listed["routed_experts"]
        by_index = batch.sequence(sequence.index)
        assert by_index.episode_id == sequence.episode_id


def test_layers_are_chosen_by_their_global_number(golden):
    folder, expected = golden
    batch = Batch.open(folder)
    stored = expected["model"]["moe_layers"]
    hidden = expected["model"]["hidden_layers"]
    for first in range(hidden):
        for last in range(first, hidden + 1):
            wanted = range(first, last)
            places = [place for place, layer in enumerate(stored) if layer in wanted]
            for sequence, listed in zip(batch.rank(0, 1, wanted), expected["sequences"]):
                rows = np.array(listed["routed_experts"])
                assert sequence.layers == tuple(stored[place] for place in places)
                assert sequence.routed_experts.tolist() == rows[:, places].tolist()
                for place in places:
                    found = sequence.experts(stored[place])
                    assert found.tolist() == rows[:, place].tolist()
    with pytest.raises(ValueError, match="do not exist"):
        batch.rank(0, 1, [hidden])
    sequence = batch.sequence(0, [stored[0]])
    with pytest.raises(ValueError, match="not among the layers read"):
        sequence.experts(stored[1])


def test_pieces_are_the_rows_in_order(golden):
    folder, _ = golden
    shared = folder.name.endswith("_shared")
    counts = []
    for sequence in Batch.open(folder).rank(0, 1):
        pieces = list(sequence.pieces())
        counts.append(len(pieces))
        whole = np.concatenate([rows for _, rows in pieces])
        assert whole.tolist() == sequence.routed_experts.tolist()
        assert [start for start, _ in pieces] == np.cumsum(
            [0, *(len(rows) for _, rows in pieces[:-1])]
        ).tolist()
    assert counts == ([1, 2, 2, 1, 1, 2, 1, 1] if shared else [1] * 8)


def test_unevenly_spaced_layers_are_copied_or_refused(golden):
    folder, expected = golden
    if len(expected["model"]["moe_layers"]) < 4:
        # Any two of three layers, and all three, are evenly spaced.
        return
    batch = Batch.open(folder)
    for sequence, listed in zip(batch.rank(0, 1, [0, 2, 5]), expected["sequences"]):
        rows = np.array(listed["routed_experts"])
        assert sequence.routed_experts.tolist() == rows[:, [0, 1, 3]].tolist()
        with pytest.raises(ValueError, match="evenly spaced"):
            list(sequence.pieces())


@pytest.mark.parametrize("world_size", [1, 2, 3, 5, 11])
def test_ranks_share_the_sequences_out_by_tokens(golden, world_size):
    folder, expected = golden
    lengths = [len(listed["token_ids"]) for listed in expected["sequences"]]
    parts = [Batch.open(folder).rank(rank, world_size) for rank in range(world_size)]
    again = [Batch.open(folder).rank(rank, world_size) for rank in range(world_size)]
    indices = [[sequence.index for sequence in part] for part in parts]
    assert indices == [[sequence.index for sequence in part] for part in again]
    assert sorted(index for part in indices for index in part) == list(range(len(lengths)))
    assert all(part == sorted(part) for part in indices)
    loads = [sum(lengths[index] for index in part) for part in indices]
    assert max(loads) - min(loads) <= max(lengths)
    for part in parts:
        for sequence in part:
            assert_equal(sequence, expected["sequences"][sequence.index])


def test_shards_are_plain_safetensors(golden):
    numpy_of = pytest.importorskip("safetensors.numpy")
    folder, expected = golden
    tokens = []
    for shard in sorted(folder.glob("*.safetensors")):
        tokens.extend(numpy_of.load_file(shard)["token_ids"].tolist())
    listed = [token for sequence in expected["sequences"] for token in sequence["token_ids"]]
    assert tokens == listed


def test_tensors_share_memory_with_the_arrays(golden):
    pytest.importorskip("torch")
    folder, expected = golden
    for sequence, listed in zip(Batch.open(folder).rank(0, 1), expected["sequences"]):
        tensors = sequence.torch()
        assert tensors["routed_experts"].tolist() == listed["routed_experts"]
        for name in ARRAYS:
            assert tensors[name].tolist() == listed[name]
            assert np.shares_memory(tensors[name].numpy(), getattr(sequence, name))
