"""The CIFAR-100 study: label noise, augmentation, networks, losses, accuracies and options."""

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from rich.console import Console

import torchlml
from tests.support.features import write_features
from torchlml_lab import cli
from torchlml_lab.cli_errors import BadInput
from torchlml_lab.engine import loop
from torchlml_lab.studies.cifar100 import data, sweep
from torchlml_lab.studies.cifar100.settings import LOSSES, Cifar100Settings
from torchlml_lab.studies.cifar100.task import DenseNet, accuracies, loss_of, run, small_cnn, task


def some_part(count=20_000):
    fine = torch.arange(count) % 100
    return data.Part(torch.zeros(count, 1), fine, fine % 20)


@pytest.mark.parametrize("probability", [0.0, 0.2, 0.6, 1.0])
def test_noise_stays_in_the_coarse_class_and_has_the_right_rate(probability):
    part = some_part()
    noisy = data.with_noise(part, probability, seed=3)
    assert (noisy.fine % 20 == part.coarse).all()
    # A resampled label is unchanged in one of five cases. The tolerance is five standard deviations.
    rate = 0.8 * probability
    share = (noisy.fine != part.fine).double().mean().item()
    assert abs(share - rate) <= 5 * (rate * (1 - rate) / len(part)) ** 0.5
    if probability == 1:
        counts = torch.bincount(noisy.fine[part.fine == 7], minlength=100)
        assert (counts > 0).nonzero().flatten().tolist() == [7, 27, 47, 67, 87]


def test_noise_depends_on_the_seed_and_grows_with_the_probability():
    part = some_part()
    assert torch.equal(data.with_noise(part, 0.4, 1).fine, data.with_noise(part, 0.4, 1).fine)
    assert not torch.equal(data.with_noise(part, 0.4, 1).fine, data.with_noise(part, 0.4, 2).fine)
    less, more = data.with_noise(part, 0.4, 1).fine, data.with_noise(part, 0.8, 1).fine
    assert (less == more)[less != part.fine].all()


def test_labels_that_contradict_each_other_are_rejected():
    part = some_part(200)
    with pytest.raises(BadInput, match="several coarse labels"):
        data.with_noise(dataclasses.replace(part, coarse=torch.arange(200) % 19), 0.5, 0)


def test_the_split_is_the_same_for_every_seed_and_loses_nothing():
    part = dataclasses.replace(some_part(300), x=torch.arange(300).unsqueeze(1))
    train, validation = data.split_validation(part, 50)
    torch.manual_seed(5)
    again, _ = data.split_validation(part, 50)
    assert torch.equal(train.x, again.x)
    assert sorted((*train.x.flatten().tolist(), *validation.x.flatten().tolist())) == list(range(300))
    assert len(validation) == 50
    for count in (0, 300):
        with pytest.raises(BadInput, match="`--validation`"):
            data.split_validation(part, count)


def test_augmented_images_are_crops_and_mirror_images():
    images = torch.randint(1, 256, (64, 3, 32, 32), dtype=torch.uint8)
    part = data.Part(images, torch.arange(64), torch.zeros(64, dtype=torch.int64))
    plain, _ = data.Batches(part).__getitems__(range(64))
    augmented, label = data.Batches(part, augment=True).__getitems__(range(64))
    assert torch.equal(label, torch.arange(64))
    mean = torch.tensor((125.3, 123.0, 113.9)).view(3, 1, 1)
    deviation = torch.tensor((63.0, 62.1, 66.7)).view(3, 1, 1)
    torch.testing.assert_close(plain, (images.float() - mean) / deviation)
    padded = torch.nn.functional.pad(images, (4, 4, 4, 4))
    mirrored, places = 0, set()
    for i in range(64):
        crops = {(y, x, 0): padded[i, :, y : y + 32, x : x + 32] for y in range(9) for x in range(9)}
        crops |= {(y, x, 1): crop.flip(-1) for (y, x, _), crop in crops.items()}
        pixels = (augmented[i] * deviation + mean).round().to(torch.uint8)
        found = [key for key, crop in crops.items() if torch.equal(crop, pixels)]
        assert len(found) == 1
        mirrored += found[0][2]
        places.add(found[0][:2])
    assert 16 < mirrored < 48
    assert len(places) > 30


def test_densenet_40_40_has_the_published_shape():
    network = DenseNet(depth=40, growth=40, classes=100)
    convolutions = [part for part in network.modules() if isinstance(part, torch.nn.Conv2d)]
    # 40 layers have weights: the first convolution, 3 blocks of 6 bottlenecks with 2 convolutions each,
    # 2 transitions, and a linear layer.
    assert len(convolutions) + 1 == 40
    # A block adds 6 x 40 channels, and a transition halves the number: 80 -> 320 -> 160 -> 400 -> 200 -> 440.
    assert {(320, 160), (400, 200)} <= {(part.in_channels, part.out_channels) for part in convolutions}
    assert network.head.in_features == 440
    with torch.no_grad():
        assert network(torch.zeros(2, 3, 32, 32)).shape == (2, 100)


def test_small_cnn_runs():
    assert small_cnn(100)(torch.zeros(2, 3, 32, 32)).shape == (2, 100)


