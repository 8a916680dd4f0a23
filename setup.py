"""Builds the compiled kernel when it can; everything else about the package is in pyproject.toml.

The kernel is optional: without torch in the build environment, without a working compiler, or with
TORCHLML_NO_NATIVE=1, the installation succeeds with plain torch and says so in one line on stderr.
"""

from __future__ import annotations

import importlib.util
import os
import platform
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import setuptools

if int(setuptools.__version__.partition(".")[0]) < 77:  # older ones cannot read pyproject.toml either
    raise SystemExit(
        f"torchlml: building needs setuptools 77 or newer, and this is {setuptools.__version__}: "
        "run `pip install --upgrade setuptools`."
    )

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

SOURCES = Path("torchlml/_kernels/cpu/csrc")
# No fast-math: NaN must stay NaN, and linking it would flush subnormals in the whole process.
FLAGS = ["-std=c++17", "-O3", "-fwrapv", "-fvisibility=hidden", "-ffp-contract=fast"]
FLAGS += ["-fno-math-errno", "-fno-trapping-math", "-fno-signed-zeros"]
FLAGS += ["-g0", "-Wno-psabi", "-Wno-maybe-uninitialized", "-Wno-uninitialized"]  # of GCC's own intrinsics
TARGET = "0x020A000000000000"  # torch 2.10, the oldest whose stable ABI has what bindings.cpp uses
LEVELS = {"v3": "x86-64-v3", "v4": "x86-64-v4"}


def say_plain(why: str) -> None:
    """One line for the person who installs."""
    line = f"torchlml: installing without the compiled kernel (plain torch will be used): {why}"
    print(line, file=sys.stderr)


def torch_home() -> Path | None:
    """Where torch is installed, without importing it."""
    spec = importlib.util.find_spec("torch")
    return Path(spec.origin).parent if spec and spec.origin else None


class BuildKernel(build_ext):
    """One object per instruction set from the same source, and a build that may fail."""

    def run(self) -> None:
        # Asked for now: a build in place that fails forgets its place.
        built = [Path(self.get_ext_fullpath(ext.name)) for ext in self.extensions]
        try:
            super().run()
        except Exception as error:
            say_plain(f"compiling it failed ({type(error).__name__})")
            for path in built:  # what an earlier build left would not fit this source
                path.unlink(missing_ok=True)
            self.extensions = []
            self.distribution.ext_modules = []

    def build_extension(self, ext: Extension) -> None:
        torch = torch_home()
        assert torch is not None
        include = [str(torch / "include"), str(torch / "include/torch/csrc/api/include")]
        levels = LEVELS if platform.machine().lower() in ("x86_64", "amd64") and os.name == "posix" else {}
        macros = [("TORCHLML_X86_LEVELS", None)] if levels else []

        def compile(source: str, name: str, macros: list[tuple[str, str | None]], *flags: str) -> list[str]:
            return self.compiler.compile(
                [str(SOURCES / source)],
                output_dir=str(Path(self.build_temp) / name),
                include_dirs=include,
                macros=macros,
                extra_postargs=[*FLAGS, *flags],
                depends=ext.depends,
            )

        # All at once, those that take longest first: the compiler is a process of its own each time.
        with ThreadPoolExecutor(max_workers=os.cpu_count()) as pool:
            jobs = []
            for level, arch in levels.items():
                table = [("LML_KERNELS", f"kernels_{level}"), ("LML_KERNELS_NAME", f'"{level}"')]
                jobs.append(pool.submit(compile, "kernels.cpp", level, [*macros, *table], f"-march={arch}"))
            jobs.append(pool.submit(compile, "kernels.cpp", "baseline", []))
            version = ("TORCH_TARGET_VERSION", TARGET)
            jobs.append(pool.submit(compile, "bindings.cpp", "bindings", [*macros, version]))
            plain = [path for path in SOURCES.glob("*.cpp") if path.stem not in ("kernels", "bindings")]
            jobs += [pool.submit(compile, path.name, path.stem, []) for path in plain]
        objects = [path for job in jobs for path in job.result()]
        self.compiler.link_shared_object(
            objects,
            self.get_ext_fullpath(ext.name),
            libraries=["torch_cpu"],
            library_dirs=[str(torch / "lib")],
            target_lang="c++",
        )


class Wheel(bdist_wheel):
    """Names the wheel after the build, which may have failed: the name says whether there is a kernel."""

    def run_command(self, command: str) -> None:
        super().run_command(command)
        if command == "build":
            self.root_is_pure = not self.distribution.has_ext_modules()


def options() -> dict[str, object]:
    """What setup() needs to build the kernel, or nothing."""
    if os.environ.get("TORCHLML_NO_NATIVE", "0") not in ("", "0"):
        say_plain("TORCHLML_NO_NATIVE is set")
        return {}
    if torch_home() is None:
        say_plain("there is no torch in the build environment; use --no-build-isolation to compile it")
        return {}
    sources = sorted(str(path) for path in SOURCES.iterdir())
    kernel = Extension(
        "torchlml._kernels.cpu._C",
        [path for path in sources if path.endswith(".cpp")],
        depends=[path for path in sources if path.endswith(".h")],
        language="c++",
        py_limited_api=True,
    )
    return {
        "ext_modules": [kernel],
        "cmdclass": {"build_ext": BuildKernel, "bdist_wheel": Wheel},
        "options": {"bdist_wheel": {"py_limited_api": "cp310"}},
    }


setup(**options())
