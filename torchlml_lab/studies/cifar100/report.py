"""`torchlml evaluate` and `step-time` of CIFAR-100 runs."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import tyro
from accelerate import Accelerator
from accelerate.utils import send_to_device
from rich.console import Console

from torchlml_lab.cli import parse_settings
from torchlml_lab.engine import run_directory, step_times
from torchlml_lab.engine.progress import ProgressBar
from torchlml_lab.engine.table import plain_table
from torchlml_lab.studies.cifar100.data import Batches
from torchlml_lab.studies.cifar100.task import (
    EXPERIMENT,
    LOSSES,
    Cifar100Settings,
    accuracies,
    model_name,
    network,
    read,
    splits,
    task,
)

BATCH = 500
KS = (1, 2, 3, 5, 10)


@dataclass(frozen=True)
class EvaluateSettings:
    """Print the top-k accuracies of a CIFAR-100 run with its best weights."""

    run: Annotated[Path, tyro.conf.Positional] = Path("runs/cifar100")
    """The folder of the run."""
    split: Literal["training", "validation", "test"] = "test"
    """The samples: those it was trained on, with their noisy labels; chosen by; or never saw."""
    data: Path | None = None
    """The official images, where they have moved."""
    features: Path | None = None
    """The frozen features, where they have moved."""
    cpu: bool = False
    """Stay on the CPU even where a GPU is available."""


def main(arguments: Sequence[str]) -> None:
    """Read the options, evaluate, and print a table."""
    settings = parse_settings(EvaluateSettings, "evaluate", arguments, EvaluateSettings())
    best = run_directory.find_best_epoch(EXPERIMENT, settings.run)
    moved = {"data": settings.data, "features": settings.features}
    run = run_directory.read_moved(Cifar100Settings, settings.run, moved)
    part = splits(run, *read(run.data, run.features))[settings.split]
    model = network(run, part)
    best.load(model)
    accelerator, console = Accelerator(cpu=settings.cpu), Console()
    ks = sorted({*KS, run.k})
    with torch.no_grad(), ProgressBar(console) as progress:
        task = progress.add_task("samples", total=len(part))

        def batches() -> Iterator[Any]:
            for rows in torch.arange(len(part)).split(BATCH):
                yield send_to_device(Batches(part).__getitems__(rows.tolist()), accelerator.device)
                progress.advance(task, len(rows))

        found = accuracies(model.to(accelerator.device), batches(), accelerator, ks)
    title = f"{len(part)} {settings.split} samples, epoch {best.epoch}, {model_name(run)}; accuracy in %"
    table = plain_table(title, ("loss", "noise", *(f"top-{k}" for k in ks)), left=1)
    table.add_row(run.loss, f"{run.noise:g}", *(f"{100 * found[f'top{k}']:.2f}" for k in ks))
    console.print(table)


@dataclass(frozen=True)
class LossTimesSettings(step_times.StepTimeSettings):
    """Time whole training steps of all losses in turns, on the same samples, with the settings of a run."""

    run: Annotated[Path, tyro.conf.Positional] = Path("runs/cifar100")
    """The folder of the run."""
    data: Path | None = None
    """The official images, where they have moved."""
    features: Path | None = None
    """The frozen features, where they have moved."""


def step_time(arguments: Sequence[str]) -> None:
    """Read the options, time, and print a table."""
    settings = parse_settings(LossTimesSettings, "step-time", arguments, LossTimesSettings())
    moved = {"data": settings.data, "features": settings.features}
    run = run_directory.read_moved(Cifar100Settings, settings.run, moved)
    size = step_times.checked_size(settings, run.batch_size)
    parts = read(run.data, run.features)
    what = f"samples, {model_name(run)}"
    step_times.compare(LOSSES, lambda loss: task(replace(run, loss=loss), *parts), settings, size, what)
