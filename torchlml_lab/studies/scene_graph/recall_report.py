"""`torchlml evaluate RUN` of scene graphs: all recalls of a run, beside those of the frequencies alone."""

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
from torch import Tensor

from torchlml_lab.cli import parse_settings
from torchlml_lab.engine.progress import ProgressBar
from torchlml_lab.engine.table import plain_table
from torchlml_lab.engine.threads import use_threads
from torchlml_lab.screen import new_console
from torchlml_lab.studies.scene_graph.batches import GraphBatches
from torchlml_lab.studies.scene_graph.methods import method_of
from torchlml_lab.studies.scene_graph.predicate_classification import ranker, vision
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
from torchlml_lab.studies.scene_graph.trained import MovedData, Trained, load


@dataclass(frozen=True)
class EvaluateSettings(MovedData):
    """Print the recalls of a scene-graph run with its best weights, and of the frequencies alone."""

    run: Annotated[Path, tyro.conf.Positional] = Path("runs/scene-graph")
    """The folder of the run."""
    split: Literal["training", "validation", "test"] = "test"
    """The images: those it was trained on, chosen by, or never saw."""
    cpu: bool = False
    """Stay on the CPU even where a GPU is available."""


def main(arguments: Sequence[str]) -> None:
    """Read the options, evaluate, and print two tables."""
    settings = parse_settings(EvaluateSettings, "evaluate", arguments, EvaluateSettings())
    console = new_console()
    accelerator = Accelerator(cpu=settings.cpu)
    with use_threads(1):  # its operators are small, as in training
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


def _score(run: Trained, split: str, accelerator: Accelerator, console: Console) -> list[Scored]:
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
