"""Every number in the tables on the result pages matches the corresponding CSV."""

from __future__ import annotations

import csv
import functools
import re
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from statistics import mean, stdev
from typing import NamedTuple

import pytest

RESULTS = Path(__file__).parents[2] / "results"
SCENES, CIFAR, K, PARTIAL = (RESULTS / name for name in ("scene-graph", "cifar100", "which-k", "multilabel"))
ONE_LABEL = RESULTS / "missing-labels"
RECALLS = ("r20", "r50", "r100", "ng_r20", "ng_r50", "ng_r100")
Row = dict[str, str]


class Table(NamedTuple):
    """A table on a page, with the heading above it and without bold markup."""

    section: str
    heads: list[str]
    lines: list[list[str]]


def tables(page: Path) -> list[Table]:
    found, section, block = list[Table](), "", list[list[str]]()
    for line in [*page.read_text(encoding="utf-8").splitlines(), ""]:
        if line.startswith("#"):
            section = line.lstrip("# ")
        if line.startswith("|"):
            block.append([cell.strip().replace("**", "") for cell in line.strip("|").split("|")])
        elif block:
            found.append(Table(section, block[0], block[2:]))
            block = []
    return found


def of_section(page: Path, section: str, first_head: str | None = None) -> list[Table]:
    found = [
        one
        for one in tables(page)
        if one.section == section and (first_head is None or one.heads[0].startswith(first_head))
    ]
    assert found
    return found


def list_item(page: Path, link: str) -> str:
    """Return the list item that starts with the link `[link]`, as one line."""
    items = re.findall(r"^- (\[.*(?:\n  .*)*)", page.read_text(encoding="utf-8"), re.MULTILINE)
    (found,) = (item for item in items if item.startswith(f"[{link}]"))
    return " ".join(found.split())


def rows(path: Path) -> list[Row]:
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def mean_and_deviation(values: Iterable[str], digits: int) -> str:
    shares = [100 * float(value) for value in values]
    deviation = f" ± {stdev(shares):.{digits}f}" if len(shares) > 1 else ""
    return f"{mean(shares):.{digits}f}{deviation}"


def method(title: str) -> str:
    if title.startswith("frequencies"):
        return "frequency"
    return title.removesuffix(" (Motifs)").lower().replace(" ", "-")


def check_cells(line: list[str], found: list[Row], measures: Iterable[str], digits: int) -> None:
    """Check that the cells of a line are the means and standard deviations over these rows."""
    assert line == [mean_and_deviation((row[measure] for row in found), digits) for measure in measures]


# ------------------------------------------------------------------------------------ scene graphs


@pytest.mark.parametrize(
    ("section", "place", "name", "split"),
    [
        ("Visual Genome", 0, "vg", "validation"),
        ("Visual Genome", 1, "vg", "test"),
        ("Visual Genome", 2, "vg-8-epochs", "test"),
        ("VRD", 0, "vrd", "validation"),
        ("VRD", 1, "vrd", "test"),
    ],
)
def test_scene_graphs(section: str, place: int, name: str, split: str) -> None:
    table = of_section(SCENES / "README.md", section, "method")[place]
    chosen = [row for row in rows(SCENES / f"{name}.csv") if row["split"] == split and row["chosen"] == "1"]
    assert {method(line[0]) for line in table.lines} == {row["method"] for row in chosen}
    for title, seeds, *cells in table.lines:
        found = [row for row in chosen if row["method"] == method(title)]
        assert seeds in ("-", str(len(found)))
        check_cells(cells, found, RECALLS, 1)


BIASES = {"": "counted", "leave-one-out": "leave-one-out", "counts": "outside", "without-bias": "none"}


@pytest.mark.parametrize(("section", "name"), [("On Visual Genome", "vg"), ("On VRD", "vrd")])
def test_the_frequency_bias(section: str, name: str) -> None:
    (table,) = of_section(SCENES / "README.md", section)
    found = defaultdict(list)
    for row in rows(SCENES / f"{name}-bias.csv"):
        if row["split"] == "test":
            found[BIASES[row["variant"]], row["method"]].append(row)
    assert {(line[0], method(line[1])) for line in table.lines} == set(found)
    for bias, title, rate, seeds, *cells in table.lines:
        group = found[bias, method(title)]
        if rate != "-":
            assert {float(rate)} == {float(row["learning_rate"]) for row in group}
            assert int(seeds) == len(group)
        check_cells(cells, group, RECALLS, 1)


