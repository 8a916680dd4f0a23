"""Compiles the kernels with AddressSanitizer and UBSan and drives them over special rows.

    python tools/sanitize.py

Needs g++ or clang++ (CXX chooses) but neither torch nor Python's headers: the kernels are plain C++.
"""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
SOURCES = HERE.parent / "torchlml" / "_kernels" / "cpu" / "csrc"
SANITIZE = ["-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-fno-omit-frame-pointer"]
FLAGS = ["-std=c++17", "-O1", "-g1", "-fwrapv", "-ffp-contract=fast", "-fno-math-errno", "-fno-trapping-math"]
FLAGS += ["-fno-signed-zeros", "-Wno-psabi", *SANITIZE]


def main() -> int:
    """Compiles, runs, and returns the driver's exit status."""
    compiler = os.environ.get("CXX", "c++")
    levels = ["v3", "v4"] if platform.machine().lower() in ("x86_64", "amd64") else []
    macros = ["-DTORCHLML_X86_LEVELS"] if levels else []
    with tempfile.TemporaryDirectory() as folder:
        jobs = [("driver", HERE / "sanitize.cpp", macros), ("baseline", SOURCES / "kernels.cpp", [])]
        jobs += [(path.stem, path, []) for path in sorted(SOURCES.glob("careful*.cpp"))]
        for level in levels:
            table = [
                f"-DLML_KERNELS=kernels_{level}",
                f'-DLML_KERNELS_NAME="{level}"',
                f"-march=x86-64-{level}",
            ]
            jobs.append((level, SOURCES / "kernels.cpp", [*macros, *table]))
        objects = []
        for name, source, flags in jobs:
            objects.append(f"{folder}/{name}.o")
            print(f"compiling {source.name} ({name})", flush=True)
            subprocess.run([compiler, *FLAGS, *flags, "-c", str(source), "-o", objects[-1]], check=True)
        subprocess.run([compiler, *SANITIZE, *objects, "-o", f"{folder}/driver"], check=True)
        return subprocess.run([f"{folder}/driver"], check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
