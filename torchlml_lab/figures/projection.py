"""Figures of the projection of one row, its threshold, root finding, and other top-k relaxations."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib
import torch
from matplotlib.animation import FuncAnimation, PillowWriter
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from rich.table import Table
from rich.text import Text
from torch import Tensor

import torchlml
from torchlml._solve.newton import order_offsets
from torchlml_lab.cli_errors import BadInput
from torchlml_lab.engine.output import new_console
from torchlml_lab.figures.settings import (
    ProjectionSettings,
    RelaxationsSettings,
    RootFindingSettings,
    SlidingSigmoidSettings,
)
from torchlml_lab.files import check_file, check_picture, replacing
from torchlml_lab.plots import (
    BLUE,
    GREEN,
    GREY,
    INK,
    LOOK,
    ORANGE,
    PAGE,
    PURPLE,
    SKY,
    VERMILION,
    draw_only,
    new_figure,
    say_where,
)

ROW = (3.7, -1.2, 0.7, 4.6, -0.4, 2.9, -2.8, 0.2, -2.0, 1.3)

NARROW = 4.6  # inches
COLORS = {"softmax": ORANGE, "sigmoid": SKY, "lml": BLUE}


def projection(settings: ProjectionSettings) -> None:
    """Print a table of softmax, sigmoid and lml, and draw the figure."""
    check_picture(settings.out)
    x = torch.tensor(ROW)
    if not 0 < settings.k < len(x):
        raise BadInput(f"`--k` must be greater than 0 and less than {len(x)}, but it is {settings.k:g}.")
    answers = {
        "softmax": torch.softmax(x, -1),
        "sigmoid": torch.sigmoid(x),
        "lml": torchlml.lml(x, settings.k),
    }
    console = new_console()
    console.print(_table(x, answers, settings.k))
    console.print(
        f"lml shifts all logits by one number nu, so that the sigmoids sum to k: "
        f"y = sigmoid(x + nu) with nu = {torchlml.lml_dual(x, settings.k).item():.4f}."
    )
    draw_projection(x, answers, settings.k, settings.out)
    say_where(settings.out)


def _table(x: Tensor, answers: dict[str, Tensor], k: float) -> Table:
    table = Table(title=f"ten logits, k = {k:g}; a star marks values above 0.5", title_justify="left")
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


def draw_projection(x: Tensor, answers: dict[str, Tensor], k: float, picture: Path) -> None:
    """Draw the three outputs as bars, and lml as a sigmoid that is shifted until its values sum to k.

    Args:
        x: The logits of one row.
        answers: The outputs of softmax, sigmoid and lml, by name.
        k: The sum of the lml output.
        picture: The PNG or SVG file to write.
    """
    # The figure is narrow and its panels are stacked, so that the text is large enough on phones.
    with new_figure(picture, NARROW, 4.6) as figure:
        bars, curve = figure.subplots(2, 1)
        _draw_bars(bars, x, answers)
        _draw_threshold(curve, x, answers["lml"], k)
        for axes in (bars, curve):
            axes.set_ylim(0, 1.04)
            axes.set_yticks((0, 0.5, 1))
            axes.axhline(0.5, color=GREY, linewidth=0.6, linestyle=(0, (4, 4)), zorder=0)


def _draw_bars(axes: Axes, x: Tensor, answers: dict[str, Tensor]) -> None:
    """Draw three bars per label, in descending order of the logits."""
    order = x.argsort(descending=True)
    place = torch.arange(len(x)).numpy()
    for i, (name, y) in enumerate(answers.items()):
        axes.bar(place + (i - 1) * 0.28, y[order].numpy(), width=0.26, color=COLORS[name])
        text = f"{name}: sum {y.sum().item():.2f}"
        axes.text(0.99, 0.95 - 0.11 * i, text, color=COLORS[name], ha="right", transform=axes.transAxes)
    axes.set_xticks(place, [f"{value:.1f}" for value in x[order].tolist()])
    axes.tick_params(axis="x", length=0)
    axes.set_xlabel("logit")
    axes.set_ylabel("output $y$")
    axes.set_title("One row, three outputs")


def _draw_threshold(axes: Axes, x: Tensor, y: Tensor, k: float) -> None:
    """Draw the sigmoid twice: unshifted, and shifted so that its values at the logits sum to k."""
    nu = torchlml.lml_dual(x, k).item()
    grid = torch.linspace(x.min().item() - 1, x.max().item() + 1, 400)
    for name, shift in (("sigmoid", 0.0), ("lml", nu)):
        axes.plot(grid.numpy(), torch.sigmoid(grid + shift).numpy(), color=COLORS[name], linewidth=2)
    axes.text(-1.0, 0.42, "$\\sigma(x)$", color=COLORS["sigmoid"], ha="right")
    axes.text(-nu - 0.8, 0.34, f"$\\sigma(x + \\nu)$, sum {k:g}", color=COLORS["lml"], ha="right")
    axes.vlines(x.numpy(), 0, y.numpy(), color=COLORS["lml"], linewidth=0.8, alpha=0.5)
    axes.plot(x.numpy(), y.numpy(), "o", color=COLORS["lml"])
    arrow = {"arrowstyle": "-|>", "color": VERMILION, "linewidth": 1.4}
    axes.annotate("", (-nu, 0.5), (0, 0.5), arrowprops=arrow)
    axes.text(-nu / 2, 0.52, "$-\\nu$", color=VERMILION, ha="center", va="bottom", fontsize=10)
    axes.set_xlabel("logit $x$")
    axes.set_ylabel("output $y$")
    axes.set_title("Shift the sigmoid until the outputs sum to k")


ROOT_FINDING_ROW, K = (3.1, 1.6, 0.9, -0.4, -1.7, -3.0), 2
PAPERS_OFFSET = 7.0


def root_finding(settings: RootFindingSettings) -> None:
    """Draw the equation for nu and its search intervals, and print the path of the figure."""
    draw_only(draw_root_finding, settings.out)


def papers_bracket(x: Tensor, k: int) -> tuple[float, float]:
    """Return the paper's search interval for nu, which is heuristic."""
    ordered = x.sort(descending=True).values
    return -ordered[k - 1].item() - PAPERS_OFFSET, -ordered[k].item() + PAPERS_OFFSET


