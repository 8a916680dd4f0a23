"""Settings for all tests: reproducible Hypothesis examples, and a check of torch's global state."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from hypothesis import HealthCheck, settings

settings.register_profile(
    "torchlml",
    deadline=None,  # the first call to an operator may load a library
    derandomize=True,  # the same examples in every run, so failures are reproducible
    max_examples=60,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.differing_executors],
)
settings.load_profile("torchlml")


@pytest.fixture(autouse=True)
def _same_start() -> Iterator[None]:
    """Seed torch before every test, and check that the test restores torch's global settings."""
    torch.manual_seed(0)
    before = (torch.get_default_dtype(), torch.get_num_threads(), torch.is_grad_enabled())
    yield
    after = (torch.get_default_dtype(), torch.get_num_threads(), torch.is_grad_enabled())
    assert after == before


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Run torch on one thread, so that sums are always computed in the same order."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
