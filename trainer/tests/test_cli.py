"""The command line, without the trainer's packages."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

WITHOUT_TORCH = """
import sys
sys.modules["torch"] = None
from orchestrate_trainer.cli import main
sys.exit(main(sys.argv[1:]))
"""


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs the command line where PyTorch cannot be imported."""
    return subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH, *arguments],
        cwd=Path(__file__).parents[1],
        capture_output=True,
        text=True,
    )


def test_help_needs_no_packages() -> None:
    done = run("--help")
    assert done.returncode == 0 and "--checkpoint-dir" in done.stdout


def test_missing_package_is_named() -> None:
    done = run("--model", "m", "--checkpoint-dir", "c")
    assert done.returncode == 2
    assert "is not installed; pip install 'orchestrate-trainer[train]'" in done.stderr
