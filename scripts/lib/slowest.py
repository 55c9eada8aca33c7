"""Prints the ten slowest tests of JUnit reports; nothing where there is no report.

Usage: slowest.py FILE…
"""

from __future__ import annotations

import sys
from pathlib import Path
from xml.etree import ElementTree

COUNT = 10


def times(path: Path) -> list[tuple[float, str]]:
    """Seconds and name of every test of a report."""
    try:
        cases = ElementTree.parse(path).iter("testcase")
        return [
            (float(case.get("time", "0")), f"{case.get('classname')} {case.get('name')}")
            for case in cases
        ]
    except (OSError, ElementTree.ParseError, ValueError):
        return []


def main() -> None:
    """Prints them, the slowest first."""
    found = sorted((one for file in sys.argv[1:] for one in times(Path(file))), reverse=True)
    if found:
        print(f"\n== the slowest of {len(found)} tests")
    for seconds, name in found[:COUNT]:
        print(f"{seconds:8.1f} s  {name}")


if __name__ == "__main__":
    main()
