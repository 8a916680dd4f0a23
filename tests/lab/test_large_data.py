"""Large data: sparse updates, inputs in blocks, forecasts, several files, and the training benchmark."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from scipy import sparse
from torch import nn

from tests.support import fresh
from tests.support.processes import output, start_two
from tests.support.tagged_texts import tagged_texts, write_texts
from torchlml_lab import cli, load_run
from torchlml_lab.bench import timing
from torchlml_lab.bench.scale import TRAINING, write_samples
from torchlml_lab.data.labeled_rows import Columns, LabeledRows, label_matrix
from torchlml_lab.engine import loop
from torchlml_lab.engine.loop import RowAdam
from torchlml_lab.multilabel import linear, model, preparation, training
from torchlml_lab.multilabel.model import LabelNetwork, SparseLinear, copy_weights, row_slices
from torchlml_lab.multilabel.samples import Inputs, read, read_samples
from torchlml_lab.multilabel.settings import MultilabelSettings


def trained(build) -> list[torch.Tensor]:
    """Train an embedding with sparse gradients and a bias with dense gradients. Rows 15–19 are never used."""
    torch.manual_seed(0)
    weight, bias = nn.Parameter(torch.randn(20, 4)), nn.Parameter(torch.zeros(4))
    optimizers = build(weight, bias)
    rows = torch.randint(15, (12, 6))  # with duplicates
    for step in range(12):
        loss = (nn.functional.embedding(rows[step], weight, sparse=True) + bias).square().sum()
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
    return [weight.detach(), bias.detach()]


def test_row_adam_equals_the_sparse_and_the_dense_optimizer_of_torch() -> None:
    found = trained(lambda weight, bias: [RowAdam([weight, bias], lr=0.1)])
    expected = trained(
        lambda weight, bias: [torch.optim.SparseAdam([weight], lr=0.1), torch.optim.Adam([bias], lr=0.1)]
    )
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)
    before, _ = trained(lambda weight, bias: [])
    assert not torch.equal(found[0][:15], before[:15])
    assert torch.equal(found[0][15:], before[15:])


def test_the_sparse_gradient_equals_the_dense_gradient() -> None:
    rows = Inputs(torch.tensor([5, 1, 5, 0, 1]), torch.randn(5), torch.tensor([0, 2, 2, 5]))
    layer, factor = SparseLinear(8, 3), torch.randn(3, 3)
    gradients = []
    for row_sparse in (False, True):
        layer.row_sparse = row_sparse
        layer.zero_grad()
        (layer(rows) * factor).sum().backward()
        assert layer.weight.grad is not None
        gradients.append(layer.weight.grad)
    dense, some = gradients
    assert some.is_sparse
    assert some.coalesce().indices().tolist() == [[0, 1, 5]]
    torch.testing.assert_close(some.to_dense(), dense)
    matrix = torch.zeros(3, 8, dtype=torch.float64)
    matrix[0, [5, 1]], matrix[2, [5, 0, 1]] = rows.values[:2].double(), rows.values[2:].double()
    torch.testing.assert_close(dense, (matrix.T @ factor.double()).float())
    torch.testing.assert_close(layer(rows), (matrix @ layer.weight.double()).float() + layer.bias)
    empty = Inputs(torch.empty(0, dtype=torch.int64), torch.empty(0), torch.zeros(3, dtype=torch.int64))
    layer.zero_grad()
    layer(empty).sum().backward()
    assert layer.weight.grad is not None
    assert layer.weight.grad.to_dense().count_nonzero() == 0


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_texts(tmp_path_factory.mktemp("texts") / "train.csv", tagged_texts(300, seed=0))


def score(run: Path) -> float:
    found: float = json.loads((run / "result.json").read_text())["validation"]["ndcg@5"]
    return found


def test_training_with_sparse_updates(texts, tmp_path, monkeypatch, capsys) -> None:
    words = ["train", "multilabel", "--train", str(texts), "--model", "network", "--epochs", "4"]
    assert cli.main([*words, "--out", str(tmp_path / "dense")]) == 0
    monkeypatch.setattr(training, "MOST_DENSE", 0)
    assert cli.main([*words, "--out", str(tmp_path / "rows")]) == 0
    assert score(tmp_path / "rows") == pytest.approx(score(tmp_path / "dense"), abs=0.05)
    # A checkpoint contains the optimizer's moments, so a resumed run gives the same result.
    assert cli.main([*words, "--out", str(tmp_path / "part"), "--epochs", "2"]) == 0
    settings = json.loads((tmp_path / "part" / "settings.json").read_text())
    (tmp_path / "part" / "settings.json").write_text(json.dumps(settings | {"epochs": 4}))
    (tmp_path / "part" / "result.json").unlink()
    assert cli.main(["train", "multilabel", "--resume", str(tmp_path / "part")]) == 0
    assert score(tmp_path / "part") == score(tmp_path / "rows")


def test_two_processes_use_dense_gradients(texts, tmp_path, capsys) -> None:
    words = ["train", "multilabel", "--train", str(texts), "--model", "network", "--epochs", "3", "--cpu"]
    output(*start_two([*words, "--out", str(tmp_path / "two")], program=sparse_program))
    assert cli.main([*words, "--out", str(tmp_path / "one")]) == 0
    assert score(tmp_path / "two") == pytest.approx(score(tmp_path / "one"), abs=0.05)


def sparse_program(words) -> int:
    """Run the command line with a limit so low that a single process would use sparse gradients."""
    vars(training)["MOST_DENSE"] = 0
    return cli.main(words)


def text_rows(count: int) -> LabeledRows:
    random = np.random.default_rng(0)
    texts = [
        " ".join(f"w{min(199, int(place))}" for place in random.exponential(40, random.integers(0, 12)))
        for _ in range(count)
    ]
    labels, names = label_matrix([[str(i % 3)] for i in range(count)])
    return LabeledRows(sparse.csr_array((count, 0), dtype=np.float32), labels, names, texts, ())


def test_texts_in_blocks_give_the_same_inputs(monkeypatch) -> None:
    rows, columns = text_rows(300), Columns(("text",), (), ("tags",), ",")
    monkeypatch.setattr(preparation, "MOST_TERMS", 150)  # so low that ties must be broken
    whole = preparation.fit(rows, columns, 1)
    inputs = whole.apply(rows)
    monkeypatch.setattr(preparation, "ROWS", 64)
    monkeypatch.setattr(preparation, "LETTERS", 700)
    slices = list(preparation._slices(300, rows.texts))
    assert len(slices) > 300 // 64 + 1  # both limits apply
    assert [row for one in slices for row in range(one.start, one.stop)] == list(range(300))
    parts = preparation.fit(rows.take(np.arange(200)), columns, 1, rows.take(np.arange(200, 300)))
    for name in ("words", "pairs", "pieces", "idf"):
        assert getattr(parts, name) == getattr(whole, name)
    found = whole.apply(rows)
    assert (found.unknown, found.empty) == (inputs.unknown, inputs.empty)
    np.testing.assert_allclose(found.inputs.toarray(), inputs.inputs.toarray(), atol=1e-7)
    # Inputs that would need too much memory are computed one batch at a time.
    assert whole.apply_to_many(rows).shape == found.inputs.shape
    monkeypatch.setattr(preparation, "MOST_BYTES", 100)
    later = whole.apply_to_many(rows)
    assert isinstance(later, preparation.LaterInputs)
    chosen = np.array([250, 3, 77])
    np.testing.assert_allclose(later[chosen].toarray(), inputs.inputs[chosen].toarray(), atol=1e-7)


def test_sparse_features_in_blocks_give_the_same_inputs(tmp_path, monkeypatch) -> None:
    write_samples(tmp_path / "a.svm", 400, 5, 50)
    rows, _ = read_samples(tmp_path / "a.svm", "--train")
    whole = preparation.fit(rows, None, 1, rare=True)
    dense, features = rows.features.toarray(), np.array(whole.features)
    frequency = (dense != 0).sum(0)[features]
    rarity = np.sqrt(np.log(401 / (1 + frequency)) + 1)
    expected = dense[:, features] / (abs(dense).max(0)[features] / rarity)
    expected /= np.linalg.norm(expected, axis=1, keepdims=True)
    monkeypatch.setattr(preparation, "ROWS", 64)
    monkeypatch.setattr(preparation, "_ENTRIES", 100)
    parts = preparation.fit(rows.take(np.arange(300)), None, 1, rows.take(np.arange(300, 400)), rare=True)
    assert (parts.features, parts.scales) == (whole.features, whole.scales)
    np.testing.assert_allclose(parts.apply(rows).inputs.toarray(), expected, rtol=1e-5)


def test_training_on_texts_that_do_not_fit_into_memory(texts, tmp_path, monkeypatch, capsys) -> None:
    words = ["train", "multilabel", "--train", str(texts), "--model", "network", "--epochs", "3"]
    assert cli.main([*words, "--out", str(tmp_path / "stored")]) == 0
    monkeypatch.setattr(preparation, "MOST_BYTES", 100)
    assert cli.main([*words, "--out", str(tmp_path / "later")]) == 0
    assert score(tmp_path / "later") == pytest.approx(score(tmp_path / "stored"), abs=1e-4)


def test_without_a_linear_part_the_network_uses_all_inputs(tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.setattr(model, "MOST_INPUTS", 50)
    monkeypatch.setattr(linear, "MOST_SCORES", 100 * 8)  # enough for the first file only
    sizes = {"both": 90, "alone": 300}
    files = {name: write_texts(tmp_path / f"{name}.csv", tagged_texts(sizes[name], seed=0)) for name in sizes}

    def train(data: str, out: str, *more: str) -> model.TrainedLabels:
        words = ["train", "multilabel", "--train", str(files[data]), "--out", str(tmp_path / out)]
        assert cli.main([*words, "--epochs", "2", *more]) == 0
        return model.load(tmp_path / out)

    # A run without a linear part can continue a run that has one, and vice versa.
    for run in (train("both", "both"), train("both", "both-2", "--continue-from", str(tmp_path / "both"))):
        assert (len(run.network.first.weight), run.network.linear is None) == (50, False)
    larger = ("alone", "alone-2", "--continue-from", str(tmp_path / "both"))
    for run in (train("alone", "alone"), train(*larger)):
        assert len(run.network.first.weight) == run.preparation.inputs > 50
        assert run.network.linear is None
    run = train("both", "both-3", "--continue-from", str(tmp_path / "alone"))
    assert (len(run.network.first.weight), run.network.linear is None) == (50, False)


def test_weights_are_copied_by_input() -> None:
    every, some = LabelNetwork(6, 3, 4, 0.0), LabelNetwork(6, 3, 4, 0.0, most=2)
    assert some.place is not None
    some.place[torch.tensor([4, 1])] = torch.arange(2)
    before = every.first.weight.detach().clone()
    copy_weights(every, some)
    assert torch.equal(every.first.weight[[4, 1]], some.first.weight)
    assert torch.equal(every.first.weight[[0, 2, 3, 5]], before[[0, 2, 3, 5]])
    other = LabelNetwork(6, 5, 4, 0.0, most=2)
    assert other.place is not None
    assert other.last is not None
    assert every.last is not None
    other.place[torch.tensor([0, 4])] = torch.arange(2)
    copy_weights(other, every)
    assert torch.equal(other.first.weight, every.first.weight[[0, 4]])
    assert torch.equal(other.last.weight[:3], every.last.weight)
    copy_weights(other, some)
    assert torch.equal(other.place, some.place)
    assert torch.equal(other.first.weight, some.first.weight)


def test_slices_of_rows_limit_the_number_of_logits() -> None:
    for rows, labels, size in ((1300, 10, 512), (100, 10**6, 16), (3, 10**9, 1)):
        slices = row_slices(rows, labels)
        assert [row for one in slices for row in range(one.start, one.stop)] == list(range(rows))
        assert max(one.stop - one.start for one in slices) == size


def sparse_task(path: Path, **more) -> loop.Task:
    settings = MultilabelSettings(train=path, model="network", cpu=True, **more)
    return training.build_task(settings, read(settings)).task


@pytest.mark.parametrize("row_sparse", [False, True])
def test_the_forecast_changes_neither_weights_nor_optimizer(tmp_path, monkeypatch, row_sparse: bool) -> None:
    write_samples(tmp_path / "a.svm", 4000, 500, 20_000)
    monkeypatch.setattr(training, "MOST_DENSE", 0 if row_sparse else 10**9)
    task = sparse_task(tmp_path / "a.svm")
    weights = {name: one.clone() for name, one in task.model.state_dict().items()}
    assert loop.needs(task, 128).step > 0
    assert all(torch.equal(one, weights[name]) for name, one in task.model.state_dict().items())
    assert not task.optimizer.state


def memory_of_training(path: Path) -> tuple[float, float, int]:
    """Return the forecast memory, the memory that an epoch needs, and the size of the weights, in bytes."""
    write_samples(path, 4000, 500, 30_000)
    before = loop._memory_bytes("VmRSS")
    task = sparse_task(path, hidden=1024)
    forecast = loop.needs(task, 128).memory - before
    data: Any = task.training
    order = list(loop.EpochBatches(640, 128, 0, shuffle=True))

    def train() -> None:
        loop.train_epoch(task.model, task.optimizer, task.loss, map(data.__getitems__, order))
        task.optimizer.state.clear()
        task.model.zero_grad()

    def evaluate() -> None:
        held_out: Any = task.held_out["validation"]
        with torch.no_grad():
            batch = held_out.__getitems__(range(len(held_out)))
            task.measure(task.model.eval(), [batch], Accelerator(cpu=True))

    needed = max(map(timing.added_bytes, (train, evaluate))) + loop._memory_bytes("VmRSS") - before
    return forecast, needed, sum(4 * parameter.numel() for parameter in task.model.parameters())


@pytest.mark.skipif(not timing.measurable(), reason="measuring memory requires Linux with the GNU C library")
@pytest.mark.parametrize("most_dense", [0, 10**9])
def test_the_memory_forecast_is_accurate(tmp_path, most_dense: int) -> None:
    # Measure in a new process, because this one would reuse memory freed by earlier tests.
    code = """if True:
        import sys
        from pathlib import Path
        from tests.lab.test_large_data import memory_of_training, training
        training.MOST_DENSE = int(sys.argv[2])
        print(*memory_of_training(Path(sys.argv[1])))
        """
    result = fresh.run(code, str(tmp_path / "a.svm"), str(most_dense), OMP_NUM_THREADS="1")
    assert result.returncode == 0, result.stderr
    forecast, needed, weights = map(float, result.stdout.split()[-3:])
    assert forecast > 2.5 * weights
    assert needed / 1.25 < forecast < 1.25 * needed


def test_several_files_on_the_command_line(tmp_path, capsys) -> None:
    rows = tagged_texts(240, seed=0)
    folder = tmp_path / "parts"
    folder.mkdir()
    for number in range(3):
        write_texts(folder / f"part-{number}.csv", rows[80 * number : 80 * number + 80])
    whole = write_texts(tmp_path / "whole.csv", rows)
    files = [str(folder / f"part-{number}.csv") for number in range(3)]
    results = []
    for name, given in {"one": [str(whole)], "pattern": [str(folder / "*.csv")], "files": files}.items():
        words = ["train", "multilabel", "--train", *given, "--out", str(tmp_path / name), "--epochs", "2"]
        assert cli.main(words) == 0
        results.append((tmp_path / name / "metrics.jsonl").read_bytes())
    assert results[0] == results[1] == results[2]
    stored = json.loads((tmp_path / "files" / "settings.json").read_text())["train"]
    assert stored == files
    capsys.readouterr()
    # `evaluate` and `--resume` read the stored paths, and `predict --data` also accepts several files.
    for name in ("pattern", "files"):
        assert cli.main(["evaluate", str(tmp_path / name)]) == 0
        assert cli.main(["train", "multilabel", "--resume", str(tmp_path / name)]) == 0
    assert f"{files[0]} and 2 more" in (tmp_path / "files" / "report.md").read_text()
    assert (
        cli.main(["predict", str(tmp_path / "one"), "--data", *files, "--out", str(tmp_path / "a.csv")]) == 0
    )
    with (tmp_path / "a.csv").open() as file:
        assert len({line["row"] for line in csv.DictReader(file)}) == 240
    Path(files[1]).unlink()
    assert cli.main(["evaluate", str(tmp_path / "files")]) == 2
    assert f"`--train {files[1]}`, which no longer exists" in capsys.readouterr().err
    assert load_run(tmp_path / "one").predict(["python pandas"])


def test_prediction_does_not_load_the_metrics() -> None:
    program = "import sys, torchlml_lab.multilabel.prediction; print('torchmetrics' in sys.modules)"
    assert fresh.run(program).stdout == "False\n"


def test_the_benchmark_of_training(tmp_path, capsys) -> None:
    path = tmp_path / "training.csv"
    words = ["bench", "training", "--csv", str(path), "--samples", "300", "--labels", "20", "5000"]
    words += ["--features", "1000", "--seconds", "0.2", "--threads", "1", "--processes", "1"]
    assert cli.main(words) == 0
    (row,) = TRAINING.read(path, "--csv")  # 5000 labels are skipped, because 300 samples are too few
    assert (row.samples, row.labels, row.processes, row.threads) == (300, 20, 1, 1)
    assert row.epoch_seconds == pytest.approx(300 / row.samples_per_second, abs=0.06)
    assert row.memory_mb > 100
    written = path.stat().st_mtime_ns
    assert cli.main(words) == 0  # finished measurements are not repeated
    assert path.stat().st_mtime_ns == written
    assert cli.main([*words, "--seconds", "0"]) == 2
    assert "`--seconds` must be positive, but it is 0.0" in capsys.readouterr().err


def test_the_sparse_product_of_the_linear_part() -> None:
    random = np.random.default_rng(0)
    for rows, columns, density in ((40, 30, 0.2), (5, 4, 0.0), (3, 0, 0.0), (0, 4, 0.0)):
        dense = np.where(random.random((rows, columns)) < density, random.normal(size=(rows, columns)), 0)
        other = random.normal(size=(columns, 6)).astype(np.float32)
        matrix = sparse.csr_array(dense.astype(np.float32))
        expected = dense.astype(np.float32).astype(np.float64) @ other
        np.testing.assert_allclose(linear.product(matrix, other), expected, rtol=1e-5, atol=1e-6)
        assert linear.product(matrix, np.asfortranarray(other)).shape == (rows, 6)


def test_metrics_do_not_depend_on_how_many_scores_are_measured_at_once(tmp_path, monkeypatch):
    write_samples(tmp_path / "samples.svm", 300, 40, 100)
    settings = MultilabelSettings(train=tmp_path / "samples.svm", cpu=True)
    task = training.build_task(settings, read(settings)).task
    held_out: Any = task.held_out["validation"]
    batch = held_out.__getitems__(range(90))
    rows, update = [], model.Measures.update

    def counted(self, scores, labels):
        rows.append(len(scores))
        update(self, scores, labels)

    monkeypatch.setattr(model.Measures, "update", counted)
    found = []
    for most in (2**22, 1000):  # all samples at once, and 25 at a time
        monkeypatch.setattr(model, "MEASURED", most)
        with torch.no_grad():
            found.append(task.measure(task.model.eval(), [batch], Accelerator(cpu=True)))
    assert rows == [90, 25, 25, 25, 15]
    assert found[1] == pytest.approx(found[0], rel=1e-5)
