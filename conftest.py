"""Doctests of `torchlml`: the names that examples may use, and the files without examples."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import torchlml

# Kernels import triton, which not every system has. The others are a plugin that runs them, and the program.
collect_ignore_glob = [
    *(f"torchlml/_triton/{name}.py" for name in ("layer", "loss", "operators", "row", "split")),
    "torchlml/__main__.py",
    "tests/support/triton_on_cpu.py",
]


@pytest.fixture(autouse=True)
def _names_in_examples(doctest_namespace: dict[str, Any]) -> None:
    doctest_namespace.update(torch=torch, torchlml=torchlml, nn=nn)
