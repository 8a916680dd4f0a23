"""Compile the kernels with other compilers and for other processors, and check their results.

    python tools/cross.py [NAME ...]

The compiled program compares the results with a float64 reference. It does not need torch, so an emulator can
run it. If the compiler or emulator for a target is not installed, the target is skipped, and the tool prints
the names of the missing Debian packages.
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from sanitize import HERE, LEVELS, LIKE_SETUP, compile_driver

FLAGS = [*LIKE_SETUP, "-O3"]


@dataclass(frozen=True)
class Target:
    """A compiler, and an emulator for its programs if they do not run natively."""

    compilers: tuple[str, ...]  # the first one that is installed is used
    emulators: tuple[str, ...] = ()
    packages: str = ""  # Debian packages
    flags: tuple[str, ...] = ()
    levels: tuple[str, ...] = ()
    suffix: str = ""


TARGETS = {
    "clang": Target(("clang++",), packages="clang", levels=tuple(LEVELS)),
    "aarch64": Target(
        ("aarch64-linux-gnu-g++",),
        ("qemu-aarch64", "qemu-aarch64-static"),
        "g++-aarch64-linux-gnu qemu-user",
        ("-static",),
    ),
    # Test only the baseline, because GCC for Windows does not align the stack for 32-byte vectors (GCC bug
    # 54412). Clang, which setup.py uses on Windows, does.
    "windows": Target(
        ("x86_64-w64-mingw32-g++-posix", "x86_64-w64-mingw32-g++"),
        ("wine64", "wine"),
        "g++-mingw-w64-x86-64-posix wine64",
        ("-static",),
        suffix=".exe",
    ),
}


def main() -> int:
    """Run the given targets, or all targets. Return 1 if any of them fails, otherwise 0."""
    names = sys.argv[1:] or list(TARGETS)
    unknown = [name for name in names if name not in TARGETS]
    if unknown:
        raise SystemExit(f"torchlml: NAME must be one of {', '.join(TARGETS)}, but it is {unknown[0]!r}.")
    verdicts = [is_correct(name, TARGETS[name]) for name in names]
    return int(not all(verdicts))


def is_correct(name: str, target: Target) -> bool:
    """Whether the kernels compile for a target and are correct. A skipped target counts as correct."""
    compiler = next(filter(shutil.which, target.compilers), None)
    emulator = next(filter(shutil.which, target.emulators), None)
    if compiler is None or (target.emulators and emulator is None):
        missing = target.compilers[0] if compiler is None else target.emulators[0]
        print(f"{name}: skipped, {missing} is not installed (Debian: apt-get install {target.packages})")
        return True
    began = time.perf_counter()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        program = Path(folder, f"cross{target.suffix}")
        try:
            compile_driver(
                compiler, HERE / "cross_compile_check.cpp", program, [*FLAGS, *target.flags], target.levels
            )
        except subprocess.CalledProcessError:
            print(f"{name}: {compiler} FAILED to compile the kernels (see above)", flush=True)
            return False
        command = [emulator, program] if emulator else [program]
        quiet = os.environ | {"WINEDEBUG": "-all", "WINEPREFIX": f"{folder}/wine"}
        done = subprocess.run(
            command, env=quiet, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
    version = subprocess.run([compiler, "-dumpversion"], capture_output=True, text=True).stdout.strip()
    on = f"under {emulator}" if emulator else f"on this {platform.machine()}"
    print(done.stdout.strip())
    verdict = "correct" if done.returncode == 0 else f"WRONG (exit status {done.returncode})"
    print(f"{name}: {compiler} {version}, {on}: {verdict}, {time.perf_counter() - began:.0f} s", flush=True)
    return done.returncode == 0


if __name__ == "__main__":
    sys.exit(main())
