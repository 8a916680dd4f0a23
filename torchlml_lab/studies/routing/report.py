"""The rows, the figure and the tables of `torchlml routing`."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, stdev

from torchlml_lab.engine.output import markdown_table
from torchlml_lab.files import replacing
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
from torchlml_lab.studies.routing.model import ROUTERS

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
