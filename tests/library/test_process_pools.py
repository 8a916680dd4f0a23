"""The worker pools of the distributed tests: a failing test does not affect others."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator

import pytest
import torch.distributed as dist

from tests.support import distributed
from tests.support.distributed import Pools


class Fine:
    """A test that passes."""

    @staticmethod
    def check(group: dist.ProcessGroup) -> None:
        dist.barrier(group)


class Fails:
    """A test that fails in one process, while the other process is blocked."""

    @staticmethod
    def check(group: dist.ProcessGroup) -> None:
        if dist.get_rank(group) == 1:
            raise ValueError("one of two")
        dist.barrier(group)


class Dies:
    """A test in which one process exits."""

    @staticmethod
    def check(group: dist.ProcessGroup) -> None:
        if dist.get_rank(group) == 1:
            os._exit(7)


class Hangs:
    """A test that never ends."""

    @staticmethod
    def check(group: dist.ProcessGroup) -> None:
        time.sleep(1000)


@pytest.fixture
def own_pools() -> Iterator[Pools]:
    pools = Pools(seconds=30)
    yield pools
    pools.close()


@pytest.mark.parametrize(("name", "words"), [("Fails", "one of two"), ("Dies", "exit code 7")])
def test_a_failing_test_does_not_affect_others(
    own_pools: Pools, monkeypatch: pytest.MonkeyPatch, name: str, words: str
) -> None:
    monkeypatch.setattr(distributed, "_GRACE", 2.0)
    own_pools.run(2, __name__, "Fine")
    with pytest.raises(pytest.fail.Exception, match=words):
        own_pools.run(2, __name__, name)
    own_pools.run(2, __name__, "Fine")


def test_a_test_that_hangs_times_out() -> None:
    pools = Pools(seconds=1)
    with pytest.raises(pytest.fail.Exception, match="did not finish in time"):
        pools.run(2, __name__, "Hangs")
    pools.close()
