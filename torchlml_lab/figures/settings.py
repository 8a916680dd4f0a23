"""The settings of the figures. The docstring of each class is its command's help text."""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class FigureSettings:
    """The settings shared by all figures."""

    out: Path = Path("torchlml-figures/figure.png")
    """PNG or SVG file to write; its directory is created if it does not exist."""


@dataclass(frozen=True)
class CsvFigureSettings(FigureSettings):
    """The settings of a figure that is drawn from a CSV."""

    csv: Path | None = None
    """CSV file with the data; by default, the output of your own run, or else the file in results/."""


@dataclass(frozen=True)
class ProjectionSettings(FigureSettings):
    """Project ten logits, compare the result with softmax and sigmoid, and draw the figure."""

    out: Path = Path("torchlml-figures/projection.png")
    k: float = 3.0
    """Sum of the projection: the number of labels to select, between 0 and 10."""


@dataclass(frozen=True)
class SlidingSigmoidSettings:
    """Animate a sigmoid that slides along ten logits until its outputs sum to 3."""

    out: Path = Path("torchlml-figures/sliding-sigmoid.gif")
    """GIF file to write; its directory is created if it does not exist."""


@dataclass(frozen=True)
class PolytopesSettings(FigureSettings):
    """Draw L(3,1), L(3,2) and L(4,2), and the path of lml(x / T, k) as the temperature T changes."""

    out: Path = Path("torchlml-figures/polytopes.png")


@dataclass(frozen=True)
class RootFindingSettings(FigureSettings):
    """Draw the equation for the threshold nu (six logits, k = 2) with its root and its search intervals."""

    out: Path = Path("torchlml-figures/root-finding.png")


@dataclass(frozen=True)
class EntropiesSettings(FigureSettings):
    """Draw the entropies that sigmoid, softmax, lml and constrained softmax maximize over their polytopes."""

    out: Path = Path("torchlml-figures/entropies.png")


@dataclass(frozen=True)
class SetsFigureSettings(FigureSettings):
    """Draw the largest difference between lml and the exact inclusion probabilities against n and k."""

    out: Path = Path("torchlml-figures/sets.png")


@dataclass(frozen=True)
class RelaxationsSettings(FigureSettings):
    """Draw the outputs of five top-k relaxations at two temperatures, and their gradients."""

    out: Path = Path("torchlml-figures/which-relaxation.png")


@dataclass(frozen=True)
class BenchmarksFigureSettings(FigureSettings):
    """Draw time relative to softmax against the row length, and write the benchmark tables (.md)."""

    out: Path = Path("torchlml-figures/benchmarks.png")
    csv: tuple[Path, ...] = ()
    """CSV files from `torchlml bench` (layer, constrained, losses, short); by default, your own CSV, or else
    those in results/."""


@dataclass(frozen=True)
class BandwidthFigureSettings(CsvFigureSettings):
    """Draw the speed of softmax, sigmoid and lml relative to the speed of copying the same data."""

    out: Path = Path("torchlml-figures/bandwidth.png")


@dataclass(frozen=True)
class AlternativesFigureSettings(CsvFigureSettings):
    """Draw the results of `torchlml bench alternatives`: time relative to softmax, and features."""

    out: Path = Path("torchlml-figures/alternatives.png")


@dataclass(frozen=True)
class OwnDataFigureSettings(CsvFigureSettings):
    """Draw the results of `torchlml bench own-data` against the number of samples, and write tables (.md)."""

    out: Path = Path("torchlml-figures/own-data.png")


@dataclass(frozen=True)
class TimingFigureSettings(CsvFigureSettings):
    """Draw the times from `torchlml bench paper` against k, with one panel per row length."""

    out: Path = Path("torchlml-figures/timing.png")


@dataclass(frozen=True)
class NoiseFigureSettings(CsvFigureSettings):
    """Draw accuracy minus that of cross-entropy against label noise, from `torchlml sweep cifar100`."""

    out: Path = Path("torchlml-figures/cifar100.png")


@dataclass(frozen=True)
class MultilabelFigureSettings(FigureSettings):
    """Draw the test nDCG@5 of each loss minus that of softmax, and write tables (.md) next to the figure."""

    out: Path = Path("torchlml-figures/multilabel.png")
    csv: tuple[Path, ...] = ()
    """CSV files from `torchlml sweep multilabel`; by default, those in runs/multilabel-sweep or results/."""


@dataclass(frozen=True)
class SceneGraphFigureSettings(CsvFigureSettings):
    """Draw recall by epoch, minus that of a reference method, from `torchlml sweep scene-graph`.

    The tables (.md) are written next to the figure.
    """

    out: Path = Path("torchlml-figures/scene-graph.png")
    methods: tuple[str, ...] = ("softmax", "truncated-entropy-20", "lml-20")
    """Methods to draw, the reference first. The tables include all methods."""


@dataclass(frozen=True)
class BiasFigureSettings(CsvFigureSettings):
    """Draw the test recall from `torchlml sweep scene-graph --biases ...` for each kind of frequency bias.

    The tables (.md) are written next to the figure.
    """

    out: Path = Path("torchlml-figures/scene-graph-bias.png")


@dataclass(frozen=True)
class RecommendFigureSettings(FigureSettings):
    """Draw the Recall@20 and nDCG@20 of each model and loss from `torchlml sweep recommend`.

    A table (.md) is written next to the figure.
    """

    out: Path = Path("torchlml-figures/recommend.png")
    csv: tuple[Path, ...] = ()
    """CSV files from `torchlml sweep recommend`; by default, those in runs/recommend-sweep or results/."""
    published: bool = False
    """Also show published results on Gowalla with LightGCN's split; use only for sweeps on this data set."""


@dataclass(frozen=True)
class MissingLabelsFigureSettings(CsvFigureSettings):
    """Draw the mAP and Brier scores from `torchlml missing-labels` by method, and write tables (.md)."""

    out: Path = Path("torchlml-figures/missing-labels.png")


@dataclass(frozen=True)
class WhichKFigureSettings(CsvFigureSettings):
    """Draw the results of `torchlml which-k` against k, and write tables (.md) next to the figure."""

    out: Path = Path("torchlml-figures/which-k.png")


@dataclass(frozen=True)
class AllSettings:
    """Draw every figure with its default settings. If a CSV is missing, print the command that creates it."""

    out: Path = Path("torchlml-figures")
    """Directory for the figures; it is created if it does not exist."""
