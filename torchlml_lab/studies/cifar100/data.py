"""Read CIFAR-100 without executing code from its pickle files, add label noise, and build batches."""

import io
import pickle
import tarfile
import zipfile
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils.data import Dataset

from torchlml_lab.cli_errors import BadInput

PARTS = ("train", "test")
_FOLDER = "cifar-100-python"


def _array_reconstructor() -> Any:
    return np.array(0).__reduce__()[0]


def _scalar_reconstructor() -> Any:
    return np.float64(0).__reduce__()[0]


def _encode(text: str, encoding: str) -> bytes:
    """Encode Latin-1 text as bytes. Pickles with protocol 2 or lower call `_codecs.encode` for this."""
    if encoding != "latin1":
        raise pickle.UnpicklingError(f"it requests the encoding `{encoding}`")
    return text.encode("latin1")


# Old files refer to these NumPy functions as members of numpy.core, and new files as members of numpy._core.
_ALLOWED = {
    **{(f"numpy.{core}.multiarray", "_reconstruct"): _array_reconstructor() for core in ("core", "_core")},
    **{(f"numpy.{core}.multiarray", "scalar"): _scalar_reconstructor() for core in ("core", "_core")},
    ("numpy", "ndarray"): np.ndarray,
    ("numpy", "dtype"): np.dtype,
    ("_codecs", "encode"): _encode,
}


