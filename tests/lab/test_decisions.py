"""Predicted label sets: the rules match their definitions, and the metrics match scikit-learn."""

from __future__ import annotations

import csv
import dataclasses
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.stats import norm
from sklearn.metrics import accuracy_score, average_precision_score, f1_score

import torchlml
from tests.support.command_lines import rejected
from tests.support.tagged_texts import tagged_texts, write_texts
from torchlml_lab import cli
from torchlml_lab.cli_errors import BadInput
from torchlml_lab.multilabel import decisions
from torchlml_lab.multilabel.decisions import Decisions, SetMeasures, average_precision, best_threshold
from torchlml_lab.multilabel.settings import RULES, RuleName

K = 2


def samples(rows: int, labels: int = 7) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return logits, probabilities, and labels drawn with these probabilities (at least one per sample)."""
    logits = 2 * torch.randn(rows, labels)
    y = torchlml.lml(logits, K)
    observed = torch.rand(rows, labels) < y
    observed |= torch.nn.functional.one_hot(y.argmax(-1), labels).bool() & ~observed.any(-1, keepdim=True)
    return logits, y, observed


def micro(chosen: torch.Tensor, observed: torch.Tensor) -> float:
    return float(f1_score(observed.numpy(), chosen.numpy(), average="micro"))


def test_rules_follow_their_definitions() -> None:
    logits, y, _ = samples(50)
    rules = Decisions(threshold=0.7, weights=[1.5, 0.3, 0, -0.4, 0, 0, 0, 0], most=4)
    found = {rule: rules.decide(logits, y, K, rule) for rule in RULES}
    for row, p in enumerate(y.tolist()):
        order = sorted(range(len(p)), key=lambda label: -p[label])

        def chosen(rule: RuleName, row: int = row) -> set[int]:
            return set(found[rule][row].nonzero().flatten().tolist())

        assert chosen("top-k") == set(order[:K])
        assert chosen("half") == {label for label, value in enumerate(p) if value > 0.5}
        assert chosen("threshold") == {label for label, value in enumerate(p) if value > 0.7} | {order[0]}
        odds = [np.log(p[label] / (1 - p[label])) for label in order]
        size = min(4, max(1, round(1.5 + 0.3 * odds[0] - 0.4 * odds[2])))
        assert chosen("count") == set(order[:size])
    # Without a fitted regression, the rule `count` chooses k labels.
    assert torch.equal(Decisions().decide(logits, y, K, "count"), found["top-k"])


def test_logits_break_ties_between_equal_probabilities() -> None:
    logits = torch.tensor([[40.0, 50, 45, -60], [-60.0, 45, 40, 50]])
    y = torch.tensor([[1.0, 1, 1, 0], [0, 1, 1, 1]])
    assert Decisions().decide(logits, y, 2, "top-k").int().tolist() == [[0, 1, 1, 0], [0, 1, 0, 1]]


@pytest.mark.parametrize("least", [0, 1])
@pytest.mark.parametrize("rows", [3, 40])
def test_the_threshold_maximizes_the_smoothed_quality(rows: int, least: int) -> None:
    logits, y, observed = samples(rows)
    y = (20 * y).round() / 20  # with ties

    def quality(threshold: float) -> float:
        rules = Decisions(threshold=threshold, least=least)
        chosen = rules.decide(logits, y, K, "threshold")
        return micro(chosen, observed) + accuracy_score(observed.numpy(), chosen.numpy())

    odds = np.linspace(-9, 6, 301)
    tried = np.array([quality(t) for t in 1 / (1 + np.exp(-odds))])
    smoothed = [np.average(tried, weights=norm.pdf(odds, one, decisions.SMOOTHNESS)) for one in odds]
    found = best_threshold(logits, y, observed, least)
    place = int(np.abs(np.log(found / (1 - found)) - odds).argmin())
    assert smoothed[place] == pytest.approx(max(smoothed))
    assert max(smoothed) > min(smoothed) + 0.1


def test_sets_are_empty_if_that_is_better() -> None:
    # Samples without labels have low probabilities.
    logits, _, observed = samples(200)
    observed[::2] = False
    logits[::2] -= 6
    y = logits.sigmoid()
    fitted = decisions.fit(logits, y, observed, K, empty=True)
    assert fitted.least == 0
    chosen = fitted.decide(logits, y, K, fitted.rule)
    assert (~chosen[::2].any(-1)).double().mean() > 0.8
    assert chosen[1::2].any(-1).double().mean() > 0.8
    assert "best one" not in fitted.in_words("threshold", K)
    for rule in ("threshold", "count"):
        empty = ~fitted.decide(logits, y, K, rule).any(-1)  # type: ignore[arg-type]
        assert empty[::2].double().mean() > 0.5
    # By default, `fit` assumes that every sample has a label, so at least one label is chosen.
    other = decisions.fit(logits, y, observed, K)
    assert other.least == 1
    assert "and always the most probable label" in other.in_words("threshold", K)
    for rule in ("threshold", "count"):
        assert other.decide(logits, y, K, rule).any(-1).all()  # type: ignore[arg-type]


def test_a_threshold_does_not_separate_equal_probabilities() -> None:
    # Three of four labels with equal probabilities are observed, but a threshold chooses all four or none.
    y = torch.tensor([[0.9, 0.5, 0.5, 0.5, 0.5, 0.1]])
    observed = torch.tensor([[True, True, True, True, False, False]])
    found = Decisions(threshold=best_threshold(torch.logit(y), y, observed))
    assert found.decide(torch.logit(y), y, K, "threshold").int().tolist() == [[1, 1, 1, 1, 1, 0]]


def test_the_number_of_labels_is_a_ridge_regression() -> None:
    from sklearn.linear_model import Ridge
    from sklearn.preprocessing import StandardScaler

    logits, y, observed = samples(200, labels=12)
    fitted = decisions.fit(logits, y, observed, K)
    top = np.sort(y.double().numpy())[:, ::-1][:, :8].clip(1e-6, 1 - 1e-6)
    x = StandardScaler().fit_transform(np.log(top / (1 - top)))
    counts = observed.sum(-1).numpy()
    expected = Ridge(alpha=10.0).fit(x, counts).predict(x).round().clip(1, counts.max())
    assert fitted.sizes(y, K).tolist() == expected.tolist()
    assert len(set(expected)) > 1


def test_the_rule_with_the_best_sets_is_chosen() -> None:
    # Only observed labels have probabilities above 0.5, so the rule `half` is right and `top-k` is not.
    observed = torch.rand(60, 6) < 0.4
    observed[:, 0] |= ~observed.any(-1)
    y = torch.where(observed, 0.6, 0.4) + 0.05 * torch.rand(60, 6)
    y[0] = torch.tensor([0.9, 0.8, 0.7, 0.45, 0.45, 0.45])  # except in the first sample
    fitted = decisions.fit(torch.logit(y), y, observed, K)
    scores = {}
    for rule in RULES:
        chosen = fitted.decide(torch.logit(y), y, K, rule)
        scores[rule] = micro(chosen, observed) + float((chosen == observed).all(-1).double().mean())
    assert scores[fitted.rule] == max(scores.values())
    assert fitted.rule != "top-k"


def test_set_metrics_match_scikit_learn() -> None:
    _, y, observed = samples(80)
    unknown = torch.rand(80, 2) < 0.1  # two labels that are unknown to the run
    unknown[:, 1] = False  # the second of them does not occur
    truth = torch.cat([observed, unknown], -1)
    chosen = y > 0.6
    chosen[:, 3] = False
    truth[:, 3] = False  # a label that neither occurs nor is chosen
    found = SetMeasures(9)
    for part in torch.arange(80).split(30):
        found.update(chosen[part], truth[part])
    result = found.result()
    full = torch.nn.functional.pad(chosen, (0, 2))
    labels = [0, 1, 2, 4, 5, 6, 7]
    assert result.micro_f1 == pytest.approx(f1_score(truth, full, average="micro"))
    assert result.macro_f1 == pytest.approx(
        f1_score(truth, full, average="macro", labels=labels, zero_division=0)
    )
    assert result.exact == pytest.approx(
        np.mean([torch.equal(a, b) for a, b in zip(truth, full, strict=True)])
    )
    assert result.size == pytest.approx(full.sum().item() / 80)


@pytest.mark.parametrize("digits", [1, 6])
def test_average_precision_matches_scikit_learn(digits: int) -> None:
    random = np.random.default_rng(0)
    for _ in range(20):
        scores, observed = random.random(30).round(digits), random.random(30) < 0.2
        observed[3] = True
        assert average_precision(scores, observed) == pytest.approx(average_precision_score(observed, scores))


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    data = write_texts(folder / "train.csv", tagged_texts(200, seed=0))
    words = [
        "train",
        "multilabel",
        "--train",
        data,
        "--out",
        folder / "run",
        "--epochs",
        "6",
        "--hidden",
        "0",
    ]
    assert cli.main([str(word) for word in words]) == 0
    return folder / "run"


def predicted(run: Path, data: Path, rule: str) -> list[dict]:
    out = data.with_suffix(".jsonl")
    assert cli.main(["predict", str(run), "--data", str(data), "--out", str(out), "--rule", rule]) == 0
    return [json.loads(line) for line in out.read_text().splitlines()]


def test_the_report_and_predict_use_the_same_sets(run: Path, tmp_path: Path, capsys) -> None:
    new = [*tagged_texts(60, seed=1), ("pip dict", ["python", "fruit"])]
    data = write_texts(tmp_path / "new.csv", new)
    assert cli.main(["evaluate", str(run), "--data", str(data), "--out", str(tmp_path / "report")]) == 0
    printed = capsys.readouterr().out
    page = (tmp_path / "report" / "report.md").read_text()
    names = sorted({tag for _, tags in new for tag in tags})

    def matrix(rows: list[list[str]]) -> np.ndarray:
        return np.array([[name in row for name in names] for row in rows])

    truth = matrix([tags for _, tags in new])
    stored = json.loads((run / "calibration.json").read_text())["decisions"]
    chosen = {rule: matrix([row["labels"] for row in predicted(run, data, rule)]) for rule in RULES}
    for rule in RULES:
        line = next(line for line in page.splitlines() if line.startswith(f"| `{rule}` |"))
        expected = (
            f1_score(truth, chosen[rule], average="micro"),
            f1_score(truth, chosen[rule], average="macro", zero_division=0),
            (truth == chosen[rule]).all(1).mean(),
        )
        assert line.endswith(" | ".join(f"{100 * value:.2f}" for value in expected) + " |")
        assert f"{rule}{'*' * (rule == stored['rule'])} " in printed
    auto = matrix([row["labels"] for row in predicted(run, data, "auto")])
    assert np.array_equal(auto, chosen[stored["rule"]])
    assert f"Rule `{stored['rule']}`: " in capsys.readouterr().out
    # labels.csv has one line for each label, computed with the run's rule.
    with (tmp_path / "report" / "labels.csv").open(newline="") as file:
        table = {row["label"]: row for row in csv.DictReader(file)}
    assert sorted(table) == names
    supports = [int(row["support"]) for row in table.values()]
    assert supports == sorted(supports, reverse=True)
    ranked = [dict(zip(row["labels"], row["probabilities"], strict=True)) for row in every(run, data)]
    for place, name in enumerate(names):
        hits = (truth[:, place] & auto[:, place]).sum()
        assert int(table[name]["support"]) == truth[:, place].sum()
        assert int(table[name]["predicted"]) == auto[:, place].sum()
        assert float(table[name]["recall"]) == pytest.approx(hits / truth[:, place].sum(), abs=1e-6)
        if name == "fruit":  # unknown to the run
            assert table[name]["precision"] == table[name]["average_precision"] == ""
            continue
        assert float(table[name]["precision"]) == pytest.approx(hits / auto[:, place].sum(), abs=1e-6)
        expected_ap = average_precision_score(truth[:, place], [row[name] for row in ranked])
        assert float(table[name]["average_precision"]) == pytest.approx(expected_ap, abs=2e-3)
    assert f"| {next(iter(table))} | {supports[0]} |" in page


def every(run: Path, data: Path) -> list[dict]:
    out = data.with_suffix(".jsonl")
    assert cli.main(["predict", str(run), "--data", str(data), "--out", str(out), "--top", "6"]) == 0
    return [json.loads(line) for line in out.read_text().splitlines()]


def test_the_calibration_error_uses_ten_bins(run: Path, tmp_path: Path, capsys) -> None:
    new = tagged_texts(60, seed=2)
    data = write_texts(tmp_path / "new.csv", new)
    assert cli.main(["evaluate", str(run), "--data", str(data), "--out", str(tmp_path)]) == 0
    page = (tmp_path / "report.md").read_text()
    rows = every(run, data)
    for top, words in ((6, "over all labels"), (2, "over the top k labels of each sample (k = 2)")):
        p = np.concatenate([row["probabilities"][:top] for row in rows])
        right = np.concatenate(
            [
                [label in tags for label in row["labels"][:top]]
                for row, (_, tags) in zip(rows, new, strict=True)
            ]
        )
        bins = np.minimum((10 * p).astype(int), 9)
        error = sum(abs((p - right)[bins == place].sum()) for place in range(10)) / len(p)
        assert f"{100 * error:.2f}% {words}" in page


def test_the_rule_half_may_choose_no_label(run: Path, tmp_path: Path, capsys) -> None:
    stored = json.loads((run / "calibration.json").read_text())
    out = tmp_path / "run"
    shutil.copytree(run, out)
    (out / "calibration.json").write_text(json.dumps({**stored, "temperature": 1e6}))
    data = write_texts(tmp_path / "new.csv", tagged_texts(3, seed=1))
    rows = predicted(out, data, "half")
    assert [(row["labels"], row["probabilities"]) for row in rows] == [([], [])] * 3
    assert [len(row["labels"]) for row in predicted(out, data, "threshold")] == [1, 1, 1]


def test_bad_rules(run: Path, tmp_path: Path, capsys) -> None:
    data = write_texts(tmp_path / "new.csv", tagged_texts(3, seed=1))
    words = ["predict", run, "--data", data, "--rule"]
    assert "`--top` and `--rule` cannot be combined" in rejected(capsys, [*words, "half", "--top", 2])
    assert "`--rule` must be one of" in rejected(capsys, [*words, "best"])
    stored = tmp_path / "calibration.json"
    good = dataclasses.asdict(Decisions(weights=[1.0] * 7))
    for wrong, needle in (
        ({"threshold": "x"}, "`threshold` must be a number"),
        ({"threshold": float("nan")}, "a number that is not finite"),
        ({"rule": "best"}, "`rule` must be"),
        ({"weights": [1.0] * 3}, "`weights` must have length 7"),
        ({"weights": [1e300] * 7}, "and `weights` must be from -1e\\+09 to 1e\\+09"),
        ({"most": 0}, "`most` must be at least 1"),
    ):
        stored.write_text(json.dumps({"temperature": 1.0, "decisions": {**good, **wrong}}))
        with pytest.raises(BadInput, match=needle):
            decisions.stored(stored, 6)
    stored.write_text('{"temperature": 1.0}')
    with pytest.raises(BadInput, match="`decisions` must be an object"):
        decisions.stored(stored, 6)
