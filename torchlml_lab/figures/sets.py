"""`torchlml figures sets`: how far `lml` is from the exact inclusion probabilities of k-subsets."""

from pathlib import Path

import torch
from matplotlib.axes import Axes

import torchlml
from torchlml.distributions import KSubset
from torchlml_lab.figures.files import draw_only
from torchlml_lab.figures.settings import SetsFigureSettings
from torchlml_lab.plots import BLUE, DARK_ORANGE, GREEN, GREY, PAGE, PURPLE, label_lines, new_figure, note

SIZES = (10, 30, 100, 300, 1000, 3000, 10_000, 30_000, 100_000)
LENGTH = 1000
KS = (1, 2, 5, 10, 20, 50, 100, 200, 500)  # k and n - k have the same error
SCALES = (0.5, 1.0, 3.0)
_SEEDS = 5


def main(settings: SetsFigureSettings) -> None:
    """Draw the figure."""
    draw_only(draw, settings.out)


def gap(n: int, k: int, scale: float = 1.0) -> float:
    """The largest |inclusion - lml| over a row of n normal logits, averaged over five rows."""
    generator = torch.Generator().manual_seed(n)
    x = torch.randn(_SEEDS, n, generator=generator, dtype=torch.float64) * scale
    return (KSubset(k, logits=x).mean - torchlml.lml(x, k)).abs().amax(-1).mean().item()


def draw(picture: Path) -> None:
    """Draw two panels: against n for several k, and against k for several scales of the logits."""
    with new_figure(picture, PAGE, 2.6) as figure:
        by_size, by_k = figure.subplots(1, 2, sharey=True)
        _draw_sizes(by_size)
        _draw_ks(by_k)
        note(figure, f"means over {_SEEDS} rows of normal logits")


def _draw_sizes(axes: Axes) -> None:
    ks = {"k = 1": 0.0, "k = 5": 0.0, "k = n/10": 0.1, "k = n/2": 0.5}
    ends = []
    looks = ((GREY, "o"), (DARK_ORANGE, "s"), (GREEN, "^"), (BLUE, "D"))
    for (name, share), (color, marker) in zip(ks.items(), looks, strict=True):
        points = [(n, round(share * n) or int(name[-1])) for n in SIZES]
        heights = [gap(n, k) for n, k in points]
        axes.plot([n for n, _ in points], heights, marker=marker, color=color)
        ends.append((heights[-1], name, color))
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel("n, scale 1")
    axes.set_ylabel("largest |π − y|")
    axes.set_title("Smaller for longer rows")
    label_lines(axes, ends)


def _draw_ks(axes: Axes) -> None:
    ends = []
    for scale, color, marker in zip(SCALES, (GREEN, BLUE, PURPLE), "^Ds", strict=True):
        heights = [gap(LENGTH, k, scale) for k in KS]
        axes.plot(KS, heights, marker=marker, color=color)
        ends.append((heights[-1], f"scale {scale:g}", color))
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel(f"k, n = {LENGTH}")
    axes.set_title("Larger for peaked logits")
    label_lines(axes, ends)
