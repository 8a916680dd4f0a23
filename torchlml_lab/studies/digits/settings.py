"""The settings of `torchlml demo` and `torchlml which-k`."""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class DemoSettings:
    """Train one small network with five losses on images of k digits, of which only one is labeled."""

    k: int = 3
    """The number of different digits in each image, from 2 to 9."""
    seeds: int = 3
    """The number of repetitions with different images and weights, at least 2; 3 or more are better."""
    images: int = 5000
    """The number of training images, at least 100; the 2000 test images use other handwriting."""
    epochs: int = 30
    """The number of epochs, at least 1."""
    out: Path = Path("torchlml-demo")
    """The directory for `report.html` and the plots; it is created if it does not exist."""
    threads: int = 1
    """The number of threads, from 1 to the number of cores; these small matrices do not benefit from more."""


@dataclass(frozen=True)
class WhichKSettings:
    """Measure the effect of a wrong k on LML, on images of 3 digits and of 1 to 5 digits."""

    seeds: int = 4
    """The number of repetitions with different images and weights, at least 1."""
    images: int = 5000
    """The number of training images, at least 100; the 2000 test images use other handwriting."""
    epochs: int = 30
    """The number of epochs, at least 1."""
    csv: Path = Path("torchlml-which-k.csv")
    """The CSV to write, with a row for each network."""
