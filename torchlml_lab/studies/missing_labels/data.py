"""Read the data sets of the study, choose a split and observed labels for a seed, and predict k."""

import zipfile
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from torchlml_lab.cli_errors import BadInput, reason
from torchlml_lab.data.sparse_files import read_svmlight

Array = npt.NDArray[Any]

FOLDERS = {
    **dict.fromkeys(("voc2012", "yeast", "cal500", "tmc2007"), "missing-labels"),
    **dict.fromkeys(("bibtex", "corel5k", "delicious"), "multilabel"),
}
"""The data sets in the order of the study, and the subdirectory of `--data` that contains each."""

PUBLISHED = ("voc2012",)
"""The data sets for which Cole et al. (2021) published observed labels."""

VALIDATION = 0.2  # fraction of the training samples; all labels of these samples are observed
TEST = 0.3  # fraction of all samples, for data without an official split


@dataclass(frozen=True)
class Dataset:
    """The samples of a data set."""

    name: str
    x: Tensor
    """(samples, features), float32."""
    labels: Tensor
    """(samples, labels), bool: all labels."""
    train: Tensor | None
    """(samples,), bool: the official training samples. None means that every seed has its own split."""
    published: Tensor | None = None
    """The published observed label of each official training sample, if available."""


@dataclass(frozen=True, eq=False)
class Split:
    """The data for one seed. Only the reference methods and validation may use all labels of a sample."""

    x: Tensor
    observed: Tensor
    """(samples,), int64: the one observed label of each training sample."""
    labels: Tensor
    """(samples, labels), bool: all labels of the training samples."""
    validation_x: Tensor
    validation_labels: Tensor
    test_x: Tensor
    test_labels: Tensor

    @property
    def k(self) -> float:
        """The mean number of labels per validation sample."""
        return float(self.validation_labels.sum(-1).double().mean())


def path_of(name: str, folder: Path) -> Path:
    """Return the path of a data set, or of its training file if the format is svmlight."""
    place = folder / FOLDERS[name]
    return place / (f"{name}.npz" if FOLDERS[name] == "missing-labels" else f"{name}.train.svm.gz")


def check_files(names: Iterable[str], folder: Path) -> None:
    """Raise `BadInput` if the file of a data set does not exist."""
    for name in names:
        if not path_of(name, folder).is_file():
            raise BadInput(
                f"`{folder}` (`--data`) does not contain the data set {name}: `{path_of(name, folder)}` "
                "does not exist."
            )


def read_dataset(name: str, folder: Path) -> Dataset:
    """Read a data set. An invalid file raises `BadInput`."""
    path = path_of(name, folder)
    return _read_npz(name, path) if path.suffix == ".npz" else _read_svmlight(name, path)


def _read_npz(name: str, path: Path) -> Dataset:
    try:
        with path.open("rb") as file, np.load(file, allow_pickle=False) as arrays:
            found = {key: arrays[key] for key in arrays if key in ("x", "y", "n_train", "train", "observed")}
    except OSError as error:
        raise BadInput(f"`{path}` cannot be read: {reason(error)}.") from error
    except (ValueError, zipfile.BadZipFile, EOFError) as error:
        raise BadInput(f"`{path}` cannot be read: it is not a complete .npz file.") from error
    missing = [key for key in ("x", "y") if key not in found]
    if missing or not {"n_train", "train"} & set(found):
        raise BadInput(f"`{path}` has no array `{missing[0] if missing else 'train'}`.")
    x, y = found["x"], found["y"]
    if x.ndim != 2 or y.ndim != 2 or len(x) != len(y) or x.dtype.kind != "f" or y.dtype.kind not in "bui":
        raise BadInput(
            f"`{path}` must have a float array `x` of shape (samples, features) and a bool or integer array "
            f"`y` of shape (samples, labels), but they have dtypes {x.dtype} and {y.dtype} and shapes "
            f"{x.shape} and {y.shape}."
        )
    if not np.isfinite(x).all():
        raise BadInput(f"`{path}` must have finite features, but `x` contains NaN or infinity.")
    if "train" in found:
        train: Array | None = found["train"].astype(bool)
    else:
        count = int(found["n_train"])
        train = np.arange(len(x)) < count if count else None
    if train is not None and train.shape != (len(x),):
        raise BadInput(
            f"`{path}` must have one value in `train` for each of its {len(x)} samples, but `train` has "
            f"shape {train.shape}."
        )
    if name in PUBLISHED and "observed" not in found:
        raise BadInput(f"`{path}` has no array `observed`.")
    published = found.get("observed")
    if published is not None:
        if train is None or published.shape != (train.sum(),):
            raise BadInput(
                f"`{path}` must have one `observed` label for each official training sample, but `observed` "
                f"has shape {published.shape}."
            )
        if not y[train].astype(bool)[np.arange(len(published)), published].all():
            raise BadInput(f"Every `observed` label in `{path}` must also be in `y`, but some are not.")
        published = torch.from_numpy(published.astype(np.int64))
    return _labeled_samples(name, x.astype(np.float32), y.astype(bool), train, published)


