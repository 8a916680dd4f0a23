"""Recall, the way it is reported; on `torchmetrics.Metric`, which brings synchronisation over processes."""

try:
    import torchmetrics  # noqa: F401
except ImportError:
    raise ImportError(
        "`torchlml.metrics` needs torchmetrics: install it with `pip install torchmetrics`."
    ) from None

from torchlml.metrics.scene_graph import SceneGraphRecall
from torchlml.metrics.topk import TopKRecall

__all__ = ["SceneGraphRecall", "TopKRecall"]
