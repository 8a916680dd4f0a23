"""`torchlml figures which-relaxation`: the same logits through five relaxations, values and gradients."""

from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from matplotlib.axes import Axes
from torch import Tensor

import torchlml
from torchlml_lab.figures.options import draw_only
from torchlml_lab.style import BLUE, GREEN, GREY, ORANGE, PAGE, SKY, VERMILION, new_figure

LOGITS = (3.0, 2.4, 1.9, 0.6, 0.2, -0.3, -1.0, -1.4)

# What is compared: y as a function of the logits and k, and its look.
RELAXATIONS: dict[str, tuple[Callable[[Tensor, float], Tensor], str, str]] = {
    "softmax x k": (lambda x, k: k * torch.softmax(x, -1), ORANGE, "s"),
    "sigmoid": (lambda x, k: torch.sigmoid(x), SKY, "^"),
    "lml": (torchlml.lml, BLUE, "o"),
    "constrained softmax": (torchlml.constrained_softmax, GREEN, "D"),
    "constrained sparsemax": (torchlml.constrained_sparsemax, VERMILION, "P"),
}
TEMPERATURES, GAPS, SUMS = (2.0, 1.0, 0.25), (0.0, 1.5, 4.0), (1.0, 3.0, 6.0)


def main(arguments: Sequence[str]) -> None:
    """Read where the picture goes, and draw it."""
    about = "Draw the same logits through five relaxations, as k, the temperature and the gap change."
    draw_only("which-relaxation", about, arguments, draw)


def draw(picture: Path) -> None:
    """Four rows of panels: values for three k, temperatures and gaps, and the gradient of one entry."""
    x = torch.tensor(LOGITS, dtype=torch.float64)
    with new_figure(picture, PAGE, 7.6) as figure:
        panels = figure.subplots(4, 3, sharex=True)
        for column in range(3):
            k, temperature, gap = SUMS[column], TEMPERATURES[column], GAPS[column]
            _values(panels[0, column], x, k, f"k = {k:g}")
            _values(panels[1, column], x / temperature, 3, f"temperature {temperature:g}, k = 3")
            _values(panels[2, column], _with_gap(x, gap), 3, f"gap {gap:g} below the third, k = 3")
            _gradient(panels[3, column], _with_gap(x, gap), 3, f"gradient of the third, gap {gap:g}")
        for axes in panels[-1]:
            axes.set_xlabel("label, from the largest logit down")
        for axes, name in zip(panels[:, 0], ("y", "y", "y", "$\\partial y_3 / \\partial x$"), strict=True):
            axes.set_ylabel(name)
        handles, labels = panels[0, 0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside upper center", ncols=5)


def _with_gap(x: Tensor, gap: float) -> Tensor:
    """The logits with the fourth and all below it moved, until it is `gap` below the third."""
    moved = x.clone()
    moved[3:] += (x[2] - gap) - x[3]
    return moved


def _values(axes: Axes, x: Tensor, k: float, title: str) -> None:
    highest = 1.0
    for name, (function, colour, marker) in RELAXATIONS.items():
        y = function(x, k)
        highest = max(highest, float(y.max()))
        axes.plot(
            range(len(x)), y.tolist(), marker, ls="-", lw=0.8, ms=3.5, alpha=0.85, color=colour, label=name
        )
    axes.axhline(1, color=GREY, linewidth=0.6, linestyle=(0, (4, 4)), zorder=0)
    axes.set_ylim(-0.05, min(highest, 3) * 1.05)
    _finish(axes, title, x)


def _gradient(axes: Axes, x: Tensor, k: float, title: str) -> None:
    for name, (function, colour, marker) in RELAXATIONS.items():
        leaf = x.clone().requires_grad_()
        (slope,) = torch.autograd.grad(function(leaf, k)[2], leaf)
        axes.plot(
            range(len(x)),
            slope.tolist(),
            marker,
            ls="-",
            lw=0.8,
            ms=3.5,
            alpha=0.85,
            color=colour,
            label=name,
        )
    axes.axhline(0, color=GREY, linewidth=0.6, zorder=0)
    axes.set_ylim(-0.35, 0.85)
    _finish(axes, title, x)


def _finish(axes: Axes, title: str, x: Tensor) -> None:
    axes.set_title(title, fontsize=8)
    axes.set_xticks(range(len(x)), [str(i + 1) for i in range(len(x))])
