"""`torchlml routing` and `torchlml bench balanced`: routers, resuming, tables and bad options."""

from __future__ import annotations

import csv
from collections import Counter

import pytest
import torch

from torchlml_lab import cli
from torchlml_lab.bench import targets, timing
from torchlml_lab.studies import routing
from torchlml_lab.studies.routing import ROUTERS


def logits(seed: int = 0) -> torch.Tensor:
    return torch.randn(2048, 16, generator=torch.Generator().manual_seed(seed)) + 3 * torch.linspace(
        -1, 1, 16
    )


def load(indices: torch.Tensor) -> float:
    return indices.flatten().bincount(minlength=16).max().item() * 16 / indices.numel()


@pytest.mark.parametrize("name", ROUTERS)
def test_every_router_gives_two_experts_and_weights_that_sum_to_one(name):
    weights, indices, loss = ROUTERS[name](16, 2)(logits())
    assert weights.shape == indices.shape == (2048, 2)
    assert (indices[:, 0] != indices[:, 1]).all()
    torch.testing.assert_close(weights.sum(-1), torch.ones(2048))
    assert (float(loss) > 0) == ("auxiliary" in name)


def test_the_switch_loss_is_smallest_for_equal_loads():
    router = routing.TopK(4, 1, 0.5)
    equal = 20 * torch.eye(4).repeat(8, 1)
    assert float(router(equal)[2]) == pytest.approx(0.5)
    assert float(router(20 * torch.eye(4)[:1].repeat(32, 1))[2]) == pytest.approx(2.0)


def test_balance():
    """Sinkhorn and balanced LML balance each batch, a bias needs many batches, and top-k is unbalanced."""
    bias = routing.LossFree(16, 2, 0.01)
    loads = [load(bias(logits(seed))[1]) for seed in range(300)]
    assert loads[0] > 5
    assert loads[-1] < 1.5
    assert load(routing.TopK(16, 2)(logits())[1]) > 5
    assert load(routing.Sinkhorn(16, 2)(logits())[1]) < 1.5
    assert load(routing.Sinkhorn(16, 2).eval()(logits())[1]) > 5
    assert load(routing.Balanced(16, 2, 1.0)(logits())[1]) < 1.3


def test_the_experts_are_applied_to_their_tokens():
    torch.manual_seed(0)
    experts, x = routing.Experts(), torch.randn(10, routing.WIDTH)
    indices, weights = torch.randint(16, (10, 2)), torch.rand(10, 2)
    found = experts(x, weights, indices)
    for t in range(10):
        parts = [
            weights[t, j] * torch.nn.functional.gelu(x[t] @ experts.up[e]) @ experts.down[e]
            for j, e in enumerate(indices[t].tolist())
        ]
        torch.testing.assert_close(found[t], parts[0] + parts[1], rtol=1e-4, atol=1e-5)


def test_the_study_resumes_and_draws_its_figure(tmp_path, capsys, monkeypatch):
    few = {name: ROUTERS[name] for name in ("no balancing", "TopKRouter, T = 1")}
    monkeypatch.setattr(routing, "ROUTERS", few)
    batch = routing.batch
    monkeypatch.setattr(routing, "batch", lambda text, _, generator: batch(text, 4, generator))  # for speed
    path, picture = tmp_path / "new" / "routing.csv", tmp_path / "routing.png"
    words = ["routing", "--steps", "20", "--csv", str(path), "--out", str(picture)]
    assert cli.main([*words, "--seeds", "1"]) == 0
    first = path.read_text()
    trained, train = [], routing.train

    def recorded(name, seed, settings):
        trained.append((name, seed))
        return train(name, seed, settings)

    monkeypatch.setattr(routing, "train", recorded)
    assert cli.main([*words, "--seeds", "2"]) == 0
    assert trained == [("no balancing", 1), ("TopKRouter, T = 1", 1)]
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert Counter((row["router"], row["seed"]) for row in rows) == {(n, s): 20 for n in few for s in "01"}
    assert set(first.splitlines()) <= set(path.read_text().splitlines())
    assert all(float(row["load"]) >= 1 for row in rows)
    assert picture.stat().st_size > 1000
    page = picture.with_suffix(".md").read_text()
    assert "| TopKRouter, T = 1 | 2 |" in page
    assert "±" in capsys.readouterr().out
    assert cli.main([*words[:1], "--steps", "40", *words[3:]]) == 2
    assert "different settings" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "needle"),
    [
        (["routing", "--seeds", "0"], "`--seeds` must be at least 1, but it is 0"),
        (["routing", "--steps", "30"], "multiple of 20"),
        (["routing", "--learning-rate", "2"], "`--learning-rate` must be between 0 and 1, but it is 2"),
        (["routing", "--out", "picture.txt"], "must end in `.png` or `.svg`"),
        (
            ["bench", "balanced", "--dtype", "int8"],
            "`--dtype` must be one of float32, float64, bfloat16, but it contains `int8`",
        ),
        (["bench", "balanced", "--skews", "-1"], "`--skews` must be finite and at least 0, but it is -1"),
    ],
)
def test_bad_options(capsys, monkeypatch, words, needle):
    monkeypatch.setattr(routing, "train_all", None)
    assert cli.main(words) == 2
    assert needle in capsys.readouterr().err


def test_the_benchmark_prints_its_targets(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(timing, "_SAMPLE_SECONDS", 1e-6)
    monkeypatch.setattr(timing, "_WARM_UP_SECONDS", 0.0)
    monkeypatch.setattr(targets, "_SHAPES", ((64, 8, 2),))
    path = tmp_path / "balanced.csv"
    words = ["bench", "balanced", "--repetitions", "2", "--skews", "0", "--csv", str(path)]
    assert cli.main(words) == 0
    printed = capsys.readouterr().out
    for name in ("cold start", "warm start", "backward", "target"):
        assert name in printed
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 5
    assert all(float(row["ratio_p50"]) == pytest.approx(1) for row in rows if row["provider"] == "lml")
