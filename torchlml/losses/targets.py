"""What the arguments of every loss and metric mean: logits become rows, targets become labels.

Logits are (..., n), one row per leading index, or with `offsets` a flat vector whose row i is
`values[offsets[i]:offsets[i + 1]]`. A target is one of

- int64 of shape (...): one class index per row, `ignore_index` for none;
- int64 of shape (..., L): the observed labels of each row, padded with `ignore_index`;
- bool or floating of the logits' shape: multi-hot, a float being the weight of its label;
- with `offsets`: a flat multi-hot, or int64 positions into the flat values.
"""

from __future__ import annotations

import operator
from typing import NamedTuple

import torch
from torch import Tensor

from torchlml._core.arguments import readable
from torchlml._core.rows import row_index, work_dtype


class LogitRows(NamedTuple):
    """Logits as rows: `x` is (R, n), or (N,) with `offsets` (R + 1,); `shape` is that of a number per row."""

    x: Tensor
    mask: Tensor | None
    offsets: Tensor | None
    shape: torch.Size

    @property
    def number(self) -> int:
        return self.x.shape[0] if self.offsets is None else self.offsets.numel() - 1


class Labels(NamedTuple):
    """The observed labels, as a list or as a multi-hot; exactly one of `listed` and `observed` is given.

    `listed` is (R, L), classes, or with offsets (P,), positions in rising order, those of row i from
    `starts[i]` to `starts[i + 1]`: every label once, a negative number for none. `observed` is a bool of the
    shape of `x`. `weight` has the shape of the one that is given; None means 1 for every label.
    """

    listed: Tensor | None
    starts: Tensor | None
    observed: Tensor | None
    weight: Tensor | None
    offsets: Tensor | None  # of the logits
    complete: bool  # nothing in `listed` is negative, which is known only where the target may be looked at

    @property
    def row(self) -> Tensor | None:
        """The row of each listed position, or of each observed entry; None where a matrix says it."""
        if self.offsets is None:
            return None
        if self.observed is not None:
            return row_index(self.offsets, self.observed.numel())
        assert self.listed is not None
        assert self.starts is not None
        return row_index(self.starts, self.listed.numel())

    @property
    def has_label(self) -> Tensor:
        """A bool for each row."""
        found = self.observed if self.listed is None else self.listed >= 0
        assert found is not None
        row = self.row
        if self.offsets is None or row is None:
            return found.any(-1)
        counts = torch.zeros(self.offsets.numel() - 1, dtype=torch.int64, device=found.device)
        return counts.index_add(0, row, found.long()) > 0

    @property
    def in_every_row(self) -> bool:
        """Whether every row is known to have a label."""
        if self.complete:
            return True
        has_label = self.has_label
        return may_look(has_label) and bool(has_label.all())


def read_logits(logits: Tensor, mask: Tensor | None, offsets: Tensor | None) -> LogitRows:
    """Check the logits and what belongs to them, and make them rows; under autocast also float32."""
    if not logits.is_floating_point():
        raise TypeError(f"`logits` must be a floating tensor, but it has dtype {logits.dtype}.")
    if logits.dim() == 0:
        raise ValueError("`logits` must have at least one dimension, the classes, but it has shape ().")
    if mask is not None and mask.dtype != torch.bool:
        raise TypeError(
            f"`mask` must be a bool tensor, True where a class may be chosen, but it has dtype {mask.dtype}."
        )
    if mask is not None and not _broadcasts(mask.shape, logits.shape):
        raise ValueError(
            f"`mask` must broadcast to the logits' shape {_show(logits)}, but it has shape {_show(mask)}."
        )
    if torch.is_autocast_enabled(logits.device.type) and logits.dtype != torch.float64:
        logits = logits.float()
    if offsets is not None:
        offsets = _check_offsets(offsets, logits)
        mask = None if mask is None else mask.expand(logits.shape).contiguous()
        return LogitRows(logits.contiguous(), mask, offsets, torch.Size([offsets.numel() - 1]))
    shape = logits.shape[:-1]
    flat = (shape.numel(), logits.shape[-1])
    mask = None if mask is None else mask.expand(logits.shape).reshape(flat).contiguous()
    # A view of what is already in rows would only cost a node in the graph.
    x = logits if logits.dim() == 2 else logits.reshape(flat)
    return LogitRows(x.contiguous(), mask, None, shape)


def read_labels(rows: LogitRows, target: Tensor, weight: Tensor | None, ignore_index: int) -> Labels:
    """Check the target and bring it into one of the two forms of `Labels`."""
    if weight is not None:
        _check_weight(weight, rows)
    if target.dtype == torch.int64:
        if rows.offsets is not None:
            return _positions(rows, target, ignore_index)
        return _class_indices(rows, target, weight, ignore_index)
    if target.dtype == torch.bool or target.is_floating_point():
        return _multi_hot(rows, target, weight)
    raise TypeError(
        f"`target` must be int64 (class indices), bool or floating (multi-hot), but it is {target.dtype}."
    )


