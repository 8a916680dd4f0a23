"""Reads the official CIFAR-100 files, `cifar-100-python/` or its tar.gz, without running what they contain.

The official files are pickles, and a pickle can name any function and have it called. These may name what
numpy's arrays are made of and nothing else.
"""

import io
import pickle
import tarfile
import zlib
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt

from torchlml_lab.errors import BadInput

PARTS = ("train", "test")
_FOLDER = "cifar-100-python"


def _array_reconstructor() -> Any:
    return np.array(0).__reduce__()[0]


def _scalar_reconstructor() -> Any:
    return np.float64(0).__reduce__()[0]


def _encode(text: str, encoding: str) -> bytes:
    """What Python 2 pickles and protocol 2 use for bytes; only ever Latin-1."""
    if encoding != "latin1":
        raise pickle.UnpicklingError(f"it names the encoding `{encoding}`")
    return text.encode("latin1")


# Old files say numpy.core, new ones numpy._core; both mean the two functions that rebuild an array.
_ALLOWED = {
    **{(f"numpy.{core}.multiarray", "_reconstruct"): _array_reconstructor() for core in ("core", "_core")},
    **{(f"numpy.{core}.multiarray", "scalar"): _scalar_reconstructor() for core in ("core", "_core")},
    ("numpy", "ndarray"): np.ndarray,
    ("numpy", "dtype"): np.dtype,
    ("_codecs", "encode"): _encode,
}


class _Unpickler(pickle.Unpickler):
    """Build dicts, lists, strings, numbers and numpy arrays of numbers, and refuse every other name."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _ALLOWED:
            raise pickle.UnpicklingError(f"it asks for `{module}.{name}`, which no CIFAR-100 file does")
        return _ALLOWED[module, name]

    def persistent_load(self, pid: Any) -> NoReturn:
        raise pickle.UnpicklingError("it asks for an object outside the file, which no CIFAR-100 file does")


Part = tuple[npt.NDArray[np.uint8], npt.NDArray[np.int64], npt.NDArray[np.int64]]
"""Images (N, 3, 32, 32), fine labels (N,) and coarse labels (N,)."""


def read(path: Path) -> dict[str, Part]:
    """Read the training and the test part.

    Args:
        path: The folder `cifar-100-python`, the folder it lies in, or the file `cifar-100-python.tar.gz`.

    Returns:
        The parts by name. What is missing or damaged raises `BadInput`, which names the file.
    """
    if path.is_dir():
        folder = path if (path / "train").exists() else path / _FOLDER
        return {name: _part(folder / name, _bytes(folder / name)) for name in PARTS}
    if not path.exists():
        raise BadInput(f"`--data` names `{path}`, which does not exist.")
    return _from_tar(path)


def _from_tar(path: Path) -> dict[str, Part]:
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
        raise BadInput(f"`{path}` is no whole tar file of CIFAR-100: {error}.") from error
    missing = [name for name in PARTS if name not in found]
    if missing:
        raise BadInput(f"`{path}` is no whole tar file of CIFAR-100: it has no `{_FOLDER}/{missing[0]}`.")
    return found


def _bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise BadInput(f"The CIFAR-100 file `{path}` cannot be read: {error.strerror}.") from error


def _part(path: Path, content: bytes) -> Part:
    try:
        values = load(content)
        data = _entry(values, "data")
        fine, coarse = (np.asarray(_entry(values, f"{kind}_labels")) for kind in ("fine", "coarse"))
        if not (isinstance(data, np.ndarray) and data.dtype == np.uint8 and data.ndim == 2):
            raise ValueError("its `data` is no table of bytes")
        if data.shape[1] != 3 * 32 * 32 or not len(data) == len(fine) == len(coarse) > 0:
            raise ValueError(
                f"its `data` is {data.shape} with {len(fine)} fine and {len(coarse)} coarse labels"
            )
        for name, labels, classes in (("fine", fine, 100), ("coarse", coarse, 20)):
            if (
                labels.dtype.kind not in "iu"
                or labels.ndim != 1
                or labels.min() < 0
                or labels.max() >= classes
            ):
                raise ValueError(f"its {name} labels are not all whole numbers from 0 to {classes - 1}")
    except Exception as error:  # a damaged pickle can raise anything
        said = " ".join(str(error).split()).rstrip(".") or type(error).__name__
        raise BadInput(f"The CIFAR-100 file `{path}` is damaged: {said}.") from error
    return data.reshape(-1, 3, 32, 32), fine.astype(np.int64), coarse.astype(np.int64)


def load(content: bytes) -> Any:
    """Build what a pickle contains if that is nothing but data, else raise `pickle.UnpicklingError`."""

    return _Unpickler(io.BytesIO(content), encoding="bytes").load()


def _entry(values: Any, name: str) -> Any:
    """The official files were pickled by Python 2, whose strings arrive as bytes."""
    if not isinstance(values, dict):
        raise ValueError("it holds no dictionary")
    for key in (name.encode(), name):
        if key in values:
            return values[key]
    raise ValueError(f"it has no `{name}`")
