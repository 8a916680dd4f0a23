"""Audits the wheel, installs wheel and sdist into clean environments, tests them there and takes them out.

    python tools/test_wheel.py dist --environments build/environments

An environment is a Python and a torch. It is made once and kept; torchlml is installed into it, checked by
`check_install.py` and uninstalled each time. The sdist is compiled in the first environment, by a plain `pip
install` in isolation. A Python that the machine does not have is named at the end and not tested.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from cuda_stand_ins import add_stand_ins

CHECK = Path(__file__).resolve().parent / "check_install.py"
# Every Python once, and the oldest and the tested torch twice each: the kernel knows nothing of Python.
MATRIX = ("3.10:2.10.0", "3.11:2.13.0", "3.12:2.10.0", "3.13:2.13.0")
GIGABYTES = re.compile(r"nvidia|cuda|triton")  # requirements of torch for GPUs that the CPU does not need


def main() -> None:
    """Audit, install and test; the first failure ends it with a sentence or the output of what failed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("dist", type=Path, help="the folder with one wheel and one sdist")
    parser.add_argument("--environments", type=Path, required=True, help="where the environments are kept")
    parser.add_argument("--matrix", nargs="+", default=MATRIX, metavar="PYTHON:TORCH")
    options = parser.parse_args()
    wheel, sdist = only(options.dist, "*.whl"), only(options.dist, "*.tar.gz")
    audit(wheel)
    missing, tested = [], 0
    for pair in options.matrix:
        version, _, torch = pair.partition(":")
        interpreter = find_python(version)
        if interpreter is None:
            missing.append(version)
            continue
        python = environment(options.environments.resolve(), interpreter, version, torch)
        artefacts = [wheel] if tested else [wheel, sdist]
        for artefact in artefacts:
            try_out(python, artefact)
        tested += 1
    if missing:
        print(f"not tested, as this machine does not have them: Python {', '.join(missing)}")
    if not tested:
        raise SystemExit("torchlml: nothing was tested: this machine has none of the Pythons asked for.")


def only(folder: Path, pattern: str) -> Path:
    """The one file of this kind in a folder."""
    found = sorted(folder.glob(pattern))
    if len(found) != 1:
        raise SystemExit(
            f"torchlml: {folder} must have one {pattern}, and has {len(found)}: run `make wheel sdist`."
        )
    return found[0].resolve()


# ---------------------------------------------------------------------------------------- audits


def audit(wheel: Path) -> None:
    """What the wheel says of itself is true: its platform, the stable ABI, and nothing of torch's inside."""
    with zipfile.ZipFile(wheel) as archive, tempfile.TemporaryDirectory() as folder:
        kernels = [name for name in archive.namelist() if name.endswith((".so", ".pyd", ".dylib"))]
        if [name.rpartition("/")[2].partition(".")[0] for name in kernels] != ["_C"]:
            raise SystemExit(
                f"torchlml: {wheel.name} must have the kernel and no other library, and has {kernels}."
            )
        kernel = archive.extract(kernels[0], folder)
        run(tool("torch-abi-audit"), "--check", "both", kernel)
    print(f"{wheel.name}: {wheel.stat().st_size // 1024} KiB, stable ABI of torch")
    if sys.platform == "linux":
        said = " ".join(run(tool("auditwheel"), "show", wheel).split())
        tag = wheel.stem.rpartition("-")[2].partition(".")[0]
        # The platform of the wheel but for torch's library, which no Linux has.
        if not tag.startswith("manylinux") or f'constrains the platform tag to "{tag}"' not in said:
            raise SystemExit(f"torchlml: auditwheel does not confirm the platform {tag}: {said}")
        print(f"auditwheel confirms {tag}")


def tool(name: str) -> str:
    """A program that lies beside this Python."""
    return shutil.which(name, path=str(Path(sys.executable).parent)) or name


# ---------------------------------------------------------------------------------------- environments


def find_python(version: str) -> str | None:
    """An interpreter of this version that runs: on PATH, or one of pyenv's or uv's."""
    names = [shutil.which(f"python{version}") or ""]
    homes = [Path(os.environ.get("PYENV_ROOT", "~/.pyenv")).expanduser() / "versions"]
    homes.append(Path("~/.local/share/uv/python").expanduser())
    for home in homes:
        names += [str(path) for path in sorted(home.glob(f"*{version}.*/bin/python{version}"))]
    for name in filter(None, names):
        if subprocess.run([name, "-c", ""], capture_output=True, check=False).returncode == 0:
            return name
    return None


def environment(folder: Path, interpreter: str, version: str, torch: str) -> Path:
    """The Python of a clean environment with this torch, made now if it is not there."""
    home = folder / f"python{version}-torch{torch}"
    python = home / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
    ready = home / ".ready"
    if ready.exists():
        return python
    print(f"making {home.name}", flush=True)
    run(interpreter, "-m", "venv", "--clear", home)
    # Compiling all of torch's Python beforehand takes longer than everything else here.
    install = [*pip(python), "install", "--no-compile"]
    run(*install, "--no-deps", f"torch=={torch}")
    asked = run(python, "-c", "from importlib.metadata import requires; print(*requires('torch'), sep='\\n')")
    light = [line for line in asked.splitlines() if not GIGABYTES.match(line) and "extra ==" not in line]
    run(*install, *light)
    if sys.platform == "linux":
        libraries = run(python, "-c", "import sysconfig; print(sysconfig.get_path('platlib'))").strip()
        add_stand_ins(Path(libraries, "torch", "lib"))
    ready.touch()
    return python


# ---------------------------------------------------------------------------------------- installing


def try_out(python: Path, artefact: Path) -> None:
    """Install, check and uninstall it, and look that nothing is left."""
    began = time.perf_counter()
    # The name of the last run may have other contents.
    run(*pip(python), "install", "--no-deps", "--no-cache-dir", "--force-reinstall", artefact)
    print(run(python, "-I", CHECK).strip(), end=", ")
    run(*pip(python), "uninstall", "-y", "torchlml")
    home = python.parents[1]
    left = [str(path.relative_to(home)) for path in home.rglob("*torchlml*")]
    if left:
        raise SystemExit(f"torchlml: uninstalling {artefact.name} left {', '.join(left)}.")
    kind = "wheel" if artefact.suffix == ".whl" else "sdist, compiled in isolation"
    print(f"removed without a trace ({kind}, {time.perf_counter() - began:.0f} s)", flush=True)


def pip(python: Path) -> list[str]:
    """How the pip of an environment is called."""
    return [str(python), "-m", "pip", "--disable-pip-version-check", "-q"]


def run(*command: str | Path) -> str:
    """What a command says; away from the sources, which must not be imported."""
    settings = {
        key: value for key, value in os.environ.items() if not key.startswith(("PYTHONPATH", "TORCHLML_"))
    }
    done = subprocess.run(
        command, env=settings, cwd=tempfile.gettempdir(), capture_output=True, text=True, check=False
    )
    if done.returncode:
        words = " ".join(str(word) for word in command)
        raise SystemExit(f"torchlml: `{words}` failed:\n{done.stdout}{done.stderr}")
    return done.stdout


if __name__ == "__main__":
    main()
