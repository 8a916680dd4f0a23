"""The settings of the multi-label commands. This module has no slow imports, so that `--help` is fast."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal, get_args

import tyro

from torchlml_lab.engine.settings import GridSettings, TrainSettings

LossName = Literal["lml", "softmax", "bce", "truncated-entropy"]
LOSSES: tuple[LossName, ...] = get_args(LossName)
AnyLossName = Literal[LossName, "topk-softmax"]
"""The names of all losses. `topk-softmax` is only for recommendation."""
WITH_K: tuple[AnyLossName, ...] = ("lml", "truncated-entropy", "topk-softmax")
PerRow = Literal["labels"]
ModelName = Literal["combined", "network"]
RuleName = Literal["top-k", "half", "threshold", "count"]
UnlabeledName = Literal["auto", "keep", "skip"]
RULES: tuple[RuleName, ...] = get_args(RuleName)

Paths = Annotated[Path | tuple[Path, ...] | None, tyro.conf.arg(metavar="FILE [FILE ...]")]
"""Files, directories of files, or glob patterns."""
Columns = Annotated[tuple[str, ...], tyro.conf.arg(metavar="COLUMN [COLUMN ...]")]

EXPERIMENT = "multilabel"


@dataclass(frozen=True)
class MultilabelSettings(TrainSettings):
    """Train a multi-label model on your own files with text, numeric or sparse features; requires --train.

    The samples can be a table (CSV, TSV, JSON lines or Parquet) with a label column and text or numeric
    columns, a text file in the svmlight or extreme-classification format, or a pair of SciPy .npz files. Text
    files may be gzipped. Multiple files, a directory or a pattern like 'part-*.csv' are read as one data set.
    Without --valid, a tenth of the samples (up to a third of a small data set) is held out for validation.
    The final weights are those of the epoch with the best validation nDCG@5.
    """

    out: Path = Path("runs/multilabel")
    train: Paths = None
    """The training samples: one or more files, a directory, or a pattern in quotes."""
    valid: Paths = None
    """Files with the validation samples, which are used to select the best epoch. By default, a tenth of
    `--train` is held out (at most 5000 samples), or up to a third if there are fewer than 2000 samples."""
    test: Paths = None
    """Files with the test samples. If given, the final model is evaluated on them after training. Otherwise,
    it is evaluated on the validation samples."""
    continue_from: Path | None = None
    """Directory of an earlier run. Training starts from its weights and uses its columns, inputs and labels.
    New labels are added. Words and features that are not inputs of that run are ignored."""
    train_labels: Paths = None
    """The labels for `--train`, if it is an .npz file."""
    valid_labels: Paths = None
    """The labels for `--valid`, if it is an .npz file."""
    test_labels: Paths = None
    """The labels for `--test`, if it is an .npz file."""
    label_names: Path | None = None
    """Text file with the names of numbered labels. Line i, counting from 0, is the name of label i."""
    labels: Columns = ()
    """The column of a table that contains the labels, or one column of 0s and 1s for each label. By default,
    the columns are detected."""
    separator: str | None = None
    """The separator between labels in a cell. The default is the most common of `, ; |` and tab."""
    texts: Columns = ()
    """The text columns. If neither `--texts` nor `--numbers` is given, both are detected."""
    numbers: Columns = ()
    """The numeric columns."""
    unlabeled: UnlabeledName = "auto"
    """Whether to `keep` or `skip` samples without labels. If they are kept, the model learns that a sample
    can have no labels, and the loss bce is used instead of lml. `auto` keeps them if every label has its own
    column of 0s and 1s, and skips them otherwise."""
    encoder: str | None = None
    """Encode texts with this sentence-transformers model (a directory or a name) instead of TF-IDF. Requires
    the `encoder` extra. The embeddings of all samples are stored in the run directory."""
    loss: LossName = "lml"
    """The loss function: lml, softmax, bce or truncated-entropy."""
    k: int | PerRow | None = None
    """The number of labels to predict. With lml, `labels` trains each sample with its own number of labels as
    k. The default for training is `labels` with lml and 1 with truncated-entropy. The default for predictions
    is the mean number of labels per sample, rounded to an integer."""
    model: ModelName = "combined"
    """`combined` adds the scores of a regularized linear model to the logits of a network, with coefficients
    fitted on the validation samples. The linear model is left out if its matrices would be too large.
    `network` uses only the network."""
    hidden: int = 256
    """The size of the network's hidden layer. With 0, the network has no hidden layer."""
    dropout: float = 0.5
    """The dropout probability of the hidden layer, at least 0 and less than 1."""
    keep: float | Literal["one"] = 1.0
    """For experiments with missing labels: the fraction of the labels in `--train` to keep. At least one
    label per sample is kept; `one` keeps exactly one."""
    epochs: int = 200
    """The maximum number of epochs."""
    patience: int | None = None
    """Stop after this many epochs without improvement. The default corresponds to 100 steps, but is at least
    5 epochs (3 with a linear model)."""
    batch_size: int = 128
    """The number of samples per step across all processes; must be a multiple of the number of processes."""
    learning_rate: float = 0.005
    """The learning rate of Adam. With `--hidden 0`, it is multiplied by ten."""
    threads: int | None = None
    """The number of CPU threads, at most the number of cores. The default is 1 if `--batch-size` times the
    number of labels is less than 2**20, and all available threads otherwise."""


