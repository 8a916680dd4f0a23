"""The record of a measurement: a row of one CSV, which every run extends and every plot is drawn from."""

import csv
import io
import os
import platform
import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from torchlml_lab.errors import BadInput
from torchlml_lab.files import replacing

Key = tuple[str, str, str, str, int, int, int, float, str, int]


@dataclass(frozen=True)
class Record:
    """One provider on one case in one mode: percentiles over the rounds, also of the ratio to softmax."""

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
        """What was measured: the same in two records that may be compared."""
        return (self.operator, self.provider, self.mode, self.metric, *self.case)

    @property
    def case(self) -> tuple[int, int, int, float, str, int]:
        """The problem."""
        return (self.n, self.k, self.batch, self.scale, self.dtype, self.threads)


COLUMNS = [field.name for field in fields(Record)]
_TYPES = {field.name: field.type for field in fields(Record)}


def read(path: Path, option: str) -> list[Record]:
    """Reads the records of a CSV.

    Args:
        path: The file.
        option: The option that named it, for the error.

    Returns:
        The records in the file's order. A file that cannot be read as such raises `BadInput`.
    """
    try:
        with path.open(newline="", encoding="utf-8") as file:
            rows = csv.DictReader(file)
            if rows.fieldnames != COLUMNS:
                raise ValueError("its columns are not those of this benchmark")
            return [_record(row) for row in rows]
    except (OSError, ValueError, TypeError) as error:
        said = error.strerror if isinstance(error, OSError) else error
        raise BadInput(f"`{option}` names `{path}`, which cannot be read as benchmarks: {said}.") from error


def append(path: Path, records: Iterable[Record]) -> None:
    """Adds records at the end of a CSV; a reader sees the old file or the new one, never half a row.

    Args:
        path: The file; it is made with its header when it is missing.
        records: What to add.
    """
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, COLUMNS, lineterminator="\n")
    if not path.exists():
        writer.writeheader()
    writer.writerows({name: _text(value) for name, value in asdict(record).items()} for record in records)
    earlier = path.read_text(encoding="utf-8") if path.exists() else ""
    if earlier and not earlier.endswith("\n"):
        earlier += "\n"
    with replacing(path) as temporary:
        temporary.write_text(earlier + text.getvalue(), encoding="utf-8")


def latest(records: Iterable[Record]) -> dict[Key, Record]:
    """The last record of each measurement."""
    return {record.key: record for record in records}


def machine() -> str:
    """The processor's name and how many of it there are, for instance `Some CPU 9000, 8 CPUs`."""
    name = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        found = re.search(r"^model name\s*:\s*(.+)$", cpuinfo.read_text(), re.MULTILINE)
        name = found[1] if found else name
    return f"{name}, {os.cpu_count()} CPUs"


def _record(row: dict[str, str]) -> Record:
    return Record(**{name: _TYPES[name](text) for name, text in row.items()})  # type: ignore[operator]


def _text(value: object) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)
