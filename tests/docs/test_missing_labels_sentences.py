"""The sentences about the study with one observed label per sample agree with its CSV file.

Each test builds the sentences from the CSV and looks for them on a page. It also fails if the text contains
a decimal number that does not appear in these sentences.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from statistics import mean, stdev

import pytest

from tests.docs.test_results_tables import (
    NOT_COMPETITORS,
    ONE_LABEL,
    ONE_LABEL_METHODS,
    list_item,
    one_label_rows,
    rows,
)

ROOT = Path(__file__).parents[2]
PAGE = "results/missing-labels/README.md"
HEADS = ("linear", "hidden")
TITLES = {
    "voc2012": "VOC 2012",
    "yeast": "yeast",
    "cal500": "CAL500",
    "tmc2007": "TMC2007",
    "bibtex": "bibtex",
    "corel5k": "corel5k",
    "delicious": "delicious",
}
NAMES = {method: title for title, method in ONE_LABEL_METHODS.items()}
COMPETITORS = [method for method in NAMES if method not in NOT_COMPETITORS]
SPECIALIZED = [method for method in COMPETITORS if method != "bce-validation"]
"""The competitors that are trained with one observed label per sample."""
MANY_LABELS = ("cal500", "delicious")


def data_sets(head: str) -> list[str]:
    """Return the data sets on which the study trained this head."""
    return [name for name in TITLES if one_label_rows(head, name, "lml")]


def score(dataset: str, method: str, head: str = "linear", measure: str = "map") -> float:
    """Return the mean of a measure over the seeds, in percent."""
    return 100 * mean(float(row[measure]) for row in one_label_rows(head, dataset, method))


def brier(dataset: str, head: str, *methods: str) -> str:
    return " vs. ".join(f"{score(dataset, method, head, 'brier'):.2f}" for method in methods)


def best(dataset: str, head: str, methods: Iterable[str]) -> str:
    """Return the method with the highest mAP."""
    found = [name for name in methods if one_label_rows(head, dataset, name)]
    return max(found, key=lambda name: score(dataset, name, head))


def behind(dataset: str, head: str, method: str, methods: Iterable[str]) -> float:
    """Return the highest mAP among `methods` minus the mAP of `method`."""
    return score(dataset, best(dataset, head, methods), head) - score(dataset, method, head)


def wins(method: str, head: str, methods: Iterable[str]) -> list[str]:
    """Return the data sets on which `method` has a higher mAP than all of `methods`."""
    return [name for name in data_sets(head) if behind(name, head, method, methods) < 0]


def leads() -> str:
    """Describe the largest leads of LML with the mean k over the best competitor."""
    found, ratios = [], []
    for head in HEADS:
        for name in wins("lml", head, SPECIALIZED):
            groups = (one_label_rows(head, name, each) for each in ("lml", best(name, head, SPECIALIZED)))
            pairs = list(zip(*groups, strict=True))
            assert len(pairs) == 5
            lead = [100 * (float(own["map"]) - float(other["map"])) for own, other in pairs]
            found.append(mean(lead))
            ratios.append(mean(lead) / stdev(lead))
    return (
        f"These leads are small: at most {max(found):.1f} points, and at most {max(ratios):.1f} standard "
        "deviations of the difference over five seeds"
    )


def change(method: str, head: str) -> list[float]:
    """Return the mAP of an LML variant minus that of LML with the mean k, for each data set."""
    return [score(name, method, head) - score(name, "lml", head) for name in data_sets(head)]


def predicted_range() -> tuple[str, str]:
    """Return the smallest and largest change in mAP when k is predicted instead of set to the mean."""
    found = [value for head in HEADS for value in change("lml-predicted", head)]
    low, high = (f"{value:+.1f}".replace("-", "−") for value in (min(found), max(found)))
    return low, high


def listed(datasets: Iterable[str]) -> str:
    """Return the titles of data sets, joined with commas and "and"."""
    return joined([TITLES[name] for name in datasets])


def joined(parts: list[str]) -> str:
    return " and ".join([", ".join(parts[:-1]), parts[-1]] if len(parts) > 1 else parts)


def summary() -> list[str]:
    """Return the sentences in the summary at the top of the page."""
    linear, hidden = (listed(wins("lml", head, SPECIALIZED)) for head in HEADS)
    low, high = predicted_range()
    for head in HEADS:
        assert "voc2012" in wins("lml-predicted", head, [*COMPETITORS, "lml", "lml-half", "lml-more"])
    return [
        f"it has the highest mAP on {linear} with a linear head, and on {hidden} with a hidden layer",
        leads(),
        "On CAL500 and delicious, BCE trained only on the fully labeled 20% of the samples beats all of them",
        f"it changes mAP by {low} to {high} points, and it is best on VOC 2012",
    ]


def losses(head: str) -> str:
    """List the data sets on which a competitor beats LML, with the best competitor and its lead in mAP."""
    found = [
        (name, best(name, head, SPECIALIZED), behind(name, head, "lml", SPECIALIZED))
        for name in data_sets(head)
    ]
    return joined([f"{TITLES[name]} ({NAMES[other]}, {by:.1f})" for name, other, by in found if by >= 0.05])


def findings() -> list[str]:
    """Return the sentences in the section "Findings"."""
    em = [score(name, "em", head, "brier") for head in HEADS for name in data_sets(head)]
    many = [
        behind(name, head, "lml", ["bce-validation"])
        for head in HEADS
        for name in set(data_sets(head)) & set(MANY_LABELS)
    ]
    better = [
        f"{TITLES[name]} ({brier(name, 'hidden', 'epr', 'lml')})"
        for name in data_sets("hidden")
        if score(name, "epr", "hidden", "brier") < score(name, "lml", "hidden", "brier") - 0.05
    ]
    for head in HEADS:
        for name in set(data_sets(head)) & set(MANY_LABELS):
            assert best(name, head, COMPETITORS) == "bce-validation"
    best_linear, best_hidden = (listed(wins("lml-predicted", head, COMPETITORS)) for head in HEADS)
    voc = [score("voc2012", method) for method in ("lml-predicted", "em", "bce-all")]
    assert best("voc2012", "linear", COMPETITORS) == "em"
    bibtex = [score("bibtex", method) for method in ("epr", "lml-predicted", "lml")]
    assert best("bibtex", "linear", COMPETITORS) == "epr"
    raw, fitted = (score("cal500", "lml", "hidden", name) for name in ("brier", "fitted_brier"))
    return [
        "On both, BCE trained only on the fully labeled 20% of the samples beats all methods",
        f"has a higher mAP than every competitor without access to all labels on {best_linear} with a linear "
        f"head, and on {best_hidden} with a hidden layer",
        f"VOC 2012 is {voc[0]:.1f}, compared with {voc[1]:.1f} for EM and {voc[2]:.1f} for training with all",
        f"its mAP is {bibtex[0]:.1f}, compared with {bibtex[1]:.1f} for LML with a predicted k and "
        f"{bibtex[2]:.1f} with the mean",
        f"CAL500 with a hidden layer (Brier score {raw:.2f}, and {fitted:.2f} after recalibration)",
        f"With a linear head, LML with the mean k is behind another method on {losses('linear')}",
        f"With a hidden layer, it is behind another method on {losses('hidden')}",
        f"it is {behind('tmc2007', 'linear', 'truncated-entropy', ['lml']):.0f} points below LML on TMC2007",
        f"(Brier scores of {min(em):.0f} to {max(em):.0f})",
        f"Its mAP is {min(many):.1f} to {max(many):.1f} points higher than that of LML with the mean k",
        f"With a hidden layer, EPR has better Brier scores than LML with the mean k on {joined(better)}",
        f"{behind('tmc2007', 'linear', 'subset', ['lml']):.1f} points of mAP below it on TMC2007",
    ]


def wrong_k() -> tuple[list[float], list[float]]:
    """Return each head's largest drop in mAP if k is half the mean, and if k is 1.5 times the mean."""
    half, more = ([-min(change(name, head)) for head in HEADS] for name in ("lml-half", "lml-more"))
    return half, more


