"""Routing rows of a trajectory from several engine calls.

A call gets a prompt and returns output tokens; its routing rows cover the input positions
``[start, prompt + output - 1)``: the last sampled token has not been an input yet. Its row, and the
rows of the observation after it, come from the prefill of the next call. The first row received for
a position is kept, because it produced the log-probs of the tokens after it; a later row that
differs is counted as drift. A trajectory of T tokens has T - 1 rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class Call:
    """One engine call: first row delivered, rows ``[n, L, K]``, weight version, tokens so far."""

    start: int
    rows: NDArray[np.int64]
    version: int
    tokens: int


def stitch(calls: list[Call], length: int | None = None) -> dict:
    """Rows, the policy version of each, and the number of drifted rows, cut to ``length`` tokens if
    given.

    A call that starts beyond the rows received so far leaves a gap, which is not filled: the result
    is then the first missing row and the start of the call.
    """
    rows: list[list] = []
    versions: list[int] = []
    drift = 0
    for call in calls:
        if call.start > len(rows):
            return {"gap": {"have": len(rows), "start": call.start}}
        for offset, row in enumerate(call.rows.tolist()):
            place = call.start + offset
            if place == len(rows):
                rows.append(row)
                versions.append(call.version)
            elif rows[place] != row:
                drift += 1
    tokens = calls[-1].tokens if length is None else length
    return {"rows": rows[: tokens - 1], "versions": versions[: tokens - 1], "drift_rows": drift}
