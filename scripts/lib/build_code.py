"""Compares the third-party code that runs while this project is built with a reviewed list.

Build scripts and procedural macros run with the rights of the user who builds, before any test.
The list supply-chain/build-code.toml names each crate that has one, and each library that is linked
into one, with version, checksum and the reason why it may run. The check fails on a crate that is
not in the list, on one that changed and on one that is gone.

    build_code.py               compare; exit status 1 if the list differs
    build_code.py --list FILE   compare with another list
    build_code.py --accept      rewrite the list from Cargo.lock; reasons are kept
"""

import json
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tomllib

ROOT = Path(__file__).resolve().parents[2]
LIST = ROOT / "supply-chain" / "build-code.toml"
WORKSPACES = (ROOT, ROOT / "fuzz")
# Those for which the project is released; as in deny.toml.
TARGETS = ("x86_64-unknown-linux-gnu", "aarch64-unknown-linux-gnu")
UNREVIEWED = "not reviewed yet"

HEADER = """\
# Third-party code that runs while this project is built; checked by scripts/deny, which explains
# how to review a difference. `reason` says what the code does and why it may run. A crate without
# `reason` is a library that is linked into those of `used-by`.
"""

Key = tuple[str, str]


@dataclass
class Entry:
    """A crate whose code runs at build time."""

    name: str
    version: str
    checksum: str
    runs: list[str] = field(default_factory=list)
    used_by: set[str] = field(default_factory=set)
    reason: str = ""

    @property
    def key(self) -> Key:
        """What identifies it in a lock file."""
        return (self.name, self.version)

    @property
    def identity(self) -> tuple[str, str, str, tuple[str, ...]]:
        """What a review covers: these bytes, run in this way."""
        return (self.name, self.version, self.checksum, tuple(self.runs))

    def text(self) -> str:
        """The entry in TOML."""
        lines = [
            "[[crate]]",
            f"name = {json.dumps(self.name)}",
            f"version = {json.dumps(self.version)}",
            f"checksum = {json.dumps(self.checksum)}",
        ]
        if self.runs:
            lines += [f"runs = {json.dumps(self.runs)}", f"reason = {json.dumps(self.reason)}"]
        if self.used_by:
            lines.append(f"used-by = {json.dumps(sorted(self.used_by))}")
        return "\n".join(lines) + "\n"


def checksums(workspace: Path) -> dict[Key, str]:
    """The checksum of every package of a lock file that comes from a registry."""
    lock = tomllib.loads((workspace / "Cargo.lock").read_text())
    return {(p["name"], p["version"]): p["checksum"] for p in lock["package"] if "checksum" in p}


def metadata(workspace: Path, target: str) -> dict[str, Any]:
    """What cargo knows of the packages that a build for `target` compiles."""
    command = ["cargo", "metadata", "--locked", "--format-version", "1", "--all-features"]
    command += ["--filter-platform", target, "--manifest-path", str(workspace / "Cargo.toml")]
    run = subprocess.run(command, check=True, stdout=subprocess.PIPE)
    found: dict[str, Any] = json.loads(run.stdout)
    return found


def kinds(package: dict[str, Any]) -> list[str]:
    """How a package's own code runs at build time."""
    targets = {kind for target in package["targets"] for kind in target["kind"]}
    named = (("custom-build", "build script"), ("proc-macro", "proc macro"))
    return [name for kind, name in named if kind in targets]


def linked(node: dict[str, Any], kind: str | None) -> Iterable[str]:
    """Ids of dependencies of one kind: None for normal ones, `build` for build scripts."""
    for dependency in node["deps"]:
        if any(use["kind"] == kind for use in dependency["dep_kinds"]):
            yield dependency["pkg"]


def collect() -> dict[Key, Entry]:
    """The third-party crates whose code runs in a build of the program or the fuzz targets."""
    entries: dict[Key, Entry] = {}
    for workspace in WORKSPACES:
        known = checksums(workspace)
        for target in TARGETS:
            add(metadata(workspace, target), known, entries)
    return entries


