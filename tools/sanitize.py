"""Compile the kernels with AddressSanitizer and UBSan, and run them on special rows.

    python tools/sanitize.py

This needs a C++ compiler, g++ or clang++, which can be selected with the variable CXX. It needs neither torch
nor the Python headers, because the kernels are standalone C++.
"""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

HERE = Path(__file__).resolve().parent
SOURCES = HERE.parent / "torchlml" / "_cpu" / "csrc"
LEVELS = ("v3", "v4") if platform.machine().lower() in ("x86_64", "amd64") else ()
# The flags from setup.py that affect numerical results, without the optimization level.
LIKE_SETUP = ["-std=c++17", "-fwrapv", "-ffp-contract=fast", "-fno-math-errno", "-fno-trapping-math"]
LIKE_SETUP += ["-fno-signed-zeros", "-Wno-psabi"]
SANITIZE = ["-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-fno-omit-frame-pointer"]


def compile_driver(
    compiler: str, driver: Path, program: Path, flags: Sequence[str], levels: Sequence[str]
) -> None:
    """Compile the kernels, once for each instruction set, and link them with a driver into a program."""
    macros = ["-DTORCHLML_X86_LEVELS"] if levels else []
    jobs = [("driver", driver, macros), ("baseline", SOURCES / "kernels.cpp", [])]
    others = ("kernels", "bindings", "old_linux")  # old_linux is only for distributed binaries
    plain = [path for path in sorted(SOURCES.glob("*.cpp")) if path.stem not in others]
    jobs += [(path.stem, path, macros) for path in plain]
    for level in levels:
        table = [f"-DLML_KERNELS=kernels_{level}", f'-DLML_KERNELS_NAME="{level}"', f"-march=x86-64-{level}"]
        jobs.append((level, SOURCES / "kernels.cpp", [*macros, *table]))
    objects = []
    for name, source, more in jobs:
        objects.append(str(program.with_name(f"{name}.o")))
        print(f"compiling {source.name} ({name})", flush=True)
        subprocess.run([compiler, *flags, *more, "-c", str(source), "-o", objects[-1]], check=True)
    subprocess.run([compiler, *flags, *objects, "-o", str(program)], check=True)


def main() -> int:
    """Compile and run the driver, and return its exit status."""
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder, "driver")
        flags = [*LIKE_SETUP, "-O1", "-g1", *SANITIZE]
        compile_driver(os.environ.get("CXX", "c++"), HERE / "sanitize.cpp", program, flags, LEVELS)
        return subprocess.run([program], check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
