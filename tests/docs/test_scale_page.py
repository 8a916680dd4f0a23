"""The numbers in docs/scale.md match the CSV files and the formulas that the library tests verify."""

from __future__ import annotations

import csv
import re
from pathlib import Path

import pytest
import torch

from tests.docs.test_results_tables import RESULTS, Row, Table, rows, tables
from torchlml._autograd import chunked_linear

PAGE = Path(__file__).parents[2] / "docs" / "scale.md"
ROWS, FEATURES, BYTES = 256, 128, 4
LIMIT = 64 * 2**20
LINE = r"\| 10\^(\d) \| (\d+) \| ([\d.]+) GiB \| ([\d.]+) GiB \| (\d+) \| (\d+) MiB \| (\d+) \|"
LINES = re.findall(LINE, PAGE.read_text(encoding="utf-8"))
# The rounds of `lml_loss` with two evaluations: an agreement, and three more for every chunk of rows.
AGREEMENT, PER_CHUNK = 1, 3


def text(page: Path = PAGE) -> str:
    return " ".join(page.read_text(encoding="utf-8").split())


def table(first_head: str) -> Table:
    (found,) = (one for one in tables(PAGE) if one.heads[0] == first_head)
    return found


def test_the_table_is_found() -> None:
    assert len(LINES) == len(table("labels").lines) == 6


