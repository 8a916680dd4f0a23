"""torchlml: the Limited Multi-Label projection for PyTorch, for models that choose exactly k of n things.

y = torchlml.lml(x, k)  # like softmax, but each row sums to k and every entry is in (0, 1)
"""

from torchlml import losses, solvers
from torchlml.family.choices import sample_subset, topk_mask
from torchlml.family.constrained_softmax import constrained_softmax
from torchlml.family.constrained_sparsemax import constrained_sparsemax
from torchlml.family.value import lml_value
from torchlml.losses import *  # noqa: F403 what is public there is public here
from torchlml.projection import LML, lml, lml_dual, log_lml

__version__ = "0.1.0"

__all__ = [
    "LML",
    "constrained_softmax",
    "constrained_sparsemax",
    "lml",
    "lml_dual",
    "lml_value",
    "log_lml",
    "sample_subset",
    "solvers",
    "topk_mask",
]
__all__ += losses.__all__
