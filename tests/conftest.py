"""Strict global modes: the same examples in every run, no leftover default dtype or number of threads."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from hypothesis import HealthCheck, settings

settings.register_profile(
    "torchlml",
    deadline=None,  # the first call of an operator may load a library
    derandomize=True,  # a red test stays red
    max_examples=60,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.differing_executors],
)
settings.load_profile("torchlml")


@pytest.fixture(autouse=True)
def _same_start() -> Iterator[None]:
    """Every test starts from one seed and must leave torch's global settings as it found them."""
    torch.manual_seed(0)
    before = (torch.get_default_dtype(), torch.get_num_threads(), torch.is_grad_enabled())
    yield
    after = (torch.get_default_dtype(), torch.get_num_threads(), torch.is_grad_enabled())
    assert after == before


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Torch computes on one thread, so that every sum is added in the same order."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
