"""`torchlml bench family`: limits on the sum, other regularisers, hard and random choices, beside softmax."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from torchlml_lab.bench.competitors import FAMILY
from torchlml_lab.bench.grid_benchmark import GridSettings, read_options, run
from torchlml_lab.screen import new_console


@dataclass(frozen=True)
class FamilySettings(GridSettings):
    """Time the relatives of lml, in turn, as ratios to softmax."""

    providers: tuple[str, ...] = tuple(provider.name for provider in FAMILY)
    """Who competes. Softmax always takes part: the ratios are to it."""
    plot: Path | None = None
    """The PNG or SVG of the times in the whole CSV; by default beside the CSV, as NAME-family.png."""


def main(arguments: Sequence[str]) -> None:
    """Read the options and run the benchmark."""
    settings = read_options(FamilySettings, "bench family", arguments)
    plot = settings.plot or settings.csv.with_name(f"{settings.csv.stem}-family.png")
    run(settings, "family", FAMILY, plot, new_console())