@pytest.mark.parametrize(("place", "name"), [(0, "vg"), (1, "vrd")])
def test_the_tuning_of_the_frequency_bias(place: int, name: str) -> None:
    table = of_section(SCENES / "README.md", "Selected learning rates per bias")[place]
    found = {
        (
            BIASES[row["variant"]],
            row["method"],
            float(row["learning_rate"]),
        ): f"{100 * float(row['recall']):.1f}"
        for row in rows(SCENES / f"{name}-bias-tuning.csv")
        if row["split"] == "validation" and row["chosen"] == "1" and row["method"] != "frequency"
    }
    assert found == {
        (bias, title, float(rate)): cell
        for bias, title, *cells in table.lines
        for rate, cell in zip(table.heads[2:], cells, strict=True)
        if cell
    }


def test_glove_vectors() -> None:
    (table,) = of_section(SCENES / "README.md", "GloVe vectors")
    variants = {("none", "no"): "without-bias", ("none", "yes"): "without-bias+glove"}
    variants |= {("outside", "no"): "counts", ("outside", "yes"): "glove+counts"}
    for data, bias, title, glove, rate, seeds, *cells in table.lines:
        name = ("vrd" if data == "VRD" else "vg") + ("-glove" if glove == "yes" else "-bias")
        wanted = (method(title), variants[bias, glove], float(rate), "test")
        found = [
            row
            for row in rows(SCENES / f"{name}.csv")
            if (row["method"], row["variant"], float(row["learning_rate"]), row["split"]) == wanted
        ]
        assert int(seeds) == len(found)
        check_cells(cells, found, RECALLS, 1)


# ------------------------------------------------------------------------------------ CIFAR-100

LOSSES = {
    "cross-entropy": "cross-entropy",
    "binary cross-entropy": "bce",
    "smooth SVM": "smooth-svm",
    "truncated entropy": "truncated-entropy",
    "LML": "lml",
}


def check_noises(table: Table, columns: list[tuple[str, str, str]], digits: int) -> None:
    """Check a table with a line for each loss. `columns` lists the CSV, noise and measure of each column."""
    for title, *cells in table.lines:
        for (name, noise, measure), cell in zip(columns, cells, strict=True):
            found = [
                row[measure]
                for row in rows(CIFAR / name)
                if row["loss"] == LOSSES[title] and float(row["noise"]) == float(noise)
            ]
            assert cell == mean_and_deviation(found, digits), (title, name, noise)


def test_cifar100_features() -> None:
    for table in of_section(CIFAR / "README.md", "Frozen features"):
        measure = "test_topk" if table.heads[0].startswith("top-5") else "test_top1"
        check_noises(table, [("features.csv", noise, measure) for noise in table.heads[1:]], 2)


@pytest.mark.parametrize(
    ("place", "measure"), list(enumerate(["train_top1", "last_topk", "last_top1", "test_topk"]))
)
def test_cifar100_memorized_labels(place: int, measure: str) -> None:
    table = of_section(CIFAR / "README.md", "Memorized labels", "noise p")[place]
    noises = [head.rpartition(" ")[2] for head in table.heads[1:]]
    names = ["wide.csv"] * 4 + ["small.csv"] * 4
    check_noises(table, [(name, noise, measure) for name, noise in zip(names, noises, strict=True)], 1)


def test_cifar100_tuning_of_the_wide_head() -> None:
    table = of_section(CIFAR / "README.md", "Memorized labels", "loss")[0]
    found = {(row["loss"], float(row["learning_rate"])): row for row in rows(CIFAR / "tuning-wide.csv")}
    assert len(found) == len(table.lines)
    measures = ("train_top1", "train_topk", "validation_topk", "last_topk", "last_top1")
    for title, rate, *cells in table.lines:
        check_cells(cells, [found[LOSSES[title], float(rate)]], measures, 1)


IMAGES = [
    ("Sixteen epochs", 0, "images-16.csv", "test"),
    ("Sixteen epochs", 1, "images-16.csv", "train"),
    ("Six epochs", 0, "images.csv", "test"),
]


