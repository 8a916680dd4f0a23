"""Build the compiled kernel if possible; all other package settings are in pyproject.toml.

The kernel is optional. Without torch, without a suitable compiler, or with TORCHLML_NO_NATIVE=1, the
installation succeeds and the library runs in pure PyTorch. The reason why the kernel was not built is
printed to stderr (which pip hides) and written to a file in the kernel's directory. `torchlml info` and the
warning on the first slow call show it.
"""

from __future__ import annotations

import importlib.util
import os
import platform
import re
import shutil
import site
import sys
import sysconfig
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import setuptools

if int(setuptools.__version__.partition(".")[0]) < 77:  # older versions cannot read this pyproject.toml
    raise SystemExit(
        "torchlml: building requires setuptools 77 or newer, but the installed version is "
        f"{setuptools.__version__}. Run `pip install --upgrade setuptools`."
    )

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

SOURCES = Path("torchlml/_cpu/csrc")
REASON = "_absent.txt"  # in the directory of the kernel; loader.py reads it
OLDEST = (2, 10)  # the first torch version whose stable ABI has all functions that bindings.cpp uses
TARGET = f"0x{OLDEST[0]:02X}{OLDEST[1]:02X}000000000000"
HEADER = "include/torch/csrc/stable/library.h"
X86 = platform.machine().lower() in ("x86_64", "amd64")
LEVELS = {"v3": "x86-64-v3", "v4": "x86-64-v4"} if X86 else {}

# For every compiler: signed integers wrap, products and sums may be fused, and errno, floating-point
# exceptions and signed zeros are ignored. Fast-math is not used: NaN must stay NaN, and linking with
# fast-math would flush subnormals in the whole process.
ARITHMETIC = ["-fwrapv", "-ffp-contract=fast", "-fno-math-errno", "-fno-trapping-math", "-fno-signed-zeros"]
UNIX_FLAGS = ["-std=c++17", "-O3", *ARITHMETIC, "-fvisibility=hidden", "-g0"]
UNIX_FLAGS += [
    "-Wno-psabi",
    "-Wno-maybe-uninitialized",
    "-Wno-uninitialized",
]  # suppress warnings that GCC's intrinsics cause
UNIX_FLAGS += ["-Wno-unknown-warning-option"]  # Clang does not know all of these options
# Functions that would require a recent glibc or libstdc++. old_linux.cpp replaces them.
TOO_NEW = ["exp", "log"]
TOO_NEW += ["_ZNSt7__cxx1118basic_stringstreamIcSt11char_traitsIcESaIcEEC1Ev"]
TOO_NEW += ["_ZNSt7__cxx1119basic_ostringstreamIcSt11char_traitsIcESaIcEEC1Ev"]
# On Windows, the compiler is clang-cl, because the kernels use vector extensions of Clang and GCC that MSVC
# lacks. It accepts the options of cl, and those of Clang with the prefix /clang:.
#   /O2    optimize for speed; the kernels are vectorized by hand, so -O3 would add little
#   /EHsc  enable C++ exceptions
#   /MD    use the C++ runtime DLL that torch uses
#   /W0    disable warnings, because Clang for Windows warns about code for other platforms
# OpenMP is not used: threads come from torch.
WINDOWS_FLAGS = ["/std:c++17", "/O2", "/EHsc", "/MD", "/W0", *(f"/clang:{flag}" for flag in ARITHMETIC)]


class NoKernel(Exception):
    """Raised if the kernel cannot be built. The message is the reason, as a clause in the past tense."""


# ------------------------------------------------------------------------------------------ torch


def site_folders() -> Iterator[Path]:
    """Yield the directories where torch may be installed, the most likely one first.

    With pip's build isolation, installed packages cannot be imported, but the interpreter still knows their
    directories. Other tools (uv, build) create their own interpreter for the build; the target environment is
    then on PATH if it was activated. The build reads only the stable-ABI headers and links a library by name,
    so the torch that is found may be installed for any Python version.
    """
    spec = importlib.util.find_spec("torch")
    if spec and spec.origin:
        yield Path(spec.origin).parents[1]
    yield Path(sysconfig.get_path("platlib"))
    yield Path(sysconfig.get_path("purelib"))
    yield from map(Path, site.getsitepackages())
    yield Path(site.getusersitepackages())
    homes = [os.environ.get("VIRTUAL_ENV"), os.environ.get("CONDA_PREFIX"), sys.base_prefix]
    homes += [str(Path(entry).parent) for entry in os.environ.get("PATH", "").split(os.pathsep) if entry]
    for home in map(Path, filter(None, homes)):
        yield from sorted(home.glob("lib/python3*/site-packages"), reverse=True)
        yield home / "Lib" / "site-packages"  # Windows


def torch_version(torch: Path) -> str | None:
    """Return the version of torch in this directory without importing it, or None if torch is not there."""
    try:
        text = (torch / "version.py").read_text(encoding="utf-8")
    except OSError:
        return None
    found = re.search(r"^__version__\s*=\s*['\"]([^'\"]+)", text, re.MULTILINE)
    return found and found[1]


def torch_home() -> Path:
    """Return the directory of the first torch installation that is recent enough."""
    too_old = ""
    for folder in dict.fromkeys(site_folders()):
        version = torch_version(folder / "torch")
        if version is None:
            continue
        numbers = tuple(int(number) for number in re.findall(r"\d+", version)[:2])
        if numbers >= OLDEST and (folder / "torch" / HEADER).exists():
            return folder / "torch"
        too_old = too_old or f" (only {version} in {folder})"
    raise NoKernel(f"no torch {OLDEST[0]}.{OLDEST[1]} or newer was found to compile it with{too_old}")


