"""The number of library functions that each call passes through, as counted by `tools/count_hops.py`."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from tests.support.distributed import in_processes
from tools.count_hops import Hop, calls, dtensor_call, hops
from torchlml._cpu import loader

pytestmark = pytest.mark.skipif(not loader.loaded(), reason="the limits apply to the compiled kernel")


class Limit(NamedTuple):
    """The maximum number of functions and files in a call. A commit that raises a limit must explain why."""

    functions: int
    files: int

    def check(self, found: list[Hop]) -> None:
        """Fail if the call exceeds the limit."""
        assert len(found) <= self.functions, found
        assert len({file for file, _ in found}) <= self.files, found


LIMITS = {
    "lml(x, 5)": Limit(functions=3, files=3),
    "lml(x, 5).backward()": Limit(functions=7, files=3),
    "lml of a 3-D bfloat16 tensor along dim 1": Limit(functions=10, files=4),
    "lml_dual(x, 5)": Limit(functions=10, files=4),
    "lml_loss(x, target, 5).backward()": Limit(functions=28, files=6),
}


@pytest.mark.parametrize("name", LIMITS)
def test_hops(name: str) -> None:
    LIMITS[name].check(hops(calls()[name]))


@in_processes(2)
def test_hops_of_a_dtensor(group: dist.ProcessGroup) -> None:
    """The limit is higher than for dense tensors, because the call includes the distributed solver."""
    Limit(functions=24, files=6).check(hops(dtensor_call(init_device_mesh("cpu", (2,)))))


def test_every_counted_call_has_a_limit() -> None:
    assert set(LIMITS) == set(calls())
