"""Import this first in a test module of the trainer: without these packages the module is skipped,
and counted as skipped."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

for name in ("torch", "transformers", "safetensors", "starlette", "uvicorn", "blake3"):
    pytest.importorskip(name, reason=f"{name} is absent: pip install './trainer[train]'")

#: Worked numbers of every formula; not part of the project.
GOLDEN = Path(__file__).resolve().parents[4] / "shared" / "data" / "golden"


def golden_cases(name: str) -> list[dict[str, Any]]:
    """Cases of a golden file; skips the test where the data is absent."""
    path = GOLDEN / f"{name}.json"
    if not path.exists():
        pytest.skip("test data absent")
    return json.loads(path.read_text())["cases"]
