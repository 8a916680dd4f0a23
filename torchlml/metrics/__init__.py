"""Recall, the way it is reported; on `torchmetrics.Metric`, which brings synchronisation over processes.

Every metric is there as a class, which adds up batches, and as a function of one batch.
"""

try:
    import torchmetrics  # noqa: F401
except ImportError:
    raise ImportError(
        "`torchlml.metrics` needs torchmetrics: install it with `pip install torchmetrics`."
    ) from None

from torchlml.metrics.scene_graph import SceneGraphRecall, scene_graph_recall
from torchlml.metrics.topk import TopKRecall, topk_recall

__all__ = ["SceneGraphRecall", "TopKRecall", "scene_graph_recall", "topk_recall"]
