"""A drawing of a scene graph: boxes where the objects are, and an arrow for each relation."""

from pathlib import Path
from typing import NamedTuple

from matplotlib.axes import Axes
from matplotlib.patches import FancyArrowPatch, Rectangle

from torchlml.experiments.figures.style import BLUE, GREEN, GREY, INK, PAGE, VERMILION, new_figure
from torchlml.experiments.scene_graph.data import SceneGraphs

_BACK = {"boxstyle": "round,pad=0.15", "facecolor": "white", "edgecolor": "none", "alpha": 0.85}


class Triple(NamedTuple):
    """One predicted relation."""

    ends: tuple[tuple[int, int], ...]
    """Subject and object, each as (object class, box of the image)."""
    predicate: str
    probability: float
    observed: bool
    """Whether the file has it too."""


def draw(graphs: SceneGraphs, image: int, triples: list[Triple], picture: Path) -> None:
    """Draws the boxes that take part in a relation, an arrow for each relation, and the list beside it.

    Args:
        graphs: The images.
        image: Which one.
        triples: Its predicted relations, best first.
        picture: The PNG to write, with an SVG beside it.
    """
    width, height = graphs.sizes[image].tolist()
    with new_figure(picture, PAGE, max(2.4, min(6.0, 4.2 * height / width))) as figure:
        axes, words = figure.subplots(1, 2, width_ratios=(4.2, 2.8))
        _draw_graph(axes, graphs, image, triples)
        words.axis("off")
        words.set_title("p: relation (green: in the file)")
        for place, triple in enumerate(triples):
            subject, object_ = (f"{graphs.objects[label]} {box + 1}" for label, box in triple.ends)
            words.text(
                0,
                1 - (place + 0.5) / max(10, len(triples)),
                f"{triple.probability:.2f}   {subject}  {triple.predicate}  {object_}",
                transform=words.transAxes,
                color=GREEN if triple.observed else INK,
                verticalalignment="center",
            )


def _draw_graph(axes: Axes, graphs: SceneGraphs, image: int, triples: list[Triple]) -> None:
    width, height = graphs.sizes[image].tolist()
    first, last = graphs.box_offsets[image : image + 2].tolist()
    boxes = graphs.boxes[first:last].tolist()
    labels = graphs.labels[first:last].tolist()
    used = {box for triple in triples for _, box in triple.ends}
    axes.set(xlim=(-0.02 * width, 1.02 * width), ylim=(1.02 * height, -0.02 * height), aspect="equal")
    axes.set(xticks=(), yticks=(), title=f"image {graphs.names[image]}")
    for number, (x1, y1, x2, y2) in enumerate(boxes):
        colour = BLUE if number in used else GREY
        style = {"linewidth": 1.2, "zorder": 2} if number in used else {"linewidth": 0.5, "linestyle": ":"}
        axes.add_patch(Rectangle((x1, y1), x2 - x1, y2 - y1, fill=False, edgecolor=colour, **style))
        if number in used:
            name = f"{graphs.objects[labels[number]]} {number + 1}"
            axes.text(x1, y1, name, color=BLUE, fontsize=7, bbox=_BACK, verticalalignment="top", zorder=4)
    centres = [((x1 + x2) / 2, (y1 + y2) / 2) for x1, y1, x2, y2 in boxes]
    drawn: dict[tuple[int, int], int] = {}
    for triple in triples:
        pair = (triple.ends[0][1], triple.ends[1][1])
        # Several relations on a pair, and the two directions, bend apart.
        bend = 0.15 + 0.12 * drawn.get(pair, 0)
        drawn[pair] = drawn.get(pair, 0) + 1
        colour = GREEN if triple.observed else VERMILION
        start, end = (centres[box] for box in pair)
        axes.add_patch(
            FancyArrowPatch(
                start,
                end,
                connectionstyle=f"arc3,rad={bend}",
                arrowstyle="-|>",
                mutation_scale=9,
                linewidth=0.6 + 1.6 * triple.probability,
                color=colour,
                zorder=3,
            )
        )
        # The middle of the arc: a quadratic curve whose control point is `bend` of its length aside.
        (x1, y1), (x2, y2) = start, end
        middle = ((x1 + x2) / 2 + bend / 2 * (y2 - y1), (y1 + y2) / 2 - bend / 2 * (x2 - x1))
        said = f"{triple.predicate} {triple.probability:.2f}"
        axes.text(*middle, said, color=colour, fontsize=6, bbox=_BACK, ha="center", va="center", zorder=5)
