"""`torchlml figures root-finding`: g(nu) = sum sigmoid(x + nu) - k, its parts, and intervals for its root."""

from collections.abc import Sequence
from pathlib import Path

import torch
from matplotlib.axes import Axes
from torch import Tensor

import torchlml
from torchlml._solve.newton import order_offsets
from torchlml_lab.figures.options import draw_only
from torchlml_lab.style import (
    BLUE,
    DARK_ORANGE,
    GREY,
    INK,
    ORANGE,
    PAGE,
    PURPLE,
    VERMILION,
    new_figure,
)

LOGITS, K = (3.1, 1.6, 0.9, -0.4, -1.7, -3.0), 2
PAPERS_OFFSET = 7.0


def main(arguments: Sequence[str]) -> None:
    """Read where the picture goes, and draw it."""
    about = "Draw how the threshold of six logits is found for k = 2, and from which interval."
    draw_only("root-finding", about, arguments, draw)


def papers_bracket(x: Tensor, k: int) -> tuple[float, float]:
    """The interval in which the paper looks for nu: a heuristic."""
    ordered = x.sort(descending=True).values
    return -ordered[k - 1].item() - PAPERS_OFFSET, -ordered[k].item() + PAPERS_OFFSET


def proven_bracket(x: Tensor, k: int) -> tuple[float, float]:
    """The same interval with offsets that make it a theorem: log(n - k) and log k instead of 7."""
    ordered = x.sort(descending=True).values
    below, above = order_offsets(torch.tensor(float(k)), torch.tensor(float(len(x))))
    return -ordered[k - 1].item() - below.item(), -ordered[k].item() + above.item()


def draw(picture: Path) -> None:
    """g with both intervals, the sigmoids it is the sum of, and a row whose root the paper's one misses."""
    x = torch.tensor(LOGITS, dtype=torch.float64)
    with new_figure(picture, PAGE, 2.5) as figure:
        total, parts, ties = figure.subplots(1, 3)
        _draw_sum(total, x)
        _draw_parts(parts, x)
        _draw_ties(ties)


def _draw_sum(axes: Axes, x: Tensor) -> None:
    nu = torch.linspace(-10, 8, 600, dtype=torch.float64)
    root = torchlml.lml_dual(x, K).item()
    axes.axhline(0, color=GREY, linewidth=0.7)
    axes.plot(nu, torch.sigmoid(x + nu.unsqueeze(1)).sum(1) - K, color=INK)
    axes.plot([root], [0], "o", color=VERMILION, markersize=5, zorder=3)
    axes.annotate("$\\nu^\\star$", (root, 0), (4, -11), textcoords="offset points", color=VERMILION)
    _draw_bracket(axes, papers_bracket(x, K), -2.75, DARK_ORANGE, "the paper's: $\\Delta = 7$")
    _draw_bracket(axes, proven_bracket(x, K), -3.75, BLUE, "proven: $\\log(n - k)$, $\\log k$")
    axes.set_ylim(-4.6, 4.3)
    axes.set_yticks((-2, 0, 2, 4))
    axes.set_xlabel("$\\nu$")
    axes.set_ylabel("$g(\\nu)$")
    axes.set_title(f"The sum, n = {len(x)}, k = {K}")


def _draw_bracket(axes: Axes, ends: tuple[float, float], height: float, colour: str, label: str) -> None:
    axes.plot(ends, (height, height), "|-", color=colour, markersize=7, markeredgewidth=1.5)
    axes.text(sum(ends) / 2, height + 0.17, label, color=colour, ha="center", va="bottom", fontsize=7)


def _draw_parts(axes: Axes, x: Tensor) -> None:
    nu = torch.linspace(-13, 8, 600, dtype=torch.float64)
    root = torchlml.lml_dual(x, K).item()
    looks = {
        f"largest {K}": (VERMILION, "-", x[:K]),
        f"number {K + 1}": (PURPLE, "--", x[K : K + 1]),
        "the others": (BLUE, "-", x[K + 1 :]),
    }
    for name, (colour, line, entries) in looks.items():
        for i, entry in enumerate(entries.tolist()):
            axes.plot(nu, torch.sigmoid(entry + nu), line, color=colour, label=name if i == 0 else None)
            axes.plot([root], torch.sigmoid(torch.tensor([entry + root])), "o", color=colour, markersize=3)
    axes.axvline(root, color=GREY, linewidth=0.7, linestyle=(0, (4, 3)))
    axes.text(root - 0.3, 1.03, "$\\nu^\\star$", color=VERMILION, ha="right", va="bottom")
    axes.set_ylim(-0.02, 1.12)
    axes.set_yticks((0, 0.5, 1))
    axes.set_xlabel("$\\nu$")
    axes.set_ylabel("$\\sigma(x_j + \\nu)$")
    axes.set_title(f"Its parts: at $\\nu^\\star$ they sum to {K}")
    axes.legend(loc="upper left", bbox_to_anchor=(-0.03, 0.92), fontsize=7)


def _draw_ties(axes: Axes) -> None:
    """Equal logits and k = n - 1, where nu is log(n - 1): beyond the paper's interval from n = 1098 on."""
    sizes = torch.tensor([3 ** (i / 4) for i in range(3, 51)], dtype=torch.float64).round()
    axes.fill_between(sizes, -PAPERS_OFFSET, PAPERS_OFFSET, color=ORANGE, alpha=0.25, linewidth=0)
    axes.text(3, -5.8, "the paper's interval", color=DARK_ORANGE, fontsize=7)
    below, above = order_offsets(sizes - 1, sizes)
    axes.fill_between(sizes, -below, above, color=BLUE, alpha=0.25, linewidth=0)
    axes.text(2000, 1.5, "the proven one", color=BLUE, fontsize=7)
    axes.plot(sizes, (sizes - 1).log(), color=VERMILION)
    axes.annotate("$\\nu^\\star = \\log(n - 1)$", (3e4, 10.8), ha="right", va="bottom", color=VERMILION)
    axes.plot([1098], [PAPERS_OFFSET], "o", color=INK, markersize=4)
    axes.annotate("n = 1098", (1098, 7), (4, -9), textcoords="offset points", fontsize=7)
    axes.set_xscale("log")
    axes.set_xticks((10, 1e3, 1e5))
    axes.set_xlabel("n, the length of a row")
    axes.set_ylabel("$\\nu$")
    axes.set_title("Equal logits, k = n \u2212 1")
