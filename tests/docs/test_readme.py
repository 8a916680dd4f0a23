"""The snippets, commands, links and numbers in the README and on other pages are correct."""

from __future__ import annotations

import csv
import re
from pathlib import Path
from statistics import mean

import pytest
import torch

import torchlml
from tests.support.example_rows import example_rows
from torchlml_lab import cli
from torchlml_lab.studies.missing_labels.data import VALIDATION

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
RESULTS = ROOT / "results" / "README.md"
PAGES = (
    README,
    RESULTS,
    *sorted((ROOT / "docs").glob("*.md")),
    *sorted((ROOT / "results").glob("*/README.md")),
)
SNIPPETS = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)


def test_every_snippet_runs() -> None:
    torch.manual_seed(0)
    names: dict[str, object] = {}
    assert len(SNIPPETS) == 3
    for snippet in SNIPPETS:
        exec(compile(snippet, "README.md", "exec"), names)
    assert isinstance(names["loss"], torch.Tensor)
    assert names["loss"].isfinite()


def test_length() -> None:
    assert len(README.read_text(encoding="utf-8").splitlines()) <= 160


def test_outputs_in_the_example() -> None:
    text = README.read_text(encoding="utf-8")
    for comment, y in example_rows(text):
        numbers, _, total = comment.partition("sums to")
        assert [float(each) for each in numbers.split()] == pytest.approx(y.tolist(), abs=0.006)
        assert float(total.split()[0]) == pytest.approx(y.sum().item(), abs=0.006)


def test_the_readme_names_only_existing_functions() -> None:
    text = README.read_text(encoding="utf-8")
    named = set(re.findall(r"torchlml\.([A-Za-z_]+)", "\n".join(SNIPPETS)))
    named |= set(re.findall(r"`torchlml\.([A-Za-z_]+)`", text)) | set(
        re.findall(r"^\| `(\w+Loss)`", text, re.M)
    )
    assert len(named) > 5
    assert {name for name in named if not hasattr(torchlml, name) and name != "metrics"} == set()


def means(path: str, column: str, **wanted: str) -> str:
    """Return the mean of a column, in percent, over the rows of a CSV in results/ that match `wanted`."""
    with (ROOT / "results" / path).open(newline="", encoding="utf-8") as file:
        found = [float(row[column]) for row in csv.DictReader(file) if wanted.items() <= row.items()]
    assert len(found) >= 3, (path, wanted)
    return f"{100 * mean(found):.1f}"


def evidence() -> list[list[str]]:
    """Return the numbers in the last column of the table under "When to use it", row by row."""
    section = README.read_text(encoding="utf-8").split("## When to use it")[1].split("\n## ")[0]
    lines = [line for line in section.split("\n") if line.startswith("| ")][2:]
    return [re.findall(r"\d+\.\d", line.split("|")[3]) for line in lines]


def partial(dataset: str, loss: str, file: str = "longer") -> str:
    """Return the nDCG@5 of a loss trained with 30% of the labels and up to 200 or, for BCE, 400 epochs."""
    return means(f"multilabel/{file}.csv", "ndcg5", data=dataset, keep="0.3", loss=loss)


def best_epochs(file: str, loss: str) -> list[int]:
    with (ROOT / "results" / "multilabel" / f"{file}.csv").open(newline="", encoding="utf-8") as text:
        return [int(row["best_epoch"]) for row in csv.DictReader(text) if row["loss"] == loss]


def test_the_evidence_names_the_epochs_and_the_best_loss() -> None:
    ours, theirs = best_epochs("longer", "lml-labels"), best_epochs("longer-bce", "bce")
    text = README.read_text(encoding="utf-8")
    assert f"LML is best after [{min(ours)} to {max(ours)} epochs]" in text
    assert f"BCE after {min(theirs)} to {max(theirs)} |" in text
    for dataset, best in (("bibtex", "bce"), ("delicious", "bce"), ("corel5k", "softmax")):
        others = {loss: float(partial(dataset, loss)) for loss in ("softmax", "truncated-entropy-1")}
        others["bce"] = float(partial(dataset, "bce", "longer-bce"))
        assert max(others, key=lambda loss: others[loss]) == best, dataset


def one_label(dataset: str, method: str) -> str:
    wanted = {"dataset": dataset, "method": method, "head": "linear", "draw": "random"}
    return means("missing-labels/results.csv", "map", **wanted)


def digits(column: str, method: str, labeled: str, shown: str, k: str = "0") -> str:
    return means("which-k/which-k.csv", column, method=method, k=k, named=labeled, digits=shown)


def cifar(column: str, loss: str, noise: str) -> str:
    return means("cifar100/features.csv", column, loss=loss, noise=noise)


def vg(method: str, variant: str) -> str:
    return means("scene-graph/vg-bias.csv", "r50", method=method, variant=variant, split="test")


