"""What a test suite leaves on this machine, and the removal of what killed suites left.

A suite is one call of `scripts/test`. It has a folder, which is also its TMPDIR and the value of
ORCHESTRATE_SUITE in the environment of its processes.

Usage:
  machine.py begin FOLDER PID   record the machine's state and the suite's own process
  machine.py end FOLDER         list what the suite left or took away; fails if there is any
  machine.py sweep              remove what suites and tests left whose processes are dead
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from datetime import datetime
from pathlib import Path

SUITE = "ORCHESTRATE_SUITE"
SUITE_FOLDERS = "orchestrate-test.*"
# tests/src/daemon.rs gives this name to the folder and to the control group of a test's daemon.
DAEMON_FOLDERS = "orchestrate-daemon-*"
CGROUPS = Path("/sys/fs/cgroup")
# Images that are built once and kept: of environments and tests, and what sandboxes derive.
KEPT_IMAGES = ("micro", "repository", "attack-", "test-", "harbor", "derived", "pulled")
# The one whose tag is new for every test.
PASSING_IMAGE = "orchestrate/test-moving:"
# What a sandbox may need from its creation to its start, in seconds.
LONGEST_START = 600
# How long containers and processes may take to end after the suite, in seconds.
PATIENCE = 180


def lines(*command: str) -> list[str]:
    """Lines that a command prints; none if it fails or does not exist."""
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return []
    return result.stdout.splitlines() if result.returncode == 0 else []


def read(path: Path) -> str:
    """Content of a file; empty if it cannot be read, as of a process that ended."""
    try:
        return path.read_bytes().decode(errors="replace")
    except OSError:
        return ""


def processes() -> list[int]:
    """Ids of all processes except zombies, kernel threads, this one and those above it."""
    above = set()
    pid = os.getpid()
    while pid > 1:
        above.add(pid)
        fields = read(Path(f"/proc/{pid}/stat")).rpartition(")")[2].split()
        pid = int(fields[1]) if fields else 0
    found = [int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit()]
    return [pid for pid in found if pid not in above and command_line(pid)]


def command_line(pid: int) -> str:
    """Command line of a process."""
    return read(Path(f"/proc/{pid}/cmdline")).replace("\0", " ").strip()


def of_suite(pid: int, folder: Path) -> bool:
    """Whether a process descends from the suite in `folder`."""
    return f"{SUITE}={folder}" in read(Path(f"/proc/{pid}/environ")).split("\0")


def started_at(pid: int) -> str:
    """When a process started, in the kernel's ticks; empty if there is none."""
    fields = read(Path(f"/proc/{pid}/stat")).rpartition(")")[2].split()
    return fields[19] if fields and fields[0] != "Z" else ""


def is_alive(suite: Path) -> bool:
    """Whether the process that made a suite's folder is alive."""
    owner = read(suite / ".owner").split()
    if len(owner) != 2:
        # The file is written right after the folder.
        return time.time() - suite.stat().st_mtime < 60
    return started_at(int(owner[0])) == owner[1]


def temporary_folders() -> list[Path]:
    """Folders in which suites and tests make theirs."""
    names = dict.fromkeys(["/tmp", "/var/tmp", tempfile.gettempdir()])
    return [Path(name).resolve() for name in names if Path(name).is_dir()]


def suites() -> list[Path]:
    """Folders of all suites."""
    return [path for folder in temporary_folders() for path in folder.glob(SUITE_FOLDERS)]


def mounts() -> list[str]:
    """Mount points, in order."""
    points = [line.split()[4] for line in read(Path("/proc/self/mountinfo")).splitlines()]
    return [point.encode().decode("unicode_escape") for point in points]


def control_groups() -> list[Path]:
    """Control groups of tests' daemons, in all hierarchies."""
    return [*CGROUPS.glob(DAEMON_FOLDERS), *CGROUPS.glob(f"*/{DAEMON_FOLDERS}")]


def containers(*filters: str) -> dict[str, str]:
    """Containers by id, each as one line of text."""
    form = "--format={{.ID}}\t{{.Names}} ({{.Image}}, {{.Status}})"
    options = [f"--filter={one}" for one in filters]
    found = lines("docker", "ps", "--all", "--no-trunc", form, *options)
    return dict(line.split("\t", 1) for line in found)


def images() -> list[str]:
    """Names of all images."""
    return lines("docker", "images", "--format={{.Repository}}:{{.Tag}}")


def state() -> dict[str, list[str]]:
    """Everything that a suite must leave as it was."""
    networks = lines("docker", "network", "ls", "--format={{.Name}}")
    return {
        "interface": [path.name for path in Path("/sys/class/net").iterdir()],
        "mount": mounts(),
        "container": list(containers()),
        "image": images(),
        "network": networks,
        "volume": lines("docker", "volume", "ls", "--quiet"),
        "control group": [str(path) for path in control_groups()],
    }


def other_users(folder: Path) -> bool:
    """Whether other suites, tests or runs are active, to which new containers may belong."""
    names = {"orchestrate", "cargo-nextest", "orchestrate-benc"}
    return any(other != folder and is_alive(other) for other in suites()) or any(
        read(Path(f"/proc/{pid}/comm")).strip() in names and not of_suite(pid, folder)
        for pid in processes()
    )


def is_kept(image: str) -> bool:
    """Whether an image of this project is built once and kept."""
    name = image.removeprefix("orchestrate/")
    return name.startswith(KEPT_IMAGES) and not image.startswith(PASSING_IMAGE)


