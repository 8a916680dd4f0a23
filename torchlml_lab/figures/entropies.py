"""`torchlml figures entropies`: what sigmoid, softmax, lml and constrained softmax add to x.y, as heights."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from matplotlib.axes import Axes
from matplotlib.tri import TriContourSet
from torch import Tensor

from torchlml_lab.figures.options import draw_only
from torchlml_lab.style import INK, PAGE, new_figure

_STEPS = 120


def main(arguments: Sequence[str]) -> None:
    """Read where the picture goes, and draw it."""
    about = (
        "Draw the entropies of sigmoid, softmax, lml and constrained softmax over the sets they project onto."
    )
    draw_only("entropies", about, arguments, draw)


def entropy(y: Tensor) -> Tensor:
    """H(y) = -sum y log y, of softmax and constrained softmax; 0 log 0 is 0."""
    return -torch.special.xlogy(y, y).sum(-1)


def binary_entropy(y: Tensor) -> Tensor:
    """H_b(y) = -sum y log y + (1 - y) log(1 - y), of sigmoid and lml."""
    return entropy(y) + entropy(1 - y)


@dataclass(frozen=True)
class Surface:
    """An entropy over a polygon: `corners` are its corners as answers y, in the order around it."""

    name: str
    polytope: str
    height: Callable[[Tensor], Tensor]
    corners: tuple[tuple[int, ...], ...]


_PAIRS = ((1, 1, 0), (1, 0, 1), (0, 1, 1))
SURFACES = (
    Surface("sigmoid", "unit square", binary_entropy, ((0, 0), (1, 0), (1, 1), (0, 1))),
    Surface("softmax", "simplex L(3, 1)", entropy, ((1, 0, 0), (0, 1, 0), (0, 0, 1))),
    Surface("lml", "L(3, 2)", binary_entropy, _PAIRS),
    Surface("constrained softmax", "L(3, 2)", entropy, _PAIRS),
)


def points(surface: Surface) -> tuple[Tensor, Tensor]:
    """A grid over the polygon: weights of the corners (P, corners), and the answers y (P, n) they mean."""
    corners = torch.tensor(surface.corners, dtype=torch.float64)
    steps = torch.linspace(0, 1, _STEPS + 1, dtype=torch.float64)
    a, b = (side.flatten() for side in torch.meshgrid(steps, steps, indexing="ij"))
    if len(corners) == 4:
        weights = torch.stack([(1 - a) * (1 - b), a * (1 - b), a * b, (1 - a) * b], -1)
    else:
        inside = a + b < 1 + 1e-9
        a, b = a[inside], b[inside]
        weights = torch.stack([a, b, (1 - a - b).clamp(min=0)], -1)
    return weights, weights @ corners


def draw(picture: Path) -> None:
    """Four maps of the entropy as a share of its maximum, with contour lines."""
    with new_figure(picture, PAGE, 2.25) as figure:
        panels = figure.subplots(1, 4)
        filled = [_draw_surface(axes, surface) for axes, surface in zip(panels, SURFACES, strict=True)]
        bar = figure.colorbar(filled[0], ax=panels, shrink=0.8, aspect=18, pad=0.01, ticks=(0, 0.5, 1))
        bar.set_label("entropy / its maximum")
        bar.outline.set_linewidth(0.5)


def _draw_surface(axes: Axes, surface: Surface) -> TriContourSet:
    weights, y = points(surface)
    if len(surface.corners) == 4:
        place = torch.tensor([[0.0, 0.0], [1.0, 0.0], [1.0, 1.0], [0.0, 1.0]], dtype=torch.float64)
    else:
        place = torch.tensor([[0.0, 0.0], [1.0, 0.0], [0.5, 0.75**0.5]], dtype=torch.float64)
    heights = surface.height(y)
    across, up = (weights @ place).T.numpy()
    share = (heights / heights.max()).numpy()
    levels = [i / 10 for i in range(11)]
    filled = axes.tricontourf(across, up, share, levels=levels, cmap="cividis")
    axes.tricontour(across, up, share, levels=levels[1:-1], colors="white", linewidths=0.4)
    axes.fill(*place.T, facecolor="none", edgecolor=INK, linewidth=0.7, zorder=3)
    for corner, (right, top) in zip(surface.corners, place.tolist(), strict=True):
        below = top < 0.5
        axes.annotate(
            "".join(map(str, corner)),
            (right, top),
            (0, -3 if below else 3),
            textcoords="offset points",
            ha="center",
            va="top" if below else "bottom",
            fontsize=7,
            color=INK,
        )
    axes.set_aspect("equal")
    axes.set_axis_off()
    axes.set_xlim(-0.02, 1.02)
    axes.set_ylim(-0.14, 1.12)
    axes.set_title(surface.name)
    axes.text(0.5, -0.2, surface.polytope, ha="center", va="top", fontsize=7.5)
    return filled
