"""Which folders requests may name."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

__all__ = ["NotAllowedError", "batch_file"]


class NotAllowedError(ValueError):
    """A path is not below an allowed folder, or there is nothing at an allowed one."""

    def __init__(self) -> None:
        super().__init__("is not below a folder of batches (--batch-root), or cannot be read")


def batch_file(path: Path, roots: Sequence[Path] | None) -> Path:
    """The real path of a batch's manifest; no link in the batch's folder may leave ``roots``.

    A path outside of ``roots`` is refused without touching the disk, so that a refusal does not
    tell whether it exists. ``None`` allows every path. Raises :class:`NotAllowedError`.
    """
    try:
        if roots is None:
            return path.resolve(strict=True)
        plain = [Path(os.path.abspath(root)) for root in roots]
        real = [root.resolve() for root in plain]
        absolute = Path(os.path.abspath(path))
        if not any(absolute.is_relative_to(root) for root in [*plain, *real]):
            raise NotAllowedError
        found = path.resolve(strict=True)
        entries = [found, *(entry.resolve(strict=True) for entry in found.parent.iterdir())]
    except (OSError, RuntimeError, ValueError):
        # Also a loop of links, and a path with a NUL byte.
        raise NotAllowedError from None
    if not all(any(entry.is_relative_to(root) for root in real) for entry in entries):
        raise NotAllowedError
    return found
