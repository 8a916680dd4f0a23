"""Rows whose labels are spread over processes: what `group=` and DTensors do in the functions of the library.

Nothing here is called by users, and nothing is imported until a call needs it.
"""

from __future__ import annotations

from typing import Any


def is_spread(x: Any, group: Any) -> bool:
    """Is this a call for several processes: with a `group`, or with a DTensor?"""
    # By its name: importing the class takes longer than importing torchlml.
    return group is not None or type(x).__name__ == "DTensor"
