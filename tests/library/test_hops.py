"""The number of library functions that each call passes through, as counted by `tools/count_hops.py`."""

from __future__ import annotations

import pytest

from tools.count_hops import calls, hops

# Limits for functions and files. Raise a limit only with a reason in the commit message.
LIMITS = {
    "lml(x, 5)": (3, 3),
    "lml(x, 5).backward()": (7, 4),
    "lml of a 3-D bfloat16 tensor along dim 1": (15, 6),
    "lml_dual(x, 5)": (13, 5),
    "lml_loss(x, target, 5).backward()": (32, 8),
}


@pytest.mark.parametrize("name", LIMITS)
def test_hops(name: str) -> None:
    found = hops(calls()[name])
    functions, files = LIMITS[name]
    assert len(found) <= functions, found
    assert len({file for file, _ in found}) <= files, found


def test_every_counted_call_has_a_limit() -> None:
    assert set(LIMITS) == set(calls())
