"""The options of `torchlml figures NAME`: where the picture goes, and what a figure adds to that."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from torchlml_lab.cli import parse_settings
from torchlml_lab.files import replacing
from torchlml_lab.screen import new_console
from torchlml_lab.style import check_picture


@dataclass(frozen=True)
class FigureSettings:
    """What every figure is told; one with more options is a subclass, whose docstring is its help."""

    out: Path
    """The PNG or SVG to write; its folder is made when it is missing."""


@dataclass(frozen=True)
class CsvFigureSettings(FigureSettings):
    """What a figure that is drawn from a CSV is told."""

    csv: Path | None = None
    """The CSV to draw from; by default your own where its command writes it, else that in results/."""


Kind = TypeVar("Kind", bound=FigureSettings)


def read_options(kind: type[Kind], name: str, arguments: Sequence[str], about: str | None = None) -> Kind:
    """Read the options of a figure, and refuse a place that no picture can be written to.

    Args:
        kind: The figure's settings; every field but `out` has a default.
        name: The figure's name, also of the picture it writes by default.
        arguments: What followed the name.
        about: What the figure shows, for the help; by default the docstring of `kind`.

    Returns:
        The settings.
    """
    usual = kind(out=Path(f"torchlml-figures/{name}.png"))
    settings = parse_settings(kind, f"figures {name}", arguments, usual, about)
    check_picture(settings.out)
    return settings


def draw_only(name: str, about: str, arguments: Sequence[str], draw: Callable[[Path], None]) -> None:
    """Be the whole command of a figure that has no option but `--out`.

    Args:
        name: The figure's name.
        about: What it shows, for the help.
        arguments: What followed the name.
        draw: Writes the picture, with `style.new_figure`.
    """
    picture = read_options(FigureSettings, name, arguments, about).out
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
