"""Propensity-scored precision, which gives more weight to labels that are rarely observed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from torchlml._arguments import Canonical, check_number, check_tensor
from torchlml._rows import wide_dtype
from torchlml.metrics.topk import TopKMetric, of_batch

# For smaller propensities, the sums of their inverses could overflow the integers that store them.
_SMALLEST = 1e-9


def label_propensities(counts: Tensor, rows: int, a: float = 0.55, b: float = 1.5) -> Tensor:
    """Estimate the probability that a true label is observed, from its frequency in the training data.

        >>> label_propensities(torch.tensor([0, 10, 1000]), rows=10_000)
        tensor([0.0842, 0.2199, 0.7669], dtype=torch.float64)

    Args:
        counts: a tensor of shape (n,) with the number of training samples in which each label was observed.
        rows: the number of training samples, at least 3.
        a, b: the parameters A and B of the model. The published values are 0.5 and 0.4 for WikiLSHTC-325K and
            Wikipedia-500K, 0.6 and 2.6 for Amazon-670K and Amazon-3M, and the defaults for all other data
            sets.

    Returns:
        The propensities, as a float64 tensor of shape (n,).

    The propensity of a label is p = 1 / (1 + C * (count + B)^-A), where C = (log(rows) - 1) * (B + 1)^A. This
    is the model of Jain, Prabhu and Varma, "Extreme Multi-label Loss Functions for Recommendation, Tagging,
    Ranking & Other Missing Label Applications" (KDD 2016).
    """
    check_tensor(counts, "counts")
    if counts.dtype == torch.bool or counts.is_complex() or counts.dim() != 1:
        raise ValueError(
            "`counts` must be a tensor of shape (n,) with nonnegative numbers, but it has dtype "
            f"{counts.dtype} and shape {tuple(counts.shape)}."
        )
    if not bool((counts >= 0).all()):
        raise ValueError(
            "`counts` must contain nonnegative numbers, but it contains a negative number or NaN."
        )
    check_number(rows, "rows", "a number that is at least 3", 3)
    check_number(a, "a", "a nonnegative number", 0)
    check_number(b, "b", "a nonnegative number", 0)
    if b == 0 and bool((counts == 0).any()):
        raise ValueError("`b` must be positive if a label has a count of 0, but `b` is 0.")
    c = (math.log(rows) - 1) * (b + 1) ** a
    return 1 / (1 + c * (counts.to(wide_dtype(counts.device)) + b) ** -a)


class PropensityScoredPrecision(TopKMetric):
    """Propensity-scored precision (PSP@k): precision, weighted toward rare labels, divided by its maximum.

        >>> psp = PropensityScoredPrecision(torch.tensor([1.0, 0.5, 0.25]), k=(1, 3))
        >>> psp.update(torch.tensor([[0.1, 0.7, 0.2]]), torch.tensor([1]))
        >>> psp.update(torch.tensor([[0.5, 0.3, 0.2]]), torch.tensor([2]))
        >>> psp.compute()
        {'psp@1': tensor(0.3333), 'psp@3': tensor(1.)}

    Args:
        propensities: a tensor of shape (n,) with the probability that each label is observed if it is true,
            from 1e-9 to 1. Use `label_propensities` or your own estimate. The propensities are stored in
            float64, regardless of the dtype of the model.
        k, ignore_index, **settings: as for `TopKRecall`.
        group: as for `TopKRecall`. `propensities` then covers only the labels of this process.

    For observed labels Y, a predicted set P of k entries and propensities p, the gain of a row is the sum of
    1 / p over the intersection of Y and P. The metric is the sum of the gains of all rows divided by the sum
    of the highest possible gains, for which P contains the k labels of Y with the lowest propensities.

    - The metric is a quotient of two sums over all rows, as published and as in napkinXC. It is not a mean of
      quotients, so a row without labels has no effect.
    - If all propensities are equal, the metric is the precision divided by the highest possible precision.
    - Ties, weights, masks and NaN are handled as in `TopKRecall`. Masked labels are included in the highest
      possible gain.
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
                "`propensities` must be a floating-point tensor of shape (n,), with one number per class, "
                f"but it has dtype {propensities.dtype} and shape {tuple(propensities.shape)}."
            )
        if not bool(((propensities >= _SMALLEST) & (propensities <= 1)).all()):
            raise ValueError(
                f"`propensities` must be from {_SMALLEST} to 1, but they range from "
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
        """Add a batch of scores of shape (..., n). The other arguments are those of `torchlml.lml_loss`.

        With `offsets`, `classes` is an int64 tensor with the class index of each score.
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
                    "`classes` must be None without `offsets`, because the columns of dense rows are classes."
                )
            if c.x.shape[-1] != n:
                raise ValueError(
                    f"`preds` must have {n} columns, one for each entry of `propensities`, but it has "
                    f"{c.x.shape[-1]}."
                )
            return
        if classes is None:
            raise ValueError("`classes`, the class index of each score, is required with `offsets`.")
        check_tensor(classes, "classes", c.x, "`preds`")
        if classes.dtype != torch.int64 or classes.shape != c.x.shape:
            raise ValueError(
                f"`classes` must be an int64 tensor with the shape of `preds`, {tuple(c.x.shape)}, but it "
                f"has dtype {classes.dtype} and shape {tuple(classes.shape)}."
            )
        if classes.numel() and not 0 <= int(classes.min()) <= int(classes.max()) < n:
            raise ValueError(
                f"`classes` must contain class indices from 0 to {n - 1}, but they range from "
                f"{int(classes.min())} to {int(classes.max())}."
            )


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
    """Compute `PropensityScoredPrecision` for one batch.

        >>> preds = torch.tensor([[0.1, 0.7, 0.2], [0.5, 0.3, 0.2]])
        >>> propensities = torch.tensor([1.0, 0.5, 0.25])
        >>> propensity_scored_precision(preds, torch.tensor([1, 2]), propensities, k=(1, 3))
        {'psp@1': tensor(0.3333), 'psp@3': tensor(1.)}

    Args:
        propensities: the propensities of the classes (n,), as for `PropensityScoredPrecision`.
        classes: the class index of each score, an int64 tensor. It is required with `offsets`.
        preds, target, k, ignore_index, mask, offsets, group: as for `topk_recall`.

    Returns:
        A scalar for an integer k, or a dict with the keys `psp@k` for a sequence.
    """
    metric = PropensityScoredPrecision(propensities, k, ignore_index, group, sync_on_compute=False)
    return of_batch(metric, preds, target, mask=mask, offsets=offsets, classes=classes)
