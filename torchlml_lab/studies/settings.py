"""The settings of the studies that have one command: the demo, which-k, routing and missing-labels."""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class DigitSettings:
    """The settings that both studies on images of digits share."""

    images: int = 5000
    """The number of training images, at least 100; the 2000 test images use different handwriting."""
    epochs: int = 30
    """The number of epochs, at least 1."""


@dataclass(frozen=True)
class DemoSettings(DigitSettings):
    """Train one small network with five losses on images of k digits, of which only one is labeled."""

    k: int = 3
    """The number of different digits in each image, from 2 to 9."""
    seeds: int = 3
    """The number of repetitions with different images and weights, at least 2; 3 or more is better."""
    out: Path = Path("torchlml-demo")
    """The directory for `report.html` and the plots; it is created if it does not exist."""
    threads: int = 1
    """The number of threads, from 1 to the number of cores; these small matrices do not benefit from more."""


@dataclass(frozen=True)
class WhichKSettings(DigitSettings):
    """Measure the effect of a wrong k on LML, on images of 3 digits and of 1 to 5 digits."""

    seeds: int = 4
    """The number of repetitions with different images and weights, at least 1."""
    csv: Path = Path("torchlml-which-k.csv")
    """The CSV to write, with a row for each network."""


@dataclass(frozen=True)
class RoutingSettings:
    """Train a character model with a mixture of 16 experts, 2 per token, with each router."""

    seeds: int = 3
    """The number of repetitions with different weights and batches, at least 1."""
    steps: int = 400
    """Training steps of 2048 tokens each, a multiple of 20."""
    learning_rate: float = 0.003
    """The learning rate of Adam, the same for all routers."""
    csv: Path = Path("torchlml-routing.csv")
    """The CSV to write. Runs that it already contains are not repeated."""
    out: Path = Path("torchlml-routing.png")
    """The PNG or SVG to draw from the CSV, with the tables next to it as Markdown."""


@dataclass(frozen=True)
class MissingLabelsSettings:
    """Train 17 methods on data with one observed label per sample, each tuned with the same budget.

    Finished parts are stored in `tuning.csv` and `results.csv`, and the same command continues after an
    interruption.
    """

    data: Path | None = None
    """The directory of the data, with `missing-labels/voc2012.npz` and so on; by default `TORCHLML_DATA`."""
    out: Path = Path("torchlml-missing-labels")
    """The directory of the two CSV files. Parts that they already contain are not repeated."""
    datasets: tuple[str, ...] = ("voc2012", "yeast", "cal500", "tmc2007", "bibtex", "corel5k", "delicious")
    """The data sets, in the order in which they are used."""
    heads: tuple[str, ...] = ("linear", "hidden")
    """The models: `linear`, or `hidden` for one hidden layer of 128 units."""
    seeds: int = 5
    """The number of repetitions with different observed labels and validation samples, at least 1."""
    steps: int = 300
    """Training steps of each model, rounded to epochs."""
    minutes: float = 0.0
    """Stop after about this many minutes; repeat the command to continue. 0 means no limit."""
    threads: int = 1
    """The number of threads, from 1 to the number of cores."""
