"""The truncated top-k entropy of Lapin, Hein and Schiele (2016), generalized to several labels."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from torchlml._arguments import Canonical, canonical, check_integer_k
from torchlml._autograd.loss import LabelReduction, Reduction, check_reduction, label_divisor, reduce_losses
from torchlml._rows import PackedRows, work_dtype
from torchlml._targets import Labels, read_labels
from torchlml.losses.base import TopKLoss


def truncated_entropy_loss(
    logits: Tensor,
    target: Tensor,
    k: int,
    *,
    weight: Tensor | None = None,
    ignore_index: int = -100,
    reduction: Reduction = "mean",
    label_reduction: LabelReduction = "sum",
    mask: Tensor | None = None,
    offsets: Tensor | None = None,
) -> Tensor:
    """Compute the truncated top-k entropy: the cross-entropy of each label without its strongest competitors.

        >>> logits = torch.tensor([[2.0, 1.0, 0.0, -1.0]])
        >>> torchlml.truncated_entropy_loss(logits, torch.tensor([1]), k=2)  # k=1 is F.cross_entropy
        tensor(0.4076)

    Args:
        k: the number of allowed guesses, from 1 to n.
        logits, target, weight, ignore_index, reduction, label_reduction, mask, offsets: as for `lml_loss`.

    Returns:
        The loss, with the dtype and shape of the result of `lml_loss`.

    For logits f and observed labels Y, the loss of a row is
    `sum_{i in Y} log(1 + sum_{j in J} exp(f_j - f_i))`. J contains the classes of the n - k smallest logits
    outside Y, or all classes outside Y if there are fewer. The loss of a row with at most k available
    entries is 0.
    """
    check_reduction(reduction, label_reduction)
    k = check_integer_k(k)
    c = canonical(logits, k, -1, mask, offsets, any_k=True, name="logits", nested=True)
    if c.offsets is None:
        check_integer_k(k, c.x.shape[-1])
    labels = read_labels(c, target, weight, ignore_index)
    loss = dense_entropy(c, labels, k) if c.offsets is None else _ragged(c, labels, k)
    return reduce_losses(loss, labels, label_divisor(labels, label_reduction), reduction, c)


class TruncatedEntropyLoss(TopKLoss):
    """`truncated_entropy_loss` as a module, with the same arguments.

    >>> torchlml.TruncatedEntropyLoss(k=2)(torch.tensor([[2.0, 1.0, 0.0, -1.0]]), torch.tensor([1]))
    tensor(0.4076)
    """

    def __init__(
        self,
        k: int,
        *,
        weight: Tensor | None = None,
        ignore_index: int = -100,
        reduction: Reduction = "mean",
        label_reduction: LabelReduction = "sum",
    ) -> None:
        super().__init__(check_integer_k(k), weight, ignore_index, reduction, label_reduction=label_reduction)

    def forward(
        self, logits: Tensor, target: Tensor, *, mask: Tensor | None = None, offsets: Tensor | None = None
    ) -> Tensor:
        """Compute the loss for a batch. The arguments are those of `truncated_entropy_loss`."""
        return truncated_entropy_loss(logits, target, self.k, mask=mask, offsets=offsets, **self.settings)


def dense_entropy(c: Canonical, labels: Labels, k: int) -> Tensor:
    """Compute the loss of each dense row, in the work dtype."""
    x, is_label = c.x.to(work_dtype(c.x.dtype)), labels.found
    if labels.listed is not None:
        f = x.gather(-1, labels.listed.clamp(min=0))
        # Replace padding with the row's label that has the largest index.
        out = torch.where(is_label, labels.listed, labels.listed.amax(-1, keepdim=True).clamp(min=0))
    else:
        f, out = x, is_label.long().argmax(-1, keepdim=True)
    competitors = x
    if labels.listed is None or c.mask is not None or not labels.in_every_row:
        observed = is_label if labels.listed is None else None
        absent = _not_competing(c, observed, labels.has_label.unsqueeze(-1))
        competitors = x.masked_fill(absent, -torch.inf)
    undefined = None
    if k > 1:
        # Every row with a nonzero loss has a label, so at most k - 1 competitors are dropped.
        top = competitors.detach().scatter(-1, out, -torch.inf).topk(k - 1, dim=-1)
        dropped = torch.arange(k - 1, device=x.device) < k - is_label.sum(-1, keepdim=True)
        out = torch.cat([out, torch.where(dropped, top.indices, out[:, :1])], -1)
        undefined = top.values[:, :1].isnan()
    rest = _logsumexp(competitors.scatter(-1, out, -torch.inf))
    if undefined is not None:  # topk treats NaN as the largest value, but a NaN must not be dropped
        rest = torch.where(undefined, torch.nan, rest)
    return _entropy(rest, f, is_label, labels.weight).sum(-1)


def _ragged(c: Canonical, labels: Labels, k: int) -> Tensor:
    assert c.offsets is not None
    x, observed = c.x.to(work_dtype(c.x.dtype)), labels.multi_hot(c.x)
    rows = PackedRows(x, c.offsets, differentiable=True)
    absent = _not_competing(c, observed, rows.broadcast(labels.has_label))
    competitors = x.masked_fill(absent, -torch.inf)
    # Sort all values to get the ranks within each row. topk needs a dense dimension, and padding the rows
    # would need the length of the longest row on the host.
    order = rows.order(competitors.detach())
    place = torch.arange(x.shape[0], device=x.device) - rows.broadcast(c.offsets[:-1])
    rank = torch.empty_like(order).scatter(0, order, place)
    dropped = (rank < rows.broadcast(k - rows.sum(observed))) & ~competitors.isnan()
    kept = competitors.masked_fill(dropped, -torch.inf)
    largest = rows.max(kept.detach())
    largest = torch.where(largest.isinf(), 0, largest)
    rest = _log(rows.sum(torch.exp(kept - rows.broadcast(largest)))) + largest
    return rows.sum(_entropy(rows.broadcast(rest), x, observed, labels.weight))


def _not_competing(c: Canonical, observed: Tensor | None, has_label: Tensor) -> Tensor:
    """Return a mask of the `observed` entries (if given), masked entries and rows without labels.

    These entries do not compete with a label, even if they are NaN.
    """
    absent = ~has_label if observed is None else observed | ~has_label
    return absent if c.mask is None else absent | ~c.mask


def _logsumexp(x: Tensor) -> Tensor:
    """Compute a twice differentiable logsumexp over the last dimension, with keepdim=True.

    The result of an empty sum is -inf, with a gradient of 0.
    """
    largest = x.detach().amax(-1, keepdim=True)
    largest = torch.where(largest.isinf(), 0, largest)
    return _log(torch.exp(x - largest).sum(-1, keepdim=True)) + largest


def _log(total: Tensor) -> Tensor:
    return torch.where(total == 0, -torch.inf, torch.where(total == 0, 1, total).log())


def _entropy(rest: Tensor, f: Tensor, is_label: Tensor, weight: Tensor | None) -> Tensor:
    """Compute log(1 + exp(rest - f)) for labels, and 0 elsewhere.

    This uses `logsigmoid`, because torch's softplus is inaccurate above 20, where it returns its argument.
    """
    gap = torch.where(is_label & (rest != -torch.inf), f - rest, torch.inf)
    loss = -logsigmoid(gap)
    return loss if weight is None else torch.where(is_label, loss * weight, 0)
