"""How good scores are: P@, nDCG@, PSP@ and R@, of a network or of any other scores."""

from collections.abc import Iterable, Sequence

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.nn.functional import pad

from torchlml.metrics import (
    PropensityScoredPrecision,
    TopKNDCG,
    TopKPrecision,
    TopKRecall,
    label_propensities,
)
from torchlml_lab.multilabel.losses import PADDING, unlike_logits
from torchlml_lab.multilabel.preparation import Preparation
from torchlml_lab.multilabel.samples import Batch

KS = (1, 3, 5)
NAMES = {"precision": "P", "ndcg": "nDCG", "psp": "PSP", "recall": "R"}
"""What the measures are called in tables."""


class Measures:
    """The measures of rows that come in batches; labels that the run does not know are never found.

    Args:
        preparation: The run's; its counts say how rare a label is.
        labels: How many labels the rows have, known and unknown.
        ks: How many of the best labels count.
    """

    def __init__(self, preparation: Preparation, labels: int, ks: Sequence[int] = KS) -> None:
        known = len(preparation.labels)
        self.more, self.ks = labels - known, tuple(k for k in ks if k <= known)
        counts = torch.tensor([*preparation.counts, *[0] * self.more])
        self.may_be_found = torch.arange(labels) < known
        self.metrics = [
            TopKPrecision(self.ks, sync_on_compute=False),
            TopKNDCG(self.ks, sync_on_compute=False),
            PropensityScoredPrecision(
                label_propensities(counts, preparation.rows), self.ks, sync_on_compute=False
            ),
            TopKRecall(self.ks, sync_on_compute=False),
        ]

    def update(self, scores: Tensor, labels: Tensor) -> None:
        """Count rows with scores (R, known labels) and lists of labels (R, L)."""
        scores = pad(scores, (0, self.more))
        labels = unlike_logits(labels, scores.shape[-1])
        mask = self.may_be_found.to(scores.device) if self.more else None
        for metric in self.metrics:
            metric.to(scores.device).update(scores, labels, mask=mask)

    def result(self) -> dict[str, float]:
        """All measures, from 0 to 1, by names like `ndcg@5`."""
        return {name: float(value) for metric in self.metrics for name, value in metric.compute().items()}


def measure(
    network: nn.Module,
    batches: Iterable[Batch],
    accelerator: Accelerator,
    preparation: Preparation,
    labels: int,
) -> dict[str, float]:
    """The measures of a network over the rows of all processes."""
    found = Measures(preparation, labels)
    for batch in batches:
        lists = accelerator.pad_across_processes(batch.labels, dim=1, pad_index=PADDING)
        found.update(*accelerator.gather_for_metrics((network(batch.inputs).float(), lists)))
    return found.result()


def popularity(preparation: Preparation, rows: Iterable[Tensor], labels: int) -> dict[str, float]:
    """The measures of saying the most frequent labels of the training rows to every row.

    Args:
        preparation: The run's.
        rows: Lists of labels (R, L) in batches.
        labels: How many labels the rows have, known and unknown.
    """
    found = Measures(preparation, labels)
    scores = torch.tensor(preparation.counts, dtype=torch.float32)
    for lists in rows:
        found.update(scores.expand(len(lists), -1), lists)
    return found.result()
