"""Losses for samples with multiple labels, used in multi-label classification and recommendation."""

import re
from dataclasses import dataclass
from typing import Any, get_args

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits

import torchlml
from torchlml_lab.cli_errors import BadInput
from torchlml_lab.multilabel.settings import WITH_K, AnyLossName, PerRow

PADDING = -100
"""The value that pads label lists in a batch."""
WIDTH = 2.0
"""The width of the sigmoid in `topk-softmax`, in units of the logits."""
ROWS = 128
"""The number of rows for which `of_factors` computes logits at a time."""


@dataclass(frozen=True)
class LabelLoss:
    """A loss that is summed over the labels of a row and averaged over rows. Rows without labels are ignored.

        loss = LabelLoss("lml", "labels")
        loss(logits, labels)

    Args:
        name: `lml`, `softmax` (the negative log-likelihood of the labels under a softmax), `bce` (labels that
            are not listed count as absent), `truncated-entropy` or `topk-softmax` (`softmax` with a weight
            for each label; see `topk_softmax`).
        k: The number of labels to predict, for `lml`, `truncated-entropy` and `topk-softmax`. For `lml`, it
            may also be `labels`, which means each row's own number of labels. It must be None for `softmax`
            and `bce`.
        empty: Whether `bce` includes rows without labels, as rows in which all labels are absent.
    """

    name: AnyLossName
    k: int | PerRow | None = None
    empty: bool = False

    def __post_init__(self) -> None:
        if (self.k is not None) != (self.name in WITH_K):
            needs = "requires `--k`" if self.k is None else f"does not take `--k`, but `--k` is {self.k}"
            raise BadInput(f"The loss `{self.name}` {needs}.")
        if self.k == "labels" and self.name != "lml":
            raise BadInput(f"`--k` must be an integer for the loss `{self.name}`, but it is `labels`.")
        if isinstance(self.k, int) and self.k < 1:
            raise BadInput(f"`--k` must be at least 1, but it is {self.k}.")

    def __str__(self) -> str:
        return self.name if self.k is None else f"{self.name}-{self.k}"

    def check_labels(self, count: int) -> None:
        """Raise `BadInput` unless k is less than `count`, the number of labels or items."""
        if isinstance(self.k, int) and self.k >= count:
            raise BadInput(
                f"`--k` must be from 1 to {count - 1}, because there are {count} labels or items, but it is "
                f"{self.k}."
            )

    def __call__(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Compute the loss of a batch.

        Args:
            logits: (R, n).
            labels: int64 (R, L), the labels of each row without duplicates, padded with `PADDING`.

        Returns:
            The mean loss over the rows that are not ignored, or 0 if all rows are ignored.
        """
        labels = unlike_logits(labels, logits.shape[-1])
        if self.name == "lml":
            return torchlml.lml_loss(logits, labels, self._k_of(labels))
        if self.name == "truncated-entropy":
            assert isinstance(self.k, int)
            return torchlml.truncated_entropy_loss(logits, labels, self.k)
        if self.name == "topk-softmax":
            assert isinstance(self.k, int)
            return topk_softmax(logits, labels, self.k)
        there = labels != PADDING
        if self.name == "softmax":
            score = logits.log_softmax(-1).gather(-1, labels.clamp(min=0))
            return _mean_of_labeled(-torch.where(there, score, 0).sum(-1), there)
        observed = _multi_hot(labels, logits)
        each = binary_cross_entropy_with_logits(logits, observed, reduction="none")
        if self.empty:
            there = torch.ones_like(there)
        return _mean_of_labeled(each.sum(-1), there)

    def of_linear(self, hidden: Tensor, layer: nn.Linear, labels: Tensor) -> Tensor:
        """Compute the loss of `layer(hidden)`. For `lml`, the full logit matrix is never materialized."""
        if self.name != "lml":
            return self(layer(hidden).float(), labels)
        labels = unlike_logits(labels, layer.out_features)
        k = self._k_of(labels)
        return torchlml.linear_lml_loss(hidden, layer.weight, labels, k, linear_bias=layer.bias)

    def of_factors(self, hidden: Tensor, weight: Tensor, bias: Tensor, labels: Tensor) -> Tensor:
        """Compute the loss of `linear(hidden, weight, bias)` without materializing the full logit matrix.

        Every row must have at least one label.
        """
        found: Tensor = _ChunkedLoss.apply(hidden, weight, bias, labels, self)
        return found

    def _k_of(self, labels: Tensor) -> float | Tensor:
        """Return k as a number, or as a tensor with one k per row. For ignored rows, k is arbitrary."""
        if self.k == "labels":
            return (labels != PADDING).sum(-1).clamp(min=1)
        assert self.k is not None
        return float(self.k)


class _ChunkedLoss(torch.autograd.Function):
    """The mean loss of `linear(hidden, weight, bias)` over rows, computed for a few rows at a time.

    The gradients are computed in the forward pass, because the logits are not kept.
    """

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor, labels: Tensor, loss: LabelLoss
    ) -> Tensor:
        leaves = [hidden.detach(), weight.detach(), bias.detach()]
        gradients = [torch.zeros_like(leaf, memory_format=torch.contiguous_format) for leaf in leaves]
        total = hidden.new_zeros((), dtype=torch.float32)
        for rows in torch.arange(len(hidden), device=hidden.device).split(ROWS):
            part = slice(int(rows[0]), int(rows[-1]) + 1)
            share = len(rows) / len(hidden)
            with torch.enable_grad():
                used = [leaf.requires_grad_() for leaf in (leaves[0][part].clone(), *leaves[1:])]
                value = share * loss(nn.functional.linear(*used).float(), labels[part])
            if any(ctx.needs_input_grad):
                found = torch.autograd.grad(value, used)
                gradients[0][part] = found[0]
                gradients[1] += found[1]
                gradients[2] += found[2]
            total += value.detach()
        ctx.save_for_backward(*gradients)
        return total

    @staticmethod
    def backward(ctx: Any, *output: Tensor) -> tuple[Tensor | None, ...]:
        return *(output[0] * gradient for gradient in ctx.saved_tensors), None, None


def topk_softmax(logits: Tensor, labels: Tensor, k: int, width: float = WIDTH) -> Tensor:
    """Compute a softmax loss in which labels with scores far below the top k have little weight.

        >>> labels = torch.tensor([[0, 3]])
        >>> round(topk_softmax(torch.zeros(1, 4), labels, k=2).item(), 4)  # both weights are 1/2
        1.3863

    Args:
        logits: (R, n).
        labels: int64 (R, L), padded with `PADDING`.
        k: The number of top entries, less than n.
        width: The width of the sigmoid.

    Returns:
        The mean of `-sum_i w_i log softmax(x)_i` over the rows with labels, where i runs over the labels of a
        row and `w_i = sigmoid((x_i - threshold) / width)`. The threshold separates the top k: it satisfies
        `sum_j sigmoid(x_j - threshold) = k` over all entries j, so it is `-lml_dual(x, k)`. The weights are
        treated as constants in the gradient. Otherwise, lowering the score of a label would reduce the loss.
    """
    there = labels != PADDING
    place = labels.clamp(min=0)
    with torch.no_grad():
        threshold = -torchlml.lml_dual(logits, k)
        weight = torch.sigmoid((logits.gather(-1, place) - threshold[:, None]) / width)
    score = weight * logits.log_softmax(-1).gather(-1, place)
    return _mean_of_labeled(-torch.where(there, score, 0).sum(-1), there)


def loss_with_usual_k(name: AnyLossName, k: int | PerRow | None) -> LabelLoss:
    """Create a loss. k defaults to `labels` for lml, 1 for truncated-entropy and 20 for topk-softmax."""
    usual: dict[str, int | PerRow] = {"lml": "labels", "truncated-entropy": 1, "topk-softmax": 20}
    return LabelLoss(name, usual.get(name) if k is None else k)


def named(text: str, option: str = "--losses") -> LabelLoss:
    """Parse a loss name that includes its k, as in the tables and figures of a study.

    Args:
        text: A name such as `bce`, `softmax`, `lml-5`, `lml-labels`, `truncated-entropy-1` or
            `topk-softmax-20`.
        option: The command-line option that contains the name, for error messages.

    Returns:
        The loss. An unknown name raises `BadInput`.
    """
    for name in get_args(AnyLossName):
        if name not in WITH_K and text == name:
            return LabelLoss(name)
        if name in WITH_K and (found := re.fullmatch(rf"{name}-([1-9]\d*|labels)", text)):
            return LabelLoss(name, "labels" if found[1] == "labels" else int(found[1]))
    accepted = (
        "bce, softmax, lml-K, lml-labels, truncated-entropy-K or topk-softmax-K with a positive integer K"
    )
    raise BadInput(f"Each value of `{option}` must be {accepted}, but one value is `{text}`.")


def padded(rows: list[Tensor]) -> Tensor:
    """Combine label lists into one padded tensor, int64 (R, L)."""
    if not rows:
        return torch.empty(0, 0, dtype=torch.int64)
    return nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=PADDING).long()


def unlike_logits(labels: Tensor, n: int) -> Tensor:
    """Add a column of padding to label lists of width n.

    Otherwise, these integers would have the shape of the logits and could be mistaken for multi-hot targets.
    """
    return nn.functional.pad(labels, (0, 1), value=PADDING) if labels.shape[-1] == n else labels


def _multi_hot(labels: Tensor, logits: Tensor) -> Tensor:
    rows, n = logits.shape
    # An extra column receives the padding.
    place = torch.where(labels == PADDING, n, labels)
    return logits.new_zeros(rows, n + 1).scatter_(-1, place, 1.0)[:, :n]


def _mean_of_labeled(loss: Tensor, there: Tensor) -> Tensor:
    labeled = there.any(-1)
    return torch.where(labeled, loss, 0).sum() / labeled.sum().clamp(min=1)
