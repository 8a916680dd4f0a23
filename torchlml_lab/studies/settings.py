"""The settings of the studies that consist of one command: demo, which-k, routing and missing-labels."""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class DigitSettings:
    """The settings shared by both studies on images of digits."""

    images: int = 5000
    """The number of training images, at least 100. The 2000 test images contain other handwritten digits."""
    epochs: int = 30
    """The number of epochs, at least 1."""


@dataclass(frozen=True)
class DemoSettings(DigitSettings):
    """Train a small network with each of five losses on images of k digits, of which only one is labeled."""

    k: int = 3
    """The number of different digits in each image, from 2 to 9."""
    seeds: int = 3
    """The number of repetitions with different images and weights, at least 2; 3 or more are recommended."""
    out: Path = Path("torchlml-demo")
    """The directory for `report.html` and the plots; it is created if it does not exist."""
    threads: int = 1
    """The number of threads, from 1 to the number of cores. More than 1 does not help at these sizes."""


@dataclass(frozen=True)
class WhichKSettings(DigitSettings):
    """Measure how a wrong k affects LML on images with 3 digits and on images with 1 to 5 digits."""

    seeds: int = 4
    """The number of repetitions with different images and weights, at least 1."""
    csv: Path = Path("torchlml-which-k.csv")
    """The CSV to write, with one row per network."""


@dataclass(frozen=True)
class RoutingSettings:
    """Train a character-level model for each router and seed. Each token uses 2 of the model's 16 experts."""

    seeds: int = 3
    """The number of repetitions with different weights and batches, at least 1."""
    steps: int = 400
    """The number of training steps, a multiple of 20. Each step uses 2048 tokens."""
    learning_rate: float = 0.003
    """The learning rate of Adam, the same for all routers."""
    csv: Path = Path("torchlml-routing.csv")
    """The CSV to write. Runs that it already contains are not repeated."""
    out: Path = Path("torchlml-routing.png")
    """The PNG or SVG file for the figure. The table is written next to it as Markdown."""


@dataclass(frozen=True)
class MissingLabelsSettings:
    """Tune and train 17 methods with the same procedure, 15 of them with one observed label per sample.

    The other two are references that use fully labeled samples.

    Results are saved to `tuning.csv` and `results.csv` as they become available. If the command is
    interrupted, run it again to continue.
    """

    data: Path | None = None
    """The data directory, with files such as `missing-labels/voc2012.npz`; by default `$TORCHLML_DATA`."""
    out: Path = Path("torchlml-missing-labels")
    """The directory for the two CSV files. Results that they already contain are not computed again."""
    datasets: tuple[str, ...] = ("voc2012", "yeast", "cal500", "tmc2007", "bibtex", "corel5k", "delicious")
    """The data sets to use, in this order."""
    heads: tuple[str, ...] = ("linear", "hidden")
    """The models to train: `linear`, `hidden` (one hidden layer with 128 units), or both."""
    seeds: int = 5
    """The number of repetitions with different observed labels and validation samples, at least 1."""
    steps: int = 300
    """The number of training steps per model, rounded to whole epochs."""
    minutes: float = 0.0
    """Stop after about this many minutes; repeat the command to continue. 0 means no limit."""
    threads: int = 1
    """The number of threads, from 1 to the number of cores."""
