"""The top-k SVM loss, whose smoothed form is in smooth_svm.py."""

from __future__ import annotations

import torch
from torch import Tensor

from torchlml._core.arguments import canonical, check_number, check_whole_k
from torchlml._core.rows import work_dtype
from torchlml.losses.module import TopKLoss
from torchlml.losses.reduction import Reduction, check_reduction, reduce_single
from torchlml.losses.targets import read_single_label


def topk_svm_loss(
    logits: Tensor,
    target: Tensor,
    k: int,
    *,
    alpha: float = 1.0,
    weight: Tensor | None = None,
    ignore_index: int = -100,
    reduction: Reduction = "mean",
    mask: Tensor | None = None,
    offsets: Tensor | None = None,
) -> Tensor:
    """The top-k hinge loss: 0 once the label is `alpha * k` above its k-th strongest competitor.

        >>> logits = torch.tensor([[3.0, 2.0, 1.0, 0.0]])
        >>> torchlml.topk_svm_loss(logits, torch.tensor([2]), k=2)  # 1 + (2 - 1) / 2
        tensor(1.5000)

    Args:
        logits: (..., n).
        target: one class index per row, int64 or uint8 of shape (...).
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
    check_alpha(alpha)
    k = check_whole_k(k)
    c = canonical(logits, k, -1, mask, offsets, any_k=True, name="logits")
    labels, place = read_single_label(c, target, weight, ignore_index, "topk_svm_loss")
    check_whole_k(k, c.x.shape[-1] - 1)
    x = c.x.to(work_dtype(c.x.dtype)).masked_fill(~labels.has_label.unsqueeze(-1), 0)
    others = x if c.mask is None else x.masked_fill(~c.mask, -torch.inf)
    top = others.scatter(-1, place, -torch.inf).topk(k, dim=-1).values
    loss = (alpha + (top[:, -1:] - x.gather(-1, place)) / k).relu()
    # topk counts NaN as the largest value: a NaN anywhere in the row is the first of the k, not the k-th.
    loss = torch.where(top[:, :1].isnan(), torch.nan, loss)
    return reduce_single(loss, labels, reduction, c)


class TopKSVMLoss(TopKLoss):
    """The module of `topk_svm_loss`, with its arguments.

    >>> torchlml.TopKSVMLoss(k=2)(torch.tensor([[3.0, 2.0, 1.0, 0.0]]), torch.tensor([2]))
    tensor(1.5000)
    """

    function = staticmethod(topk_svm_loss)

    def __init__(
        self,
        k: int,
        *,
        alpha: float = 1.0,
        weight: Tensor | None = None,
        ignore_index: int = -100,
        reduction: Reduction = "mean",
    ) -> None:
        check_alpha(alpha)
        super().__init__(
            check_whole_k(k), weight, ignore_index=ignore_index, reduction=reduction, alpha=alpha
        )


def check_alpha(alpha: float) -> None:
    """A margin from 0 on, or an error."""
    check_number(alpha, "alpha", "a number from 0 on")
    if not 0 <= alpha < float("inf"):
        raise ValueError(f"`alpha` must be a number from 0 on, but it is {alpha}.")
