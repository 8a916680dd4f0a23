"""`torchlml evaluate` and `step-time` for scene-graph runs, and trained runs loaded from disk."""

from dataclasses import fields, replace
from pathlib import Path
from typing import NamedTuple

import torch
from accelerate import Accelerator
from accelerate.utils import send_to_device
from rich.console import Console
from rich.table import Table
from torch import Tensor

from torchlml_lab.engine import loop, run_directory
from torchlml_lab.engine.output import ProgressBar, new_console, plain_table
from torchlml_lab.engine.settings import use_threads
from torchlml_lab.studies.scene_graph.graphs import GraphBatches, RegionFeatures, Splits
from torchlml_lab.studies.scene_graph.model import MotifNet
from torchlml_lab.studies.scene_graph.objectives import method_of
from torchlml_lab.studies.scene_graph.recalls import (
    BATCH,
    KS,
    MEAN_RECALLS,
    RECALLS,
    Scored,
    frequency_recall,
    measure,
    measure_predicates,
    score,
)
from torchlml_lab.studies.scene_graph.settings import (
    EXPERIMENT,
    OBJECTIVES,
    EvaluateSettings,
    MovedData,
    ObjectiveTimesSettings,
    SceneGraphSettings,
)
from torchlml_lab.studies.scene_graph.task import check, network, ranker, read, read_regions, task, vision


class TrainedGraphs(NamedTuple):
    """A trained run with its settings and data."""

    settings: SceneGraphSettings
    splits: Splits
    regions: RegionFeatures | None
    model: MotifNet
    epoch: int
    """The epoch of the weights: the best one on validation so far."""


def load(run: Path, moved: MovedData) -> TrainedGraphs:
    """Load a run and read its data.

    Args:
        run: A run directory of `torchlml train scene-graph`; any other raises `BadInput`.
        moved: The current paths of its data.

    Returns:
        The run, with the network on the CPU in evaluation mode.
    """
    best = run_directory.find_best_epoch(EXPERIMENT, run)
    paths = {field.name: getattr(moved, field.name) for field in fields(MovedData)}
    settings = run_directory.read_moved(SceneGraphSettings, run, paths)
    splits = read(settings)
    regions = read_regions(settings, splits)
    model = network(settings, splits, regions)
    best.load(model)
    return TrainedGraphs(settings, splits, regions, model, best.epoch)


def main(settings: EvaluateSettings) -> None:
    """Evaluate a run and print two tables."""
    console = new_console()
    accelerator = Accelerator(cpu=settings.cpu)
    with use_threads(1):  # the operators are small, as in training
        run = load(settings.run, settings)
        graphs = getattr(run.splits, settings.split)
        scored = _score(run, settings.split, accelerator, console)
        rows = {
            "frequencies alone": frequency_recall(
                run.splits, settings.split, run.settings.counts, accelerator
            ),
            method_of(run.settings.objective, run.settings.k).name: measure(scored),
        }
        alone = measure_predicates(scored, len(graphs.predicates))
    said = f"{len(graphs)} {settings.split} images, epoch {run.epoch}, {vision(run.settings)}; recall in %"
    console.print(_recalls(said, rows))
    console.print(_predicates(*alone, graphs.predicates))


def _score(run: TrainedGraphs, split: str, accelerator: Accelerator, console: Console) -> list[Scored]:
    graphs = getattr(run.splits, split)
    rank_by = ranker(run.settings.objective, run.model.to(accelerator.device))
    batches = GraphBatches(graphs, run.regions).in_order(BATCH)
    found = []
    with torch.no_grad(), ProgressBar(console) as progress:
        task = progress.add_task("images", total=len(graphs))
        sent = (send_to_device(batch, accelerator.device) for batch in batches)
        for scored in score(rank_by, sent, accelerator):
            found.append(scored)
            progress.advance(task, len(scored[0]))
    return found


def _recalls(title: str, rows: dict[str, dict[str, float]]) -> Table:
    table = plain_table(title, ("", *(f"@{k}" for k in KS)))
    modes = ("constrained R", "unconstrained R", "constrained mR", "unconstrained mR")
    names = RECALLS + MEAN_RECALLS
    for name, recall in rows.items():
        for place, mode in enumerate(modes):
            measures = names[place * len(KS) : (place + 1) * len(KS)]
            table.add_row(f"{name}, {mode}", *(f"{100 * recall[one]:.1f}" for one in measures))
    return table


def _predicates(recall: Tensor, images: Tensor, predicates: tuple[str, ...]) -> Table:
    heads = (f"@{KS[0]}", f"@{KS[-1]}", f"ng@{KS[0]}", f"ng@{KS[-1]}")
    chosen = [RECALLS.index(f"{mode}R@{k}") for mode in ("", "ng-") for k in (KS[0], KS[-1])]
    table = plain_table("recall of each predicate in %", ("predicate", "images", *heads))
    for i in images.argsort(descending=True, stable=True).tolist():
        cells = [f"{100 * recall[j, i]:.1f}" if images[i] else "-" for j in chosen]
        table.add_row(predicates[i], str(int(images[i])), *cells)
    return table


def step_time(settings: ObjectiveTimesSettings) -> None:
    """Time the training steps of all objectives and print a table."""
    common = SceneGraphSettings(vg=settings.vg, vrd=settings.vrd, validation=1)
    if settings.run is not None:
        moved = {"vg": settings.vg, "vrd": settings.vrd}
        common = run_directory.read_moved(SceneGraphSettings, settings.run, moved)
    k = common.k if settings.k is None else settings.k
    size = loop.checked_size(settings, common.batch_size)
    common = replace(common, k=k, batch_size=size)
    check(common)
    splits = read(common)
    loop.compare_steps(
        OBJECTIVES, lambda name: task(replace(common, objective=name), splits), settings, size, "images"
    )