def left(folder: Path, before: dict[str, list[str]]) -> tuple[list[str], list[str]]:
    """What a suite left or took away, and changes that may be another program's."""
    now = state()
    new = {kind: [one for one in now[kind] if one not in before[kind]] for kind in now}
    gone = {kind: [one for one in before[kind] if one not in now[kind]] for kind in now}
    ours: list[str] = []
    others: list[str] = []
    for pid in processes():
        if of_suite(pid, folder):
            ours.append(f"process {pid}: {command_line(pid)[:200]}")
    inside = f"{folder}/"
    for point in now["mount"]:
        if point.startswith(inside):
            ours.append(f"mount {point}")
    for loop in Path("/sys/block").glob("loop*/loop/backing_file"):
        if read(loop).startswith(inside):
            ours.append(f"loop device {loop.parts[3]} on {read(loop).strip()}")
    elsewhere = {
        path.name
        for parent in temporary_folders()
        for pattern in (DAEMON_FOLDERS, f"{SUITE_FOLDERS}/{DAEMON_FOLDERS}")
        for path in parent.glob(pattern)
        if path.parent != folder
    }
    for group in new["control group"]:
        if Path(group).name not in elsewhere:
            ours.append(f"control group {group}")
    labelled = containers("label=orchestrate.run")
    mine = others if other_users(folder) else ours
    for key, text in containers().items():
        if key in new["container"] and (key in labelled or " (orchestrate/" in text):
            mine.append(f"container {text}")
    for image in new["image"]:
        if image.startswith("orchestrate/") and not is_kept(image):
            mine.append(f"image {image}")
    for kind in ("network", "volume"):
        for name in new[kind]:
            (mine if name.startswith("orchestrate") else others).append(f"{kind} {name}")
    for name in gone["interface"]:
        (ours if name == "docker0" else others).append(f"interface {name}, which is gone")
    others += [f"interface {name}" for name in new["interface"]]
    return ours, others


def begin(folder: Path, owner: int) -> None:
    """Records the machine's state and the suite's own process."""
    (folder / ".owner").write_text(f"{owner} {started_at(owner)}\n")
    (folder / ".machine.json").write_text(json.dumps(state()))


def end(folder: Path) -> int:
    """Prints what the suite left; returns 1 if there is any."""
    before = json.loads((folder / ".machine.json").read_text())
    began = time.monotonic()
    ours, others = left(folder, before)
    while ours and time.monotonic() - began < PATIENCE:
        time.sleep(1)
        ours, others = left(folder, before)
    if others:
        print(f"also changed meanwhile, perhaps by another program: {', '.join(sorted(others))}")
    if not ours:
        print(f"the machine is as it was: {', '.join(before)}, process")
        return 0
    print(f"error: the tests left the machine changed, {PATIENCE} s after the last of them:")
    for one in sorted(ours):
        print(f"  {one}")
    if any(one.startswith("interface docker0") for one in ours):
        print("hint: containers have no network until the daemon is restarted")
    return 1


def remove_folder(folder: Path) -> None:
    """Removes a folder of dead tests, with mounts in it and control groups of its daemons."""
    for point in reversed(mounts()):
        if point.startswith(f"{folder}/"):
            subprocess.run(["umount", "--lazy", point], capture_output=True)
    names = {folder.name, *(path.name for path in folder.glob(DAEMON_FOLDERS))}
    for group in control_groups():
        if group.name in names:
            with suppress(OSError):
                for inside in sorted(group.rglob("*/"), reverse=True):
                    inside.rmdir()
                group.rmdir()
    shutil.rmtree(folder, ignore_errors=True)
    print(f"removed {folder}, left by tests that were killed")


def sweep() -> None:
    """Removes what suites and tests left whose processes are dead."""
    now = time.time()
    for suite in suites():
        if is_alive(suite):
            continue
        for pid in processes():
            if of_suite(pid, suite):
                print(f"ending process {pid} of a killed test: {command_line(pid)[:100]}")
                with suppress(ProcessLookupError):
                    os.kill(pid, 9)
        remove_folder(suite)
    running = " ".join(command_line(pid) for pid in processes())
    for parent in temporary_folders():
        for folder in parent.glob(DAEMON_FOLDERS):
            if str(folder) not in running and now - folder.stat().st_mtime > LONGEST_START:
                remove_folder(folder)
    # What a killed coordinator left ends by itself, except for what was never started.
    form = '{{.ID}}\t{{.Names}}\t{{.Label "orchestrate.deadline"}}\t{{.State}}\t{{.CreatedAt}}'
    options = ("--all", "--filter=label=orchestrate.run", f"--format={form}")
    for line in lines("docker", "ps", *options):
        key, name, deadline, status, created = line.split("\t")
        # For example `2026-01-31 23:59:59 +0100 CET`.
        made = datetime.strptime(created[:25], "%Y-%m-%d %H:%M:%S %z").timestamp()
        expired = deadline.isdigit() and int(deadline) < now
        if expired or (status in ("created", "exited", "dead") and now - made > LONGEST_START):
            print(f"removing the leftover container {name}")
            lines("docker", "rm", "--force", "--volumes", key)
    for image in images():
        owner = image.removeprefix(PASSING_IMAGE)
        if owner != image and not Path("/proc", owner).exists():
            print(f"removing the leftover image {image}")
            # By the name that they were created with: other containers have the same image.
            for key, text in containers().items():
                if f" ({image}," in text:
                    lines("docker", "rm", "--force", key)
            lines("docker", "rmi", image)


def main() -> int:
    """Runs the command that the arguments name."""
    match sys.argv[1:]:
        case ["begin", folder, owner]:
            begin(Path(folder).resolve(), int(owner))
        case ["end", folder]:
            return end(Path(folder).resolve())
        case ["sweep"]:
            sweep()
        case _:
            print(__doc__, file=sys.stderr)
            return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
