"""The tables in docs/scale.md match `training.csv` and the formulas that `test_numbers_sent` verifies."""

from __future__ import annotations

import csv
import re
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "scale.md"
ROWS, FEATURES, BYTES = 256, 128, 4
LINE = (
    r"\| 10\^(\d) \| (\d+) \| ([\d.]+) GiB \| ([\d.]+) GiB \| (\d+) MiB \| ([\d.]+)(?: MiB)? "
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
    one_row = 2 * own * BYTES / 2**20  # a chunk has at least one row
    assert float(line[4]) == pytest.approx(max(64, one_row), rel=0.02)
    # The communication rounds on the page send 8-byte numbers: 256 to check that the arguments agree, 23 per
    # row for the survey, and 2 * 14 * 3 per row for two evaluations at three points each.
    sent = 8 * (256 + (23 + 2 * 14 * 3) * ROWS)
    received = processes * sent if processes > 1 else 0
    assert float(line[5]) == pytest.approx(received / 2**20, rel=0.05)
    assert line[6:] == (("0", "0", "0") if processes == 1 else ("4", "3", "36"))


TRAINING = Path(__file__).parents[2] / "results" / "training.csv"


def training_rows() -> list[dict[str, float]]:
    with TRAINING.open(newline="", encoding="utf-8") as file:
        return [{name: float(value) for name, value in row.items()} for row in csv.DictReader(file)]


def training_cells(title: str) -> dict[tuple[int, int], str]:
    """Return the cells of a table about training, keyed by (samples, labels), leaving out dashes."""
    page = PAGE.read_text(encoding="utf-8").split(title)[1].strip()
    heads, _, *lines = (line.strip("| ").split(" | ") for line in page.split("\n\n")[0].split("\n"))
    labels = [int(head.removesuffix(" labels").replace(",", "")) for head in heads[1:]]
    return {
        (int(line[0].replace(",", "")), n): cell
        for line in lines
        for n, cell in zip(labels, line[1:], strict=True)
        if cell != "–"
    }


def single_process() -> dict[tuple[int, int], dict[str, float]]:
    """Return the measurements of one process with two threads, keyed by (samples, labels)."""
    return {
        (int(row["samples"]), int(row["labels"])): row
        for row in training_rows()
        if (row["processes"], row["threads"]) == (1, 2)
    }


def test_the_tables_about_training_match_the_csv() -> None:
    speed, needs = {}, {}
    for place, row in single_process().items():
        memory = f"{row['memory_mb'] / 1000:.1f} GB"
        speed[place] = f"{row['samples_per_second']:,.0f}/s, {memory}"
        seconds = f"{row['epoch_seconds']:,.0f} s ({row['forecast_seconds']:,.0f})"
        needs[place] = f"{seconds}, {memory} ({row['forecast_mb'] / 1000:.1f})"
    assert training_cells("Training speed in samples per second, and peak memory:") == speed
    title = "Time per epoch and peak memory, with forecasts in parentheses:"
    assert training_cells(title) == needs


def test_the_sentences_about_training_match_the_csv() -> None:
    page = " ".join(PAGE.read_text(encoding="utf-8").split())
    alone = single_process()
    large = alone[1_000_000, 1000]
    assert f"need {large['memory_mb'] / 1000:.1f} GB and {large['epoch_seconds']:.0f} s per epoch" in page
    assert large["memory_mb"] < 2000
    assert large["epoch_seconds"] < 600
    memory = [row["forecast_mb"] / row["memory_mb"] for row in alone.values()]
    assert f"The memory forecast is {min(memory):.2f}–{max(memory):.2f} times the measured peak" in page
    time = [row["forecast_seconds"] / row["epoch_seconds"] for row in alone.values()]
    assert f"The time forecast is {min(time):.1f}–{max(time):.1f} times the measured time" in page
    one, two = (
        next(row for row in training_rows() if (row["processes"], row["threads"]) == (processes, 1))
        for processes in (1, 2)
    )
    assert (one["samples"], one["labels"]) == (two["samples"], two["labels"]) == (100_000, 10_000)
    rates = [f"{row['samples_per_second']:,.0f}" for row in (one, two)]
    assert f"one process trains at {rates[0]} samples per second, and two processes at {rates[1]}" in page
