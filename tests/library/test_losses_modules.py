"""The loss modules: their settings, repr, device and dtype changes, copies and pickling."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch

import torchlml
from tests.support.losses import EVERY

# Settings that differ from the defaults.
SETTINGS = {
    torchlml.smooth_topk_svm_loss: {"tau": 0.5, "alpha": 2.0},
    torchlml.topk_svm_loss: {"alpha": 2.0},
}
every = pytest.mark.parametrize(
    ("module", "function", "settings"),
    [(module, function, SETTINGS.get(function, {})) for function, module in EVERY.items()],
    ids=[module.__name__ for module in EVERY.values()],
)


@every
def test_a_module_matches_its_function(module, function, settings):
    x, y, mask = torch.randn(5, 8), torch.tensor([0, 1, 2, -1, 4]), torch.arange(8) < 7
    settings = {**settings, "weight": torch.rand(8), "ignore_index": -1, "reduction": "none"}
    loss = module(3, **settings)
    assert torch.equal(loss(x, y, mask=mask), function(x, y, 3, mask=mask, **settings))
    assert torch.equal(module(3)(x, y.clamp(min=0)), function(x, y.clamp(min=0), 3))


@every
def test_a_module_can_be_moved_copied_and_pickled(module, function, settings):
    x, y = torch.randn(5, 8), torch.randint(8, (5,))
    loss = module(3, weight=torch.rand(8), **settings)
    assert [name for name, _ in loss.named_buffers()] == ["weight"]
    expected = loss(x, y)
    for copied in (copy.deepcopy(loss), pickle.loads(pickle.dumps(loss)), loss.cpu(), loss.to("cpu")):
        assert torch.equal(copied(x, y), expected)
    loss.double()
    assert loss.weight.dtype == torch.float64
    torch.testing.assert_close(loss(x.double(), y), expected.double(), rtol=1e-5, atol=1e-6)
    assert loss.to("meta").weight.device.type == "meta"


def test_representation_of_modules():
    assert repr(torchlml.LMLLoss(5)) == "LMLLoss(k=5, reduction='mean')"
    assert (
        repr(torchlml.TruncatedEntropyLoss(5, weight=torch.ones(9), ignore_index=-1, reduction="sum"))
        == "TruncatedEntropyLoss(k=5, weight=<9 classes>, ignore_index=-1, reduction='sum')"
    )
    assert (
        repr(torchlml.SmoothTopKSVMLoss(5)) == "SmoothTopKSVMLoss(k=5, reduction='mean', tau=1.0, alpha=1.0)"
    )
    assert repr(torchlml.TopKSVMLoss(5, alpha=2.0)) == "TopKSVMLoss(k=5, reduction='mean', alpha=2.0)"


@every
def test_wrong_settings_are_rejected_at_construction(module, function, settings):
    with pytest.raises(ValueError, match="`reduction`"):
        module(3, reduction="avg")
    with pytest.raises(ValueError, match=r"`k` must be .*at least [01], but (it|k) is -1"):
        module(-1)


@every
def test_mask_and_offsets_are_keyword_only(module, function, settings):
    x, y, mask = torch.randn(5, 8), torch.randint(7, (5,)), torch.arange(8) < 7
    with pytest.raises(TypeError, match="positional"):
        module(3, **settings)(x, y, mask)
