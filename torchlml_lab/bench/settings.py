"""The settings of the benchmarks, and checks of their values."""

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, TypeVar

from torchlml_lab.bench.timing import measurable
from torchlml_lab.cli_errors import BadInput, did_you_mean
from torchlml_lab.engine.settings import parse_settings


@dataclass(frozen=True)
class TimingSettings:
    """What every benchmark is told whose competitors are timed in rounds."""

    repetitions: int = 100
    """Rounds at most; in each one every competitor is timed once, and the ratios are formed."""
    seconds: float = 4.0
    """Time for one comparison, shared fairly by the competitors; the slowest may be timed only once."""
    csv: Path = Path("torchlml-bench.csv")
    """The CSV that the rows are appended to; it is made when it is missing."""


def check_timing(settings: TimingSettings) -> None:
    """Refuse numbers of rounds and seconds that nothing can be timed in."""
    check_numbers("--repetitions", (settings.repetitions,), 1)
    check_numbers("--seconds", (settings.seconds,), 0)


def check_choices(option: str, values: Sequence[str], known: Collection[str]) -> None:
    """Refuse values that are not among the known ones, and an option without a value."""
    if not values:
        raise BadInput(f"`{option}` needs at least one value.")
    for value in values:
        if value not in known:
            near = did_you_mean(value, known)
            said = f"`{option}` names `{value}`, which is none of {', '.join(known)}"
            raise BadInput(said + (near or "."))


def check_numbers(option: str, values: Sequence[float], least: float, most: float = math.inf) -> None:
    """Refuse numbers outside a range or not finite, and an option without a value."""
    if not values:
        raise BadInput(f"`{option}` needs at least one value.")
    for value in values:
        if not (least <= value <= most and math.isfinite(value)):
            limit = f"from {least:g} to {most:g}" if math.isfinite(most) else f"finite and at least {least:g}"
            raise BadInput(f"`{option}` has {value}, and must be {limit}.")


Mode = Literal["forward", "backward", "forward+backward"]
MODES: tuple[Mode, ...] = ("forward", "backward", "forward+backward")


METRICS = ("time", "memory")


def _metrics() -> tuple[str, ...]:
    return METRICS if measurable() else METRICS[:1]


@dataclass(frozen=True)
class GridBenchmarkSettings(TimingSettings):
    """What the benchmarks on a grid of cases have in common."""

    sizes: tuple[int, ...] = (100, 1000, 10_000, 1_000_000)
    """Lengths n of a row."""
    ks: tuple[str, ...] = ("5", "n/2")
    """How many to choose: numbers, or `n/NUMBER`, or `n-NUMBER`; those outside 1 to n-1 are left out."""
    batches: tuple[int, ...] = (256,)
    """Numbers of rows; long rows get fewer, so that no tensor has more than 4,000,000 entries."""
    scales: tuple[float, ...] = (1.0, 12.0)
    """Standard deviations of the logits."""
    dtypes: tuple[str, ...] = ("float32",)
    """Types of the logits: float32, float64, bfloat16, float16."""
    threads: tuple[int, ...] = (1,)
    """Numbers of threads torch may use."""
    providers: tuple[str, ...] = ()
    """Who competes; by default all that can run here. Softmax always takes part: the ratios are to it."""
    modes: tuple[str, ...] = MODES
    """What is measured: forward without a graph, backward alone, forward+backward through autograd."""
    metrics: tuple[str, ...] = field(default_factory=_metrics)
    """`time` of a call, or `memory` (Linux): what a call adds to the process at its highest, result too."""
    plot: Path | None = None
    """The PNG or SVG of the times in the whole CSV; by default a PNG beside the CSV, with its name."""
    compare: Path | None = None
    """The CSV of an earlier run, whose ratios are shown beside the new ones."""
    quick: bool = False
    """Begin from a small selection that takes well under a minute; other options still change it."""


# What `--quick` begins from.
QUICK: dict[str, Any] = {
    "sizes": (100, 1000, 10_000),
    "ks": ("5",),
    "batches": (64,),
    "scales": (3.0,),
    "metrics": ("time",),
    "seconds": 1.0,
}


@dataclass(frozen=True)
class LayerSettings(GridBenchmarkSettings):
    """Time lml beside softmax, topk, sort and sigmoid, in turn, as ratios to softmax.

    A ratio is formed from two calls within milliseconds, so that it holds on a noisy machine too.
    """


@dataclass(frozen=True)
class ConstrainedSettings(GridBenchmarkSettings):
    """Time the relatives of lml, in turn, as ratios to softmax."""

    plot: Path | None = None
    """The PNG or SVG of the times in the whole CSV; by default beside the CSV, as NAME-constrained.png."""


@dataclass(frozen=True)
class LossesSettings(TimingSettings):
    """Time the losses with their gradients, in turn, on problems of their own, as ratios to a baseline."""

    threads: tuple[int, ...] = (1,)
    """Numbers of threads torch may use."""


@dataclass(frozen=True)
class ShortRowsSettings(TimingSettings):
    """Time lml and its loss on many short rows, as ratios to softmax, to cross-entropy and to a plain call.

    `TORCHLML_KERNEL=torch` times pure PyTorch, and `TORCHLML_ISA=v3` the kernel for AVX2.
    """

    seconds: float = 2.0
    """Time for one comparison."""
    scales: tuple[float, ...] = (1.0, 3.0, 12.0)
    """Standard deviations of the logits; each is a column of the table."""
    dtypes: tuple[str, ...] = ("float32",)
    """Types of the logits: float32, float64, bfloat16, float16."""
    threads: tuple[int, ...] = (1,)
    """Numbers of threads torch may use."""