def proven_bracket(x: Tensor, k: int) -> tuple[float, float]:
    """Return an interval that provably contains nu, with offsets log(n - k) and log k instead of 7."""
    ordered = x.sort(descending=True).values
    below, above = order_offsets(torch.tensor(float(k)), torch.tensor(float(len(x))))
    return -ordered[k - 1].item() - below.item(), -ordered[k].item() + above.item()


def draw_root_finding(picture: Path) -> None:
    """Draw three panels: the equation for nu with two search intervals, its terms, and equal logits."""
    x = torch.tensor(ROOT_FINDING_ROW, dtype=torch.float64)
    with new_figure(picture, PAGE, 2.5) as figure:
        total, parts, ties = figure.subplots(1, 3)
        parts.sharex(total)
        _draw_sum(total, x)
        _draw_parts(parts, x)
        _draw_ties(ties)


def _draw_sum(axes: Axes, x: Tensor) -> None:
    nu = torch.linspace(-11, 8, 600, dtype=torch.float64)
    root = torchlml.lml_dual(x, K).item()
    axes.axhline(0, color=GREY, linewidth=0.7)
    axes.plot(nu, torch.sigmoid(x + nu.unsqueeze(1)).sum(1) - K, color=INK)
    axes.plot([root], [0], "o", color=VERMILION, markersize=5, zorder=3)
    axes.annotate("$\\nu^\\star$", (root, 0), (4, -11), textcoords="offset points", color=VERMILION)
    _draw_bracket(axes, papers_bracket(x, K), -2.75, ORANGE, "paper: $\\Delta = 7$")
    _draw_bracket(axes, proven_bracket(x, K), -3.75, BLUE, "proven: $\\log(n - k)$, $\\log k$")
    axes.set_ylim(-4.6, 4.3)
    axes.set_yticks((-2, 0, 2, 4))
    axes.set_xlabel("$\\nu$")
    axes.set_ylabel("$g(\\nu)$")
    axes.set_title(f"Sum, n = {len(x)}, k = {K}")


def _draw_bracket(axes: Axes, ends: tuple[float, float], height: float, color: str, label: str) -> None:
    axes.plot(ends, (height, height), "|-", color=color, markersize=7, markeredgewidth=1.5)
    axes.text(sum(ends) / 2, height + 0.17, label, color=color, ha="center", va="bottom", fontsize=7)


