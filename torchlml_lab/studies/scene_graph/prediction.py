"""`torchlml predict` for scene-graph runs: print and draw the predicted relations in an image."""

from collections import defaultdict
from math import cos, degrees, pi, sin
from pathlib import Path
from typing import NamedTuple

import torch
from matplotlib.axes import Axes
from matplotlib.patches import FancyArrowPatch, Rectangle

from torchlml_lab.cli_errors import BadInput
from torchlml_lab.engine.output import new_console, plain_table
from torchlml_lab.files import check_picture, writing
from torchlml_lab.plots import BLUE, FAINT, GREEN, INK, PAGE, VERMILION, new_figure
from torchlml_lab.studies.scene_graph import objectives
from torchlml_lab.studies.scene_graph.graphs import GraphBatches, SceneGraphs
from torchlml_lab.studies.scene_graph.settings import PredictSettings
from torchlml_lab.studies.scene_graph.task import TrainedGraphs, load, vision

_BACK = {"boxstyle": "round,pad=0.12", "facecolor": "white", "edgecolor": "none", "alpha": 0.85}
_LINE = 0.165  # height of a line in the list, in inches
_BEND = 0.12  # curvature of an arrow, relative to its length
_NEAR_SUBJECT = 0.3  # position of a label along its arrow; labels near the object would overlap


class Triple(NamedTuple):
    """One predicted relation."""

    ends: tuple[tuple[int, int], ...]
    """The subject and the object, each as an object class and a box index."""
    predicate: str
    probability: float
    observed: bool
    """Whether the relation is annotated in the data set."""


def draw(graphs: SceneGraphs, image: int, triples: list[Triple], picture: Path) -> None:
    """Draw the boxes, the graph and the list of relations. The numbers on an arrow refer to the list.

    Args:
        graphs: The images.
        image: The index of the image.
        triples: Its predicted relations, best first.
        picture: The PNG or SVG file to write.
    """
    names = {box: f"{graphs.objects[label]} {box + 1}" for one in triples for label, box in one.ends}
    tall = max(6.4, _LINE * len(triples) + 0.5)
    with new_figure(picture, PAGE, tall) as figure:
        panels = figure.subplot_mosaic(
            [["boxes", "words"], ["graph", "words"]], width_ratios=(3, 2), height_ratios=(2, 3)
        )
        _draw_boxes(panels["boxes"], graphs, image, set(names))
        _draw_graph(panels["graph"], names, triples)
        _write_list(panels["words"], names, triples, max(tall / _LINE - 3, len(triples)))


def _draw_boxes(axes: Axes, graphs: SceneGraphs, image: int, used: set[int]) -> None:
    width, height = graphs.sizes[image].tolist()
    first, last = graphs.box_offsets[image : image + 2].tolist()
    axes.set(xlim=(-0.02 * width, 1.02 * width), ylim=(1.02 * height, -0.02 * height), aspect="equal")
    axes.set(xticks=(), yticks=())
    axes.set_title(f"image {graphs.names[image]}: objects", parse_math=False)
    axes.spines[:].set_visible(False)
    taken: list[tuple[float, float]] = []
    for number, (x1, y1, x2, y2) in enumerate(graphs.boxes[first:last].tolist()):
        color, line = (BLUE, 0.9) if number in used else (FAINT, 0.5)
        axes.add_patch(
            Rectangle((x1, y1), x2 - x1, y2 - y1, fill=False, edgecolor=color, linewidth=line, zorder=line)
        )
        if number in used:
            # Use the first position on the box where the number covers no other number, or else the center.
            spots = [(a, b) for b in (y1, (y1 + y2) / 2, y2) for a in (x1, (x1 + x2) / 2, x2)]
            free = (
                spot
                for spot in spots
                if all(abs(spot[0] - a) > 0.05 * width or abs(spot[1] - b) > 0.06 * height for a, b in taken)
            )
            x, y = next(free, spots[4])
            taken.append((x, y))
            axes.text(
                x, y, str(number + 1), color=BLUE, fontsize=6, bbox=_BACK, ha="center", va="center", zorder=4
            )


