"""The files of a figure: its CSV, its picture and its tables."""

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TypeVar

from torchlml_lab.cli_errors import BadInput
from torchlml_lab.engine.output import StudyTable, new_console
from torchlml_lab.files import check_picture, replacing


def draw_only(draw: Callable[[Path], None], picture: Path) -> None:
    """Draw a figure without tables, and print its path."""
    check_picture(picture)
    draw(picture)
    say_where(picture)


def say_where(picture: Path) -> None:
    """Print the path of the picture, as the last line of the command."""
    new_console().print(f"Figure written to {picture}.", soft_wrap=True)


def write_tables(text: str, picture: Path) -> None:
    """Write the tables of a figure as Markdown next to its picture, and print both paths."""
    page = picture.with_suffix(".md")
    with replacing(page) as temporary:
        temporary.write_text(text, encoding="utf-8")
    new_console().print(f"Tables written to {page}.", soft_wrap=True)
    say_where(picture)


Row = TypeVar("Row")


class NotMadeYet(BadInput):
    """The CSV of a figure does not exist. The message names the command that creates it."""


def find(named: Path | None, usual: Sequence[Path], command: str) -> Path:
    """Find the CSV.

    Args:
        named: The value of `--csv`, if given.
        usual: The default locations, in order.
        command: The command that creates the file.

    Returns:
        The path of an existing file. If there is none, `NotMadeYet` is raised.
    """
    places = usual if named is None else [named]
    for path in places:
        if path.exists():
            return path
    raise NotMadeYet(f"`{places[0]}` does not exist. Create it with `{command}`.")


def read_sweep(
    named: Path | None, usual: Sequence[Path], task: str, table: StudyTable[Row]
) -> tuple[Path, list[Row]]:
    """Find the CSV of `torchlml sweep TASK` like `find`, and return its path and rows."""
    path = find(named, usual, f"torchlml sweep {task}")
    return path, table.read(path, "--csv")


def read_sweeps(
    named: Sequence[Path], own: Path, study: Sequence[Path], task: str, table: StudyTable[Row]
) -> list[tuple[Path, list[Row]]]:
    """Read CSVs of `torchlml sweep TASK`: those given, else the user's own, else those of the study."""
    found = named or ((own,) if own.exists() else [path for path in study if path.exists()])
    return [read_sweep(path, (), task, table) for path in found or (own,)]


def check_not_tuning(path: Path, recipes: Iterable[tuple[str, object]]) -> None:
    """Raise `BadInput` if a method has several sets of hyperparameters, because their mean is meaningless.

    Args:
        path: The CSV, for the message.
        recipes: The method and the hyperparameters of each run.
    """
    only: dict[str, object] = {}
    for method, recipe in recipes:
        if only.setdefault(method, recipe) != recipe:
            raise BadInput(
                f"`--csv` names `{path}`, a tuning sweep in which `{method}` has several settings."
            )
