"""The example with four logits that is in the README and on the home page of the site."""

from __future__ import annotations

import re
from collections.abc import Iterator

import torch
from torch import Tensor

import torchlml


def example_rows(text: str) -> Iterator[tuple[str, Tensor]]:
    """Yield the comment after each of the three calls in `text`, and the values that it should show."""
    x = torch.tensor([2.0, 1.0, 0.0, -1.0])
    rows = {"torch.softmax": x.softmax(-1), "torch.sigmoid": x.sigmoid(), "torchlml.lml": torchlml.lml(x, 2)}
    for name, y in rows.items():
        line = re.search(rf"^{re.escape(name)}\(.*# (.+)$", text, re.MULTILINE)
        assert line is not None, name
        yield line[1], y
