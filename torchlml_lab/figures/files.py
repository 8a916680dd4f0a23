"""The files of a figure: the CSV it is drawn from, its picture and its tables."""

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TypeVar

from torchlml_lab.cli_errors import BadInput
from torchlml_lab.engine.output import StudyTable, new_console
from torchlml_lab.files import check_picture, replacing


def draw_only(draw: Callable[[Path], None], picture: Path) -> None:
    """Draw a figure that has no tables, and print where it is."""
    check_picture(picture)
    draw(picture)
    say_where(picture)


def say_where(picture: Path) -> None:
    """Print where the picture is, as the last line of a figure's command."""
    new_console().print(f"The picture is {picture}.", soft_wrap=True)


def write_tables(text: str, picture: Path) -> None:
    """Write the tables of a figure beside its picture, as Markdown, and print where both are."""
    page = picture.with_suffix(".md")
    with replacing(page) as temporary:
        temporary.write_text(text, encoding="utf-8")
    new_console().print(f"The tables are {page}.", soft_wrap=True)
    say_where(picture)


Row = TypeVar("Row")


class NotMadeYet(BadInput):
    """The CSV of a figure is not there; the sentence names the command that makes it."""


def find(named: Path | None, usual: Sequence[Path], command: str) -> Path:
    """Find the CSV.

    Args:
        named: What `--csv` said, if anything.
        usual: Where to look otherwise, in this order.
        command: The command that makes it.

    Returns:
        The path of a file that is there; `NotMadeYet` is raised when there is none.
    """
    places = usual if named is None else [named]
    for path in places:
        if path.exists():
            return path
    raise NotMadeYet(f"There is no `{places[0]}` to draw: `{command}` makes it.")


def read_sweep(
    named: Path | None, usual: Sequence[Path], task: str, table: StudyTable[Row]
) -> tuple[Path, list[Row]]:
    """Find the CSV of `torchlml sweep TASK` as `find` does, and give its path and its rows."""
    path = find(named, usual, f"torchlml sweep {task}")
    return path, table.read(path, "--csv")


def read_sweeps(
    named: Sequence[Path], own: Path, study: Sequence[Path], task: str, table: StudyTable[Row]
) -> list[tuple[Path, list[Row]]]:
    """Read several CSVs of `torchlml sweep TASK`: those that are named, else one's own, else the study's."""
    found = named or ((own,) if own.exists() else [path for path in study if path.exists()])
    return [read_sweep(path, (), task, table) for path in found or (own,)]


def refuse_tuning(path: Path, recipes: Iterable[tuple[str, object]]) -> None:
    """Refuse a CSV in which one method has several recipes: their mean would be that of no recipe.

    Args:
        path: The CSV, for the sentence.
        recipes: The method and the recipe of each run.
    """
    only: dict[str, object] = {}
    for method, recipe in recipes:
        if only.setdefault(method, recipe) != recipe:
            raise BadInput(f"`--csv` names `{path}`, where `{method}` has several recipes: it is a tuning.")
