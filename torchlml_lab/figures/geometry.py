"""Figures of the polytopes that lml projects onto, entropies over them, and random k-subsets."""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import combinations, product
from math import hypot
from pathlib import Path
from typing import Any

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.tri import TriContourSet
from mpl_toolkits.mplot3d import Axes3D
from mpl_toolkits.mplot3d.art3d import Poly3DCollection
from mpl_toolkits.mplot3d.proj3d import proj_transform
from torch import Tensor

import torchlml
from torchlml.distributions import KSubset
from torchlml_lab.figures.settings import EntropiesSettings, PolytopesSettings, SetsFigureSettings
from torchlml_lab.plots import (
    BLUE,
    DARK_ORANGE,
    GREEN,
    GREY,
    INK,
    ORANGE,
    PAGE,
    PURPLE,
    VERMILION,
    draw_only,
    label_lines,
    new_figure,
    note,
)

LOGITS = {3: (0.9, 0.2, -1.0), 4: (1.5, 0.5, 0.9, -1.6)}

# Points with four coordinates that sum to 2 lie in a three-dimensional hyperplane. These directions span it,
# and map the six points with two ones to the unit vectors and their negatives.
_DIRECTIONS = 0.5 * torch.tensor([[1, 1, -1, -1], [1, -1, 1, -1], [1, -1, -1, 1]], dtype=torch.float64)


def polytopes(settings: PolytopesSettings) -> None:
    """Draw the polytopes, and print the path of the figure."""
    draw_only(draw_polytopes, settings.out)


def vertices(n: int, k: int) -> Tensor:
    """Return the vertices (C(n, k), n) of L(n, k), which are the points with k ones and n - k zeros."""
    points = [point for point in product((1.0, 0.0), repeat=n) if sum(point) == k]
    return torch.tensor(points, dtype=torch.float64)


def in_space(p: Tensor) -> Tensor:
    """Map points (..., 4) of L(4, 2) isometrically to points (..., 3) in three dimensions."""
    return p @ _DIRECTIONS.T


def draw_polytopes(picture: Path) -> None:
    """Draw two triangles in a cube, and an octahedron, each with the path of lml(x / T, k) as T changes."""
    with new_figure(picture, PAGE, 3.1) as figure:
        figure.set_layout_engine("none")
        _draw_triangles(_axes(figure, 0.0, 1.02, (20, 24)))
        _draw_octahedron(_axes(figure, 0.5, 1.3, (19, 15)))
        figure.text(0.02, 0.95, "L(3, 1) and L(3, 2) in the unit cube", fontweight="bold", fontsize=8.5)
        figure.text(0.52, 0.95, "L(4, 2), an octahedron", fontweight="bold", fontsize=8.5)
        figure.text(
            0.5,
            0.025,
            "Red: lml(x / T, k) from the center (T = $\\infty$) to the k largest (T = 0). Dot: T = 1.",
            ha="center",
        )


def _axes(figure: Figure, left: float, zoom: float, view: tuple[float, float]) -> Axes3D:
    axes: Any = figure.add_axes((left, 0.05, 0.5, 0.92), projection="3d", computed_zorder=False)
    axes.set_axis_off()
    axes.set_box_aspect((1, 1, 1), zoom=zoom)
    axes.view_init(*view)
    axes.set_proj_type("persp", focal_length=1.6)
    return axes


def _draw_triangles(axes: Axes3D) -> None:
    for start, end in combinations(product((0, 1), repeat=3), 2):
        if sum(a != b for a, b in zip(start, end, strict=True)) == 1:
            # From this viewpoint, the corner 000 is hidden behind the others.
            line = (0, (3, 2)) if start == (0, 0, 0) else "-"
            axes.plot(*zip(start, end, strict=True), color=GREY, linewidth=0.7, linestyle=line)
    for k, color, ink in ((1, BLUE, BLUE), (2, ORANGE, DARK_ORANGE)):
        corners = vertices(3, k)
        axes.add_collection3d(Poly3DCollection([corners], facecolor=color, edgecolor=color, alpha=0.4))
        _draw_names(axes, corners, corners, ink)
        _draw_path(axes, _path(3, k))