def _draw_graph(axes: Axes, names: dict[int, str], triples: list[Triple]) -> None:
    places = {box: 2 * pi * place / len(names) for place, box in enumerate(names)}
    axes.set(xlim=(-1.75, 1.75), ylim=(-1.55, 1.55), aspect="equal", xticks=(), yticks=())
    axes.spines[:].set_visible(False)
    for box, angle in places.items():
        left = cos(angle) < 0
        axes.plot(cos(angle), sin(angle), ".", color=BLUE)
        # Names point outward and are never upside down.
        axes.text(
            1.06 * cos(angle),
            1.06 * sin(angle),
            names[box],
            parse_math=False,
            color=BLUE,
            fontsize=7 if len(names) <= 30 else 5,
            rotation=degrees(angle) + 180 * left,
            rotation_mode="anchor",
            ha="right" if left else "left",
            va="center",
        )
    arrows: dict[tuple[int, int], list[int]] = defaultdict(list)
    for place, triple in enumerate(triples):
        arrows[triple.ends[0][1], triple.ends[1][1]].append(place)
    for (subject, object_), relations in arrows.items():
        color = GREEN if any(triples[place].observed for place in relations) else VERMILION
        (x1, y1), (x2, y2) = ((cos(places[box]), sin(places[box])) for box in (subject, object_))
        axes.add_patch(
            FancyArrowPatch(
                (x1, y1),
                (x2, y2),
                connectionstyle=f"arc3,rad={_BEND}",  # separates the two directions of a pair
                arrowstyle="-|>",
                mutation_scale=8,
                linewidth=0.8,
                color=color,
                zorder=3,
            )
        )
        # The arc is a quadratic Bézier curve whose control point is offset from the midpoint.
        control = (x1 + x2) / 2 + _BEND * (y2 - y1), (y1 + y2) / 2 - _BEND * (x2 - x1)
        start, aside, end = (
            (1 - _NEAR_SUBJECT) ** 2,
            2 * _NEAR_SUBJECT * (1 - _NEAR_SUBJECT),
            _NEAR_SUBJECT**2,
        )
        x, y = (start * a + aside * b + end * c for a, b, c in zip((x1, y1), control, (x2, y2), strict=True))
        said = ", ".join(str(place + 1) for place in relations)
        axes.text(x, y, said, color=color, fontsize=6, bbox=_BACK, ha="center", va="center", zorder=5)


def _write_list(axes: Axes, names: dict[int, str], triples: list[Triple], lines: float) -> None:
    axes.axis("off")
    axes.set_title("relation and p (green: annotated)")
    for place, triple in enumerate(triples):
        subject, object_ = (names[box] for _, box in triple.ends)
        axes.text(
            0,
            1 - (place + 0.5) / lines,
            f"{place + 1}.  {subject}  {triple.predicate}  {object_}  {triple.probability:.2f}",
            parse_math=False,
            transform=axes.transAxes,
            color=GREEN if triple.observed else INK,
            verticalalignment="center",
        )


MOST_RELATIONS = 50  # more arrows would not be distinguishable
FEW_OBJECTS = 8


def main(settings: PredictSettings) -> None:
    """Predict the relations in an image, draw them and print them."""
    if not 1 <= settings.relations <= MOST_RELATIONS:
        raise BadInput(f"`--relations` must be from 1 to {MOST_RELATIONS}, but it is {settings.relations}.")
    check_picture(settings.out)
    run = load(settings.run, settings)
    split, image = _find(run, settings.image)
    triples = predict(run, split, image, settings.relations)
    graphs = getattr(run.splits, split)
    name = graphs.names[image]
    console = new_console()
    title = f"image {name} ({split}), {vision(run.settings)}; * = annotated"
    table = plain_table(title, ("p", "", "subject", "predicate", "object"), left=5)
    for triple in triples:
        ends = [f"{graphs.objects[label]} {box + 1}" for label, box in triple.ends]
        mark = "*" if triple.observed else ""
        table.add_row(f"{triple.probability:.3f}", mark, ends[0], triple.predicate, ends[1])
    try:
        with writing("The drawing", settings.out, "the table above lists all relations"):
            draw(graphs, image, triples, settings.out)
    finally:
        console.print(table)
    console.print(f"Drawing written to {settings.out}.", soft_wrap=True)


def predict(run: TrainedGraphs, split: str, image: int, count: int) -> list[Triple]:
    """Return the `count` most probable relations in an image, best first."""
    graphs = getattr(run.splits, split)
    batch = GraphBatches(graphs, run.regions).__getitems__([image])
    with torch.no_grad():
        scores = run.model(batch)
    p = objectives.probabilities(run.settings.objective, scores, run.settings.k)
    best = p.flatten().topk(min(count, p.numel()))
    pairs = zip(batch.relation_edges.tolist(), batch.relation_predicates.tolist(), strict=True)
    observed = set(pairs)
    triples = []
    for probability, place in zip(best.values.tolist(), best.indices.tolist(), strict=True):
        edge, predicate = divmod(place, p.shape[1])
        subject, object_ = batch.edges[edge].tolist()
        ends = tuple((int(batch.labels[end]), end) for end in (subject, object_))
        triples.append(Triple(ends, graphs.predicates[predicate], probability, (edge, predicate) in observed))
    return triples


def usual_image(graphs: SceneGraphs) -> int:
    """Return the default image: the one with the most relations among the images with few objects."""
    objects, relations = graphs.box_offsets.diff(), graphs.relation_offsets.diff()
    few = objects <= max(FEW_OBJECTS, int(objects.min()))
    return int(torch.where(few, relations, -1).argmax())


def _find(run: TrainedGraphs, name: str | None) -> tuple[str, int]:
    if name is None:
        return "test", usual_image(run.splits.test)
    for split, graphs in run.splits._asdict().items():
        if name in graphs.names:
            return split, graphs.names.index(name)
    raise BadInput(f"`--image` must be an image with relations in the run's data, but it is `{name}`.")
