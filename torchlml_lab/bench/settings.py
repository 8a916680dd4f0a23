"""The settings of the benchmarks, and validation of the options that they share."""

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
    """The settings shared by all benchmarks that time their methods in rounds."""

    repetitions: int = 100
    """Maximum number of rounds. In each round, every method with time left is compared with the baseline."""
    seconds: float = 4.0
    """Seconds per comparison, divided equally among its methods. Each method runs at least once."""
    csv: Path = Path("torchlml-bench.csv")
    """CSV file to append the results to. It is created if it does not exist."""


def check_timing(settings: TimingSettings) -> None:
    """Raise `BadInput` if `--repetitions` or `--seconds` is invalid."""
    check_numbers("--repetitions", (settings.repetitions,), 1)
    check_numbers("--seconds", (settings.seconds,), 0)


def check_choices(option: str, values: Sequence[str], known: Collection[str]) -> None:
    """Raise `BadInput` if a value is unknown or the option has no values."""
    if not values:
        raise BadInput(f"`{option}` needs at least one value.")
    for value in values:
        if value not in known:
            near = did_you_mean(value, known)
            said = f"`{option}` must be one of {', '.join(known)}, but it contains `{value}`"
            raise BadInput(said + (near or "."))


def check_numbers(option: str, values: Sequence[float], least: float, most: float = math.inf) -> None:
    """Raise `BadInput` if a number is out of range or not finite, or if the option has no values."""
    if not values:
        raise BadInput(f"`{option}` needs at least one value.")
    for value in values:
        if not (least <= value <= most and math.isfinite(value)):
            limit = f"from {least:g} to {most:g}" if math.isfinite(most) else f"finite and at least {least:g}"
            verb = "is" if len(values) == 1 else "contains"
            raise BadInput(f"`{option}` must be {limit}, but it {verb} {value}.")


Mode = Literal["forward", "backward", "forward+backward"]
MODES: tuple[Mode, ...] = ("forward", "backward", "forward+backward")


METRICS = ("time", "memory")


def _metrics() -> tuple[str, ...]:
    return METRICS if measurable() else METRICS[:1]


@dataclass(frozen=True)
class GridBenchmarkSettings(TimingSettings):
    """The settings shared by all benchmarks on a grid of cases."""

    sizes: tuple[int, ...] = (100, 1000, 10_000, 1_000_000)
    """Row lengths n to measure."""
    ks: tuple[str, ...] = ("5", "n/2")
    """Values of k: integers, `n/NUMBER` or `n-NUMBER`. Values outside 1 to n-1 are skipped."""
    batches: tuple[int, ...] = (256,)
    """Batch sizes, reduced for long rows to at most 4,000,000 entries per tensor, but at least one row."""
    scales: tuple[float, ...] = (1.0, 12.0)
    """Standard deviations of the logits."""
    dtypes: tuple[str, ...] = ("float32",)
    """Data types of the logits: float32, float64, bfloat16, float16."""
    threads: tuple[int, ...] = (1,)
    """The numbers of torch threads to measure."""
    providers: tuple[str, ...] = ()
    """Functions to compare. By default, all available ones. Softmax, the baseline, is always included."""
    modes: tuple[str, ...] = MODES
    """Passes to measure: forward (without autograd), backward, and forward+backward."""
    metrics: tuple[str, ...] = field(default_factory=_metrics)
    """Metrics to measure: `time` per call, and the peak `memory` that a call adds (Linux only)."""
    plot: Path | None = None
    """PNG or SVG file for a plot of this benchmark's times in the CSV. By default, NAME.png for NAME.csv."""
    compare: Path | None = None
    """CSV file from an earlier run. Its ratios are shown next to the new ones."""
    quick: bool = False
    """Use smaller defaults, which take well under a minute in total. Explicit options override them."""


# The defaults with `--quick`.
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
    """Measure the time and memory of lml, topk, sort, sigmoid and a copy, relative to softmax.

    Each ratio compares two times from the same round, so ratios are reliable even on a noisy machine.
    """


@dataclass(frozen=True)
class ConstrainedSettings(GridBenchmarkSettings):
    """Measure the time and memory of operators related to lml, relative to softmax."""

    plot: Path | None = None
    """PNG or SVG file for a plot of this benchmark's times in the CSV. By default, NAME-constrained.png for
    NAME.csv."""


@dataclass(frozen=True)
class LossesSettings(TimingSettings):
    """Time the forward and backward passes of the losses at fixed sizes, relative to a baseline loss."""

    threads: tuple[int, ...] = (1,)
    """The numbers of torch threads to measure."""