def _read_svmlight(name: str, path: Path) -> Dataset:
    train = read_svmlight(path, "--data")
    test = read_svmlight(path.with_name(f"{name}.test.svm.gz"), "--data").with_labels(train.names)
    width = max(train.features.shape[1], test.features.shape[1])
    x = np.zeros((len(train) + len(test), width), dtype=np.float32)
    x[: len(train), : train.features.shape[1]] = train.features.toarray()
    x[len(train) :, : test.features.shape[1]] = test.features.toarray()
    # Labels that occur only in test samples are dropped, because they cannot be learned.
    y = [part.labels.toarray()[:, : len(train.names)] for part in (train, test)]
    return _labeled_samples(name, x, np.concatenate(y) > 0, np.arange(len(x)) < len(train), None)


def _labeled_samples(name: str, x: Array, y: Array, train: Array | None, published: Tensor | None) -> Dataset:
    """Build the data set without the unlabeled samples, which cannot have an observed label."""
    keep = y.any(1)
    if published is None and not keep.all():
        x, y, train = x[keep], y[keep], None if train is None else train[keep]
    return Dataset(
        name,
        torch.from_numpy(x),
        torch.from_numpy(y),
        None if train is None else torch.from_numpy(train),
        published,
    )


def split_of(data: Dataset, seed: int, published: bool = False) -> Split:
    """Choose the validation samples and the observed labels for a seed at random, and scale the features.

    Args:
        data: The data set. Without an official split, the test samples are also chosen at random.
        seed: The random seed. The same seed gives the same split and observed labels.
        published: Whether to use the published observed labels.

    Returns:
        The data for the seed.
    """
    generator = torch.Generator().manual_seed(seed)
    if data.train is None:
        order = torch.randperm(len(data.x), generator=generator)
        tested = round(TEST * len(order))
        test, train = order[:tested], order[tested:].sort().values
    else:
        test, train = (~data.train).nonzero()[:, 0], data.train.nonzero()[:, 0]
    observed = torch.multinomial(data.labels[train].float(), 1, generator=generator)[:, 0]
    if published:
        assert data.published is not None
        observed = data.published
    order = torch.randperm(len(train), generator=generator)
    held = round(VALIDATION * len(train))
    validation, learn = order[:held], order[held:]
    x = _standardized(data.x, train)
    return Split(
        x[train[learn]],
        observed[learn],
        data.labels[train[learn]],
        x[train[validation]],
        data.labels[train[validation]],
        x[test],
        data.labels[test],
    )


def _standardized(x: Tensor, train: Tensor) -> Tensor:
    """Scale dense features to mean 0 and variance 1, and sparse features by one factor to a mean square of 1.

    Dividing each sparse feature by its own standard deviation would make the features of rare words huge.
    """
    known = x[train]
    if float((known != 0).float().mean()) < 0.2:
        return x / known.square().mean().sqrt()
    deviation, center = torch.std_mean(known, 0)
    return (x - center) / torch.where(deviation > 1e-6, deviation, 1)


def labeled_part(split: Split) -> Split:
    """Return a split with three quarters of the validation samples for training and the rest for validation.

    A model trained on this split uses only fully labeled samples.
    """
    learn = len(split.validation_x) * 3 // 4
    x, labels = split.validation_x, split.validation_labels
    return replace(
        split,
        x=x[:learn],
        labels=labels[:learn],
        observed=labels[:learn].int().argmax(-1),
        validation_x=x[learn:],
        validation_labels=labels[learn:],
    )


def predicted_k(split: Split) -> tuple[Tensor, Tensor, Tensor]:
    """Predict the number of labels of each sample by ridge regression, fitted on the validation samples.

    Only the validation samples are fully labeled. The predictions for them are leave-one-out predictions, so
    that the choice of a learning rate is not biased. The penalty minimizes the squared error of these
    predictions.

    Args:
        split: The data for a seed.

    Returns:
        The predictions for the training, validation and test samples, clipped to the range of the
        label counts of the validation samples.
    """
    x, count = split.validation_x.double().numpy(), split.validation_labels.sum(-1).double().numpy()
    center, mean = x.mean(0), count.mean()
    u, s, v = np.linalg.svd(x - center, full_matrices=False)
    coordinates = u.T @ (count - mean)
    best: tuple[float, Array, Array] | None = None
    for penalty in np.logspace(-1, 5, 13):
        shrunk = s**2 / (s**2 + penalty)
        fitted = mean + u @ (shrunk * coordinates)
        leverage = 1 / len(x) + (u**2) @ shrunk
        left_out = count - (count - fitted) / (1 - leverage)
        error = float(np.mean((left_out - count) ** 2))
        if best is None or error < best[0]:
            best = error, left_out, v.T @ (s / (s**2 + penalty) * coordinates)
    assert best is not None
    _, left_out, slopes = best
    parts = (split.x, split.validation_x, split.test_x)
    train, _, test = (mean + (part.double().numpy() - center) @ slopes for part in parts)
    low, high = count.min(), count.max()
    clipped = [torch.from_numpy(part.clip(low, high)).float() for part in (train, left_out, test)]
    return clipped[0], clipped[1], clipped[2]
