"""Benchmark measurements, the CSV that stores them, and descriptions of the machine and settings."""

import csv
import io
import json
import os
import platform
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, fields
from datetime import datetime, timezone
from pathlib import Path

import torch
from rich.console import Console

import torchlml
from torchlml_lab.bench.cases import Case
from torchlml_lab.bench.timing import Quantiles
from torchlml_lab.cli_errors import BadInput, reason
from torchlml_lab.files import check_file, replacing
from torchlml_lab.info import kernel

Key = tuple[str, str, str, str, int, int, int, float, str, int]


@dataclass(frozen=True)
class Measurement:
    """Percentiles of a value and of its ratio to the baseline, for one provider, case and mode."""

    operator: str
    provider: str
    mode: str
    metric: str
    unit: str
    n: int
    k: int
    batch: int
    scale: float
    dtype: str
    threads: int
    p20: float
    p50: float
    p80: float
    ratio_p20: float
    ratio_p50: float
    ratio_p80: float
    config: str
    machine: str
    torch: str
    torchlml: str
    date: str

    @property
    def key(self) -> Key:
        """The key that identifies the measurement. Rows with the same key are comparable."""
        return (self.operator, self.provider, self.mode, self.metric, *self.case)

    @property
    def case(self) -> tuple[int, int, int, float, str, int]:
        """The problem that was measured, as the fields of a `Case`."""
        return (self.n, self.k, self.batch, self.scale, self.dtype, self.threads)


COLUMNS = [field.name for field in fields(Measurement)]
_TYPES = {field.name: field.type for field in fields(Measurement)}


def measured(
    operator: str,
    provider: str,
    mode: str,
    case: Case,
    value: Quantiles,
    ratio: Quantiles,
    rounds: int,
    *,
    metric: str = "time",
    unit: str = "us",
    gpu: str | None = None,
) -> Measurement:
    """Create the row for a measurement that was just taken on this machine.

    Args:
        operator: The name of the benchmark.
        provider: The function that was measured.
        mode: The mode of the measurement, such as "forward".
        case: The problem.
        value: The percentiles, in `unit`.
        ratio: The percentiles of the ratio to the baseline.
        rounds: The number of rounds in which the function was measured.
        metric: The metric, such as "time" or "memory".
        unit: The unit of `value`.
        gpu: The name of the GPU, if one was used.

    Returns:
        The row.
    """
    config = {"rounds": rounds, "kernel": kernel()}
    return Measurement(
        operator=operator,
        provider=provider,
        mode=mode,
        metric=metric,
        unit=unit,
        **vars(case),
        p20=_rounded(value.p20),
        p50=_rounded(value.p50),
        p80=_rounded(value.p80),
        ratio_p20=_rounded(ratio.p20),
        ratio_p50=_rounded(ratio.p50),
        ratio_p80=_rounded(ratio.p80),
        config=json.dumps(config | ({"device": "cuda"} if gpu else {})),
        machine=gpu or machine(),
        torch=str(torch.__version__),
        torchlml=torchlml.__version__,
        date=datetime.now(timezone.utc).isoformat(timespec="seconds"),
    )


class RowFile:
    """The CSV of a benchmark, to which rows are appended while the benchmark runs.

    If rows cannot be written, for example because the disk is full, the benchmark continues. The rows
    are then written together with the next ones.

    Args:
        path: The file, which need not exist. An invalid or unwritable file raises `BadInput`.
        option: The command-line option that gave the path.
    """

    def __init__(self, path: Path, option: str = "--csv") -> None:
        check_file(option, path)
        self.path = path
        self.earlier = read(path, option) if path.exists() else []
        self.new: list[Measurement] = []
        self._waiting: list[Measurement] = []
        self._failure: OSError | None = None

    def announce(self, plan: str, console: Console) -> None:
        """Print what will be measured (`plan`), and where the results are written."""
        console.print(f"{plan}. Results are written to {self.path}.", soft_wrap=True, highlight=False)

    def add(self, rows: Iterable[Measurement]) -> None:
        """Append rows to the file. If writing fails, retry in the next call."""
        added = list(rows)
        self.new += added
        self._waiting += added
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            append(self.path, self._waiting)
            self._waiting = []
        except OSError as error:
            self._failure = error

    def lacks(self) -> str | None:
        """Return a message about rows that could not be written to the file, or None if all were written."""
        if not self._waiting or self._failure is None:
            return None
        rows = "row" if len(self._waiting) == 1 else f"{len(self._waiting)} rows"
        return f"`{self.path}` is missing the last {rows}: {reason(self._failure)}."


