"""`torchlml figures sliding-sigmoid`: an animation of the sigmoid that slides until its outputs sum to k."""

import math
from pathlib import Path
from typing import Any

import matplotlib
import torch
from matplotlib.animation import FuncAnimation, PillowWriter
from matplotlib.figure import Figure

import torchlml
from torchlml_lab.cli_errors import BadInput
from torchlml_lab.figures.files import say_where
from torchlml_lab.figures.projection import ROW
from torchlml_lab.figures.settings import SlidingSigmoidSettings
from torchlml_lab.files import check_file, replacing
from torchlml_lab.plots import BLUE, GREY, INK, LOOK, SKY

K = 3.0
FRAMES = 26
HOLD = 12  # frames at either end, so that both states can be read
FRAMES_PER_SECOND = 15


def main(settings: SlidingSigmoidSettings) -> None:
    """Write the animation."""
    if settings.out.suffix != ".gif":
        raise BadInput(f"`--out` must end in `.gif`, but it is `{settings.out}`.")
    check_file("--out", settings.out)
    draw(settings.out)
    say_where(settings.out)


def draw(picture: Path) -> None:
    """Write the animation to a GIF file."""
    x = torch.tensor(ROW)
    nu = torchlml.lml_dual(x, K).item()
    grid = torch.linspace(x.min().item() - 1, x.max().item() + 1, 300)
    with matplotlib.rc_context(LOOK):
        figure = Figure(figsize=(7, 2.6), layout="constrained")
        axes = figure.subplots()
        axes.set(xlim=(grid[0].item(), grid[-1].item()), ylim=(-0.02, 1.06), xlabel="logit $x$")
        axes.set_yticks((0, 0.5, 1))
        axes.axhline(0.5, color=GREY, linewidth=0.6, linestyle=(0, (4, 4)), zorder=0)
        axes.plot(grid.numpy(), torch.sigmoid(grid).numpy(), color=SKY, linewidth=1.2)
        axes.text(-0.25, 0.53, "sigmoid(x)", color=SKY, ha="right")
        (curve,) = axes.plot([], [], color=BLUE, linewidth=2)
        (points,) = axes.plot([], [], "o", color=BLUE, markersize=5)
        stems = axes.vlines(x.numpy(), 0, x.numpy() * 0, color=BLUE, linewidth=0.8, alpha=0.5)
        title = axes.text(0.01, 1.02, "", transform=axes.transAxes, color=INK, fontsize=10, weight="bold")

        def show(frame: int) -> list[Any]:
            shift = nu * _progress(frame)
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
            animation.save(str(temporary), writer=writer, dpi=100)


def _progress(frame: int) -> float:
    """Position between the plain sigmoid (0) and the projection (1): forward, hold, back, hold."""
    cycle = FRAMES + HOLD
    step = min(frame % cycle, FRAMES) / FRAMES
    eased = (1 - math.cos(math.pi * step)) / 2
    return eased if frame < cycle else 1 - eased
