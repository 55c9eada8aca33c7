"""Golden batches, and a writer of hand-made ones."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

GOLDEN = Path(__file__).parent / "golden"
FOLDERS = ["u8", "u8_shared", "u16", "u16_shared"]


@pytest.fixture(params=FOLDERS)
def golden(request: pytest.FixtureRequest) -> tuple[Path, dict[str, Any]]:
    """Folder of a batch that the Rust writer made, and what it holds."""
    name = request.param
    expected = json.loads((GOLDEN / f"{name.removesuffix('_shared')}.json").read_text())
    return GOLDEN / name, expected


@pytest.fixture
def copied(tmp_path: Path) -> Path:
    """A copy of a golden batch that a test may damage."""
    return Path(shutil.copytree(GOLDEN / "u8", tmp_path / "batch"))


@pytest.fixture(scope="session")
def world() -> Iterator[Any]:
    """A world of one process on the CPU, for tests of the trainer."""
    import torch

    from orchestrate_trainer.world import World

    torch.set_num_threads(1)
    os.environ.pop("RANK", None)
    world = World.join("cpu")
    yield world
    world.leave()


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Folder of a tiny model of each family, weights drawn at random."""
    from model_families import TINY, tiny_model

    root = tmp_path_factory.mktemp("models")
    for name in TINY:
        tiny_model(name).save_pretrained(root / name)
    return {name: root / name for name in TINY}


def change_manifest(folder: Path, change: Any) -> None:
    path = folder / "manifest.json"
    manifest = json.loads(path.read_text())
    change(manifest)
    path.write_text(json.dumps(manifest))


def write_sparse(folder: Path, lengths: list[int], layers: int, top_k: int) -> None:
    """A batch of one shard whose rows are a hole in the file: large, but nothing is stored."""
    s, n = len(lengths), sum(lengths)
    small = [
        ("cu_seqlens", "I64", np.concatenate([[0], np.cumsum(lengths)]).astype("<i8")),
        ("group_ids", "I64", np.zeros(s, "<i8")),
        ("policy_versions", "I64", np.zeros(n, "<i8")),
        ("advantages", "F32", np.zeros(s, "<f4")),
        ("rewards", "F32", np.zeros(s, "<f4")),
        ("rollout_logprobs", "F32", np.zeros(n, "<f4")),
        ("token_ids", "U32", np.zeros(n, "<u4")),
        ("loss_mask", "U8", np.zeros(n, "u1")),
        ("routing_valid", "U8", np.zeros(n, "u1")),
    ]
    header: dict[str, Any] = {
        "__metadata__": {
            "format_version": "1",
            "episode_ids": json.dumps([f"t000001.{i:02}" for i in range(s)]),
            "moe_layers": json.dumps(list(range(layers))),
        }
    }
    at = 0
    for name, dtype, array in small:
        end = at + array.nbytes
        header[name] = {"dtype": dtype, "shape": [len(array)], "data_offsets": [at, end]}
        at = end
    end = at + n * layers * top_k
    header["routed_experts"] = {
        "dtype": "U8",
        "shape": [n, layers, top_k],
        "data_offsets": [at, end],
    }
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    folder.mkdir()
    size = 8 + len(text) + end
    with open(folder / "0000.safetensors", "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for _, _, array in small:
            file.write(array.tobytes())
        file.truncate(size)
    record = {
        "kind": "experts",
        "tensor": "routed_experts",
        "dtype": "u8",
        "layers": list(range(layers)),
        "per_layer": top_k,
    }
    manifest = {
        "format_version": 1,
        "model": {
            "hidden_layers": layers,
            "moe_layers": list(range(layers)),
            "experts": 128,
            "top_k": top_k,
        },
        "records": [record],
        "sequences": s,
        "tokens": n,
        "shards": [
            {
                "file": "0000.safetensors",
                "sequences": s,
                "tokens": n,
                "rows": n,
                "bytes": size,
                "blake3": "",
            }
        ],
    }
    (folder / "manifest.json").write_text(json.dumps(manifest))
