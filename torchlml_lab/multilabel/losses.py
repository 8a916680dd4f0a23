"""The losses of rows with several labels, by name: for multi-label classification and recommendation."""

import re
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits

import torchlml
from torchlml_lab.cli_errors import BadInput
from torchlml_lab.multilabel.settings import LOSSES, WITH_K, LossName, PerRow

PADDING = -100
"""Fills the label lists of a batch up to the longest."""


@dataclass(frozen=True)
class LabelLoss:
    """The mean over rows of a loss that sums over a row's labels; rows without labels do not count.

        loss = LabelLoss("lml", "labels")
        loss(logits, labels)

    Args:
        name: `lml`, `softmax` (minus the log-likelihood of the labels as draws from a softmax), `bce` (every
            label that is not listed counts as absent) or `truncated-entropy`.
        k: How many labels are predicted, for `lml` and `truncated-entropy`; for `lml` also `labels`: in each
            row as many as it has. The other two take None.
    """

    name: LossName
    k: int | PerRow | None = None

    def __post_init__(self) -> None:
        if (self.k is not None) != (self.name in WITH_K):
            needs = "needs a `k`" if self.k is None else f"has no `k`, but it is {self.k}"
            raise BadInput(f"The loss `{self.name}` {needs}.")
        if self.k == "labels" and self.name != "lml":
            raise BadInput(f"`k` is labels, which only the loss `lml` can do, not `{self.name}`.")
        if isinstance(self.k, int) and self.k < 1:
            raise BadInput(f"`k` is {self.k}, and must be at least 1.")

    def __str__(self) -> str:
        return self.name if self.k is None else f"{self.name}-{self.k}"

    def check_labels(self, count: int) -> None:
        """Refuse a k that leaves nothing to choose among so many labels."""
        if isinstance(self.k, int) and self.k >= count:
            raise BadInput(
                f"`k` is {self.k}, but there are {count} labels: it must be from 1 to {count - 1}."
            )

    def __call__(self, logits: Tensor, labels: Tensor) -> Tensor:
        """The loss of a batch.

        Args:
            logits: (R, n).
            labels: int64 (R, L), the labels of each row, each once, filled up with `PADDING`.

        Returns:
            The mean loss of the rows that have labels, 0 where there are none.
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
        """The loss of `layer(hidden)`; that of `lml` never holds the logits of a large batch at once."""
        if self.name != "lml":
            return self(layer(hidden).float(), labels)
        labels = unlike_logits(labels, layer.out_features)
        k = self._k_of(labels)
        return torchlml.linear_lml_loss(hidden, layer.weight, labels, k, linear_bias=layer.bias)

    def _k_of(self, labels: Tensor) -> float | Tensor:
        """One k, or each row's own; a row without labels does not count, whatever its k is."""
        if self.k == "labels":
            return (labels != PADDING).sum(-1).clamp(min=1)
        assert self.k is not None
        return float(self.k)


def loss_with_usual_k(name: LossName, k: int | PerRow | None) -> LabelLoss:
    """The loss; without a k, lml takes each sample's own number of labels and truncated-entropy takes 1."""
    usual: dict[str, int | PerRow] = {"lml": "labels", "truncated-entropy": 1}
    return LabelLoss(name, usual.get(name) if k is None else k)


def named(text: str, option: str = "--losses") -> LabelLoss:
    """The loss of a name that carries its k, as the tables and figures of a study print it.

    Args:
        text: `bce`, `softmax`, `lml-5`, `lml-labels`, `truncated-entropy-1`.
        option: What named it, for the error.

    Returns:
        The loss; a name that is none raises `BadInput`.
    """
    for name in LOSSES:
        if name not in WITH_K and text == name:
            return LabelLoss(name)
        if name in WITH_K and (found := re.fullmatch(rf"{name}-(\d+|labels)", text)):
            return LabelLoss(name, "labels" if found[1] == "labels" else int(found[1]))
    accepted = "bce, softmax, lml-K, lml-labels or truncated-entropy-K with a number K"
    raise BadInput(f"`{option}` has `{text}`, and must be {accepted}.")


def padded(rows: list[Tensor]) -> Tensor:
    """Label lists of any lengths as one int64 (R, L)."""
    if not rows:
        return torch.empty(0, 0, dtype=torch.int64)
    return nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=PADDING).long()


def unlike_logits(labels: Tensor, n: int) -> Tensor:
    """The lists, one wider where they are n wide: integers in the logits' own shape could be a multi-hot."""
    return nn.functional.pad(labels, (0, 1), value=PADDING) if labels.shape[-1] == n else labels


def _multi_hot(labels: Tensor, logits: Tensor) -> Tensor:
    rows, n = logits.shape
    # One entry more than there are receives the padding.
    place = torch.where(labels == PADDING, n, labels)
    return logits.new_zeros(rows, n + 1).scatter_(-1, place, 1.0)[:, :n]


def _mean_of_labelled(loss: Tensor, there: Tensor) -> Tensor:
    labelled = there.any(-1)
    return torch.where(labelled, loss, 0).sum() / labelled.sum().clamp(min=1)
