"""Run a Python program with the AVX-512 kernels on a processor that has only AVX2.

    python tools/emulate_avx512.py tools/fuzz.py --seconds 600
    python tools/emulate_avx512.py -m pytest tests/library/test_special_rows.py

The kernels are compiled with 64-byte vectors, which the compiler splits into AVX2 instructions, and
`emulated_avx512.h` replaces the AVX-512 intrinsics. This tests the results of the AVX-512 code, but not its
speed. The build is kept in build/avx512, with a copy of the library.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
BUILD = ROOT / "build" / "avx512"
HEADER = ROOT / "tools" / "emulated_avx512.h"


def main() -> int:
    """Build the kernels, then run the program given on the command line. Return its exit status."""
    if len(sys.argv) == 1:
        raise SystemExit(f"torchlml: no program was given.\n{__doc__}")
    build()
    run = [sys.executable, *sys.argv[1:]]
    return subprocess.call(run, env={**os.environ, "PYTHONPATH": str(BUILD), "TORCHLML_KERNEL": "native"})


def build() -> None:
    """Compile the kernels, copy the library, and check that it uses the emulated instructions."""
    print("Compiling the AVX-512 kernels for AVX2 (about two minutes unless the build is up to date) ...")
    setup = [
        sys.executable,
        "setup.py",
        "-q",
        "build_ext",
        "--build-lib",
        BUILD,
        "--build-temp",
        BUILD / "temp",
    ]
    flags = f"-include {HEADER}"
    subprocess.run(setup, cwd=ROOT, check=True, env={**os.environ, "CFLAGS": flags, "CXXFLAGS": flags})
    without_kernel = shutil.ignore_patterns("_C*", "csrc", "__pycache__")
    shutil.copytree(ROOT / "torchlml", BUILD / "torchlml", ignore=without_kernel, dirs_exist_ok=True)
    question = "from torchlml._cpu import loader; print(loader.instruction_set())"
    answer = subprocess.run(
        [sys.executable, "-c", question],
        cwd=BUILD,
        env={**os.environ, "PYTHONPATH": str(BUILD)},
        check=True,
        capture_output=True,
        text=True,
    )
    if answer.stdout.strip() != "v4 (emulated)":
        raise SystemExit(
            "torchlml: the emulation needs a processor with AVX2 and without AVX-512, but the kernel "
            f"selected {answer.stdout.strip()!r}."
        )


if __name__ == "__main__":
    raise SystemExit(main())