def read(path: Path, option: str) -> list[Measurement]:
    """Read the rows of a CSV.

    Args:
        path: The file.
        option: The command-line option that gave the path, for error messages.

    Returns:
        The rows in the order of the file. An invalid file raises `BadInput`.
    """
    try:
        with path.open(newline="", encoding="utf-8") as file:
            rows = csv.DictReader(file)
            if rows.fieldnames != COLUMNS:
                raise ValueError("its columns differ from those that this version writes")
            return [_row(row) for row in rows]
    except (OSError, ValueError, TypeError) as error:
        said = reason(error) if isinstance(error, OSError) else error
        raise BadInput(f"`{path}` (`{option}`) cannot be read as a benchmark CSV: {said}.") from error


def append(path: Path, rows: Iterable[Measurement]) -> None:
    """Append rows to a CSV atomically. A reader never sees a partial row.

    Args:
        path: The file. If it is missing, it is created with a header.
        rows: The rows to append.
    """
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, COLUMNS, lineterminator="\n")
    if not path.exists():
        writer.writeheader()
    writer.writerows({name: _text(value) for name, value in asdict(row).items()} for row in rows)
    earlier = path.read_text(encoding="utf-8") if path.exists() else ""
    if earlier and not earlier.endswith("\n"):
        earlier += "\n"
    with replacing(path) as temporary:
        temporary.write_text(earlier + text.getvalue(), encoding="utf-8")


def latest(rows: Iterable[Measurement]) -> dict[Key, Measurement]:
    """Return the last row for each measurement."""
    return {row.key: row for row in rows}


def machine() -> str:
    """Return the processor's name and the number of logical CPUs, for example `Some CPU 9000, 8 CPUs`."""
    name = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        found = re.search(r"^model name\s*:\s*(.+)$", cpuinfo.read_text(), re.MULTILINE)
        name = found[1] if found else name
    return f"{name}, {os.cpu_count()} CPUs"


def _rounded(value: float) -> float:
    """Round a number to its precision in the CSV, so that writing and reading a row does not change it."""
    return float(_text(value))


def _row(row: dict[str, str]) -> Measurement:
    return Measurement(**{name: _TYPES[name](text) for name, text in row.items()})  # type: ignore[operator]


def _text(value: object) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def finish(file: RowFile, plot: Path, draw: Callable[[], None] | None, console: Console) -> None:
    """Draw the plot, print which files were written, and raise `RuntimeError` if one could not be written.

    Args:
        file: The CSV.
        plot: The picture that `draw` writes.
        draw: Draws the plot, or None if there is nothing to draw.
        console: The console to print to.
    """
    lacks = file.lacks()
    problems = [lacks] if lacks else []
    if draw:
        try:
            draw()
            console.print(f"Plot written to {plot}.", soft_wrap=True)
        except OSError as error:
            problems.append(f"`{plot}` could not be written: {reason(error)}.")
    if not lacks:
        console.print(f"Results written to {file.path}.", soft_wrap=True)
    if problems:
        raise RuntimeError(" ".join(problems))


def three_digits(ratio: float) -> str:
    """Format a ratio with about three significant digits."""
    return f"{ratio:.2f}" if ratio < 10 else f"{ratio:.1f}" if ratio < 100 else f"{ratio:,.0f}"


def conditions(rows: Sequence[Measurement]) -> str:
    """Describe the machine and the settings of the measurements, for the note under a figure."""
    threads = " and ".join(str(number) for number in sorted({row.threads for row in rows}))
    plural = "" if threads == "1" else "s"
    return f"{rows[-1].machine}, {threads} thread{plural}, {rows[-1].dtype}, torch {rows[-1].torch}"
