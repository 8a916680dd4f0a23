"""The examples in the docstrings of `torchlml`: the names they may use, and the files that have none."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import torchlml

# Kernels that import triton, which not every system has, and a plugin that runs them; and the program.
collect_ignore_glob = [
    "torchlml/_triton/triton_*.py",
    "torchlml/__main__.py",
    "tests/support/triton_on_cpu.py",
]


@pytest.fixture(autouse=True)
def _names_in_examples(doctest_namespace: dict[str, Any]) -> None:
    doctest_namespace.update(torch=torch, torchlml=torchlml, nn=nn)
