"""`torchlml evaluate RUN`: all recalls of a run, beside those of the frequencies alone."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import torch
import tyro
from accelerate import Accelerator
from accelerate.utils import send_to_device
from rich.console import Console
from rich.table import Table

from torchlml_lab.cli import parse_settings
from torchlml_lab.engine.table import plain_table
from torchlml_lab.tasks.scene_graph import objectives
from torchlml_lab.tasks.scene_graph.batches import GraphBatches
from torchlml_lab.tasks.scene_graph.command import vision
from torchlml_lab.tasks.scene_graph.evaluation import (
    BATCH,
    KS,
    MEAN_RECALLS,
    RECALLS,
    Recall,
    evaluate,
    frequency_recall,
)
from torchlml_lab.tasks.scene_graph.sweep import method_of
from torchlml_lab.tasks.scene_graph.trained import load


@dataclass(frozen=True)
class EvaluateSettings:
    """Print the recalls of a scene-graph run with its best weights, and of the frequencies alone."""

    run: Annotated[Path, tyro.conf.Positional] = Path("runs/scene-graph")
    """The folder of the run."""
    split: Literal["training", "validation", "test"] = "test"
    """The images: those it was trained on, chosen by, or never saw."""
    cpu: bool = False
    """Stay on the CPU even where a GPU is available."""


def main(arguments: Sequence[str]) -> None:
    """Reads the options, evaluates, and prints two tables."""
    settings = parse_settings(EvaluateSettings, "evaluate", arguments, EvaluateSettings())
    run = load(settings.run)
    accelerator = Accelerator(cpu=settings.cpu)
    graphs = getattr(run.splits, settings.split)
    objective, model = run.settings.objective, run.model.to(accelerator.device)
    batches = GraphBatches(graphs, run.regions).in_order(BATCH)
    with torch.no_grad():
        found = evaluate(
            lambda batch: objectives.ranking(objective, model(batch)),
            (send_to_device(batch, accelerator.device) for batch in batches),
            len(graphs.predicates),
            accelerator,
        )
    baseline = frequency_recall(run.splits, settings.split, run.settings.counts, accelerator)
    console = Console()
    said = f"{len(graphs)} {settings.split} images, epoch {run.epoch}, {vision(run.settings)}; recall in %"
    console.print(_recalls(said, {"frequencies alone": baseline, method_of(run.settings): found}))
    console.print(_predicates(found, graphs.predicates))


def _recalls(title: str, rows: dict[str, Recall]) -> Table:
    table = plain_table(title, ("", *(f"@{k}" for k in KS)))
    modes = ("constrained R", "unconstrained R", "constrained mR", "unconstrained mR")
    names = RECALLS + MEAN_RECALLS
    for name, recall in rows.items():
        for place, mode in enumerate(modes):
            measures = names[place * len(KS) : (place + 1) * len(KS)]
            table.add_row(f"{name}, {mode}", *(f"{100 * recall.measures[one]:.1f}" for one in measures))
    return table


def _predicates(recall: Recall, predicates: tuple[str, ...]) -> Table:
    heads = (f"@{KS[0]}", f"@{KS[-1]}", f"ng@{KS[0]}", f"ng@{KS[-1]}")
    chosen = [RECALLS.index(f"{mode}R@{k}") for mode in ("", "ng-") for k in (KS[0], KS[-1])]
    table = plain_table("recall of each predicate in %", ("predicate", "images", *heads))
    for i in recall.images.argsort(descending=True, stable=True).tolist():
        cells = [f"{100 * recall.per_predicate[j, i]:.1f}" if recall.images[i] else "-" for j in chosen]
        table.add_row(predicates[i], str(int(recall.images[i])), *cells)
    return table
