"""Losses for samples with several labels, by name: for multi-label classification and recommendation."""

import re
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits

import torchlml
from torchlml_lab.cli_errors import BadInput
from torchlml_lab.multilabel.settings import LOSSES, WITH_K, LossName, PerRow

PADDING = -100
"""The padding of label lists in a batch."""


@dataclass(frozen=True)
class LabelLoss:
    """A loss that sums over the labels of a row and averages over rows; rows without labels are ignored.

        loss = LabelLoss("lml", "labels")
        loss(logits, labels)

    Args:
        name: `lml`, `softmax` (the negative log-likelihood of the labels under a softmax), `bce` (labels that
            are not listed count as absent) or `truncated-entropy`.
        k: The number of labels that are predicted, for `lml` and `truncated-entropy`. For `lml` it may also
            be `labels`: the number of labels of each row. It must be None for the other two losses.
    """

    name: LossName
    k: int | PerRow | None = None

    def __post_init__(self) -> None:
        if (self.k is not None) != (self.name in WITH_K):
            needs = "requires `k`" if self.k is None else f"does not take `k`, but it is {self.k}"
            raise BadInput(f"The loss `{self.name}` {needs}.")
        if self.k == "labels" and self.name != "lml":
            raise BadInput(f"`k` must be an integer for the loss `{self.name}`, but it is `labels`.")
        if isinstance(self.k, int) and self.k < 1:
            raise BadInput(f"`k` must be at least 1, but it is {self.k}.")

    def __str__(self) -> str:
        return self.name if self.k is None else f"{self.name}-{self.k}"

    def check_labels(self, count: int) -> None:
        """Raise `BadInput` if k is not smaller than the number of labels."""
        if isinstance(self.k, int) and self.k >= count:
            raise BadInput(
                f"`k` must be from 1 to {count - 1}, because there are {count} labels, but it is {self.k}."
            )

    def __call__(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Compute the loss of a batch.

        Args:
            logits: (R, n).
            labels: int64 (R, L), the labels of each row without duplicates, padded with `PADDING`.

        Returns:
            The mean loss of the rows with labels, or 0 if there are none.
        """
        labels = unlike_logits(labels, logits.shape[-1])
        if self.name == "lml":
            return torchlml.lml_loss(logits, labels, self._k_of(labels))
        if self.name == "truncated-entropy":
            assert isinstance(self.k, int)
            return torchlml.truncated_entropy_loss(logits, labels, self.k)
        there = labels != PADDING
        if self.name == "softmax":
            score = logits.log_softmax(-1).gather(-1, labels.clamp(min=0))
            return _mean_of_labelled(-torch.where(there, score, 0).sum(-1), there)
        observed = _multi_hot(labels, logits)
        each = binary_cross_entropy_with_logits(logits, observed, reduction="none")
        return _mean_of_labelled(each.sum(-1), there)

    def of_linear(self, hidden: Tensor, layer: nn.Linear, labels: Tensor) -> Tensor:
        """The loss of `layer(hidden)`; `lml` never materializes the logits of a large batch."""
        if self.name != "lml":
            return self(layer(hidden).float(), labels)
        labels = unlike_logits(labels, layer.out_features)
        k = self._k_of(labels)
        return torchlml.linear_lml_loss(hidden, layer.weight, labels, k, linear_bias=layer.bias)

    def _k_of(self, labels: Tensor) -> float | Tensor:
        """The k of all rows, or of each row. A row without labels is ignored, so any k will do for it."""
        if self.k == "labels":
            return (labels != PADDING).sum(-1).clamp(min=1)
        assert self.k is not None
        return float(self.k)


def loss_with_usual_k(name: LossName, k: int | PerRow | None) -> LabelLoss:
    """The loss; without a k, `lml` uses each sample's number of labels and `truncated-entropy` uses 1."""
    usual: dict[str, int | PerRow] = {"lml": "labels", "truncated-entropy": 1}
    return LabelLoss(name, usual.get(name) if k is None else k)


def named(text: str, option: str = "--losses") -> LabelLoss:
    """Parse a loss name that includes its k, as in the tables and figures of a study.

    Args:
        text: `bce`, `softmax`, `lml-5`, `lml-labels`, `truncated-entropy-1`.
        option: The option that contains the name, for the error.

    Returns:
        The loss. An unknown name raises `BadInput`.
    """
    for name in LOSSES:
        if name not in WITH_K and text == name:
            return LabelLoss(name)
        if name in WITH_K and (found := re.fullmatch(rf"{name}-(\d+|labels)", text)):
            return LabelLoss(name, "labels" if found[1] == "labels" else int(found[1]))
    accepted = "bce, softmax, lml-K, lml-labels or truncated-entropy-K with an integer K"
    raise BadInput(f"`{option}` must contain {accepted}, but it contains `{text}`.")


def padded(rows: list[Tensor]) -> Tensor:
    """Pad label lists to one tensor, int64 (R, L)."""
    if not rows:
        return torch.empty(0, 0, dtype=torch.int64)
    return nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=PADDING).long()


def unlike_logits(labels: Tensor, n: int) -> Tensor:
    """Pad lists of width n by one column.

    Integers in the shape of the logits could be mistaken for multi-hot targets.
    """
    return nn.functional.pad(labels, (0, 1), value=PADDING) if labels.shape[-1] == n else labels


def _multi_hot(labels: Tensor, logits: Tensor) -> Tensor:
    rows, n = logits.shape
    # An extra column receives the padding.
    place = torch.where(labels == PADDING, n, labels)
    return logits.new_zeros(rows, n + 1).scatter_(-1, place, 1.0)[:, :n]


def _mean_of_labelled(loss: Tensor, there: Tensor) -> Tensor:
    labelled = there.any(-1)
    return torch.where(labelled, loss, 0).sum() / labelled.sum().clamp(min=1)