def _draw_parts(axes: Axes, x: Tensor) -> None:
    nu = torch.linspace(-11, 8, 600, dtype=torch.float64)
    root = torchlml.lml_dual(x, K).item()
    looks = {
        f"largest {K}": (VERMILION, "-", x[:K]),
        f"rank {K + 1}": (PURPLE, "--", x[K : K + 1]),
        "others": (BLUE, "-", x[K + 1 :]),
    }
    places = {f"largest {K}": (-10.5, 0.75), f"rank {K + 1}": (-10.5, 0.62), "others": (2.9, 0.35)}
    for name, (color, line, entries) in looks.items():
        axes.text(*places[name], name, color=color, fontsize=7)
        for entry in entries.tolist():
            axes.plot(nu, torch.sigmoid(entry + nu), line, color=color)
            axes.plot([root], torch.sigmoid(torch.tensor([entry + root])), "o", color=color, markersize=3)
    axes.axvline(root, color=GREY, linewidth=0.7, linestyle=(0, (4, 3)))
    axes.text(root - 0.3, 1.03, "$\\nu^\\star$", color=VERMILION, ha="right", va="bottom")
    axes.set_ylim(-0.02, 1.12)
    axes.set_yticks((0, 0.5, 1))
    axes.set_xlabel("$\\nu$")
    axes.set_ylabel("$\\sigma(x_j + \\nu)$")
    axes.set_title(f"Terms: sum {K} at $\\nu^\\star$")


def _draw_ties(axes: Axes) -> None:
    """Draw nu = log(n - 1) for equal logits and k = n - 1. The paper's interval excludes it if n >= 1098."""
    sizes = torch.tensor([3 ** (i / 4) for i in range(3, 51)], dtype=torch.float64).round()
    axes.fill_between(sizes, -PAPERS_OFFSET, PAPERS_OFFSET, color=ORANGE, alpha=0.15, linewidth=0)
    axes.text(3, -5.8, "paper's interval", color=ORANGE, fontsize=7)
    below, above = order_offsets(sizes - 1, sizes)
    axes.fill_between(sizes, -below, above, color=BLUE, alpha=0.25, linewidth=0)
    axes.text(2000, 1.5, "proven interval", color=BLUE, fontsize=7)
    axes.plot(sizes, (sizes - 1).log(), color=VERMILION)
    axes.annotate("$\\nu^\\star = \\log(n - 1)$", (3e4, 10.8), ha="right", va="bottom", color=VERMILION)
    axes.plot([1098], [PAPERS_OFFSET], "o", color=INK, markersize=4)
    axes.annotate("n = 1098", (1098, 7), (4, -9), textcoords="offset points", fontsize=7)
    axes.set_xscale("log")
    axes.set_xticks((10, 1e3, 1e5))
    axes.set_xlabel("row length n")
    axes.set_ylabel("$\\nu$")
    axes.set_title("Equal logits, k = n \u2212 1")


RELAXED_ROW = (3.0, 2.4, 1.9, 0.6, 0.2, -0.3, -1.0, -1.4)

# The relaxations: y as a function of the logits and k, with color and marker.
RELAXATIONS: dict[str, tuple[Callable[[Tensor, float], Tensor], str, str]] = {
    "softmax × k": (lambda x, k: k * torch.softmax(x, -1), ORANGE, "s"),
    "sigmoid": (lambda x, k: torch.sigmoid(x), SKY, "^"),
    "lml": (torchlml.lml, BLUE, "o"),
    "constrained softmax": (torchlml.constrained_softmax, GREEN, "D"),
    "constrained sparsemax": (torchlml.constrained_sparsemax, VERMILION, "P"),
}


def which_relaxation(settings: RelaxationsSettings) -> None:
    """Draw the relaxations of top-k, and print the path of the figure."""
    draw_only(draw_relaxations, settings.out)


def draw_relaxations(picture: Path) -> None:
    """Draw three panels: the outputs for k = 3 at two temperatures, and the gradient of the third output."""
    x = torch.tensor(RELAXED_ROW, dtype=torch.float64)
    with new_figure(picture, PAGE, 2.8) as figure:
        soft, peaked, gradient = figure.subplots(1, 3, sharex=True)
        peaked.sharey(soft)
        for axes, row, title in ((soft, x, "Output y, k = 3"), (peaked, x / 0.25, "y at temperature 0.25")):
            lines = {name: function(row, 3) for name, (function, *_) in RELAXATIONS.items()}
            axes.axhline(1, color=GREY, linewidth=0.6, linestyle=(0, (4, 4)), zorder=0)
            _draw_lines(axes, lines, title)
        soft.set_ylim(-0.06, 1.62)
        over = (3 * torch.softmax(x / 0.25, -1))[0].item()
        peaked.annotate(f"{over:.1f} at label 1", (0.55, 1.5), color=ORANGE, fontsize=7)
        slopes = {}
        for name, (function, *_) in RELAXATIONS.items():
            leaf = x.clone().requires_grad_()
            (slopes[name],) = torch.autograd.grad(function(leaf, 3)[2], leaf)
        gradient.axhline(0, color=GREY, linewidth=0.6, zorder=0)
        _draw_lines(gradient, slopes, "Gradient of $y_3$, k = 3")
        handles = [Line2D([], [], color=color, marker=marker) for _, color, marker in RELAXATIONS.values()]
        figure.legend(handles, list(RELAXATIONS), loc="outside upper center", ncols=5, labelcolor="linecolor")


