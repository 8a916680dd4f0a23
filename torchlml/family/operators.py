"""How the family defines its operators: a schema, plain torch that serves every device, and their shapes.

A compiled kernel that registers the same name for its device wins, as for the operators in `torchlml.ops`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

library = torch.library.Library("torchlml", "FRAGMENT")


def operator(schema: str, reference: Callable[..., Any], fake: Callable[..., Any]) -> Callable[..., Any]:
    """Define `torch.ops.torchlml.*`.

    Args:
        schema: its name and arguments, as in `name(Tensor x) -> Tensor`.
        reference: what it does, in plain torch.
        fake: what shapes and dtypes it gives, for the compiler.
    """
    name = schema.split("(")[0]
    library.define(schema)
    library.impl(name, reference, "CompositeExplicitAutograd")
    torch.library.register_fake(f"torchlml::{name}", fake, lib=library)
    return getattr(torch.ops.torchlml, name).default
