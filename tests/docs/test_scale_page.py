"""docs/scale.md: its table follows from the formulas that `test_numbers_sent` verifies."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "scale.md"
ROWS, FEATURES, BYTES = 256, 128, 4
LINE = (
    r"\| 10\^(\d) \| (\d+) \| ([\d.]+) GiB \| ([\d.]+) GiB \| 64 MiB \| ([\d.]+)(?: MiB)? "
    r"\| (\d) / (\d) / (\d+) \|"
)
LINES = re.findall(LINE, PAGE.read_text(encoding="utf-8"))


def test_the_table_is_found() -> None:
    assert len(LINES) == 6


@pytest.mark.parametrize("line", LINES, ids=lambda line: f"10^{line[0]} on {line[1]}")
def test_the_table_follows_from_the_formulas(line: tuple[str, ...]) -> None:
    labels, processes = 10 ** int(line[0]), int(line[1])
    own = labels / processes
    assert float(line[2]) == pytest.approx(2 * own * FEATURES * BYTES / 2**30, rel=0.02)
    assert float(line[3]) == pytest.approx(2 * ROWS * own * BYTES / 2**30, rel=0.02)
    # The agreement, the survey of the loss, and two evaluations at three points.
    sent = 8 * (256 + (23 + 2 * 14 * 3) * ROWS)
    received = processes * sent if processes > 1 else 0
    assert float(line[4]) == pytest.approx(received / 2**20, rel=0.05)
    assert line[5:] == (("0", "0", "0") if processes == 1 else ("4", "3", "36"))
