"""Checks that the lock files of trainer/ pin every package by version and hash.

pip checks the hashes at installation (`--require-hashes`), but only of the lock that it installs.
This checks all of them, and that a package has the same version and hashes wherever it appears.
"""

import re
import sys
from pathlib import Path

TRAINER = Path(__file__).resolve().parents[2] / "trainer"
PIN = re.compile(r"^(?P<name>[a-z0-9][a-z0-9.-]*)==(?P<version>[^ ;\\]+)(?: ;[^\\]*)?(?: \\)?$")
HASH = re.compile(r"^    --hash=sha256:(?P<hash>[0-9a-f]{64})(?: \\)?$")

Pins = dict[str, tuple[str, frozenset[str]]]


def pins(path: Path) -> tuple[Pins, list[str]]:
    """The packages of a lock with version and hashes, and what is wrong in it."""
    found: Pins = {}
    wrong: list[str] = []
    name = ""
    for number, line in enumerate(path.read_text().splitlines(), 1):
        if not line or line.startswith("#"):
            continue
        if pin := PIN.match(line):
            name = pin["name"]
            found[name] = (pin["version"], frozenset())
        elif (hashed := HASH.match(line)) and name:
            version, hashes = found[name]
            found[name] = (version, hashes | {hashed["hash"]})
        else:
            wrong.append(f"{path.name}:{number}: neither `NAME==VERSION` nor `--hash=sha256:…`")
    wrong += [f"{path.name}: {name} has no hash" for name, (_, h) in found.items() if not h]
    return found, wrong


def main() -> int:
    """Checks all locks; returns the exit status."""
    everything: dict[str, tuple[str, str, frozenset[str]]] = {}
    problems: list[str] = []
    count = 0
    for path in sorted(TRAINER.glob("requirements*.lock")):
        found, wrong = pins(path)
        problems += wrong
        count += len(found)
        if not found:
            problems.append(f"{path.name}: no package")
        for name, (version, hashes) in found.items():
            other, known, known_hashes = everything.setdefault(name, (path.name, version, hashes))
            if (version, hashes) != (known, known_hashes):
                problems.append(f"{path.name}: {name} differs from {other} in version or hashes")
    for problem in problems:
        print(f"python locks: {problem}", file=sys.stderr)
    if problems:
        print("hint: run scripts/lock-python", file=sys.stderr)
        return 1
    print(f"python locks: {count} pins, all with hashes", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
