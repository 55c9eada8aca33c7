#!/usr/bin/env python3
"""Lets PyPI's Linux build of PyTorch run on the CPU without the CUDA packages.

PyPI has only CUDA builds of PyTorch for Linux. Such a build loads a dozen CUDA libraries when it is
imported, even if no GPU is used, and its packages bring them along: about 4 GB. This script writes
small libraries with the same names and symbols into ``torch/lib``, where every function returns
``cudaErrorNoDevice``. PyTorch then finds no GPU and computes on the CPU.

    python scripts/lib/cuda_stubs.py            # for the PyTorch of this interpreter

It does nothing if PyTorch is a CPU build (from PyTorch's own index) or finds its CUDA libraries. It
needs a C compiler and binutils.
"""

from __future__ import annotations

import ctypes
import importlib.util
import re
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path

#: ``cudaErrorNoDevice`` of the CUDA runtime.
NO_DEVICE = 100
#: Prefixes of the CUDA libraries' file names.
CUDA = re.compile(r"lib(cu|nccl|nvrtc|nvshmem|nvJitLink)\w*\.so\.\d+$")
#: Prefixes of their functions.
CUDA_FUNCTION = re.compile(r"_*(cu|nccl|nvrtc|nvshmem)")
#: Functions that return a text; all others return a status.
TEXT_FUNCTION = re.compile(r".*(String|Name)|ncclGetLastError")
#: The driver's library, which is only loaded if there is a driver.
DRIVER = "libcuda.so.1"


def main() -> int:
    """Writes the libraries that are missing. Returns the exit status."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        print("error: PyTorch is not installed for this interpreter", file=sys.stderr)
        return 1
    folder = Path(spec.origin).parent / "lib"
    symbols = required_symbols(folder)
    missing = {name for name in symbols if not can_load(folder, name)}
    for name in sorted(missing):
        write_stub(folder / name, symbols[name])
    print(f"wrote {len(missing)} CUDA stub libraries to {folder}", file=sys.stderr)
    return 0


def required_symbols(folder: Path) -> dict[str, dict[str, set[str]]]:
    """Functions that PyTorch's libraries in ``folder`` need from each CUDA library, by version.

    Functions without a version are listed under the version ``""`` of the CUDA runtime: which
    library provides them does not matter.
    """
    found: dict[str, dict[str, set[str]]] = defaultdict(lambda: defaultdict(set))
    for library in sorted(folder.glob("lib*.so")):
        dynamic = output("readelf", "--dynamic", "--wide", library)
        needed = re.findall(r"\(NEEDED\).*\[(.*)\]", dynamic)
        for name in needed:
            if CUDA.match(name) and name != DRIVER:
                found[name]  # A library may be needed for none of its functions.
        owner = version_owners(library)
        undefined = output("nm", "--dynamic", "--undefined-only", "--with-symbol-versions", library)
        for line in undefined.splitlines():
            function, _, version = line.split()[-1].partition("@")
            name = owner.get(version.lstrip("@"), "")
            if CUDA.match(name) and name != DRIVER:
                found[name][version.lstrip("@")].add(function)
            elif not version and CUDA_FUNCTION.match(function):
                runtime = next((n for n in [*needed, *found] if n.startswith("libcudart")), None)
                if runtime is not None:
                    found[runtime][""].add(function)
    return found


def version_owners(library: Path) -> dict[str, str]:
    """For each symbol version that ``library`` needs, the name of the library that provides it."""
    owners = {}
    name = ""
    for line in output("readelf", "--version-info", "--wide", library).splitlines():
        if file := re.search(r"\bFile: (\S+)", line):
            name = file[1]
        if version := re.search(r"\bName: (\S+)\s+Flags:", line):
            owners[version[1]] = name
    return owners


def can_load(folder: Path, name: str) -> bool:
    """Whether the dynamic linker finds a library as it would for PyTorch."""
    places = [folder, *(folder.parent.parent / "nvidia").glob("*/lib")]
    if any((place / name).exists() for place in places):
        return True
    try:
        ctypes.CDLL(name)
    except OSError:
        return False
    return True


def write_stub(path: Path, functions: dict[str, set[str]]) -> None:
    """Writes a library with functions, listed by version, that report that there is no device."""
    names = sorted({name for group in functions.values() for name in group})
    source = "".join(
        f'const char *{name}(void) {{ return "no CUDA device (stub library)"; }}\n'
        if TEXT_FUNCTION.fullmatch(name)
        else f"int {name}(void) {{ return {NO_DEVICE}; }}\n"
        for name in names
    )
    versions = "".join(
        f"{version} {{ global: {' '.join(f'{name};' for name in sorted(group))} }};\n"
        for version, group in sorted(functions.items())
        if version and group
    )
    with tempfile.TemporaryDirectory(prefix="cuda-stubs-") as scratch:
        code, script = Path(scratch) / "stub.c", Path(scratch) / "versions"
        code.write_text(source or "int orchestrate_cuda_stub;\n")
        script.write_text(versions)
        command = ["cc", "-shared", "-fPIC", "-nostdlib", "-w", "-fno-builtin"]
        command += [f"-Wl,-soname,{path.name}", "-o", str(path), str(code)]
        if versions:
            command.append(f"-Wl,--version-script,{script}")
        subprocess.run(command, check=True)


def output(*command: str | Path) -> str:
    """Standard output of a command, which must succeed."""
    return subprocess.run(
        [str(part) for part in command], check=True, capture_output=True, text=True
    ).stdout


if __name__ == "__main__":
    sys.exit(main())