@dataclass(frozen=True)
class ShortRowsSettings(TimingSettings):
    """Time lml and its loss on many short rows, relative to softmax and cross-entropy.

    For lml with a mask or with one k per row, the baseline is lml without a mask and with a single k.

    Set `TORCHLML_KERNEL=torch` to time pure PyTorch, or `TORCHLML_ISA=v3` to time the AVX2 kernel.
    """

    seconds: float = 2.0
    """Time budget per comparison in seconds."""
    scales: tuple[float, ...] = (1.0, 3.0, 12.0)
    """Standard deviations of the logits. Each has its own column in the table."""
    dtypes: tuple[str, ...] = ("float32",)
    """Data types of the logits: float32, float64, bfloat16, float16."""
    threads: tuple[int, ...] = (1,)
    """The numbers of torch threads to measure."""


@dataclass(frozen=True)
class SubsetSettings(TimingSettings):
    """Compare the exact distribution over k-subsets with other methods in time, memory and accuracy."""

    repetitions: int = 15
    """Maximum number of timed calls per method. Ratios to softmax use four times as many."""
    seconds: float = 5.0
    """CPU seconds per method after which no further call is timed. Each method is timed at least once."""
    sizes: tuple[int, ...] = (100, 1000, 10_000, 100_000, 1_000_000)
    """Row lengths n in the comparison."""
    ks: tuple[int, ...] = (10, 1000)
    """Subset sizes k in the comparison. Only values smaller than the row length are used."""
    scale: float = 2.0
    """Standard deviation of the logits in the comparison."""


@dataclass(frozen=True)
class BalancedSettings(TimingSettings):
    """Time balanced_lml on router logits, relative to lml on the same matrix in the same round."""

    skews: tuple[float, ...] = (0.0, 1.0, 3.0, 10.0)
    """Standard deviations of the expert preferences that all tokens share. 0 means no preference."""
    dtype: str = "float32"
    """Data type of the logits: float32, float64 or bfloat16."""
    threads: int = 1
    """Number of torch threads."""


@dataclass(frozen=True)
class PaperSettings:
    """Repeat the timing study in section 5.1 of the paper, and compare the results with its claims.

    Each trial times every method once for every k. Results are written to the CSV after each row length.
    Continue an interrupted study with --resume.
    """

    sizes: tuple[int, ...] = (1000, 10_000)
    """Row lengths n to measure."""
    ks: tuple[int, ...] = (5, 50, 100)
    """Values of k, all smaller than the smallest row length."""
    batch: int = 256
    """Number of rows per batch."""
    threads: tuple[int, ...] = (1,)
    """The numbers of torch threads to measure."""
    trials: int = 50
    """Number of times that each method is timed for each n and k."""
    csv: Path = Path("torchlml-paper-timing.csv")
    """CSV file to append the results to. It is created if it does not exist."""
    plot: Path | None = None
    """PNG or SVG file for the figure. By default, NAME.png for NAME.csv."""
    resume: bool = False
    """Skip row lengths that the CSV already contains for this machine, torch version and torchlml version."""
    quick: bool = False
    """Use 5 trials and rows of length 1000, which takes about a minute. Explicit options override these."""


@dataclass(frozen=True)
class ComparisonSettings(TimingSettings):
    """Compare differentiable top-k operators: time relative to softmax, memory, accuracy and features.

    The tables are printed as Markdown.
    """

    csv: Path = Path("torchlml-alternatives.csv")
    methods: tuple[str, ...] = ()
    """Methods to compare. By default, all available ones. Some methods run only on short rows."""
    sizes: tuple[int, ...] = (32, 1000, 10_000)
    """Row lengths n to measure."""
    k: int = 5
    """Number of entries to select."""
    batch: int = 64
    """Number of rows per batch."""
    scale: float = 3.0
    """Standard deviation of the logits."""
    equal: int = 2_700_000
    """Length of an additional row in which all logits are equal. 0 omits this row."""
    threads: int = 1
    """Number of torch threads."""
    plot: Path | None = None
    """PNG or SVG file for the plot of this run. By default, NAME.png for NAME.csv."""
    quick: bool = False
    """Use smaller defaults, which take well under a minute in total. Explicit options override them."""


# The defaults with `--quick`.
QUICK_COMPARISON: dict[str, Any] = {"sizes": (1000,), "batch": 16, "equal": 0, "seconds": 1.0}


