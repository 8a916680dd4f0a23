"""The settings of the scene-graph commands. This module imports nothing slow, so that `--help` is fast."""

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
    """Train MotifNet-LeftRight to predict the relations between given objects; needs --vg or --vrd.

    Boxes and object labels are given (predicate classification). Without --region-features the model sees no
    pixels. After every epoch it is evaluated on the validation images and on as many training images; the
    epoch with the best mean of constrained and unconstrained R@20, R@50, R@100 on validation is tested.
    """

    out: Path = Path("runs/scene-graph")
    vg: Path | None = None
    """The folder with Visual Genome: `VG-SGG.h5`, `VG-SGG-dicts.json` and `image_data.json` of Xu et al."""
    vrd: Path | None = None
    """The folder with VRD: `annotations_{train,test}.json`, `objects.json` and `predicates.json`."""
    objective: Objective = "lml"
    """What is minimised: softmax on each edge (Motifs), or one of the others on the whole image."""
    k: int = 20
    """How many relations of an image lml and truncated-entropy predict in training, at least 1."""
    one_per_edge: bool = False
    """Observe only one random relation of each edge in a step, as softmax must, instead of all."""
    glove: Path | None = None
    """GloVe vectors to start label embeddings from: the official text, or an npz of `names`, `vectors`."""
    counts: Path | None = None
    """An npz of `subject`, `object`, `predicate`, `count` (from 1 on) to make the frequency bias from."""
    leave_one_out: bool = False
    """Take an image out of the counts of its own frequency bias, in training."""
    without_bias: bool = False
    """Leave out the frequency bias, which is otherwise counted on the training images."""
    region_features: Path | None = None
    """An HDF5 file with the group `boxes`, `unions` for each image: features of your own detector."""
    validation: int = 300
    """How many training images are set aside to choose the best epoch."""
    split_seed: int = 0
    """Decides which training images those are, whatever `--seed` is."""
    hidden: int = 256
    """The size of an object's context, an even number; the product of two objects has twice the size."""
    dropout: float = 0.2
    """The share of embeddings and contexts that is dropped in training."""
    epochs: int = 8
    """How often the training data are seen, at least once; the learning rate falls to 0 along a cosine."""
    batch_size: int = 16
    """Images per step, over all processes together; a multiple of the number of processes."""
    learning_rate: float = 1e-3
    """The learning rate of AdamW at the start."""
    weight_decay: float = 1e-4
    """The weight decay of AdamW."""
    clip: float = 5.0
    """The norm to which a longer gradient is shortened."""


METHODS = ("softmax", *(f"{one}-{k}" for one in ("lml", "truncated-entropy") for k in (20, 50, 100)), "bce")
Bias = Literal["counted", "leave-one-out", "outside", "none"]


@dataclass(frozen=True)
class SweepSettings(GridSettings):
    """Run all combinations of methods, seeds and learning rates that are not done, on VG or on VRD."""

    out: Path = Path("runs/scene-graph-sweep")
    methods: tuple[str, ...] = METHODS
    """What is minimised: softmax, bce, and lml-K or truncated-entropy-K with any k."""
    biases: tuple[Bias, ...] = ()
    """The kinds of frequency bias of each method: counted on the training images; leave-one-out, where an
    image is not counted in its own; outside, from the file of `--run.counts`; none. By default the run's."""
    once: tuple[str, ...] = ()
    """Those of the methods that are run with the first seed only."""
    seeds: tuple[int, ...] = (0, 1, 2)
    """The seeds of each method."""
    tuned: Path | None = None
    """The CSV of an earlier sweep: each method with each bias gets the learning rate that was best on
    validation, and a k that was not tuned that of its objective's nearest k."""
    run: SceneGraphSettings = field(default_factory=SceneGraphSettings)
    """All that the runs have in common, as for `torchlml train scene-graph`."""


@dataclass(frozen=True)
class MovedData:
    """Where the data of a run are now; an option is only needed for what is not where it was."""

    vg: Path | None = None
    """The folder with Visual Genome, where it has moved."""
    vrd: Path | None = None
    """The folder with VRD, where it has moved."""
    glove: Path | None = None
    """The GloVe vectors, where they have moved."""
    counts: Path | None = None
    """The counts of the frequency bias, where they have moved."""
    region_features: Path | None = None
    """The region features, where they have moved."""


@dataclass(frozen=True)
class EvaluateSettings(MovedData):
    """Print the recalls of a scene-graph run with its best weights, and of the frequencies alone."""

    run: Annotated[Path, tyro.conf.Positional] = Path("runs/scene-graph")
    """The folder of the run."""
    split: Literal["training", "validation", "test"] = "test"
    """The images: those it was trained on, chosen by, or never saw."""
    cpu: bool = False
    """Stay on the CPU even where a GPU is available."""


@dataclass(frozen=True)
class ObjectiveTimesSettings(StepTimeSettings):
    """Time whole training steps of all objectives in turns, on the same images: a run's, or --vg or --vrd."""

    run: Annotated[Path | None, tyro.conf.Positional] = None
    """The folder of a run, whose data and settings are used; none is needed with --vg or --vrd."""
    vg: Path | None = None
    """The folder with Visual Genome, as for `torchlml train scene-graph`."""
    vrd: Path | None = None
    """The folder with VRD, as for `torchlml train scene-graph`."""
    k: int | None = None
    """The k of lml and truncated-entropy, at least 1; by default the run's, or 20."""


@dataclass(frozen=True)
class PredictSettings(MovedData):
    """Print and draw the most probable relations of an image, with the best weights of a scene-graph run."""

    run: Annotated[Path, tyro.conf.Positional] = Path("runs/scene-graph")
    """The folder of the run."""
    image: str | None = None
    """The image, of any split: `image_id` of VG, the file's name of VRD; by default the test image with the
    most relations among those with few objects."""
    relations: int = 10
    """How many relations are printed and drawn, from 1 to 50."""
    out: Path = Path("torchlml-figures/scene-graph-prediction.png")
    """The PNG or SVG to write; its folder is made when it is missing."""