@pytest.mark.parametrize("line", LINES, ids=lambda line: f"10^{line[0]} on {line[1]}")
def test_the_table_follows_from_the_formulas(line: tuple[str, ...]) -> None:
    labels, processes = 10 ** int(line[0]), int(line[1])
    own = labels / processes
    assert float(line[2]) == pytest.approx(2 * own * FEATURES * BYTES / 2**30, rel=0.02)
    assert float(line[3]) == pytest.approx(2 * ROWS * own * BYTES / 2**30, rel=0.02)
    one_row = 2 * own * BYTES / 2**20  # a chunk has at least one row
    assert float(line[5]) == pytest.approx(max(64, one_row), rel=0.02)
    # The process with the most labels determines the chunks, as in `torchlml/_distributed/loss.py`.
    together = chunked_linear.rows_within(LIMIT, -(-labels // processes), torch.float32, in_place=False)
    chunks = len(chunked_linear._chunks(ROWS, together))
    rounds = [AGREEMENT + PER_CHUNK * number if processes > 1 else 0 for number in (1, chunks)]
    assert [int(line[4]), int(line[6])] == rounds


def test_the_comparison_of_communication_follows_from_the_formulas() -> None:
    (first, *received) = table("unfused").lines
    assert first == ["rounds per step", f"{AGREEMENT + PER_CHUNK}", "3", "36"]
    assert f"needs {first[3]} all-reduces of R numbers: 34 forward and 2 backward" in text()
    # The communication rounds on the page send 8-byte numbers: 256 to check that the arguments agree, 23 per
    # row for the survey, and 2 * 14 * 3 per row for two evaluations at three points each.
    sent = 8 * (256 + (23 + 2 * 14 * 3) * ROWS)
    groups = sorted({int(line[1]) for line in LINES} - {1})
    for processes, (head, *cells) in zip(groups, received, strict=True):
        assert head == f"received by each of {processes} processes"
        ours = re.fullmatch(r"([\d.]+) MiB", cells[0])
        assert ours is not None
        assert float(ours[1]) == pytest.approx(processes * sent / 2**20, rel=0.02)
        # An all-reduce of one float32 number per row.
        assert cells[1:] == [f"{int(number) * ROWS * BYTES / 1024:g} KiB" for number in first[2:]]
        if processes == 64:
            assert f"of 64 processes handles {ROWS} rows, every process receives {cells[0]}," in text()


def scale_rows(**wanted: str) -> dict[str, Row]:
    """Return the matching rows of `scale.csv`, keyed by provider."""
    found = [row for row in rows(RESULTS / "scale.csv") if row | wanted == row]
    assert len({row["provider"] for row in found}) == len(found) > 0
    return {row["provider"]: row for row in found}


STEP = {"operator": "linear loss", "mode": "forward+backward"}
MEMORY = {"operator": "linear loss", "mode": "beyond the gradient"}
NAMES = {
    "`linear_lml_loss`": "linear_lml_loss",
    "`lml_loss(F.linear(...))`": "lml_loss of linear",
    "`F.linear_cross_entropy` in chunks of 64 rows": "linear_cross_entropy",
    "`F.cross_entropy(F.linear(...))`": "cross_entropy of linear",
}


def test_the_table_about_one_machine_matches_the_csv() -> None:
    times = {name: float(row["ratio_p50"]) for name, row in scale_rows(**STEP).items()}
    memory = scale_rows(**MEMORY, batch="256")
    assert table("computation").lines == [
        [
            head,
            f"{times[name] / times['linear_lml_loss']:.2f}",
            f"{float(memory[name]['p50']):.0f} MiB" if name in memory else "not measured",
        ]
        for head, name in NAMES.items()
    ]
    for row in scale_rows(**STEP).values():
        shape = f"{int(row['batch'])} × {int(row['n']):,} logits with d = {FEATURES} on two threads"
        assert (shape in text(), row["threads"]) == (True, "2")
    labels = int(scale_rows(**STEP)["linear_cross_entropy"]["n"])
    assert f"the logits of 64 rows take {64 * labels * BYTES / 2**20:.0f} MiB" in text()


def test_the_table_on_the_results_page_matches_the_csv() -> None:
    (found,) = (one for one in tables(RESULTS / "README.md") if one.section == "Large label spaces")
    values = {line[0]: line[2] for line in found.lines}

    def cell(*words: str) -> str:
        (value,) = (value for name, value in values.items() if all(word in name for word in words))
        return value

    times = {name: float(row["ratio_p50"]) for name, row in scale_rows(**STEP).items()}
    of_time = "time of `linear_lml_loss`"
    for head, name in list(NAMES.items())[1:]:
        assert cell(of_time, f"relative to {head}") == f"{times['linear_lml_loss'] / times[name]:.2f}"
    ours, (second, third) = "linear_lml_loss", ("lml_loss of linear", "cross_entropy of linear")
    needs = [float(scale_rows(**MEMORY, batch=size)[ours]["p50"]) for size in ("64", "256", "1024")]
    assert cell("memory of `linear_lml_loss` in") == "{:.0f}, {:.0f} and {:.0f} MiB".format(*needs)
    others = scale_rows(**MEMORY, batch="256")
    assert cell("memory of `lml_loss(F.linear") == f"{float(others[second]['p50']):.0f} MiB"
    assert cell("memory of `F.cross_entropy(F.linear") == f"{float(others[third]['p50']):.0f} MiB"
    peak = scale_rows(operator="linear loss", mode="whole process")[ours]
    assert cell("peak memory") == f"{float(peak['p50']) / 1024:.1f} GiB"
    long = scale_rows(operator="long row")
    assert {row["threads"] for row in long.values()} == {"2"}
    one_row = cell("one row of", f"{int(long['lml']['n']):,} entries", "two threads")
    assert one_row == f"{float(long['lml']['ratio_p50']):.2f}"
    scales = ("1", "3", "12", "100")
    counted = (scale_rows(operator="two processes", scale=scale)["lml"] for scale in scales)
    rounds = [f"{float(row['p50']):.0f}" for row in counted]
    assert cell("on two processes", " / ".join(scales)) == " / ".join(rounds)


TRAINING = RESULTS / "training.csv"


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
    title = "Time per epoch at this speed and peak memory, with the forecasts of `train` in parentheses:"
    assert training_cells(title) == needs


def test_the_sentences_about_training_match_the_csv() -> None:
    page = text()
    alone = single_process()
    large = alone[1_000_000, 1000]
    gigabytes, seconds = f"{large['memory_mb'] / 1000:.1f}", f"{large['epoch_seconds']:.0f}"
    assert f"need {gigabytes} GB and an estimated {seconds} s per epoch" in page
    # The time per epoch follows from the speed. A part of the samples is held out for validation.
    for row in alone.values():
        trained_on = row["epoch_seconds"] * row["samples_per_second"]
        assert trained_on == pytest.approx(row["samples"], rel=0.15)
    memory = [row["forecast_mb"] / row["memory_mb"] for row in alone.values()]
    assert f"The memory forecast is {min(memory):.2f}–{max(memory):.2f} times the measured peak" in page
    time = [row["forecast_seconds"] / row["epoch_seconds"] for row in alone.values()]
    assert f"The time forecast is {min(time):.1f}–{max(time):.1f} times the time per epoch in" in page
    one, two = (
        next(row for row in training_rows() if (row["processes"], row["threads"]) == (processes, 1))
        for processes in (1, 2)
    )
    assert (one["samples"], one["labels"]) == (two["samples"], two["labels"]) == (100_000, 10_000)
    rates = [f"{row['samples_per_second']:,.0f}" for row in (one, two)]
    assert f"one process trains at {rates[0]} samples per second, and two processes at {rates[1]}" in page