def _draw_lines(axes: Axes, lines: dict[str, Tensor], title: str) -> None:
    for name, heights in lines.items():
        _, color, marker = RELAXATIONS[name]
        axes.plot(range(len(heights)), heights.tolist(), color=color, marker=marker, linewidth=0.9, ms=3.5)
    axes.set_title(title)
    axes.set_xticks(range(len(RELAXED_ROW)), [str(i + 1) for i in range(len(RELAXED_ROW))])
    axes.set_xlabel("label, by decreasing logit")


SLIDING_K = 3.0
FRAMES = 26
HOLD = 12  # frames for the pause at either end, so that both states can be read
FRAMES_PER_SECOND = 15


def sliding_sigmoid(settings: SlidingSigmoidSettings) -> None:
    """Write the animation, and print its path."""
    if settings.out.suffix != ".gif":
        raise BadInput(f"`--out` must end in `.gif`, but it is `{settings.out}`.")
    check_file("--out", settings.out)
    draw_sliding_sigmoid(settings.out)
    say_where(settings.out)


def draw_sliding_sigmoid(picture: Path) -> None:
    """Write the animation to a GIF file."""
    x = torch.tensor(ROW)
    nu = torchlml.lml_dual(x, SLIDING_K).item()
    grid = torch.linspace(x.min().item() - 1, x.max().item() + 1, 300)
    # The frames of a GIF are drawn over each other, so they cannot be transparent.
    with matplotlib.rc_context(LOOK | {"savefig.transparent": False}):
        figure = Figure(figsize=(NARROW, 2.3), layout="constrained")
        axes = figure.subplots()
        axes.set(xlim=(grid[0].item(), grid[-1].item()), ylim=(-0.02, 1.06), xlabel="logit $x$")
        axes.set_yticks((0, 0.5, 1))
        axes.axhline(0.5, color=GREY, linewidth=0.6, linestyle=(0, (4, 4)), zorder=0)
        axes.plot(grid.numpy(), torch.sigmoid(grid).numpy(), color=SKY, linewidth=1.2)
        axes.text(-0.25, 0.53, "sigmoid(x)", color=SKY, ha="right")
        (curve,) = axes.plot([], [], color=BLUE, linewidth=2)
        (points,) = axes.plot([], [], "o", color=BLUE, markersize=5)
        stems = axes.vlines(x.numpy(), 0, x.numpy() * 0, color=BLUE, linewidth=0.8, alpha=0.5)
        title = axes.text(0.01, 1.02, "", transform=axes.transAxes, color=INK, fontsize=8.5, weight="bold")

        def show(frame: int) -> list[Any]:
            shift = nu * _progress(frame) + 0.0  # turns -0.0 into 0.0
            y = torch.sigmoid(x + shift)
            curve.set_data(grid.numpy(), torch.sigmoid(grid + shift).numpy())
            points.set_data(x.numpy(), y.numpy())
            stems.set_segments([[(a, 0), (a, b)] for a, b in zip(x.tolist(), y.tolist(), strict=True)])
            title.set_text(f"sigmoid(x + ν), ν = {shift:.2f}: the ten outputs sum to {y.sum().item():.2f}")
            return [curve, points, stems, title]

        animation = FuncAnimation(figure, show, frames=2 * (FRAMES + HOLD))
        picture.parent.mkdir(parents=True, exist_ok=True)
        with replacing(picture) as temporary:
            writer = PillowWriter(fps=FRAMES_PER_SECOND)
            animation.save(str(temporary), writer=writer, dpi=130)


def _progress(frame: int) -> float:
    """Return the position of a frame between sigmoid (0) and projection (1).

    The animation moves to the projection, pauses, moves back, and pauses again.
    """
    cycle = FRAMES + HOLD
    step = min(frame % cycle, FRAMES) / FRAMES
    eased = (1 - math.cos(math.pi * step)) / 2
    return eased if frame < cycle else 1 - eased
