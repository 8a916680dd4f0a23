"""`torchlml routing`: train a small mixture of experts with each router; loss, balance and time."""

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, median, stdev

import torch
from rich.console import Console
from torch.nn import functional as F

from torchlml_lab.cli_errors import BadInput
from torchlml_lab.engine.output import ProgressBar, StudyTable, markdown_table, new_console, plain_table
from torchlml_lab.engine.settings import use_threads
from torchlml_lab.files import check_file, check_picture, replacing
from torchlml_lab.plots import (
    BLUE,
    DARK_ORANGE,
    GREEN,
    GREY,
    ORANGE,
    PAGE,
    PURPLE,
    SKY,
    VERMILION,
    new_figure,
)
from torchlml_lab.studies.routing.model import ROUTERS, Model, batch, text
from torchlml_lab.studies.settings import RoutingSettings

HEADS = ("router", "seeds", "validation loss", "load", "largest load", "validation load", "ms per step")
_LOOKS = dict(zip(ROUTERS, (GREY, ORANGE, DARK_ORANGE, SKY, GREEN, PURPLE, BLUE, VERMILION), strict=True))


@dataclass(frozen=True)
class RoutingRecord:
    """A twentieth of one run."""

    router: str
    seed: int
    steps: int
    learning_rate: float
    step: int
    """The last step of the interval."""
    loss: float
    """The mean training loss of the task in the interval, in nats per character."""
    load: float
    """The largest load of an expert, averaged over the steps of the interval; 1 is a fair share."""
    worst_load: float
    validation_loss: float
    """In evaluation mode, after the last step of the interval."""
    validation_load: float
    milliseconds: float
    """The median time of a step."""
    seconds: float
    """The time of the run so far."""


def draw(rows: Sequence[RoutingRecord], picture: Path) -> None:
    """Draw the validation loss and the largest loads against the steps, as means over the seeds."""
    panels = {
        "validation_loss": "validation loss (nats per character)",
        "load": "largest load in training",
        "validation_load": "largest load at inference",
    }
    with new_figure(picture, PAGE, 2.8) as figure:
        for axes, (name, title) in zip(figure.subplots(1, 3), panels.items(), strict=True):
            for router, color in _LOOKS.items():
                own = [row for row in rows if row.router == router]
                steps = sorted({row.step for row in own})
                means = [mean(getattr(row, name) for row in own if row.step == step) for step in steps]
                if steps:
                    axes.plot(steps, means, color=color, label=router, linewidth=1.2)
            axes.set_title(title)
            axes.set_xlabel("step")
            axes.grid()
            if "load" in name:
                axes.set_yscale("log", base=2)
                axes.set_yticks([1, 2, 4, 8], ["1", "2", "4", "8"])
        handles, labels = figure.axes[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=4)


def lines(rows: Sequence[RoutingRecord]) -> Iterable[tuple[str, ...]]:
    """A line for each router: the loss at the end, the loads in the second half, and the time."""
    for router in ROUTERS:
        own = [row for row in rows if row.router == router]
        if not own:
            continue
        last = max(row.step for row in own)
        late = [row for row in own if row.step > last / 2]
        final = [row.validation_loss for row in own if row.step == last]
        deviation = f" ±{stdev(final):.3f}" if len(final) > 1 else ""
        yield (
            router,
            str(len(final)),
            f"{mean(final):.3f}{deviation}",
            f"{mean(row.load for row in late):.2f}",
            f"{max(row.worst_load for row in late):.2f}",
            f"{mean(row.validation_load for row in late):.2f}",
            f"{mean(row.milliseconds for row in own):.1f}",
        )


def write_page(rows: Sequence[RoutingRecord], page: Path) -> None:
    """Write the table as Markdown."""
    title = (
        "Validation loss in nats per character at the end, mean ± standard deviation over seeds. Loads are "
        "those of the busiest expert, 1 being a fair share, in the second half of training: mean over steps, "
        "largest of all steps, and mean on held-out text at inference."
    )
    with replacing(page) as temporary:
        temporary.write_text(markdown_table(title, HEADS, lines(rows)) + "\n", encoding="utf-8")


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
    table = plain_table("Mean over seeds; a load of 1 is a fair share", HEADS)
    for line in lines(rows):
        table.add_row(*line)
    console.print(table)
    draw(rows, settings.out)
    write_page(rows, settings.out.with_suffix(".md"))
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
