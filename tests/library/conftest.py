"""Fixtures for the library tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.distributed import Pools


@pytest.fixture(scope="session")
def pools() -> Iterator[Pools]:
    """Worker processes for distributed tests, started on first use."""
    pools = Pools()
    yield pools
    pools.close()
