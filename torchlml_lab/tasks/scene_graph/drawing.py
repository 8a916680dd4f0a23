"""A drawing of a scene graph: boxes where the objects are, and an arrow for each pair that is related."""

from collections import defaultdict
from pathlib import Path
from typing import NamedTuple

from matplotlib.axes import Axes
from matplotlib.patches import FancyArrowPatch, Rectangle

from torchlml_lab.style import BLUE, GREEN, GREY, INK, PAGE, VERMILION, new_figure
from torchlml_lab.tasks.scene_graph.graphs import SceneGraphs

_BACK = {"boxstyle": "round,pad=0.15", "facecolor": "white", "edgecolor": "none", "alpha": 0.85}
_BEND = 0.2  # how far an arrow bends aside, of its length
_THIRD = 1 / 3


class Triple(NamedTuple):
    """One predicted relation."""

    ends: tuple[tuple[int, int], ...]
    """Subject and object, each as (object class, box of the image)."""
    predicate: str
    probability: float
    observed: bool
    """Whether the file has it too."""


def draw(graphs: SceneGraphs, image: int, triples: list[Triple], picture: Path) -> None:
    """Draws boxes and arrows; the numbers at an arrow are those of its relations in the list beside it.

    Args:
        graphs: The images.
        image: Which one.
        triples: Its predicted relations, best first.
        picture: The PNG or SVG to write.
    """
    width, height = graphs.sizes[image].tolist()
    tall = min(6.0, max(0.2 * len(triples) + 0.5, 4.0 * height / width))
    with new_figure(picture, PAGE, tall) as figure:
        axes, words = figure.subplots(1, 2, width_ratios=(4, 3))
        _draw_graph(axes, graphs, image, triples)
        words.axis("off")
        words.set_title("relation and p; green: in the file")
        for place, triple in enumerate(triples):
            subject, object_ = (f"{graphs.objects[label]} {box + 1}" for label, box in triple.ends)
            words.text(
                0,
                1 - (place + 0.5) / max(10, len(triples)),
                f"{place + 1}.  {subject}  {triple.predicate}  {object_}  {triple.probability:.2f}",
                transform=words.transAxes,
                color=GREEN if triple.observed else INK,
                verticalalignment="center",
            )


def _draw_graph(axes: Axes, graphs: SceneGraphs, image: int, triples: list[Triple]) -> None:
    width, height = graphs.sizes[image].tolist()
    first, last = graphs.box_offsets[image : image + 2].tolist()
    boxes = graphs.boxes[first:last].tolist()
    used = {box: label for triple in triples for label, box in triple.ends}
    axes.set(xlim=(-0.02 * width, 1.02 * width), ylim=(1.02 * height, -0.02 * height), aspect="equal")
    axes.set(xticks=(), yticks=(), title=f"image {graphs.names[image]}")
    axes.spines[:].set_visible(False)
    taken: list[tuple[float, float]] = []
    for number, (x1, y1, x2, y2) in enumerate(boxes):
        style = (
            {"edgecolor": BLUE, "linewidth": 1.2} if number in used else {"edgecolor": GREY, "linestyle": ":"}
        )
        axes.add_patch(Rectangle((x1, y1), x2 - x1, y2 - y1, fill=False, **style))
        if number in used:
            name, y = f"{graphs.objects[used[number]]} {number + 1}", y1
            # Names that would cover one another stand below one another.
            while any(abs(x1 - x) < 0.18 * width and abs(y - other) < 0.06 * height for x, other in taken):
                y += 0.06 * height
            taken.append((x1, y))
            axes.text(x1, y, name, color=BLUE, fontsize=7, bbox=_BACK, verticalalignment="top", zorder=4)
    arrows: dict[tuple[int, int], list[int]] = defaultdict(list)
    for place, triple in enumerate(triples):
        arrows[triple.ends[0][1], triple.ends[1][1]].append(place)
    for pair, places in arrows.items():
        colour = GREEN if any(triples[place].observed for place in places) else VERMILION
        (x1, y1), (x2, y2) = (
            ((boxes[b][0] + boxes[b][2]) / 2, (boxes[b][1] + boxes[b][3]) / 2) for b in pair
        )
        axes.add_patch(
            FancyArrowPatch(
                (x1, y1),
                (x2, y2),
                connectionstyle=f"arc3,rad={_BEND}",
                arrowstyle="-|>",
                mutation_scale=9,
                linewidth=0.6 + 1.4 * triples[places[0]].probability,
                color=colour,
                zorder=3,
            )
        )
        # Numbers stand at a third of the way, so that those of the two directions do not meet. An arc is a
        # quadratic curve, whose control point is aside of the middle.
        control = (x1 + x2) / 2 - _BEND * (y2 - y1), (y1 + y2) / 2 + _BEND * (x2 - x1)
        start, aside, end = (1 - _THIRD) ** 2, 2 * _THIRD * (1 - _THIRD), _THIRD**2
        x, y = (start * a + aside * b + end * c for a, b, c in zip((x1, y1), control, (x2, y2), strict=True))
        said = ", ".join(str(place + 1) for place in places)
        axes.text(x, y, said, color=colour, fontsize=7, bbox=_BACK, ha="center", va="center", zorder=5)
