"""Output of commands: the console, progress bars, and tables for the terminal, Markdown and CSV."""

import csv
import time
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from statistics import mean, stdev
from typing import Any, Generic, NamedTuple, TypeVar

from rich import box
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table

from torchlml_lab.cli_errors import BadInput, reason
from torchlml_lab.files import replacing


def new_console(**options: Any) -> Console:
    """Create a console that prints text verbatim.

    Labels, texts, item names and paths come from users, and Rich would interpret `[int]` as markup and
    `:cat:` as an emoji. Styled text is passed as `rich.text.Text` instead.

    Args:
        options: Additional arguments for `rich.console.Console`, such as `quiet`.

    Returns:
        A console that interprets neither markup nor emoji codes and highlights nothing.
    """
    return Console(markup=False, emoji=False, highlight=False, **options)


FIRST_LINE, LONGEST_SILENCE = 5.0, 60.0  # seconds before the first line, and at most between two lines


class ProgressBar(Progress):
    """A progress bar that prints plain lines instead if the output is not a terminal.

        with ProgressBar(console) as progress:
            task = progress.add_task("epochs", total=10)
            progress.advance(task)

    Args:
        console: The console to print to. A quiet console shows nothing.
        hidden: Whether to hide the progress bar. This is set in all processes of a run except the first.
    """

    def __init__(self, console: Console, hidden: bool = False) -> None:
        super().__init__(
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("elapsed,"),
            TimeRemainingColumn(),
            TextColumn("left"),
            console=console,
            transient=True,
            speed_estimate_period=3600,  # a step may take minutes
            disable=hidden or not console.is_terminal,
        )
        self._plain = not (hidden or console.is_terminal)
        self._wait = FIRST_LINE
        self._last_line = time.monotonic()

    def advance(self, task_id: TaskID, advance: float = 1) -> None:
        """Advance a task, by default by one step."""
        super().advance(task_id, advance)
        self._say()

    def update(self, task_id: TaskID, **changes: Any) -> None:
        """Change a task, for example its `description`."""
        super().update(task_id, **changes)
        self._say()

    def _say(self) -> None:
        """Print a line if enough time has passed since the last. The interval doubles, up to a minute."""
        now = time.monotonic()
        if not self._plain or now - self._last_line < self._wait:
            return
        self._last_line, self._wait = now, min(2 * self._wait, LONGEST_SILENCE)
        parts = []
        for task in self.tasks:
            of = "" if task.total is None else f" of {task.total:g}"
            left = _clock(task.time_remaining)
            parts.append(
                f"{task.description.strip()} {task.completed:g}{of}" + (f", {left} left" if left else "")
            )
        self.console.print("; ".join(parts), highlight=False, markup=False)


def _clock(seconds: float | None) -> str:
    if seconds is None:
        return ""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}"


Row = TypeVar("Row")


class Tried(NamedTuple):
    """A tuning run: the method, its hyperparameters, the condition (such as the seed), and the score."""

    method: str
    recipe: tuple[float, ...]
    condition: Hashable
    score: float


@dataclass(frozen=True)
class StudyTable(Generic[Row]):
    """Reads and writes a CSV whose rows are instances of a dataclass with a field `seconds`."""

    kind: type[Row]
    order: Callable[[Row], Any]
    """The sort key of a row. It must not depend on the order in which runs finished."""

    def write(self, path: Path, rows: Iterable[Row]) -> None:
        """Write the CSV atomically, with rounded seconds."""
        names = [field.name for field in fields(self.kind)]  # type: ignore[arg-type]
        with replacing(path) as temporary, temporary.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, names, lineterminator="\n")
            writer.writeheader()
            for row in sorted(rows, key=self.order):
                values = {name: getattr(row, name) for name in names}
                writer.writerow(values | {"seconds": f"{values['seconds']:.1f}"})

    def read(self, path: Path, option: str) -> list[Row]:
        """Read a file written by `write`. `option` is the command-line option that gave the path."""
        types: dict[str, Any] = {field.name: field.type for field in fields(self.kind)}  # type: ignore[arg-type]
        try:
            with path.open(newline="", encoding="utf-8") as file:
                rows = csv.DictReader(file)
                if rows.fieldnames != list(types):
                    raise ValueError("its columns differ from those that this version writes")
                found = [self.kind(**{key: types[key](row[key]) for key in types}) for row in rows]
            if not found:
                raise ValueError("it has no rows")
        except (OSError, ValueError, TypeError) as error:
            said = reason(error) if isinstance(error, OSError) else error
            raise BadInput(f"`{path}` (`{option}`) cannot be read as a results CSV: {said}.") from error
        return found


def best_recipes(
    tried: Sequence[Tried], methods: Sequence[str], path: Path, what: str, tuned: str, where: str
) -> dict[str, tuple[float, ...]]:
    """Find the hyperparameters with the best mean validation score for each method.

    Args:
        tried: The runs of a tuning sweep.
        methods: The methods to look up.
        path: The file with the runs, for error messages.
        what: The word for a method in error messages, such as "loss".
        tuned: The word for a set of hyperparameters in error messages, such as "learning rate".
        where: The word for the conditions in error messages, such as "noise levels and seeds".

    Returns:
        The hyperparameters by method. `BadInput` is raised if a method is missing, or if its hyperparameters
        were tried under different conditions.
    """
    best = {}
    for method in methods:
        scores: dict[tuple[float, ...], dict[Hashable, float]] = defaultdict(dict)
        for one in tried:
            if one.method == method:
                scores[one.recipe][one.condition] = one.score
        if not scores:
            raise BadInput(f"`{path}` (`--tuned`) contains no runs with the {what} `{method}`.")
        if len({frozenset(found) for found in scores.values()}) > 1:
            raise BadInput(
                f"In `{path}` (`--tuned`), `{method}` was not run with the same {where} for every {tuned}. "
                "Finish that sweep first."
            )
        best[method] = max(scores, key=lambda recipe: mean(scores[recipe].values()))
    return best


def plain_table(title: str, heads: Sequence[str], left: int = 1) -> Table:
    """Create an empty table for the terminal. The first `left` columns contain text, the others numbers."""
    table = Table(
        title=title,
        title_justify="left",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        pad_edge=False,
        show_edge=False,
    )
    for place, head in enumerate(heads):
        table.add_column(head, justify="left" if place < left else "right")
    return table


def markdown_table(title: str, heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Format a Markdown table with a title above it."""
    lines = [f"| {' | '.join(cells)} |" for cells in (heads, *rows)]
    return "\n".join([title, "", lines[0], "| --- " * len(heads) + "|", *lines[1:]])


def spread(values: Sequence[float], digits: int = 2) -> str:
    """Format the mean of fractions in percent, with the standard deviation if there are several values."""
    deviation = f"±{100 * stdev(values):.{digits}f}" if len(values) > 1 else ""
    return f"{100 * mean(values):.{digits}f}{deviation}"
