"""Configure the doctests of `torchlml`: the names that examples may use, and the files to skip."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch import nn

import torchlml

# Importing the kernels requires Triton, which is not available on every system. The last file is a pytest
# plugin that replaces the CPU operators when it is imported.
collect_ignore_glob = [
    *(f"torchlml/_triton/{name}.py" for name in ("layer", "loss", "operators", "row", "split")),
    "tests/support/triton_on_cpu.py",
]


def pytest_collection_finish() -> None:
    """Exclude the objects created so far from garbage collection, which every training run triggers."""
    gc.freeze()


@pytest.fixture(autouse=True)
def _names_in_examples(doctest_namespace: dict[str, Any]) -> None:
    doctest_namespace.update(torch=torch, torchlml=torchlml, nn=nn)
