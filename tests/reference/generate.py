#!/usr/bin/env python3
"""Writes the golden vectors; with ``--check``, derives them again and compares.

    python tests/reference/generate.py [--check [NAME…]]

Needs NumPy. Both commands first check the reference itself (selfcheck.py), unless only the files of some
names are compared.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from pathlib import Path
from typing import Any

import numpy as np

import selfcheck
from vectors import CHECKPOINTS, FILES

FOLDER = Path(__file__).parent / "vectors"
#: Relative tolerance of ``--check``: libraries differ in the last digits of exp and log.
TOLERANCE = 1e-12


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="compare instead of writing")
    parser.add_argument("names", nargs="*", help="files to compare, by default all")
    given = parser.parse_args()
    if given.names and not given.check:
        parser.error("names need --check")
    if unknown := sorted(set(given.names) - FILES.keys()):
        parser.error(f"unknown: {', '.join(unknown)} (known: {', '.join(FILES)})")
    names = given.names or [*FILES]
    if not given.names:
        compared = selfcheck.run()
        print(f"{compared} derivatives agree with finite differences")
    if not given.check:
        FOLDER.mkdir(exist_ok=True)
        for name, content in FILES.items():
            (FOLDER / f"{name}.json").write_text(_text(_plain(content())))
        for path, content in _checkpoint_files():
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(content)
        return 0
    wrong = []
    stored = {path.stem for path in FOLDER.glob("*.json")}
    wrong += [f"{name}.json: not generated" for name in sorted(stored - FILES.keys())]
    for name in names:
        path = FOLDER / f"{name}.json"
        if not path.exists():
            wrong.append(f"{name}.json: missing")
            continue
        wrong += _differences(f"{name}.json", json.loads(path.read_text()), _plain(FILES[name]()))
    for path, content in _checkpoint_files():
        if not path.exists() or path.read_bytes() != content:
            wrong.append(f"{path.relative_to(FOLDER)}: missing or different")
    for line in wrong[:20]:
        print(line, file=sys.stderr)
    if wrong:
        print(f"{len(wrong)} differences: run {sys.argv[0]} and review the diff", file=sys.stderr)
        return 1
    print(f"{len(names)} files are up to date")
    return 0


def _checkpoint_files() -> list[tuple[Path, bytes]]:
    return [
        (FOLDER / name / file, content)
        for name, files in CHECKPOINTS.items()
        for file, content in files().items()
    ]


def _plain(value: Any) -> Any:
    """Converts NumPy values to what JSON can represent."""
    if isinstance(value, dict):
        return {key: _plain(part) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(part) for part in value]
    if isinstance(value, np.ndarray):
        return _plain(value.tolist())
    if isinstance(value, np.generic):
        return _plain(value.item())
    if isinstance(value, float):
        assert math.isfinite(value)
        # No negative zeros.
        return value + 0.0
    return value


def _text(content: dict[str, Any]) -> str:
    """JSON with one line per entry of the two outer levels, so that diffs are readable."""
    lines = []
    for key, value in content.items():
        items = None
        if isinstance(value, list) and value and isinstance(value[0], dict):
            items = ("[", "]", [json.dumps(item) for item in value])
        elif isinstance(value, dict):
            listed = [f"{json.dumps(k)}: {json.dumps(v)}" for k, v in value.items()]
            items = ("{", "}", listed)
        if items is None:
            lines.append(f" {json.dumps(key)}: {json.dumps(value)}")
        else:
            opening, closing, parts = items
            body = ",\n".join(f"  {part}" for part in parts)
            lines.append(f" {json.dumps(key)}: {opening}\n{body}\n {closing}")
    return "{\n" + ",\n".join(lines) + "\n}\n"


def _differences(place: str, stored: Any, derived: Any) -> list[str]:
    if isinstance(stored, dict) and isinstance(derived, dict) and stored.keys() == derived.keys():
        return [d for key in stored for d in _differences(f"{place}.{key}", stored[key], derived[key])]
    if isinstance(stored, list) and isinstance(derived, list) and len(stored) == len(derived):
        pairs = enumerate(zip(stored, derived))
        return [d for i, (a, b) in pairs for d in _differences(f"{place}[{i}]", a, b)]
    if isinstance(stored, float) and isinstance(derived, float):
        same = math.isclose(stored, derived, rel_tol=TOLERANCE, abs_tol=TOLERANCE)
    else:
        same = type(stored) is type(derived) and stored == derived
    return [] if same else [f"{place}: stored {stored!r:.60}, derived {derived!r:.60}"]


if __name__ == "__main__":
    sys.exit(main())