def multi_hot(rows: LogitRows, labels: Labels) -> Tensor:
    """The observed labels as a bool of the shape of `x`, whatever form they came in."""
    if labels.listed is None:
        assert labels.observed is not None
        return labels.observed
    *outer, n = rows.x.shape
    # One entry more than there are receives the padding.
    place = torch.where(labels.listed < 0, n, labels.listed)
    observed = torch.zeros(*outer, n + 1, dtype=torch.bool, device=rows.x.device)
    return observed.scatter(-1, place, True)[..., :n]


def read_single_label(
    rows: LogitRows, target: Tensor, weight: Tensor | None, ignore_index: int, loss: str
) -> tuple[Labels, Tensor]:
    """The labels and the column (R, 1) of each row's class, 0 for none; more than one label is refused."""
    if rows.offsets is not None:
        raise ValueError(f"`offsets` is not accepted by {loss}, which compares the classes of dense rows.")
    if target.dtype != torch.int64 or target.shape != rows.shape:
        raise ValueError(
            f"`target` must be int64 of shape {_show(rows.shape)}, one class index per row, because {loss} "
            f"is defined for a single label; it is {target.dtype} of shape {_show(target)}."
        )
    labels = read_labels(rows, target, weight, ignore_index)
    assert labels.listed is not None
    return labels, labels.listed.clamp(min=0)


def read_k(k: int, largest: int | None) -> int:
    """An integer k from 1 to `largest`, for the losses that count entries."""
    try:
        k = operator.index(k)
    except TypeError:
        raise TypeError(f"`k` must be an integer, but it is {k!r}.") from None
    if k < 1 or (largest is not None and k > largest):
        accepted = "at least 1" if largest is None else f"from 1 to {largest} for these logits"
        raise ValueError(f"`k` must be {accepted}, but it is {k}.")
    return k


def may_look(*tensors: Tensor | None) -> bool:
    """Whether values may be looked at: on a GPU that would stall, and a traced tensor has none."""
    return all(tensor is None or readable(tensor) for tensor in tensors)


def _class_indices(rows: LogitRows, target: Tensor, weight: Tensor | None, ignore_index: int) -> Labels:
    n = rows.x.shape[-1]
    if target.shape == rows.shape:
        given = target.reshape(-1, 1)
    elif target.dim() == len(rows.shape) + 1 and target.shape[:-1] == rows.shape:
        given = target.reshape(rows.number, target.shape[-1])
    else:
        raise ValueError(
            f"`target` must have shape {_show(rows.shape)} (one class per row), {_show(rows.shape, 'L')} (a "
            f"padded list) or, as bool or floating, {_show(rows.shape, n)} (multi-hot), but it has shape "
            f"{_show(target)}."
        )
    full = given.shape[1] == n
    complete = may_look(target) and _check_values(given, ignore_index, n, "class indices", full)
    listed = given
    if given.shape[1] > 1:
        listed = _each_once(_negative(given, ignore_index).sort(-1).values)
        complete = False  # removing what is repeated leaves gaps
    elif not complete:
        listed = _negative(given, ignore_index)
    if rows.mask is not None and may_look(target, rows.mask):
        _check_available((listed >= 0) & ~rows.mask.gather(-1, listed.clamp(min=0)))
    label_weight = None
    if weight is not None:
        label_weight = weight.to(work_dtype(rows.x.dtype))[listed if complete else listed.clamp(min=0)]
    return Labels(listed, None, None, label_weight, None, complete)


def _negative(target: Tensor, ignore_index: int) -> Tensor:
    """The target with a negative number for none, as `ignore_index` mostly is already."""
    return target if ignore_index < 0 else torch.where(target == ignore_index, -1, target)


def _each_once(ordered: Tensor) -> Tensor:
    """Make a repeated label of the sorted last dim -1, so that neither order nor repetition is felt."""
    repeated = ordered[..., 1:] == ordered[..., :-1]
    return torch.cat([ordered[..., :1], ordered[..., 1:].masked_fill(repeated, -1)], dim=-1)


