"""Import this first in a test module of the trainer.

If one of the trainer's packages is missing, the importing module is skipped, and the skip is listed
and counted at the end of the run.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

for name in ("torch", "transformers", "safetensors", "starlette", "uvicorn", "blake3"):
    pytest.importorskip(name, reason=f"package {name} is not installed: scripts/test-python")

#: A tiny checkpoint with its expected outputs, which is not part of the repository: below
#: ``ORCHESTRATE_TEST_DATA``.
DATA = os.environ.get("ORCHESTRATE_TEST_DATA", Path(__file__).resolve().parents[4] / "shared")
GOLDEN = Path(DATA) / "data" / "golden"


def golden_cases(name: str) -> list[dict[str, Any]]:
    """Cases of a golden file; skips the calling test if the data is missing."""
    path = GOLDEN / f"{name}.json"
    if not path.exists():
        pytest.skip(f"test data missing: {path}")
    cases: list[dict[str, Any]] = json.loads(path.read_text())["cases"]
    return cases
