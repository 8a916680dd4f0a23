"""The CIFAR-100 study: hostile and damaged files, label noise, augmentation, networks, losses, accuracies."""

import dataclasses
import json
import pickle
import subprocess
import sys
import tarfile
from pathlib import Path

import numpy as np
import pytest
import torch
from rich.console import Console

import torchlml
from tests.support.features import write_features
from torchlml_lab import cli
from torchlml_lab.engine import estimate
from torchlml_lab.errors import BadInput
from torchlml_lab.tasks.cifar100 import archive, networks, noise_sweep, samples
from torchlml_lab.tasks.cifar100.classification import (
    LOSSES,
    Cifar100Settings,
    accuracies,
    loss_of,
    run,
    task,
)


def batch(count, seed=0):
    """A part of the official files: every fine label as often as the next, coarse = fine mod 20."""
    random = np.random.default_rng(seed)
    fine = np.arange(count) % 100
    return {
        b"filenames": [b"a.png"] * count,
        b"batch_label": b"part 1",
        b"fine_labels": fine.tolist(),
        b"coarse_labels": (fine % 20).tolist(),
        b"data": random.integers(0, 256, (count, 3072), dtype=np.uint8),
    }


@pytest.fixture
def folder(tmp_path):
    path = tmp_path / "cifar-100-python"
    path.mkdir()
    # Protocol 2, as the official files; numpy >= 2 names numpy._core there, the official files numpy.core.
    (path / "train").write_bytes(pickle.dumps(batch(400), 2).replace(b"numpy._core", b"numpy.core"))
    (path / "test").write_bytes(pickle.dumps(batch(200, 1), 2))
    return path


def packed(folder):
    path = folder.parent / "cifar-100-python.tar.gz"
    with tarfile.open(path, "w:gz") as tar:
        tar.add(folder, folder.name)
    return path


def test_folder_parent_and_tar_give_the_same(folder):
    expected = batch(400)
    for path in (folder, folder.parent, packed(folder)):
        train, test = samples.read_images(path)
        assert train.x.shape == (400, 3, 32, 32)
        assert train.x.dtype == torch.uint8
        assert np.array_equal(train.x.flatten(1).numpy(), expected[b"data"])
        assert train.fine.tolist() == expected[b"fine_labels"]
        assert train.coarse.tolist() == expected[b"coarse_labels"]
        assert len(test) == 200


class Hostile:
    def __init__(self, function, *arguments):
        self.call = (function, arguments)

    def __reduce__(self):
        return self.call


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
@pytest.mark.parametrize("where", ["whole", "inside"])
def test_a_hostile_pickle_is_not_executed(capsys, folder, protocol, where):
    marker = folder / "executed"
    attack = Hostile(subprocess.check_call, ["touch", str(marker)])
    content = attack if where == "whole" else {**batch(10), b"data": attack}
    (folder / "train").write_bytes(pickle.dumps(content, protocol))
    assert cli.main(["train", "cifar100", "--data", str(folder), "--out", str(folder / "run")]) == 2
    error = capsys.readouterr().err
    assert ".check_call`, which no CIFAR-100 file does" in error
    assert str(folder / "train") in error
    assert not marker.exists()
    assert not (folder / "run").exists()
    # The attack is a real one: Python's own pickle executes it.
    pickle.loads((folder / "train").read_bytes())
    assert marker.exists()


@pytest.mark.parametrize(
    "attack",
    [
        Hostile(eval, "1 + 1"),
        Hostile(getattr, "text", "upper"),
        Hostile(np.fromfile, "/etc/hostname"),
        Hostile(torch.load, "x"),
        Hostile(open, "/etc/hostname"),
    ],
    ids=["eval", "getattr", "fromfile", "torch.load", "open"],
)
def test_only_arrays_may_be_rebuilt(attack):
    with pytest.raises(pickle.UnpicklingError, match="which no CIFAR-100 file does"):
        archive.load(pickle.dumps(attack, 2))


def changed(**changes):
    return pickle.dumps({**batch(40), **{key.encode(): value for key, value in changes.items()}}, 2)


@pytest.mark.parametrize(
    ("content", "needle"),
    [
        (b"", "Ran out of input"),
        (changed()[:1000], "damaged"),
        (b"not a pickle at all", "damaged"),
        (pickle.dumps([1, 2], 2), "it holds no dictionary"),
        (pickle.dumps({b"data": batch(3)[b"data"]}, 2), "it has no `fine_labels`"),
        (changed(fine_labels=[100] * 40), "its fine labels are not all whole numbers from 0 to 99"),
        (changed(fine_labels=[-1] * 40), "its fine labels are not all whole numbers from 0 to 99"),
        (changed(coarse_labels=[20] * 40), "its coarse labels are not all whole numbers from 0 to 19"),
        (changed(fine_labels=[0.5] * 40), "its fine labels are not all whole numbers from 0 to 99"),
        (changed(fine_labels=[1] * 39), "39 fine and 40 coarse labels"),
        (changed(data=np.zeros((40, 3071), np.uint8)), "(40, 3071)"),
        (changed(data=np.zeros((40, 3072), np.float32)), "no table of bytes"),
    ],
)
def test_damaged_files_are_named(folder, content, needle):
    (folder / "train").write_bytes(content)
    with pytest.raises(BadInput) as error:
        samples.read_images(folder)
    assert str(folder / "train") in str(error.value)
    assert needle in str(error.value)


