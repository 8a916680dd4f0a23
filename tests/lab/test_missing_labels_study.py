"""`torchlml missing-labels`: training, tuning, resuming a killed study, and invalid options."""

from __future__ import annotations

import csv
import dataclasses
import os
import time
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.support.processes import start
from torchlml_lab import cli
from torchlml_lab.engine.output import StudyTable
from torchlml_lab.studies.missing_labels import data, study
from torchlml_lab.studies.missing_labels.methods import METHODS, Adam, Recipe, first_recipes, neighbors
from torchlml_lab.studies.settings import MissingLabelsSettings


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Small versions of `yeast`, without an official split, and `voc2012`, with published observed labels."""
    generator = np.random.default_rng(0)
    x = generator.normal(size=(160, 5)).astype(np.float32)
    y = x @ generator.normal(size=(5, 6)) > 0.7
    y[:, 0] |= ~y.any(1)
    place = tmp_path / "data" / "missing-labels"
    place.mkdir(parents=True)
    np.savez(place / "yeast.npz", x=x, y=y, n_train=0)
    train = np.arange(160) < 110
    np.savez(place / "voc2012.npz", x=x, y=y, train=train, observed=y[train].argmax(1))
    return tmp_path / "data"


def command(folder: Path, out: Path, *more: str) -> list[str]:
    words = ["missing-labels", "--data", str(folder), "--out", str(out), "--datasets", "yeast"]
    return [*words, "--steps", "9", "--seeds", "2", *more]


def rows(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def without_time(path: Path) -> list[dict[str, str]]:
    return [{key: value for key, value in row.items() if key != "seconds"} for row in rows(path)]


def test_end_to_end(folder, tmp_path, capsys, monkeypatch):
    few = {name: METHODS[name] for name in ("bce-all", "wan", "role", "lml", "lml-predicted", "subset")}
    monkeypatch.setattr(study, "METHODS", few)
    words = ["missing-labels", "--data", str(folder), "--out", str(tmp_path / "new" / "out")]
    assert cli.main([*words, "--datasets", "yeast", "voc2012", "--steps", "9", "--seeds", "2"]) == 0
    assert "complete" in capsys.readouterr().out
    tuning, results = (rows(tmp_path / "new" / "out" / f"{name}.csv") for name in ("tuning", "results"))
    pairs = [(d, h, m) for d in ("yeast", "voc2012") for h in ("linear", "hidden") for m in few]
    pairs = [pair for pair in pairs if pair[2] != "subset" or pair == ("yeast", "linear", "subset")]
    counts = Counter((row["dataset"], row["head"], row["method"], row["seed"]) for row in tuning)
    assert set(counts) == {(*pair, seed) for pair in pairs for seed in "01"}
    assert min(counts.values()) >= 9
    found = Counter((row["dataset"], row["head"], row["method"], row["draw"], row["seed"]) for row in results)
    wanted = {(*pair, "random", seed): 1 for pair in pairs for seed in "01"}
    assert found == wanted | {(*pair, "published", "0"): 1 for pair in pairs if pair[0] == "voc2012"}
    for row in results:
        own = [one for one in tuning if all(one[key] == row[key] for key in ("dataset", "head", "method"))]
        scores: dict[tuple[str, str], list[float]] = {}
        for one in own:
            scores.setdefault((one["learning_rate"], one["weight"]), []).append(float(one["validation_map"]))
        means = {Recipe(float(rate), float(weight)): sum(found) for (rate, weight), found in scores.items()}
        own_recipe = Recipe(float(row["learning_rate"]), float(row["weight"]))
        assert means[own_recipe] == max(means.values())
        assert set(neighbors(few[row["method"]], own_recipe)) <= set(means)  # the search is complete
        assert all(
            0 <= float(row[name]) <= 1 for name in ("map", "recall", "brier", "ece", "f1", "threshold_f1")
        )
    # A final run reproduces the validation mAP of the tuning run with the same seed and configuration.
    row = next(
        row for row in results if row["method"] == "lml" and row["seed"] == "0" and row["draw"] == "random"
    )
    same = [one for one in tuning if all(one[key] == row[key] for key in list(one)[:4])]
    assert row["validation_map"] in {one["validation_map"] for one in same}


def test_the_figure_and_its_tables(folder, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert cli.main(["figures", "missing-labels"]) == 2
    assert "Create it with `torchlml missing-labels`" in capsys.readouterr().err
    names = ("bce-all", "wan", "an", "lml")
    monkeypatch.setattr(study, "METHODS", {name: METHODS[name] for name in names})
    words = ["missing-labels", "--data", str(folder), "--datasets", "yeast", "voc2012", "--steps", "9"]
    assert cli.main([*words, "--seeds", "2", "--heads", "linear"]) == 0
    assert cli.main(["figures", "missing-labels", "--out", "picture.png"]) == 0
    assert Path("picture.png").stat().st_size > 1000
    page = Path("picture.md").read_text(encoding="utf-8")
    found = [row for row in rows(Path("torchlml-missing-labels/results.csv")) if row["draw"] == "random"]

    def values(method: str, measure: str) -> list[float]:
        return [
            100 * float(row[measure]) for row in found if (row["dataset"], row["method"]) == ("yeast", method)
        ]

    one, other = values("lml", "brier"), values("wan", "brier")
    # With a large weight, WAN equals AN. If they tie, the page names WAN.
    rival = other if np.mean(other) <= np.mean(values("an", "brier")) else values("an", "brier")
    paired = [a - b for a, b in zip(one, rival, strict=True)]
    title = "WAN" if rival is other else "AN"
    cell = (
        f"{'+' if np.mean(paired) >= 0 else ''}{np.mean(paired):.2f} ± {np.std(paired, ddof=1):.2f} ({title})"
    )
    assert cell in page
    assert f"{np.mean(one):.2f} ± {np.std(one, ddof=1):.2f}" in page
    assert "## VOC 2012 with the published observed labels" in page
    table = page.split("| mAP |")[1].split("\n\n")[0]
    assert table.count("**") == 2 * 2  # one bold cell for each data set
    assert "**" not in next(line for line in table.split("\n") if line.startswith("| BCE, all"))


@pytest.mark.parametrize("name", METHODS)
def test_every_method_learns_a_linear_rule(folder, name):
    """The ranking beats chance, and the recalibrated Brier score beats that of a constant prediction."""
    method, split = METHODS[name], data.split_of(data.read_dataset("yeast", folder), 0)
    split = data.labeled_part(split) if method.labels == "validation" else split
    counts = study.expected_counts(method, split)
    recipe = Recipe(0.03, method.weights[1] if method.weights else 1.0)
    (model,) = study.train(method, split, counts, "linear", [recipe], 60, 0)
    values = study.evaluate(method, split, counts, model, 2)
    share = split.test_labels.float().mean().item()
    assert values["map"] > share + 0.2
    assert values["fitted_brier"] < share * (1 - share)  # the Brier score of the best constant


def test_configurations_trained_together_equal_those_trained_alone(folder, monkeypatch):
    split = data.split_of(data.read_dataset("yeast", folder), 0)
    for name, head in (("an", "linear"), ("role", "hidden"), ("lml-predicted", "hidden")):
        method = METHODS[name]
        counts, recipes = study.expected_counts(method, split), first_recipes(method)
        together = study.train(method, split, counts, head, recipes, 12, 0)
        monkeypatch.setattr(study, "_TOGETHER", 1)
        alone = study.train(method, split, counts, head, recipes, 12, 0)
        monkeypatch.undo()
        for one, other in zip(together, alone, strict=True):
            assert one.validation_map == pytest.approx(other.validation_map, abs=0.02)
            for part, same in zip(one.parameters, other.parameters, strict=True):
                if one.epoch == other.epoch:
                    torch.testing.assert_close(part, same, rtol=1e-3, atol=1e-4)


def test_adam_matches_torch():
    value, rates = torch.randn(2, 3, 4), torch.tensor([0.1, 0.01])
    leaves = [part.clone().requires_grad_() for part in value]
    optimizers = [torch.optim.Adam([leaf], float(rate)) for leaf, rate in zip(leaves, rates, strict=True)]
    own, moments = Adam(rates), [torch.zeros_like(value), torch.zeros_like(value)]
    for number in range(1, 6):
        gradient = torch.randn(2, 3, 4)
        own.step(value, gradient, moments, number)
        for leaf, part, optimizer in zip(leaves, gradient, optimizers, strict=True):
            leaf.grad = part
            optimizer.step()
    torch.testing.assert_close(value, torch.stack([leaf.detach() for leaf in leaves]))


def test_test_samples_do_not_influence_training(folder):
    method, split = METHODS["lml-predicted"], data.split_of(data.read_dataset("yeast", folder), 0)
    other = dataclasses.replace(split, test_x=split.test_x + 9, test_labels=~split.test_labels)
    found = [
        study.train(method, one, study.expected_counts(method, one), "linear", [Recipe(0.01, 1.0)], 9, 0)[0]
        for one in (split, other)
    ]
    assert torch.equal(found[0].parameters[0], found[1].parameters[0])
    assert found[0].epoch == found[1].epoch


@pytest.mark.parametrize("name", [name for name, method in METHODS.items() if method.labels == "one"])
def test_unobserved_labels_do_not_influence_training(folder, name):
    method, split = METHODS[name], data.split_of(data.read_dataset("yeast", folder), 0)
    hidden = torch.zeros_like(split.labels)
    hidden[torch.arange(len(hidden)), split.observed] = True
    found = []
    for labels in (split.labels, hidden):
        one = dataclasses.replace(split, labels=labels)
        counts = study.expected_counts(method, one)
        found.append(study.train(method, one, counts, "linear", first_recipes(method)[4:5], 9, 0)[0])
    assert torch.equal(found[0].parameters[0], found[1].parameters[0])


FEW = {name: METHODS[name] for name in ("an", "em", "lml")}


def use_few_methods():
    setattr(study, "METHODS", FEW)  # noqa: B010 (mypy rejects the assignment to an imported name)


def test_a_killed_study_continues_with_the_same_numbers(folder, tmp_path, capsys, monkeypatch):
    out, whole = tmp_path / "killed", tmp_path / "whole"
    words = command(folder, out, "--heads", "linear")
    process = start(words, before=use_few_methods)
    deadline = time.monotonic() + 60
    while not (out / "results.csv").exists() and process.running():
        assert time.monotonic() < deadline
        time.sleep(0.002)
    process.kill()
    kept = without_time(out / "results.csv")
    monkeypatch.setattr(study, "METHODS", FEW)
    computed, compute = [], study.Study.compute

    def recorded(self, cell):
        computed.append(cell)
        compute(self, cell)

    monkeypatch.setattr(study.Study, "compute", recorded)
    assert cli.main(words) == 0
    assert len(computed) < len(FEW) * 3
    assert cli.main(command(folder, whole, "--heads", "linear")) == 0
    for name in ("tuning", "results"):
        assert without_time(out / f"{name}.csv") == without_time(whole / f"{name}.csv")
    assert all(row in without_time(out / "results.csv") for row in kept)
    capsys.readouterr()


def test_a_better_configuration_replaces_the_result(folder, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(study, "METHODS", {"an": METHODS["an"]})
    words = command(folder, tmp_path, "--heads", "linear")
    assert cli.main(words) == 0
    before = rows(tmp_path / "results.csv")
    other = next(row for row in rows(tmp_path / "tuning.csv") if row["learning_rate"] == "0.0001")
    assert other["learning_rate"] != before[0]["learning_rate"]
    changed = (tmp_path / "tuning.csv").read_text().splitlines()
    place = changed[0].split(",").index("validation_map")
    for number, line in enumerate(changed):
        cells = line.split(",")
        if "0.0001" in cells:
            changed[number] = ",".join([*cells[:place], "0.99", *cells[place + 1 :]])
    (tmp_path / "tuning.csv").write_text("\n".join(changed) + "\n")
    assert cli.main(words) == 0
    after = rows(tmp_path / "results.csv")
    assert len(after) == len(before)
    assert {row["learning_rate"] for row in after} == {"0.0001"}
    capsys.readouterr()


def test_a_time_limit_stops_after_one_part(folder, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(study, "METHODS", {"an": METHODS["an"]})
    words = command(folder, tmp_path / "out", "--heads", "linear", "--minutes", "1e-9")
    for left in (2, 1):
        assert cli.main(words) == 0
        assert f"Parts left to compute: {left}." in capsys.readouterr().out
    assert cli.main(words) == 0
    assert "complete" in capsys.readouterr().out
    # Later parts that are already complete are not counted.
    results = tmp_path / "out" / "results.csv"
    header, _, *others = results.read_text().splitlines()
    results.write_text("\n".join([header, *others]) + "\n")
    assert cli.main(words) == 0
    assert "The study is complete." in capsys.readouterr().out


def test_results_of_other_settings_are_rejected(folder, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(study, "METHODS", {"an": METHODS["an"]})
    assert cli.main(command(folder, tmp_path, "--heads", "linear")) == 0
    assert cli.main([*command(folder, tmp_path, "--heads", "linear"), "--steps", "10"]) == 2
    assert "(`--out`) contains results for" in capsys.readouterr().err
    (tmp_path / "results.csv").write_text("a,b\n1,2\n")
    assert cli.main(command(folder, tmp_path, "--heads", "linear")) == 2
    assert "cannot be read as a results CSV" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "needle"),
    [
        (["--datasets", "yaest"], "`--datasets` contains `yaest`, which is unknown. Did you mean `yeast`?"),
        (["--heads", "deep"], "`--heads` contains `deep`"),
        (["--seeds", "0"], "`--seeds` must be at least 1, but it is 0"),
        (["--steps", "0"], "`--steps` must be at least 1, but it is 0"),
        (["--minutes", "-1"], "`--minutes` must be at least 0, but it is -1"),
        (["--minutes", "nan"], "`--minutes` must be at least 0, but it is nan"),
        (["--threads", "0"], "`--threads` must be from 1 to"),
        (["--datasets", "cal500"], "does not contain the data set cal500"),
        (["--data", "nowhere"], "`nowhere` (`--data`)"),
    ],
)
def test_bad_options(folder, tmp_path, capsys, monkeypatch, words, needle):
    monkeypatch.setattr(study.Study, "compute", None)
    assert cli.main([*command(folder, tmp_path / "out"), *words]) == 2
    assert needle in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_the_data_directory_is_required(tmp_path, capsys, monkeypatch):
    monkeypatch.delenv("TORCHLML_DATA", raising=False)
    assert cli.main(["missing-labels", "--out", str(tmp_path / "out")]) == 2
    assert "`--data` is missing" in capsys.readouterr().err


@pytest.mark.skipif("TORCHLML_DATA" not in os.environ, reason="TORCHLML_DATA is not set")
def test_real_data():
    found = {}
    for name in data.FOLDERS:
        one = data.read_dataset(name, Path(os.environ["TORCHLML_DATA"]))
        assert one.labels.any(1).all()
        found[name] = (*one.labels.shape, round(one.labels.sum(1).double().mean().item(), 1))
    assert found["voc2012"] == (11540, 20, 1.4)
    assert found["yeast"] == (2417, 14, 4.2)
    assert found["cal500"] == (502, 174, 26.0)
    assert found["tmc2007"] == (28596, 22, 2.2)
    assert [found[name][1] for name in ("bibtex", "corel5k", "delicious")] == [159, 371, 983]


def test_all_data_sets_are_used_by_default():
    assert isinstance(study.RESULTS, StudyTable)
    assert set(MissingLabelsSettings().datasets) == set(data.FOLDERS)
