"""Packages of torchlml_lab import each other in one direction only, and imports form no cycles."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

# A package may import its own modules and the packages on earlier lines.
LAYERS = (
    ("cli_errors",),
    ("files",),
    ("data", "engine", "info"),
    ("plots",),
    ("multilabel", "studies", "gpu_check"),
    ("recommend", "classifier"),
    ("figures",),
    ("bench",),
    ("commands",),
    ("cli",),
    ("__main__",),
)


def modules(root: Path) -> dict[str, Path]:
    """Map the name of each module of torchlml_lab to its path."""
    found = {}
    for path in sorted((root / "torchlml_lab").rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imported(path: Path, known: dict[str, Path]) -> Iterator[str]:
    """Yield the modules of torchlml_lab that a file imports, including imports inside functions."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} has a relative import"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        for name in names:
            while name and name not in known:
                name = name.rpartition(".")[0]
            if name:
                yield name


def imports(root: Path) -> dict[str, set[str]]:
    """Return each module's imports, except for `torchlml_lab` itself, whose imports are lazy."""
    known = modules(root)
    return {
        name: set(imported(path, known)) - {name} for name, path in known.items() if name != "torchlml_lab"
    }


def packages(graph: dict[str, set[str]]) -> dict[str, set[str]]:
    """Return the imports between the direct children of torchlml_lab, which are packages or modules."""
    found: dict[str, set[str]] = {}
    for name, others in graph.items():
        parts = {other.split(".")[1] for other in others if other != "torchlml_lab"}
        found.setdefault(name.split(".")[1], set()).update(parts - {name.split(".")[1]})
    return found


def cycle(graph: dict[str, set[str]]) -> list[str]:
    """Return a cycle in a graph, or an empty list."""
    done: set[str] = set()

    def visit(name: str, above: list[str]) -> list[str]:
        if name in above:
            return [*above[above.index(name) :], name]
        if name not in done:
            for other in sorted(graph.get(name, ())):
                if found := visit(other, [*above, name]):
                    return found
            done.add(name)
        return []

    return next((found for name in sorted(graph) if (found := visit(name, []))), [])


def upward(graph: dict[str, set[str]]) -> list[str]:
    """Return the imports between packages that do not point to an earlier line of `LAYERS`."""
    place = {name: number for number, layer in enumerate(LAYERS) for name in layer}
    return [
        f"{name} imports {other}"
        for name, others in sorted(graph.items())
        for other in sorted(others)
        if place[other] >= place[name]
    ]


def test_no_cycle_between_modules() -> None:
    assert cycle(imports(ROOT)) == []


def test_packages_import_in_one_direction() -> None:
    graph = packages(imports(ROOT))
    assert set(graph) == {name for layer in LAYERS for name in layer}
    assert cycle(graph) == []
    assert upward(graph) == []


def test_there_are_at_most_a_hundred_modules() -> None:
    assert len(modules(ROOT)) <= 100


@pytest.mark.parametrize(
    "line",
    [
        "from torchlml_lab.engine import run",
        "from torchlml_lab.engine.run import train",
        "import torchlml_lab.engine.run",
        "def f():\n    from torchlml_lab.engine.run import train",
    ],
)
def test_a_planted_cycle_is_found(tmp_path: Path, line: str) -> None:
    files = {"__init__": "", "data/__init__": "", "data/tables": line, "engine/__init__": ""}
    files["engine/run"] = "from torchlml_lab.data.tables import read"
    for name, text in files.items():
        path = tmp_path / "torchlml_lab" / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    graph = imports(tmp_path)
    assert set(cycle(graph)) == {"torchlml_lab.data.tables", "torchlml_lab.engine.run"}
    assert set(cycle(packages(graph))) == {"data", "engine"}
    assert upward(packages(graph)) == ["data imports engine", "engine imports data"]
