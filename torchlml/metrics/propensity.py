"""Propensity-scored precision: a label that is rarely noticed counts more."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from torchlml._arguments import Canonical, check_number, check_tensor
from torchlml._rows import wide_dtype
from torchlml.metrics.topk import TopKMetric, of_batch

# Below this the sums of inverse propensities would leave the whole numbers that they are kept in.
_SMALLEST = 1e-9


def label_propensities(counts: Tensor, rows: int, a: float = 0.55, b: float = 1.5) -> Tensor:
    """The chance of each label to be noticed where it is true, from how often it was in training data.

        >>> label_propensities(torch.tensor([0, 10, 1000]), rows=10_000)
        tensor([0.0842, 0.2199, 0.7669], dtype=torch.float64)

    Args:
        counts: (n,), in how many training rows each label was observed.
        rows: how many training rows there were, at least 3.
        a, b: the parameters A and B of the model. Published are 0.5 and 0.4 for WikiLSHTC-325K and
            Wikipedia-500K, 0.6 and 2.6 for Amazon-670K and Amazon-3M, and the defaults for all others.

    Returns:
        (n,) in float64: p = 1 / (1 + C (count + B)^-A) with C = (log(rows) - 1) (B + 1)^A, the model of Jain,
        Prabhu and Varma, "Extreme Multi-label Loss Functions for Recommendation, Tagging, Ranking & Other
        Missing Label Applications" (KDD 2016).
    """
    check_tensor(counts, "counts")
    if (
        counts.dtype == torch.bool
        or counts.is_complex()
        or counts.dim() != 1
        or not bool((counts >= 0).all())
    ):
        raise ValueError(
            "`counts` must be a tensor of shape (n,) with numbers from 0 on, but it is "
            f"{counts.dtype} of shape {tuple(counts.shape)}, or a negative number or a NaN is in it."
        )
    check_number(rows, "rows", "a number from 3 on", 3)
    check_number(a, "a", "a number from 0 on", 0)
    check_number(b, "b", "a number from 0 on", 0)
    if b == 0 and bool((counts == 0).any()):
        raise ValueError("`b` must be positive where a label has the count 0, but it is 0.")
    c = (math.log(rows) - 1) * (b + 1) ** a
    return 1 / (1 + c * (counts.to(wide_dtype(counts.device)) + b) ** -a)


class PropensityScoredPrecision(TopKMetric):
    """Precision in which a label counts the more the rarer it is noticed (PSP@k), in parts of the best.

        >>> psp = PropensityScoredPrecision(torch.tensor([1.0, 0.5, 0.25]), k=(1, 3))
        >>> psp.update(torch.tensor([[0.1, 0.7, 0.2]]), torch.tensor([1]))
        >>> psp.update(torch.tensor([[0.5, 0.3, 0.2]]), torch.tensor([2]))
        >>> psp.compute()
        {'psp@1': tensor(0.3333), 'psp@3': tensor(1.)}

    Args:
        propensities: (n,), the chance of each label to be observed where it is true, above 0 and at most 1:
            from `label_propensities`, or your own. They are kept in float64, whatever the model is in.
        k, ignore_index, **settings: as for `TopKRecall`.
        group: as there; `propensities` are then those of this process's labels.

    With observed labels Y, a predicted set P of k entries and propensities p, it is the sum over all rows of
    the sum of 1 / p over Y and P, divided by the same for the best P there is, the k labels of lowest
    propensity in Y.

    - It is a quotient of two sums over all rows, as published and as in napkinXC, not a mean of quotients: a
      row without labels changes nothing.
    - If all propensities are the same, it is the precision in parts of the best possible precision.
    - Ties, weights, masks and NaN are treated as in `TopKRecall`; a label behind a mask counts in the best.
    """

    name = "psp"

    def __init__(
        self,
        propensities: Tensor,
        k: int | Sequence[int],
        ignore_index: int = -100,
        group: Any = None,
        **settings: object,
    ) -> None:
        super().__init__(k, ignore_index, group, **settings)
        check_tensor(propensities, "propensities")
        if not propensities.is_floating_point() or propensities.dim() != 1:
            raise ValueError(
                "`propensities` must be a floating tensor of shape (n,), one for each class, but it is "
                f"{propensities.dtype} of shape {tuple(propensities.shape)}."
            )
        if not bool(((propensities >= _SMALLEST) & (propensities <= 1)).all()):
            raise ValueError(
                f"`propensities` must be from {_SMALLEST} to 1, but they go from "
                f"{float(propensities.min()):.3g} to {float(propensities.max()):.3g}."
            )
        self.propensities = propensities.detach().to(wide_dtype(propensities.device))

    def update(
        self,
        preds: Tensor,
        target: Tensor,
        *,
        mask: Tensor | None = None,
        offsets: Tensor | None = None,
        classes: Tensor | None = None,
    ) -> None:
        """Count a batch of scores (..., n); the other arguments are those of `torchlml.lml_loss`.

        With `offsets`, `classes` (int64) says the class of each of the flat values.
        """
        batch = self._rank(preds, target, mask, offsets, lambda c: self._check(c, classes))
        worth = 1 / self.propensities.to(batch.labels.device)
        worth = (worth if classes is None else worth[classes]) * batch.labels
        self._count(batch.sums(worth) / batch.ks, batch.best(worth) / batch.ks)

    def _check(self, c: Canonical, classes: Tensor | None) -> None:
        n = self.propensities.shape[0]
        if c.offsets is None:
            if classes is not None:
                raise ValueError(
                    "`classes` is accepted with `offsets` only: dense rows have one class a column."
                )
            if c.x.shape[-1] != n:
                raise ValueError(
                    f"`preds` must have {n} columns, as many as `propensities`, but it has {c.x.shape[-1]}."
                )
            return
        if classes is None:
            raise ValueError("`classes`, the class of each of the flat values, must be given with `offsets`.")
        check_tensor(classes, "classes", c.x, "`preds`")
        if classes.dtype != torch.int64 or classes.shape != c.x.shape:
            raise ValueError(
                f"`classes` must be int64 of the shape of `preds`, {tuple(c.x.shape)}, but it is "
                f"{classes.dtype} of shape {tuple(classes.shape)}."
            )
        if classes.numel() and not 0 <= int(classes.min()) <= int(classes.max()) < n:
            raise ValueError(f"`classes` must be from 0 to {n - 1}, but a number beyond is in it.")


def propensity_scored_precision(
    preds: Tensor,
    target: Tensor,
    propensities: Tensor,
    k: int | Sequence[int],
    *,
    ignore_index: int = -100,
    mask: Tensor | None = None,
    offsets: Tensor | None = None,
    classes: Tensor | None = None,
    group: Any = None,
) -> Tensor | dict[str, Tensor]:
    """`PropensityScoredPrecision` of one batch.

        >>> preds = torch.tensor([[0.1, 0.7, 0.2], [0.5, 0.3, 0.2]])
        >>> propensities = torch.tensor([1.0, 0.5, 0.25])
        >>> propensity_scored_precision(preds, torch.tensor([1, 2]), propensities, k=(1, 3))
        {'psp@1': tensor(0.3333), 'psp@3': tensor(1.)}

    Args:
        propensities: (n,), one for each class; see `PropensityScoredPrecision`.
        classes: with `offsets`, int64: the class of each of the flat values.
        preds, target, k, ignore_index, mask, offsets, group: as for `topk_recall`.
    """
    metric = PropensityScoredPrecision(propensities, k, ignore_index, group, sync_on_compute=False)
    return of_batch(metric, preds, target, mask=mask, offsets=offsets, classes=classes)
