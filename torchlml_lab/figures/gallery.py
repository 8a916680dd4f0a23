"""`torchlml figures NAME`: the figures by name; a further one is a module with `main` and a line here."""

import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from torchlml_lab.cli import Command, choose, parse_settings
from torchlml_lab.errors import BadInput
from torchlml_lab.figures.find_csv import NotMadeYet
from torchlml_lab.files import check_folder
from torchlml_lab.screen import new_console

FIGURES = {
    "projection": Command("torchlml_lab.figures.one_row", "one row through softmax, sigmoid and lml"),
    "polytopes": Command(
        "torchlml_lab.figures.polytopes", "the sets L(3,1), L(3,2) and L(4,2), and projections"
    ),
    "root-finding": Command(
        "torchlml_lab.figures.root_finding", "how the threshold is found, and from which interval"
    ),
    "entropies": Command(
        "torchlml_lab.figures.entropies",
        "the entropies of sigmoid, softmax, lml and a relative",
    ),
    "which-relaxation": Command(
        "torchlml_lab.figures.which_relaxation", "the same logits through five relaxations"
    ),
    "timing": Command("torchlml_lab.bench.paper_figure", "the paper's timing study, from its CSV"),
    "cifar100": Command(
        "torchlml_lab.figures.accuracy_by_noise", "accuracy against label noise, from a sweep"
    ),
    "multilabel": Command(
        "torchlml_lab.figures.kept_labels", "losses against the labels kept, and tables, from sweeps"
    ),
    "scene-graph": Command(
        "torchlml_lab.figures.recall_by_epoch", "recall against epochs, and tables, from a sweep"
    ),
    "recommend": Command(
        "torchlml_lab.figures.recall_by_loss", "recall of models and losses, and a table, from a sweep"
    ),
    "scene-graph-bias": Command(
        "torchlml_lab.figures.recall_by_bias", "recall against the kind of frequency bias, from a sweep"
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
            importlib.import_module(figure.module).main(["--out", str(settings.out / f"{name}.png")])
        except NotMadeYet as missing:
            new_console().print(f"Not drawn: {name}. {missing}", soft_wrap=True, markup=False)
        except BadInput as error:
            refused.append(error)
    if refused:
        raise refused[0]
