"""Convert the targets of losses and metrics from any accepted format to the labels of each row.

The accepted formats are those of `lml_loss`. An integer target with the shape of the logits raises an error:
it is far more likely to be multi-hot than a padded list that happens to have n columns, and on a GPU or
during compilation its values cannot be read to decide between the two. To pass such a list, add one more
column of `ignore_index`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from torchlml._arguments import Canonical, check_tensor, readable
from torchlml._rows import Rows, check_jagged, rows_of, work_dtype

_FORMS = "int64 or uint8 (class indices, or lists padded with `ignore_index`), or bool or float (multi-hot)"


class Labels(NamedTuple):
    """The observed labels, as lists or as a multi-hot tensor.

    Exactly one of `listed` and `observed` is not None. `listed` has shape (R, L) and contains classes. With
    offsets, it has shape (P,) and contains indices into the values in ascending order, and the labels of row
    i are `listed[starts[i]:starts[i + 1]]`. `listed` contains every label once, and negative values are
    padding. `observed` is a bool tensor with the shape of the logits. `weight` has the shape of `listed` or
    `observed`, whichever is not None. If `weight` is None, every label has weight 1.
    """

    listed: Tensor | None
    starts: Tensor | None
    observed: Tensor | None
    weight: Tensor | None
    offsets: Tensor | None  # the offsets of the logits
    complete: bool  # whether `listed` is known to have no padding; False if the target cannot be read

    @property
    def found(self) -> Tensor:
        """A bool mask of the labels, with the shape of `listed` or `observed`."""
        if self.listed is not None:
            return self.listed >= 0
        assert self.observed is not None
        return self.observed

    @property
    def rows(self) -> Rows:
        """The rows of `listed` or `observed`, for sums over the labels of a row."""
        offsets = self.offsets if self.listed is None else self.starts
        return rows_of(self.found, offsets, differentiable=True)

    @property
    def per_row(self) -> Tensor:
        """The number of labels in each row."""
        return self.rows.sum(self.found)

    @property
    def has_label(self) -> Tensor:
        """Whether each row has a label, as a bool tensor (R,)."""
        return self.found.any(-1) if self.offsets is None else self.per_row > 0

    @property
    def in_every_row(self) -> bool:
        """Whether every row is known to have a label."""
        if self.complete:
            return True
        has_label = self.has_label
        return readable(has_label) and bool(has_label.all())

    def multi_hot(self, x: Tensor) -> Tensor:
        """Return the observed labels as a bool tensor with the shape of `x`."""
        if self.listed is None:
            return self.found
        *outer, n = x.shape
        # One extra entry receives the padding.
        place = torch.where(self.listed < 0, n, self.listed)
        observed = torch.zeros(*outer, n + 1, dtype=torch.bool, device=x.device)
        return observed.scatter(-1, place, True)[..., :n]


@dataclass(frozen=True)
class TargetRows:
    """The validated target of dense rows, for losses that read a few rows at a time.

    A multi-hot target is stored unchanged, and only the rows being read are converted: the whole converted
    target with its weights would take as much memory as the logits of the whole batch.
    """

    listed: Labels | None
    multi_hot: Tensor | None  # (R, n)
    weight: Tensor | None  # one weight per class
    dtype: torch.dtype  # the dtype of the label weights

    def __getitem__(self, rows: slice) -> Labels:
        """Return the labels of the selected rows."""
        if self.multi_hot is not None:
            return _hot_labels(self.multi_hot[rows], self.weight, self.dtype)
        assert self.listed is not None
        assert self.listed.listed is not None
        weight = None if self.listed.weight is None else self.listed.weight[rows]
        return self.listed._replace(listed=self.listed.listed[rows], weight=weight)

    @property
    def has_label(self) -> Tensor:
        """Whether each row has a label, as a bool tensor (R,)."""
        if self.multi_hot is None:
            assert self.listed is not None
            return self.listed.has_label
        if self.multi_hot.shape[1] == 0 or self.multi_hot.dtype == torch.bool:
            return self.multi_hot.any(-1)
        return self.multi_hot.detach().amax(-1) != 0

    @property
    def weights_need_gradient(self) -> bool:
        """Whether a gradient is requested for class weights or for the weights in a multi-hot target."""
        return any(t is not None and t.requires_grad for t in (self.weight, self.multi_hot))


def read_labels(c: Canonical, target: Tensor, weight: Tensor | None, ignore_index: int) -> Labels:
    """Check the target and convert it to one of the two formats of `Labels`."""
    if type(ignore_index) is not int:
        _check_ignore_index(ignore_index)
    if weight is not None:
        check_weight(c, weight)
    if c.jagged is not None and _lists_labels(c, target):
        return _positions(c, c.jagged.places(target, ignore_index, readable(target)), weight, -1)
    target = _values(c, target)
    if target.dtype == torch.bool or target.is_floating_point():
        _check_multi_hot(c, target)
        labels = _hot_labels(target.reshape(c.x.shape), weight, work_dtype(c.x.dtype), c.offsets)
        if c.mask is not None and readable(target, c.mask):
            _check_available(labels.found & ~c.mask)
        return labels
    if target.dtype not in (torch.int64, torch.uint8):
        raise TypeError(f"`target` must be {_FORMS}, but its dtype is {target.dtype}.")
    if c.offsets is None:
        return _class_indices(c, target.long(), weight, ignore_index)
    if target.shape == c.x.shape:
        _raise_ambiguous(target)
    return _positions(c, target.long(), weight, ignore_index)


def read_target_rows(c: Canonical, target: Tensor, weight: Tensor | None, ignore_index: int) -> TargetRows:
    """Check the class weights and the target, for a loss that reads only a few dense rows at a time."""
    dtype = work_dtype(c.x.dtype)
    if not is_multi_hot(target):
        return TargetRows(read_labels(c, target, weight, ignore_index), None, weight, dtype)
    _check_ignore_index(ignore_index)
    if weight is not None:
        check_weight(c, weight)
    check_tensor(target, "target", c.x, "the logits")
    _check_multi_hot(c, target)
    return TargetRows(None, target.reshape(c.x.shape), weight, dtype)


def is_multi_hot(target: Any) -> bool:
    """Whether a target is multi-hot, that is, a bool or floating-point tensor."""
    return isinstance(target, Tensor) and (target.dtype == torch.bool or target.is_floating_point())


def read_single_label(
    c: Canonical, target: Tensor, weight: Tensor | None, ignore_index: int, loss: str
) -> tuple[Labels, Tensor]:
    """Return the labels, and the class of each row (R, 1), which is 0 for a row without a label.

    A target that can have several labels per row raises an error.
    """
    if c.offsets is not None:
        raise ValueError(f"`logits` must have rows of equal length for {loss}, but the rows are ragged.")
    _check_ignore_index(ignore_index)
    target = _values(c, target)
    if target.dtype not in (torch.int64, torch.uint8) or target.shape != c.row_shape:
        raise ValueError(
            f"`target` must be an int64 or uint8 tensor of shape {tuple(c.row_shape)}, with one class index "
            f"per row, because {loss} is defined for a single label, but it has dtype {target.dtype} and "
            f"shape {tuple(target.shape)}."
        )
    if weight is not None:
        check_weight(c, weight)
    labels = _class_indices(c, target.long(), weight, ignore_index)
    assert labels.listed is not None
    return labels, labels.listed.clamp(min=0)


def _check_ignore_index(ignore_index: Any) -> None:
    if isinstance(ignore_index, bool) or not isinstance(ignore_index, (int, torch.SymInt)):
        raise TypeError(f"`ignore_index` must be an int, but it is {ignore_index!r}.")


def _values(c: Canonical, target: Any) -> Tensor:
    """Return the target itself if it is dense, or the values of a nested target."""
    if isinstance(target, (list, tuple)):
        raise TypeError(
            f"`target` must be a torch.Tensor, but its type is {type(target).__name__}; pass one class "
            "index per row, lists of labels padded to the same length with `ignore_index`, or a bool "
            "multi-hot tensor."
        )
    if c.jagged is not None:
        target = c.jagged.values(target, "target", c.jagged.ragged, readable(c.x))
    check_tensor(target, "target", c.x, "the logits")
    return target


def _lists_labels(c: Canonical, target: Any) -> bool:
    """Whether a target of ragged rows lists labels, as one or more integers per row or as a nested tensor."""
    if c.offsets is None or not isinstance(target, Tensor) or target.dtype not in (torch.int64, torch.uint8):
        return False
    if not target.is_nested:
        check_tensor(target, "target", c.x, "the logits")
        return target.dim() in (1, 2) and target.shape[0] == c.row_shape[0]
    assert c.jagged is not None
    check_jagged(target, "target")
    values: Tensor = target.values()
    check_tensor(values, "target", c.x, "the logits")
    if target.shape[0] != c.row_shape[0] or values.dim() != 1:
        raise ValueError(
            f"`target` must be a 2-d nested tensor that lists the labels of {c.row_shape[0]} rows, but it is "
            f"{target.dim()}-d and has {target.shape[0]} rows."
        )
    # If the offsets cannot be read, a target with the same number of values as the logits is assumed to have
    # the same offsets.
    if values.shape != c.x.shape or (readable(values) and not c.jagged.is_like(target, may_read=True)):
        return True
    raise ValueError(
        f"`target` is {target.dtype} and ragged like the logits, which is ambiguous; pass `target.bool()` "
        "for multi-hot labels, or a list of the labels within each row, padded with `ignore_index`."
    )


def _class_indices(c: Canonical, target: Tensor, weight: Tensor | None, ignore_index: int) -> Labels:
    n, rows = c.x.shape[-1], c.row_shape
    if target.shape == rows:
        given = target.reshape(-1, 1)
    elif target.dim() == len(rows) + 1 and target.shape[:-1] == rows:
        if target.shape[-1] == n:
            _raise_ambiguous(target)
        given = target.reshape(c.x.shape[0], target.shape[-1])
    else:
        padded = ", ".join([*map(str, rows), "L"])
        raise ValueError(
            f"`target` must have shape {tuple(rows)} (one class per row), ({padded}) (a padded list) or, as "
            f"a bool or floating-point tensor, {(*rows, n)} (multi-hot), but it has shape "
            f"{tuple(target.shape)}."
        )
    complete = readable(target) and _check_values(given, ignore_index, n, "class indices")
    listed = given
    if given.shape[1] > 1:
        listed = _each_once(_negative(given, ignore_index).sort(-1).values)
        complete = False  # removing repeated labels leaves gaps
    elif not complete:
        listed = _negative(given, ignore_index)
    if c.mask is not None and readable(target, c.mask):
        _check_available((listed >= 0) & ~c.mask.gather(-1, listed.clamp(min=0)))
    label_weight = None
    if weight is not None:
        label_weight = weight.to(work_dtype(c.x.dtype))[listed if complete else listed.clamp(min=0)]
    return Labels(listed, None, None, label_weight, None, complete)


def _raise_ambiguous(target: Tensor) -> NoReturn:
    raise ValueError(
        f"`target` contains integers and has the shape of the logits, {tuple(target.shape)}, which is "
        "ambiguous; pass `target.bool()` for multi-hot labels, or add one more column of `ignore_index` to a "
        "list of labels."
    )


def _negative(target: Tensor, ignore_index: int) -> Tensor:
    """Replace `ignore_index` with -1 if it is not negative."""
    return target if ignore_index < 0 else torch.where(target == ignore_index, -1, target)


def _each_once(ordered: Tensor) -> Tensor:
    """Replace repetitions in the sorted last dimension with -1, so that every label counts once."""
    repeated = ordered[..., 1:] == ordered[..., :-1]
    return torch.cat([ordered[..., :1], ordered[..., 1:].masked_fill(repeated, -1)], dim=-1)


def _check_multi_hot(c: Canonical, target: Tensor) -> None:
    expected = c.x.shape if c.offsets is not None else torch.Size([*c.row_shape, c.x.shape[-1]])
    if target.shape != expected:
        raise ValueError(
            f"A multi-hot `target` ({target.dtype}) must have the shape of the logits, {tuple(expected)}, "
            f"but it has shape {tuple(target.shape)}."
        )
    if target.is_floating_point():
        _check_not_negative(target, "target")


def _hot_labels(
    target: Tensor, weight: Tensor | None, work: torch.dtype, offsets: Tensor | None = None
) -> Labels:
    """Return the labels of a multi-hot target with the shape of the logits, with weights of dtype `work`."""
    observed = target if target.dtype == torch.bool else target != 0
    label_weight = None if target.dtype == torch.bool and weight is None else target.to(work)
    if weight is not None and label_weight is not None:
        label_weight = label_weight * weight.to(work)
    return Labels(None, None, observed, label_weight, offsets, complete=False)


def _positions(c: Canonical, target: Tensor, weight: Tensor | None, ignore_index: int) -> Labels:
    if target.dim() != 1:
        raise ValueError(
            f"With `offsets`, `target` must be a 1-d tensor of int64 indices into the values, or a multi-hot "
            f"tensor of shape {tuple(c.x.shape)}, but it has shape {tuple(target.shape)}."
        )
    assert c.offsets is not None
    if readable(target):
        _check_values(target, ignore_index, c.x.shape[0], "positions")
    ordered = _negative(target, ignore_index).sort().values
    # Padding is assigned to the first row. An index that is too large raises an error if the target can be
    # read. Otherwise, it makes the last row NaN.
    starts = torch.searchsorted(ordered, c.offsets[1:-1])
    starts = torch.cat([starts.new_zeros(1), starts, starts.new_full((1,), target.shape[0])])
    if c.offsets.shape[0] == 1:
        ordered, starts = ordered[:0], starts[:1]
    listed = _each_once(ordered)
    if c.mask is not None and readable(target, c.mask):
        _check_available(~c.mask[listed[listed >= 0]])
    return Labels(listed, starts, None, None, c.offsets, complete=False)


def check_weight(c: Canonical, weight: Tensor) -> None:
    """Raise an error unless `weight` has one nonnegative weight per class."""
    if c.offsets is not None:
        raise ValueError(
            "`weight` must be None for ragged rows, which have no classes; to weight labels, pass a float "
            "target."
        )
    check_tensor(weight, "weight", c.x, "the logits")
    n = c.x.shape[-1]
    if not weight.is_floating_point() or weight.shape != (n,):
        raise ValueError(
            f"`weight` must be a floating-point tensor of shape ({n},), with one weight per class, but it "
            f"has dtype {weight.dtype} and shape {tuple(weight.shape)}."
        )
    _check_not_negative(weight, "weight")


def _check_not_negative(weights: Tensor, name: str) -> None:
    # Compare only the smallest entry, which is NaN if any entry is NaN. Comparing all entries would allocate
    # a tensor of the same size.
    if readable(weights) and weights.numel() and not bool(weights.detach().amin() >= 0):
        raise ValueError(
            f"`{name}` must contain nonnegative weights, but it contains a negative number or NaN."
        )


def _check_values(target: Tensor, ignore_index: int, n: int, what: str) -> bool:
    """Raise an error if a value is out of range. Return whether every value is a label."""
    if target.numel() == 0:
        return True
    low, high = target.aminmax()
    smallest, largest = int(low), int(high)
    if smallest >= 0 and largest < n:
        return not smallest <= ignore_index <= largest
    wrong = target[((target < 0) | (target >= n)) & (target != ignore_index)]
    if wrong.numel():
        raise ValueError(
            f"`target` must contain {what} from 0 to {n - 1}, or `ignore_index` = {ignore_index}, but it "
            f"contains {int(wrong[0])}."
        )
    return False


def _check_available(masked: Tensor) -> None:
    if bool(masked.any()):
        raise ValueError(
            "`target` has a label where `mask` is False, but a label must be a class that may be chosen."
        )


def pad_labels(labels: Iterable[Iterable[int] | Tensor], *, ignore_index: int = -100) -> Tensor:
    """Convert lists of class indices to a padded tensor that losses and metrics accept as `target`.

        >>> torchlml.pad_labels([[1, 2], [3], []])
        tensor([[   1,    2],
                [   3, -100],
                [-100, -100]])

    Args:
        labels: the class indices of each sample, as lists or 1-d tensors of integers, which may be empty.
        ignore_index: the padding value. Pass the same value to the loss or metric.

    Returns:
        An int64 tensor of shape (number of samples, length of the longest list), with at least one column. It
        is on the CPU for lists, and on the device of the tensors otherwise.
    """
    rows = [_label_row(row, i) for i, row in enumerate(labels)]
    if not rows:
        return torch.full((0, 1), ignore_index)
    padded = pad_sequence(rows, batch_first=True, padding_value=ignore_index)
    # A target without columns would not be recognized as lists of labels.
    return padded if padded.shape[1] else padded.new_full((len(rows), 1), ignore_index)


def _label_row(row: Any, number: int) -> Tensor:
    name = f"`labels[{number}]`"
    if not isinstance(row, Tensor):
        if isinstance(row, str) or not isinstance(row, Iterable):
            raise TypeError(f"{name} must be a list or a tensor of class indices, but it is {row!r}.")
        row = list(row)
        try:
            row = torch.tensor(row) if row else torch.empty(0, dtype=torch.int64)
        except (TypeError, ValueError, RuntimeError):
            raise TypeError(f"{name} must contain class indices, but it is {row!r}.") from None
    if row.dim() != 1:
        raise ValueError(f"{name} must be a flat list of class indices, but its shape is {tuple(row.shape)}.")
    if row.is_floating_point() or row.is_complex() or row.dtype == torch.bool:
        raise TypeError(f"{name} must contain integers, but its dtype is {row.dtype}.")
    if row.numel() and int(row.min()) < 0:
        raise ValueError(f"{name} must contain nonnegative class indices, but it contains {int(row.min())}.")
    indices: Tensor = row.long()
    return indices
