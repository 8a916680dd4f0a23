"""Installing the kernel: setup.py builds it or reports why it cannot, and loader.py loads it."""

from __future__ import annotations

import importlib.util
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import warnings
import zipfile
from importlib import metadata
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch

from tests.support.cpu_kernel import SOURCES
from tests.support.fresh import ROOT, run
from torchlml._cpu import loader

# ---------------------------------------------------------------------------------------- loading


def test_pure_pytorch_on_request() -> None:
    code = "from torchlml._cpu import loader; print(loader.loaded(), loader.instruction_set())"
    result = run(code, TORCHLML_KERNEL="torch")
    assert result.stdout.split() == ["False", "None"]


def test_unknown_request() -> None:
    code = """
import os
try:
    import torchlml
except ImportError as error:
    print(error.name, error)
del os.environ["TORCHLML_KERNEL"]
import torchlml
"""
    result = run(code, TORCHLML_KERNEL="cuda")
    assert result.returncode == 0, result.stderr
    assert result.stdout == (
        "torchlml The environment variable `TORCHLML_KERNEL` must be 'torch', 'native' or unset, "
        "but it is 'cuda'.\n"
    )


def installed_at(folder: Path, monkeypatch: pytest.MonkeyPatch, choice: str) -> None:
    """Simulate an installation of torchlml in `folder`, with nothing loaded yet."""
    monkeypatch.setattr(loader, "__file__", str(folder / "loader.py"))
    monkeypatch.setattr(loader, "_library", None)
    monkeypatch.setattr(loader, "_absence", loader._absence)  # so that it is restored after the test
    monkeypatch.setattr(loader, "_warned", False)
    monkeypatch.setenv("TORCHLML_KERNEL", choice)


REPAIR = "; with a C++ compiler and torch installed, `"


def test_absent_kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "_absent.txt").write_text("no torch was found\n")  # in the format that setup.py writes
    installed_at(tmp_path, monkeypatch, "")
    loader.load()
    assert not loader.loaded()
    assert loader.instruction_set() is None
    said = loader.absence()
    assert said is not None
    assert said.startswith(f"when torchlml was installed, no torch was found{REPAIR}")
    installed_at(tmp_path, monkeypatch, "native")
    with pytest.raises(ImportError, match=r"no compiled kernel: when torchlml was .* no torch") as raised:
        loader.load()
    assert raised.value.name == "torchlml"


def broken(folder: Path) -> None:
    (folder / "_C.abi3.so").write_bytes(b"not a library")


def foreign(folder: Path) -> None:
    other = next(Path(torch.__file__).parent.glob("lib/libshm.so"), None)
    if other is None:
        pytest.skip("no other shared library is available")
    shutil.copy(other, folder / "_C.abi3.so")


