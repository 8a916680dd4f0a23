"""Using runs from Python: predictions that match the command line, export, and continued training."""

from __future__ import annotations

import ast
import json
import re
import threading
import urllib.request
from http.server import HTTPServer
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from scipy import sparse

import torchlml_lab
from tests.support.command_lines import rejected
from tests.support.tagged_texts import tagged_texts, write_texts
from torchlml_lab import cli
from torchlml_lab.multilabel.settings import RULES

# torch's exporter emits this warning about its own internals.
EXPORTER = pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning")
PAGE = Path(__file__).parents[2] / "docs" / "own-data.md"
TEXTS = [text for text, _ in tagged_texts(25, seed=1)]


def trained(folder: Path, *options: object) -> Path:
    words = ["train", "multilabel", "--out", folder / "run", "--epochs", 4, *options]
    assert cli.main([str(word) for word in words]) == 0
    return folder / "run"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run trained on texts."""
    folder = tmp_path_factory.mktemp("texts")
    return trained(folder, "--train", write_texts(folder / "train.csv", tagged_texts(200, seed=0)))


@pytest.fixture(scope="module")
def network(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run trained on texts, without a linear part, so that only gradient steps change its weights."""
    folder = tmp_path_factory.mktemp("network")
    data = write_texts(folder / "train.csv", tagged_texts(200, seed=0))
    return trained(folder, "--train", data, "--model", "network")


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run trained on two text columns and a numeric column, with BCE and without a hidden layer."""
    folder = tmp_path_factory.mktemp("mixed")
    lines = [
        json.dumps({"title": text[:20], "body": text[20:], "size": i % 7 if i % 5 else None, "tags": tags})
        for i, (text, tags) in enumerate(tagged_texts(200, seed=0))
    ]
    (folder / "train.jsonl").write_text("\n".join(lines))
    return trained(folder, "--train", folder / "train.jsonl", "--loss", "bce", "--hidden", 0)


@pytest.fixture(scope="module")
def features(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run trained on sparse features."""
    folder = tmp_path_factory.mktemp("features")
    rows = "".join(f"{i % 3} {i % 3}:{1 + i % 2} {3 + i % 5}:1\n" for i in range(60))
    (folder / "train.txt").write_text(rows)
    return trained(folder, "--train", folder / "train.txt")


def of_command(run: Path, data: Path, *options: str) -> list[dict]:
    out = data.parent / "out.jsonl"
    assert cli.main(["predict", str(run), "--data", str(data), "--out", str(out), *options]) == 0
    return [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()]


def test_predictions_match_the_command_line(run: Path, tmp_path: Path) -> None:
    model = torchlml_lab.load_run(run)
    data = write_texts(tmp_path / "new.csv", [(text, []) for text in TEXTS])
    assert model.labels == sorted({tag for _, tags in tagged_texts(200, seed=0) for tag in tags})
    for rule in (*RULES, "auto"):
        expected = [row["labels"] for row in of_command(run, data, "--rule", rule)]
        assert model.predict(TEXTS, rule) == expected
    assert model.predict(TEXTS) == model.predict(TEXTS, model.rule)
    found = model.predict_proba(TEXTS)
    assert found.shape == (25, 6)
    assert found.sum(axis=1) == pytest.approx(model.k, abs=1e-4)
    for row, p in zip(of_command(run, data, "--top", "6"), found, strict=True):
        by_name = dict(zip(row["labels"], row["probabilities"], strict=True))
        assert [by_name[name] for name in model.labels] == pytest.approx(p.tolist(), abs=1e-6)
    assert model.predict([]) == []
    assert model.predict_proba([]).shape == (0, 6)


def test_a_table_in_any_form(mixed: Path, tmp_path: Path) -> None:
    model = torchlml_lab.load_run(str(mixed))
    rows = [
        {"title": text[:9], "size": i if i % 3 else None, "body": text[9:]} for i, text in enumerate(TEXTS)
    ]
    (tmp_path / "new.jsonl").write_text("\n".join(map(json.dumps, rows)))
    expected = [row["labels"] for row in of_command(mixed, tmp_path / "new.jsonl", "--rule", "top-k")]
    columns = {name: [row[name] for row in rows] for name in ("size", "title", "body")}

    class Frame:
        """A stand-in for a pandas DataFrame, with only the methods that `predict` uses."""

        def keys(self) -> list[str]:
            return list(columns)

        def __getitem__(self, name: str) -> np.ndarray:
            values = columns[name]
            return np.array([np.nan if value is None else value for value in values])

    for samples in (rows, columns, Frame(), tmp_path / "new.jsonl"):
        assert model.predict(samples, "top-k") == expected
    assert len({tuple(row) for row in expected}) > 1


