"""`linear_lml_loss` where each process has the linear layer of its own labels."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from torchlml._arguments import Bound, Canonical, check_bound, check_k
from torchlml._distributed import dtensors, labels
from torchlml._distributed import loss as sharded_loss
from torchlml._distributed.agreement import same_everywhere, split_labels
from torchlml._distributed.group import Group, LabelGroup, label_group
from torchlml.losses.base import Reduction, check_labelled_k, check_reduction
from torchlml.losses.linear_chunks import linear_loss
from torchlml.losses.targets import LabelReduction


def spread_linear_lml_loss(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    k: float | Tensor,
    linear_bias: Tensor | None,
    weight: Tensor | None,
    ignore_index: int,
    reduction: Reduction,
    label_reduction: LabelReduction,
    bound: Bound,
    memory: int,
    group: Group | None,
) -> Tensor:
    """`linear_lml_loss` with a `group`, or a weight that is a DTensor; its arguments in the same order."""
    if dtensors.is_dtensor(linear_weight) or dtensors.is_dtensor(input):
        from torchlml.losses import linear_lml_loss

        dtensors.refuse_group(group)
        check_reduction(reduction, label_reduction)

        def on_parts(h: Tensor, w: Tensor, t: Tensor, k: Any, **more: Any) -> Tensor:
            settings: Any = {"label_reduction": label_reduction, "bound": bound, "memory": memory}
            return linear_lml_loss(h, w, t, k, ignore_index=ignore_index, **settings, **more)

        tensors = (input, linear_weight, target, k, linear_bias, weight)
        return dtensors.linear_loss(on_parts, *tensors, ignore_index, reduction)
    from torchlml.losses.linear import check_linear, stand_in

    members = label_group(group)

    def read() -> tuple[tuple[Canonical, Tensor], dict[str, Any]]:
        check_reduction(reduction, label_reduction)
        check_bound(bound)
        check_linear(input, linear_weight, linear_bias, memory)
        c = stand_in(input, linear_weight.shape[0])
        wide_k = check_k(k, input.shape[:-1], None, input.device, "input")
        same = same_everywhere("linear_lml_loss", c.row_shape, input, k, bound)
        same |= {"reduction": reduction, "memory": memory, "in_features": input.shape[-1]}
        # Its parts are added up over all processes, if they are made.
        same |= {"gradient of the input": torch.is_grad_enabled() and input.requires_grad}
        same |= {"label_reduction": label_reduction}
        same |= labels.check_target(c, target, weight, ignore_index)
        return (c, wide_k), {"labels": linear_weight.shape[0], "masked": False, "same": same}

    (c, k), split = split_labels(members, input, k, bound, read)
    n = linear_weight.shape[0]
    rows = labels.target_rows(c, target, ignore_index, split)
    # k is the same on all processes, so all of them take part in the round, or none.
    check_labelled_k(k, lambda: _labelled(rows, members), bound)

    def loss(logits: Tensor, k: Tensor, some: slice, overwrite: bool) -> Tensor:
        own = labels.own_labels(rows[some], weight, split, n)
        losses, number = sharded_loss.row_losses(logits.contiguous(), k, None, own, split)
        return losses / number.clamp(min=1) if label_reduction == "mean" else losses

    return linear_loss(
        loss,
        _labelled(rows, members) if reduction == "mean" else rows[:0],
        input,
        linear_weight,
        linear_bias,
        k,
        reduction,
        memory,
        longest=max(split.labels),
        complete=members.all_reduce,
    )


def _labelled(rows: Tensor, group: LabelGroup) -> Tensor:
    """Which rows have a label, on whatever process it lies: a round for a multi-hot."""
    if rows.dtype == torch.int64:
        return (rows >= 0).any(-1)
    return group.sum((rows != 0).any(-1).long()) > 0
