"""The golden vectors are what the reference implementation derives."""

from __future__ import annotations

import subprocess
import sys

from vectors import REFERENCE


def test_the_reference_derives_the_committed_vectors() -> None:
    command = [sys.executable, "-B", REFERENCE / "generate.py", "--check"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_check_notices_a_changed_number() -> None:
    sys.path.insert(0, str(REFERENCE))
    try:
        import generate
    finally:
        sys.path.remove(str(REFERENCE))
    stored = {"a": [1.0, {"b": 2.0}], "n": 3}
    assert generate._differences("file", stored, {"a": [1.0, {"b": 2.0 + 1e-15}], "n": 3}) == []
    for other in (
        {"a": [1.0, {"b": 2.0 + 1e-9}], "n": 3},
        {"a": [1.0], "n": 3},
        {"a": [1.0, {"b": 2.0}], "n": 4},
        {"a": [1.0, {"c": 2.0}], "n": 3},
    ):
        assert len(generate._differences("file", stored, other)) == 1
