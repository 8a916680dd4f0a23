"""The top-k SVM loss, whose smoothed form is in smooth_svm.py."""

from __future__ import annotations

import torch
from torch import Tensor

from torchlml._core.rows import work_dtype
from torchlml.losses.reduction import TopKLoss, check_reduction, reduce_single
from torchlml.losses.targets import read_k, read_logits, read_single_label


def topk_svm_loss(
    logits: Tensor,
    target: Tensor,
    k: int,
    *,
    alpha: float = 1.0,
    weight: Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    mask: Tensor | None = None,
    offsets: Tensor | None = None,
) -> Tensor:
    """The top-k hinge loss: 0 once the label is `alpha * k` above its k-th strongest competitor.

        loss = torchlml.topk_svm_loss(logits, target, k=5)

    Args:
        logits: (..., n).
        target: one class index per row, int64 of shape (...).
        k: how many guesses are allowed, from 1 to n - 1.
        alpha: the margin.
        weight: one weight per class, for the rows with that label.
        ignore_index: the class index that means "no label".
        reduction: "mean" over the rows that have a label (0 if there are none), "sum" or "none".
        mask: bool, broadcasts to the logits; False entries do not exist.
        offsets: accepted by the other losses, an error here: ragged rows have no classes.

    Returns:
        The loss in the dtype of the logits (float32 under autocast), a scalar or one number per row.

    The definition is `max(0, mean of the k largest of s_j + alpha over j != y, minus (the sum of the k - 1
    largest s_j, j != y, plus s_y) / k)`. The k - 1 largest stand on both sides, which leaves

        max(0, alpha + (s_(k) - s_y) / k),   s_(k) the k-th largest s_j, j != y.

    It is the limit of `smooth_topk_svm_loss` as tau goes to 0. Only two classes of a row have a gradient,
    which is why the smooth loss exists.
    """
    check_reduction(reduction)
    if not 0 <= alpha < float("inf"):
        raise ValueError(f"`alpha` must be a number from 0 on, but it is {alpha}.")
    rows = read_logits(logits, mask, offsets)
    labels, place = read_single_label(rows, target, weight, ignore_index, "topk_svm_loss")
    k = read_k(k, logits.shape[-1] - 1)
    x = rows.x.to(work_dtype(rows.x.dtype)).masked_fill(~labels.has_label.unsqueeze(-1), 0)
    others = x if rows.mask is None else x.masked_fill(~rows.mask, -torch.inf)
    top = others.scatter(-1, place, -torch.inf).topk(k, dim=-1).values
    loss = (alpha + (top[:, -1:] - x.gather(-1, place)) / k).relu()
    # topk counts NaN as the largest value: it stands first, and the k-th does not know of it.
    loss = torch.where(top[:, :1].isnan(), torch.nan, loss)
    return reduce_single(loss, labels, reduction, rows)


class TopKSVMLoss(TopKLoss):
    """The module of `topk_svm_loss`: `TopKSVMLoss(k=5)(logits, target)`."""

    k: int

    def __init__(
        self,
        k: int,
        *,
        alpha: float = 1.0,
        weight: Tensor | None = None,
        ignore_index: int = -100,
        reduction: str = "mean",
    ) -> None:
        super().__init__(read_k(k, None), weight, ignore_index, reduction)
        self.alpha = alpha

    def forward(
        self, logits: Tensor, target: Tensor, mask: Tensor | None = None, offsets: Tensor | None = None
    ) -> Tensor:
        """One loss; the arguments are those of `topk_svm_loss`."""
        return topk_svm_loss(
            logits,
            target,
            self.k,
            alpha=self.alpha,
            weight=self.weight,
            ignore_index=self.ignore_index,
            reduction=self.reduction,
            mask=mask,
            offsets=offsets,
        )

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, alpha={self.alpha}"
