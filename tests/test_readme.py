"""Every Python snippet of the README runs, in the order in which a reader would type them."""

from __future__ import annotations

import re
from pathlib import Path

import torch

import torchlml

README = Path(__file__).parent.parent / "README.md"
SNIPPETS = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)


def test_every_snippet_runs() -> None:
    torch.manual_seed(0)
    names: dict[str, object] = {}
    for snippet in SNIPPETS:
        exec(compile(snippet, "README.md", "exec"), names)
    # The last projection of the quick start is the packed one: both its rows sum to 2.
    y = names["y"]
    assert isinstance(y, torch.Tensor)
    torch.testing.assert_close(torch.stack([y[:3].sum(), y[3:].sum()]), torch.tensor([2.0, 2.0]))


def test_the_readme_names_only_what_there_is() -> None:
    named = set(re.findall(r"torchlml\.([A-Za-z_]+)", "\n".join(SNIPPETS)))
    assert len(named) > 5
    assert {name for name in named if not hasattr(torchlml, name) and name != "metrics"} == set()
