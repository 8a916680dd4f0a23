"""Recommendation from files: training, evaluation, prediction, interrupted runs, and rejected input."""

from __future__ import annotations

import csv
import dataclasses
import json
import random
import re
import shutil
import time

import pytest
import torch

from tests.support.command_lines import each_rejection, rejected, rejections
from tests.support.processes import output, start_two
from torchlml_lab import cli
from torchlml_lab.cli_errors import BadInput
from torchlml_lab.data.interactions import read_interactions
from torchlml_lab.engine import run as engine_run
from torchlml_lab.figures.multilabel import PUBLISHED
from torchlml_lab.recommend import item_weights, sweep
from torchlml_lab.recommend.histories import Users, read, set_aside, some_users
from torchlml_lab.recommend.settings import RecommendSettings, SweepSettings

GROUPS, SIZE, HAS = 4, 30, 12  # each user has 12 of the 30 items in one group


def write_pairs(path, users=120, seed=0):
    """Write a file in which each user has items from one of four groups, and return its path."""
    draw = random.Random(seed)
    lines = []
    for user in range(users):
        items = draw.sample(range(SIZE), HAS)
        lines.append(" ".join([f"u{user}", *(f"g{user % GROUPS}-{item}" for item in items)]))
    path.write_text("\n".join(lines) + "\n")
    return path


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A directory with files of user-item pairs and one run per model."""
    place = tmp_path_factory.mktemp("recommend")
    train = write_pairs(place / "train.txt")
    draw = random.Random(9)
    later = [
        f"u{user} g{user % GROUPS}-{draw.randrange(SIZE)} g{user % GROUPS}-{draw.randrange(SIZE)}"
        for user in range(50)
    ]
    (place / "test.txt").write_text("\n".join(later))
    for model, epochs in (("autoencoder", 8), ("matrix-factorization", 24)):
        options = [
            "--model",
            model,
            "--epochs",
            epochs,
            "--batch-size",
            20,
            "--dimension",
            16,
            "--learning-rate",
            0.01,
            "--loss",
            "lml",
            "--layers",
            3,
        ]
        words = [
            "train",
            "recommend",
            "--train",
            train,
            "--test",
            place / "test.txt",
            "--out",
            place / model,
            *options,
        ]
        assert cli.main([str(word) for word in words]) == 0
    return place


def run_of(folder, model):
    return json.loads((folder / model / "result.json").read_text())


@pytest.mark.parametrize("model", ["autoencoder", "matrix-factorization"])
def test_a_model_finds_the_items_of_a_users_group(folder, model):
    # Of the 108 items that a user does not have, 20 are recommended, so chance would give a recall of 0.19.
    assert run_of(folder, model)["test"]["recall@20"] > 0.7


def test_evaluate_repeats_the_results_of_the_run_and_adds_popularity(folder, capsys, tmp_path):
    for split in ("validation", "test"):
        assert (
            cli.main(["evaluate", str(folder / "autoencoder"), "--split", split, "--out", str(tmp_path)]) == 0
        )
        said = capsys.readouterr().out
        for measure in ("recall", "precision", "ndcg"):
            part = said[said.index(measure) :]
            numbers, baseline = (
                [float(n) for n in re.findall(rf"^{name} +(.*)$", part, re.MULTILINE)[0].split()]
                for name in ("lml-labels", "popular items")
            )
            found = run_of(folder, "autoencoder")[split]
            expected = [100 * found[f"{measure}@{k}"] for k in (1, 2, 5, 10, 20, 50, 100)]
            assert numbers == pytest.approx(expected, abs=0.0051)
            assert baseline[4] < numbers[4]
    for place in (tmp_path, folder / "autoencoder"):
        assert (place / "report.png").stat().st_size > 10_000


def test_evaluate_accepts_other_data_and_counts_unknown_users_and_items(folder, capsys, tmp_path):
    own = tmp_path / "later.csv"
    have = read_interactions(folder / "train.txt", "--train")
    old = have.items[have.of(0)[0]]
    new = next(f"g0-{i}" for i in range(SIZE) if f"g0-{i}" not in [have.items[j] for j in have.of(0)])
    own.write_text(f"user,item\nu0,{new}\nu0,{old}\nnobody,g0-1\nu1,nothing\n")
    assert cli.main(["evaluate", str(folder / "autoencoder"), "--data", str(own)]) == 0
    said = capsys.readouterr().out
    assert "1 user and 1 item that are not in the training data were skipped." in said
    assert "1 pair that is also in the training data was skipped." in said
    assert "on 1 users (" in said


@pytest.mark.parametrize("model", ["autoencoder", "matrix-factorization"])
def test_predict_gives_new_items_of_the_group_with_probabilities(folder, capsys, tmp_path, model):
    out = tmp_path / "deep" / "best.csv"
    assert cli.main(["predict", str(folder / model), "--top", "3", "--out", str(out)]) == 0
    said = capsys.readouterr().out
    assert "u9" in said
    assert "P(item in top k), k = 3, in %" in said
    assert "The recommendations for 120 users are in" in said.replace("\n", " ")
    have = read_interactions(folder / "train.txt", "--train")
    rows = list(csv.DictReader(out.read_text().splitlines()))
    assert len(rows) == 3 * len(have.users)
    right = 0
    for row in rows:
        user = have.users.index(row["user"])
        assert row["item"] not in [have.items[i] for i in have.of(user)]
        assert 0 < float(row["probability"]) < 1
        right += row["item"].startswith(f"g{user % GROUPS}-")
    assert right > 0.95 * len(rows)
    for start in range(0, len(rows), 3):
        chances = [float(row["probability"]) for row in rows[start : start + 3]]
        assert chances == sorted(chances, reverse=True)


def test_predict_uses_the_items_of_new_users_and_falls_back_to_popular_items(folder, capsys, tmp_path):
    data, out = tmp_path / "new.csv", tmp_path / "best.jsonl"
    data.write_text("user,item\nnew,g2-1\nnew,g2-5\nnew,g2-7\nnew,g2-9\nstranger,unheard-of\nu0,g0-0\n")
    predict = ["predict", str(folder / "autoencoder"), "--data", str(data), "--out", str(out)]
    assert cli.main(predict) == 0
    said = capsys.readouterr().out
    assert "1 item that is not in the training data was skipped." in said
    assert "1 of 3 users cannot be scored and gets the most popular items." in said
    new, stranger, old = (json.loads(line) for line in out.read_text().splitlines())
    assert all(item.startswith("g2-") for item in new["items"])
    assert not {"g2-1", "g2-5", "g2-7", "g2-9"} & set(new["items"])
    assert "g0-0" not in old["items"]
    have = read_interactions(folder / "train.txt", "--train")
    counts = torch.bincount(have.item)
    assert stranger["probabilities"] is None
    assert [int(counts[have.items.index(item)]) for item in stranger["items"]] == counts.topk(
        5
    ).values.tolist()
    # A new user without items is also unknown to matrix factorization.
    assert cli.main(["predict", str(folder / "matrix-factorization"), "--users", "new", "u3"]) == 0
    said = capsys.readouterr().out
    assert "1 of 2 users cannot be scored" in said
    assert "(popular)" in said


def test_a_user_who_has_almost_everything_gets_the_rest(folder, capsys, tmp_path):
    have = read_interactions(folder / "train.txt", "--train")
    data, out = tmp_path / "rich.txt", tmp_path / "best.jsonl"
    data.write_text(f"rich {' '.join(have.items[2:])}\nall {' '.join(have.items)}\n")
    assert cli.main(["predict", str(folder / "autoencoder"), "--data", str(data), "--out", str(out)]) == 0
    rich, everything = (json.loads(line) for line in out.read_text().splitlines())
    assert sorted(rich["items"]) == sorted(have.items[:2])
    assert rich["probabilities"] == pytest.approx([1, 1])
    assert everything["items"] == []


def test_training_data_that_differ_from_those_of_the_run_are_rejected(folder, capsys, tmp_path):
    other = write_pairs(tmp_path / "other.txt", seed=1)
    for command in ("evaluate", "predict"):
        said = rejected(capsys, [command, folder / "autoencoder", "--train", other])
        assert "was trained on different data than" in said
    shutil.copytree(folder / "autoencoder", tmp_path / "run")
    settings = json.loads((tmp_path / "run" / "settings.json").read_text())
    settings["train"] = str(tmp_path / "gone.txt")
    (tmp_path / "run" / "settings.json").write_text(json.dumps(settings))
    assert "Pass its new location with `--train`" in rejected(capsys, ["predict", tmp_path / "run"])
    assert cli.main(["predict", str(tmp_path / "run"), "--train", str(folder / "train.txt")]) == 0


def test_step_time_has_a_row_for_every_loss(folder, capsys):
    assert cli.main(["step-time", str(folder / "autoencoder"), "--steps", "2", "--batch-size", "10"]) == 0
    said = capsys.readouterr().out
    for loss in ("softmax", "lml", "bce", "truncated-entropy", "topk-softmax"):
        assert re.search(rf"^{loss} +[\d.]+ +[+-][\d.]+%", said, re.MULTILINE)


def test_an_interrupted_and_resumed_run_equals_an_undisturbed_one(folder, monkeypatch, capsys, tmp_path):
    words = ["train", "recommend", "--train", str(folder / "train.txt"), "--epochs", "3", "--dimension", "8"]
    words += ["--test", str(folder / "test.txt"), "--model", "autoencoder"]
    assert cli.main([*words, "--out", str(tmp_path / "whole")]) == 0
    epoch = engine_run._Run._epoch

    def killed(self, number, step):
        if number == 3:
            raise KeyboardInterrupt
        return epoch(self, number, step)

    with monkeypatch.context() as patched:
        patched.setattr(engine_run._Run, "_epoch", killed)
        assert cli.main([*words, "--out", str(tmp_path / "killed")]) == 130
    assert "2 of 3 epochs are saved" in capsys.readouterr().err
    assert cli.main(["train", "recommend", "--resume", str(tmp_path / "killed")]) == 0
    results = [json.loads((tmp_path / name / "result.json").read_text()) for name in ("whole", "killed")]
    assert [{**one, "seconds": 0} for one in results] == [{**results[0], "seconds": 0}] * 2


def test_two_processes_count_every_user_once(folder, capsys, tmp_path):
    words = ["train", "recommend", "--train", folder / "train.txt", "--test", folder / "test.txt", "--cpu"]
    words += ["--out", tmp_path / "run", "--epochs", 1, "--dimension", 8, "--batch-size", 6]
    words += ["--model", "autoencoder"]
    printed, _ = output(*start_two([str(word) for word in words]))
    assert printed.count("\npopular items ") == 3  # only one process prints the report
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    # If every user was counted once, one process with the same weights gets the same result.
    assert cli.main(["evaluate", str(tmp_path / "run"), "--cpu"]) == 0
    said = capsys.readouterr().out
    numbers = re.findall(r"^lml-labels +(.*)$", said, re.MULTILINE)[0].split()
    expected = [100 * result["test"][f"recall@{k}"] for k in (1, 2, 5, 10, 20, 50, 100)]
    assert [float(number) for number in numbers] == pytest.approx(expected, abs=0.0051)


def test_a_sweep_gives_a_table_and_a_figure(folder, capsys, tmp_path):
    options = [
        "--run.train",
        folder / "train.txt",
        "--run.test",
        folder / "test.txt",
        "--run.epochs",
        1,
        "--run.dimension",
        4,
        "--workers",
        1,
    ]
    options += [
        "--losses",
        "softmax",
        "lml-3",
        "--models",
        "matrix-factorization",
        "--layer-counts",
        2,
        "--csv",
        tmp_path / "a.csv",
    ]
    words = ["sweep", "recommend", *options, "--out", tmp_path / "runs"]
    assert cli.main([str(word) for word in words]) == 0
    said = capsys.readouterr().out
    assert "matrix-factorization: metrics in %" in said
    assert len(re.findall(r"^(?:softmax|lml-3) +2 +0\.02 ", said, re.MULTILINE)) == 2
    rows = sweep.TABLE.read(tmp_path / "a.csv", "--csv")
    for row in rows:
        result = json.loads(next((tmp_path / "runs").glob(f"*_{row.loss}_*/result.json")).read_text())
        found = {f"recall@{k}": getattr(row, f"test_recall{k}") for k in (5, 10, 20, 50, 100)}
        assert found == {name: result["test"][name] for name in found}
        assert (row.validation_recall20, row.users) == (result["validation"]["recall@20"], 120)
    words = ["figures", "recommend", "--csv", tmp_path / "a.csv", "--out", tmp_path / "a.png", "--published"]
    assert cli.main([str(word) for word in words]) == 0
    lines = (tmp_path / "a.md").read_text().splitlines()
    assert len(lines) == 2 + len(PUBLISHED) + 2
    assert any(
        line.startswith("| matrix-factorization | 2 | lml-3 | 0.02 | 0.1 | 1 | 1 of 1 |") for line in lines
    )
    assert (tmp_path / "a.png").stat().st_size > 10_000


def test_a_tuned_sweep_uses_the_best_settings_on_validation_per_method(folder, tmp_path):
    usual = dict.fromkeys(
        (one.name for one in dataclasses.fields(sweep.RankingRecord) if one.type in (float, "float")), 0.5
    )
    whole = {"layers": 0, "users": 120, "seed": 0, "dimension": 4, "epochs": 1, "best_epoch": 1}
    tried = {("autoencoder", "bce", 0.1, 0.3): 0.2, ("autoencoder", "bce", 0.1, 0.6): 0.4}
    tried |= {("matrix-factorization", "bce", 0.1, 0.3): 0.3, ("matrix-factorization", "bce", 0.2, 0.3): 0.1}
    rows = [
        sweep.RankingRecord(
            **usual
            | whole
            | {"validation_recall20": score, "test_recall20": 1 - score}
            | dict(zip(("model", "loss", "learning_rate", "dropout"), method, strict=True))
        )
        for method, score in tried.items()
    ]
    sweep.TABLE.write(tmp_path / "tuned.csv", rows)
    run = RecommendSettings(train=folder / "train.txt")
    settings = SweepSettings(
        losses=("bce",), layer_counts=(0,), tuned=tmp_path / "tuned.csv", seeds=(0, 3), run=run
    )
    found = [(one.model, one.seed, one.learning_rate, one.dropout) for one in sweep.grid(settings)]
    assert found == [
        (model, seed, 0.1, dropout)
        for seed in (0, 3)
        for model, dropout in (("autoencoder", 0.6), ("matrix-factorization", 0.3))
    ]
    with pytest.raises(BadInput, match="so they cannot also be given"):
        sweep.grid(dataclasses.replace(settings, temperatures=(0.1,)))


REJECTED = {
    "": "`--train` is missing",
    "--train FILE --loss softmax --k 3": "The loss `softmax` does not take `--k`, but `--k` is 3",
    "--train FILE --loss truncated-entropy --k labels": (
        "`--k` must be an integer for the loss `truncated-entropy`, but it is `labels`"
    ),
    "--train FILE --k 120": (
        "`--k` must be from 1 to 119, because there are 120 labels or items, but it is 120"
    ),
    "--train FILE --k 0": "`--k` must be at least 1, but it is 0",
    "--train FILE --test EMPTY": "(`--test`) is empty",
    "--train FILE --test FILE": "must have a new pair of a known user and a known item",
    "--train SINGLE": "must have a user with at least two items",
    "--train FILE --columns user item": "`--columns` applies to CSV, TSV and .inter files",
    "--train FILE --temperature 0.0": "`--temperature` must be finite and positive, but it is 0.0",
    "--train FILE --layers -1": "`--layers` must be at least 0, but it is -1",
    "--train FILE --penalty 0.0": "`--penalty` must be finite and positive, but it is 0.0",
    "--train FILE --min-rating 3": "`--min-rating` requires a CSV, TSV or .inter file, but `--train` is",
    "--train FILE --loss topk-softmax --k labels": "`--k` must be an integer for the loss `topk-softmax`",
    "--train FILE --batch-size -1": "`--batch-size` must be at least 1, but it is -1",
    "--train FILE --dropout 1.0": "`--dropout` must be at least 0 and less than 1, but it is 1.0",
} | {
    f"--train FILE {line}": said
    for line, said in rejections(
        "`{}` must be at least 1, but it is {}", "--dimension 0", "--users 0", "--validation 0"
    ).items()
}


@each_rejection(REJECTED)
def test_bad_settings_and_files_are_rejected_and_nothing_is_written(
    folder, capsys, tmp_path, options, needle
):
    (tmp_path / "empty").touch()
    (tmp_path / "single").write_text("a x\nb y\nc x\n")
    places = {"FILE": folder / "train.txt", "EMPTY": tmp_path / "empty", "SINGLE": tmp_path / "single"}
    words = [str(places.get(word, word)) for word in options]
    assert needle in rejected(capsys, ["train", "recommend", "--out", tmp_path / "run", *words])
    assert not (tmp_path / "run").exists()


@each_rejection(
    {
        "predict --top 0": "`--top` must be at least 1, but it is 0",
        "predict --top 121": "`--top` must be at most 120, the number of items, but it is 121",
        "predict --out x.txt": "must end in `.csv` or `.jsonl`",
        "predict --data missing.csv": "`missing.csv` (`--data`) cannot be read",
        "evaluate --data missing.csv --split validation": "`--split` cannot be combined with `--data`",
        "evaluate --out /dev/null": "`/dev/null` (`--out`)",
    }
)
def test_bad_requests_of_a_run_are_rejected(folder, capsys, options, needle):
    command, *rest = options
    assert needle in rejected(capsys, [command, folder / "autoencoder", *rest])


def test_the_held_out_pairs_are_a_fixed_share_of_the_pairs_of_some_users(folder):
    have = read_interactions(folder / "train.txt", "--train")
    kept, aside = set_aside(have, 40)
    assert int((aside.counts > 0).sum()) == 40
    assert torch.equal(kept.counts + aside.counts, have.counts)
    assert set(aside.counts.tolist()) == {0, 3}  # a fifth of 12, rounded up
    for user in range(len(have.users)):
        assert sorted([*kept.of(user).tolist(), *aside.of(user).tolist()]) == sorted(have.of(user).tolist())
    assert torch.equal(set_aside(have, 40)[1].item, aside.item)
    few = some_users(have, 7)
    assert int((few.counts > 0).sum()) == 7
    assert len(Users(few, few)) == 7


DEFAULT = ["--epochs", "3", "--dimension", "8"]


@pytest.fixture(scope="module")
def default_run(folder, tmp_path_factory):
    """A run with the default model, which combines all models."""
    out = tmp_path_factory.mktemp("auto") / "run"
    words = [
        "train",
        "recommend",
        "--train",
        folder / "train.txt",
        "--test",
        folder / "test.txt",
        "--out",
        out,
    ]
    assert cli.main([*map(str, words), *DEFAULT]) == 0
    return out


def test_the_default_is_at_least_as_good_on_validation_as_every_model(default_run, capsys):
    names = ("ease", "graph-filter", "autoencoder", "matrix-factorization")
    found = {name: run_of(default_run, name) for name in names}
    result = json.loads((default_run / "result.json").read_text())
    best = max(one["validation"]["recall@20"] for one in found.values())
    assert result["validation"]["recall@20"] >= best - 1e-6
    assert result["seconds"] == pytest.approx(sum(one["seconds"] for one in found.values()))
    assert found["ease"]["best_epoch"] == found["graph-filter"]["best_epoch"] == 0
    choice = json.loads((default_run / "choice.json").read_text())
    assert sum(choice["weights"].values()) == 1
    assert set(choice["weights"]) == set(choice["factors"]) <= set(found)
    # `evaluate` reports the stored test result.
    assert cli.main(["evaluate", str(default_run)]) == 0
    said = capsys.readouterr().out
    numbers = re.findall(r"^auto +(.*)$", said[said.index("recall ") :], re.MULTILINE)[0].split()
    assert float(numbers[4]) == pytest.approx(100 * result["test"]["recall@20"], abs=0.0051)
    assert cli.main(["predict", str(default_run), "--top", "2"]) == 0


def test_a_default_run_can_be_resumed_and_overwritten(folder, default_run, monkeypatch, capsys, tmp_path):
    words = ["train", "recommend", "--train", str(folder / "train.txt"), "--test", str(folder / "test.txt")]
    words += [*DEFAULT, "--out", str(tmp_path / "run")]
    epoch = engine_run._Run._epoch

    def killed(self, number, step):
        if number == 2 and "matrix" in str(self.folder.path):
            raise KeyboardInterrupt
        return epoch(self, number, step)

    with monkeypatch.context() as patched:
        patched.setattr(engine_run._Run, "_epoch", killed)
        assert cli.main(words) == 130
    said = capsys.readouterr().err
    again = f"torchlml train recommend --resume {tmp_path}"
    assert f"while training `matrix-factorization`. Resume the run with `{again}" in said
    assert "is not finished. Resume it with" in rejected(capsys, ["predict", tmp_path / "run"])
    assert cli.main(["train", "recommend", "--resume", str(tmp_path / "run")]) == 0
    whole, resumed = (
        json.loads((run / "result.json").read_text()) for run in (default_run, tmp_path / "run")
    )
    assert whole | {"seconds": 0} == resumed | {"seconds": 0}
    assert "(`--out`) already contains a run" in rejected(capsys, words)
    capsys.readouterr()
    assert cli.main([*words, "--overwrite", "--epochs", "1"]) == 0
    assert run_of(tmp_path / "run", "autoencoder")["best_epoch"] == 1


def test_models_in_closed_form_are_left_out_if_memory_is_too_small(folder, monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(item_weights, "memory_available", lambda: 0)
    words = ["train", "recommend", "--train", str(folder / "train.txt"), "--out", str(tmp_path / "run")]
    assert cli.main([*words, *DEFAULT, "--epochs", "1"]) == 0
    why = "it needs 0.0 GB of memory, but 0.0 GB is available"
    said = capsys.readouterr().out
    for name in ("ease", "graph-filter"):
        assert f"`{name}` is left out, because {why}." in said
        assert not (tmp_path / "run" / name).exists()
    assert cli.main(["predict", str(tmp_path / "run")]) == 0


@pytest.mark.parametrize("model", ["ease", "graph-filter"])
def test_a_model_that_does_not_fit_is_rejected_and_nothing_is_written(
    folder, monkeypatch, capsys, tmp_path, model
):
    monkeypatch.setattr(item_weights, "memory_available", lambda: 100_000)
    words = [
        "train",
        "recommend",
        "--train",
        folder / "train.txt",
        "--out",
        tmp_path / "run",
        "--model",
        model,
    ]
    assert f"`--model {model}` needs about 0.0 GB for 120 users and 120 items" in rejected(capsys, words)
    assert not (tmp_path / "run").exists()


def test_the_seconds_of_ease_include_the_fit(folder, monkeypatch, capsys, tmp_path):
    fit = item_weights.fit_ease

    def slow(*given):
        time.sleep(0.5)
        return fit(*given)

    monkeypatch.setattr(item_weights, "fit_ease", slow)
    words = ["train", "recommend", "--train", folder / "train.txt", "--out", tmp_path / "run"]
    assert cli.main([*map(str, words), "--model", "ease", "--penalty", "20"]) == 0
    assert 0.5 <= json.loads((tmp_path / "run" / "result.json").read_text())["seconds"] < 60


@pytest.mark.parametrize("model", ["ease", "graph-filter"])
def test_a_model_in_closed_form_recommends_to_new_users(folder, capsys, tmp_path, model):
    words = [
        "train",
        "recommend",
        "--train",
        folder / "train.txt",
        "--out",
        tmp_path / "run",
        "--model",
        model,
    ]
    assert cli.main([*map(str, words), "--penalty", "20"]) == 0
    assert "fitted: validation recall@20" in capsys.readouterr().out
    data, out = tmp_path / "new.txt", tmp_path / "best.jsonl"
    data.write_text("new g2-1 g2-5 g2-7 g2-9\n")
    assert cli.main(["predict", str(tmp_path / "run"), "--data", str(data), "--out", str(out)]) == 0
    assert all(item.startswith("g2-") for item in json.loads(out.read_text())["items"])
    said = rejected(capsys, ["step-time", tmp_path / "run"])
    assert f"is `{model}`, which has no training steps to time" in said


def test_graph_layers_recommend_to_new_users(folder, tmp_path):
    data, out = tmp_path / "new.txt", tmp_path / "best.jsonl"
    data.write_text("new g2-1 g2-5 g2-7 g2-9\n")
    run = folder / "matrix-factorization"
    assert cli.main(["predict", str(run), "--data", str(data), "--out", str(out)]) == 0
    found = json.loads(out.read_text())
    assert found["probabilities"] is not None
    assert all(item.startswith("g2-") for item in found["items"])


def test_the_latest_items_are_held_out_by_time(tmp_path):
    path = tmp_path / "a.inter"
    lines = ["user_id:token\titem_id:token\trating:float\ttimestamp:float"]
    # Each user has ten items, in random order in the file. The latest item has the rating 1.
    order = random.Random(0).sample([(u, i) for u in range(8) for i in range(10)], 80)
    lines += [f"u{u}\ti{i}\t{1 if i == 9 else 4.5}\t{1000 * u + i}" for u, i in order]
    path.write_text("\n".join(lines) + "\n")
    data = read(RecommendSettings(train=path, latest=True))
    for user in range(8):
        held = {data.training.items[i] for i in data.validation.of(user).tolist()}
        assert held in ({"i8", "i9"}, set())
    assert int((data.validation.counts > 0).sum()) == 2
    assert data.notes == [
        f"`{path}`: `rating` is not used. `--min-rating` skips low ratings, and `--latest` validates on "
        "each user's latest items."
    ]
    liked = read(RecommendSettings(train=path, latest=True, min_rating=4))
    assert len(liked.everything) == 72
    assert "i9" not in liked.everything.items
    assert liked.notes == [f"`{path}`: 8 pairs were skipped because of a rating below `--min-rating`."]
