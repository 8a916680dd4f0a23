"""`torchlml evaluate` and `step-time` for CIFAR-100 runs."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import send_to_device

from torchlml_lab.engine import loop, run_directory
from torchlml_lab.engine.output import ProgressBar, new_console, plain_table
from torchlml_lab.studies.cifar100.data import Batches
from torchlml_lab.studies.cifar100.settings import (
    EXPERIMENT,
    LOSSES,
    Cifar100Settings,
    EvaluateSettings,
    LossTimesSettings,
)
from torchlml_lab.studies.cifar100.task import accuracies, model_name, network, read, splits, task

BATCH = 500
KS = (1, 2, 3, 5, 10)


def main(settings: EvaluateSettings) -> None:
    """Evaluate a run and print a table."""
    best = run_directory.find_best_epoch(EXPERIMENT, settings.run)
    moved = {"data": settings.data, "features": settings.features}
    run = run_directory.read_moved(Cifar100Settings, settings.run, moved)
    part = splits(run, *read(run.data, run.features))[settings.split]
    model = network(run, part)
    best.load(model)
    accelerator, console = Accelerator(cpu=settings.cpu), new_console()
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


def step_time(settings: LossTimesSettings) -> None:
    """Time the training steps of all losses and print a table."""
    moved = {"data": settings.data, "features": settings.features}
    run = run_directory.read_moved(Cifar100Settings, settings.run, moved)
    size = loop.checked_size(settings, run.batch_size)
    parts = read(run.data, run.features)
    what = f"samples, {model_name(run)}"
    loop.compare_steps(LOSSES, lambda loss: task(replace(run, loss=loss), *parts), settings, size, what)
