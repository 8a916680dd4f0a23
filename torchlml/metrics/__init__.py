"""Recall, precision and nDCG with their standard definitions.

Every metric is available as a subclass of `torchmetrics.Metric`, which accumulates batches and synchronizes
processes, and as a function that evaluates one batch.
"""

try:
    import torchmetrics  # noqa: F401
except ImportError:
    raise ImportError(
        "`torchlml.metrics` requires torchmetrics. Install it with `pip install torchlml[metrics]`."
    ) from None

from torchlml.metrics.propensity import (
    PropensityScoredPrecision,
    label_propensities,
    propensity_scored_precision,
)
from torchlml.metrics.scene_graph import SceneGraphRecall, scene_graph_recall
from torchlml.metrics.topk import TopKNDCG, TopKPrecision, TopKRecall, topk_ndcg, topk_precision, topk_recall

__all__ = [
    "PropensityScoredPrecision",
    "SceneGraphRecall",
    "TopKNDCG",
    "TopKPrecision",
    "TopKRecall",
    "label_propensities",
    "propensity_scored_precision",
    "scene_graph_recall",
    "topk_ndcg",
    "topk_precision",
    "topk_recall",
]
