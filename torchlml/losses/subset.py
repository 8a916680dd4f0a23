"""The subset loss: the negative log-likelihood of the labels under a distribution over sets of k labels."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from torchlml._arguments import Canonical, canonical
from torchlml._autograd.loss import LabelReduction, Reduction, check_reduction, label_divisor, reduce_losses
from torchlml._targets import Labels, read_labels
from torchlml.distributions._law import Law, uncompiled
from torchlml.losses.base import TopKLoss


def subset_loss(
    logits: Tensor,
    target: Tensor,
    k: int | Tensor,
    *,
    weight: Tensor | None = None,
    ignore_index: int = -100,
    reduction: Reduction = "mean",
    label_reduction: LabelReduction = "sum",
    mask: Tensor | None = None,
    offsets: Tensor | None = None,
) -> Tensor:
    """Compute the negative log probability that a random set of k labels contains all observed labels.

        >>> logits = torch.tensor([[2.0, 1.0, 0.0, -1.0]])
        >>> torchlml.subset_loss(logits, torch.tensor([1]), k=2)
        tensor(0.3647)
        >>> torchlml.subset_loss(logits, torch.tensor([[0, 1, -100]]), k=2)  # a padded list of labels
        tensor(0.5345)

    Args:
        logits, target, ignore_index, reduction, mask, offsets: as for `lml_loss`.
        k: the size of the sets, as an integer, or a tensor with one integer per row. A row must not have more
            than k labels.
        weight: one weight per class. The loss of a row is multiplied by the mean weight of its labels. The
            weights in a float target have the same meaning.
        label_reduction: "sum" for the negative log probability, or "mean" to divide it by the number of
            labels.

    Returns:
        The loss in the dtype of the logits (float32 for half-precision logits under autocast): a scalar, or
        one number per row with the reduction "none".

    For observed labels Y, the loss of a row is `-log P(Y ⊆ S)`, where S is drawn from
    `torchlml.distributions.KSubset(k, logits)`. `lml_loss` is the same objective under the assumption that
    labels are chosen independently. The gradient is the vector of inclusion probabilities of KSubset minus
    the vector of inclusion probabilities given that S contains Y. The loss is computed in float64. In a row
    with fewer than k available entries, all of them are chosen.
    """
    check_reduction(reduction, label_reduction)
    c = canonical(logits, k, -1, mask, offsets, name="logits", nested=True)
    labels = read_labels(c, target, weight, ignore_index)
    x, observed = _dense_rows(c, labels)
    loss = _row_losses(x, observed, c.k.detach())
    if labels.weight is not None:
        given = torch.where(labels.found, labels.weight, 0)
        loss = loss * (labels.rows.sum(given) / labels.per_row.clamp(min=1))
    return reduce_losses(loss, labels, label_divisor(labels, label_reduction), reduction, c)


class SubsetLoss(TopKLoss):
    """`subset_loss` as a module, with the same arguments.

    >>> torchlml.SubsetLoss(k=2)(torch.tensor([[2.0, 1.0, 0.0, -1.0]]), torch.tensor([1]))
    tensor(0.3647)
    """

    def __init__(
        self,
        k: int | Tensor,
        *,
        weight: Tensor | None = None,
        ignore_index: int = -100,
        reduction: Reduction = "mean",
        label_reduction: LabelReduction = "sum",
    ) -> None:
        super().__init__(k, weight, ignore_index, reduction, label_reduction=label_reduction)
        if not isinstance(k, Tensor):
            _check_integers(torch.tensor(float(k)), k)

    def forward(
        self, logits: Tensor, target: Tensor, *, mask: Tensor | None = None, offsets: Tensor | None = None
    ) -> Tensor:
        """Compute the loss for a batch. The arguments are those of `subset_loss`."""
        return subset_loss(logits, target, self.k, mask=mask, offsets=offsets, **self.settings)


def _dense_rows(c: Canonical, labels: Labels) -> tuple[Tensor, Tensor]:
    """Return logits and observed labels of shape (R, n).

    The logits are -inf at padding and masked entries, and 0 in rows without labels.
    """
    x, observed, mask = c.x, labels.multi_hot(c.x), c.mask
    if c.offsets is not None:
        lengths = c.offsets.diff()
        place = torch.arange(int(lengths.max()) if len(lengths) else 0, device=x.device)
        exists = place < lengths.unsqueeze(-1)
        index = torch.where(exists, c.offsets[:-1].unsqueeze(-1) + place, 0)
        x, observed = (t[index] if len(t) else t.new_zeros(index.shape) for t in (x, observed))
        observed = observed & exists
        mask = exists if mask is None else exists & (mask[index] if len(mask) else exists)
    if mask is not None:
        x = x.masked_fill(~mask, -torch.inf)
    # A row without labels has loss 0, even if it contains a NaN.
    return torch.where(observed.any(-1, keepdim=True), x, 0), observed


@uncompiled
def _row_losses(x: Tensor, observed: Tensor, k: Tensor) -> Tensor:
    """Return the loss of each row in float64."""
    _check_integers(k, k)
    k = k.long().expand(len(x)).to(x.device)
    available = torch.where(x.detach().isnan(), True, x.detach() > -torch.inf) | observed
    k = torch.minimum(k, available.sum(-1))
    count = observed.sum(-1)
    if bool((count > k).any()):
        row = int((count > k).nonzero()[0])
        raise ValueError(
            f"`target` must have at most k labels in each row, but row {row} has {int(count[row])} labels "
            f"and k = {int(k[row])}."
        )
    # Labels with a logit of -inf are never chosen, so the loss is infinite.
    impossible = (observed & (x.detach() == -torch.inf)).any(-1)
    x = torch.where(impossible.unsqueeze(-1) & observed, 0, x)
    loss = -Law(x, k).log_prob_containing(observed)
    return torch.where(impossible, torch.inf, loss)


def _check_integers(k: Tensor, given: Any) -> None:
    if bool((k != k.round()).any()):
        raise ValueError(f"`k` must be an integer or a tensor of integers, but it is {given}.")
