"""torchlml: the Limited Multi-Label projection for PyTorch, for models that choose exactly k of n candidates.

`torchlml.lml(x, k)` is like `softmax(x)`, but each row sums to k and every entry is between 0 and 1.
"""

from torchlml import distributions
from torchlml._targets import pad_labels
from torchlml.balanced import balanced_lml, balanced_lml_dual
from torchlml.bracketing import lml_bracketing
from torchlml.choices import sample_subset, topk_mask
from torchlml.constrained import constrained_softmax, constrained_sparsemax
from torchlml.losses import (
    LinearLMLLoss,
    LinearTruncatedEntropyLoss,
    LMLLoss,
    SmoothTopKSVMLoss,
    SubsetLoss,
    TopKSVMLoss,
    TruncatedEntropyLoss,
    linear_lml_loss,
    linear_truncated_entropy_loss,
    lml_loss,
    smooth_topk_svm_loss,
    subset_loss,
    topk_svm_loss,
    truncated_entropy_loss,
)
from torchlml.projection import LML, lml, lml_dual, lml_value, log_lml
from torchlml.router import TopKRouter

__version__ = "0.1.0"

__all__ = [
    "LML",
    "LMLLoss",
    "LinearLMLLoss",
    "LinearTruncatedEntropyLoss",
    "SmoothTopKSVMLoss",
    "SubsetLoss",
    "TopKRouter",
    "TopKSVMLoss",
    "TruncatedEntropyLoss",
    "balanced_lml",
    "balanced_lml_dual",
    "constrained_softmax",
    "constrained_sparsemax",
    "distributions",
    "linear_lml_loss",
    "linear_truncated_entropy_loss",
    "lml",
    "lml_bracketing",
    "lml_dual",
    "lml_loss",
    "lml_value",
    "log_lml",
    "pad_labels",
    "sample_subset",
    "smooth_topk_svm_loss",
    "subset_loss",
    "topk_mask",
    "topk_svm_loss",
    "truncated_entropy_loss",
]
