"""The figures by name, their options, and the CSVs that they are drawn from."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from rich.console import Console

from torchlml_lab.cli import Command, choose, parse_settings
from torchlml_lab.cli_errors import BadInput
from torchlml_lab.engine.table import StudyTable
from torchlml_lab.files import check_folder, replacing
from torchlml_lab.plots import check_picture


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
    Console().print(f"The picture is {picture}.", soft_wrap=True)


def write_tables(text: str, picture: Path) -> None:
    """Write the tables of a figure beside its picture, as Markdown, and print where both are."""
    page = picture.with_suffix(".md")
    with replacing(page) as temporary:
        temporary.write_text(text, encoding="utf-8")
    Console().print(f"The tables are {page}.", soft_wrap=True)
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


FIGURES = {
    "projection": Command(
        "torchlml_lab.figures.projection:projection", "one row through softmax, sigmoid and lml"
    ),
    "polytopes": Command(
        "torchlml_lab.figures.geometry:polytopes", "the sets L(3,1), L(3,2) and L(4,2), and projections"
    ),
    "root-finding": Command(
        "torchlml_lab.figures.projection:root_finding", "how the threshold is found, and from which interval"
    ),
    "entropies": Command(
        "torchlml_lab.figures.geometry:entropies",
        "the entropies of sigmoid, softmax, lml and a relative",
    ),
    "which-relaxation": Command(
        "torchlml_lab.figures.projection:which_relaxation", "the same logits through five relaxations"
    ),
    "timing": Command("torchlml_lab.bench.paper_report", "the paper's timing study, from its CSV"),
    "cifar100": Command(
        "torchlml_lab.figures.accuracy_by_noise", "accuracy against label noise, from a sweep"
    ),
    "multilabel": Command(
        "torchlml_lab.figures.multilabel", "losses against the labels kept, and tables, from sweeps"
    ),
    "scene-graph": Command(
        "torchlml_lab.figures.scene_graph:by_epoch", "recall against epochs, and tables, from a sweep"
    ),
    "recommend": Command(
        "torchlml_lab.figures.recommend", "recall of models and losses, and a table, from a sweep"
    ),
    "scene-graph-bias": Command(
        "torchlml_lab.figures.scene_graph:by_bias", "recall against the kind of frequency bias, from a sweep"
    ),
    "which-k": Command("torchlml_lab.figures.wrong_k", "what a wrong k costs, from `torchlml which-k`"),
}


@dataclass(frozen=True)
class AllSettings:
    """Draw every figure with its usual settings; those whose CSV is not there say what makes it."""

    out: Path = Path("torchlml-figures")
    """The folder for NAME.png of each figure; it is made when it is missing."""


def main(arguments: Sequence[str]) -> None:
    """Draw the figure that is named first in the arguments."""
    if arguments and arguments[0] == "all":
        draw_all(parse_settings(AllSettings, "figures all", arguments[1:], AllSettings()))
    else:
        everything = Command(__name__, "all of them, as far as their CSVs are there")
        choose("figures", FIGURES | {"all": everything}, arguments)


def draw_all(settings: AllSettings) -> None:
    """Draw one figure after the other; one that cannot be drawn keeps none of the others from it."""
    check_folder("--out", settings.out)
    refused: list[BadInput] = []
    for name, figure in FIGURES.items():
        try:
            figure.run(["--out", str(settings.out / f"{name}.png")])
        except NotMadeYet as missing:
            Console().print(f"Not drawn: {name}. {missing}", soft_wrap=True, markup=False)
        except BadInput as error:
            refused.append(error)
    if refused:
        raise refused[0]
