"""Asks two trainers the same about one batch and shows how far apart they are.

    python -m orchestrate_trainer.compare MANIFEST URL URL [--step HYPERPARAMETERS.json]

Log-probs with and without replay change nothing. ``--step`` also has both apply the batch's step,
for trainers that stand at the same weights and are not part of a run.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

__all__ = ["main"]

#: Smallest size that differences are relative to.
FLOOR = 0.1


def main(arguments: list[str] | None = None) -> int:
    """Exit status 1 where a difference is above ``--tolerance``."""
    parser = argparse.ArgumentParser(prog="orchestrate_trainer.compare", description=__doc__)
    parser.add_argument("manifest", type=Path)
    parser.add_argument("url", nargs=2)
    parser.add_argument("--step", type=Path, help="JSON with a step's hyperparameters")
    parser.add_argument("--tolerance", type=float, default=1e-4, help="relative; default 1e-4")
    given = parser.parse_args(arguments)
    manifest = given.manifest.absolute()
    worst = 0.0
    for replay in (True, False):
        body = {"manifest": str(manifest), "replay": replay, "temperature": 1.0}
        one, two = (_call(url, "/v1/logprobs", body) for url in given.url)
        title = "log-probs with replay" if replay else "log-probs without"
        worst = max(worst, _show(title, one, two))
    if given.step:
        settings = json.loads(given.step.read_text())
        one, two = (_step(url, manifest, settings)["metrics"] for url in given.url)
        worst = max(worst, _show("step", one, two))
    return int(worst > given.tolerance)


def _call(url: str, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url.rstrip("/") + path, data)
    request.add_header("content-type", "application/json")
    try:
        with urllib.request.urlopen(request, timeout=3600) as answer:
            return json.load(answer)
    except urllib.error.HTTPError as error:
        raise SystemExit(f"{url}{path}: {error.code} {error.read().decode()}") from error


def _step(url: str, manifest: Path, settings: dict[str, Any]) -> dict[str, Any]:
    step_id = json.loads(manifest.read_text())["step_id"]
    base = _call(url, "/v1/info")["policy_version"]
    body = {"step_id": step_id, "base_version": base, "manifest": str(manifest)}
    answer = _call(url, "/v1/steps", {**body, "hyperparameters": settings})
    while answer["state"] in ("queued", "running"):
        time.sleep(0.2)
        answer = _call(url, f"/v1/steps/{step_id}")
    if answer["state"] != "done":
        raise SystemExit(f"{url}: step {step_id} failed: {answer['error']}")
    return answer["result"]


def _show(title: str, one: Any, two: Any) -> float:
    """Prints the largest difference of each measurement that both have, absolute and relative, and
    answers with the largest that counts: relative to the value, or to :data:`FLOOR` if that is
    more, since log-probs near 0 are what rounding leaves of numbers around 10."""
    found: dict[str, list[float]] = {}
    for name, a, b in _pairs(one, two):
        size, difference = max(abs(a), abs(b)), abs(a - b)
        row = (difference, difference / size if size else 0.0, difference / max(size, FLOOR))
        found[name] = [max(pair) for pair in zip(found.get(name, row), row)]
    print(f"{title:40} {'absolute':>10} {'relative':>10}")
    for name, (absolute, relative, _) in found.items():
        print(f"  {name:38} {absolute:10.2e} {relative:10.2e}")
    return max((counted for _, _, counted in found.values()), default=0.0)


def _pairs(one: Any, two: Any, name: str = "") -> Iterator[tuple[str, float, float]]:
    if isinstance(one, dict) and isinstance(two, dict):
        for key in one.keys() & two.keys() - {"seconds", "policy_version"}:
            yield from _pairs(one[key], two[key], f"{name}.{key}".lstrip("."))
    elif isinstance(one, list) and isinstance(two, list):
        for a, b in zip(one, two, strict=True):
            yield from _pairs(a, b, name)
    elif isinstance(one, (int, float)) and isinstance(two, (int, float)):
        yield name, float(one), float(two)


if __name__ == "__main__":
    sys.exit(main())
