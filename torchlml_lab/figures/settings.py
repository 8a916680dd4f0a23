"""The settings of the figures; the docstring of each is the help of its command."""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class FigureSettings:
    """The settings that every figure has."""

    out: Path = Path("torchlml-figures/figure.png")
    """The PNG or SVG to write; its folder is made when it is missing."""


@dataclass(frozen=True)
class CsvFigureSettings(FigureSettings):
    """The settings of a figure that is drawn from a CSV."""

    csv: Path | None = None
    """The CSV to draw from; by default your own where its command writes it, else that in results/."""


@dataclass(frozen=True)
class ProjectionSettings(FigureSettings):
    """Project a row of ten logits, print it beside softmax and sigmoid, and draw the picture."""

    out: Path = Path("torchlml-figures/projection.png")
    k: float = 3.0
    """What the projected row sums to: how many of the ten labels to choose, between 0 and 10."""


@dataclass(frozen=True)
class SlidingSigmoidSettings:
    """Animate the sigmoid that slides along ten logits until its outputs sum to 3."""

    out: Path = Path("torchlml-figures/sliding-sigmoid.gif")
    """The GIF to write; its directory is created if needed."""


@dataclass(frozen=True)
class PolytopesSettings(FigureSettings):
    """Draw L(3,1), L(3,2) and L(4,2), and where lml sends a row of logits as it is scaled."""

    out: Path = Path("torchlml-figures/polytopes.png")


@dataclass(frozen=True)
class RootFindingSettings(FigureSettings):
    """Draw how the threshold of six logits is found for k = 2, and from which interval."""

    out: Path = Path("torchlml-figures/root-finding.png")


@dataclass(frozen=True)
class EntropiesSettings(FigureSettings):
    """Draw the entropies of sigmoid, softmax, lml and constrained softmax over the sets they project onto."""

    out: Path = Path("torchlml-figures/entropies.png")


@dataclass(frozen=True)
class SetsFigureSettings(FigureSettings):
    """Draw the largest difference between lml and the exact inclusion probabilities against n and k."""

    out: Path = Path("torchlml-figures/sets.png")


@dataclass(frozen=True)
class RelaxationsSettings(FigureSettings):
    """Draw the same logits through five relaxations, as k, the temperature and the gap change."""

    out: Path = Path("torchlml-figures/which-relaxation.png")


@dataclass(frozen=True)
class TimingFigureSettings(CsvFigureSettings):
    """Draw the times of `torchlml bench paper` against k, one panel for each length of a row."""

    out: Path = Path("torchlml-figures/timing.png")


@dataclass(frozen=True)
class NoiseFigureSettings(CsvFigureSettings):
    """Draw the accuracies of `torchlml sweep cifar100` against the label noise, with their spread."""

    out: Path = Path("torchlml-figures/cifar100.png")


@dataclass(frozen=True)
class MultilabelFigureSettings(FigureSettings):
    """Draw the test nDCG@5 of each loss less that of softmax, and write tables (.md) beside the picture."""

    out: Path = Path("torchlml-figures/multilabel.png")
    csv: tuple[Path, ...] = ()
    """The CSVs of `torchlml sweep multilabel`; by default of runs/multilabel-sweep, else results/'s."""


@dataclass(frozen=True)
class SceneGraphFigureSettings(CsvFigureSettings):
    """Draw the recall curves of `torchlml sweep scene-graph` as the paper does; tables (.md) go beside it."""

    out: Path = Path("torchlml-figures/scene-graph.png")
    methods: tuple[str, ...] = ("softmax", "truncated-entropy-20", "lml-20")
    """The methods whose curves are drawn; the tables have all."""


@dataclass(frozen=True)
class BiasFigureSettings(CsvFigureSettings):
    """Draw the test recall of `torchlml sweep scene-graph --biases ...` against the frequency bias.

    Its tables (.md) are written next to the picture.
    """

    out: Path = Path("torchlml-figures/scene-graph-bias.png")


@dataclass(frozen=True)
class RecommendFigureSettings(FigureSettings):
    """Draw what every model and loss of `torchlml sweep recommend` finds; a table (.md) goes beside it."""

    out: Path = Path("torchlml-figures/recommend.png")
    csv: tuple[Path, ...] = ()
    """The CSVs of `torchlml sweep recommend`; by default of runs/recommend-sweep, else results/'s."""
    published: bool = False
    """Also show what others report of Gowalla in LightGCN's split; for sweeps on these data."""


@dataclass(frozen=True)
class WhichKFigureSettings(CsvFigureSettings):
    """Draw what `torchlml which-k` measured against k, and write its tables (.md) beside the picture."""

    out: Path = Path("torchlml-figures/which-k.png")


@dataclass(frozen=True)
class AllSettings:
    """Draw every figure with its usual settings; those whose CSV is not there say what makes it."""

    out: Path = Path("torchlml-figures")
    """The folder for NAME.png of each figure; it is made when it is missing."""
