"""The golden vectors are what the reference implementation derives."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

from golden_vectors import REFERENCE


def check(folder: Path, *names: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-B", str(folder / "generate.py"), "--check", *names]
    return subprocess.run(command, capture_output=True, text=True)


def test_the_reference_derives_the_committed_vectors() -> None:
    done = check(REFERENCE)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_check_names_every_file_that_differs(tmp_path: Path) -> None:
    copy = shutil.copytree(REFERENCE, tmp_path / "reference")
    changed = copy / "vectors" / "optimizer.json"
    changed.write_text(changed.read_text().replace('"weight_decay": 0.1', '"weight_decay": 0.2'))
    (copy / "vectors" / "values.json").unlink()
    (copy / "vectors" / "stray.json").write_text("{}")
    done = check(copy, "optimizer", "values", "routers")
    assert done.returncode == 1
    for line in (
        "optimizer.json.cases[1].settings.weight_decay: stored 0.2, derived 0.1",
        "values.json: missing",
        "stray.json: not generated",
    ):
        assert line in done.stderr
    assert "3 differences" in done.stderr
