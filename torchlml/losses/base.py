"""What all losses share: the way from one loss per row to what the caller asked for, and the `nn.Module`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from torchlml._arguments import Bound, Canonical, check_limit, check_tensor, readable
from torchlml.losses.targets import LabelReduction, Labels

Reduction = Literal["mean", "sum", "none"]

# Settings that are shown only where they are not these.
_USUAL = {"ignore_index": -100, "bound": "exactly", "label_reduction": "sum"}


def check_reduction(reduction: str, label_reduction: str = "sum") -> None:
    """Refuse a `reduction` that is none of the three, a `label_reduction` that is none of the two."""
    if reduction not in ("mean", "sum", "none"):
        raise ValueError(f'`reduction` must be "mean", "sum" or "none", but it is {reduction!r}.')
    if label_reduction not in ("sum", "mean"):
        raise ValueError(f'`label_reduction` must be "sum" or "mean", but it is {label_reduction!r}.')


def check_labelled_k(k: Tensor, labelled: Callable[[], Tensor], bound: Bound) -> None:
    """Raise if k is 0 in a row that has a label: y is 0 there, and the loss would be infinite.

    Nothing is read from a device that would have to be synchronized. `labelled` gives a bool for each row,
    and is called only if some k is 0.
    """
    if bound == "at_least" or not readable(k) or bool((k.detach() > 0).all()):
        return
    rows = labelled()
    if readable(rows) and bool((rows & ~(k.detach() > 0)).any()):
        raise ValueError("`k` must be positive in every row that has a label, but it is 0 in one of them.")


def row_divisor(labels: Labels, label_reduction: LabelReduction) -> Tensor | None:
    """What the sum over the labels of each row is divided by; None for nothing."""
    if label_reduction == "sum" or labels.complete:  # a complete list has one label in each row
        return None
    return labels.per_row.clamp(min=1)


def reduce(
    loss: Tensor, labels: Labels, divisor: Tensor | None, reduction: Reduction, c: Canonical
) -> Tensor:
    """Reduce one loss per row, which is 0 for the rows without a label, and round once to the logits' dtype.

    The mean is over the rows that have a label. Without any such row it is 0, with a gradient of 0, where
    `F.cross_entropy` gives NaN: a batch of images without a single relation must not poison a training run.
    """
    if divisor is not None:
        loss = loss / divisor
    if reduction == "mean":
        loss = loss.sum() / _labelled_rows(labels, loss.shape[0])
    elif reduction == "sum":
        loss = loss.sum()
    else:
        loss = c.restore_rows(loss)
    return loss.to(c.x.dtype)


def _labelled_rows(labels: Labels, rows: int) -> int | Tensor:
    """How many rows have a label, and 1 if none has: what a mean divides by."""
    if labels.complete:
        return max(1, rows)
    count = labels.has_label.sum()
    return max(1, int(count)) if readable(count) else count.clamp(min=1)


def reduce_single(loss: Tensor, labels: Labels, reduction: Reduction, c: Canonical) -> Tensor:
    """The same for a loss (R, 1), not yet weighted, that means nothing where there is no label."""
    if not labels.complete:
        loss = torch.where(labels.has_label.unsqueeze(-1), loss, 0)
    if labels.weight is not None:
        loss = loss * labels.weight
    return reduce(loss.squeeze(-1), labels, None, reduction, c)


class TopKLoss(nn.Module):
    """A loss as a module: `function` with all but its tensors remembered.

    Args:
        k: how many are predicted.
        weight: one weight per class. It is a buffer, so that it follows `.to()`.
        ignore_index, reduction, **settings: the other arguments of `function`. Each becomes an attribute.
    """

    function: ClassVar[Callable[..., Tensor]]
    weight: Tensor | None

    def __init__(
        self,
        k: float | Tensor,
        weight: Tensor | None,
        ignore_index: int,
        reduction: Reduction,
        **settings: Any,
    ) -> None:
        super().__init__()
        settings = {"ignore_index": ignore_index, "reduction": reduction, **settings}
        check_reduction(reduction, settings.get("label_reduction", "sum"))
        check_limit(k)
        if weight is not None:
            check_tensor(weight, "weight")
        self.k = k
        self.register_buffer("weight", weight)
        self._names = tuple(settings)
        for name, value in settings.items():
            setattr(self, name, value)

    def forward(
        self, logits: Tensor, target: Tensor, mask: Tensor | None = None, offsets: Tensor | None = None
    ) -> Tensor:
        """The loss of a batch; the arguments are those of the function."""
        settings = {name: getattr(self, name) for name in self._names}
        return type(self).function(
            logits, target, self.k, weight=self.weight, mask=mask, offsets=offsets, **settings
        )

    def extra_repr(self) -> str:
        shown = [f"k={self.k}"]
        if self.weight is not None:
            shown.append(f"weight=<{self.weight.numel()} classes>")
        for name in self._names:
            value = getattr(self, name)
            if _USUAL.get(name) != value:
                shown.append(f"{name}={value!r}")
        return ", ".join(shown)