@pytest.mark.parametrize(("section", "place", "name", "split"), IMAGES)
def test_cifar100_images(section: str, place: int, name: str, split: str) -> None:
    table = of_section(CIFAR / "README.md", section, "")[place]
    noises = [head.rpartition(" ")[2] for head in table.heads[1:]]
    measures = [f"{split}_topk"] * 3 + [f"{split}_top1"] * 3
    columns = [(name, noise, measure) for noise, measure in zip(noises, measures, strict=True)]
    check_noises(table, columns, 2)


def test_cifar100_tuning_of_sixteen_epochs() -> None:
    (table,) = of_section(CIFAR / "README.md", "Sixteen epochs", "loss")
    found = {
        (row["loss"], float(row["learning_rate"])): mean_and_deviation([row["validation_topk"]], 1)
        for row in rows(CIFAR / "tuning-images-16.csv")
    }
    assert found == {
        (LOSSES[title], float(rate)): cell
        for title, *cells in table.lines
        for rate, cell in zip(table.heads[1:], cells, strict=True)
        if cell
    }


# ------------------------------------------------------------------------------------ which k

LISTED = ["lml-labels", "lml-5", "lml-20", "bce", "truncated-entropy-1"]

SAYS = {
    "recall": "recall",
    "exact top-m sets": "top_set",
    "exact sets, p > 0.5": "exact",
    "calibration error": "calibration_error",
}
METHODS = {"true k": "lml, true k", "predicted k": "lml, predicted k", "BCE": "bce"}


@pytest.mark.parametrize(
    ("section", "place", "situation"),
    [
        ("Known number of labels, wrong k", 0, ("3 digits", "one")),
        ("Varying number of labels", 0, ("1 to 5 digits", "one")),
        ("Varying number of labels", 1, ("1 to 5 digits", "all")),
    ],
)
def test_which_k(section: str, place: int, situation: tuple[str, str]) -> None:
    table = of_section(K / "README.md", section)[place]
    here = [row for row in rows(K / "which-k.csv") if (row["digits"], row["named"]) == situation]
    for title, *cells in table.lines:
        for head, cell in zip(table.heads[1:], cells, strict=True):
            k = head.removeprefix("k = ")
            wanted = ("lml", k) if k.isdigit() else (METHODS.get(head, head), "0")
            found = [float(row[SAYS[title]]) for row in here if (row["method"], row["k"]) == wanted]
            assert cell == f"{100 * mean(found):.1f}", (title, head)


LONGER = {
    "LML, k per sample": ("longer", "lml-labels"),
    "softmax": ("longer", "softmax"),
    "truncated entropy-1": ("longer", "truncated-entropy-1"),
    "BCE": ("longer", "bce"),
    "BCE, patience 50": ("longer-bce", "bce"),
}


def longer(title: str, data: str) -> list[Row]:
    file, loss = LONGER[title]
    found = [row for row in rows(PARTIAL / f"{file}.csv") if (row["data"], row["loss"]) == (data, loss)]
    assert [(row["keep"], row["seed"]) for row in found] == [("0.3", str(seed)) for seed in range(3)]
    return found


