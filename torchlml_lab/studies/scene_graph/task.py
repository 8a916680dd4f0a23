"""`torchlml train scene-graph`: one run of the study, on Visual Genome or VRD."""

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from accelerate import Accelerator
from rich.console import Console
from torch import Tensor

from torchlml_lab.cli_errors import BadInput
from torchlml_lab.engine.loop import Task
from torchlml_lab.engine.output import new_console
from torchlml_lab.engine.run import in_percent, say_test, train
from torchlml_lab.engine.settings import check as check_settings
from torchlml_lab.studies.scene_graph import datasets, objectives
from torchlml_lab.studies.scene_graph.graphs import Batch, GraphBatches, RegionFeatures, Splits, split
from torchlml_lab.studies.scene_graph.model import LeaveOneOut, MotifNet, log_frequencies, word_vectors
from torchlml_lab.studies.scene_graph.recalls import CHOSEN_BY, RECALLS, measure, score
from torchlml_lab.studies.scene_graph.settings import EXPERIMENT, Objective, SceneGraphSettings


def main(settings: SceneGraphSettings) -> None:
    """Train a model and print its test recalls."""
    console = new_console()
    result = run(settings, console)
    say_test(console, settings, result, f"{in_percent(result['test'], RECALLS)} ({vision(settings)})")


def run(settings: SceneGraphSettings, console: Console) -> dict[str, Any]:
    """Train with these settings; raise `BadInput` for invalid ones before any file is written."""
    check(settings)
    return train(EXPERIMENT, settings, lambda: task(settings, read(settings)), console)


def vision(settings: SceneGraphSettings) -> str:
    """Whether the model has visual input, as a phrase for tables."""
    return "vision-free" if settings.region_features is None else "with region features"


def check(settings: SceneGraphSettings) -> None:
    """Raise `BadInput` for invalid settings."""
    check_settings(settings)
    if (settings.vg is None) == (settings.vrd is None):
        raise BadInput("Pass exactly one of `--vg` (Visual Genome) and `--vrd`.")
    if settings.k < 1:
        raise BadInput(f"`--k` must be at least 1, but it is {settings.k}.")
    if settings.hidden < 2 or settings.hidden % 2:
        raise BadInput(f"`--hidden` must be an even number of at least 2, but it is {settings.hidden}.")
    if not 0 <= settings.dropout < 1:
        raise BadInput(f"`--dropout` must be at least 0 and less than 1, but it is {settings.dropout}.")
    if not 0 <= settings.weight_decay < math.inf:
        raise BadInput(f"`--weight-decay` must be finite and at least 0, but it is {settings.weight_decay}.")
    if not settings.clip > 0:
        raise BadInput(f"`--clip` must be positive, but it is {settings.clip}.")
    if settings.without_bias and (settings.counts is not None or settings.leave_one_out):
        given = "--leave-one-out" if settings.counts is None else "--counts"
        raise BadInput(
            f"`{given}` cannot be combined with `--without-bias`, because it defines the frequency bias."
        )
    if settings.counts is not None and settings.leave_one_out:
        raise BadInput(
            "`--counts` cannot be combined with `--leave-one-out`, because they do not count training images."
        )


def read(settings: SceneGraphSettings) -> Splits:
    """Read the images of the run and split them."""
    if settings.vg is not None:
        training, test = datasets.read_visual_genome(settings.vg)
    else:
        assert settings.vrd is not None
        training, test = datasets.read_vrd(settings.vrd)
    return split(training, test, settings.validation, settings.split_seed)


def task(settings: SceneGraphSettings, splits: Splits) -> Task:
    """The task of one run. Set the seed before the call, because it initializes the network."""
    regions = read_regions(settings, splits)
    model = network(settings, splits, regions)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=settings.learning_rate, weight_decay=settings.weight_decay, fused=True
    )
    # The training curve uses the same images in every epoch, so that epochs are comparable.
    followed = splits.training[torch.arange(min(settings.validation, len(splits.training)))]
    parts = {"train": followed, "validation": splits.validation, "test": splits.test}

    def loss(motifs: torch.nn.Module, batch: Batch) -> Tensor:
        scores = motifs(batch).float()
        return objectives.loss(settings.objective, scores, batch, settings.k, settings.one_per_edge)

    def measure_all(
        motifs: torch.nn.Module, batches: Iterable[Batch], accelerator: Accelerator
    ) -> dict[str, float]:
        return measure(score(ranker(settings.objective, motifs), batches, accelerator))

    return Task(
        model=model,
        optimizer=optimizer,
        scheduler=torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, settings.epochs),
        training=GraphBatches(
            splits.training, regions, LeaveOneOut(splits.training) if settings.leave_one_out else None
        ),
        held_out={name: GraphBatches(part, regions) for name, part in parts.items()},
        loss=loss,
        measure=measure_all,
        chosen_by=CHOSEN_BY,
        printed=RECALLS,
        most_gradient=settings.clip,
        threads=1,
    )


def ranker(objective: Objective, motifs: torch.nn.Module) -> Callable[[Batch], Tensor]:
    """A function that computes the ranking scores of the triples of a batch with a network."""
    return lambda batch: objectives.ranking(objective, motifs(batch))


def read_regions(settings: SceneGraphSettings, splits: Splits) -> RegionFeatures | None:
    """The region features of the run, or None."""
    return None if settings.region_features is None else RegionFeatures(settings.region_features, splits)


def network(settings: SceneGraphSettings, splits: Splits, regions: RegionFeatures | None) -> MotifNet:
    """A newly initialized network."""
    training = splits.training
    background = int(objectives.has_background(settings.objective))
    bias = None
    if not settings.without_bias:
        bias = log_frequencies(training, settings.counts)[..., 1 - background :].contiguous()
    return MotifNet(
        len(training.objects),
        background + len(training.predicates),
        bias,
        None if settings.glove is None else word_vectors(settings.glove, training.objects),
        None if regions is None else (regions.box_size, regions.union_size),
        settings.hidden,
        settings.dropout,
    )