def choosing() -> list[str]:
    """Return the sentences in the section "Choosing k"."""
    low, high = predicted_range()
    half, more = wrong_k()
    errors = [score("yeast", name, "linear", "ece") for name in ("lml", "lml-half", "lml-more")]
    return [
        f"a predicted k changes the mAP by {low} to {high} points",
        f"Half the mean costs at most {half[0]:.1f} points of mAP with a linear head and {half[1]:.1f} with",
        f"1.5 times the mean costs up to {more[0]:.1f} and {more[1]:.1f} points",
        f"the calibration error on yeast grows from {errors[0]:.1f} to {errors[1]:.1f} (half the mean) or",
        f"{errors[2]:.1f} (1.5 times the mean)",
    ]


def prose(page: str, section: str | None) -> str:
    """Return a section's text as one line, without tables. None selects the text before the first section."""
    parts = re.split(r"^## ", (ROOT / page).read_text(encoding="utf-8"), flags=re.MULTILINE)
    (text,) = parts[:1] if section is None else [part for part in parts if part.startswith(section + "\n")]
    return " ".join(" ".join(line for line in text.split("\n") if not line.startswith("|")).split())


def check(page: str, section: str | None, sentences: Iterable[str], settings: Iterable[str] = ()) -> None:
    """Check that a section contains `sentences`, and no decimal numbers outside these and `settings`."""
    text = prose(page, section)
    for sentence in sentences:
        assert sentence in text, f"{page}, {section}: `{sentence}` is missing"
    for said in (*sentences, *settings):
        text = text.replace(said, "")
    assert not re.findall(r"\d+\.\d+", text), text


