"""The truncated top-k entropy of Lapin, Hein and Schiele (2016), and its multi-label form."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from torchlml._core.rows import row_index, work_dtype
from torchlml.losses.reduction import TopKLoss, check_reduction, reduce
from torchlml.losses.targets import Labels, LogitRows, multi_hot, read_k, read_labels, read_logits


def truncated_entropy_loss(
    logits: Tensor,
    target: Tensor,
    k: int,
    *,
    weight: Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    mask: Tensor | None = None,
    offsets: Tensor | None = None,
) -> Tensor:
    """Cross entropy that forgives the `k - 1` strongest competitors of a label.

        loss = torchlml.truncated_entropy_loss(logits, target, k=5)   # k=1 is F.cross_entropy

    Args:
        logits: (..., n), or flat values with `offsets`.
        target: class indices (...), padded lists of class indices (..., L), or a bool or floating multi-hot.
        k: how many guesses are allowed, from 1 to n.
        weight: one weight per class, for the labels of that class.
        ignore_index: the class index that means "no label".
        reduction: "mean" over the rows that have a label (0 if there are none), "sum" or "none".
        mask: bool, broadcasts to the logits; False entries do not exist.
        offsets: int64 row boundaries of a ragged batch, as in `torchlml.lml`.

    Returns:
        The loss in the dtype of the logits (float32 under autocast), a scalar or one number per row.

    For observed labels Y the loss of a row is `sum_{i in Y} log(1 + sum_{j in J} exp(f_j - f_i))`, where J
    holds the n - k smallest logits outside Y, or all of them when there are fewer. A row of at most k entries
    costs nothing.
    """
    check_reduction(reduction)
    rows = read_logits(logits, mask, offsets)
    k = read_k(k, None if offsets is not None else logits.shape[-1])
    labels = read_labels(rows, target, weight, ignore_index)
    loss = _dense(rows, labels, k) if offsets is None else _ragged(rows, labels, k)
    return reduce(loss, labels, reduction, rows)


class TruncatedEntropyLoss(TopKLoss):
    """The module of `truncated_entropy_loss`: `TruncatedEntropyLoss(k=5)(logits, target)`."""

    k: int

    def __init__(
        self, k: int, *, weight: Tensor | None = None, ignore_index: int = -100, reduction: str = "mean"
    ) -> None:
        super().__init__(read_k(k, None), weight, ignore_index, reduction)

    def forward(
        self, logits: Tensor, target: Tensor, mask: Tensor | None = None, offsets: Tensor | None = None
    ) -> Tensor:
        """One loss; the arguments are those of `truncated_entropy_loss`."""
        return truncated_entropy_loss(
            logits,
            target,
            self.k,
            weight=self.weight,
            ignore_index=self.ignore_index,
            reduction=self.reduction,
            mask=mask,
            offsets=offsets,
        )


def _dense(rows: LogitRows, labels: Labels, k: int) -> Tensor:
    x = rows.x.to(work_dtype(rows.x.dtype))
    if labels.listed is not None:
        is_label, f = labels.listed >= 0, x.gather(-1, labels.listed.clamp(min=0))
        # Padding points at the row's first label, which is the largest of the sorted list.
        out = torch.where(is_label, labels.listed, labels.listed.amax(-1, keepdim=True).clamp(min=0))
    else:
        assert labels.observed is not None
        is_label, f = labels.observed, x
        out = labels.observed.long().argmax(-1, keepdim=True)
    competitors = x
    if labels.listed is None or rows.mask is not None or not labels.in_every_row:
        observed = is_label if labels.listed is None else None
        absent = _not_competing(rows, observed, labels.has_label.unsqueeze(-1))
        competitors = x.masked_fill(absent, -torch.inf)
    # Every row that counts has a label, so it drops at most k - 1 competitors: a selection, not a sort.
    if k > 1:
        top = competitors.detach().scatter(-1, out, -torch.inf).topk(k - 1, dim=-1)
        dropped = torch.arange(k - 1, device=x.device) < k - is_label.sum(-1, keepdim=True)
        rest = _logsumexp(
            competitors.scatter(
                -1, torch.cat([out, torch.where(dropped, top.indices, out[:, :1])], -1), -torch.inf
            )
        )
        # topk counts NaN as the largest value; it must not be forgiven.
        rest = torch.where(top.values[:, :1].isnan(), torch.nan, rest)
    else:
        rest = _logsumexp(competitors.scatter(-1, out, -torch.inf))
    return _entropy(rest, f, is_label, labels.weight).sum(-1)


def _ragged(rows: LogitRows, labels: Labels, k: int) -> Tensor:
    assert rows.offsets is not None
    x = rows.x.to(work_dtype(rows.x.dtype))
    observed = multi_hot(rows, labels)
    row = row_index(rows.offsets, x.numel())
    competitors = x.masked_fill(_not_competing(rows, observed, labels.has_label[row]), -torch.inf)
    # The ranks within each row come from sorting everything, by value and then, stably, by row: torch selects
    # along a dimension only, and padding to one would need the longest row's length on the host.
    by_value = competitors.detach().argsort(descending=True)
    order = by_value[row[by_value].argsort(stable=True)]
    rank = torch.empty_like(order).scatter(
        0, order, torch.arange(x.numel(), device=x.device) - rows.offsets[row]
    )
    allowed = k - torch.zeros(rows.number, dtype=torch.int64, device=x.device).index_add(
        0, row, observed.long()
    )
    dropped = (rank < allowed[row]) & ~competitors.isnan()
    kept = competitors.masked_fill(dropped, -torch.inf)
    largest = torch.full((rows.number,), -torch.inf, dtype=x.dtype, device=x.device)
    largest = largest.scatter_reduce(0, row, kept.detach(), "amax")
    largest = torch.where(largest.isinf(), 0, largest)
    total = torch.zeros_like(largest).index_add(0, row, torch.exp(kept - largest[row]))
    rest = _log(total) + largest
    loss = _entropy(rest[row], x, observed, labels.weight)
    return torch.zeros_like(rest).index_add(0, row, loss)


def _not_competing(rows: LogitRows, observed: Tensor | None, has_label: Tensor) -> Tensor:
    """Labels, masked entries, and all of a row that does not count, so that a NaN there is not felt."""
    absent = ~has_label if observed is None else observed | ~has_label
    return absent if rows.mask is None else absent | ~rows.mask


def _logsumexp(x: Tensor) -> Tensor:
    """Over the last dim, which is kept; -inf with a gradient of 0 for an empty sum, twice differentiable."""
    largest = x.detach().amax(-1, keepdim=True)
    largest = torch.where(largest.isinf(), 0, largest)
    return _log(torch.exp(x - largest).sum(-1, keepdim=True)) + largest


def _log(total: Tensor) -> Tensor:
    return torch.where(total == 0, -torch.inf, torch.where(total == 0, 1, total).log())


def _entropy(rest: Tensor, f: Tensor, is_label: Tensor, weight: Tensor | None) -> Tensor:
    """log(1 + exp(rest - f)) for the labels, 0 elsewhere. -logsigmoid, since softplus is linear above 20."""
    gap = torch.where(is_label & (rest != -torch.inf), f - rest, torch.inf)
    loss = -logsigmoid(gap)
    return loss if weight is None else torch.where(is_label, loss * weight, 0)