def test_sparse_features(features: Path, tmp_path: Path) -> None:
    model = torchlml_lab.load_run(features)
    x = np.zeros((3, 9), dtype=np.float32)
    x[[0, 1, 2], [2, 0, 1]] = 1
    assert [row[0] for row in model.predict(sparse.csc_matrix(x))] == ["2", "0", "1"]
    for wrong, needle in (
        (["a text"], "must be a sparse matrix or the path of a file, but it is a value of type `list`"),
        (sparse.csr_array(np.full((1, 2), np.nan)), "must contain only numbers that are finite in float32"),
    ):
        with pytest.raises(ValueError, match=needle):
            model.predict(wrong)


def test_bad_samples(run: Path, mixed: Path, tmp_path: Path) -> None:
    texts, table = torchlml_lab.load_run(run), torchlml_lab.load_run(mixed)
    wanted = "`samples` must be a list of texts or a table with the columns `text`, but it "
    for model, samples, needle in (
        (texts, "one text", f"{wanted}is a string"),
        (texts, 3, f"{wanted}is a value of type `int`"),
        (texts, ["a", 3], f"{wanted}contains a string"),
        (texts, sparse.csr_array((2, 2)), f"{wanted}is a sparse matrix"),
        (texts, {"texts": ["a"]}, "`samples` has no column `text`. Did you mean `texts`?"),
        (table, ["a"], "a table with the columns `title`, `body`, `size`, but it is a list of texts"),
        (table, {"title": ["a"], "body": ["b", "c"], "size": [1]}, "1 in `title`, 2 in `body`, 1 in `size`"),
        (table, [{"title": "a", "body": "b", "size": "big"}], "`samples`, row 0: column `size` has `big`"),
    ):
        with pytest.raises(ValueError, match=re.escape(needle)):
            model.predict(samples)
    with pytest.raises(
        ValueError, match="`rule` must be one of auto, top-k, half, threshold, count, but it is"
    ):
        texts.predict(["a"], "best")
    with pytest.raises(ValueError, match="is not a run directory"):
        torchlml_lab.load_run(tmp_path)
    (tmp_path / "run.json").write_text('{"format": 2, "experiment": "recommend", "run": "a", "versions": {}}')
    with pytest.raises(ValueError, match="is a run of the task `recommend`, not `multilabel`"):
        torchlml_lab.load_run(tmp_path)


def samples_of(name: str) -> object:
    if name == "features":
        return sparse.random_array((7, 9), density=0.4, rng=np.random.default_rng(0), format="csr")
    if name == "mixed":
        return [{"title": text, "body": "", "size": i} for i, text in enumerate(TEXTS)]
    return TEXTS


@EXPORTER
@pytest.mark.parametrize("name", ["run", "mixed", "features"])
def test_onnx(name: str, request: pytest.FixtureRequest, tmp_path: Path, capsys) -> None:
    onnxruntime = pytest.importorskip("onnxruntime")
    folder = request.getfixturevalue(name)
    out = tmp_path / "model.onnx"
    assert cli.main(["export", str(folder), "--out", str(out)]) == 0
    assert "computes the probabilities of" in capsys.readouterr().out
    model, samples = torchlml_lab.load_run(folder), samples_of(name)
    session = onnxruntime.InferenceSession(out)
    (found,) = session.run(["probabilities"], {"inputs": model.inputs(samples).toarray()})
    np.testing.assert_allclose(found, model.predict_proba(samples), atol=2e-6)
    about = session.get_modelmeta().custom_metadata_map
    assert json.loads(about["labels"]) == model.labels
    assert (int(about["k"]), about["rule"]) == (model.k, model.rule)
    stored = json.loads((folder / "calibration.json").read_text())
    assert float(about["threshold"]) == stored["decisions"]["threshold"]


