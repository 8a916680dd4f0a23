"""The functions of the projection and `lml_loss` with a `group` or with DTensors."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from torchlml._arguments import Bound, Canonical, canonical, check_bound
from torchlml._distributed import dtensors, labels, projection
from torchlml._distributed import loss as sharded_loss
from torchlml._distributed.agreement import same_everywhere, split_labels
from torchlml._distributed.group import Group, label_group
from torchlml._rows import work_dtype
from torchlml.losses.base import Reduction, check_labelled_k, check_reduction, row_divisor
from torchlml.losses.linear_chunks import not_compiled
from torchlml.losses.lml import reduced_loss
from torchlml.losses.targets import LabelReduction, read_labels


@not_compiled
def spread_projection(
    name: str,
    x: Tensor,
    k: float | Tensor,
    dim: int,
    mask: Tensor | None,
    offsets: Tensor | None,
    solver: Any,
    bound: Bound,
    group: Group | None,
) -> Tensor:
    """`lml`, `log_lml` or `lml_dual` by name."""

    def on_parts(x: Tensor, k: Any, mask: Tensor | None, group: Group | None) -> Tensor:
        if group is None:
            import torchlml

            _refuse(offsets, solver)
            return getattr(torchlml, name)(x, k, dim, mask=mask, bound=bound)
        return _project(name, x, k, dim, mask, offsets, solver, bound, group)

    if not dtensors.is_dtensor(x):
        return on_parts(x, k, mask, group)
    dtensors.refuse_group(group)
    return dtensors.project(on_parts, x, k, dim, mask, per_row=name == "lml_dual")


def _project(
    name: str,
    x: Tensor,
    k: float | Tensor,
    dim: int,
    mask: Tensor | None,
    offsets: Tensor | None,
    solver: Any,
    bound: Bound,
    group: Group,
) -> Tensor:
    members = label_group(group)

    def read() -> tuple[Canonical, dict[str, Any]]:
        _refuse(offsets, solver)
        check_bound(bound)
        c = canonical(x, k, dim, mask, None, any_k=True)
        same = same_everywhere(name, c.row_shape, x, k, bound)
        return c, {"labels": c.x.shape[-1], "masked": mask is not None, "same": same}

    c, split = split_labels(members, x, k, bound, read)
    result: Tensor = getattr(projection, name)(c.x, c.k, c.mask, split)
    return c.restore_rows(result) if name == "lml_dual" else c.restore(result, dim)


@not_compiled
def spread_lml_loss(
    logits: Tensor,
    target: Tensor,
    k: float | Tensor,
    weight: Tensor | None,
    ignore_index: int,
    reduction: Reduction,
    label_reduction: LabelReduction,
    mask: Tensor | None,
    offsets: Tensor | None,
    bound: Bound,
    group: Group | None,
) -> Tensor:
    """`lml_loss`, its arguments in the same order."""
    if dtensors.is_dtensor(logits):
        check_reduction(reduction, label_reduction)
        dtensors.refuse_group(group)

        def on_parts(x: Tensor, t: Tensor, k: Any, m: Tensor | None, w: Tensor | None, g: Any) -> Any:
            return _row_losses(x, t, k, w, ignore_index, label_reduction, m, offsets, bound, g, reduction)

        return dtensors.loss(on_parts, logits, target, k, mask, weight, reduction)
    assert group is not None
    losses, number = _row_losses(
        logits, target, k, weight, ignore_index, label_reduction, mask, offsets, bound, group, reduction
    )
    if reduction == "mean":
        losses = losses.sum() / (number > 0).sum().clamp(min=1)
    elif reduction == "sum":
        losses = losses.sum()
    half = logits.dtype in (torch.bfloat16, torch.float16)
    return losses if half and torch.is_autocast_enabled(logits.device.type) else losses.to(logits.dtype)


def _row_losses(
    logits: Tensor,
    target: Tensor,
    k: float | Tensor,
    weight: Tensor | None,
    ignore_index: int,
    label_reduction: LabelReduction,
    mask: Tensor | None,
    offsets: Tensor | None,
    bound: Bound,
    group: Group | None,
    reduction: str,
) -> tuple[Tensor, Tensor]:
    """The loss of each row in the work dtype and how many labels it has, in the shape of the rows.

    Without a group, this process has all labels.
    """
    if group is None:
        _refuse(offsets)
        check_bound(bound)
        c = canonical(logits, k, -1, mask, None, any_k=bound == "at_most", name="logits")
        c = c._replace(x=c.x.to(work_dtype(c.x.dtype)))
        found = read_labels(c, target, weight, ignore_index)
        check_labelled_k(c.k, lambda: found.has_label, bound)
        losses = reduced_loss(c, found, row_divisor(found, label_reduction), "none", bound)
        return losses, found.per_row.reshape(c.row_shape)
    members = label_group(group)

    def read() -> tuple[Canonical, dict[str, Any]]:
        _refuse(offsets)
        check_reduction(reduction, label_reduction)
        check_bound(bound)
        c = canonical(logits, k, -1, mask, None, any_k=True, name="logits")
        same = same_everywhere("lml_loss", c.row_shape, logits, k, bound)
        same |= {"reduction": reduction, "label_reduction": label_reduction}
        same |= labels.check_target(c, target, weight, ignore_index)
        return c, {"labels": c.x.shape[-1], "masked": mask is not None, "same": same}

    c, split = split_labels(members, logits, k, bound, read)
    rows = labels.target_rows(c, target, ignore_index, split)
    own = labels.own_labels(rows, weight, split, c.x.shape[-1])
    losses, number = sharded_loss.row_losses(c.x, c.k, c.mask, own, split)
    # k and the number of labels are the same on all processes, and so is the outcome.
    check_labelled_k(c.k, lambda: number.reshape(-1) > 0, bound)
    if label_reduction == "mean":
        losses = losses / number.clamp(min=1)
    return losses.reshape(c.row_shape), number.reshape(c.row_shape)


def _refuse(offsets: Tensor | None, solver: Any = "newton") -> None:
    if offsets is not None:
        raise ValueError("`offsets` is not accepted where rows are spread over processes: give dense rows.")
    if solver != "newton":
        raise ValueError(
            f'`solver` must be "newton" where rows are spread over processes, but it is {solver!r}.'
        )
