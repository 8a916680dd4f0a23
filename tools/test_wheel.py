"""Audit the wheel, then install, test and uninstall the wheel and the sdist in clean environments.

    python tools/test_wheel.py dist --environments build/environments

An environment combines a Python version with a torch version. It is created once and reused. Each run
installs torchlml into it, runs `check_install.py` and uninstalls torchlml. The sdist is compiled in the first
environment, by a normal `pip install` with build isolation. Python versions that are not installed are
skipped and listed at the end.
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
# Each Python version is tested once, and the oldest and the newest torch twice. That is enough, because all
# Python versions use the same kernel.
MATRIX = ("3.10:2.10.0", "3.11:2.13.0", "3.12:2.10.0", "3.13:2.13.0")
GIGABYTES = re.compile(r"nvidia|cuda|triton")  # large dependencies of torch that are needed only on a GPU


def main() -> None:
    """Audit, install and test the files in `dist`. Exit at the first failure, with a message."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("dist", type=Path, help="directory with one wheel and one sdist")
    parser.add_argument("--environments", type=Path, required=True, help="directory for the environments")
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
        artifacts = [wheel] if tested else [wheel, sdist]
        for artifact in artifacts:
            try_out(python, artifact)
        tested += 1
    if missing:
        print(f"skipped Python versions (not installed): {', '.join(missing)}")
    if not tested:
        raise SystemExit("torchlml: nothing was tested, because none of the Python versions is installed.")


def only(folder: Path, pattern: str) -> Path:
    """Return the only file in a directory that matches the pattern."""
    found = sorted(folder.glob(pattern))
    if len(found) != 1:
        raise SystemExit(
            f"torchlml: {folder} must contain one {pattern} file, but it contains {len(found)}. "
            "Run `make wheel sdist`."
        )
    return found[0].resolve()


# ---------------------------------------------------------------------------------------- audits


def audit(wheel: Path) -> None:
    """Check the wheel's platform tag and its use of the stable ABI, and that it bundles no other library."""
    with zipfile.ZipFile(wheel) as archive, tempfile.TemporaryDirectory() as folder:
        kernels = [name for name in archive.namelist() if name.endswith((".so", ".pyd", ".dylib"))]
        if [name.rpartition("/")[2].partition(".")[0] for name in kernels] != ["_C"]:
            raise SystemExit(
                f"torchlml: {wheel.name} must contain one library, the kernel, but it contains {kernels}."
            )
        kernel = archive.extract(kernels[0], folder)
        run(tool("torch-abi-audit"), "--check", "both", kernel)
    print(f"{wheel.name}: {wheel.stat().st_size // 1024} KiB, stable ABI of torch")
    if sys.platform == "linux":
        output = " ".join(run(tool("auditwheel"), "show", wheel).split())
        tag = wheel.stem.rpartition("-")[2].partition(".")[0]
        # Match the whole phrase, because auditwheel also reports the platform tag that the wheel would have
        # without its dependency on torch.
        if not tag.startswith("manylinux") or f'constrains the platform tag to "{tag}"' not in output:
            raise SystemExit(f"torchlml: auditwheel does not confirm the platform tag {tag}: {output}")
        print(f"auditwheel confirms {tag}")


def tool(name: str) -> str:
    """Return the path of a program next to this Python interpreter, or only its name if it is not there."""
    return shutil.which(name, path=str(Path(sys.executable).parent)) or name


# ---------------------------------------------------------------------------------------- environments


def find_python(version: str) -> str | None:
    """Find a working interpreter of this version on PATH or among those installed by pyenv and uv."""
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
    """Create an environment with this torch version unless it exists, and return its interpreter."""
    home = folder / f"python{version}-torch{torch}"
    python = home / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
    ready = home / ".ready"
    if ready.exists():
        return python
    print(f"creating {home.name}", flush=True)
    run(interpreter, "-m", "venv", "--clear", home)
    # Compiling all Python files of torch would take longer than all other steps.
    install = [*pip(python), "install", "--no-compile"]
    run(*install, "--no-deps", f"torch=={torch}")
    required = run(
        python, "-c", "from importlib.metadata import requires; print(*requires('torch'), sep='\\n')"
    )
    light = [line for line in required.splitlines() if not GIGABYTES.match(line) and "extra ==" not in line]
    run(*install, *light)
    if sys.platform == "linux":
        libraries = run(python, "-c", "import sysconfig; print(sysconfig.get_path('platlib'))").strip()
        add_stand_ins(Path(libraries, "torch", "lib"))
    ready.touch()
    return python


# ---------------------------------------------------------------------------------------- installing


def try_out(python: Path, artifact: Path) -> None:
    """Install, check and uninstall an artifact, and check that no files are left behind."""
    began = time.perf_counter()
    # A cached artifact with the same name may have different contents.
    run(*pip(python), "install", "--no-deps", "--no-cache-dir", "--force-reinstall", artifact)
    print(run(python, "-I", CHECK).strip(), end=", ")
    run(*pip(python), "uninstall", "-y", "torchlml")
    home = python.parents[1]
    left = [str(path.relative_to(home)) for path in home.rglob("*torchlml*")]
    if left:
        raise SystemExit(f"torchlml: uninstalling {artifact.name} left these files: {', '.join(left)}.")
    kind = "wheel" if artifact.suffix == ".whl" else "sdist, compiled in isolation"
    print(f"uninstalled completely ({kind}, {time.perf_counter() - began:.0f} s)", flush=True)


def pip(python: Path) -> list[str]:
    """Return the command that runs pip in an environment."""
    return [str(python), "-m", "pip", "--disable-pip-version-check", "-q"]


def run(*command: str | Path) -> str:
    """Run a command outside the source tree, so that the sources are not imported, and return its output."""
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
