"""The library's packages import each other in one direction only, and never import the experiments package.

Imports inside functions count as well: an import that is only delayed is still a dependency.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

LIBRARY = Path(__file__).parents[2] / "torchlml"
# Each package or top-level module may import those listed before it, but not those listed after it.
LAYERS = [
    "_rows",
    "_solve",
    "_cpu",
    "_torch",
    "_triton",
    "_arguments",
    "_targets",
    "_autograd",
    "_capped",
    "_distributed",
    "projection",
    "_balanced",
    "balanced",
    "router",
    "bracketing",
    "constrained",
    "choices",
    "distributions",
    "losses",
    "metrics",
    "compat",
    "__init__",
]
# External packages that individual packages of the library may import in addition to torch.
OPTIONAL = {"_triton": {"triton"}, "metrics": {"torchmetrics"}}
Edge = tuple[str, str]


def imports(folder: Path) -> dict[Edge, list[str]]:
    """Map each (importing package, imported package) pair to the source locations of its imports."""
    found: dict[Edge, list[str]] = {}
    for path in sorted(folder.rglob("*.py")):
        module = path.relative_to(folder).with_suffix("").parts
        tree = ast.parse(path.read_text(encoding="utf-8"))
        for line, target in _targets(tree, (folder.name, *module), folder):
            if target != module[0]:
                found.setdefault((module[0], target), []).append(f"{'/'.join(module)}.py:{line}")
    return found


def _targets(tree: ast.AST, module: tuple[str, ...], folder: Path) -> Iterator[tuple[int, str]]:
    """Yield the line number of every import, and the library or external package that it imports."""
    for node in ast.walk(tree):
        names: list[str] = []
        line = getattr(node, "lineno", 0)
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            parents = list(module[: -node.level]) if node.level else []
            origin = ".".join([*parents, *([node.module] if node.module else [])])
            names = [f"{origin}.{alias.name}" for alias in node.names]
        elif (
            isinstance(node, ast.Call)
            and ast.unparse(node.func) in ("importlib.import_module", "import_module", "__import__")
            and isinstance(node.args[0], ast.Constant)
        ):
            names = [str(node.args[0].value)]
        for name in names:
            package, *inside = name.split(".")
            if package != folder.name:
                yield line, package
            else:
                own = [part for part in inside[:1] if _is_module(folder / part)]
                yield line, own[0] if own else "__init__"


def _is_module(path: Path) -> bool:
    return path.is_dir() or path.with_suffix(".py").is_file()


def cycles(edges: dict[Edge, list[str]]) -> list[list[str]]:
    """Return one import cycle for each package that imports itself indirectly."""
    following: dict[str, list[str]] = {}
    for source, target in edges:
        following.setdefault(source, []).append(target)
    found = []
    for start in sorted(following):
        paths, seen = [[start]], set()
        while paths:
            path = paths.pop()
            for target in following.get(path[-1], []):
                if target == start:
                    found.append([*path, start])
                elif target not in seen:
                    seen.add(target)
                    paths.append([*path, target])
    return found


def against(edges: dict[Edge, list[str]], layers: list[str]) -> list[str]:
    """Describe each import of a later layer by an earlier one."""
    place = {name: i for i, name in enumerate(layers)}
    return [
        f"{source} imports {target} ({', '.join(where)})"
        for (source, target), where in edges.items()
        if target in place and place[target] > place.get(source, len(layers))
    ]


EDGES = imports(LIBRARY)


def test_every_package_has_a_layer() -> None:
    found = {
        path.stem for path in LIBRARY.iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()
    }
    assert found <= set(LAYERS), "add the new package to LAYERS"


def test_no_cycles() -> None:
    assert cycles(EDGES) == []


def test_direction() -> None:
    assert against(EDGES, LAYERS) == []


def test_there_are_at_most_sixty_modules() -> None:
    count = len(list(LIBRARY.rglob("*.py")))
    assert count <= 60, f"The library has {count} modules: add the code to an existing module, or merge two."


def test_torch_is_the_only_dependency() -> None:
    """In particular, nothing imports `torchlml_lab`."""
    outside = {edge for edge in EDGES if edge[1] not in {*LAYERS, "torch", *sys.stdlib_module_names}}
    assert {edge for edge in outside if edge[1] not in OPTIONAL.get(edge[0], set())} == set()


def test_the_import_graph_is_not_empty() -> None:
    """The other tests would pass on an empty graph."""
    assert {("projection", "_autograd"), ("_solve", "_rows"), ("_torch", "_solve")} <= set(EDGES)


@pytest.mark.parametrize(
    "line",
    [
        "from planted.upper import f",
        "import planted.upper",
        "from planted import upper",
        "from .upper import f",
        "from . import upper",
        "def f():\n    from planted.upper import f",
        "import importlib\nimportlib.import_module('planted.upper')",
    ],
)
def test_a_planted_cycle_is_found(tmp_path: Path, line: str) -> None:
    folder = tmp_path / "planted"
    folder.mkdir()
    (folder / "lower.py").write_text(f"{line}\n")
    (folder / "upper.py").write_text("from planted.lower import f\n")
    edges = imports(folder)
    assert cycles(edges) == [["lower", "upper", "lower"], ["upper", "lower", "upper"]]
    assert len(against(edges, ["lower", "upper"])) == 1
