"""The LML loss: maximum likelihood of the observed labels under a projection that chooses exactly k."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from torchlml import ops
from torchlml.arguments import Canonical, check_k
from torchlml.autograd import is_plain, log_lml, wants_graph
from torchlml.family import bounds
from torchlml.losses.reduction import TopKLoss, check_reduction, reduce
from torchlml.losses.targets import Labels, may_look, read_labels, read_logits
from torchlml.reference import infinite_share, prepare
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
    k = check_k(k, rows.shape, most, logits.device)
    labels = read_labels(rows, target, weight, ignore_index)
    # Half precision is float32 from here on, and rounded once at the end.
    x = rows.x.to(work_dtype(rows.x.dtype))
    weighted = labels.weight is not None and labels.weight.requires_grad
    if labels.listed is not None and bound == "exactly" and is_plain() and not weighted:
        loss = _Loss.apply(x, k, *labels, rows.mask, rows.offsets)
    else:
        loss = _through_log_lml(x, k, labels, rows.mask, rows.offsets, bound)
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


def _through_log_lml(
    x: Tensor, k: Tensor, labels: Labels, mask: Tensor | None, offsets: Tensor | None, bound: str = "exactly"
) -> Tensor:
    """One loss per row from all of log y: for a multi-hot, a `bound`, and every transform of PyTorch."""
    row = None if offsets is None else row_index(offsets, x.shape[0])
    if not (may_look(labels.has_label) and bool(labels.has_label.all())):
        # A row without labels counts for nothing, even if it holds a NaN.
        x = torch.where(_spread(labels.has_label, row), x, 0)
    if bound == "exactly":
        log_y = log_lml(x, k, mask, offsets, None)
    else:
        log_y = bounds.log_rows(Canonical(x, k, mask, offsets, None), None, bound)
    is_label = labels.observed
    if labels.listed is not None:
        log_y, row, is_label = log_y.gather(-1, labels.listed.clamp(min=0)), labels.row, labels.listed >= 0
    assert is_label is not None
    if labels.weight is not None:
        log_y, is_label = log_y * labels.weight, is_label & (labels.weight != 0)
    return -_sum(torch.where(is_label, log_y, 0), row, labels.has_label.shape[0])


class _Loss(torch.autograd.Function):
    """One loss per row from the entries that are labels; no other probability is ever formed.

    With A = sum_j c_j (1 - y_j) over the labels j of a row, weighted by c,

        dx_i = A w_i / sum w - c_i (1 - y_i),    dk = -A / sum w.

    The first part and dk are -A times the derivatives of nu, for which there is an operator; the second part
    is one number for each label.
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
        complete: bool,
        mask: Tensor | None,
        offsets: Tensor | None,
    ) -> Tensor:
        nu = ops.solve(x, k, mask, offsets)
        place, c = listed, weight
        if not complete:
            is_label, place = listed >= 0, listed.clamp(min=0)
            c = is_label.to(x.dtype) if weight is None else torch.where(is_label, weight, 0)
        entries = x.gather(-1, place)
        if mask is not None:
            entries = torch.where(mask.gather(-1, place), entries, -torch.inf)
        hi, lo = nu.unsqueeze(-1) if row is None else nu[:, row]
        z = (entries + hi) + lo
        # Every row of a matrix is in z; of packed rows only those with a label are.
        if may_look(z) and math.isfinite(z.sum() if row is None else z.sum() + nu.sum()):
            loss, own = logsigmoid(z), torch.sigmoid(-z)
            if c is not None:
                loss, own = c * loss, c * own
            total = _sum(own, row, has_label.shape[0])
        else:
            c = torch.ones_like(z) if c is None else c
            # An infinite nu has no derivatives: a row without labels counts for nothing, whatever is in it.
            nu = torch.where(has_label, nu, -torch.inf)
            hi = _spread(nu[0], row)
            tied = (entries == torch.inf) & (hi == -torch.inf)
            values, rows = prepare(x, mask, offsets)
            log_share = _spread(infinite_share(values, k, nu, rows).log(), row)
            log_y = torch.where((entries == -torch.inf) & ~hi.isnan(), -torch.inf, logsigmoid(z))
            loss = torch.where(c == 0, 0, c * torch.where(tied, log_share, log_y))
            own = torch.where(entries.isfinite() & hi.isfinite(), c * torch.sigmoid(-z), 0)
            # p > k entries that are +inf get k/p each: they move with k but not with x.
            total = _sum(torch.where(tied, c, own), row, has_label.shape[0])
        ctx.save_for_backward(x, k, listed, row, weight, has_label, mask, offsets, nu, place, own, total)
        return -_sum(loss, row, has_label.shape[0])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, k, listed, row, weight, has_label, mask, offsets, nu, place, own, total = ctx.saved_tensors
        rest = (None,) * 8
        if wants_graph():
            labels = Labels(listed, row, None, weight, has_label, complete=False)
            loss = _through_log_lml(x, k, labels, mask, offsets)
            wanted = [t for t in (x, k) if t.requires_grad]
            found = iter(torch.autograd.grad(loss, wanted, grad, create_graph=True))
            return (*(next(found) if t.requires_grad else None for t in (x, k)), *rest)
        minus = -grad
        change = minus * total
        dx, dk = ops.dual_backward(change, x, nu, mask, offsets)
        dx.scatter_add_(-1, place, _spread(minus, row) * own)
        if not k.requires_grad:
            return (dx, None, *rest)
        # Where entries tie at +inf, log y = log(k / p): total is the weight of those that are labels.
        dk = torch.where((nu[0] == -torch.inf) & (total != 0), change / k, dk).to(k.dtype)
        return (dx, dk.sum() if k.dim() == 0 else dk, *rest)


def _spread(per_row: Tensor, row: Tensor | None) -> Tensor:
    """The number of each row beside its labels or entries."""
    return per_row.unsqueeze(-1) if row is None else per_row[row]


def _sum(t: Tensor, row: Tensor | None, count: int) -> Tensor:
    """The sum over the labels or entries of each row."""
    return t.sum(-1) if row is None else t.new_zeros(count).index_add(0, row, t)
