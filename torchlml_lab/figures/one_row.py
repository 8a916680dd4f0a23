"""`torchlml figures projection`: one row through softmax, sigmoid and lml, as a table and as a picture."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from matplotlib.axes import Axes
from rich.table import Table
from rich.text import Text
from torch import Tensor

import torchlml
from torchlml_lab.errors import BadInput
from torchlml_lab.figures.options import FigureSettings, read_options, say_where
from torchlml_lab.screen import new_console
from torchlml_lab.style import (
    BLUE,
    GREY,
    ORANGE,
    PAGE,
    SKY,
    VERMILION,
    new_figure,
)

LOGITS = (3.7, -1.2, 0.7, 4.6, -0.4, 2.9, -2.8, 0.2, -2.0, 1.3)

COLOURS = {"softmax": ORANGE, "sigmoid": SKY, "lml": BLUE}


@dataclass(frozen=True)
class ProjectionSettings(FigureSettings):
    """Project a row of ten logits, print it beside softmax and sigmoid, and draw the picture."""

    k: float = 3.0
    """What the projected row sums to: how many of the ten labels to choose, between 0 and 10."""


def main(arguments: Sequence[str]) -> None:
    """Read the options, print the table and draw the picture."""
    settings = read_options(ProjectionSettings, "projection", arguments)
    x = torch.tensor(LOGITS)
    if not 0 < settings.k < len(x):
        raise BadInput(f"`--k` is {settings.k:g}, and must be more than 0 and less than {len(x)}.")
    answers = {
        "softmax": torch.softmax(x, -1),
        "sigmoid": torch.sigmoid(x),
        "lml": torchlml.lml(x, settings.k),
    }
    console = new_console()
    console.print(_table(x, answers, settings.k))
    console.print(
        f"lml shifts the whole row by one number, its threshold, until the sigmoids sum to k: "
        f"y = sigmoid(x + nu) with nu = {torchlml.lml_dual(x, settings.k).item():.4f}."
    )
    draw(x, answers, settings.k, settings.out)
    say_where(settings.out)


def _table(x: Tensor, answers: dict[str, Tensor], k: float) -> Table:
    table = Table(title=f"ten logits, k = {k:g}; a star marks what is above 0.5", title_justify="left")
    table.add_column("label", justify="right")
    for name in ("logit", *answers):
        table.add_column(name, justify="right")
    for i, logit in enumerate(x.tolist()):
        cells = [_starred(y[i].item()) for y in answers.values()]
        table.add_row(str(i), f"{logit:.1f}", *cells, end_section=i == len(x) - 1)
    table.add_row("sum", "", *(f"{y.sum().item():.4f}  " for y in answers.values()))
    table.add_row("above 0.5", "", *(f"{int((y > 0.5).sum())}  " for y in answers.values()))
    return table


def _starred(value: float) -> Text:
    return Text(f"{value:.4f} *", style="bold") if value > 0.5 else Text(f"{value:.4f}  ")


def draw(x: Tensor, answers: dict[str, Tensor], k: float, picture: Path) -> None:
    """Draw the three answers as bars, and lml as the sigmoid that slides along until its sum is k.

    Args:
        x: The logits of one row.
        answers: What softmax, sigmoid and lml make of them, by name.
        k: What the last of them sums to.
        picture: The PNG or SVG to write.
    """
    with new_figure(picture, PAGE, 2.7) as figure:
        bars, curve = figure.subplots(1, 2, width_ratios=(1.35, 1))
        _draw_bars(bars, x, answers)
        _draw_threshold(curve, x, answers["lml"], k)
        for axes in (bars, curve):
            axes.set_ylim(0, 1.04)
            axes.set_yticks((0, 0.5, 1))
            axes.axhline(0.5, color=GREY, linewidth=0.6, linestyle=(0, (4, 4)), zorder=0)


def _draw_bars(axes: Axes, x: Tensor, answers: dict[str, Tensor]) -> None:
    """The labels in descending order of their logits, three bars each."""
    order = x.argsort(descending=True)
    place = torch.arange(len(x)).numpy()
    for i, (name, y) in enumerate(answers.items()):
        label = f"{name}, sums to {y.sum().item():.2f}"
        axes.bar(place + (i - 1) * 0.28, y[order].numpy(), width=0.26, color=COLOURS[name], label=label)
    axes.set_xticks(place, [f"{value:.1f}" for value in x[order].tolist()])
    axes.tick_params(axis="x", length=0)
    axes.set_xlabel("logit of the label")
    axes.set_ylabel("answer $y$")
    axes.legend(loc="upper right")
    axes.set_title("One row, three answers")


def _draw_threshold(axes: Axes, x: Tensor, y: Tensor, k: float) -> None:
    """The same sigmoid twice: where it stands by itself, and where its heights above the logits sum to k."""
    nu = torchlml.lml_dual(x, k).item()
    grid = torch.linspace(x.min().item() - 1, x.max().item() + 1, 400)
    curves = {
        "sigmoid": (torch.sigmoid(grid), "$\\sigma(x)$"),
        "lml": (torch.sigmoid(grid + nu), f"$\\sigma(x + \\nu)$, sums to {k:g}"),
    }
    for name, (heights, label) in curves.items():
        axes.plot(grid.numpy(), heights.numpy(), color=COLOURS[name], linewidth=2, label=label)
    axes.vlines(x.numpy(), 0, y.numpy(), color=COLOURS["lml"], linewidth=0.8, alpha=0.5)
    axes.plot(x.numpy(), y.numpy(), "o", color=COLOURS["lml"])
    arrow = {"arrowstyle": "-|>", "color": VERMILION, "linewidth": 1.4}
    axes.annotate("", (-nu, 0.5), (0, 0.5), arrowprops=arrow)
    axes.text(-nu / 2, 0.52, "$-\\nu$", color=VERMILION, ha="center", va="bottom", fontsize=10)
    axes.legend(loc="upper left")
    axes.set_xlabel("logit $x$")
    axes.set_ylabel("height")
    axes.set_title("Slide the sigmoid until the sum is k")