class _Unpickler(pickle.Unpickler):
    """Unpickle only dicts, lists, strings, numbers and numeric numpy arrays, and raise for other globals."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _ALLOWED:
            raise pickle.UnpicklingError(f"it requests `{module}.{name}`, which CIFAR-100 files do not use")
        return _ALLOWED[module, name]

    def persistent_load(self, pid: Any) -> NoReturn:
        raise pickle.UnpicklingError("it requests an external object, which CIFAR-100 files do not use")


ArchivePart = tuple[npt.NDArray[np.uint8], npt.NDArray[np.int64], npt.NDArray[np.int64]]
"""Images (N, 3, 32, 32), fine labels (N,) and coarse labels (N,)."""


def read_archive(path: Path) -> dict[str, ArchivePart]:
    """Read the training and test sets.

    Args:
        path: The directory `cifar-100-python`, its parent, or the file `cifar-100-python.tar.gz`.

    Returns:
        The sets by name. A missing or damaged file raises `BadInput`, which names the file.
    """
    if path.is_dir():
        folder = path if (path / "train").exists() else path / _FOLDER
        return {name: _part(folder / name, _bytes(folder / name)) for name in PARTS}
    if not path.exists():
        raise BadInput(f"`--data` must be an existing file or directory, but `{path}` does not exist.")
    return _from_tar(path)


def _from_tar(path: Path) -> dict[str, ArchivePart]:
    found = {}
    try:
        with tarfile.open(path, "r:*") as tar:
            for member in tar:
                name = member.name.removeprefix("./").removeprefix(f"{_FOLDER}/")
                if name in PARTS and member.isfile():
                    file = tar.extractfile(member)
                    assert file is not None
                    found[name] = _part(path / _FOLDER / name, file.read())
    except (tarfile.TarError, EOFError, OSError, zlib.error) as error:
        raise BadInput(f"`{path}` is not a complete CIFAR-100 tar file: {error}.") from error
    missing = [name for name in PARTS if name not in found]
    if missing:
        raise BadInput(f"`{path}` is not a complete CIFAR-100 tar file: it has no `{_FOLDER}/{missing[0]}`.")
    return found


def _bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise BadInput(f"The CIFAR-100 file `{path}` cannot be read: {error.strerror}.") from error


def _part(path: Path, content: bytes) -> ArchivePart:
    try:
        values = load(content)
        data = _entry(values, "data")
        fine, coarse = (np.asarray(_entry(values, f"{kind}_labels")) for kind in ("fine", "coarse"))
        if not (isinstance(data, np.ndarray) and data.dtype == np.uint8 and data.ndim == 2):
            raise ValueError("its `data` is not a 2-D array of bytes")
        if data.shape[1] != 3 * 32 * 32 or not len(data) == len(fine) == len(coarse) > 0:
            raise ValueError(
                "its `data` must have shape (N, 3072) with N fine and N coarse labels, but it has shape "
                f"{data.shape} with {len(fine)} fine and {len(coarse)} coarse labels"
            )
        for name, labels, classes in (("fine", fine, 100), ("coarse", coarse, 20)):
            if (
                labels.dtype.kind not in "iu"
                or labels.ndim != 1
                or labels.min() < 0
                or labels.max() >= classes
            ):
                raise ValueError(f"its {name} labels must be integers from 0 to {classes - 1}")
    except Exception as error:  # a damaged pickle may raise any exception
        said = " ".join(str(error).split()).rstrip(".") or type(error).__name__
        raise BadInput(f"The CIFAR-100 file `{path}` is damaged: {said}.") from error
    return data.reshape(-1, 3, 32, 32), fine.astype(np.int64), coarse.astype(np.int64)


def load(content: bytes) -> Any:
    """Load a pickle; raise `pickle.UnpicklingError` if it contains anything other than data."""

    return _Unpickler(io.BytesIO(content), encoding="bytes").load()


def _entry(values: Any, name: str) -> Any:
    """Return an entry by name. The keys may be bytes, because the official files come from Python 2."""
    if not isinstance(values, dict):
        raise ValueError("it does not contain a dictionary")
    for key in (name.encode(), name):
        if key in values:
            return values[key]
    raise ValueError(f"it has no `{name}`")


CLASSES = 100
# The mean and standard deviation of each color channel, as in the published code.
MEAN = torch.tensor((125.3, 123.0, 113.9)).view(3, 1, 1)
DEVIATION = torch.tensor((63.0, 62.1, 66.7)).view(3, 1, 1)
PADDING = 4
# As in the published code, the validation split does not depend on the seed of the run.
SPLIT_SEED = 1234


@dataclass(frozen=True)
class Part:
    """Samples with fine and coarse labels."""

    x: Tensor
    """uint8 images (N, 3, 32, 32) or float32 features (N, d)."""
    fine: Tensor
    coarse: Tensor

    def __getitem__(self, rows: Tensor) -> "Part":
        return Part(self.x[rows], self.fine[rows], self.coarse[rows])

    def __len__(self) -> int:
        return len(self.fine)


def read_images(path: Path) -> tuple[Part, Part]:
    """Read the training and test sets from the official files; see `read_archive`."""
    parts = read_archive(path)
    train, test = (Part(*(torch.from_numpy(values) for values in parts[name])) for name in PARTS)
    return train, test


def read_features(path: Path) -> tuple[Part, Part]:
    """Read an npz file with the arrays `x` (N, d), `fine` (N,), `coarse` (N,) and `test` (N,), which is bool.

    Args:
        path: The file.

    Returns:
        The training and test sets. An invalid file raises `BadInput`.
    """
    try:
        with path.open("rb") as stream, np.load(stream, allow_pickle=False) as file:
            x, fine, coarse, test = (file[name] for name in ("x", "fine", "coarse", "test"))
    except KeyError as error:
        raise BadInput(f"`{path}` (`--features`) has no array `{error.args[0].split()[0]}`.") from error
    except (OSError, ValueError, EOFError, zipfile.BadZipFile) as error:
        said = getattr(error, "strerror", None) or "it is not a complete npz file of arrays"
        raise BadInput(f"`{path}` (`--features`) cannot be read: {said}.") from error
    if x.ndim != 2 or x.dtype.kind != "f" or not len(x) == len(fine) == len(coarse) == len(test):
        raise BadInput(
            f"`{path}`: `x` must be a 2-D float array with one row per sample, but it has dtype {x.dtype} "
            f"and shape {x.shape}, and there are {len(fine)} fine labels, {len(coarse)} coarse labels and "
            f"{len(test)} test flags."
        )
    if test.dtype != np.bool_ or test.all() or not test.any():
        raise BadInput(f"`{path}`: `test` must be a bool array that contains both True and False.")
    if not np.isfinite(x).all():
        raise BadInput(f"`{path}`: `x` must be finite, but it contains NaN or infinity.")
    for name, labels, classes in (("fine", fine, CLASSES), ("coarse", coarse, 20)):
        if labels.dtype.kind not in "iu" or labels.min() < 0 or labels.max() >= classes:
            raise BadInput(f"`{path}`: `{name}` must contain only integers from 0 to {classes - 1}.")
    everything = Part(
        torch.from_numpy(x.astype(np.float32)),
        torch.from_numpy(fine.astype(np.int64)),
        torch.from_numpy(coarse.astype(np.int64)),
    )
    chosen = torch.from_numpy(test)
    return everything[~chosen], everything[chosen]


def split_validation(train: Part, count: int) -> tuple[Part, Part]:
    """Hold out `count` random training samples for validation, the same ones for every seed."""
    if not 0 < count < len(train):
        raise BadInput(f"`--validation` must be from 1 to {len(train) - 1}, but it is {count}.")
    order = torch.randperm(len(train), generator=torch.Generator().manual_seed(SPLIT_SEED))
    return train[order[count:]], train[order[:count]]


def with_noise(part: Part, probability: float, seed: int) -> Part:
    """Resample the fine label of each sample within its coarse class, with the given probability.

    Args:
        part: The samples. Each fine label must always occur with the same coarse label.
        probability: The probability of resampling a label. With 1, labels depend only on the coarse class.
        seed: The noise seed. For the same seed, a higher probability resamples a superset of the labels.

    Returns:
        The samples with their new labels. A resampled label may be the same as the original one.
    """
    coarse_of = torch.full((CLASSES,), -1)
    coarse_of[part.fine] = part.coarse
    if (coarse_of[part.fine] != part.coarse).any():
        fine = int(part.fine[coarse_of[part.fine] != part.coarse][0])
        raise BadInput(f"The labels are inconsistent: fine label {fine} occurs with several coarse labels.")
    generator = torch.Generator().manual_seed(seed)
    resampled = torch.rand(len(part), generator=generator) < probability
    siblings = (coarse_of.unsqueeze(0) == part.coarse.unsqueeze(1)).float()
    drawn = torch.multinomial(siblings, 1, generator=generator).squeeze(1)
    return Part(part.x, torch.where(resampled, drawn, part.fine), part.coarse)


class Batches(Dataset[tuple[Tensor, Tensor]]):
    """A dataset that returns whole batches of inputs and fine labels, with optional augmentation."""

    def __init__(self, part: Part, augment: bool = False) -> None:
        self.part, self.augment = part, augment

    def __len__(self) -> int:
        return len(self.part)

    def __getitem__(self, row: int) -> tuple[Tensor, Tensor]:
        return self.__getitems__([row])

    def __getitems__(self, rows: Sequence[int]) -> tuple[Tensor, Tensor]:
        x = self.part.x[rows]
        if x.dtype == torch.uint8:
            x = (_cropped_and_flipped(x) if self.augment else x).float().sub(MEAN).div(DEVIATION)
        return x, self.part.fine[rows]


def _cropped_and_flipped(x: Tensor) -> Tensor:
    """Pad each image with four black pixels per side, crop it at random, and mirror half of the images."""
    number, _, height, width = x.shape
    padded = torch.nn.functional.pad(x, (PADDING,) * 4)
    top, left = torch.randint(2 * PADDING + 1, (2, number, 1))
    rows, columns = top + torch.arange(height), left + torch.arange(width)
    mirrored = torch.rand(number, 1) < 0.5
    columns = torch.where(mirrored, columns.flip(1), columns)
    sample = torch.arange(number).view(-1, 1, 1)
    return padded[sample, :, rows.unsqueeze(2), columns.unsqueeze(1)].permute(0, 3, 1, 2)
