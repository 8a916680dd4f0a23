"""The times of pure PyTorch and the tested versions that the Install page names are correct."""

from __future__ import annotations

import re
from pathlib import Path

from tests.docs.test_results_tables import RESULTS, rows

ROOT = Path(__file__).parents[2]
PAGE = " ".join((ROOT / "docs" / "install.md").read_text(encoding="utf-8").split())


def times(provider: str) -> list[float]:
    """Return the times relative to softmax for k = 5, scale 3 and one thread."""
    wanted = {"operator": "projection", "provider": provider, "metric": "time", "dtype": "float32"}
    wanted |= {"k": "5", "scale": "3", "threads": "1"}
    found = [float(row["ratio_p50"]) for row in rows(RESULTS / "benchmarks.csv") if row | wanted == row]
    assert len(found) >= 20
    return found


def test_time_without_the_kernel() -> None:
    pure, compiled = times("lml-torch"), times("lml-native")
    slow = f"{min(pure):.0f}–{max(pure):.0f} times as long as softmax"
    assert f"they take {slow} instead of {min(compiled):.1f}–{max(compiled):.1f} times" in PAGE
    assert f"pure PyTorch, which takes {slow}" in (ROOT / "README.md").read_text(encoding="utf-8")


def test_tested_versions() -> None:
    (matrix,) = re.findall(r"^MATRIX = (.*)$", (ROOT / "tools" / "test_wheel.py").read_text(), re.MULTILINE)
    pythons, torches = zip(*re.findall(r'"([\d.]+):([\d.]+)"', matrix), strict=True)
    first, last = pythons[0], pythons[-1]
    old, new = (version.removesuffix(".0") for version in sorted(set(torches)))
    assert list(pythons) == [f"3.{minor}" for minor in range(int(first[2:]), int(last[2:]) + 1)]
    assert f"It is tested with Python {first}–{last} and with torch {old} and {new}." in PAGE
    changes = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert f"tested with Python {first}–{last} and torch {old} and {new}" in changes
