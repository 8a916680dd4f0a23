"""A pytest plugin that runs the operators on CPU tensors through the interpreted Triton kernels.

    TRITON_INTERPRET=1 TORCHLML_KERNEL=torch TRITON_VARIANT=loop pytest -p tests.support.triton_on_cpu ...

Triton reads TRITON_INTERPRET when a kernel is decorated, so the plugin needs a separate process. On a GPU,
the variant of a kernel depends on the lengths of the rows. Here it is set by `TRITON_VARIANT`, because the
interpreter is slow and the rows must be short.
"""
# mypy: disable-error-code="import-not-found,import-untyped"

from __future__ import annotations

import os
from typing import Any

import torch
from torch import Tensor
from triton.runtime import interpreter

import torchlml  # noqa: F401  defines the operators
from torchlml._triton import Plan, self_test
from torchlml._triton import operators as triton_operators

PLANS = {
    "chip": None,  # as on a GPU, which keeps short rows on chip
    "loop": Plan(32, 1, True),  # rows longer than 32 have a block on chip and streamed blocks
    "split": Plan(16, 1, True, 4),  # four programs per row, with several blocks each for rows longer than 64
}
_choose = triton_operators.layout
_forced = PLANS[os.environ["TRITON_VARIANT"]]


def _layout(x: Tensor, rows: int, offsets: Tensor | None) -> Plan:
    return _forced or _choose(x, rows, offsets)


_patched: set[str] = set()
_patch = interpreter._patch_lang


def _patch_once(function: Any) -> Any:
    """Patch triton.language permanently. Patching it at each call would take half of the run time."""
    if function.__module__ not in _patched:
        _patched.add(function.__module__)
        _patch(function)
    return interpreter._LangPatchScope()  # nothing to restore


interpreter._patch_lang = _patch_once
triton_operators.layout = _layout
_library = torch.library.Library("torchlml", "IMPL")
for _name, _run in self_test.OPERATORS.items():
    _library.impl(_name, _run, "CPU")
