"""The settings of the multi-label commands. This module has no slow imports, so that `--help` is fast."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal, get_args

import tyro

from torchlml_lab.engine.settings import GridSettings, TrainSettings

LossName = Literal["lml", "softmax", "bce", "truncated-entropy"]
LOSSES: tuple[LossName, ...] = get_args(LossName)
AnyLossName = Literal[LossName, "topk-softmax"]
"""The names of the losses that recommendation supports."""
WITH_K: tuple[AnyLossName, ...] = ("lml", "truncated-entropy", "topk-softmax")
PerRow = Literal["labels"]
ModelName = Literal["combined", "network"]
RuleName = Literal["top-k", "half", "threshold", "count"]
UnlabeledName = Literal["auto", "keep", "skip"]
RULES: tuple[RuleName, ...] = get_args(RuleName)

Paths = Annotated[Path | tuple[Path, ...] | None, tyro.conf.arg(metavar="FILE [FILE ...]")]
"""Files, directories that contain them, or patterns."""

EXPERIMENT = "multilabel"


@dataclass(frozen=True)
class MultilabelSettings(TrainSettings):
    """Train a multi-label model on your own files with text, numeric or sparse features; requires --train.

    A file is a table (CSV, TSV, JSON lines or Parquet, with labels and text or numeric columns), svmlight
    or extreme-classification text, or a pair of SciPy .npz files. Text files may be gzipped. Several files, a
    directory or a pattern like 'part-*.csv' are read as one file. Without --valid, a tenth of the samples is
    held out for validation. The epoch with the best validation nDCG@5 is kept.
    """

    out: Path = Path("runs/multilabel")
    train: Paths = None
    """The training samples: files, a directory, or a pattern in quotes."""
    valid: Paths = None
    """The validation samples, which select the best epoch; by default a tenth of `--train` is held out."""
    test: Paths = None
    """The test samples, evaluated once after training; by default the report uses the validation samples."""
    continue_from: Path | None = None
    """Start from the weights of this run instead of random weights, and keep its columns, inputs and labels.
    New labels are added; unknown words and features are ignored."""
    train_labels: Paths = None
    """The labels for `--train`, if it is an .npz file."""
    valid_labels: Paths = None
    """The labels for `--valid`, if it is an .npz file."""
    test_labels: Paths = None
    """The labels for `--test`, if it is an .npz file."""
    label_names: Path | None = None
    """For numbered labels, a text file whose line i, counting from 0, is the name of label i."""
    labels: tuple[str, ...] = ()
    """The label column of a table, or a column of 0s and 1s for each label; detected by default."""
    separator: str | None = None
    """The separator between labels in a cell; by default the most common of `, ; |` and tab."""
    texts: tuple[str, ...] = ()
    """The text columns; if neither `--texts` nor `--numbers` is given, both are detected."""
    numbers: tuple[str, ...] = ()
    """The number columns."""
    unlabeled: UnlabeledName = "auto"
    """Whether to `keep` samples without labels, as examples to which no label applies, or to `skip` them. If
    they are kept, bce replaces lml. `auto` keeps them if every label has its own column of 0s and 1s."""
    encoder: str | None = None
    """Encode texts with this sentence-transformers model (a directory or a name) instead of TF-IDF;
    requires the extra `encoder`. The embeddings of all samples are stored in the run directory."""
    loss: LossName = "lml"
    """The loss function: lml, softmax, bce or truncated-entropy."""
    k: int | PerRow | None = None
    """The number of labels to predict. For lml it may be `labels`: train with each sample's number of labels.
    By default lml trains with `labels` and truncated-entropy with 1, and predictions use the mean number of
    labels per sample, rounded to an integer."""
    model: ModelName = "combined"
    """`combined`: a weighted sum of a regularized linear model, refitted on all samples, and a network. The
    weights of the sum are fitted on the validation samples. The linear model is omitted if it does not fit in
    memory. `network`: only the network."""
    hidden: int = 256
    """The size of the network's hidden layer; 0 for a network without one."""
    dropout: float = 0.5
    """The dropout probability of the hidden layer, at least 0 and less than 1."""
    keep: float | Literal["one"] = 1.0
    """For studies: the share of training labels to keep, at least one per sample; `one` keeps exactly one."""
    epochs: int = 200
    """The maximum number of epochs."""
    patience: int | None = None
    """Stop after this many epochs without improvement; by default the number of epochs that take 100 steps,
    but at least 5, or 3 with a linear model."""
    batch_size: int = 128
    """The number of samples per step over all processes; must be a multiple of the number of processes."""
    learning_rate: float = 0.005
    """The learning rate of Adam; with `--hidden 0`, training uses ten times this rate."""


