"""Compiles the kernels by other compilers and for other processors, and compares them with a float64 truth.

    python tools/cross.py [NAME ...]

Needs no torch, so that an emulator is enough to run what a cross compiler made. A compiler or an emulator
that is not installed is named with the package of Debian that has it, and the others go on.
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
    """A compiler, and what runs its programs: nothing for this machine's own."""

    compilers: tuple[str, ...]  # the first that is installed
    emulators: tuple[str, ...] = ()
    packages: str = ""  # of Debian
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
    # The baseline alone: GCC for Windows does not align the stack for vectors of 32 bytes (bug 54412). What
    # setup.py uses on Windows is Clang, which does.
    "windows": Target(
        ("x86_64-w64-mingw32-g++-posix", "x86_64-w64-mingw32-g++"),
        ("wine64", "wine"),
        "g++-mingw-w64-x86-64-posix wine64",
        ("-static",),
        suffix=".exe",
    ),
}


def main() -> int:
    """Run the targets named, or all; 1 if the numbers of one are wrong or it does not compile."""
    names = sys.argv[1:] or list(TARGETS)
    unknown = [name for name in names if name not in TARGETS]
    if unknown:
        raise SystemExit(f"torchlml: {unknown[0]!r} is not one of {', '.join(TARGETS)}.")
    verdicts = [right(name, TARGETS[name]) for name in names]
    return int(not all(verdicts))


def right(name: str, target: Target) -> bool:
    """Compile and run one target; True if it is right or cannot be tried here."""
    compiler = next(filter(shutil.which, target.compilers), None)
    emulator = next(filter(shutil.which, target.emulators), None)
    if compiler is None or (target.emulators and emulator is None):
        what = f"no {target.compilers[0]}" if compiler is None else f"no {target.emulators[0]}"
        print(f"{name}: not tried, as there is {what} here (Debian: apt-get install {target.packages})")
        return True
    began = time.perf_counter()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        program = Path(folder, f"cross{target.suffix}")
        try:
            compile_driver(
                compiler, HERE / "cross_compile_check.cpp", program, [*FLAGS, *target.flags], target.levels
            )
        except subprocess.CalledProcessError:
            print(f"{name}: {compiler} DOES NOT COMPILE the kernels, as it says above", flush=True)
            return False
        command = [emulator, program] if emulator else [program]
        quiet = os.environ | {"WINEDEBUG": "-all", "WINEPREFIX": f"{folder}/wine"}
        done = subprocess.run(
            command, env=quiet, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
    version = subprocess.run([compiler, "-dumpversion"], capture_output=True, text=True).stdout.strip()
    on = f"under {emulator}" if emulator else f"on this {platform.machine()}"
    print(done.stdout.strip())
    verdict = "right" if done.returncode == 0 else f"WRONG (exit {done.returncode})"
    print(f"{name}: {compiler} {version}, {on}: {verdict}, {time.perf_counter() - began:.0f} s", flush=True)
    return done.returncode == 0


if __name__ == "__main__":
    sys.exit(main())
