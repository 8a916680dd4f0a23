"""The losses that all loss tests use. Add a new loss to the table for the kind of target that it accepts."""

from __future__ import annotations

import pytest

import torchlml

MULTI_LABEL = {
    torchlml.lml_loss: torchlml.LMLLoss,
    torchlml.truncated_entropy_loss: torchlml.TruncatedEntropyLoss,
}
SINGLE_LABEL = {
    torchlml.smooth_topk_svm_loss: torchlml.SmoothTopKSVMLoss,
    torchlml.topk_svm_loss: torchlml.TopKSVMLoss,
}
EVERY = MULTI_LABEL | SINGLE_LABEL
# These losses treat a set of labels as one event, not as a sum over labels. test_subset_loss.py tests them.
SETS = {torchlml.subset_loss: torchlml.SubsetLoss}

every = pytest.mark.parametrize("loss", EVERY, ids=lambda loss: loss.__name__)
multi_label = pytest.mark.parametrize("loss", MULTI_LABEL, ids=lambda loss: loss.__name__)
single_label = pytest.mark.parametrize("loss", SINGLE_LABEL, ids=lambda loss: loss.__name__)