def _draw_octahedron(axes: Axes3D) -> None:
    corners = vertices(4, 2)
    space = in_space(corners)
    # Two vertices are adjacent if they share exactly one label. Three mutually adjacent vertices form a face.
    shared = corners @ corners.T
    for three in combinations(range(6), 3):
        if all(shared[a, b] == 1 for a, b in combinations(three, 2)):
            axes.add_collection3d(Poly3DCollection([space[list(three)]], facecolor=BLUE, alpha=0.1))
    behind = corners.tolist().index([0, 0, 1, 1])  # from this viewpoint
    for a, b in combinations(range(6), 2):
        if shared[a, b] == 1:
            line = (0, (3, 2)) if behind in (a, b) else "-"
            axes.plot(
                *space[[a, b]].T, color=BLUE, linewidth=0.8 if behind in (a, b) else 1.2, linestyle=line
            )
    _draw_names(axes, corners, space, BLUE)
    _draw_path(axes, in_space(_path(4, 2)))


def _draw_names(axes: Axes3D, corners: Tensor, places: Tensor, color: str) -> None:
    """Write each vertex's coordinates next to it, on the side away from the center."""
    middle = (0.5, 0.5, 0.5) if corners.shape[1] == 3 else (0, 0, 0)
    x0, y0, _ = proj_transform(*middle, axes.get_proj())
    for corner, place in zip(corners.tolist(), places.tolist(), strict=True):
        x, y, _ = proj_transform(*place, axes.get_proj())
        length = hypot(x - x0, y - y0)
        away = (12 * (x - x0) / length, 8 * (y - y0) / length)
        name = "".join(str(int(c)) for c in corner)
        look = {"color": color, "ha": "center", "va": "center", "fontweight": "bold"}
        axes.annotate(name, (x, y), away, textcoords="offset points", **look)


def _path(n: int, k: int) -> Tensor:
    """Return the projections as the temperature falls from infinity to almost zero. Row 30 is T = 1."""
    scales = torch.linspace(0, 20, 601, dtype=torch.float64)
    return torchlml.lml(scales.unsqueeze(1) * torch.tensor(LOGITS[n], dtype=torch.float64), k)


def _draw_path(axes: Axes3D, path: Tensor) -> None:
    axes.plot(*path.T.tolist(), color=VERMILION, linewidth=1.6, zorder=10)
    axes.plot(*path[30:31].T.tolist(), "o", color=VERMILION, markersize=5, zorder=11)


_STEPS = 120


def entropies(settings: EntropiesSettings) -> None:
    """Draw the entropies, and print the path of the figure."""
    draw_only(draw_entropies, settings.out)


def entropy(y: Tensor) -> Tensor:
    """Return H(y) = -sum y * log(y), the entropy for softmax and constrained softmax, with 0 * log(0) = 0."""
    return -torch.special.xlogy(y, y).sum(-1)


def binary_entropy(y: Tensor) -> Tensor:
    """Return H_b(y) = -sum [y * log(y) + (1 - y) * log(1 - y)], the entropy for sigmoid and lml."""
    return entropy(y) + entropy(1 - y)


@dataclass(frozen=True)
class Surface:
    """An entropy over a polygon. `corners` are the vertices y of the polygon in cyclic order."""

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
    """Return a grid over the polygon: the corner weights (P, corners) and the points y (P, n)."""
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


def draw_entropies(picture: Path) -> None:
    """Draw four entropies as heat maps with contour lines, each as a fraction of its maximum."""
    with new_figure(picture, PAGE, 2.25) as figure:
        panels = figure.subplots(1, 4)
        filled = [_draw_surface(axes, surface) for axes, surface in zip(panels, SURFACES, strict=True)]
        bar = figure.colorbar(filled[0], ax=panels, shrink=0.8, aspect=18, pad=0.01, ticks=(0, 0.5, 1))
        bar.set_label("entropy / maximum entropy")
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


SIZES = (10, 30, 100, 300, 1000, 3000, 10_000, 30_000, 100_000)
LENGTH = 1000
KS = (1, 2, 5, 10, 20, 50, 100, 200, 500)  # up to n / 2: by symmetry, k and n - k have the same difference
SCALES = (0.5, 1.0, 3.0)
_SEEDS = 5


def sets(settings: SetsFigureSettings) -> None:
    """Plot the differences between inclusion probabilities and lml, and print the path of the figure."""
    draw_only(draw_sets, settings.out)


def gap(n: int, k: int, scale: float = 1.0) -> float:
    """Return the largest |inclusion - lml| in a row of n normal logits, averaged over five rows."""
    generator = torch.Generator().manual_seed(n)
    x = torch.randn(_SEEDS, n, generator=generator, dtype=torch.float64) * scale
    return (KSubset(k, logits=x).mean - torchlml.lml(x, k)).abs().amax(-1).mean().item()


def draw_sets(picture: Path) -> None:
    """Plot |inclusion - lml| (see `gap`) against n for several k, and against k for several logit scales."""
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