def test_missing_and_truncated_files_are_named(folder):
    tar = packed(folder)
    whole = tar.read_bytes()
    for part in (whole[: len(whole) // 2], whole[:10], b"no tar"):
        tar.write_bytes(part)
        with pytest.raises(BadInput, match="is no whole tar file of CIFAR-100") as error:
            samples.read_images(tar)
        assert str(tar) in str(error.value)
    with tarfile.open(tar, "w:gz") as file:
        file.add(folder / "train", "cifar-100-python/train")
    with pytest.raises(BadInput, match="it has no `cifar-100-python/test`"):
        samples.read_images(tar)
    (folder / "test").unlink()
    with pytest.raises(BadInput, match="test` cannot be read: No such file"):
        samples.read_images(folder)
    with pytest.raises(BadInput, match="does not exist"):
        samples.read_images(folder / "nothing")


def features_of(path, **changes):
    fine = np.arange(200) % 100
    values = {"x": np.ones((200, 4), np.float16), "fine": fine, "coarse": fine // 5, "test": fine < 10}
    np.savez(path, **{key: value for key, value in {**values, **changes}.items() if value is not None})
    return path


@pytest.mark.parametrize(
    ("changes", "needle"),
    [
        ({"coarse": None}, "has no `coarse`"),
        ({"x": np.ones((199, 4), np.float32)}, "of shape (199, 4)"),
        ({"x": np.full((200, 4), np.nan, np.float32)}, "is not all finite"),
        ({"fine": np.full(200, 100)}, "`fine` must be whole numbers from 0 to 99"),
        ({"fine": np.full(200, 0.5)}, "`fine` must be whole numbers from 0 to 99"),
        ({"coarse": np.full(200, 20)}, "`coarse` must be whole numbers from 0 to 19"),
        ({"test": np.zeros(200, bool)}, "with some True and some False"),
        ({"x": np.array([object()] * 200)}, "cannot be read"),
    ],
)
def test_bad_features_are_named(tmp_path, changes, needle):
    path = features_of(tmp_path / "f.npz", **changes)
    with pytest.raises(BadInput) as error:
        samples.read_features(path)
    assert str(path) in str(error.value)
    assert needle in str(error.value)


def test_features_that_are_no_file(tmp_path):
    for content in (b"", b"PK\x03\x04 half", b"text"):
        (tmp_path / "f.npz").write_bytes(content)
        with pytest.raises(BadInput, match="cannot be read"):
            samples.read_features(tmp_path / "f.npz")
    with pytest.raises(BadInput, match="No such file"):
        samples.read_features(tmp_path / "nothing.npz")


def some_part(count=20_000):
    fine = torch.arange(count) % 100
    return samples.Part(torch.zeros(count, 1), fine, fine % 20)


@pytest.mark.parametrize("probability", [0.0, 0.2, 0.6, 1.0])
def test_noise_stays_in_the_coarse_class_and_has_the_right_rate(probability):
    part = some_part()
    noisy = samples.with_noise(part, probability, seed=3)
    assert (noisy.fine % 20 == part.coarse).all()
    # A label drawn anew is the old one in one of five cases; five deviations of a binomial share around it.
    rate = 0.8 * probability
    share = (noisy.fine != part.fine).double().mean().item()
    assert abs(share - rate) <= 5 * (rate * (1 - rate) / len(part)) ** 0.5
    if probability == 1:
        counts = torch.bincount(noisy.fine[part.fine == 7], minlength=100)
        assert (counts > 0).nonzero().flatten().tolist() == [7, 27, 47, 67, 87]


def test_noise_follows_from_the_seed_and_grows_with_the_probability():
    part = some_part()
    assert torch.equal(samples.with_noise(part, 0.4, 1).fine, samples.with_noise(part, 0.4, 1).fine)
    assert not torch.equal(samples.with_noise(part, 0.4, 1).fine, samples.with_noise(part, 0.4, 2).fine)
    less, more = samples.with_noise(part, 0.4, 1).fine, samples.with_noise(part, 0.8, 1).fine
    assert (less == more)[less != part.fine].all()


def test_labels_that_contradict_each_other_are_refused():
    part = some_part(200)
    with pytest.raises(BadInput, match="several coarse labels"):
        samples.with_noise(dataclasses.replace(part, coarse=torch.arange(200) % 19), 0.5, 0)


def test_the_split_is_the_same_for_every_seed_and_loses_nothing():
    part = dataclasses.replace(some_part(300), x=torch.arange(300).unsqueeze(1))
    train, validation = samples.split_validation(part, 50)
    torch.manual_seed(5)
    again, _ = samples.split_validation(part, 50)
    assert torch.equal(train.x, again.x)
    assert sorted((*train.x.flatten().tolist(), *validation.x.flatten().tolist())) == list(range(300))
    assert len(validation) == 50
    for count in (0, 300):
        with pytest.raises(BadInput, match="`--validation`"):
            samples.split_validation(part, count)


def test_augmented_images_are_crops_and_mirror_images():
    images = torch.randint(1, 256, (64, 3, 32, 32), dtype=torch.uint8)
    part = samples.Part(images, torch.arange(64), torch.zeros(64, dtype=torch.int64))
    plain, _ = samples.Batches(part).__getitems__(range(64))
    augmented, label = samples.Batches(part, augment=True).__getitems__(range(64))
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
    network = networks.DenseNet(depth=40, growth=40, classes=100)
    convolutions = [part for part in network.modules() if isinstance(part, torch.nn.Conv2d)]
    # 40 layers with weights: 1 + 3 blocks of 6 bottlenecks of 2 + 2 transitions + the linear one.
    assert len(convolutions) + 1 == 40
    # A block adds 6 x 40 channels, a transition halves them: 80 -> 320 -> 160 -> 400 -> 200 -> 440.
    assert {(320, 160), (400, 200)} <= {(part.in_channels, part.out_channels) for part in convolutions}
    assert network.head.in_features == 440
    with torch.no_grad():
        assert network(torch.zeros(2, 3, 32, 32)).shape == (2, 100)


def test_small_cnn_runs():
    assert networks.small_cnn(100)(torch.zeros(2, 3, 32, 32)).shape == (2, 100)


def test_losses_are_what_they_say():
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
        ([], "Exactly one of `--data`"),
        (["--data", "x", "--features", "y"], "Exactly one of `--data`"),
        (["--features", "x", "--network", "densenet-40-40"], "`--network` is for images"),
        (["--features", "x", "--k", "100"], "`--k` is 100"),
        (["--features", "x", "--k", "0"], "`--k` is 0"),
        (["--features", "x", "--noise", "1.1"], "`--noise` is 1.1"),
        (["--features", "x", "--noise", "nan"], "`--noise` is nan"),
        (["--features", "x", "--temperature", "0"], "`--temperature` is 0"),
        (["--features", "x", "--weight-decay", "-1"], "`--weight-decay` is -1"),
        (["--features", "x", "--loss", "hinge"], "hinge"),
        (["--features", "no-such-file.npz"], "no-such-file.npz"),
    ],
)
def test_bad_options(capsys, options, needle):
    assert cli.main(["train", "cifar100", *options]) == 2
    error = capsys.readouterr().err
    assert needle in error
    assert error.count("\n") == 1


def test_a_run_from_images(folder, tmp_path):
    out = tmp_path / "run"
    options = ["--data", str(packed(folder)), "--network", "small-cnn", "--out", str(out), "--epochs", "1"]
    command = [sys.executable, "-m", "torchlml", "train", "cifar100", *options, "--validation", "100"]
    root = Path(__file__).parents[2]
    done = subprocess.run(command, capture_output=True, text=True, cwd=root, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "Test of epoch 1" in done.stdout


def test_the_published_network_on_a_cpu_says_what_to_use_instead(monkeypatch):
    part = samples.Part(
        torch.zeros(200, 3, 32, 32, dtype=torch.uint8), torch.arange(200) % 100, torch.arange(200) % 20
    )
    monkeypatch.setattr(networks, "DenseNet", lambda depth, growth, classes: networks.small_cnn(classes))
    monkeypatch.setattr(estimate, "seconds_per_batch", lambda task, size: 4.0)
    for network, said in ((None, "use `--network small-cnn --epochs 6` here"), ("small-cnn", None)):
        settings = Cifar100Settings(data=Path("x"), network=network, validation=50)
        found = estimate.forecast(task(settings, part, part), 64, 300, 704)
        assert found is not None
        assert found.startswith("300 epochs of 704 batches will take about 10 days on this CPU.")
        assert said is None or said in found
        assert (said is None) == found.endswith("on this CPU.")
    assert estimate.forecast(task(settings, part, part), 64, 1, 10) is None


@pytest.mark.parametrize(
    ("seconds", "said"), [(30, "30 seconds"), (60, "1 minute"), (3600, "60 minutes"), (7200, "2 hours")]
)
def test_durations_in_words(seconds, said):
    assert estimate.in_words(seconds) == said


def test_a_wide_head_learns_wrong_labels_by_heart(tmp_path):
    """And the row of a sweep says so, beside what that leaves on clean labels."""
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
    row = noise_sweep.record(settings, run(settings, Console(quiet=True)))
    assert row.source == "wide-head"
    assert row.train_top1 > 0.99
    assert 0 < row.last_top1 < row.last_topk < 0.8
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [row.train_topk, row.last_topk] == [line["top5"] for line in lines if line["epoch"] == 30][:2]