def vg_best(method: str) -> str:
    """Return a method's best R@50 without a frequency bias or with one that uses only the training images."""
    return max((vg(method, variant) for variant in ("", "leave-one-out", "without-bias")), key=float)


def test_the_evidence_matches_the_results() -> None:
    assert evidence() == [
        [
            *(partial("bibtex", "lml-labels"), partial("bibtex", "bce", "longer-bce")),
            *(partial("delicious", "lml-labels"), partial("delicious", "bce", "longer-bce")),
            *(partial("corel5k", "lml-labels"), partial("corel5k", "softmax")),
        ],
        [
            *(one_label("voc2012", method) for method in ("lml-predicted", "em")),
            *(one_label("tmc2007", method) for method in ("role", "lml-predicted")),
            *(one_label("bibtex", method) for method in ("epr", "lml-predicted")),
            *(one_label("delicious", method) for method in ("bce-validation", "lml-predicted")),
        ],
        [
            digits("recall", "lml", "one", "3 digits", "3"),
            digits("calibration_error", "lml", "one", "3 digits", "3"),
            digits("recall", "k times softmax", "one", "3 digits"),
            digits("calibration_error", "k times softmax", "one", "3 digits"),
        ],
        [
            digits("recall", "bce", "all", "1 to 5 digits"),
            digits("recall", "lml, true k", "all", "1 to 5 digits"),
        ],
        [cifar("test_top1", "cross-entropy", "0.0"), cifar("test_top1", "lml", "0.0")],
        [cifar("test_topk", loss, "0.4") for loss in ("bce", "cross-entropy", "lml")],
        [vg_best(method) for method in ("lml-20", "truncated-entropy-20", "bce", "softmax")],
    ]


def test_the_sizes_of_the_studies() -> None:
    text = " ".join(README.read_text(encoding="utf-8").split())
    with (ROOT / "results" / "own-data" / "own-data.csv").open(newline="", encoding="utf-8") as file:
        found = list(csv.DictReader(file))
    sizes = {int(row["samples"]) for row in found}
    assert f"with {min(sizes)} to {max(sizes)} training samples" in text
    assert len({row["data"] for row in found}) == 4
    assert "four data sets" in text
    assert VALIDATION == 1 / 5
    assert "with a fifth of the samples fully labeled" in text
    (images,) = re.findall(r"R@50 on (\d+) images of Visual Genome", text)
    scenes = (ROOT / "results" / "scene-graph" / "README.md").read_text(encoding="utf-8")
    assert f"Results on the {images} test images" in scenes


def test_every_make_target_exists() -> None:
    text = README.read_text(encoding="utf-8")
    named = set(re.findall(r"`make ([a-z-]+)`", text)) | set(re.findall(r"^make ([a-z-]+)", text, re.M))
    targets = re.findall(r"^([a-z0-9-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.M)
    assert len(named) > 3
    assert named <= set(targets)


def commands() -> dict[str, list[str]]:
    """Map each `torchlml` command that appears in code on the pages to the options it is used with."""
    found: dict[str, list[str]] = {}
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        blocks = re.findall(r"^```(\w*)\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
        shell = [line for language, block in blocks if language in ("", "sh") for line in block.split("\n")]
        variables = dict(re.findall(r'^(\w+)="(.*)"$', text, re.MULTILINE))
        for written in [*re.findall(r"`(torchlml [^`\n]*)`", text), *shell]:
            line = written
            for name, value in variables.items():
                line = line.replace(f"${name} ", f"{value} ")
            if line.startswith("torchlml "):
                words = line.split("#")[0].split()[1:]
                options = [word for word in words if word.startswith("--")]
                name = " ".join(words[: words.index(options[0])] if options else words)
                found.setdefault(name, []).extend(options)
    return found


COMMANDS = commands()


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_exists_with_its_options(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([*name.split(), "--help"]) == 0
    said = capsys.readouterr().out
    assert [option for option in COMMANDS[name] if option not in said] == []


def anchors(page: Path) -> set[str]:
    """Return the anchors of a page as GitHub generates them: in lowercase, with hyphens for spaces."""
    titles = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_leads_somewhere(page: Path) -> None:
    links = re.findall(r"\]\(([^)]+)\)", page.read_text(encoding="utf-8"))
    for link in links:
        if not link.startswith("https://"):
            name, _, anchor = link.partition("#")
            target = page.parent / name if name else page
            assert target.exists(), link
            assert not anchor or anchor in anchors(target), link


def test_the_results_page_names_real_tests() -> None:
    text = RESULTS.read_text(encoding="utf-8")
    claims = (ROOT / "tests" / "test_paper.py").read_text(encoding="utf-8")
    selected = set(re.findall(r"pytest tests/test_paper.py -k (\w+)", text))
    assert len(selected) > 8
    for word in selected:
        assert re.search(rf"def test_\w*{word}", claims), word