def test_the_summary() -> None:
    check(PAGE, None, summary(), ["89.4 mAP on VOC 2012"])


def test_the_findings() -> None:
    check(PAGE, "Findings", findings(), ["p > 0.5", "exceed 0.5", "toward 0.5", "k × 1.5"])


def test_the_choice_of_k() -> None:
    check(PAGE, "Choosing k", choosing())


def test_the_duration_of_the_study() -> None:
    times = [row for name in ("results", "tuning") for row in rows(ONE_LABEL / f"{name}.csv")]
    linear, hidden = (
        sum(float(row["seconds"]) for row in times if row["head"] == head) / 3600 for head in HEADS
    )
    said = f"{linear:.1f} hours for the linear head and {hidden:.1f} hours for the hidden layer"
    assert max(linear, hidden) < 2
    check(PAGE, "Commands", [said], ["torch 2.13.0"])


def test_choosing_a_loss() -> None:
    low, high = predicted_range()
    half, more = wrong_k()
    linear, hidden = (listed(wins("lml", head, SPECIALIZED)) for head in HEADS)
    lags = [behind(name, head, "lml", SPECIALIZED) for head in HEADS for name in data_sets(head)]
    lags = [by for by in lags if by > 0]
    sentences = [
        f"for this setting on {linear} with a linear head, and on {hidden} with a hidden layer",
        leads(),
        f"another method is better by {min(lags):.1f} to {max(lags):.1f} points",
        f"This changed mAP by {low} to {high} points",
        f"A k of half the mean number of labels cost at most {max(half):.1f} points of mAP",
        f"1.5 times the mean cost up to {max(more):.1f} points",
    ]
    check("docs/choosing-a-loss.md", "One observed label per sample", sentences)


def test_the_overview_of_the_results() -> None:
    line = list_item(ROOT / "results" / "README.md", "One observed label")
    worst = max(behind(name, head, "lml", SPECIALIZED) for head in HEADS for name in data_sets(head))
    assert re.findall(r"[−+]?\d+\.\d+", line) == [f"{worst:.1f}", *predicted_range()], line


def test_a_wrong_digit_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The check fails for a changed number and for a number outside the expected sentences."""
    monkeypatch.setattr("tests.docs.test_missing_labels_sentences.ROOT", tmp_path)
    page = tmp_path / "page.md"
    page.write_text("# Title\n\nLML has 12.3 points.\n\n| mAP |\n| --- |\n| 99.9 |\n\n## Other\n\n5.5\n")
    check("page.md", None, ["LML has 12.3 points"])
    for wrong in ("LML has 12.4 points", "LML has"):
        with pytest.raises(AssertionError):
            check("page.md", None, [wrong])
