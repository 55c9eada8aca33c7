"""Import this first in a test module of the trainer.

If one of the trainer's packages is missing, the importing module is skipped, and the skip is listed
and counted at the end of the run.
"""

from __future__ import annotations

import pytest

for name in ("torch", "transformers", "safetensors", "starlette", "uvicorn", "blake3"):
    pytest.importorskip(name, reason=f"package {name} is not installed: scripts/test-python")
