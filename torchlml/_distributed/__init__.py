"""Rows whose labels are sharded across processes: `group=` and DTensors in the functions of the library.

Users do not call anything here. The modules are imported when a call needs them, because importing
`torch.distributed.tensor` takes longer than importing torchlml.
"""

from __future__ import annotations

import sys
from typing import Any


def is_sharded(x: Any, group: Any = None) -> bool:
    """Whether a call concerns several processes: it has a `group`, or `x` is a DTensor."""
    if group is not None:
        return True
    # There are no DTensors before this module is imported.
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(x, module.DTensor)