@dataclass(frozen=True)
class EvaluateSettings:
    """Evaluate the label rankings, the label sets and the calibration of a multi-label run.

    The ranking metrics (P@k, nDCG@k, PSP@k, R@k) are compared with a baseline that always predicts the most
    frequent labels. The set metrics (F1, share of exact sets) are computed for each rule that
    `torchlml predict --rule` accepts.
    """

    run: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")] = Path("runs/multilabel")
    """The run directory."""
    data: Paths = None
    """Files with labeled samples to evaluate on, in the same format as the training files. By default, the
    run is evaluated on its test samples or, if it has none, on its validation samples."""
    data_labels: Paths = None
    """The labels for `--data`, if it is an .npz file."""
    train: Paths = None
    """The new location of the training files, if they have moved since training."""
    valid: Paths = None
    """The new location of the validation files, if they have moved since training."""
    test: Paths = None
    """The new location of the test files, if they have moved since training."""
    out: Path | None = None
    """The directory for `report.md`, `report.png` and `labels.csv`, which lists the metrics of each label.
    The default is the run directory. With `--data`, files are written only if `--out` is given."""


@dataclass(frozen=True)
class PredictSettings:
    """Predict the labels of new samples, and print them with their probabilities."""

    run: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")] = Path("runs/multilabel")
    """The run directory."""
    data: Paths = None
    """Files with the samples to predict, in the same format as the training files. Labels are optional."""
    top: int | None = None
    """The number of labels to print for each sample. The default is 5, or all labels if there are fewer."""
    rule: RuleName | Literal["auto"] | None = None
    """Print the labels that a rule chooses instead of the top labels: `top-k` (the k most probable labels,
    with the k of the run), `half` (p > 0.5), `threshold` (p above a threshold fitted on the validation
    samples), `count` (the most probable labels, where their number is predicted for each sample), or `auto`
    (the rule with the best results on the validation samples). `half` may choose no labels. `threshold` and
    `count` may choose no labels only if the run kept samples without labels."""
    out: Path | None = None
    """Also write the labels of all samples to this file, with one line per label (.csv) or one line per
    sample (.jsonl)."""


@dataclass(frozen=True)
class ExportSettings:
    """Export the calibrated model of a multi-label run to a file that other programs can run.

    The exported model computes the probabilities of all labels from the network's inputs, and its metadata
    contains the label names. In Python, `torchlml_lab.load_run(RUN).inputs(samples)` computes these inputs.
    """

    run: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")] = Path("runs/multilabel")
    """The run directory."""
    format: Literal["onnx", "torch"] = "onnx"
    """`onnx` writes a model with standard ONNX operators, and `torch` writes a `torch.export` program."""
    out: Path | None = None
    """The file to write. The default is `model.onnx` or `model.pt2` in the run directory."""


@dataclass(frozen=True)
class SweepSettings(GridSettings):
    """Train with all combinations of losses, fractions of labels kept, seeds and learning rates.

    Finished runs are not repeated. Requires --run.train and --run.test.
    """

    out: Path = Path("runs/multilabel-sweep")
    losses: tuple[str, ...] = ("bce", "softmax", "lml-5", "lml-20", "lml-labels", "truncated-entropy-1")
    """The losses with their k: bce, softmax, lml-K, lml-labels or truncated-entropy-K with an integer K."""
    keeps: tuple[float | Literal["one"], ...] = (1.0, 0.5, 0.3, "one")
    """The fractions of the training labels to keep. At least one label per sample is kept; `one` keeps
    exactly one."""
    seeds: tuple[int, ...] = (0, 1, 2)
    run: MultilabelSettings = field(default_factory=lambda: MultilabelSettings(model="network"))
    """The options of all runs, as for `torchlml train multilabel`, except that `--run.model` defaults to
    `network`."""


@dataclass(frozen=True)
class OneVsRestSettings:
    """Fit one-vs-rest logistic regression for each C, and write the metrics of the best C to a CSV file."""

    train: Path | None = None
    """The training file, as for `torchlml train multilabel`."""
    test: Path | None = None
    """The test file."""
    csv: Path = Path("one-vs-rest.csv")
    """The CSV file to write. Results that it already contains are not computed again."""
    keeps: tuple[float | Literal["one"], ...] = (1.0, 0.5, 0.3, "one")
    """The fractions of the training labels to keep. At least one label per sample is kept; `one` keeps
    exactly one."""
    seed: int = 0
    """The seed for the random choice of the labels to keep."""
    strengths: tuple[float, ...] = (1.0, 10.0, 100.0)
    """The values to try for C, the inverse regularization strength. All labels use the same C."""
