"""All public names are documented, have an example, and are in the tables that parametrize tests."""

from __future__ import annotations

import inspect
from pathlib import Path

import pytest

import torchlml
from tests.support.losses import EVERY, SETS
from tests.support.related_names import MEMBERS
from torchlml import losses, metrics

ROOT = Path(__file__).parents[2]
NAMES = [name for name in torchlml.__all__ if not inspect.ismodule(getattr(torchlml, name))]
FUNCTIONS = [name for name in losses.__all__ if inspect.isfunction(getattr(losses, name))]
OTHER_MODULES = ("torchlml.constrained", "torchlml.choices")
RELATED = [name for name in NAMES if getattr(torchlml, name).__module__ in OTHER_MODULES]
# These losses take the input of a linear layer instead of logits. They are tested in test_linear_loss.py.
LINEAR = {
    "linear_lml_loss": "LinearLMLLoss",
    "linear_truncated_entropy_loss": "LinearTruncatedEntropyLoss",
}


def text(pattern: str) -> str:
    """Return the concatenated pages that match the pattern."""
    pages = sorted(ROOT.glob(pattern))
    assert pages
    return "\n".join(page.read_text(encoding="utf-8") for page in pages)


@pytest.mark.parametrize("name", [*NAMES, *metrics.__all__])
def test_every_name_has_an_example_and_a_place_in_the_reference(name: str) -> None:
    thing = getattr(torchlml, name, None) or getattr(metrics, name)
    assert ">>>" in (inspect.getdoc(thing) or "")
    assert name in text("docs/api/*.md"), "add the name to a page in docs/api"
    assert name in text("docs/api/index.md"), "add the name to the index"


def test_the_losses_are_public() -> None:
    assert set(losses.__all__) <= set(torchlml.__all__)
    assert {function.__name__ for function in EVERY | SETS} <= set(losses.__all__)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_every_loss_is_explained_and_has_a_tested_module(name: str) -> None:
    modules = {function.__name__: module.__name__ for function, module in (EVERY | SETS).items()} | LINEAR
    assert name in modules, "add the loss to tests/support/losses.py"
    module = modules[name]
    assert module in losses.__all__
    assert module in text("docs/choosing-a-loss.md")
    assert name in text("tools/bits.py"), "add the loss to tools/bits.py"


@pytest.mark.parametrize("name", RELATED)
def test_every_related_operator_is_explained_and_tested_for_wrong_arguments(name: str) -> None:
    assert name in MEMBERS
    assert name in text("docs/choosing-a-relaxation.md")