@EXPORTER
@pytest.mark.parametrize("name", ["run", "mixed"])
def test_torch_export(name: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    folder = request.getfixturevalue(name)
    out = tmp_path / "model.pt2"
    assert cli.main(["export", str(folder), "--format", "torch", "--out", str(out)]) == 0
    model, samples = torchlml_lab.load_run(folder), samples_of(name)
    files = {"about.json": ""}
    program = torch.export.load(out, extra_files=files).module()
    found = program(torch.from_numpy(model.inputs(samples).toarray()))
    np.testing.assert_allclose(found.numpy(), model.predict_proba(samples), atol=2e-6)
    assert json.loads(json.loads(files["about.json"])["labels"]) == model.labels


def test_the_error_for_an_unknown_rule_lists_all_rules(run: Path, capsys) -> None:
    said = rejected(capsys, ["predict", run, "--data", "new.csv", "--rule", "best"])
    assert "`--rule` must be one of auto, count, half, threshold, top-k, but it is `best`" in said


def test_bad_exports(run: Path, tmp_path: Path, capsys, monkeypatch) -> None:
    assert "`--out` must be in an existing directory" in rejected(
        capsys, ["export", run, "--out", tmp_path / "no" / "a.onnx"]
    )
    assert "`--format` must be one of onnx, torch, but it is `java`" in rejected(
        capsys, ["export", run, "--format", "java"]
    )
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert "`--format onnx` needs the package `onnx`. Run `pip install 'torchlml[onnx]'`" in rejected(
        capsys, ["export", run, "--out", tmp_path / "a.onnx"]
    )


def test_the_server_on_the_page(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The recipe has at most ten lines and answers requests."""
    (recipe,) = re.findall(
        r"^```python title=\"serve.py\"\n(.*?)^```", PAGE.read_text(), re.DOTALL | re.MULTILINE
    )
    assert len([line for line in recipe.splitlines() if line.strip()]) <= 10
    ast.parse(recipe)
    serving: list[HTTPServer] = []

    def serve_forever(self: HTTPServer) -> None:
        serving.append(self)

    monkeypatch.setattr(HTTPServer, "serve_forever", serve_forever)
    text = recipe.replace('"runs/tags"', repr(str(run))).replace("8000", "0")
    exec(compile(text, "serve.py", "exec"), {})
    (server,) = serving
    thread = threading.Thread(target=server.handle_request)
    thread.start()
    try:
        address = f"http://127.0.0.1:{server.server_port}"
        with urllib.request.urlopen(address, json.dumps(TEXTS).encode(), timeout=30) as answer:
            assert json.load(answer) == torchlml_lab.load_run(run).predict(TEXTS)
    finally:
        thread.join(30)
        server.server_close()


def test_a_run_is_continued_with_more_data(network: Path, tmp_path: Path, capsys) -> None:
    run = network
    more = [(f"{text} kernel syscall", [*tags, "linux"]) for text, tags in tagged_texts(80, seed=3)]
    data = write_texts(tmp_path / "more.csv", more)
    # With hardly any training, the known labels keep their logits, and the new label comes last.
    words = ["train", "multilabel", "--train", data, "--continue-from", run, "--out", tmp_path / "same"]
    assert cli.main([str(word) for word in (*words, "--epochs", 1, "--learning-rate", 1e-9)]) == 0
    assert f"Training starts from the weights of `{run}`. 1 label is new." in capsys.readouterr().out
    before, same = torchlml_lab.load_run(run), torchlml_lab.load_run(tmp_path / "same")
    assert same.labels == [*before.labels, "linux"]
    logits = [torch.cat([z for z, _ in one._trained.scores(one.inputs(TEXTS))]) for one in (before, same)]
    torch.testing.assert_close(logits[0], logits[1][:, :6], atol=1e-5, rtol=0)
    # With enough training, the new label is learned, and the others are not forgotten.
    words[-1] = tmp_path / "run"
    assert cli.main([str(word) for word in (*words, "--epochs", 8)]) == 0
    found = torchlml_lab.load_run(tmp_path / "run").predict(TEXTS, "top-k")
    assert all("linux" in row for row in found)
    right = [
        any(tag in row for tag in tags)
        for row, (_, tags) in zip(found, tagged_texts(25, seed=1), strict=True)
    ]
    assert np.mean(right) > 0.9
    assert cli.main(["evaluate", str(tmp_path / "run")]) == 0


def test_a_run_continued_on_its_own_samples_is_unchanged(run: Path, tmp_path: Path, capsys) -> None:
    data = json.loads((run / "settings.json").read_text())["train"]
    words = ["train", "multilabel", "--train", data, "--continue-from", run, "--out", tmp_path / "run"]
    assert cli.main([str(word) for word in words]) == 0
    said = capsys.readouterr().out
    assert "epoch 0: validation " in said
    before, after = torchlml_lab.load_run(run), torchlml_lab.load_run(tmp_path / "run")
    texts = [text for text, _ in tagged_texts(400, seed=7)]
    changed = [a != b for a, b in zip(before.predict(texts), after.predict(texts), strict=True)]
    assert np.mean(changed) < 0.02
    assert after.rule == before.rule
    assert after.predict_proba(texts) == pytest.approx(before.predict_proba(texts), abs=0.05)


def noisy_texts(path: Path, seed: int) -> Path:
    """Write texts, half of them with wrong tags, so that the validation scores are noisy."""
    wrong = [tags for _, tags in tagged_texts(300, seed + 100)]
    rows = [(text, wrong[i] if i % 2 else tags) for i, (text, tags) in enumerate(tagged_texts(300, seed))]
    return write_texts(path, rows)


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_a_run_that_stopped_early_is_unchanged_by_its_own_samples(seed: int, tmp_path: Path, capsys) -> None:
    data = noisy_texts(tmp_path / "train.csv", seed)
    words = ["train", "multilabel", "--train", data, "--out"]
    assert cli.main([str(word) for word in (*words, tmp_path / "run 0", "--seed", seed)]) == 0
    # A continued run can be continued again.
    for i in (1, 2):
        more = (*words, tmp_path / f"run {i}", "--continue-from", tmp_path / f"run {i - 1}")
        assert cli.main([str(word) for word in more]) == 0
        assert "had stopped improving on the same samples" in capsys.readouterr().out
    before, *others = (torchlml_lab.load_run(tmp_path / f"run {i}") for i in range(3))
    for after in others:
        assert np.array_equal(after.predict_proba(TEXTS), before.predict_proba(TEXTS))
        assert after.predict(TEXTS) == before.predict(TEXTS)
        assert after.rule == before.rule


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_linear_part_is_unchanged_by_its_own_samples(seed: int, tmp_path: Path, capsys) -> None:
    # The first run has few epochs, so the second run continues to train the network, which may change.
    data = noisy_texts(tmp_path / "train.csv", seed)
    first = trained(tmp_path, "--train", data, "--seed", seed)
    words = ["train", "multilabel", "--train", data, "--continue-from", first, "--out", tmp_path / "second"]
    assert cli.main([str(word) for word in words]) == 0
    said = capsys.readouterr().out
    assert "epoch 1: " in said
    assert "The linear part is that of the earlier run." in said
    for name in ("final.weight", "final.bias", "held_out.weight", "held_out.bias"):
        before, after = (load_file(run / "linear.safetensors")[name] for run in (first, tmp_path / "second"))
        assert np.array_equal(before, after)


def test_other_samples_and_settings_are_not_those_of_the_earlier_run(tmp_path: Path, capsys) -> None:
    data = write_texts(tmp_path / "train.csv", tagged_texts(200, seed=0))
    words = ["train", "multilabel", "--train", data, "--patience", 3, "--hidden", 8, "--model", "network"]
    first = tmp_path / "first"
    assert cli.main([str(word) for word in (*words, "--out", first)]) == 0
    capsys.readouterr()
    texts, tags = zip(*tagged_texts(200, seed=0), strict=True)
    changes = {
        "text": [("another word", tags[0]), *zip(texts[1:], tags[1:], strict=True)],
        "tags": [*zip(texts[:-1], tags[:-1], strict=True), (texts[-1], ["python", "sql", "c++", "docker"])],
        "order": list(zip(texts, tags, strict=True))[::-1],
        "fewer": list(zip(texts, tags, strict=True))[:-1],
    }
    for name, rows in changes.items():
        words[3] = write_texts(tmp_path / f"{name}.csv", rows)
        more = (*words, "--continue-from", first, "--out", tmp_path / name, "--epochs", 1)
        assert cli.main([str(word) for word in more]) == 0
        assert "epoch 1: " in capsys.readouterr().out, name
    words[3] = data
    for options, trains in (((), False), (("--learning-rate", 0.001), True), (("--patience", 4), True)):
        out = tmp_path / "again" / str(len(options) and options[1])
        more = (*words, *options, "--continue-from", first, "--out", out)
        assert cli.main([str(word) for word in more]) == 0
        assert ("epoch 1: " in capsys.readouterr().out) == trains, options


def test_a_run_without_a_hidden_layer_is_continued(mixed: Path, tmp_path: Path) -> None:
    data = json.loads((mixed / "settings.json").read_text())["train"]
    options = ["--train", data, "--loss", "bce", "--model", "network"]
    (tmp_path / "first").mkdir()
    first = trained(tmp_path / "first", *options, "--hidden", 0)
    words = [
        "train",
        "multilabel",
        *options,
        "--continue-from",
        first,
        "--epochs",
        1,
        "--learning-rate",
        1e-9,
    ]
    assert cli.main([str(word) for word in [*words, "--out", tmp_path / "run"]]) == 0
    assert json.loads((tmp_path / "run" / "settings.json").read_text())["hidden"] == 0
    before, after = torchlml_lab.load_run(first), torchlml_lab.load_run(tmp_path / "run")
    assert before.predict(samples_of("mixed"), "top-k") == after.predict(samples_of("mixed"), "top-k")


def test_runs_that_cannot_be_continued(run: Path, features: Path, tmp_path: Path, capsys) -> None:
    data = write_texts(tmp_path / "more.csv", tagged_texts(40, seed=3))
    words = ["train", "multilabel", "--train", data, "--out", tmp_path / "run", "--continue-from"]
    for more, needle in (
        ([tmp_path], "is not a run directory"),
        ([features], "`--train` must contain sparse features, as in"),
        ([run, "--hidden", 7], "`--hidden` must be 256, as in"),
        ([run, "--texts", "text"], "`--continue-from` determines the columns"),
    ):
        assert needle in rejected(capsys, [*words, *more])
