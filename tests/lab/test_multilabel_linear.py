"""The linear part of a multi-label model: its solution, its penalty, and its weight in the mixture."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file
from scipy import sparse

from tests.support.command_lines import made, rejected
from tests.support.tagged_texts import tagged_texts, write_texts
from torchlml_lab import cli
from torchlml_lab.data.labeled_rows import Columns, LabeledRows, label_matrix
from torchlml_lab.multilabel import linear, preparation, samples, training
from torchlml_lab.multilabel.losses import LabelLoss
from torchlml_lab.multilabel.model import LINEAR, MOST_INPUTS, LabelNetwork, load
from torchlml_lab.multilabel.samples import Batches, Data, label_lists
from torchlml_lab.multilabel.settings import MultilabelSettings


def drawn(rows: int, inputs: int, labels: int, seed: int = 0):
    """Return sparse inputs of norm 2, and labels that depend on them, with at least one label per row."""
    random = np.random.default_rng(seed)
    x = sparse.csr_array(sparse.random(rows, inputs, 0.1, random_state=seed, dtype=np.float32))
    x = sparse.csr_array(
        2 * x / np.maximum(np.sqrt(x.multiply(x).sum(axis=1)), 1e-9)[:, None], dtype=np.float32
    )
    scores = x @ random.normal(size=(inputs, labels)) + 0.3 * random.normal(size=(rows, labels))
    y = scores >= np.minimum(1, scores.max(axis=1))[:, None]
    return x, sparse.csr_array(y.astype(np.int8))


def skewed(rows: int, inputs: int, labels: int):
    """Return sparse inputs of norm 1, and labels that depend on them, with very different frequencies."""
    random = np.random.default_rng(0)
    x = sparse.csr_array(sparse.random(rows, inputs, 0.05, random_state=0, dtype=np.float32))
    x = sparse.csr_array(x / np.sqrt(x.multiply(x).sum(axis=1))[:, None], dtype=np.float32)
    scores = 6 * (x @ random.normal(size=(inputs, labels))) + 3 * random.normal(size=labels)
    y = random.random(scores.shape) < 1 / (1 + np.exp(8 - scores))
    y[np.arange(rows), scores.argmax(axis=1)] = True
    return x, sparse.csr_array(y.astype(np.int8))


def exact(x, y, penalty: float) -> np.ndarray:
    """Return the weights and bias of a ridge regression, from the normal equations in float64."""
    ones = np.hstack([x.toarray().astype(np.float64), np.ones((x.shape[0], 1))])
    target = y.toarray().astype(np.float64)
    mean = target.mean(axis=0)
    penalty *= (ones[:, :-1] ** 2).sum() / len(ones)
    found = np.linalg.solve(ones.T @ ones + penalty * np.eye(ones.shape[1]), ones.T @ (target - mean))
    found[-1] += mean
    return found


@pytest.mark.parametrize("inputs", [30, 200])  # fewer inputs than samples, and more
def test_the_path_has_the_solution_for_each_penalty(inputs, monkeypatch):
    monkeypatch.setattr(linear, "TOLERANCE", 1e-6)
    monkeypatch.setattr(linear, "MOST_STEPS", 500)
    x, y = drawn(80, inputs, 7)
    for penalty, part in zip((4.0, 0.25), linear.ridge_path(x, y, (4.0, 0.25)), strict=True):
        expected = exact(x, y, penalty)
        assert part.weight == pytest.approx(expected[:-1], abs=1e-4)
        assert part.bias == pytest.approx(expected[-1], abs=1e-4)
        scores = x.toarray() @ expected[:-1] + expected[-1]
        assert part.scores(x) == pytest.approx(scores, abs=1e-3)


def test_the_default_tolerance_is_close_to_the_solution():
    x, y = drawn(300, 500, 20)
    for penalty in (8.0, 0.5):
        expected = exact(x, y, penalty)
        found = linear.fit(x, y, penalty).scores(x)
        scores = x.toarray() @ expected[:-1] + expected[-1]
        assert np.abs(found - scores).max() < 0.05 * np.abs(scores).max()


def test_leading_eigenvectors_save_steps(monkeypatch):
    # Like words, these features have very different frequencies.
    random = np.random.default_rng(0)
    there = random.random((400, 600)) < 1 / np.arange(1, 601)
    x = sparse.csr_array(there / np.maximum(1, np.sqrt(there.sum(axis=1)))[:, None], dtype=np.float32)
    y = sparse.csr_array((random.random((400, 9)) < 0.2).astype(np.int8))
    columns, image = [], linear._image

    def counted(x, transposed, a):
        columns.append(a.shape[1])
        return image(x, transposed, a)

    monkeypatch.setattr(linear, "_image", counted)
    steps = {}
    for rank in (1, 100):
        columns.clear()
        monkeypatch.setattr(linear, "RANK", rank)
        linear.fit(x, y, 0.02)
        steps[rank] = columns.count(9)
    assert steps[100] < steps[1] / 2, steps


@pytest.mark.parametrize("held_out", [40, 400])  # with and without cross-validation
def test_penalty_and_gain_are_chosen_on_held_out_samples(held_out, monkeypatch):
    x, y = skewed(600 + held_out, 1000, 20)
    chosen = linear.choose(x[:600], y[:600], x[600:], y[600:])
    # Compute the quality of every choice from exact solutions. The quality is nDCG@5, computed by sorting.
    splits = (
        list(linear.folds(len(y.indptr) - 1)) if held_out == 40 else [(np.arange(600), np.arange(600, 1000))]
    )
    quality: dict[tuple[float, float], float] = {}
    for penalty in linear.PENALTIES:
        total: dict[float, list[float]] = {gain: [] for gain in linear.GAINS}
        for rest, others in splits:
            weights = exact(x[rest], y[rest], penalty)
            usual = y[rest].toarray().mean(axis=0)
            scores = x[others].toarray() @ weights[:-1] + weights[-1]
            for gain in linear.GAINS:
                total[gain] += ndcg_by_sorting(usual + gain * (scores - usual), y[others].toarray())
        quality |= {(penalty, gain): float(np.mean(values)) for gain, values in total.items()}
    assert quality[chosen.penalty, chosen.gain] > max(quality.values()) - 0.003
    assert max(quality.values()) - min(quality.values()) > 0.02  # the choice matters
    # The linear part is fitted without the validation samples.
    expected, usual = exact(x[:600], y[:600], chosen.penalty), y[:600].toarray().mean(axis=0)
    expected[:-1] *= chosen.gain
    expected[-1] = usual + chosen.gain * (expected[-1] - usual)
    assert np.abs(chosen.part.weight - expected[:-1]).max() < 0.05 * np.abs(expected).max()
    assert np.abs(chosen.part.bias - expected[-1]).max() < 0.05 * np.abs(expected[-1]).max()
    # A strong penalty shrinks the scores, so a gain above 1 is chosen.
    monkeypatch.setattr(linear, "PENALTIES", (16.0,))
    strong = linear.choose(x[:600], y[:600], x[600:], y[600:]).gain
    assert strong > 1
    assert quality[16.0, strong] > max(quality[16.0, gain] for gain in linear.GAINS) - 0.003


def test_an_earlier_linear_part_is_kept_unless_the_samples_improve_it():
    x, y = drawn(1000, 400, 12)
    held_out, final = linear.fit(x[:600], y[:600], 0.7), linear.fit(x[:700], y[:700], 0.7)
    start = linear.Start(held_out, final, complete=True, same_samples=False)
    # Fitting again on the same samples does not improve the earlier part, so the earlier part is kept.
    same = linear.choose(x[:600], y[:600], x[600:700], y[600:700], start)
    assert same.penalty == np.inf
    assert np.array_equal(same.part.weight, held_out.weight)
    # With a strong penalty, a second fit is better even on the same samples, but it would weaken the penalty
    # that was chosen for them. If the samples are known to be the same, the earlier part is kept.
    strong = linear.fit(x[:600], y[:600], 16.0), linear.fit(x[:700], y[:700], 16.0)
    for known, kept in ((False, False), (True, True)):
        again = linear.Start(*strong, complete=True, same_samples=known)
        found = linear.choose(x[:600], y[:600], x[600:700], y[600:700], again)
        assert (found.penalty == np.inf) == kept
    assert found.part is strong[0]
    # If the labels are permuted, the earlier part is wrong, so it is not kept.
    z = sparse.csr_array(y.toarray()[:, ::-1])
    other = linear.choose(x[:600], z[:600], x[600:700], z[600:700], start)
    assert other.penalty < np.inf
    assert (
        linear.ndcg(other.part.scores(x[700:]), z[700:])
        > linear.ndcg(held_out.scores(x[700:]), z[700:]) + 0.1
    )
    # An earlier part that lacks some of the labels is never kept.
    part = linear.choose(x[:600], y[:600], x[600:700], y[600:700], start._replace(complete=False))
    assert part.penalty < np.inf


def ndcg_by_sorting(scores, labels, k=5):
    found = []
    for one, true in zip(scores, labels, strict=True):
        gain = true[np.argsort(-one)[:k]] / np.log2(np.arange(2, k + 2))
        found.append(gain.sum() / (1 / np.log2(np.arange(2, 2 + min(k, true.sum())))).sum())
    return found


def test_folds_hold_out_every_row_once():
    held_out = [others for _, others in linear.folds(23)]
    assert sorted(np.concatenate(held_out).tolist()) == list(range(23))
    for rest, others in linear.folds(23):
        assert sorted([*rest.tolist(), *others.tolist()]) == list(range(23))


@pytest.mark.parametrize("loss", [LabelLoss("lml", "labels"), LabelLoss("bce")])
def test_the_scale_minimizes_the_loss(loss):
    x, y = drawn(400, 50, 8)
    scores = torch.from_numpy(linear.fit(x[:200], y[:200], 1.0).scores(x[200:])).double()
    lists = label_lists(y[200:])
    scale, shift = linear.fit_scale(loss, scores, lists)

    def value(scale: float, shift: float) -> float:
        return float(loss(scale * scores + shift, lists)) + linear.SCALE_PENALTY * scale

    best = value(scale, shift)
    grid = [
        value(a, b)
        for a in np.geomspace(0.1, 100, 61)
        for b in ([0] if shift == 0 else np.linspace(-9, 3, 41))
    ]
    assert best <= min(grid)
    assert best == pytest.approx(min(grid), abs=0.02)
    assert (shift == 0) == (loss.name == "lml")


def test_a_separable_problem_has_a_finite_scale():
    labels = sparse.csr_array(np.eye(6, dtype=np.int8)[np.arange(30) % 6])
    scale, _ = linear.fit_scale(
        LabelLoss("lml", "labels"), torch.from_numpy(labels.toarray()).double(), label_lists(labels)
    )
    assert 3 < scale < 30


def test_the_better_model_gets_the_larger_share():
    loss = LabelLoss("lml", "labels")
    random = np.random.default_rng(0)
    _, y = drawn(400, 50, 8)
    truth = y.toarray().astype(np.float32)
    good = truth + 0.4 * random.normal(size=truth.shape).astype(np.float32)
    bad = random.normal(size=truth.shape).astype(np.float32)
    # The fitted scale of a model that returns noise is near 0, so its share is arbitrary. Therefore, compare
    # its weight, which includes the scale.
    one = linear.fit_mixture(loss, good, torch.from_numpy(bad), y)
    assert one.share == 1
    other = linear.fit_mixture(loss, bad, torch.from_numpy(good), y)
    assert other.network > 30 * other.linear
    second = truth + 0.4 * random.normal(size=truth.shape).astype(np.float32)
    both = linear.fit_mixture(loss, good, torch.from_numpy(second), y)
    assert 0 < both.share < 1
    # Both models have similar scales, so the ratio of their weights is close to the ratio of their shares.
    assert both.linear / both.network == pytest.approx(both.share / (1 - both.share), rel=0.3)
    # If the models are identical, the linear part gets all the weight, because it is refitted on more
    # samples.
    assert linear.fit_mixture(loss, good, torch.from_numpy(good), y).share == 1


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_texts(tmp_path_factory.mktemp("texts") / "train.csv", tagged_texts(150, seed=0))


@pytest.fixture(scope="module")
def run(texts, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("run") / "run"
    return made(["train", "multilabel", "--train", str(texts), "--out", str(out), "--epochs", "3"])


def test_the_linear_part_is_refitted_on_all_samples(run, texts):
    trained = load(run)
    data = samples.read(MultilabelSettings(train=texts))
    prepared = trained.preparation
    assert set(prepared.words) >= set(" ".join(data.validation.texts or []).lower().split())
    x, v = (prepared.apply(part).inputs for part in (data.training, data.validation))
    penalty, gain, _ = linear.choose(x, data.training.labels, v, data.validation.labels)
    assert trained.held_out is not None
    assert trained.network.linear is not None
    both_labels = sparse.vstack([data.training.labels, data.validation.labels], format="csr")
    alone = exact(x, data.training.labels, penalty)
    everything = exact(sparse.vstack([x, v], format="csr"), both_labels, penalty)
    for weights, labels in ((alone, data.training.labels), (everything, both_labels)):
        usual = labels.toarray().mean(axis=0)
        weights[:-1] *= gain
        weights[-1] = usual + gain * (weights[-1] - usual)
    for part, expected in ((trained.held_out, alone), (trained.network.linear, everything)):
        assert np.abs(part.weight.numpy() - expected[:-1]).max() < 0.03 * np.abs(expected).max()
    assert np.abs(alone - everything).max() > 0.1 * np.abs(everything).max()
    # The logits are a weighted sum of the scores of both models.
    network, mixture = trained.network, trained.network.linear.mixture
    (both, _), (held_out, _) = next(trained.scores(v)), next(trained.for_validation().scores(v))
    network.linear = None
    (single, _) = next(trained.scores(v))
    for found, weights in ((both, everything), (held_out, alone)):
        scores = v.toarray() @ weights[:-1] + weights[-1]
        expected = mixture.linear * scores + mixture.network * single.numpy() + mixture.shift
        assert np.abs(found.numpy() - expected).max() < 0.1 * np.abs(expected).max()


def test_validation_metrics_use_the_held_out_part(run):
    """The final linear part is also fitted on the validation samples, so its metrics would be optimistic."""
    result = json.loads((run / "result.json").read_text())["validation"]
    line = next(line for line in (run / "report.md").read_text().splitlines() if line.startswith("| 5 |"))
    assert f"| {100 * result['ndcg@5']:.2f} (" in line


def test_a_given_validation_file_is_not_trained_on(texts, tmp_path):
    valid = write_texts(tmp_path / "valid.csv", tagged_texts(40, seed=5))
    out = tmp_path / "run"
    made(
        [
            "train",
            "multilabel",
            "--train",
            str(texts),
            "--valid",
            str(valid),
            "--out",
            str(out),
            "--epochs",
            "1",
        ]
    )
    stored = load_file(out / LINEAR)
    assert np.array_equal(stored["final.weight"], stored["held_out.weight"])


def test_a_network_alone_has_no_linear_part(texts, tmp_path):
    out = tmp_path / "run"
    words = ["train", "multilabel", "--train", str(texts), "--out", str(out), "--epochs", "1"]
    made([*words, "--model", "network"])
    assert not (out / LINEAR).exists()
    trained = load(out)
    assert trained.network.linear is None
    assert trained.for_validation() is trained


def test_the_chosen_model_is_printed(texts, tmp_path, capsys):
    words = ["train", "multilabel", "--train", str(texts), "--out", str(tmp_path / "run"), "--epochs", "1"]
    assert cli.main(words) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert re.search(r"The model is the sum of a linear part \(\d+% of the weight\) and a network", said)
    assert re.search(r"uses a penalty of [\d.]+ and a gain of [\d.]+ and was refitted on all samples\.", said)
    assert "The model is the sum of a linear part" in (tmp_path / "run" / "report.md").read_text()


def test_without_memory_for_the_linear_part_the_network_is_alone(texts, tmp_path, monkeypatch):
    monkeypatch.setattr(linear, "MOST_WEIGHTS", 10)
    settings = MultilabelSettings(train=texts)
    built = training.build_task(settings, samples.read(settings))
    assert built.linear is None
    assert (built.task.combine, built.task.refit) == (None, None)


@pytest.mark.parametrize("change", ["nan", "shape", "truncated", "missing"])
def test_a_damaged_linear_part_is_an_error(run, texts, tmp_path, capsys, change):
    out = tmp_path / "run"
    shutil.copytree(run, out)
    path = out / LINEAR
    weights = load_file(path)
    if change == "truncated":
        path.write_bytes(path.read_bytes()[:100])
    else:
        if change == "nan":
            weights["final.weight"][3, 1] = np.nan
        elif change == "shape":
            weights["final.weight"] = weights["final.weight"][1:]
        else:
            del weights["held_out.bias"]
        save_file(weights, path, {"mixture": '{"linear": 1, "network": 1, "shift": 0, "share": 1}'})
    said = rejected(capsys, ["predict", str(out), "--data", str(texts)])
    assert f"`{path}` is damaged or belongs to another model" in said


def test_the_network_uses_the_most_frequent_inputs():
    inputs = MOST_INPUTS + 50
    rows = 60
    # Input i occurs in every row if i is at least 50, and in one row otherwise.
    often = [list(range(50, inputs)) for _ in range(rows)]
    for i in range(50):
        often[i].insert(0, i)
    starts = np.cumsum([0, *map(len, often)])
    columns = np.concatenate(often)
    features = sparse.csr_array((np.ones(len(columns), np.float32), columns, starts), shape=(rows, inputs))
    labels, names = label_matrix([[str(i % 3), str((i + 1) % 3)] for i in range(rows)])
    whole = LabeledRows(features, labels, names)
    data = Data(whole.take(np.arange(55)), whole.take(np.arange(55, 60)), None, None, [])
    built = training.build_task(MultilabelSettings(train=Path("x"), hidden=4), data)
    network = built.task.model
    assert isinstance(network, LabelNetwork)
    assert network.place is not None
    assert network.place[:50].tolist() == [-1] * 50
    assert network.place[50:].tolist() == list(range(MOST_INPUTS))
    # The logits do not depend on the other inputs, except through the linear part.
    network.linear = None
    network.eval()
    x = built.prepared.apply(whole.take(np.arange(2))).inputs
    with torch.inference_mode():
        found = network(Batches(x, x[:, :0]).__getitems__([0, 1]).inputs)
    used = x.toarray()[:, 50:]
    hidden = np.maximum(0, used @ network.first.weight.detach().numpy() + network.first.bias.detach().numpy())
    assert network.last is not None
    expected = hidden @ network.last.weight.detach().numpy().T + network.last.bias.detach().numpy()
    assert found.numpy() == pytest.approx(expected, abs=1e-4)


def test_unknown_words_have_known_pieces():
    labels, names = label_matrix([["x"], ["y"], ["x"], ["y"]])
    texts = ["walking far", "eating well", "walking on", "eating out"]
    rows = LabeledRows(sparse.csr_array((4, 0), dtype=np.float32), labels, names, texts, ())
    fitted = preparation.fit(rows, Columns(("text",), (), "tags", ","), 1)
    new = LabeledRows(sparse.csr_array((1, 0), dtype=np.float32), labels[:1], names, ["walker"], ())
    found = fitted.apply(new).inputs.toarray()[0]
    pieces = len(fitted.words) + len(fitted.pairs) + np.flatnonzero(np.isin(fitted.pieces, [" wal", "alk"]))
    assert len(pieces) == 2
    assert (found[pieces] > 0).all()
    assert not found[: len(fitted.words)].any()


def test_rare_features_have_more_weight():
    labels, names = label_matrix([["x"], ["y"], ["x"], ["y"]])
    dense = np.array([[2, 1, 0], [2, 0, 0], [1, 0, 3], [2, 0, 0]], dtype=np.float32)
    rows = LabeledRows(sparse.csr_array(dense), labels, names)
    found = preparation.fit(rows, None, 1, rare=True).apply(rows).inputs.toarray()
    idf = np.log(5 / (1 + np.array([4, 1, 1]))) + 1
    expected = dense / [2, 1, 3] * np.sqrt(idf)
    assert found == pytest.approx(expected / np.linalg.norm(expected, axis=1, keepdims=True), abs=1e-6)
