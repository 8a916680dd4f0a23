"""Lets a torch that was built for CUDA be imported without NVIDIA's libraries, which are gigabytes.

Package indexes have torch for Linux mostly as a build for CUDA. Its CPU part is what the CPU kernel is tested
with, but the dynamic linker wants every library that is named. So each missing one gets a stand-in: a library
of that name with the functions torch asks it for, which all answer 100, "there is no device". Nothing that
touches a GPU works with them, and `torch.cuda.is_available()` is False.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections import defaultdict
from pathlib import Path

SYSTEM = re.compile(r"ld-linux|lib(c|m|dl|rt|pthread|gcc_s|stdc\+\+|gomp)\.so")
OF_NVIDIA = re.compile(r"cu[A-Z]|cu(da|fft|rand|blas|sparse|solver|dnn|pti)|__cuda|nccl|nvshmem|nvrtc")


def add_stand_ins(folder: Path) -> list[str]:
    """Write what is missing into torch's folder of libraries, and give back the names."""
    present = [path for path in folder.iterdir() if ".so" in path.name]
    needed = {name for path in present for name in _needed(path)}
    missing = sorted(name for name in needed if not SYSTEM.match(name) and not (folder / name).exists())
    if not missing:
        return []
    wanted, loose, defined = _symbols(present)
    versions: dict[str, set[str]] = defaultdict(
        set
    )  # a library's versions: its own name, or one like NVSHMEM
    for version in wanted:
        versions[next((name for name in missing if version.lower() in name.lower()), "")].add(version)
    for name in missing:
        # What is asked for without a version may be in any library: all of it is in the first.
        extra = {s for s in loose - defined if OF_NVIDIA.match(s)} if name == missing[0] else set()
        _compile(folder / name, {version: wanted[version] for version in versions[name]}, extra)
    return missing


def _needed(library: Path) -> list[str]:
    return re.findall(r"NEEDED.*\[(.*)\]", _said("readelf", "-dW", library))


def _symbols(libraries: list[Path]) -> tuple[dict[str, set[str]], set[str], set[str]]:
    """What the libraries ask for, by version and without one, and what they have themselves."""
    wanted: dict[str, set[str]] = defaultdict(set)
    loose, defined = set(), set()
    for library in libraries:
        for line in _said("nm", "-D", library).splitlines():
            *_, kind, symbol = line.split()
            name, _, version = symbol.partition("@")
            if kind != "U":
                defined.add(name)
            elif version:
                wanted[version.lstrip("@")].add(name)
            else:
                loose.add(name)
    return wanted, loose, defined


def _compile(library: Path, versioned: dict[str, set[str]], extra: set[str]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        source, versions = Path(folder, "source.c"), Path(folder, "versions")
        names = sorted(set().union(extra, *versioned.values()))
        source.write_text("".join(f"int {name}(void) {{ return 100; }}\n" for name in names))
        versions.write_text(
            "".join(f"{v} {{ {'; '.join(sorted(s))}; }};\n" for v, s in versioned.items() if s)
        )
        command = ["cc", "-shared", "-fPIC", "-fno-builtin", "-w", f"-Wl,-soname,{library.name}", source]
        if versioned:
            command.append(f"-Wl,--version-script={versions}")
        subprocess.run([*command, "-o", library], check=True)


def _said(*command: str | Path) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout
