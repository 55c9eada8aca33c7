"""Compares the results of two trainers on one batch.

    python -m orchestrate_trainer.compare MANIFEST URL URL [--step HYPERPARAMETERS.json]

By default it compares log-probs with and without replay, which changes nothing. With ``--step``
both trainers also apply the batch's step; use that only for trainers that have the same weights
and are not part of a run.
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

#: Smallest magnitude that differences are relative to.
FLOOR = 0.1


def main(arguments: list[str] | None = None) -> int:
    """Prints the differences. Returns 1 if one is above ``--tolerance``, else 0."""
    parser = argparse.ArgumentParser(prog="orchestrate_trainer.compare", description=__doc__)
    parser.add_argument("manifest", type=Path, help="the batch's manifest.json")
    parser.add_argument("url", nargs=2, help="address of each trainer")
    parser.add_argument("--step", type=Path, help="JSON file with a step's hyperparameters")
    parser.add_argument(
        "--tolerance",
        type=float,
        default=1e-4,
        help="largest relative difference that is accepted (default: %(default)s)",
    )
    given = parser.parse_args(arguments)
    manifest = given.manifest.absolute()
    worst = 0.0
    for replay in (True, False):
        body = {"manifest": str(manifest), "replay": replay, "temperature": 1.0}
        one, two = (_call(url, "/v1/logprobs", body) for url in given.url)
        title = "log-probs with replay" if replay else "log-probs without replay"
        worst = max(worst, _print_differences(title, one, two))
    if given.step:
        settings = json.loads(given.step.read_text())
        one, two = (_step(url, manifest, settings)["metrics"] for url in given.url)
        worst = max(worst, _print_differences("step", one, two))
    return int(worst > given.tolerance)


def _call(url: str, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url.rstrip("/") + path, data)
    request.add_header("content-type", "application/json")
    try:
        with urllib.request.urlopen(request, timeout=3600) as reply:
            found: dict[str, Any] = json.load(reply)
            return found
    except urllib.error.HTTPError as error:
        raise SystemExit(f"{url}{path}: {error.code} {error.read().decode()}") from error


def _step(url: str, manifest: Path, settings: dict[str, Any]) -> dict[str, Any]:
    step_id = json.loads(manifest.read_text())["step_id"]
    base = _call(url, "/v1/info")["policy_version"]
    body = {"step_id": step_id, "base_version": base, "manifest": str(manifest)}
    status = _call(url, "/v1/steps", {**body, "hyperparameters": settings})
    while status["state"] in ("queued", "running"):
        time.sleep(0.2)
        status = _call(url, f"/v1/steps/{step_id}")
    if status["state"] != "done":
        raise SystemExit(f"{url}: step {step_id} failed: {status['error']}")
    result: dict[str, Any] = status["result"]
    return result


def _print_differences(title: str, one: Any, two: Any) -> float:
    """Prints the largest absolute and relative difference of each measurement that both have.

    Returns the largest relative difference, where the magnitude is at least :data:`FLOOR`: a
    log-prob near 0 is a difference of logits around 10, so its relative error says nothing.
    """
    found: dict[str, list[float]] = {}
    for name, a, b in _pairs(one, two):
        size, difference = max(abs(a), abs(b)), abs(a - b)
        row = (difference, difference / size if size else 0.0, difference / max(size, FLOOR))
        found[name] = [max(pair) for pair in zip(found.get(name, row), row, strict=True)]
    print(f"{title:40} {'absolute':>10} {'relative':>10}")
    for name, (absolute, relative, _) in found.items():
        print(f"  {name:38} {absolute:10.2e} {relative:10.2e}")
    return max((counted for _, _, counted in found.values()), default=0.0)


def _pairs(one: Any, two: Any, name: str = "") -> Iterator[tuple[str, float, float]]:
    """Names and values of the numbers that both have."""
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