@dataclass(frozen=True)
class EvaluateSettings:
    """Evaluate a multi-label run: rankings (P@k, nDCG@k, PSP@k, R@k), sets (F1, exact sets) and calibration.

    Rankings are compared with a baseline that always predicts the most frequent labels. Sets are evaluated
    for every rule that `torchlml predict --rule` accepts.
    """

    run: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")] = Path("runs/multilabel")
    """The run directory."""
    data: Paths = None
    """Other labeled samples, in files like the training files; by default the run's test or validation
    samples."""
    data_labels: Paths = None
    """The labels for `--data`, if it is an .npz file."""
    train: Paths = None
    """The training files, if they have moved."""
    valid: Paths = None
    """The validation files, if they have moved."""
    test: Paths = None
    """The test files, if they have moved."""
    out: Path | None = None
    """The directory for `report.md`, `report.png` and `labels.csv` (support, precision, recall and average
    precision for each label); by default the run directory, but with `--data` no files are written."""


@dataclass(frozen=True)
class PredictSettings:
    """Print the top labels of each sample in a file, with the probability that each is in the top k."""

    run: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")] = Path("runs/multilabel")
    """The run directory."""
    data: Paths = None
    """The samples, in files like the training files; labels are not needed."""
    top: int | None = None
    """The number of labels per sample to print; by default 5, or all if there are fewer."""
    rule: RuleName | Literal["auto"] | None = None
    """Print the labels that a rule chooses instead of a fixed number: `top-k` (the k of the run), `half`
    (p > 0.5), `threshold` (p above a threshold fitted on validation), `count` (a number predicted for each
    sample), or `auto` (the best of these rules on validation). A set is empty only with `half`, or if the run
    kept samples without labels."""
    out: Path | None = None
    """Also write the labels of all samples to a file: one line per label (.csv) or per sample (.jsonl)."""


@dataclass(frozen=True)
class ExportSettings:
    """Write the best weights of a multi-label run, with its calibration, as a program for other environments.

    The program computes the probabilities of all labels from the inputs of the network, and contains the
    names of the labels. In Python, `torchlml_lab.load_run(RUN).inputs(samples)` computes these inputs.
    """

    run: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")] = Path("runs/multilabel")
    """The run directory."""
    format: Literal["onnx", "torch"] = "onnx"
    """`onnx`: standard ONNX operators, for example for onnxruntime. `torch`: a torch.export program."""
    out: Path | None = None
    """The file to write; by default `model.onnx` or `model.pt2` in the run directory."""


@dataclass(frozen=True)
class SweepSettings(GridSettings):
    """Run all unfinished combinations of losses, shares of labels kept, seeds and learning rates.

    Requires --run.train and --run.test.
    """

    out: Path = Path("runs/multilabel-sweep")
    losses: tuple[str, ...] = ("bce", "softmax", "lml-5", "lml-20", "lml-labels", "truncated-entropy-1")
    """The losses with their k: bce, softmax, lml-5, lml-labels, truncated-entropy-1 and so on."""
    keeps: tuple[float | Literal["one"], ...] = (1.0, 0.5, 0.3, "one")
    """The shares of training labels to keep, at least one per sample; `one` keeps exactly one."""
    seeds: tuple[int, ...] = (0, 1, 2)
    run: MultilabelSettings = field(default_factory=lambda: MultilabelSettings(model="network"))
    """The settings shared by all runs, as for `torchlml train multilabel`, but with `--run.model network`."""
