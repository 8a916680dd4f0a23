"""torchlml: the Limited Multi-Label projection for PyTorch, for models that choose exactly k of n things.

y = torchlml.lml(x, k)  # like softmax, but each row sums to k and every entry is in (0, 1)
"""

from torchlml import solvers
from torchlml.losses import (
    LMLLoss,
    SmoothTopKSVMLoss,
    TopKSVMLoss,
    TruncatedEntropyLoss,
    lml_loss,
    smooth_topk_svm_loss,
    topk_svm_loss,
    truncated_entropy_loss,
)
from torchlml.projection import LML, lml, lml_dual, log_lml

__version__ = "0.1.0"

__all__ = [
    "LML",
    "LMLLoss",
    "SmoothTopKSVMLoss",
    "TopKSVMLoss",
    "TruncatedEntropyLoss",
    "lml",
    "lml_dual",
    "lml_loss",
    "log_lml",
    "smooth_topk_svm_loss",
    "solvers",
    "topk_svm_loss",
    "truncated_entropy_loss",
]
