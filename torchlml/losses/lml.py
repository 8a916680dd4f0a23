"""The LML loss: maximum likelihood of the observed labels under a projection that chooses exactly k."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from torchlml import differentiable
from torchlml.arguments import Canonical, _check_k
from torchlml.autograd import _plain, _wants_graph
from torchlml.family import bounds
from torchlml.losses import lml_operators
from torchlml.losses.reduction import TopKLoss, check_reduction, reduce
from torchlml.losses.targets import Labels, LogitRows, read_labels, read_logits
from torchlml.rows import row_index, work_dtype


def lml_loss(
    logits: Tensor,
    target: Tensor,
    k: float | Tensor,
    *,
    weight: Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    mask: Tensor | None = None,
    offsets: Tensor | None = None,
    bound: str = "exactly",
) -> Tensor:
    """The loss that makes the k predictions of a model recall the labels that were observed.

        loss = torchlml.lml_loss(logits, target, k=5)                # one label, or a padded list, per row
        loss = torchlml.lml_loss(scores, relations, k=20, offsets=off)   # images with any numbers of edges

    Args:
        logits: (..., n), or flat values with `offsets`.
        target: class indices (...), padded lists of class indices (..., L), or a bool or floating multi-hot
            of the logits' shape, whose floats are label weights. With `offsets`: a flat multi-hot, or
            positions into the values.
        k: how many labels are predicted, as in `torchlml.lml`: a number or one per row; differentiable.
        weight: one weight per class, for the labels of that class.
        ignore_index: the class index that means "no label".
        reduction: "mean" over the rows that have a label (0 if there are none), "sum" or "none".
        mask: bool, broadcasts to the logits; False entries cannot be chosen, and no label may point at one.
        offsets: int64 row boundaries of a ragged batch, as in `torchlml.lml`.
        bound: "exactly", or "at_most" or "at_least" k labels are predicted, as in `torchlml.lml`.

    Returns:
        The loss in the dtype of the logits (float32 under autocast), a scalar or one number per row.

    For observed labels Y the loss of a row is `-sum_{j in Y} log y_j`, `y = lml(logits, k)`. Unlike
    `F.cross_entropy`, the mean with a `weight` divides by the number of rows and not by the sum of weights.
    The gradient, `A w_i / sum w - (1 - y_i) [i in Y]` with w = y (1 - y) and A = sum_{j in Y} (1 - y_j),
    keeps its size however far a label is behind.
    """
    check_reduction(reduction)
    bounds.check_bound(bound)
    rows = read_logits(logits, mask, offsets)
    unlimited = mask is not None or offsets is not None or bound == "at_most"
    most = None if unlimited else logits.shape[-1]
    k = _check_k(k, rows.shape, most, logits.device)
    labels = read_labels(rows, target, weight, ignore_index)
    # In float32 from here on: half precision is rounded once, at the end.
    x = rows.x.to(work_dtype(rows.x.dtype))
    if labels.listed is None:
        loss = _multi_hot_loss(x, k, rows, labels)
    elif _plain() and (labels.weight is None or not labels.weight.requires_grad):
        loss = _Loss.apply(x, k, *labels, rows.mask, rows.offsets)
    else:
        loss = _differentiable(x, k, labels, rows.mask, rows.offsets)
    return reduce(loss, labels, reduction, rows)


class LMLLoss(TopKLoss):
    """The module of `lml_loss`: `LMLLoss(k=5)(logits, target)`."""

    def __init__(
        self,
        k: float | Tensor,
        *,
        weight: Tensor | None = None,
        ignore_index: int = -100,
        reduction: str = "mean",
        bound: str = "exactly",
    ) -> None:
        super().__init__(k, weight, ignore_index, reduction)
        bounds.check_bound(bound)
        self.bound = bound

    def forward(
        self, logits: Tensor, target: Tensor, mask: Tensor | None = None, offsets: Tensor | None = None
    ) -> Tensor:
        """One loss; the arguments are those of `lml_loss`."""
        return lml_loss(
            logits,
            target,
            self.k,
            weight=self.weight,
            ignore_index=self.ignore_index,
            reduction=self.reduction,
            mask=mask,
            offsets=offsets,
            bound=self.bound,
        )

    def extra_repr(self) -> str:
        settings = super().extra_repr()
        return settings if self.bound == "exactly" else f"{settings}, bound={self.bound!r}"


def _multi_hot_loss(x: Tensor, k: Tensor, rows: LogitRows, labels: Labels) -> Tensor:
    """One loss per row, where any entry may be a label, by way of log y."""
    assert labels.observed is not None
    row = None if rows.offsets is None else row_index(rows.offsets, x.shape[0])
    has_label = labels.has_label
    if not (may_look(has_label) and bool(has_label.all())):
        # A row without labels counts for nothing, even if it holds a NaN.
        x = torch.where(has_label.unsqueeze(-1) if row is None else has_label[row], x, 0)
    log_y = log_lml(x, k, rows.mask, rows.offsets, None)
    loss = torch.where(labels.observed, log_y if labels.weight is None else log_y * labels.weight, 0)
    return -loss.sum(-1) if row is None else -x.new_zeros(rows.number).index_add(0, row, loss)


class _Loss(torch.autograd.Function):
    """One loss per row from the entries that are labels; no other entry's probability is ever formed.

    With A = sum_j c_j (1 - y_j) over the labels j of a row, weighted by c,

        dx_i = A w_i / sum w - c_i (1 - y_i),    dk = -A / sum w,

    whose first part is -A times the derivative of nu, an operator that exists, and whose second part is
    one number for each label.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        k: Tensor,
        listed: Tensor,
        row: Tensor | None,
        observed: None,
        weight: Tensor | None,
        has_label: Tensor,
        mask: Tensor | None,
        offsets: Tensor | None,
    ) -> Tensor:
        # As if k were 0, a row without labels has no derivative, even if it holds a NaN.
        nu = torch.where(has_label, ops.solve(x, k, mask, offsets), -torch.inf)
        hi, lo = (_spread(part, row) for part in nu)
        is_label, place = listed >= 0, listed.clamp(min=0)
        c = is_label.to(x.dtype) if weight is None else torch.where(is_label, weight, 0)
        entries = x.gather(-1, place)
        if mask is not None:
            entries = torch.where(mask.gather(-1, place), entries, -torch.inf)
        z = (entries + hi) + lo
        log_y = torch.where(entries == -torch.inf, entries, logsigmoid(z))
        own = torch.where(entries.isfinite() & hi.isfinite() | z.isnan(), c * torch.sigmoid(-z), 0)
        infinite = entries == torch.inf
        if not x.device.type == "cpu" or torch.compiler.is_compiling() or bool(infinite.any()):
            log_share = _log_share(x, k, nu, mask, offsets)
            log_y = torch.where(infinite, _spread(log_share, row), log_y)
            # There log y = log(k / p), which moves with k alone; dual_backward has no part in such rows.
            own = torch.where(infinite & (hi == -torch.inf), c, own)
        total = _sum(own, row, nu.shape[1])
        ctx.save_for_backward(x, k, listed, row, observed, weight, has_label, mask, offsets, nu, own, total)
        return -_sum(torch.where(c == 0, 0, c * log_y), row, nu.shape[1])