@dataclass(frozen=True)
class ScaleSettings(TimingSettings):
    """Measure time and memory with many labels, time on a long row, and communication between processes."""

    repetitions: int = 10
    seconds: float = 120.0
    threads: int = 2
    """Number of torch threads."""
    batch: int = 256
    """Number of rows in the timed batch."""
    labels: int = 200_000
    """Number of labels (outputs of the linear layer) in the timed batch."""
    features: int = 128
    """Number of inputs of the linear layer."""
    most_labels: int = 1_000_000
    """Number of labels when measuring the peak memory of one training step on 512 rows in a new process."""
    longest_row: int = 10_000_000
    """Length of the single row on which lml and softmax are timed."""


@dataclass(frozen=True)
class TrainingSettings:
    """Measure the speed and memory of `torchlml train multilabel`. Repeat the command to resume.

    Every size is measured in a new process on a generated file. All samples are read, but training stops
    after the time set by --seconds. For each value of --processes, one size is also measured with one thread
    per process.
    """

    csv: Path = Path("training.csv")
    """CSV file for the results. Measurements that it already contains are not repeated."""
    samples: tuple[int, ...] = (10_000, 100_000, 1_000_000)
    """The numbers of samples to measure."""
    labels: tuple[int, ...] = (1_000, 10_000, 100_000, 1_000_000)
    """The numbers of labels to measure. Values above ten times the number of samples are skipped."""
    features: int = 100_000
    """Number of features. Each sample has about 15 of them."""
    seconds: float = 20.0
    """Training time for each size in seconds."""
    threads: int = 2
    """Number of torch threads when one process is used."""
    processes: tuple[int, ...] = (1, 2)
    """The numbers of processes to measure, with one thread per process."""


Kind = TypeVar("Kind", LayerSettings, ConstrainedSettings, PaperSettings, ComparisonSettings)


def _read_quick(kind: type[Kind], command: str, arguments: Sequence[str], quick: dict[str, Any]) -> Kind:
    """Parse the options. With `--quick`, the values in `quick` are the defaults."""
    settings = parse_settings(kind, command, arguments, kind())
    if settings.quick:
        settings = parse_settings(kind, command, arguments, replace(kind(), **quick))
    return settings


def read_layer(arguments: Sequence[str]) -> LayerSettings:
    """Parse the options of `torchlml bench layer`."""
    return _read_quick(LayerSettings, "bench layer", arguments, QUICK)


def read_constrained(arguments: Sequence[str]) -> ConstrainedSettings:
    """Parse the options of `torchlml bench constrained`."""
    return _read_quick(ConstrainedSettings, "bench constrained", arguments, QUICK)


def read_paper(arguments: Sequence[str]) -> PaperSettings:
    """Parse the options of `torchlml bench paper`."""
    return _read_quick(PaperSettings, "bench paper", arguments, {"sizes": (1000,), "trials": 5})


def read_alternatives(arguments: Sequence[str]) -> ComparisonSettings:
    """Parse the options of `torchlml bench alternatives`."""
    return _read_quick(ComparisonSettings, "bench alternatives", arguments, QUICK_COMPARISON)


@dataclass(frozen=True)
class OwnDataSettings:
    """Compare `torchlml train multilabel` with other packages for tagging. Repeat the command to resume.

    Every method trains on the same samples of bibtex, corel5k, delicious and GoEmotions and predicts labels
    for the same test samples. To install LibMultiLabel and napkinXC, run
    `pip install 'torchlml[competitors]'`. To run without them, leave them out of --methods.
    """

    data: Path | None = None
    """Data directory, as described in results/own-data/README.md. The default is `$TORCHLML_DATA`."""
    csv: Path = Path("own-data.csv")
    """CSV file for the results. Comparisons that it already contains are not repeated."""
    sets: tuple[str, ...] = ("bibtex", "corel5k", "delicious", "goemotions")
    """Data sets to use."""
    sizes: tuple[int, ...] = (300, 1000, 3000, 8000)
    """The numbers of training samples. 0 or a number larger than the data set selects all samples."""
    methods: tuple[str, ...] = (
        "torchlml",
        "LinearSVC",
        "LinearSVC, tuned",
        "logistic",
        "logistic, tuned",
        "LibMultiLabel",
        "LibMultiLabel, tuned",
        "napkinXC",
        "napkinXC, tuned",
    )
    """Methods to compare. Tuned methods choose the regularization parameter C and a decision rule on
    validation samples."""
    seeds: tuple[int, ...] = (0, 1, 2)
    """Random seeds for selecting the training samples and initializing torchlml's network."""
