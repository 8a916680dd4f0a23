"""Make a CUDA build of torch importable without NVIDIA's libraries, which take up gigabytes.

Most package indexes offer torch for Linux only as a CUDA build. Tests of the CPU kernel do not use CUDA, but
the dynamic linker requires every library that torch is linked to. This module therefore creates a stand-in
for each missing library, with the functions that torch imports. All of these functions return 100, the error
code for "no device". With the stand-ins, `torch.cuda.is_available()` is False and GPU functions do not work.
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
    """Write stand-ins for the missing libraries into torch's library directory, and return their names."""
    present = [path for path in folder.iterdir() if ".so" in path.name]
    needed = {name for path in present for name in _needed(path)}
    missing = sorted(name for name in needed if not SYSTEM.match(name) and not (folder / name).exists())
    if not missing:
        return []
    wanted, loose, defined = _symbols(present)
    # The name of a symbol version, such as NVSHMEM, is part of the name of its library.
    versions: dict[str, set[str]] = defaultdict(set)
    for version in wanted:
        versions[next((name for name in missing if version.lower() in name.lower()), "")].add(version)
    for name in missing:
        # Symbols without a version may be in any library, so the first stand-in defines all of them.
        extra = {s for s in loose - defined if OF_NVIDIA.match(s)} if name == missing[0] else set()
        _compile(folder / name, {version: wanted[version] for version in versions[name]}, extra)
    return missing


def _needed(library: Path) -> list[str]:
    return re.findall(r"NEEDED.*\[(.*)\]", _output("readelf", "-dW", library))


def _symbols(libraries: list[Path]) -> tuple[dict[str, set[str]], set[str], set[str]]:
    """Return the undefined symbols by version, those without a version, and the defined symbols."""
    wanted: dict[str, set[str]] = defaultdict(set)
    loose, defined = set(), set()
    for library in libraries:
        for line in _output("nm", "-D", library).splitlines():
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


def _output(*command: str | Path) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout
