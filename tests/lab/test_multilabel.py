"""Training on user data: from files to predicted labels, including killed runs and bad input."""

from __future__ import annotations

import csv
import dataclasses
import json
import re
import shutil
import time
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from scipy import sparse
from sklearn.feature_extraction.text import TfidfVectorizer

import torchlml
from tests.support.command_lines import made, rejected
from tests.support.processes import output, start, start_two
from tests.support.tagged_texts import NOTHING, WORDS, tagged_texts, write_texts
from torchlml_lab import cli
from torchlml_lab.cli_errors import BadInput
from torchlml_lab.data.labeled_rows import Columns, LabeledRows, label_matrix
from torchlml_lab.engine.run_directory import BestEpoch
from torchlml_lab.multilabel import model, preparation, report, samples, training
from torchlml_lab.multilabel.report import best_temperature
from torchlml_lab.multilabel.samples import read_labeled
from torchlml_lab.multilabel.settings import MultilabelSettings


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_texts(tmp_path_factory.mktemp("texts") / "train.csv", tagged_texts(300, seed=0))


@pytest.fixture(scope="module")
def run(texts: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A run with default settings, and its printed output."""
    out = tmp_path_factory.mktemp("run") / "run"
    return out, output(start(["train", "multilabel", "--train", str(texts), "--out", str(out)]))[0]


def test_the_report_of_training_reads_no_file_again(texts, tmp_path, capsys, monkeypatch):
    read: list[Path] = []
    loaded: list[Path] = []

    def counted(path, *others, **more):
        read.append(path)
        return read_labeled(path, *others, **more)

    monkeypatch.setattr(samples, "read_labeled", counted)
    monkeypatch.setattr(BestEpoch, "load", lambda self, model: loaded.append(self.weights))
    out = tmp_path / "run"
    assert cli.main(["train", "multilabel", "--train", str(texts), "--out", str(out), "--epochs", "3"]) == 0
    assert (read, loaded) == ([texts], [])


def test_the_report_of_training_equals_that_of_evaluate(texts, tmp_path, capsys):
    # In bfloat16, accelerate wraps the network, and the report must use the unwrapped network.
    out = tmp_path / "run"
    words = ["train", "multilabel", "--train", str(texts), "--out", str(out), "--epochs", "3"]
    printed = output(start([*words, "--mixed-precision", "bf16", "--cpu"]))[0]
    report = (out / "report.md").read_text()
    # `evaluate` loads the run from its directory.
    assert cli.main(["evaluate", str(out)]) == 0
    table = capsys.readouterr().out.splitlines()[:-1]
    assert printed.splitlines()[-len(table) - 1 : -1] == table
    assert (out / "report.md").read_text() == report


def predict(run: Path, data: Path, out: Path, *more: str) -> list[dict]:
    assert cli.main(["predict", str(run), "--data", str(data), "--out", str(out), *more]) == 0
    return [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()]


def test_from_a_csv_to_the_best_tags_in_two_commands(run, tmp_path, capsys):
    out, printed = run
    assert "200 training samples have 1.6 of 6 labels on average. 100 more samples are held out" in printed
    assert "Columns: texts from `text`, labels from `tags`, separated by ';'." in printed
    assert "Training with the loss `lml` and each sample's number of labels as k." in printed
    mean = re.search(r"k = 2, the mean number of labels per .* \((1\.\d\d)\) rounded", printed)
    assert mean is not None
    counts = json.loads((out / "preparation.json").read_text())["counts"]
    assert float(mean[1]) == pytest.approx(sum(counts) / 200, abs=0.0051)
    new = tagged_texts(40, seed=1)
    data = write_texts(tmp_path / "new.csv", new)
    rows = predict(out, data, tmp_path / "out.jsonl", "--top", "6")
    table = capsys.readouterr().out
    assert "The table shows 20 of 40 samples." in table
    assert "P(label in top k), k = 2" in table
    assert f"({mean[1]}) rounded to an integer" in " ".join(table.split())
    assert rows[0]["labels"][0] in table
    right = [row["labels"][0] in tags for row, (_, tags) in zip(rows, new, strict=True)]
    assert np.mean(right) > 0.9
    for number, row in enumerate(rows, 1):
        assert row["row"] == number
        assert sorted(row["labels"]) == sorted(WORDS)
        assert row["probabilities"] == sorted(row["probabilities"], reverse=True)
        assert sum(row["probabilities"]) == pytest.approx(2, abs=1e-4)  # P(label in top 2)
    # The output may also be a CSV file, and new samples need no tags.
    data.write_text("text\n" + "\n".join(text for text, _ in new) + "\n")
    assert (
        cli.main(["predict", str(out), "--data", str(data), "--top", "2", "--out", str(tmp_path / "o.csv")])
        == 0
    )
    lines = (tmp_path / "o.csv").read_text().splitlines()
    assert lines[0] == "row,rank,label,probability"
    assert lines[1] == f"1,1,{rows[0]['labels'][0]},{rows[0]['probabilities'][0]:.6f}"
    assert len(lines) == 81


def test_a_run_has_a_report_and_ends_early(run):
    out, printed = run
    assert (out / "report.png").read_bytes().startswith(b"\x89PNG")
    page = (out / "report.md").read_text()
    assert "| k | P@k | nDCG@k | PSP@k | R@k |" in page
    assert "on 100 validation samples.**" in page
    result = json.loads((out / "result.json").read_text())
    assert result["test"] == {}
    assert result["validation"]["precision@1"] > 0.9
    epochs = json.loads((out / "state.json").read_text())["epoch"]
    assert epochs < 200
    assert printed.count("epoch ") >= epochs


@pytest.mark.parametrize(
    ("k", "mean", "said"),
    [
        (2, 2.0, "the mean number of labels per training sample. To"),
        (1, 1.4, "sample (1.40) rounded to an integer. To"),
        (1, 0.2, "sample (0.20) rounded to an integer from 1 to n - 1, where n is the number of labels. To"),
    ],
)
def test_the_origin_of_k_is_explained(k, mean, said):
    assert f"Predictions use k = {k}, " in model.origin_of_k(None, k, mean)
    assert said in model.origin_of_k(None, k, mean)


def test_evaluate_other_samples(run, tmp_path, capsys):
    new = [*tagged_texts(50, seed=2), ("a pip of a new kind", ["python", "fruit"]), ("no tags", [])]
    data = write_texts(tmp_path / "new.csv", new)
    assert cli.main(["evaluate", str(run[0]), "--data", str(data), "--out", str(tmp_path / "report")]) == 0
    said = capsys.readouterr().out
    assert "1 sample without labels was skipped" in said
    assert "1 label does not occur in the training data (`fruit`) and cannot be predicted" in said
    page = (tmp_path / "report" / "report.md").read_text()
    # Compute the metrics from the output of `predict`. The unknown label `fruit` lowers the recall.
    found = predict(run[0], data, tmp_path / "out.jsonl", "--top", "3")[:-1]
    hits = [[label in tags for label in row["labels"]] for row, (_, tags) in zip(found, new, strict=False)]
    precision = 100 * np.mean(hits)
    recall = 100 * np.mean([sum(row) / len(tags) for row, (_, tags) in zip(hits, new, strict=False)])
    line = next(line for line in page.splitlines() if line.startswith("| 3 |"))
    assert f"| {precision:.2f} (" in line
    assert f"| {recall:.2f} (" in line
    assert (run[0] / "report.md").read_text() != page  # the run keeps its own report


@pytest.fixture(scope="module")
def flags(tmp_path_factory) -> Path:
    """A table with a 0/1 column for each tag. Two thirds of the samples have no tag."""
    path = tmp_path_factory.mktemp("flags") / "train.csv"
    rows = [(text, tags) for text, tags in tagged_texts(150, seed=0)] + untagged(300, seed=1)
    return write_flags(path, rows)


def untagged(count: int, seed: int) -> list[tuple[str, list[str]]]:
    random = np.random.default_rng(seed)
    return [(" ".join(random.choice(NOTHING.split(), 15)), []) for _ in range(count)]


def write_flags(path: Path, rows: list[tuple[str, list[str]]]) -> Path:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(("comment", *WORDS))
        writer.writerows((text, *(int(tag in tags) for tag in WORDS)) for text, tags in rows)
    return path


def test_samples_without_labels_are_examples_of_no_label(flags, tmp_path, capsys):
    out = tmp_path / "run"
    words = ["train", "multilabel", "--train", str(flags), "--out", str(out), "--epochs", "5"]
    assert cli.main(words) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "300 of 450 samples have no labels and are kept as examples to which no label applies." in said
    assert "Training with the loss `bce`. It replaces `lml`, which needs at least one label per" in said
    assert json.loads((out / "settings.json").read_text())["loss"] == "bce"
    calibration = json.loads((out / "calibration.json").read_text())
    assert calibration["decisions"]["least"] == 0 or calibration["decisions"]["rule"] == "half"
    new = tagged_texts(60, seed=5) + untagged(60, seed=6)
    found = predict(out, write_flags(tmp_path / "new.csv", new), tmp_path / "out.jsonl", "--rule", "auto")
    right = [set(row["labels"]) == set(tags) for row, (_, tags) in zip(found, new, strict=True)]
    assert np.mean(right[:60]) > 0.7
    assert np.mean(right[60:]) > 0.9
    # The set metrics include samples without labels.
    capsys.readouterr()
    assert (
        cli.main(["evaluate", str(out), "--data", str(tmp_path / "new.csv"), "--out", str(tmp_path / "r")])
        == 0
    )
    assert "skipped" not in capsys.readouterr().out
    page = (tmp_path / "r" / "report.md").read_text()
    assert f"{100 * np.mean(right):.1f}% of the sets are exactly right" in page
    # The finished run can be evaluated again, and `--resume` accepts it.
    assert cli.main(["evaluate", str(out)]) == 0
    assert cli.main(["train", "multilabel", "--resume", str(out)]) == 0


def test_samples_without_labels_are_skipped_on_request_or_if_ambiguous(flags, tmp_path, capsys):
    words = ["train", "multilabel", "--out", str(tmp_path / "run"), "--epochs", "1", "--train"]
    assert cli.main([*words, str(flags), "--unlabeled", "skip"]) == 0
    said = capsys.readouterr().out
    assert "300 of 450 samples have no labels and were skipped." in said
    assert "Training with the loss `lml`" in said
    # In a column of tags, an empty cell may be a missing value.
    rows = tagged_texts(60, seed=0) + untagged(30, seed=1)
    data = write_texts(tmp_path / "tags.csv", rows)
    words[3] = str(tmp_path / "tags")
    assert cli.main([*words, str(data)]) == 0
    said = capsys.readouterr().out
    assert "30 of 90 samples have no labels and were skipped. Use `--unlabeled keep` to include such" in said
    words[3] = str(tmp_path / "kept")
    assert cli.main([*words, str(data), "--unlabeled", "keep"]) == 0
    assert json.loads((tmp_path / "kept" / "preparation.json").read_text())["rows"] == 60


def test_samples_with_and_without_labels_are_split_alike():
    lists = [["x"] if i % 20 == 3 else [] for i in range(1000)]
    labels, names = label_matrix(lists)
    features = sparse.csr_array(np.arange(1000, dtype=np.float32)[:, None])
    first, second = samples.set_aside(LabeledRows(features, labels, names))
    assert (len(first), len(second)) == (800, 200)
    assert (second.counts > 0).sum() == 10
    everything = np.concatenate([part.features.toarray().ravel() for part in (first, second)])
    assert sorted(everything.tolist()) == list(range(1000))


def test_rows_with_unknown_words_and_labels(tmp_path, capsys):
    rows = "".join(f"{i % 3} {i % 3}:{1 + i % 2} {3 + i % 5}:1\n" for i in range(60))
    (tmp_path / "train.txt").write_text(rows + "0\n1\n")
    (tmp_path / "test.txt").write_text(rows)
    (tmp_path / "names.txt").write_text("red\ngreen\nblue\n")
    out = tmp_path / "run"
    train = [
        "train",
        "multilabel",
        "--train",
        tmp_path / "train.txt",
        "--test",
        tmp_path / "test.txt",
        "--out",
        out,
    ]
    options = [
        "--hidden",
        0,
        "--label-names",
        tmp_path / "names.txt",
        "--loss",
        "bce",
    ]
    assert cli.main([str(word) for word in (*train, *options, "--epochs", 8, "--learning-rate", 0.05)]) == 0
    assert json.loads((out / "result.json").read_text())["test"]["precision@1"] == 1
    said = " ".join(capsys.readouterr().out.split())
    assert "2 of 62 samples have no features and no words" in said
    (tmp_path / "new.txt").write_text("1:1 77:2\n0 9:1 78:1\n")
    found = predict(out, tmp_path / "new.txt", tmp_path / "out.jsonl", "--top", "1")
    said = capsys.readouterr().out
    assert "3 values were skipped, because their features do not occur in the training samples" in said
    assert "1 of 2 samples has no known feature" in said
    # Probabilities from a model trained with BCE do not depend on k.
    assert "labels with P(label), in %" in said
    assert "k =" not in said
    assert found[0]["labels"] == ["green"]
    write_texts(tmp_path / "new.csv", tagged_texts(3, seed=0))
    assert "must contain sparse features, as in training, but" in rejected(
        capsys, ["predict", out, "--data", tmp_path / "new.csv"]
    )
    mixed = ["train", "multilabel", "--train", tmp_path / "train.txt", "--test", tmp_path / "new.csv"]
    assert "All files of a run must have the same format" in rejected(capsys, mixed)


@pytest.fixture(scope="module")
def undisturbed(texts, tmp_path_factory):
    return made(steady(texts, tmp_path_factory.mktemp("whole") / "run"))


def steady(texts: Path, out: Path) -> list[str]:
    return [
        "train",
        "multilabel",
        "--train",
        str(texts),
        "--out",
        str(out),
        "--epochs",
        "8",
        "--threads",
        "1",
    ]


def test_a_killed_and_resumed_run_equals_an_undisturbed_run(texts, undisturbed, tmp_path):
    out = tmp_path / "run"
    running = start(steady(texts, out))
    state = out / "state.json"
    limit = time.monotonic() + 120
    while not (state.exists() and json.loads(state.read_text())["epoch"] >= 2):
        assert running.running(), running.end()
        assert time.monotonic() < limit
        time.sleep(0.005)
    running.kill()
    assert not (out / "result.json").exists(), "the run finished before it was killed"
    assert cli.main(["train", "multilabel", "--resume", str(out)]) == 0
    assert (out / "metrics.jsonl").read_bytes() == (undisturbed / "metrics.jsonl").read_bytes()
    weights = [(one / "checkpoints/epoch-0008/model.safetensors").read_bytes() for one in (out, undisturbed)]
    assert weights[0] == weights[1]
    assert (out / "report.md").exists()


def test_few_labels_use_one_thread_by_default(texts):
    settings = MultilabelSettings(train=texts)
    data = samples.read(settings)
    assert training.task(settings, data).threads == 1
    # With the same six labels, very large batches use all threads.
    assert training.task(dataclasses.replace(settings, batch_size=2**18), data).threads is None


def test_two_processes(texts, tmp_path, capsys):
    out = tmp_path / "run"
    printed, _ = output(*start_two([*steady(texts, out), "--cpu"]))
    assert printed.count("held out for validation") == 1
    assert printed.count("The report is") == 1
    assert json.loads((out / "state.json").read_text())["processes"] == 2
    # If every sample was counted once, one process with the same weights gets the same result.
    before = json.loads((out / "result.json").read_text())["validation"]
    assert cli.main(["evaluate", str(out)]) == 0
    line = next(line for line in (out / "report.md").read_text().splitlines() if line.startswith("| 3 |"))
    for name in ("precision@3", "ndcg@3", "psp@3", "recall@3"):
        assert f"{100 * before[name]:.2f} (" in line


def test_the_preparation_matches_scikit_learn_and_survives_json(tmp_path):
    texts = ["A cat sat", "a cat ran !", "no cat at all", "dogs ran"]
    numbers = np.array([[1.0, 5], [2, 5], [np.nan, 5], [6, 5]], dtype=np.float32)
    labels, names = label_matrix([["x"], ["y"], ["x", "y"], ["z"]])
    rows = LabeledRows(sparse.csr_array(numbers), labels, names, texts, ("size", "same"))
    fitted = preparation.fit(rows, Columns(("text",), ("size", "same"), ("tags",), ","), 1)
    (tmp_path / preparation.FILE).write_text(json.dumps(fitted.to_json()))
    again = preparation.stored(tmp_path)
    assert again == fitted
    found = again.apply(rows).inputs.toarray()
    words = {"token_pattern": r"(?u)\b\w+\b", "sublinear_tf": True}
    expected = []
    for weight, terms, options in (
        (1, fitted.words, words),
        (0.5, fitted.pairs, words | {"ngram_range": (2, 2), "min_df": 2}),
        (1, fitted.pieces, {"analyzer": "char_wb", "ngram_range": (2, 4), "min_df": 2, "sublinear_tf": True}),
    ):
        vectorizer = TfidfVectorizer(**options).fit(texts)
        assert sorted(terms) == vectorizer.get_feature_names_out().tolist()
        order = [vectorizer.vocabulary_[term] for term in terms]
        expected.append(weight * vectorizer.transform(texts).toarray()[:, order])
    together = np.hstack(expected)
    together /= np.linalg.norm(together, axis=1, keepdims=True)
    assert found[:, :-2] == pytest.approx(together, abs=1e-6)
    deviation = np.std([1, 2, 6])
    assert found[:, -2] == pytest.approx([(1 - 3) / deviation, -1 / deviation, 0, 3 / deviation], abs=1e-6)
    assert not found[:, -1].any()
    (tmp_path / preparation.FILE).write_text('{"columns": null, "labels": []}')
    with pytest.raises(BadInput, match="is damaged"):
        preparation.stored(tmp_path)


def test_large_feature_indices_take_no_memory():
    """Hashed features have indices up to 2^31, but only indices that occur are stored."""
    labels, names = label_matrix([["x"], ["y"], ["x", "y"]])
    data, starts = np.array([3, 4, 2, 6], np.float32), [0, 2, 3, 4]
    found = []
    for columns in ([0, 3, 3, 7], [0, 300, 300, 10**8]):
        features = sparse.csr_array((data, columns, starts), shape=(3, columns[-1] + 1))
        rows = LabeledRows(features, labels, names)
        tracemalloc.start()
        fitted = preparation.fit(rows, None, 1)
        found.append(fitted.apply(rows).inputs.toarray())
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert peak < 2**24
        assert fitted.features == sorted(set(columns))
    first = np.array([3 / 3, 4 / 4]) / np.sqrt(2)
    assert found[0] == pytest.approx(np.array([[*first, 0], [0, 1, 0], [0, 0, 1]]))
    assert np.array_equal(*found)
    # Features that are not in the training data are counted as unknown, not mapped to a neighboring feature.
    other = sparse.csr_array(([1.0, 1.0, 5.0], [1, 299, 300], [0, 1, 2, 3]), shape=(3, 301), dtype=np.float32)
    prepared = fitted.apply(LabeledRows(other, labels, names))
    assert (prepared.unknown, prepared.empty) == (2, 2)
    assert prepared.inputs.toarray()[2].tolist() == [0, 1, 0]


def test_temperature_calibrates_probabilities():
    """If labels are drawn with probabilities lml(x, k), the best temperature for logits c * x is about c."""
    logits = torch.randn(3000, 12) * 1.5
    observed = torch.rand(3000, 12) < torchlml.lml(logits, 3)
    for factor in (4.0, 0.5):
        found = best_temperature(factor * logits, observed, "lml", 3)
        assert found == pytest.approx(factor, rel=0.13)  # within one step of the grid


ROWS = "text,tags\n" + "".join(f"word{i % 5} word,{'x' if i % 2 else 'y'};z\n" for i in range(20))
BAD = {
    "": ("text,tags\n", "has columns but no rows"),
    "--labels topic": (ROWS, "has no column `topic`"),
    "--texts body": (ROWS, "has no column `body`"),
    "--k 3": (ROWS, "`--k` must be from 1 to 2, because there are 3 labels or items, but it is 3"),
    "--k 9 --loss softmax": (ROWS, "`--k` must be at most 2, because there are 3 labels, but it is 9"),
    "--k 0": (ROWS, "`--k` must be at least 1, but it is 0"),
    "--k labels --loss truncated-entropy": (
        ROWS,
        "`--k` must be an integer for the loss `truncated-entropy`, but it is `labels`",
    ),
    "--separator ''": (ROWS, "`--separator` must be the string between two labels, but it is empty"),
    "--keep 2.0": (ROWS, "`--keep` must be `one`, or greater than 0 and at most 1, but it is 2.0"),
    "--hidden -1": (ROWS, "`--hidden` must be at least 0, but it is -1"),
    "--dropout 1": (ROWS, "`--dropout` must be at least 0 and less than 1, but it is 1"),
    "--patience 0": (ROWS, "`--patience` must be at least 1, but it is 0"),
    "--train-labels y.npz": (ROWS, "`--train-labels` is for `.npz` files"),
    "--test-labels y.npz": (ROWS, "`--test-labels` requires `--test`"),
    "--label-names n.txt": (ROWS, "already has label names"),
    "--valid missing.csv": (ROWS, "`missing.csv` (`--valid`) cannot be read: no such file"),
    "--epochs 1": (
        "text,tags\n" + "a,\n" * 20,
        "must have at least two labels, but `rows.csv` has no labels",
    ),
    "--epochs 2": (
        "text,tags\n" + "a,x\n" * 20,
        "must have at least two labels, but `rows.csv` has only the label `x`",
    ),
    "--epochs 3": ("text,tags\n" + "a,x\nb,y\n", "at least 10 samples with labels, but `rows.csv` has 2"),
    "--epochs 4": (
        "text,tags\n" + " ,x\n ,y\n" * 10,
        "The training samples must have features or words, but they have neither",
    ),
}


@pytest.mark.parametrize("options", BAD)
def test_bad_input_is_a_one_line_error_and_leaves_no_files(options, tmp_path, monkeypatch, capsys):
    import shlex

    monkeypatch.chdir(tmp_path)
    text, needle = BAD[options]
    (tmp_path / "rows.csv").write_text(text)
    said = rejected(
        capsys, ["train", "multilabel", "--train", "rows.csv", "--out", "run", *shlex.split(options)]
    )
    assert needle in said
    assert not (tmp_path / "run").exists()


def test_bad_requests_to_a_run(run, texts, tmp_path, capsys):
    out = run[0]
    assert "`--train` is missing" in rejected(capsys, ["train", "multilabel"])
    assert "`--data` is missing" in rejected(capsys, ["predict", out])
    assert "must be from 1 to 6 (the number of labels), but it is 7" in rejected(
        capsys, ["predict", out, "--data", texts, "--top", 7]
    )
    assert "must end in `.csv` or `.jsonl`" in rejected(
        capsys, ["predict", out, "--data", texts, "--out", "a.txt"]
    )
    other = tmp_path / "other.csv"
    other.write_text("title\na\n")
    assert "has no column `text`" in rejected(capsys, ["predict", out, "--data", other])
    other.write_text("text,tags\na,\n")
    assert "must have at least one sample with labels" in rejected(capsys, ["evaluate", out, "--data", other])
    other.write_text(ROWS)
    assert "is not the file that the model was trained on" in rejected(
        capsys, ["evaluate", out, "--train", other]
    )
    (tmp_path / "rows.txt").write_text("1 2:3\n")
    assert "must be a table with" in rejected(capsys, ["predict", out, "--data", tmp_path / "rows.txt"])
    train = ["train", "multilabel", "--train", texts, "--out", tmp_path / "run"]
    assert "must be a table with" in rejected(capsys, [*train, "--test", tmp_path / "rows.txt"])
    assert not (tmp_path / "run").exists()
    assert not list(tmp_path.glob("*.jsonl"))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("command", ["predict", "evaluate"])
def test_weights_that_are_not_finite_are_an_error(run, texts, tmp_path, capsys, value, command):
    out = tmp_path / "run"
    shutil.copytree(run[0], out)
    best = json.loads((out / "state.json").read_text())["best"]
    path = out / "checkpoints" / best / "model.safetensors"
    weights = load_file(path)
    weights["last.weight"][0, 0] = value
    save_file(weights, path)
    said = rejected(capsys, [command, str(out), "--data", str(texts)])
    assert f"`{path}` is damaged: `last.weight` contains {value}." in said


def test_a_report_does_not_widen_label_lists_to_all_labels(run, texts, capsys, tmp_path, monkeypatch):
    """With hundreds of thousands of labels, a target with one column per label would take gigabytes."""
    widths = []

    class Spied(torchlml.metrics.TopKRecall):
        def update(self, preds, target, *, mask=None, offsets=None):
            widths.append(target.shape[-1])
            super().update(preds, target, mask=mask, offsets=offsets)

    monkeypatch.setattr(report, "TopKRecall", Spied)
    assert cli.main(["evaluate", str(run[0]), "--data", str(texts), "--out", str(tmp_path)]) == 0
    longest = max(len(tags) for _, tags in tagged_texts(300, seed=0))
    assert widths
    assert max(widths) <= longest + 1