@dataclass(frozen=True)
class SubsetSettings(TimingSettings):
    """Measure the exact distribution over k-subsets: time, memory and accuracy, next to other methods."""

    repetitions: int = 15
    seconds: float = 5.0
    sizes: tuple[int, ...] = (100, 1000, 10_000, 100_000, 1_000_000)
    """Lengths of the rows in the comparison."""
    ks: tuple[int, ...] = (10, 1000)
    """Sizes of the sets in the comparison; those below the length of a row are used."""
    scale: float = 2.0
    """The standard deviation of the logits in the comparison."""


@dataclass(frozen=True)
class BalancedSettings(TimingSettings):
    """Time balanced_lml on router logits, as ratios to lml on the same matrix in the same round."""

    skews: tuple[float, ...] = (0.0, 1.0, 3.0, 10.0)
    """Standard deviations of the preference of all tokens for an expert."""
    dtype: str = "float32"
    """The dtype of the logits, float32 or float64 or bfloat16."""
    threads: int = 1
    """Number of threads torch may use."""


@dataclass(frozen=True)
class PaperSettings:
    """Repeat the timing study of the paper's section 5.1, and compare its claims with the numbers.

    Every competitor is timed once in each of the trials, for every k, in turn. The rows of a length are in
    the CSV when it is done; an interrupted study goes on with --resume.
    """

    sizes: tuple[int, ...] = (1000, 10_000)
    """Lengths n of a row."""
    ks: tuple[int, ...] = (5, 50, 100)
    """How many to choose, below the smallest length."""
    batch: int = 256
    """The number of rows."""
    threads: tuple[int, ...] = (1,)
    """Numbers of threads torch may use."""
    trials: int = 50
    """How often each competitor is timed on each problem."""
    csv: Path = Path("torchlml-paper-timing.csv")
    """The CSV that the rows are appended to; it is made when it is missing."""
    plot: Path | None = None
    """The PNG or SVG of the figure; by default a PNG beside the CSV, with its name."""
    resume: bool = False
    """Go on: lengths whose rows the CSV has, from this machine and these versions, are not timed again."""
    quick: bool = False
    """Begin from rows of 1000 and 5 trials, a minute; other options still change it."""


@dataclass(frozen=True)
class ComparisonSettings(TimingSettings):
    """Compare ways to a differentiable top-k: time beside softmax, memory, exactness, what they work with.

    The tables are printed as Markdown.
    """

    csv: Path = Path("torchlml-alternatives.csv")
    methods: tuple[str, ...] = ()
    """Who is compared; by default all that can run here. Those for short rows sit out the long ones."""
    sizes: tuple[int, ...] = (32, 1000, 10_000)
    """Lengths n of a row."""
    k: int = 5
    """How many to choose."""
    batch: int = 64
    """The number of rows."""
    scale: float = 3.0
    """The standard deviation of the logits."""
    threads: int = 1
    """The number of threads torch may use."""
    plot: Path | None = None
    """The PNG or SVG of this run; by default a PNG beside the CSV, with its name."""
    quick: bool = False
    """Begin from a small selection that takes well under a minute; other options still change it."""


# What `--quick` begins from.
QUICK_COMPARISON: dict[str, Any] = {"sizes": (1000,), "batch": 16, "seconds": 1.0}


@dataclass(frozen=True)
class ScaleSettings(TimingSettings):
    """Measure very many labels: time, memory, a long row, and rounds between two processes."""

    repetitions: int = 10
    seconds: float = 120.0
    threads: int = 2
    """The number of threads torch may use."""
    batch: int = 256
    """Rows of the batch whose time is taken."""
    labels: int = 200_000
    """Labels of the linear layer whose time and memory are taken."""
    features: int = 128
    """Inputs of the linear layer."""
    most_labels: int = 1_000_000
    """Labels of the linear layer that a fresh process trains on 512 rows."""
    longest_row: int = 10_000_000
    """The length of the single row."""


Kind = TypeVar("Kind", LayerSettings, ConstrainedSettings, PaperSettings, ComparisonSettings)


def _read_quick(kind: type[Kind], command: str, arguments: Sequence[str], quick: dict[str, Any]) -> Kind:
    """Read the options; with `--quick` those that are not given come from a small selection."""
    settings = parse_settings(kind, command, arguments, kind())
    if settings.quick:
        settings = parse_settings(kind, command, arguments, replace(kind(), **quick))
    return settings


def read_layer(arguments: Sequence[str]) -> LayerSettings:
    """Read the options of `torchlml bench layer`."""
    return _read_quick(LayerSettings, "bench layer", arguments, QUICK)


def read_constrained(arguments: Sequence[str]) -> ConstrainedSettings:
    """Read the options of `torchlml bench constrained`."""
    return _read_quick(ConstrainedSettings, "bench constrained", arguments, QUICK)


def read_paper(arguments: Sequence[str]) -> PaperSettings:
    """Read the options of `torchlml bench paper`."""
    return _read_quick(PaperSettings, "bench paper", arguments, {"sizes": (1000,), "trials": 5})


def read_alternatives(arguments: Sequence[str]) -> ComparisonSettings:
    """Read the options of `torchlml bench alternatives`."""
    return _read_quick(ComparisonSettings, "bench alternatives", arguments, QUICK_COMPARISON)
