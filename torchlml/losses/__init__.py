"""Losses for top-k recall, with arguments like those of `F.cross_entropy`."""

from torchlml.losses.linear import (
    LinearLMLLoss,
    LinearTruncatedEntropyLoss,
    linear_lml_loss,
    linear_truncated_entropy_loss,
)
from torchlml.losses.lml import LMLLoss, lml_loss
from torchlml.losses.subset import SubsetLoss, subset_loss
from torchlml.losses.svm import SmoothTopKSVMLoss, TopKSVMLoss, smooth_topk_svm_loss, topk_svm_loss
from torchlml.losses.truncated_entropy import TruncatedEntropyLoss, truncated_entropy_loss

__all__ = [
    "LMLLoss",
    "LinearLMLLoss",
    "LinearTruncatedEntropyLoss",
    "SmoothTopKSVMLoss",
    "SubsetLoss",
    "TopKSVMLoss",
    "TruncatedEntropyLoss",
    "linear_lml_loss",
    "linear_truncated_entropy_loss",
    "lml_loss",
    "smooth_topk_svm_loss",
    "subset_loss",
    "topk_svm_loss",
    "truncated_entropy_loss",
]
