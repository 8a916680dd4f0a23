"""Each recipe is short, runs within seconds and prints the output shown on its page."""

from __future__ import annotations

import ast
import io
import re
import time
import tokenize
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

import torchlml

DOCS = Path(__file__).parents[2] / "docs"
RECIPES = sorted((DOCS / "recipes").glob("*.py"))
# Recipes that need an additional package. These packages emit warnings during training.
NEEDS = {"hf_trainer": "transformers", "lightning_module": "lightning"}
NUMBER = re.compile(r"-?\d+\.?\d*(?:e[-+]?\d+)?")


def run(recipe: Path, capsys: pytest.CaptureFixture[str]) -> tuple[str, dict[str, Any]]:
    """Run a recipe on one thread and return its output and its global variables."""
    if recipe.stem in NEEDS:
        pytest.importorskip(NEEDS[recipe.stem], reason=f"{NEEDS[recipe.stem]} is not installed")
    names: dict[str, Any] = {"__name__": "__main__"}
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore" if recipe.stem in NEEDS else "error")
            exec(compile(recipe.read_text(encoding="utf-8"), str(recipe), "exec"), names)
    finally:
        torch.set_num_threads(threads)
        torch.set_grad_enabled(True)
    return capsys.readouterr().out, names


def close(said: str, written: str) -> bool:
    """Whether the words match and the numbers agree, allowing for differences between torch versions."""
    if NUMBER.sub("#", said).split() != NUMBER.sub("#", written).split():
        return False
    pairs = zip(NUMBER.findall(said), NUMBER.findall(written), strict=True)
    return all(abs(float(a) - float(b)) <= 0.05 + 0.1 * abs(float(b)) for a, b in pairs)


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.stem)
def test_a_recipe_prints_the_output_on_its_page_within_seconds(
    recipe: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = time.process_time()
    said, _ = run(recipe, capsys)
    assert time.process_time() - before < 20
    written = recipe.with_suffix(".txt").read_text(encoding="utf-8")
    assert close(said, written), f"{recipe.name} printed\n{said}\nbut its page shows\n{written}"


def test_different_words_or_numbers_are_not_close() -> None:
    assert close("step 100: loss 2.13\n", "step 100: loss 2.20\n")
    assert not close("step 100: loss 2.13\n", "step 100: loss 3.13\n")
    assert not close("step 100: loss 2.13\n", "step 100: cost 2.13\n")


def code_lines(text: str) -> int:
    """Return the number of lines of code, not counting blank lines, comments and docstrings."""
    silent = {
        tokenize.COMMENT,
        tokenize.NL,
        tokenize.NEWLINE,
        tokenize.INDENT,
        tokenize.DEDENT,
        tokenize.ENDMARKER,
    }
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    lines = {at for each in tokens if each.type not in silent for at in range(each.start[0], each.end[0] + 1)}
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Module | ast.FunctionDef | ast.ClassDef) and ast.get_docstring(node):
            first = node.body[0]
            lines -= set(range(first.lineno, (first.end_lineno or first.lineno) + 1))
    return len(lines)


def test_every_recipe_is_short_and_has_a_page_with_its_output() -> None:
    pages = "\n".join(page.read_text(encoding="utf-8") for page in sorted((DOCS / "recipes").glob("*.md")))
    assert len(RECIPES) >= 14
    for recipe in RECIPES:
        assert code_lines(recipe.read_text(encoding="utf-8")) < 40, recipe.name
        for name in (recipe.name, recipe.with_suffix(".txt").name):
            assert f'--8<-- "recipes/{name}"' in pages, name


def test_the_trainer_loss_is_the_mean_over_all_rows_of_a_step(capsys: pytest.CaptureFixture[str]) -> None:
    """The micro-batch losses of a step sum to the mean loss over all rows, computed by hand."""
    recipe = DOCS / "recipes" / "hf_trainer.py"
    _, names = run(recipe, capsys)
    logits, labels = (
        torch.randn(12, 20),
        torch.zeros(12, 20).scatter(1, torch.rand(12, 20).topk(3).indices, 1.0),
    )
    right = torch.stack(
        [-torchlml.log_lml(x, 3)[y > 0].sum() for x, y in zip(logits, labels, strict=True)]
    ).mean()
    counted = labels.ne(-100).sum()
    parts = [
        names["lml_loss"]({"logits": x}, y, counted)
        for x, y in zip(logits.split(5), labels.split(5), strict=True)
    ]
    torch.testing.assert_close(torch.stack(parts).sum(), right)


def test_the_replacements_for_entmax_have_the_same_values() -> None:
    entmax = pytest.importorskip("entmax", reason="entmax is not installed")
    x = torch.randn(5, 12, dtype=torch.float64)
    torch.testing.assert_close(torchlml.constrained_sparsemax(x, 1), entmax.sparsemax(x, dim=-1))
    budget = torch.tensor([[1.5], [2.0], [3.0], [4.5], [7.0]], dtype=torch.float64)
    ours = torchlml.constrained_sparsemax(x, budget.squeeze(-1))
    torch.testing.assert_close(ours, entmax.budget_bisect(x, budget=budget), atol=1e-9, rtol=0)
