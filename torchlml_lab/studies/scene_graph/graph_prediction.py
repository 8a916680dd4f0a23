"""`torchlml predict RUN` of scene graphs: the graph of one image, printed and drawn."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import torch
import tyro

from torchlml_lab.cli import parse_settings
from torchlml_lab.engine.table import plain_table
from torchlml_lab.errors import BadInput
from torchlml_lab.files import writing
from torchlml_lab.screen import new_console
from torchlml_lab.studies.scene_graph import objectives
from torchlml_lab.studies.scene_graph.batches import GraphBatches
from torchlml_lab.studies.scene_graph.drawing import Triple, draw
from torchlml_lab.studies.scene_graph.graphs import SceneGraphs
from torchlml_lab.studies.scene_graph.predicate_classification import vision
from torchlml_lab.studies.scene_graph.trained import MovedData, Trained, load
from torchlml_lab.style import check_picture

MOST_RELATIONS = 50  # more arrows cannot be told apart
FEW_OBJECTS = 8


@dataclass(frozen=True)
class PredictSettings(MovedData):
    """Print and draw the most probable relations of an image, with the best weights of a scene-graph run."""

    run: Annotated[Path, tyro.conf.Positional] = Path("runs/scene-graph")
    """The folder of the run."""
    image: str | None = None
    """The image, of any split: `image_id` of VG, the file's name of VRD; by default the test image with the
    most relations among those with few objects."""
    relations: int = 10
    """How many relations are printed and drawn, from 1 to 50."""
    out: Path = Path("torchlml-figures/scene-graph-prediction.png")
    """The PNG or SVG to write; its folder is made when it is missing."""


def main(arguments: Sequence[str]) -> None:
    """Read the options, predict, draw and print."""
    settings = parse_settings(PredictSettings, "predict", arguments, PredictSettings())
    if not 1 <= settings.relations <= MOST_RELATIONS:
        raise BadInput(f"`--relations` is {settings.relations}, and must be from 1 to {MOST_RELATIONS}.")
    check_picture(settings.out)
    run = load(settings.run, settings)
    split, image = _find(run, settings.image)
    triples = predict(run, split, image, settings.relations)
    graphs = getattr(run.splits, split)
    name = graphs.names[image]
    console = new_console()
    title = f"image {name} ({split}), {vision(run.settings)}; * is in the file"
    table = plain_table(title, ("p", "", "subject", "predicate", "object"), left=5)
    for triple in triples:
        ends = [f"{graphs.objects[label]} {box + 1}" for label, box in triple.ends]
        mark = "*" if triple.observed else ""
        table.add_row(f"{triple.probability:.3f}", mark, ends[0], triple.predicate, ends[1])
    try:
        with writing("The drawing", settings.out, "the relations above are all of it"):
            draw(graphs, image, triples, settings.out)
    finally:
        console.print(table)
    console.print(f"The drawing is {settings.out}.", soft_wrap=True)


def predict(run: Trained, split: str, image: int, count: int) -> list[Triple]:
    """The most probable relations of an image, best first."""
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
    """The image with the most relations among those with few objects."""
    objects, relations = graphs.box_offsets.diff(), graphs.relation_offsets.diff()
    few = objects <= max(FEW_OBJECTS, int(objects.min()))
    return int(torch.where(few, relations, -1).argmax())


def _find(run: Trained, name: str | None) -> tuple[str, int]:
    if name is None:
        return "test", usual_image(run.splits.test)
    for split, graphs in run.splits._asdict().items():
        if name in graphs.names:
            return split, graphs.names.index(name)
    raise BadInput(f"`--image` is {name}, and no image with relations has this name in the run's data.")
