"""HDF5 files that can be read, or one sentence that says why not."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import h5py

from torchlml_lab.errors import BadInput


@contextmanager
def reading(path: Path) -> Iterator[h5py.File]:
    """Open a file; when it cannot be opened or read in the block, that raises `BadInput`."""
    try:
        with h5py.File(path, "r") as file:
            yield file
    except (OSError, RuntimeError) as error:
        number = getattr(error, "errno", None)
        said = os.strerror(number) if number else "it is no whole HDF5 file"
        raise BadInput(f"`{path}` cannot be read: {said}.") from error
