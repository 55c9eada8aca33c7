"""Fixtures, and a summary that names every skipped test.

``ORCHESTRATE_REQUIRE`` is a comma-separated list of what must be present: with ``python`` a missing
package is a failure, with ``data`` missing test data, with ``embedded`` a missing orchestrator
program. Skips are appended to the file that ``ORCHESTRATE_SKIPS`` names, one line per test, as the
Rust tests do.
"""

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
#: Kernels that compute a model's experts: one expert after the other, and the default.
KERNELS = ["eager", "packed"]
#: Texts by which a skip's reason shows what is missing, by the name in ``ORCHESTRATE_REQUIRE``.
MISSING = {
    "python": ("is not installed", "could not import"),
    "data": ("test data missing",),
    "embedded": ("is not built",),
}


class Skips:
    """Collects the skipped tests and modules of a run by reason."""

    def __init__(self) -> None:
        names = os.environ.get("ORCHESTRATE_REQUIRE", "").split(",")
        self.required = {name.strip() for name in names}
        self.by_reason: dict[str, list[str]] = {}

    def add(self, name: str, longrepr: Any) -> None:
        reason = longrepr[2] if isinstance(longrepr, tuple) else str(longrepr)
        reason = reason.removeprefix("Skipped: ")
        names = self.by_reason.setdefault(reason, [])
        # Each process of pytest-xdist reports a module that it skips.
        if name not in names:
            names.append(name)

    def is_required(self, reason: str) -> bool:
        return any(
            text in reason for name in self.required & MISSING.keys() for text in MISSING[name]
        )

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.skipped and not hasattr(report, "wasxfail"):
            self.add(report.nodeid, report.longrepr)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.skipped:
            self.add(f"{report.nodeid} (all tests of the module)", report.longrepr)

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        listed = os.environ.get("ORCHESTRATE_SKIPS")
        # A process of pytest-xdist reports to the one that started it.
        if listed and not hasattr(session.config, "workerinput"):
            with open(listed, "a") as file:
                file.writelines(
                    f"trainer {name}: {reason}\n"
                    for reason, names in self.by_reason.items()
                    for name in names
                )
        if any(map(self.is_required, self.by_reason)) and session.exitstatus in (0, 5):
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        for reason, names in sorted(self.by_reason.items()):
            verdict = "FAILED" if self.is_required(reason) else "skipped"
            note = ", but required by ORCHESTRATE_REQUIRE" if verdict == "FAILED" else ""
            terminalreporter.write_line(f"{verdict} {len(names)}: {reason}{note}")
            for name in names:
                terminalreporter.write_line(f"  {name}")
        stats = terminalreporter.stats
        counts = {
            kind: sum(len(stats.get(key, [])) for key in keys)
            for kind, keys in {
                "passed": ("passed",),
                "failed": ("failed", "error"),
            }.items()
        }
        counts["skipped"] = sum(map(len, self.by_reason.values()))
        text = ", ".join(f"{count} {kind}" for kind, count in counts.items())
        terminalreporter.write_line(f"Python tests: {text}")


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Skips(), "orchestrate-skips")


@pytest.fixture(params=FOLDERS)
def golden(request: pytest.FixtureRequest) -> tuple[Path, dict[str, Any]]:
    """Folder of a batch written by the Rust code, and its expected content."""
    name = request.param
    expected = json.loads((GOLDEN / f"{name.removesuffix('_shared')}.json").read_text())
    return GOLDEN / name, expected


@pytest.fixture
def copied(tmp_path: Path) -> Path:
    """Copy of a golden batch, which a test may damage."""
    return Path(shutil.copytree(GOLDEN / "u8", tmp_path / "batch"))


@pytest.fixture(scope="session")
def world() -> Iterator[Any]:
    """World of one process on the CPU."""
    import torch

    from orchestrate_trainer.world import World

    torch.set_num_threads(1)
    os.environ.pop("RANK", None)
    world = World.join("cpu")
    yield world
    world.leave()


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Folder of a tiny model with random weights for each router family."""
    from model_families import TINY, tiny_model

    root = tmp_path_factory.mktemp("models")
    for name in TINY:
        tiny_model(name).save_pretrained(root / name)
    return {name: root / name for name in TINY}


@pytest.fixture(params=KERNELS)
def kernel(request: pytest.FixtureRequest) -> str:
    """Name of an expert kernel; a test that takes it runs once with each."""
    name: str = request.param
    return name


def change_manifest(folder: Path, change: Any) -> None:
    """Applies ``change`` to the manifest of a batch folder."""
    path = folder / "manifest.json"
    manifest = json.loads(path.read_text())
    change(manifest)
    path.write_text(json.dumps(manifest))


def write_sparse(folder: Path, lengths: list[int], layers: int, top_k: int) -> None:
    """Writes a batch of one shard whose rows are a hole in a sparse file: large, but without
    content on disk."""
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
    start = 0
    for name, dtype, array in small:
        end = start + array.nbytes
        header[name] = {"dtype": dtype, "shape": [len(array)], "data_offsets": [start, end]}
        start = end
    end = start + n * layers * top_k
    header["routed_experts"] = {
        "dtype": "U8",
        "shape": [n, layers, top_k],
        "data_offsets": [start, end],
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
