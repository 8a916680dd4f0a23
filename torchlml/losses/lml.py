"""The LML loss: the negative log-likelihood of the labels under a projection that chooses k labels."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from torchlml._arguments import Bound, canonical, check_bound, is_sharded
from torchlml._autograd import loss as rule
from torchlml._autograd.loss import LabelReduction, LossSettings, Reduction, check_labeled_k, label_divisor
from torchlml._targets import read_labels
from torchlml.losses.base import TopKLoss


def lml_loss(
    logits: Tensor,
    target: Tensor,
    k: float | Tensor,
    *,
    weight: Tensor | None = None,
    ignore_index: int = -100,
    reduction: Reduction = "mean",
    label_reduction: LabelReduction = "sum",
    mask: Tensor | None = None,
    offsets: Tensor | None = None,
    bound: Bound = "exactly",
    group: Any = None,
) -> Tensor:
    """Compute the LML loss: the sum of -log(y) over the observed labels, where y = lml(logits, k).

        >>> logits = torch.tensor([[2.0, 1.0, 0.0, -1.0]])
        >>> torchlml.lml_loss(logits, torch.tensor([1]), k=2)  # -log of lml(logits, 2)[0, 1]
        tensor(0.4741)
        >>> torchlml.lml_loss(logits, torch.tensor([[0, 1, -100]]), k=2)  # a padded list of labels
        tensor(0.6755)

    Args:
        logits: a tensor of shape (..., n), a 1-d tensor of values with `offsets`, or a nested tensor with the
            layout `torch.jagged`.
        target: class indices of shape (...), lists of class indices of shape (..., L) padded with
            `ignore_index`, or a bool or float multi-hot tensor with the shape of the logits, in which floats
            are label weights. With `offsets`, pass a 1-d multi-hot tensor or indices into the values. For
            ragged nested logits, pass a nested multi-hot tensor or label indices within each row. These
            indices can be a tensor of shape (B,) with one index per row, padded lists of shape (B, L), or a
            nested tensor. An integer target with the shape of the logits raises an error, because it could be
            multi-hot or a list. In that case, pass `target.bool()`, or add a column of `ignore_index` to the
            list.
        k: the number of labels to predict, as for `torchlml.lml`: one number, or one number per row. The loss
            is differentiable with respect to it. If k = 0 in a row that has a label, a ValueError is raised
            on the CPU, unless `bound` is "at_least". On other devices, this check would synchronize the
            device, so the loss is infinite instead.
        weight: one weight per class, which multiplies the loss of each label of that class.
        ignore_index: the class index that means "no label".
        reduction: "mean" over the rows that have a label (0 if there are none), "sum" or "none".
        label_reduction: the reduction over the labels of a row, "sum" or "mean". With "mean", rows with many
            labels do not outweigh the others. Weights do not change the divisor of the mean.
        mask: a bool tensor that broadcasts to the shape of the logits. Entries that are False cannot be
            chosen and must not be labels.
        offsets: int64 or int32 row boundaries of a ragged batch, as for `torchlml.lml`.
        bound: whether "exactly", "at_most" or "at_least" k labels are predicted, as for `torchlml.lml`.
        group: the processes across which the labels are sharded, as for `torchlml.lml`. Class indices refer
            to the labels of all processes. `weight`, `mask` and multi-hot targets cover only the labels of
            this process. Every process gets the same loss, and the gradient with respect to its own logits.

    Returns:
        The loss in the dtype of the logits (float32 for half-precision logits under autocast): a scalar, or
        one number per row with the reduction "none".

    For observed labels Y, the loss of a row is `-sum_{j in Y} log(y_j)`, where `y = lml(logits, k)`. With a
    `weight`, the mean divides by the number of rows that have a label, whereas `F.cross_entropy` divides by
    the sum of the weights. The gradient with respect to logit i is
    `A * w_i / sum(w) - (1 - y_i) * [i in Y]`, where w = y * (1 - y) and A = sum_{j in Y} (1 - y_j). It does
    not vanish for a label, no matter how low its logit is.
    """
    settings = LossSettings(ignore_index, reduction, label_reduction, bound)
    if is_sharded(logits, group):
        from torchlml._distributed import loss as sharded

        return sharded.lml_loss(logits, target, k, weight, mask, offsets, settings, group)
    settings.check()
    c = canonical(logits, k, -1, mask, offsets, any_k=bound == "at_most", name="logits", nested=True)
    labels = read_labels(c, target, weight, ignore_index)
    check_labeled_k(c.k, bound, lambda: labels.has_label)
    return rule.lml_loss(c, labels, label_divisor(labels, label_reduction), reduction, bound)


class LMLLoss(TopKLoss):
    """`lml_loss` as a module, with the same arguments.

    >>> torchlml.LMLLoss(k=2)(torch.tensor([[2.0, 1.0, 0.0, -1.0]]), torch.tensor([1]))
    tensor(0.4741)
    """

    def __init__(
        self,
        k: float | Tensor,
        *,
        weight: Tensor | None = None,
        ignore_index: int = -100,
        reduction: Reduction = "mean",
        label_reduction: LabelReduction = "sum",
        bound: Bound = "exactly",
        group: Any = None,
    ) -> None:
        check_bound(bound)
        settings = {"label_reduction": label_reduction, "bound": bound, "group": group}
        super().__init__(k, weight, ignore_index, reduction, **settings)

    def forward(
        self, logits: Tensor, target: Tensor, *, mask: Tensor | None = None, offsets: Tensor | None = None
    ) -> Tensor:
        """Compute the loss for a batch. The arguments are those of `lml_loss`."""
        return lml_loss(logits, target, self.k, mask=mask, offsets=offsets, **self.settings)