def add(found: dict[str, Any], known: dict[Key, str], entries: dict[Key, Entry]) -> None:
    """Adds the crates of one build to `entries`."""
    packages = {package["id"]: package for package in found["packages"]}
    nodes = {node["id"]: node for node in found["resolve"]["nodes"]}

    def entry(package: dict[str, Any]) -> Entry:
        key = (package["name"], package["version"])
        return entries.setdefault(key, Entry(*key, known.get(key, "none"), kinds(package)))

    for id_, node in nodes.items():
        package = packages[id_]
        runs = kinds(package)
        # The project's own build scripts are reviewed like its other code; what they link is not.
        if package["source"] and runs:
            entry(package)
        waiting = list(linked(node, "build")) if "build script" in runs else []
        waiting += list(linked(node, None)) if "proc macro" in runs else []
        seen: set[str] = set()
        while waiting:
            other = waiting.pop()
            if other in seen:
                continue
            seen.add(other)
            waiting += linked(nodes[other], None)
            if packages[other]["source"]:
                entry(packages[other]).used_by.add(package["name"])


def reviewed(path: Path) -> list[Entry]:
    """The entries of a list; none if there is no such file."""
    if not path.exists():
        return []
    rows = tomllib.loads(path.read_text()).get("crate", [])
    return [
        Entry(
            row["name"],
            row["version"],
            row["checksum"],
            row.get("runs", []),
            set(row.get("used-by", [])),
            row.get("reason", ""),
        )
        for row in rows
    ]


def problems(found: dict[Key, Entry], listed: list[Entry]) -> list[str]:
    """Differences between what runs and what was reviewed."""
    known = {entry.identity for entry in listed}
    of_name: dict[str, list[Entry]] = {}
    for entry in listed:
        of_name.setdefault(entry.name, []).append(entry)
    text = []
    for key in sorted(found):
        entry = found[key]
        if entry.identity in known:
            continue
        before = of_name.get(entry.name, [])
        what = " and ".join(entry.runs) or "library of " + ", ".join(sorted(entry.used_by))
        if not before:
            text.append(f"new: {entry.name} {entry.version} ({what})")
        elif key in {other.key for other in before}:
            text.append(
                f"changed: {entry.name} {entry.version}: other bytes or another use ({what})"
            )
        else:
            versions = ", ".join(other.version for other in before)
            text.append(f"changed: {entry.name} {versions} -> {entry.version} ({what})")
    text += [f"gone: {e.name} {e.version}" for e in listed if e.key not in found]
    for entry in listed:
        if entry.runs and entry.reason in ("", UNREVIEWED):
            text.append(f"without a reason: {entry.name} {entry.version}")
    return text


def accept(found: dict[Key, Entry], listed: list[Entry]) -> None:
    """Rewrites the list. A crate that was not in it gets no reason: someone must write it."""
    reasons = {entry.name: entry.reason for entry in listed if entry.reason}
    for entry in found.values():
        if entry.runs:
            entry.reason = reasons.get(entry.name, UNREVIEWED)
    LIST.parent.mkdir(exist_ok=True)
    LIST.write_text("\n".join([HEADER, *(found[key].text() for key in sorted(found))]))


def main(arguments: list[str]) -> int:
    """Compares or rewrites; returns the exit status."""
    path = LIST
    match arguments:
        case [] | ["--accept"]:
            pass
        case ["--list", name]:
            path = Path(name)
        case _:
            print(__doc__, file=sys.stderr)
            return 2
    found = collect()
    if arguments == ["--accept"]:
        accept(found, reviewed(path))
    listed = reviewed(path)
    differences = problems(found, listed)
    for difference in differences:
        print(f"build code: {difference}", file=sys.stderr)
    if differences:
        print(
            "error: the code that runs at build time differs from supply-chain/build-code.toml\n"
            "hint: read the new code (cargo info NAME, ~/.cargo/registry/src), run"
            " `scripts/deny --accept`, write the reason of each new crate, and review the diff",
            file=sys.stderr,
        )
        return 1
    direct = sum(1 for entry in found.values() if entry.runs)
    print(
        f"build code: {direct} crates with build scripts or macros, {len(found) - direct} linked"
        " into them, all as reviewed",
        file=sys.stderr,
    )
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
