"""The console that commands print to, and progress bars on it."""

import time
from typing import Any

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


def new_console(**options: Any) -> Console:
    """Create a console that prints text verbatim.

    Labels, texts, item names and paths come from users, and Rich would interpret `[int]` as markup and
    `:cat:` as an emoji. Styled text is passed as `rich.text.Text` instead.

    Args:
        options: Further arguments of `rich.console.Console`, such as `quiet`.

    Returns:
        A console that interprets neither markup nor emoji codes and highlights nothing.
    """
    return Console(markup=False, emoji=False, highlight=False, **options)


FIRST_LINE, LONGEST_SILENCE = 5.0, 60.0


class ProgressBar(Progress):
    """A `rich.progress.Progress` with common columns. Without a terminal, it prints plain lines instead.

        with ProgressBar(console) as progress:
            task = progress.add_task("epochs", total=10)
            progress.advance(task)

    Args:
        console: The console to print to. A quiet console shows nothing.
        hidden: Whether to show nothing, as for all processes of a run except the first.
    """

    def __init__(self, console: Console, hidden: bool = False) -> None:
        super().__init__(
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=console,
            transient=True,
            speed_estimate_period=3600,  # a step may take minutes
            disable=hidden or not console.is_terminal,
        )
        self._plain = not (hidden or console.is_terminal)
        self._wait = FIRST_LINE
        self._last_line = time.monotonic()

    def advance(self, task_id: TaskID, advance: float = 1) -> None:
        """Advance a task by a step."""
        super().advance(task_id, advance)
        self._say()

    def update(self, task_id: TaskID, **changes: Any) -> None:
        """Change a task, for example its `description`."""
        super().update(task_id, **changes)
        self._say()

    def _say(self) -> None:
        """Print a line if enough time has passed. The interval doubles from line to line."""
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
