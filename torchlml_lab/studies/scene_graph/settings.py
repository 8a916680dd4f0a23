"""The settings of the scene-graph commands. This module has no slow imports, so that `--help` is fast."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal, get_args

import tyro

from torchlml_lab.engine.settings import GridSettings, StepTimeSettings, TrainSettings

Objective = Literal["softmax", "lml", "truncated-entropy", "bce"]
OBJECTIVES: tuple[Objective, ...] = get_args(Objective)


EXPERIMENT = "scene-graph"


@dataclass(frozen=True)
class SceneGraphSettings(TrainSettings):
    """Train MotifNet-LeftRight to predict the relations between given objects; requires --vg or --vrd.

    Boxes and object labels are given (predicate classification). Without --region-features, the model has no
    visual input. After every epoch, it is evaluated on the validation images and on an equal number of
    training images. The epoch with the best validation recall (the mean of R@20, R@50 and R@100, with and
    without the graph constraint) is evaluated on the test images.
    """

    out: Path = Path("runs/scene-graph")
    vg: Path | None = None
    """The Visual Genome directory: `VG-SGG.h5`, `VG-SGG-dicts.json` and `image_data.json` of Xu et al."""
    vrd: Path | None = None
    """The VRD directory: `annotations_{train,test}.json`, `objects.json` and `predicates.json`."""
    objective: Objective = "lml"
    """The loss function. `softmax` classifies each edge (ordered pair of objects) separately, as in Motifs.
    `bce` classifies each triple (edge and predicate) separately. The others apply to all triples of an image
    together."""
    k: int = 20
    """The number of relations per image that lml and truncated-entropy predict in training, at least 1."""
    one_per_edge: bool = False
    """In each step, train on one random relation per edge, as `softmax` always does, not on all relations."""
    glove: Path | None = None
    """GloVe vectors for label embeddings: the official text file, or an npz file of `names` and `vectors`."""
    counts: Path | None = None
    """An npz file with counts for the frequency bias. It contains the integer arrays `subject`, `object` and
    `predicate`, which are numbered from 1, and `count`."""
    leave_one_out: bool = False
    """During training, exclude each image from the counts for its own frequency bias."""
    without_bias: bool = False
    """Train without the frequency bias, which favors predicates that often connect the two object classes.
    By default, the bias is computed from the training images."""
    region_features: Path | None = None
    """Features from an object detector: an HDF5 file with `boxes` and `unions` in one group per image."""
    validation: int = 300
    """The number of training images held out to select the best epoch."""
    split_seed: int = 0
    """The seed that selects the validation images, independent of `--seed`."""
    hidden: int = 256
    """The size of an object's context vector, an even number; the vector of a pair has twice this size."""
    dropout: float = 0.2
    """The dropout probability for embeddings and contexts."""
    epochs: int = 8
    """The number of epochs, at least 1; the learning rate follows a cosine schedule down to 0."""
    batch_size: int = 16
    """The number of images per step over all processes, a multiple of the number of processes."""
    learning_rate: float = 1e-3
    """The initial learning rate of AdamW."""
    weight_decay: float = 1e-4
    """The weight decay of AdamW."""
    clip: float = 5.0
    """The maximum norm of the gradient; larger gradients are scaled down."""


METHODS = ("softmax", *(f"{one}-{k}" for one in ("lml", "truncated-entropy") for k in (20, 50, 100)), "bce")
Bias = Literal["counted", "leave-one-out", "outside", "none"]


@dataclass(frozen=True)
class SweepSettings(GridSettings):
    """Run all unfinished combinations of methods, seeds and learning rates, on VG or VRD."""

    out: Path = Path("runs/scene-graph-sweep")
    methods: tuple[str, ...] = METHODS
    """The loss functions: softmax, bce, lml-K or truncated-entropy-K, where K is the number of relations."""
    biases: tuple[Bias, ...] = ()
    """The frequency biases to try with each method. By default, the `--run` options determine the bias.
    `counted` uses counts from the training images, `leave-one-out` excludes the current image from them, and
    `outside` uses `--run.counts`."""
    once: tuple[str, ...] = ()
    """The methods to run with the first seed only."""
    seeds: tuple[int, ...] = (0, 1, 2)
    """The seeds for each method."""
    tuned: Path | None = None
    """The CSV of an earlier sweep. Each method and bias uses the rate with the best validation recall there.
    A k that was not tuned uses the rate of the nearest k with the same loss."""
    run: SceneGraphSettings = field(default_factory=SceneGraphSettings)
    """The settings shared by all runs, as for `torchlml train scene-graph`."""


@dataclass(frozen=True)
class MovedData:
    """The new paths of a run's data; only data that has moved since training needs an option."""

    vg: Path | None = None
    """The Visual Genome directory, needed only if it has moved or no run is given."""
    vrd: Path | None = None
    """The VRD directory, needed only if it has moved or no run is given."""
    glove: Path | None = None
    """The new path of the GloVe vectors, if they have moved."""
    counts: Path | None = None
    """The new path of the counts for the frequency bias, if they have moved."""
    region_features: Path | None = None
    """The new path of the region features, if they have moved."""


@dataclass(frozen=True)
class EvaluateSettings(MovedData):
    """Print the recalls of a scene-graph run's best checkpoint and of the frequency baseline."""

    run: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")] = Path("runs/scene-graph")
    """The run directory."""
    split: Literal["training", "validation", "test"] = "test"
    """The images to evaluate on."""
    cpu: bool = False
    """Use the CPU even if a GPU is available."""


@dataclass(frozen=True)
class ObjectiveTimesSettings(StepTimeSettings, MovedData):
    """Time training steps with each loss on the same images, which come from a run's data, --vg or --vrd."""

    run: Annotated[Path | None, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")] = None
    """A run directory that provides the data and settings; not needed with --vg or --vrd."""
    k: int | None = None
    """The k of lml and truncated-entropy, at least 1. By default, the k of the run, or 20 without a run."""


@dataclass(frozen=True)
class PredictSettings(MovedData):
    """Print and draw the most probable relations in an image, as predicted by a run's best checkpoint."""

    run: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")] = Path("runs/scene-graph")
    """The run directory."""
    image: str | None = None
    """The image, from any split: its `image_id` in VG or its file name in VRD.
    By default, the test image with the most relations among those with few objects."""
    relations: int = 10
    """The number of relations to print and draw, from 1 to 50."""
    out: Path = Path("torchlml-figures/scene-graph-prediction.png")
    """The PNG or SVG file to write; its directory is created if it does not exist."""
