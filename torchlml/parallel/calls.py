"""The public functions for rows whose labels are spread over processes: what each process passes, read and agreed on."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchlml._core import bounds
from torchlml._core.arguments import Canonical, canonical
from torchlml._core.rows import work_dtype
from torchlml.losses.linear_chunks import LinearRows, rows_within
from torchlml.parallel import loss as sharded_loss
from torchlml.parallel import projection
from torchlml.parallel.group import Group, LabelGroup, agree, label_group
from torchlml.parallel.loss import OwnLabels
from torchlml.parallel.projection import Split


@torch.compiler.disable
def project(
    function: Callable[[Tensor, Tensor, Tensor | None, Split], Tensor],
    x: Tensor,
    k: float | Tensor,
    dim: int,
    mask: Tensor | None,
    bound: str,
    group: Group,
) -> tuple[Tensor, Canonical]:
    """One of the functions of `projection`, and the form its arguments came in."""
    labels_of = label_group(group)

    def read() -> tuple[Canonical, dict[str, Any]]:
        bounds.check_bound(bound)
        c = canonical(x, k, dim, mask, None, any_k=True)
        same = {"function": function.__name__, "dim": dim % x.dim(), **_about(x, k, dim, bound)}
        return c, {"labels": x.shape[dim], "masked": mask is not None, "same": same}

    c, everyone = agree(labels_of, _device(x), read)
    split = _split(labels_of, everyone, c.k, bound)
    return function(c.x, c.k, c.mask, split), c


def lml(x: Tensor, k: Any, dim: int, mask: Tensor | None, bound: str, group: Group) -> Tensor:
    """y, as `torchlml.lml` gives it with a `group`."""
    y, c = project(projection.lml, x, k, dim, mask, bound, group)
    return c.restore(y, dim)


def log_lml(x: Tensor, k: Any, dim: int, mask: Tensor | None, bound: str, group: Group) -> Tensor:
    """log y, as `torchlml.log_lml` gives it with a `group`."""
    log_y, c = project(projection.log_lml, x, k, dim, mask, bound, group)
    return c.restore(log_y, dim)


def lml_dual(x: Tensor, k: Any, dim: int, mask: Tensor | None, bound: str, group: Group) -> Tensor:
    """nu, as `torchlml.lml_dual` gives it with a `group`."""
    nu, c = project(projection.lml_dual, x, k, dim, mask, bound, group)
    return c.restore_rows(nu)


class _Loss(NamedTuple):
    """The arguments of a loss on this process: the logits or the input in rows, k, the mask, the target in rows."""

    x: Tensor
    k: Tensor
    mask: Tensor | None
    target: Tensor
    shape: torch.Size


@torch.compiler.disable
def row_losses(
    logits: Tensor,
    target: Tensor,
    k: float | Tensor,
    weight: Tensor | None,
    ignore_index: int,
    mask: Tensor | None,
    bound: str,
    group: Group,
) -> tuple[Tensor, Tensor]:
    """The loss of each row in the work dtype and 1 where it has a label, both in the shape of the rows."""
    labels_of = label_group(group)

    def read() -> tuple[_Loss, dict[str, Any]]:
        bounds.check_bound(bound)
        c = canonical(logits, k, -1, mask, None, any_k=True)
        n, shape = logits.shape[-1], logits.shape[:-1]
        same = {"function": "lml_loss", **_about(logits, k, -1, bound), "ignore_index": ignore_index}
        rows, about = _read_target(target, shape, n, weight)
        told = {"labels": n, "masked": mask is not None, "same": {**same, **about}}
        return _Loss(c.x, c.k, c.mask, rows, shape), told

    given, everyone = agree(labels_of, _device(logits), read)
    split = _split(labels_of, everyone, given.k, bound)
    own = _own_labels(given.target, weight, ignore_index, split, logits.shape[-1])
    loss, labelled = sharded_loss.row_losses(given.x, given.k, given.mask, own, split)
    return loss.reshape(given.shape), labelled.reshape(given.shape)


@torch.compiler.disable
def linear_lml_loss(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    k: float | Tensor,
    linear_bias: Tensor | None,
    weight: Tensor | None,
    ignore_index: int,
    reduction: str,
    bound: str,
    memory: int,
    group: Group,
    check: Callable[[], None],
) -> Tensor:
    """The loss as `torchlml.linear_lml_loss` gives it with a `group`; `check` is what it asks of its arguments."""
    labels_of = label_group(group)
    device = input.device.type
    autocast = device != "meta" and torch.is_autocast_enabled(device) and input.dtype != torch.float64
    dtype = torch.get_autocast_dtype(device) if autocast else input.dtype

    def read() -> tuple[_Loss, dict[str, Any]]:
        check()
        n, shape = linear_weight.shape[0], input.shape[:-1]
        # Stands for the logits, of which only the shape and the device are looked at.
        stand_in = input.new_zeros(()).expand(*shape, 1)
        c = canonical(stand_in, k, -1, None, None, any_k=True)
        same = {"function": "linear_lml_loss", **_about(stand_in, k, -1, bound), "ignore_index": ignore_index}
        same |= {"reduction": reduction, "memory": memory, "in_features": input.shape[-1]}
        rows, about = _read_target(target, shape, n, weight)
        flat = input.reshape(shape.numel(), input.shape[-1])
        return _Loss(flat, c.k, None, rows, shape), {"labels": n, "masked": False, "same": {**same, **about}}

    given, everyone = agree(labels_of, _device(input), read)
    split = _split(labels_of, everyone, given.k, bound)
    n = linear_weight.shape[0]

    def loss(logits: Tensor, k: Tensor, rows: slice) -> Tensor:
        own = _own_labels(given.target[rows], weight, ignore_index, split, n)
        return sharded_loss.row_losses(logits.contiguous(), k, None, own, split)[0]

    seed = None
    if reduction != "none":
        seed = torch.ones(given.x.shape[0], dtype=work_dtype(dtype), device=input.device)
    if seed is not None and reduction == "mean":
        seed = seed / _labelled(given.target, ignore_index, labels_of).sum().clamp(min=1)
    chunk = rows_within(memory, max(other["labels"] for other in everyone), dtype)
    work = LinearRows(loss, seed, chunk, dtype, labels_of.all_reduce)
    result = work(given.x, linear_weight, linear_bias, given.k)
    result = result.reshape(given.shape) if reduction == "none" else result
    return result if autocast else result.to(dtype)


def _device(x: Any) -> torch.device:
    return x.device if isinstance(x, Tensor) else torch.device("cpu")


def _about(x: Tensor, k: float | Tensor, dim: int, bound: str) -> dict[str, Any]:
    """What must be the same on every process, in words that a message can show."""
    rows = list(x.shape)
    del rows[dim]
    device, graph = x.device.type, isinstance(k, Tensor) and k.requires_grad
    return {
        "dtype": str(x.dtype),
        "device": device,
        "rows": rows,
        "k": _fingerprint(k),
        "gradient of k": graph,
        "bound": bound,
    }


def _fingerprint(value: float | Tensor) -> str:
    if not isinstance(value, Tensor):
        return f"{float(value):g}"
    value = value.detach().cpu().contiguous()
    if value.dim() == 0:
        return f"{value.item():g}"
    check = zlib.crc32(bytes(value.flatten().view(torch.uint8).tolist()))
    return f"a {value.dtype} tensor of shape {tuple(value.shape)} with the checksum {check:08x}"


def _split(group: LabelGroup, everyone: list[dict[str, Any]], k: Tensor, bound: str) -> Split:
    labels = [int(other["labels"]) for other in everyone]
    total = sum(labels)
    limited = bound != "at_most" and not any(other["masked"] for other in everyone) and total > 0
    if limited and k.numel() and float(k.detach().amax()) > total:
        raise ValueError(
            f"`k` must be from 0 to n = {total}, the labels of all processes, but k is {float(k.amax()):g}."
        )
    return Split(group, labels, bound)


def _read_target(
    target: Tensor, shape: torch.Size, n: int, weight: Tensor | None
) -> tuple[Tensor, dict[str, Any]]:
    """The target in rows, and what the other processes must have the same."""
    if not isinstance(target, Tensor) or not (
        target.dtype in (torch.int64, torch.bool) or target.is_floating_point()
    ):
        came = target.dtype if isinstance(target, Tensor) else type(target).__name__
        raise TypeError(
            f"`target` must be int64 (class indices), bool or floating (multi-hot), but it is {came}."
        )
    if weight is not None and (not weight.is_floating_point() or weight.shape != (n,)):
        raise ValueError(
            f"`weight` must be a floating tensor of shape ({n},), one per label of this process, but it is "
            f"{weight.dtype} of shape {tuple(weight.shape)}."
        )
    if weight is not None and weight.requires_grad:
        raise ValueError("`weight` must not require a gradient where labels are spread over processes.")
    if target.dtype == torch.int64:
        if target.shape != shape and target.shape[:-1] != shape:
            raise ValueError(
                f"`target` must have shape {tuple(shape)} (one class per row) or {(*shape, 'L')} (a padded list), "
                f"but it has shape {tuple(target.shape)}."
            )
        return target.reshape(shape.numel(), -1), {"target": _fingerprint(target)}
    if target.shape != (*shape, n):
        raise ValueError(
            f"`target` is {target.dtype}, a multi-hot of this process's labels, and must have shape "
            f"{(*shape, n)}, but it has shape {tuple(target.shape)}."
        )
    if target.is_floating_point() and bool((target < 0).any()):
        raise ValueError("`target` has a negative entry, but a floating multi-hot holds label weights from 0 on.")
    return target.reshape(shape.numel(), n), {"kind of target": str(target.dtype)}


def _own_labels(
    target: Tensor, weight: Tensor | None, ignore_index: int, split: Split, n: int
) -> OwnLabels:
    """The labels that lie on this process, from global class indices or from a multi-hot of its own labels."""
    if target.dtype != torch.int64:
        row, place = target.nonzero().unbind(-1)
        counts = target[row, place].double()
    else:
        _check_range(target, ignore_index, split.total)
        ordered = torch.where(target == ignore_index, -1, target).sort(-1).values
        repeated = torch.nn.functional.pad(ordered[:, 1:] == ordered[:, :-1], (1, 0))
        own = (ordered >= split.start) & (ordered < split.start + n) & ~repeated
        row, column = own.nonzero().unbind(-1)
        place = ordered[row, column] - split.start
        counts = torch.ones_like(row, dtype=torch.float64)
    return OwnLabels(row, place, counts if weight is None else counts * weight.double()[place])


def _check_range(target: Tensor, ignore_index: int, n: int) -> None:
    wrong = target[((target < 0) | (target >= n)) & (target != ignore_index)]
    if wrong.numel():
        raise ValueError(
            f"`target` must hold class indices from 0 to {n - 1}, the labels of all processes, or `ignore_index` = "
            f"{ignore_index}, but {int(wrong[0])} is in it."
        )


def _labelled(target: Tensor, ignore_index: int, group: LabelGroup) -> Tensor:
    """Which rows have a label, on whatever process it lies: a round for a multi-hot."""
    if target.dtype == torch.int64:
        return (target != ignore_index).any(-1)
    return group.sum((target != 0).any(-1).long()) > 0
