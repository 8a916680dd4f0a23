"""Data for the CIFAR-100 study: the official archive, malicious and damaged files, and feature files."""

import pickle
import subprocess
import tarfile

import numpy as np
import pytest
import torch

from torchlml_lab import cli
from torchlml_lab.cli_errors import BadInput
from torchlml_lab.studies.cifar100 import data


def batch(count, seed=0):
    """Return a dictionary in the official format, with balanced fine labels and coarse labels `fine % 20`."""
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
    # As in the official files, use protocol 2 and the name numpy.core, which is numpy._core in numpy >= 2.
    (path / "train").write_bytes(pickle.dumps(batch(400), 2).replace(b"numpy._core", b"numpy.core"))
    (path / "test").write_bytes(pickle.dumps(batch(200, 1), 2))
    return path


def packed(folder):
    path = folder.parent / "cifar-100-python.tar.gz"
    with tarfile.open(path, "w:gz") as tar:
        tar.add(folder, folder.name)
    return path


def test_folder_parent_and_tar_give_the_same_data(folder):
    expected = batch(400)
    for path in (folder, folder.parent, packed(folder)):
        train, test = data.read_images(path)
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
    assert ".check_call`, which CIFAR-100 files do not use" in error
    assert str(folder / "train") in error
    assert not marker.exists()
    assert not (folder / "run").exists()
    # The attack is real: Python's own pickle executes it.
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
    with pytest.raises(pickle.UnpicklingError, match="which CIFAR-100 files do not use"):
        data.load(pickle.dumps(attack, 2))


def changed(**changes):
    return pickle.dumps({**batch(40), **{key.encode(): value for key, value in changes.items()}}, 2)


@pytest.mark.parametrize(
    ("content", "needle"),
    [
        (b"", "Ran out of input"),
        (changed()[:1000], "damaged"),
        (b"not a pickle at all", "damaged"),
        (pickle.dumps([1, 2], 2), "it does not contain a dictionary"),
        (pickle.dumps({b"data": batch(3)[b"data"]}, 2), "it has no `fine_labels`"),
        (changed(fine_labels=[100] * 40), "its fine labels must be integers from 0 to 99"),
        (changed(fine_labels=[-1] * 40), "its fine labels must be integers from 0 to 99"),
        (changed(coarse_labels=[20] * 40), "its coarse labels must be integers from 0 to 19"),
        (changed(fine_labels=[0.5] * 40), "its fine labels must be integers from 0 to 99"),
        (changed(fine_labels=[1] * 39), "39 fine and 40 coarse labels"),
        (changed(data=np.zeros((40, 3071), np.uint8)), "(40, 3071)"),
        (changed(data=np.zeros((40, 3072), np.float32)), "not a 2-D array of bytes"),
    ],
)
def test_damaged_files_are_rejected_by_name(folder, content, needle):
    (folder / "train").write_bytes(content)
    with pytest.raises(BadInput) as error:
        data.read_images(folder)
    assert str(folder / "train") in str(error.value)
    assert needle in str(error.value)


def test_missing_and_truncated_files_are_rejected_by_name(folder):
    tar = packed(folder)
    whole = tar.read_bytes()
    for part in (whole[: len(whole) // 2], whole[:10], b"no tar"):
        tar.write_bytes(part)
        with pytest.raises(BadInput, match="is not a complete CIFAR-100 tar file") as error:
            data.read_images(tar)
        assert str(tar) in str(error.value)
    with tarfile.open(tar, "w:gz") as file:
        file.add(folder / "train", "cifar-100-python/train")
    with pytest.raises(BadInput, match="it has no `cifar-100-python/test`"):
        data.read_images(tar)
    (folder / "test").unlink()
    with pytest.raises(BadInput, match="test` cannot be read: No such file"):
        data.read_images(folder)
    with pytest.raises(BadInput, match="does not exist"):
        data.read_images(folder / "nothing")


def features_of(path, **changes):
    fine = np.arange(200) % 100
    values = {"x": np.ones((200, 4), np.float16), "fine": fine, "coarse": fine // 5, "test": fine < 10}
    np.savez(path, **{key: value for key, value in {**values, **changes}.items() if value is not None})
    return path


@pytest.mark.parametrize(
    ("changes", "needle"),
    [
        ({"coarse": None}, "has no array `coarse`"),
        ({"x": np.ones((199, 4), np.float32)}, "shape (199, 4)"),
        ({"x": np.full((200, 4), np.nan, np.float32)}, "`x` must be finite"),
        ({"fine": np.full(200, 100)}, "`fine` must contain only integers from 0 to 99"),
        ({"fine": np.full(200, 0.5)}, "`fine` must contain only integers from 0 to 99"),
        ({"coarse": np.full(200, 20)}, "`coarse` must contain only integers from 0 to 19"),
        ({"test": np.zeros(200, bool)}, "must be a bool array that contains both True and False"),
        ({"x": np.array([object()] * 200)}, "cannot be read"),
    ],
)
def test_bad_features_are_rejected_by_name(tmp_path, changes, needle):
    path = features_of(tmp_path / "f.npz", **changes)
    with pytest.raises(BadInput) as error:
        data.read_features(path)
    assert str(path) in str(error.value)
    assert needle in str(error.value)


def test_feature_files_in_another_format_are_rejected(tmp_path):
    for content in (b"", b"PK\x03\x04 half", b"text"):
        (tmp_path / "f.npz").write_bytes(content)
        with pytest.raises(BadInput, match="cannot be read"):
            data.read_features(tmp_path / "f.npz")
    with pytest.raises(BadInput, match="No such file"):
        data.read_features(tmp_path / "nothing.npz")


def test_a_run_from_images(capsys, folder, tmp_path):
    options = ["--data", str(packed(folder)), "--network", "small-cnn", "--out", str(tmp_path / "run")]
    assert cli.main(["train", "cifar100", *options, "--epochs", "1", "--validation", "100"]) == 0
    assert "Test results for epoch 1" in capsys.readouterr().out