def _multi_hot(rows: LogitRows, target: Tensor, weight: Tensor | None) -> Labels:
    expected = rows.shape if rows.offsets is None else torch.Size()
    expected = torch.Size([*expected, rows.x.shape[-1]])
    if target.shape != expected:
        raise ValueError(
            f"`target` is {target.dtype}, a multi-hot, and must have the logits' shape {_show(expected)}, "
            f"but it has shape {_show(target)}."
        )
    target = target.reshape(rows.x.shape)
    observed = target if target.dtype == torch.bool else target != 0
    if may_look(target, rows.mask):
        if target.is_floating_point() and bool((target < 0).any()):
            raise ValueError(
                "`target` has a negative entry, but a floating multi-hot holds label weights from 0 on."
            )
        if rows.mask is not None:
            _check_available(observed & ~rows.mask)
    work = work_dtype(rows.x.dtype)
    label_weight = None if target.dtype == torch.bool and weight is None else target.to(work)
    if weight is not None and label_weight is not None:
        label_weight = label_weight * weight.to(work)
    return Labels(None, None, observed, label_weight, rows.offsets, complete=False)


def _positions(rows: LogitRows, target: Tensor, ignore_index: int) -> Labels:
    if target.dim() != 1:
        raise ValueError(
            f"`target` must be flat with `offsets`: int64 positions into the values, or a multi-hot of their "
            f"shape {_show(rows.x)}; it has shape {_show(target)}."
        )
    assert rows.offsets is not None
    n = rows.x.shape[0]
    if may_look(target):
        _check_values(target, ignore_index, n, "positions", target.numel() == n)
    ordered = _negative(target, ignore_index).sort().values
    # What is in no row counts for the first one where it is negative, and makes the last one NaN where it is
    # too large, which is seen here only where the target may be looked at.
    starts = torch.searchsorted(ordered, rows.offsets[1:-1])
    starts = torch.cat([starts.new_zeros(1), starts, starts.new_full((1,), target.numel())])
    if rows.number == 0:
        ordered, starts = ordered[:0], starts[:1]
    listed = _each_once(ordered)
    if rows.mask is not None and may_look(target, rows.mask):
        _check_available(~rows.mask[listed[listed >= 0]])
    return Labels(listed, starts, None, None, rows.offsets, complete=False)


def _check_offsets(offsets: Tensor, logits: Tensor) -> Tensor:
    if logits.dim() != 1:
        raise ValueError(f"`logits` must be flat with `offsets`, but it has shape {_show(logits)}.")
    if offsets.dtype not in (torch.int64, torch.int32) or offsets.dim() != 1 or offsets.numel() == 0:
        raise ValueError(
            f"`offsets` must be a flat int64 tensor with one number more than there are rows, but it is "
            f"{offsets.dtype} of shape {_show(offsets)}."
        )
    if may_look(offsets):
        n = logits.numel()
        if int(offsets[0]) != 0 or int(offsets[-1]) != n or bool((offsets.diff() < 0).any()):
            raise ValueError(
                f"`offsets` must rise from 0 to the number of values, {n}, but it is {offsets.tolist()}."
            )
    return offsets.long().contiguous()


def _check_weight(weight: Tensor, rows: LogitRows) -> None:
    if rows.offsets is not None:
        raise ValueError(
            "`weight` is one number per class, but with `offsets` there are none: give a floating target."
        )
    n = rows.x.shape[-1]
    if not weight.is_floating_point() or weight.shape != (n,):
        raise ValueError(
            f"`weight` must be a floating tensor of shape ({n},), one per class, but it is {weight.dtype} "
            f"of shape {_show(weight)}."
        )


def _check_values(target: Tensor, ignore_index: int, n: int, what: str, full: bool) -> bool:
    """Refuse what is out of range and, if `full`, as long as a row, what can only be meant as a multi-hot.

    True means that every number is a label.
    """
    if target.numel() == 0:
        return True
    smallest, largest = (int(value) for value in target.aminmax())
    if full and n > 2 and smallest >= 0 and largest <= 1:
        raise ValueError("`target` is an int64 tensor of zeros and ones, a multi-hot: give `target.bool()`.")
    if smallest >= 0 and largest < n:
        return not smallest <= ignore_index <= largest
    wrong = target[((target < 0) | (target >= n)) & (target != ignore_index)]
    if wrong.numel():
        raise ValueError(
            f"`target` must hold {what} from 0 to {n - 1}, or `ignore_index` = {ignore_index}, but "
            f"{int(wrong[0])} is in it."
        )
    return False


def _check_available(masked: Tensor) -> None:
    if bool(masked.any()):
        raise ValueError(
            "`target` has a label where `mask` is False, but a label must be a class that may be chosen."
        )


def _broadcasts(shape: torch.Size, to: torch.Size) -> bool:
    return len(shape) <= len(to) and all(
        a in (1, b) for a, b in zip(reversed(shape), reversed(to), strict=False)
    )


def _show(value: Tensor | torch.Size, *more: object) -> str:
    shape = [*(value.shape if isinstance(value, Tensor) else value), *more]
    return "(" + ", ".join(map(str, shape)) + ("," if len(shape) == 1 else "") + ")"