@pytest.mark.parametrize("make", [broken, foreign])
def test_a_library_without_the_kernel(make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make(tmp_path)
    installed_at(tmp_path, monkeypatch, "")
    with pytest.warns(
        UserWarning, match="falls back to pure PyTorch.*_C.abi3.so could not be loaded .*; with"
    ) as said:
        loader.load()
    assert len(said) == 1
    assert not loader.loaded()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loader.warn_of_absence()  # the warning was already shown
    installed_at(tmp_path, monkeypatch, "native")
    with pytest.raises(ImportError, match=r"'native', but _C\.abi3\.so could not be loaded"):
        loader.load()


def came_from(url: str, **more: object) -> SimpleNamespace:
    return SimpleNamespace(read_text=lambda name: json.dumps({"url": url, **more}) if url else None)


@pytest.mark.parametrize(
    ("distribution", "target"),
    [
        (came_from(""), "torchlml"),
        (came_from("file:///a%20b/torchlml-1.tar.gz", archive_info={}), "/a b/torchlml-1.tar.gz"),
        (came_from("file:///work", dir_info={"editable": True}), "--editable /work"),
    ],
)
@pytest.mark.skipif(os.name == "nt", reason="paths differ on Windows")
def test_the_suggested_command_reinstalls_from_the_same_source(
    distribution, target, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metadata, "distribution", lambda name: distribution)
    assert loader._repair() == f"pip install --force-reinstall --no-deps --no-cache-dir {target}"


def test_torch_too_old() -> None:
    result = run("import torch; torch.__version__ = '2.9.1+cpu'; import torchlml")
    assert result.returncode == 1
    assert result.stderr.splitlines()[-1] == (
        "ImportError: torchlml requires torch 2.10 or newer, but the installed version is 2.9.1+cpu. "
        "Run `pip install --upgrade torch`."
    )


# ---------------------------------------------------------------------------------------- building


# A fake compiler that records the call and creates an empty output file.
STUB = """#!/bin/sh
echo call >> "$CALLS"
while [ $# -gt 0 ]; do
    if [ "$1" = -o ]; then : > "$2"; fi
    shift
done
"""


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A minimal checkout that can be built."""
    if not (ROOT / "setup.py").exists():
        pytest.skip("not running from a source checkout")
    folder = tmp_path / "checkout"
    folder.mkdir()
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder)
    shutil.copytree(ROOT / SOURCES, folder / SOURCES)
    shutil.copy(ROOT / "torchlml" / "__init__.py", folder / "torchlml")  # setup.py reads the version from it
    return folder


def build(folder: Path, *command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    settings = {key: value for key, value in os.environ.items() if key != "TORCHLML_NO_NATIVE"}
    return subprocess.run(
        [sys.executable, *command],
        env=settings | environment,
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize(
    ("environment", "why"),
    [
        (
            {"CC": "false", "CXX": "false"},
            r"compiling it failed \(the compiler failed with exit (status|code) 1;",
        ),
        (
            {"CC": "no-such-compiler", "CXX": "no-such-compiler"},
            r"no C\+\+ compiler was found \(.*no-such-compiler",
        ),
        ({"TORCHLML_NO_NATIVE": "1"}, "`TORCHLML_NO_NATIVE` was set"),
    ],
    ids=["failing compiler", "no compiler", "by request"],
)
def test_setup_succeeds_without_the_kernel_and_reports_why(
    checkout: Path, environment: dict[str, str], why: str
) -> None:
    old, reason = (checkout / SOURCES.parent / name for name in ("_C.abi3.so", "_absent.txt"))
    old.touch()
    result = build(checkout, "setup.py", "-q", "build_ext", "--inplace", **environment)
    assert result.returncode == 0, result.stderr
    said = rf"^torchlml: installing without the compiled kernel \(pure PyTorch will be used\): {why}"
    assert re.search(said, result.stderr, re.MULTILINE)
    assert re.match(why, reason.read_text())
    assert not old.exists()  # an old library would not match these sources


# The build hooks in the order in which pip calls them. Each runs in a new process.
HOOKS = {
    "wheel": ("prepare_metadata_for_build_wheel", "build_wheel"),
    "editable": ("prepare_metadata_for_build_editable", "build_editable"),
}


def run_hooks(folder: Path, kind: str, **environment: str) -> str:
    """Run the hooks and return the name of the wheel."""
    name = ""
    for hook in HOOKS[kind]:
        result = build(
            folder, "-c", f"from setuptools import build_meta; print(build_meta.{hook}('out'))", **environment
        )
        assert result.returncode == 0, result.stderr
        name = result.stdout.split()[-1]
    return name


@pytest.mark.parametrize("kind", HOOKS)
def test_an_installation_compiles_every_file_once(checkout: Path, tmp_path: Path, kind: str) -> None:
    compiler, calls = tmp_path / "compiler", tmp_path / "calls"
    compiler.write_text(STUB)
    compiler.chmod(0o755)
    (checkout / "out").mkdir()
    reason = checkout / SOURCES.parent / "_absent.txt"
    reason.touch()  # left by an earlier failed build
    wheel = run_hooks(checkout, kind, CC=str(compiler), CXX=str(compiler), CALLS=str(calls))
    assert "none-any" not in wheel
    assert kind == "wheel" or not reason.exists()
    levels = 3 if platform.machine().lower() in ("x86_64", "amd64") else 1
    others = (
        len(list((ROOT / SOURCES).glob("*.cpp"))) - 1
    )  # all but kernels.cpp, which is compiled for each level
    assert len(calls.read_text().splitlines()) == levels + others + 1  # plus one linker call


def test_a_wheel_without_the_kernel_is_platform_independent_and_states_why(checkout: Path) -> None:
    (checkout / "out").mkdir()
    wheel = run_hooks(checkout, "wheel", TORCHLML_NO_NATIVE="1")
    assert wheel.endswith("-py3-none-any.whl")
    with zipfile.ZipFile(checkout / "out" / wheel) as archive:
        assert archive.read("torchlml/_cpu/_absent.txt") == b"`TORCHLML_NO_NATIVE` was set\n"


def test_setuptools_too_old(checkout: Path, tmp_path: Path) -> None:
    (tmp_path / "setuptools.py").write_text("__version__ = '69.5.1'")
    result = build(checkout, "setup.py", "--name", PYTHONPATH=str(tmp_path))
    assert result.returncode == 1
    assert result.stderr == (
        "torchlml: building requires setuptools 77 or newer, but the installed version is 69.5.1. "
        "Run `pip install --upgrade setuptools`.\n"
    )


# ---------------------------------------------------------------------------------------- finding torch


@pytest.fixture
def setup() -> ModuleType:
    """setup.py, imported as a module without building anything."""
    path = ROOT / "setup.py"
    if not path.exists():
        pytest.skip("not running from a source checkout")
    spec = importlib.util.spec_from_file_location("setup_of_torchlml", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def pretend_torch(site: Path, version: str) -> Path:
    home = site / "torch"
    (home / "include/torch/csrc/stable").mkdir(parents=True)
    (home / "include/torch/csrc/stable/library.h").touch()
    (home / "version.py").write_text(f"__all__ = ['__version__']\n__version__ = '{version}'\n")
    return home


def test_torch_is_found_even_if_it_cannot_be_imported(setup, monkeypatch: pytest.MonkeyPatch) -> None:
    # As in pip's build isolation: the interpreter is the same, but its packages are not visible.
    monkeypatch.setattr(setup.importlib.util, "find_spec", lambda name: None)
    assert setup.torch_home() == Path(torch.__file__).parent


def test_torch_is_found_if_the_build_has_its_own_interpreter(
    setup, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(setup.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(setup.sysconfig, "get_path", lambda name: str(tmp_path / "build"))
    monkeypatch.setattr(setup.site, "getsitepackages", list)
    monkeypatch.setattr(setup.site, "getusersitepackages", lambda: str(tmp_path / "user"))
    monkeypatch.setattr(setup.sys, "base_prefix", str(tmp_path / "base"))
    for name in ("VIRTUAL_ENV", "CONDA_PREFIX"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PATH", os.pathsep.join(str(tmp_path / name / "bin") for name in ("old", "new")))
    with pytest.raises(setup.NoKernel, match=r"^no torch 2\.10 or newer was found to compile it with$"):
        setup.torch_home()
    pretend_torch(tmp_path / "old/lib/python3.12/site-packages", "2.9.1+cpu")
    with pytest.raises(setup.NoKernel, match=r"compile it with \(only 2\.9\.1\+cpu in .*site-packages\)$"):
        setup.torch_home()
    new = pretend_torch(tmp_path / "new/lib/python3.13/site-packages", "2.11.0a0+git1")
    assert setup.torch_home() == new


def test_windows_needs_clang_cl(setup, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = SimpleNamespace(initialized=True, _paths="", cc="cl.exe", compile_options=["/GL"])
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(setup.NoKernel, match=r"clang-cl.*not on PATH"):
        setup.use_clang_cl(compiler)
    program = tmp_path / ("clang-cl.exe" if os.name == "nt" else "clang-cl")
    program.touch(0o755)
    setup.use_clang_cl(compiler)
    assert compiler.cc == str(program)


@pytest.mark.skipif(shutil.which("clang++") is None, reason="clang is not installed")
@pytest.mark.parametrize("level", ["", "x86-64-v3", "x86-64-v4"])
def test_clang_for_windows_accepts_the_flags(setup, tmp_path: Path, level: str) -> None:
    # Without the Windows headers, only a file without includes can be compiled.
    source = tmp_path / "vectors.cpp"
    source.write_text(VECTORS)
    flags = [*setup.WINDOWS_FLAGS, *([f"/clang:-march={level}"] if level else []), "/c", "-Werror"]
    windows = ["--driver-mode=cl", "--target=x86_64-pc-windows-msvc"]
    subprocess.run(["clang++", *windows, *flags, str(source), f"/Fo{tmp_path / 'vectors.obj'}"], check=True)


VECTORS = """
typedef float V __attribute__((vector_size(32)));
__declspec(dllexport) float sum(const float* p) {
  V a = {};
  if (!p) throw 1;
  for (int i = 0; i < 8; ++i) a[i] = p[i];
  a = a * a + 1.0f;
  return a[0] + a[7];
}
"""
