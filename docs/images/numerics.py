"""Draw the three figures of docs/numerics.md into this directory: `python docs/images/numerics.py`."""

from __future__ import annotations

from pathlib import Path

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor

import torchlml
from torchlml_lab.plots import BLUE, GREY, INK, PAGE, VERMILION, label_lines, new_figure

HERE = Path(__file__).parent


def parts(x: Tensor, k: float, nu: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the terms c, P and Q of the residual S - k = c + P - Q for every nu.

    For y = sigmoid(x + nu), c + k is the number of entries above 1/2. P is the sum of the other entries, and
    Q is the sum of 1 - y over the entries above 1/2.
    """
    z = x + nu.unsqueeze(-1)
    t = torch.sigmoid(-z.abs())
    return (z > 0).sum(-1) - k, (t * (z <= 0)).sum(-1), (t * (z > 0)).sum(-1)


def nearer_integer(figure: Figure) -> None:
    """Show entries measured from the nearer of 0 and 1, and the residual of a row whose logits have a gap."""
    # The y-axis of the left panel is broken, because all entries are near 0 or near 1.
    grid = figure.add_gridspec(2, 2, hspace=0.06)
    top, bottom = (figure.add_subplot(grid[place, 0]) for place in (0, 1))
    _draw_entries(top, bottom)
    _draw_residual(figure.add_subplot(grid[:, 1]))


def _draw_entries(top: Axes, bottom: Axes) -> None:
    x = torch.tensor([4.2, 3.1, 2.2, -1.0, -1.8, -2.6, -3.3, -4.5], dtype=torch.float64)
    for axes, base, color in ((top, 1.0, BLUE), (bottom, 0.0, VERMILION)):
        axes.axhline(base, color=GREY, linewidth=0.8)
        for i, each in enumerate(torchlml.lml(x, 3).tolist()):
            if (each > 0.5) == (base == 1.0):
                axes.plot([i, i], [base, each], color=color, linewidth=9, solid_capstyle="butt")
                axes.plot(i, each, "o", color=INK, markersize=4)
        axes.set_xlim(-0.6, 7.6)
    top.set(title="Distance to the nearer integer", ylim=(0.79, 1.02), xticks=[], yticks=(0.8, 0.9, 1.0))
    bottom.set(xlabel="entry", ylabel="y", ylim=(-0.02, 0.21), yticks=(0.0, 0.1, 0.2))
    bottom.yaxis.set_label_coords(-0.13, 1.05)
    top.spines["bottom"].set_visible(False)
    for axes, y in ((top, 0), (bottom, 1)):  # the marks at the break of the axis
        axes.plot(
            0, y, marker=[(-1, -0.6), (1, 0.6)], color=INK, ms=7, transform=axes.transAxes, clip_on=False
        )
    top.text(2.6, 0.9, "1 \u2212 y, which sum to Q", color=BLUE, va="center")
    bottom.text(4.3, 0.13, "y, which sum to P", color=VERMILION, va="center")


def _draw_residual(axes: Axes) -> None:
    gaps = torch.linspace(2, 60, 200, dtype=torch.float64)
    rows = torch.zeros(len(gaps), 100, dtype=torch.float64)
    rows[:, :5] = gaps.unsqueeze(-1)
    nu = -gaps / 2 + 0.5  # the threshold -nu is 0.5 below the middle of the gap
    c, p, q = (
        torch.stack(each)
        for each in zip(*(parts(x, 5, n) for x, n in zip(rows, nu, strict=True)), strict=True)
    )
    single = torch.sigmoid(rows.float() + nu.float().unsqueeze(-1)).sum(-1) - 5
    axes.semilogy(gaps, (c + p - q).abs(), color=BLUE, linewidth=2.2)
    axes.semilogy(gaps, single.abs().clamp(min=3e-14), ".", color=VERMILION, markersize=3)
    axes.set(
        title="The residual of a row with a gap",
        xlabel="gap between the 5th and the 6th logit",
        ylabel="|S \u2212 k|",
        ylim=(1e-14, 10),
    )
    axes.text(44, 1e-7, "c + P \u2212 Q", color=BLUE)
    axes.text(60, 1e-13, "float32 sum minus k: exactly 0", color=VERMILION, ha="right")


def log_ratio(figure: Figure) -> None:
    """Show the sum as a function of nu, and the log-ratio whose root Newton's method finds."""
    left, right = figure.subplots(1, 2, sharex=True)
    x, k = torch.tensor([20.0, 18.0, 17.0, -16.0, -18.0, -19.0, -21.0], dtype=torch.float64), 3
    nu = torch.linspace(-24, 24, 600, dtype=torch.float64)
    c, p, q = parts(x, k, nu)
    root = torchlml.lml_dual(x, k).item()
    left.plot(nu, c + p - q, color=VERMILION, linewidth=2)
    left.set(title="S \u2212 k: flat around the root", xlabel="ν", ylabel="S \u2212 k")
    right.plot(nu, (p + c.clamp(min=0)).log() - (q + (-c).clamp(min=0)).log(), color=BLUE, linewidth=2)
    right.set(title="log A \u2212 log B: linear around the root", xlabel="ν", ylabel="log A \u2212 log B")
    for axes in (left, right):
        axes.axhline(0, color=GREY, linewidth=0.8)
        axes.plot(root, 0, "o", color=INK, markersize=5)
    at = torch.tensor(8.0, dtype=torch.float64, requires_grad=True)
    c, p, q = parts(x, k, at.unsqueeze(0))
    value = ((p + c.clamp(min=0)).log() - (q + (-c).clamp(min=0)).log()).squeeze()
    (slope,) = torch.autograd.grad(value, at)
    landed = (at - value / slope).item()
    right.plot(at.item(), value.item(), "o", color=VERMILION)
    right.plot(landed, 0, "o", color=VERMILION, markersize=9, fillstyle="none")
    right.annotate("start", (at.item(), value.item()), (-32, -2), textcoords="offset points", color=VERMILION)
    right.annotate("after one step", (landed, 0), (10, -12), textcoords="offset points", color=VERMILION)


def a_pair(figure: Figure) -> None:
    """Show the error of y in float32 against a shift of all logits, with nu as one number and as a pair."""
    axes = figure.subplots()
    torch.manual_seed(0)
    x = torch.randn(1000, dtype=torch.float64)
    shifts = [10.0**e for e in range(8)]
    one, both = [], []
    for shift in shifts:
        # Round the row to float32 first. Both results are compared with the exact y of the rounded row.
        row = (x + shift).float()
        nu = torchlml.lml_dual(row.double(), 5)
        exact = torch.sigmoid(row.double() + nu)
        one.append((torch.sigmoid(row + nu.float()) - exact).abs().max().item())
        both.append((torchlml.lml(row, 5) - exact).abs().max().item())
    axes.loglog(shifts, one, "s-", color=VERMILION)
    axes.loglog(shifts, both, "o-", color=BLUE)
    axes.set(title="Shift all logits of a row", xlabel="shift", ylabel="largest error of y")
    label_lines(axes, [(one[-1], "ν is one float32", VERMILION), (both[-1], "ν is a pair", BLUE)])


if __name__ == "__main__":
    for draw in (nearer_integer, log_ratio, a_pair):
        with new_figure(HERE / f"numerics-{draw.__name__.replace('_', '-')}.png", PAGE, 2.6) as figure:
            draw(figure)