# ------------------------------------------------------------------------------------------ compiling


class BuildKernel(build_ext):
    """A `build_ext` that compiles the kernel for each instruction set. A failed build raises no error."""

    def run(self) -> None:
        # Compute the path now, because a failed in-place build leaves `self.inplace` cleared.
        built = Path(self.get_ext_fullpath(self.extensions[0].name))
        reason = built.parent / REASON
        reason.unlink(missing_ok=True)
        try:
            if os.environ.get("TORCHLML_NO_NATIVE", "0") not in ("", "0"):
                raise NoKernel("`TORCHLML_NO_NATIVE` was set")
            self.torch = torch_home()
            super().run()
        except Exception as error:
            why = reason_of(error)
            print(
                f"torchlml: installing without the compiled kernel (pure PyTorch will be used): {why}",
                file=sys.stderr,
            )
            built.unlink(missing_ok=True)  # a kernel from an earlier build would not match this source
            reason.parent.mkdir(parents=True, exist_ok=True)
            reason.write_text(why + "\n", encoding="utf-8")
            self.extensions = []
            self.distribution.ext_modules = []

    def build_extension(self, ext: Extension) -> None:
        windows = self.compiler.compiler_type == "msvc"
        if windows:
            use_clang_cl(self.compiler)
        include = [str(self.torch / "include"), str(self.torch / "include/torch/csrc/api/include")]
        macros = [("TORCHLML_X86_LEVELS", None)] if LEVELS else []

        def compile(source: str, name: str, macros: list[tuple[str, str | None]], *flags: str) -> list[str]:
            return self.compiler.compile(
                [str(SOURCES / source)],
                output_dir=str(Path(self.build_temp) / name),
                include_dirs=include,
                macros=macros,
                extra_postargs=[*(WINDOWS_FLAGS if windows else UNIX_FLAGS), *flags],
                depends=ext.depends,
            )

        # Compile in parallel and start the longest jobs first. MAX_JOBS limits the number of processes, as in
        # torch's own builds.
        with ThreadPoolExecutor(max_workers=int(os.environ.get("MAX_JOBS") or os.cpu_count() or 1)) as pool:
            jobs = []
            for level, arch in LEVELS.items():
                table = [("LML_KERNELS", f"kernels_{level}"), ("LML_KERNELS_NAME", f'"{level}"')]
                march = f"/clang:-march={arch}" if windows else f"-march={arch}"
                jobs.append(pool.submit(compile, "kernels.cpp", level, [*macros, *table], march))
            jobs.append(pool.submit(compile, "kernels.cpp", "baseline", []))
            version = ("TORCH_TARGET_VERSION", TARGET)
            jobs.append(pool.submit(compile, "bindings.cpp", "bindings", [*macros, version]))
            plain = [path for path in SOURCES.glob("*.cpp") if path.stem not in ("kernels", "bindings")]
            jobs += [pool.submit(compile, path.name, path.stem, macros) for path in plain]
        objects = [path for job in jobs for path in job.result()]
        # Link torch by name only: callers import torch before they load the kernel. macOS needs an rpath.
        options = ["-Wl,-rpath,@loader_path/../../../torch/lib"] if sys.platform == "darwin" else []
        if platform.libc_ver()[0] == "glibc":
            options += [f"-Wl,--wrap={name}" for name in TOO_NEW]
        self.compiler.link_shared_object(
            objects,
            self.get_ext_fullpath(ext.name),
            libraries=["torch_cpu"],
            library_dirs=[str(self.torch / "lib")],
            extra_postargs=options,
            target_lang="c++",
        )


def use_clang_cl(compiler: object) -> None:
    """Make setuptools call clang-cl on Windows, with the linker and the headers that it found for cl."""
    if not compiler.initialized:
        compiler.initialize()
    found = shutil.which("clang-cl", path=os.pathsep.join([compiler._paths, os.environ.get("PATH", "")]))
    if found is None:
        raise NoKernel(
            "clang-cl, which is required on Windows, was not on PATH (select `C++ Clang tools for Windows` "
            "in the Visual Studio Installer)"
        )
    compiler.cc, compiler.compile_options = found, ["/nologo", "/DNDEBUG"]


def reason_of(error: Exception) -> str:
    """Return the reason why the kernel was not built, as a clause in the past tense."""
    if isinstance(error, NoKernel):
        return str(error)
    said = str(error) or type(error).__name__
    if "No such file or directory" in said:  # the missing file is the compiler, because the sources exist
        return f"no C++ compiler was found ({said.splitlines()[0][:100]})"
    status = re.search(r"exit (?:status|code) (-?\d+)", said)
    what = f"the compiler failed with {status[0]}" if status else said.splitlines()[0][:100]
    return f"compiling it failed ({what}; `pip install -v` shows its output)"


class Wheel(bdist_wheel):
    """A `bdist_wheel` command whose wheel is platform-specific only if the build produced a kernel."""

    def run_command(self, command: str) -> None:
        super().run_command(command)
        if command == "build":
            self.root_is_pure = not self.distribution.has_ext_modules()


if __name__ == "__main__":
    sources = sorted(str(path) for path in SOURCES.iterdir())
    kernel = Extension(
        "torchlml._cpu._C",
        [path for path in sources if path.endswith(".cpp")],
        depends=[path for path in sources if path.endswith(".h")],
        language="c++",
        py_limited_api=True,
    )
    setup(
        ext_modules=[kernel],
        cmdclass={"build_ext": BuildKernel, "bdist_wheel": Wheel},
        options={"bdist_wheel": {"py_limited_api": "cp310"}},
    )
