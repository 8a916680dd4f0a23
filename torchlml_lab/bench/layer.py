"""`torchlml bench layer`: the projection beside softmax, topk, sort and sigmoid."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from torchlml_lab.bench.competitors import LAYER
from torchlml_lab.bench.grid_benchmark import GridSettings, read_options, run
from torchlml_lab.screen import new_console


def _here() -> tuple[str, ...]:
    return tuple(provider.name for provider in LAYER if provider.absent() is None)


@dataclass(frozen=True)
class LayerSettings(GridSettings):
    """Time lml beside softmax, topk, sort and sigmoid, in turn, as ratios to softmax.

    A ratio is formed from two calls within milliseconds, so that it holds on a noisy machine too.
    """

    providers: tuple[str, ...] = field(default_factory=_here)
    """Who competes; by default all that can run here. Softmax always takes part: the ratios are to it."""


def main(arguments: Sequence[str]) -> None:
    """Read the options and run the benchmark."""
    settings = read_options(LayerSettings, "bench layer", arguments)
    plot = settings.plot or settings.csv.with_suffix(".png")
    run(settings, "projection", LAYER, plot, new_console())
