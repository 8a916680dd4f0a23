"""Probabilities that mean what they say: one temperature for the logits, chosen on the validation rows.

The epoch of a run is chosen by the order of the labels, which says nothing of how sure the network is.
"""

import torch
from torch import Tensor

from torchlml_lab.data.labelled_rows import LabelledRows
from torchlml_lab.multilabel.trained_labels import Trained, probabilities
from torchlml_lab.tasks.label_losses import LossName

ENTRIES = 2**21  # logits that are enough to choose by
TEMPERATURES = torch.logspace(-1, 1, 41).tolist()


def best_temperature(logits: Tensor, observed: Tensor, loss: LossName, k: int) -> float:
    """The temperature whose probabilities make the observed labels most likely.

    Args:
        logits: (R, n).
        observed: bool (R, n), the labels of each row.
        loss: What the network was trained with.
        k: How many labels are predicted.

    Returns:
        The best of 41 from 0.1 to 10.
    """

    def surprise(temperature: float) -> float:
        found = probabilities(logits, loss, k, temperature).double().clamp(1e-9, 1 - 1e-9)
        return -torch.where(observed, found, 1 - found).log().mean().item()

    return min(TEMPERATURES, key=surprise)


def fit(trained: Trained, rows: LabelledRows) -> float:
    """The temperature of a run, from some of its validation rows."""
    labels = len(trained.preparation.labels)
    few = rows.take(torch.arange(min(len(rows), max(50, ENTRIES // labels))).numpy())
    logits = torch.cat([found for found, _ in trained.scores(trained.preparation.apply(few).inputs)])
    observed = torch.from_numpy(few.labels[:, :labels].toarray().astype(bool))
    return best_temperature(logits, observed, trained.settings.loss, trained.preparation.k)
