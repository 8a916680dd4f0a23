"""ARCHITECTURE.md lists every module and only existing paths. tests/README.md lists every library test."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
# Section heading -> the directory that its paths are relative to.
PACKAGES = {
    "Library: functions, arguments, derivatives": "torchlml",
    "Library: solvers and kernels": "torchlml",
    "Command line and training": "torchlml_lab",
    "Models on user data": "torchlml_lab",
    "Studies, benchmarks, figures": "torchlml_lab",
    "Tests, documentation, results, packaging": "",
}
FILE = re.compile(r"`([\w./-]+\.(?:py|h|cpp|md|yml|toml|txt|css|html)|[\w./-]+/)`")


def rows() -> Iterator[tuple[str, str]]:
    """Yield the section heading and the last cell of each row under "Where to make changes"."""
    page = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
    part = page.partition("\n## Where to make changes\n")[2].partition("\n## ")[0]
    for section in part.split("\n### ")[1:]:
        heading, _, text = section.partition("\n")
        for line in text.splitlines():
            if line.startswith("| ") and not line.startswith(("| to change", "| ---")):
                yield heading, line.split("|")[2]


def named() -> Iterator[Path]:
    """Yield the files and directories named in the rows.

    A path is relative to its section's directory, to the directory of the preceding path in the same cell,
    or to the root of the repository.
    """
    for heading, cell in rows():
        base = folder = ROOT / PACKAGES[heading]
        names = [name for name in FILE.findall(cell) if "NAME" not in name]
        for name in names:
            found = next((d / name for d in (base, folder, ROOT) if (d / name).exists()), None)
            assert found is not None, f"{name} does not exist: {cell}"
            folder = found.parent
            yield found


def test_every_path_exists() -> None:
    assert len(list(named())) > 100


def test_every_module_has_a_row() -> None:
    """Every module is listed, except `settings.py` modules, which the row for `commands.py` covers."""
    listed = set(named())
    for package in ("torchlml", "torchlml_lab"):
        for path in sorted((ROOT / package).rglob("*.py")):
            if path.name not in ("__init__.py", "__main__.py", "settings.py"):
                assert {path, path.parent} & listed, f"{path.relative_to(ROOT)} is not listed"


def test_every_library_test_is_in_the_readme_of_the_tests() -> None:
    page = (ROOT / "tests" / "README.md").read_text(encoding="utf-8")
    patterns = re.findall(r"`(?:library/)?(test_[\w*]+\.py)`", page)
    for path in sorted((ROOT / "tests" / "library").glob("test_*.py")):
        assert any(fnmatch.fnmatch(path.name, pattern) for pattern in patterns), path.name
