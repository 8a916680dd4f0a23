"""Draw the three figures of docs/numerics.md into this directory: `python docs/images/numerics.py`."""

from __future__ import annotations

from pathlib import Path

import matplotlib
import torch
from matplotlib.figure import Figure
from torch import Tensor

import torchlml

HERE = Path(__file__).parent
BLUE, VERMILION, SKY, GRAY = "#0072B2", "#D55E00", "#56B4E9", "#8A8A8A"
matplotlib.rcParams.update(
    {"font.size": 9, "axes.titlesize": 9.5, "axes.titleweight": "bold", "axes.titlelocation": "left",
     "axes.spines.top": False, "axes.spines.right": False, "legend.frameon": False, "savefig.dpi": 160}
)  # fmt: skip


def parts(x: Tensor, k: float, nu: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return c, P and Q in S - k = c + P - Q, for every nu."""
    z = x + nu.unsqueeze(-1)
    t = torch.sigmoid(-z.abs())
    return (z > 0).sum(-1) - k, (t * (z <= 0)).sum(-1), (t * (z > 0)).sum(-1)


def nearer_integer(figure: Figure) -> None:
    """Show entries measured from 0 or 1, and the effect on the residual of a row with a gap."""
    left, right = figure.subplots(1, 2)
    x = torch.tensor([4.2, 3.1, 2.2, -1.0, -1.8, -2.6, -3.3, -4.5], dtype=torch.float64)
    y = torchlml.lml(x, 3)
    for i, each in enumerate(y.tolist()):
        base = 1.0 if each > 0.5 else 0.0
        left.plot([i, i], [base, each], color=BLUE if base else VERMILION, linewidth=9, solid_capstyle="butt")
        left.plot(i, each, "o", color="black", markersize=4)
    left.axhline(1, color=GRAY, linewidth=0.8)
    left.axhline(0, color=GRAY, linewidth=0.8)
    left.set(title="Count from the nearer integer", xlabel="entry", ylabel="y", ylim=(-0.06, 1.06))
    left.text(2.5, 0.9, "missing from 1: Q", color=BLUE, va="center")
    left.text(4.3, 0.16, "above 0: P", color=VERMILION, va="center")

    gaps = torch.linspace(2, 60, 200, dtype=torch.float64)
    rows = torch.zeros(len(gaps), 100, dtype=torch.float64)
    rows[:, :5] = gaps.unsqueeze(-1)
    nu = -gaps / 2 + 0.5  # half a unit away from the middle of the gap
    c, p, q = (
        torch.stack(each)
        for each in zip(*(parts(x, 5, n) for x, n in zip(rows, nu, strict=True)), strict=True)
    )
    single = torch.sigmoid(rows.float() + nu.float().unsqueeze(-1)).sum(-1) - 5
    right.semilogy(gaps, (c + p - q).abs(), color=BLUE, linewidth=2.2, label="c + P - Q")
    right.semilogy(
        gaps, single.abs().clamp(min=3e-14), ".", color=VERMILION, markersize=3, label="float32 sum, minus k"
    )
    right.set(
        title="The residual of a row with a gap",
        xlabel="gap between the 5th and the 6th logit",
        ylabel="|S - k|",
    )
    right.set_ylim(1e-14, 10)
    right.text(60, 1e-13, "exactly 0", color=VERMILION, ha="right")
    right.legend(loc="upper right")


def log_ratio(figure: Figure) -> None:
    """Show the sum as a function of nu, and the log-ratio whose root Newton's method finds."""
    left, right = figure.subplots(1, 2)
    x, k = torch.tensor([20.0, 18.0, 17.0, -16.0, -18.0, -19.0, -21.0], dtype=torch.float64), 3
    nu = torch.linspace(-24, 24, 600, dtype=torch.float64)
    c, p, q = parts(x, k, nu)
    root = torchlml.lml_dual(x, k).item()
    left.plot(nu, c + p - q, color=VERMILION, linewidth=2)
    left.set(title="S - k: a flat step around the root", xlabel="nu", ylabel="S - k")
    right.plot(nu, (p + c.clamp(min=0)).log() - (q + (-c).clamp(min=0)).log(), color=BLUE, linewidth=2)
    right.set(title="log A - log B: a line, one step", xlabel="nu", ylabel="log A - log B")
    for axes in (left, right):
        axes.axhline(0, color=GRAY, linewidth=0.8)
        axes.plot(root, 0, "o", color="black", markersize=5)
    at = torch.tensor(8.0, dtype=torch.float64, requires_grad=True)
    c, p, q = parts(x, k, at.unsqueeze(0))
    value = ((p + c.clamp(min=0)).log() - (q + (-c).clamp(min=0)).log()).squeeze()
    (slope,) = torch.autograd.grad(value, at)
    landed = (at - value / slope).item()
    right.plot(at.item(), value.item(), "o", color=VERMILION)
    right.plot(landed, 0, "o", color=VERMILION, markersize=9, fillstyle="none")
    right.annotate(
        "from here ...", (at.item(), value.item()), (-72, -2), textcoords="offset points", color=VERMILION
    )
    right.annotate("... to here", (landed, 0), (10, -12), textcoords="offset points", color=VERMILION)


def a_pair(figure: Figure) -> None:
    """Show the error of y in float32 as a function of the shift of the logits."""
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
    axes.loglog(shifts, one, "s-", color=VERMILION, label="nu is one float32")
    axes.loglog(shifts, both, "o-", color=BLUE, label="nu is a pair")
    axes.set(title="Shift all logits of a row", xlabel="shift", ylabel="largest error of y")
    axes.legend()


if __name__ == "__main__":
    for draw, width in ((nearer_integer, 8.0), (log_ratio, 8.0), (a_pair, 8.0)):
        figure = Figure(figsize=(width, 2.9), layout="constrained")
        draw(figure)
        figure.savefig(HERE / f"numerics-{draw.__name__.replace('_', '-')}.png")
