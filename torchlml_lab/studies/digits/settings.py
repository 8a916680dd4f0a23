"""The settings of `torchlml demo` and `torchlml which-k`."""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class DemoSettings:
    """Train one small network with five losses on images of k digits that name only one of them."""

    k: int = 3
    """How many different digits each image shows, from 2 to 9."""
    seeds: int = 3
    """How many times everything is repeated with other images and weights, at least 2; 3 or more say more."""
    images: int = 5000
    """How many training images, at least 100; the test has 2000, in handwriting that was not trained on."""
    epochs: int = 30
    """How often each network sees each training image, at least once."""
    out: Path = Path("torchlml-demo")
    """The folder for `report.html` and the plots; it is made when it is missing."""
    threads: int = 1
    """How many threads compute, from 1 to the cores; matrices this small gain nothing from a second one."""


@dataclass(frozen=True)
class WhichKSettings:
    """Train LML with right and wrong k, on images of 3 digits and of 1 to 5, and measure what it costs."""

    seeds: int = 4
    """How many times everything is repeated with other images and weights, at least 1."""
    images: int = 5000
    """How many training images, at least 100; the test has 2000, in handwriting that was not trained on."""
    epochs: int = 30
    """How often each network sees each training image, at least once."""
    csv: Path = Path("torchlml-which-k.csv")
    """The CSV to write, a row for each network."""
