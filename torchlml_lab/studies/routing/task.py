"""`torchlml routing`: train a small mixture of experts with each router; loss, balance and time."""

import time
from statistics import mean, median

import torch
from rich.console import Console
from torch.nn import functional as F

from torchlml_lab.cli_errors import BadInput
from torchlml_lab.engine.output import ProgressBar, StudyTable, new_console, plain_table
from torchlml_lab.engine.settings import use_threads
from torchlml_lab.files import check_file, check_picture
from torchlml_lab.studies.routing import report
from torchlml_lab.studies.routing.model import ROUTERS, Model, batch, text
from torchlml_lab.studies.routing.report import RoutingRecord
from torchlml_lab.studies.routing.settings import RoutingSettings

INTERVALS = 20  # rows of a run


TABLE = StudyTable(RoutingRecord, lambda row: (list(ROUTERS).index(row.router), row.seed, row.step))


def main(settings: RoutingSettings) -> None:
    """Train the missing runs, and draw."""
    for name, least in (("seeds", 1), ("steps", INTERVALS)):
        if getattr(settings, name) < least:
            raise BadInput(f"`--{name}` is {getattr(settings, name)}, but it must be at least {least}.")
    if settings.steps % INTERVALS:
        raise BadInput(f"`--steps` is {settings.steps}, but it must be a multiple of {INTERVALS}.")
    if not 0 < settings.learning_rate < 1:
        raise BadInput(f"`--learning-rate` is {settings.learning_rate}, but it must be between 0 and 1.")
    check_file("--csv", settings.csv)
    check_picture(settings.out)
    console = new_console()
    rows = train_all(settings, console)
    table = plain_table("Mean over seeds; a load of 1 is a fair share", report.HEADS)
    for line in report.lines(rows):
        table.add_row(*line)
    console.print(table)
    report.draw(rows, settings.out)
    report.write_page(rows, settings.out.with_suffix(".md"))
    console.print(f"The rows are in {settings.csv}, the picture is {settings.out}.", soft_wrap=True)


def train_all(settings: RoutingSettings, console: Console) -> list[RoutingRecord]:
    """All runs, those of the CSV included; the CSV is replaced after each one."""
    rows = TABLE.read(settings.csv, "--csv") if settings.csv.exists() else []
    if any((row.steps, row.learning_rate) != (settings.steps, settings.learning_rate) for row in rows):
        raise BadInput(f"`--csv` names `{settings.csv}`, which has runs with other steps or learning rates.")
    done = {(row.router, row.seed) for row in rows}
    # Seed by seed, so that an interrupted study has all routers.
    todo = [(name, seed) for seed in range(settings.seeds) for name in ROUTERS if (name, seed) not in done]
    settings.csv.parent.mkdir(parents=True, exist_ok=True)
    with ProgressBar(console) as progress, use_threads(1):
        task = progress.add_task("runs", total=len(todo))
        for number, (name, seed) in enumerate(todo):
            try:
                rows += train(name, seed, settings)
            except KeyboardInterrupt:
                said = f"Interrupted after {number} of {len(todo)} runs. The same command continues."
                raise KeyboardInterrupt(said) from None
            TABLE.write(settings.csv, rows)
            progress.advance(task)
    return rows


def train(name: str, seed: int, settings: RoutingSettings) -> list[RoutingRecord]:
    """Train one model."""
    learn, validate, characters = text()
    torch.manual_seed(seed)  # equal seeds have equal first weights and batches
    model, generator = Model(name, characters), torch.Generator().manual_seed(seed)
    optimizer = torch.optim.Adam(model.parameters(), settings.learning_rate)
    held_out = batch(validate, 128, torch.Generator().manual_seed(0))
    rows, began, interval = [], time.monotonic(), settings.steps // INTERVALS
    losses, loads, times = [], [], []
    for step in range(1, settings.steps + 1):
        inputs, targets = batch(learn, 32, generator)
        start = time.perf_counter()
        logits, load, extra = model(inputs)
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
        optimizer.zero_grad()
        (loss + extra).backward()
        optimizer.step()
        times.append(1e3 * (time.perf_counter() - start))
        losses.append(loss.item())
        loads.append(float(load.max()))
        if step % interval == 0:
            model.eval()
            with torch.no_grad():
                logits, load, _ = model(held_out[0])
                validation = F.cross_entropy(logits.flatten(0, 1), held_out[1].flatten()).item()
            model.train()
            rows.append(
                RoutingRecord(
                    *(name, seed, settings.steps, settings.learning_rate, step),
                    *(mean(losses), mean(loads), max(loads), validation, float(load.max()), median(times)),
                    time.monotonic() - began,
                )
            )
            losses, loads, times = [], [], []
    return rows
