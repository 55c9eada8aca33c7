"""Golden vectors of the reference implementation, which are part of the repository."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

#: The reference implementation, see its README.
REFERENCE = Path(__file__).resolve().parents[2] / "tests" / "reference"


def vectors(name: str) -> dict[str, Any]:
    """One file of golden vectors."""
    found: dict[str, Any] = json.loads((REFERENCE / "vectors" / f"{name}.json").read_text())
    return found