def test_longer_training() -> None:
    page = PARTIAL / "README.md"
    (table,) = of_section(page, "Smaller learning rates and longer training")
    for title, *cells in table.lines:
        for data, cell in zip(table.heads[1:], cells, strict=True):
            found = longer(title, data)
            (rate,) = {row["learning_rate"] for row in found}
            assert cell == f"{mean_and_deviation((row['ndcg5'] for row in found), 1)} ({rate})", (title, data)
    assert [line[0] for line in table.lines] == list(LONGER)
    text = " ".join(page.read_text(encoding="utf-8").replace("−", "-").split())
    for data in ("bibtex", "delicious", "corel5k"):
        pairs = zip(longer("LML, k per sample", data), longer("BCE, patience 50", data), strict=True)
        differences = [100 * (float(ours["ndcg5"]) - float(bce["ndcg5"])) for ours, bce in pairs]
        assert f"{min(differences):.1f} to {max(differences):.1f}" in text, data
        assert f"on {data}" in text
    epochs = {
        title: [int(row["best_epoch"]) for data in table.heads[1:] for row in longer(title, data)]
        for title in ("LML, k per sample", "BCE, patience 50")
    }
    ours, theirs = epochs["LML, k per sample"], epochs["BCE, patience 50"]
    assert f"Its best epochs are {min(ours)} to {max(ours)} on the three data sets" in text
    slow = [epoch for place, epoch in enumerate(theirs) if place // 3 != 1]
    assert (
        f"are {min(theirs[3:6])} to {max(theirs[3:6])} on delicious, and {min(slow)} to {max(slow)} on"
        in text
    )


def test_which_k_of_lists_of_labels() -> None:
    (table,) = of_section(K / "README.md", "Text and image tags")
    for title, *cells in table.lines:
        found = [
            row for row in rows(RESULTS / "multilabel" / f"{title.split(',')[0]}.csv") if row["keep"] == "1.0"
        ]
        assert cells == [
            mean_and_deviation((row["p1"] for row in found if row["loss"] == loss), 1) for loss in LISTED
        ]


# ------------------------------------------------------------------------------------ one observed label

ONE_LABEL_METHODS = {
    "BCE, all labels": "bce-all",
    "BCE, fully labeled 20% only": "bce-validation",
    "softmax × k": "softmax",
    "softmax × predicted k": "softmax-predicted",
    "LML, k × 0.5": "lml-half",
    "LML, k × 1.5": "lml-more",
    "LML, predicted k": "lml-predicted",
    "exact k-subset": "subset",
    **{name: name.lower() for name in ("AN", "AN-LS", "WAN", "EPR", "ROLE", "EM", "ASL", "LML")},
    "truncated entropy": "truncated-entropy",
}
ONE_LABEL_MEASURES = {
    "mAP": ("map", 1, max),
    "recall at round(k)": ("recall", 1, max),
    "Brier score": ("brier", 2, min),
    "calibration error": ("ece", 2, min),
    "F1 at p > 0.5": ("f1", 1, max),
    "recalibrated Brier score": ("fitted_brier", 2, min),
    "recalibrated calibration error": ("fitted_ece", 2, min),
    "recalibrated F1 at p > 0.5": ("fitted_f1", 1, max),
    "recalibrated F1, fitted threshold": ("threshold_f1", 1, max),
}
ONE_LABEL_DIFFERENCES = {
    "LML minus best competitor": "lml",
    "LML (predicted k) minus best competitor": "lml-predicted",
}
NOT_COMPETITORS = ("bce-all", "lml", "lml-half", "lml-more", "lml-predicted", "subset")


def one_label_rows(head: str, dataset: str, name: str, draw: str = "random") -> list[Row]:
    return sorted(one_label_groups()[head, dataset, name, draw], key=lambda row: int(row["seed"]))


@functools.cache
def one_label_groups() -> dict[tuple[str, str, str, str], list[Row]]:
    groups = defaultdict(list)
    for row in rows(ONE_LABEL / "results.csv"):
        groups[row["head"], row["dataset"], row["method"], row["draw"]].append(row)
    return groups


def check_one_label(head: str, table: Table) -> None:
    """Check a table for one measure, with a line for each method and a column for each data set."""
    measure, digits, _ = ONE_LABEL_MEASURES[table.heads[0]]
    for title, *cells in table.lines:
        for dataset, cell in zip(table.heads[1:], cells, strict=True):
            found = one_label_rows(head, dataset, ONE_LABEL_METHODS[title])
            assert len(found) in ((0,) if cell == "–" else (5,)), (title, dataset)
            if found:
                assert cell == mean_and_deviation((row[measure] for row in found), digits), (title, dataset)


def check_one_label_differences(head: str, table: Table) -> None:
    """Check the differences from the best competitor for each data set and measure, paired by seed."""
    own = ONE_LABEL_DIFFERENCES[table.heads[0]]
    for dataset, *cells in table.lines:
        for title, cell in zip(table.heads[1:], cells, strict=True):
            measure, digits, best = ONE_LABEL_MEASURES[title]
            values = {
                name: [float(row[measure]) for row in one_label_rows(head, dataset, method)]
                for name, method in ONE_LABEL_METHODS.items()
                if method not in NOT_COMPETITORS and one_label_rows(head, dataset, method)
            }
            rival = best(values, key=lambda name: mean(values[name]))
            mine = [float(row[measure]) for row in one_label_rows(head, dataset, own)]
            paired = [100 * (one - other) for one, other in zip(mine, values[rival], strict=True)]
            sign = "+" if mean(paired) >= 0 else ""
            wanted = f"{sign}{mean(paired):.{digits}f} ± {stdev(paired):.{digits}f} ({rival})"
            assert cell == wanted, (dataset, title)


ONE_LABEL_SECTIONS = [("Linear head", "linear"), ("One hidden layer", "hidden")]


@pytest.mark.parametrize(("section", "head"), ONE_LABEL_SECTIONS)
@pytest.mark.parametrize("page", ["README.md", "missing-labels.md"])
def test_one_observed_label(page: str, section: str, head: str) -> None:
    for table in of_section(ONE_LABEL / page, section):
        if table.heads[0] in ONE_LABEL_MEASURES:
            check_one_label(head, table)
        elif table.heads[0] in ONE_LABEL_DIFFERENCES:
            check_one_label_differences(head, table)
        else:
            assert table.heads[0] == "learning rate, weight"


def test_the_published_draw() -> None:
    section = "VOC 2012 with the published observed labels"
    published = of_section(ONE_LABEL / "missing-labels.md", section, "method")
    for (_, network), table in zip(ONE_LABEL_SECTIONS, published, strict=True):
        for title, *cells in table.lines:
            (found,) = one_label_rows(network, "voc2012", ONE_LABEL_METHODS[title], "published")
            names = [ONE_LABEL_MEASURES[head][0] for head in table.heads[1:]]
            assert cells == [f"{100 * float(found[name]):.1f}" for name in names], title


# ------------------------------------------------------------------------------------ own data

OWN = RESULTS / "own-data"
OWN_METRICS = {"nDCG@5": "ndcg5", "P@1": "p1", "micro-F1": "micro_f1", "exact sets": "exact"}


Place = tuple[str, str]  # the data set and the number of samples


def own_data() -> dict[Place, dict[str, list[Row]]]:
    """Return the runs of each method, by data set and number of samples. All methods have the same seeds."""
    found: dict[Place, dict[str, list[Row]]] = defaultdict(lambda: defaultdict(list))
    for row in rows(OWN / "own-data.csv"):
        found[row["data"], row["samples"]][row["method"]].append(row)
    for methods in found.values():
        for runs in methods.values():
            assert [row["seed"] for row in runs] == ["0", "1", "2"]
    return found


def percent(runs: list[Row], metric: str) -> list[float]:
    return [100 * float(row[metric]) for row in runs]


def shown(values: list[float]) -> str:
    return f"{mean(values):.1f}±{stdev(values):.1f}"


def own_differences(metric: str) -> dict[Place, tuple[str, list[float]]]:
    """Return the best other method, by its mean, and the lead of torchlml over it for each seed."""
    found = {}
    for place, methods in own_data().items():
        values = {name: percent(runs, metric) for name, runs in methods.items()}
        own = values.pop("torchlml")
        best = max(values, key=lambda name: mean(values[name]))
        found[place] = best, [a - b for a, b in zip(own, values[best], strict=True)]
    return found


@pytest.mark.parametrize(("place", "metric"), list(enumerate(OWN_METRICS.values())))
def test_own_data_and_the_best_other_method(place: int, metric: str) -> None:
    table = of_section(OWN / "README.md", "torchlml and the best other method", "data")[place]
    found = own_differences(metric)
    assert {(line[0], line[1]) for line in table.lines} == set(found)
    for data, samples, *cells in table.lines:
        best, values = found[data, samples]
        runs = own_data()[data, samples]
        both = [shown(percent(runs[name], metric)) for name in ("torchlml", best)]
        sign = "+" if mean(values) >= 0 else ""
        assert cells == [*both, best, sign + shown(values)]


def test_own_data_of_all_methods() -> None:
    tables = of_section(OWN / "README.md", "All methods", "samples")
    found = own_data()
    data = sorted({name for name, _ in found})
    assert len(tables) == len(data)
    for name, table in zip(data, tables, strict=True):
        sizes = {samples for one, samples in found if one == name}
        assert {line[0] for line in table.lines} == sizes
        assert len(table.lines) == len(sizes) * 9
        for samples, method_, *cells in table.lines:
            runs = found[name, samples][method_]
            metrics = [shown(percent(runs, metric)) for metric in OWN_METRICS.values()]
            seconds = f"{mean(float(row['seconds']) for row in runs):.1f}"
            predicted = f"{mean(float(row['predict_seconds']) for row in runs):.2f}"
            assert cells == [*metrics, seconds, predicted]


def test_own_data_summary() -> None:
    """The numbers in the first paragraph and in the findings match the CSV."""
    texts = [
        " ".join(path.read_text(encoding="utf-8").replace("−", "-").split())
        for path in (
            OWN / "README.md",
            RESULTS / "README.md",
            RESULTS.parent / "README.md",
            RESULTS.parent / "docs" / "own-data.md",
        )
    ]
    page = texts[0]
    counts, ranges = {}, {}
    for metric in OWN_METRICS.values():
        means = [mean(values) for _, values in own_differences(metric).values()]
        counts[metric] = f"{sum(value >= 0 for value in means)} of {len(means)}"
        ranges[metric] = f"{min(means):+.1f} to {max(means):+.1f} points"
    for other in texts:
        assert f"has the best nDCG@5 in {counts['ndcg5']} comparisons" in other
        assert f"the best micro-F1 in {counts['micro_f1']}" in other
        assert f"predicts the complete label set correctly for the most samples in {counts['exact']}" in other
    for title, metric in (
        ("nDCG@5", "ndcg5"),
        ("P@1", "p1"),
        ("Micro-F1", "micro_f1"),
        ("Exact sets", "exact"),
    ):
        assert f"**{title}.** The difference from the best other method is {ranges[metric]}." in page
    leads = []
    for methods in own_data().values():
        own, *others = (
            mean(percent(methods[name], "micro_f1"))
            for name in ("torchlml", "LinearSVC", "logistic", "LibMultiLabel", "napkinXC")
        )
        leads.append(own - max(others))
    assert f"the micro-F1 of torchlml is {min(leads):.1f}–{max(leads):.1f} points higher" in page
    for title, metric in (("Micro-F1", "micro_f1"), ("Exact sets", "exact")):
        behind: dict[str, list[int]] = defaultdict(list)
        for (data, samples), (_, values) in own_differences(metric).items():
            if mean(values) < 0:
                behind[data].append(int(samples))
        listed = page.split(f"**{title}.**")[1].split("torchlml is behind on ")[1].split(".")[0]
        parts = re.findall(r"(\w+) \(([^)]*)\)", listed)
        found = {data: [int(n) for n in re.findall(r"\d+", numbers)] for data, numbers in parts}
        assert found == {data: sorted(numbers) for data, numbers in behind.items()}
    near = {
        metric: sum(abs(mean(values)) < stdev(values) for _, values in own_differences(metric).values())
        for metric in OWN_METRICS.values()
    }
    assert (
        f"Of the 16 differences, {near['ndcg5']} in nDCG@5, {near['micro_f1']} in micro-F1 and "
        f"{near['exact']} in exact sets are smaller" in page
    )
    times = [
        {name: mean(float(row["seconds"]) for row in runs) for name, runs in methods.items()}
        for methods in own_data().values()
    ]
    faster = {
        tuned: sum(
            value < place["torchlml"]
            for place in times
            for name, value in place.items()
            if name != "torchlml" and name.endswith("tuned") == tuned
        )
        for tuned in (False, True)
    }
    seconds = [place["torchlml"] for place in times]
    assert f"Training takes {min(seconds):.1f}–{max(seconds):.1f} CPU seconds." in page
    single, tuning = faster[False], faster[True]
    assert (
        f"trains faster than torchlml in {single} of 64 cases (four methods in each of 16 comparisons) with "
        f"default settings, and in {tuning} of 64 cases with tuning."
    ) in page
    for data, digits in (("corel5k", 1), ("delicious", 2)):
        means = [
            mean(percent(runs, "exact"))
            for (name, _), methods in own_data().items()
            for runs in methods.values()
            if name == data
        ]
        assert f"{max(means):.{digits}f}% of the" in page


def test_own_data_targets() -> None:
    """The table of targets shows how often each target is met, and the worst difference."""
    (table,) = of_section(OWN / "README.md", "Targets")
    slack = {"ndcg5": 0.2}
    for name, _, met, worst in table.lines:
        metric = OWN_METRICS[name]
        found = {place: mean(values) for place, (_, values) in own_differences(metric).items()}
        right = sum(value >= -slack.get(metric, 0) - 1e-9 for value in found.values())
        assert met == f"{right} of {len(found)}"
        (data, samples), least = min(found.items(), key=lambda one: one[1])
        assert worst == f"{least:+.1f} ({data}, {samples})"