def test_losses_match_their_definitions():
    logits, label = torch.randn(8, 100, dtype=torch.float64), torch.randint(100, (8,))
    row, t = torch.arange(8), 2.0
    s = logits / t
    expected = {
        "cross-entropy": -s.log_softmax(-1)[row, label].mean(),
        "lml": -torchlml.lml(s, 5)[row, label].log().mean(),
        "truncated-entropy": torchlml.truncated_entropy_loss(s, label, 5),
        "smooth-svm": torchlml.smooth_topk_svm_loss(logits, label, 5, tau=t),
        "bce": (torch.nn.functional.softplus(s).sum(-1) - s[row, label]).mean(),
    }
    assert set(expected) == set(LOSSES)
    for name in LOSSES:
        torch.testing.assert_close(loss_of(name, 5, t)(logits, label), expected[name])


@pytest.mark.parametrize(
    ("epochs", "changes"), [(300, {151: 0.01, 226: 0.001}), (10, {6: 0.01, 8: 0.001}), (1, {})]
)
def test_the_learning_rate_drops_after_half_and_three_quarters(epochs, changes):
    part = dataclasses.replace(some_part(200), x=torch.zeros(200, 4))
    settings = Cifar100Settings(features=Path("x"), epochs=epochs, validation=50)
    one = task(settings, part, part)
    expected = 0.1
    for epoch in range(1, epochs + 1):
        expected = changes.get(epoch, expected)
        assert one.optimizer.param_groups[0]["lr"] == pytest.approx(expected)
        one.optimizer.step()
        one.scheduler.step()


class OneProcess:
    @staticmethod
    def gather_for_metrics(values):
        return values


def test_accuracies_by_hand():
    logits = torch.tensor([[4.0, 3, 2, 1], [1, 2, 3, 4], [1, 2, 3, 4]])
    batches = [(logits[:2], torch.tensor([0, 2])), (logits[2:], torch.tensor([0]))]
    found = accuracies(torch.nn.Identity(), batches, OneProcess(), (1, 2))
    assert found == pytest.approx({"top1": 1 / 3, "top2": 2 / 3})


@pytest.mark.parametrize(
    ("options", "needle"),
    [
        ([], "Pass exactly one of `--data`"),
        (["--data", "x", "--features", "y"], "Pass exactly one of `--data`"),
        (["--features", "x", "--network", "densenet-40-40"], "`--network` applies to images"),
        (
            ["--features", "x", "--k", "100"],
            "`--k` must be from 1 to 99 (there are 100 classes), but it is 100",
        ),
        (["--features", "x", "--k", "0"], "`--k` must be from 1 to 99 (there are 100 classes), but it is 0"),
        (["--features", "x", "--noise", "1.1"], "`--noise` must be from 0 to 1, but it is 1.1"),
        (["--features", "x", "--noise", "nan"], "`--noise` must be from 0 to 1, but it is nan"),
        (
            ["--features", "x", "--temperature", "0"],
            "`--temperature` must be finite and positive, but it is 0",
        ),
        (["--features", "x", "--weight-decay", "-1"], "`--weight-decay` must be finite and at least 0"),
        (["--features", "x", "--loss", "hinge"], "hinge"),
        (["--features", "no-such-file.npz"], "no-such-file.npz"),
    ],
)
def test_bad_options(capsys, options, needle):
    assert cli.main(["train", "cifar100", *options]) == 2
    error = capsys.readouterr().err
    assert needle in error
    assert error.count("\n") == 1


def test_the_published_network_on_a_cpu_suggests_an_alternative(monkeypatch):
    part = data.Part(
        torch.zeros(200, 3, 32, 32, dtype=torch.uint8), torch.arange(200) % 100, torch.arange(200) % 20
    )
    monkeypatch.setattr(
        "torchlml_lab.studies.cifar100.task.DenseNet", lambda depth, growth, classes: small_cnn(classes)
    )
    monkeypatch.setattr(loop, "needs", lambda task, size: loop.Needs(4.0, 2.0, 1.6e9))
    for network, said in ((None, "On a CPU, use `--network small-cnn --epochs 6`"), ("small-cnn", None)):
        settings = Cifar100Settings(data=Path("x"), network=network, validation=50)
        found = loop.forecast(task(settings, part, part), 64, 300, 704)
        assert found is not None
        expected = (
            "300 epochs of 704 batches will take about 10 days on this CPU (47 minutes per epoch) "
            "and use about "
        )
        assert found.startswith(f"{expected}1.6 GB of memory.")
        assert said is None or said in found
        assert (said is None) == found.endswith("of memory.")
    assert loop.forecast(task(settings, part, part), 64, 1, 10) is None


@pytest.mark.parametrize(
    ("seconds", "said"), [(30, "30 seconds"), (60, "1 minute"), (3600, "60 minutes"), (7200, "2 hours")]
)
def test_durations_as_text(seconds, said):
    assert loop.in_words(seconds) == said


def test_a_wide_head_memorizes_wrong_labels(tmp_path):
    """The accuracy is high on the noisy training labels, but not on the clean test labels."""
    settings = Cifar100Settings(
        features=write_features(tmp_path, 16),
        head="wide",
        loss="cross-entropy",
        noise=1.0,
        samples=300,
        validation=500,
        batch_size=50,
        weight_decay=0.0,
        epochs=30,
        out=tmp_path / "run",
        cpu=True,
        threads=1,
    )
    row = sweep.record(settings, run(settings, Console(quiet=True)))
    assert row.source == "wide-head"
    assert row.train_top1 > 0.99
    assert 0 < row.last_top1 < row.last_topk < 0.8
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [row.train_topk, row.last_topk] == [line["top5"] for line in lines if line["epoch"] == 30][:2]
