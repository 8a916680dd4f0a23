"""The LML loss of a linear layer's outputs, without ever holding the logits of the batch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from torchlml._arguments import (
    Bound,
    Canonical,
    autocasts,
    canonical,
    check_bound,
    check_k,
    check_tensor,
)
from torchlml._cpu import loader as native
from torchlml._distributed import is_spread
from torchlml.losses.base import Reduction, TopKLoss, check_labelled_k, check_reduction, row_divisor
from torchlml.losses.linear_chunks import linear_loss, not_compiled
from torchlml.losses.lml import reduced_loss
from torchlml.losses.targets import LabelReduction, check_weight, read_labels

MEMORY = 64 * 2**20


# The loop over chunks is nothing to compile: its matrix products and its loss are single operators already.
@not_compiled
def linear_lml_loss(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    k: float | Tensor,
    *,
    linear_bias: Tensor | None = None,
    weight: Tensor | None = None,
    ignore_index: int = -100,
    reduction: Reduction = "mean",
    label_reduction: LabelReduction = "sum",
    bound: Bound = "exactly",
    memory: int = MEMORY,
    group: Any = None,
) -> Tensor:
    """`lml_loss` of a linear layer's outputs, a few rows at a time, for very many labels.

        >>> hidden, layer = torch.randn(32, 16), nn.Linear(16, 1000)
        >>> target = torch.randint(1000, (32,))
        >>> loss = torchlml.linear_lml_loss(hidden, layer.weight, target, k=5, linear_bias=layer.bias)
        >>> loss.backward()

    Args:
        input: (..., d), what the linear layer is given.
        linear_weight: (n, d), its weight: one row per label.
        target, k, weight, ignore_index, reduction, label_reduction, bound: as for `lml_loss`.
        linear_bias: (n,), the layer's bias.
        memory: how many bytes the logits and their gradient may take at a time. A single row may exceed it;
            the gradients of the input and of the weight are not counted.
        group: the processes among which the labels are split, as for `lml_loss`: `linear_weight`,
            `linear_bias` and `weight` are then those of this process's labels, and the input is the same
            everywhere. A `linear_weight` that is a DTensor, `Shard`ed over its labels, brings its group. An
            input that is one too may be split over rows by another dimension of the mesh; the loss is then
            that of all rows, a DTensor.

    Returns:
        What `lml_loss(F.linear(input, linear_weight, linear_bias), target, k, ...)` gives.

    For "mean" and "sum" the gradients are computed with the loss, while the logits are there; for "none", in
    float16 (where the scale of the loss must come first) and in a second backward pass over the same graph,
    the logits are computed again. Derivatives of derivatives, `torch.func` and forward mode take the plain
    way, with all logits at once.
    """
    if is_spread(linear_weight, group) or is_spread(input, group):
        from torchlml._distributed.linear import spread_linear_lml_loss

        tensors = (input, linear_weight, target, k, linear_bias, weight)
        settings = (ignore_index, reduction, label_reduction, bound, memory)
        return spread_linear_lml_loss(*tensors, *settings, group)
    check_reduction(reduction, label_reduction)
    check_bound(bound)
    check_linear(input, linear_weight, linear_bias, memory)
    shape, n = input.shape[:-1], linear_weight.shape[0]
    k = check_k(k, shape, None if bound == "at_most" else n, input.device, "input")
    target, labelled = target_rows(target, input, n, weight, ignore_index)

    check_labelled_k(k, lambda: labelled, bound)
    in_place = bound == "exactly" and input.device.type == "cpu" and native.loaded()

    def loss(logits: Tensor, k: Tensor, rows: slice, overwrite: bool) -> Tensor:
        c = canonical(logits, k, -1, None, None, any_k=bound == "at_most", name="logits")
        labels = read_labels(c, target[rows], weight, ignore_index)
        divisor = row_divisor(labels, label_reduction)
        return reduced_loss(c, labels, divisor, "none", bound, overwrite=overwrite and in_place)

    # The chunks have no gradients for what is not the linear layer's or k.
    weighted = any(t is not None and t.requires_grad for t in (weight, target))
    arguments = (input, linear_weight, linear_bias, k, reduction, memory)
    return linear_loss(loss, labelled, *arguments, in_place=in_place, whole=weighted)


class LinearLMLLoss(TopKLoss):
    """The last linear layer and `linear_lml_loss` in one, as `nn.LinearCrossEntropyLoss` is.

        >>> loss = torchlml.LinearLMLLoss(16, 1000, k=5)
        >>> loss(torch.randn(32, 16), torch.randint(1000, (32,))).backward()
        >>> loss.linear(torch.randn(1, 16)).topk(5).indices.shape  # a prediction
        torch.Size([1, 5])

    Args:
        in_features: the size of an input.
        num_classes: how many labels there are.
        k: how many labels are predicted.
        bias: whether the linear layer has one.
        device, dtype: of the linear layer.
        weight, ignore_index, reduction, label_reduction, bound, memory: as for `linear_lml_loss`.

    The layer is `self.linear`. To use one that you have, call `linear_lml_loss` with its weight.
    """

    def __init__(
        self,
        in_features: int,
        num_classes: int,
        k: float | Tensor,
        *,
        bias: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        weight: Tensor | None = None,
        ignore_index: int = -100,
        reduction: Reduction = "mean",
        label_reduction: LabelReduction = "sum",
        bound: Bound = "exactly",
        memory: int = MEMORY,
    ) -> None:
        check_bound(bound)
        check_memory(memory)
        settings = {"label_reduction": label_reduction, "bound": bound, "memory": memory}
        super().__init__(k, weight, ignore_index, reduction, **settings)
        self.linear = nn.Linear(in_features, num_classes, bias, device, dtype)

    def forward(self, input: Tensor, target: Tensor) -> Tensor:  # type: ignore[override]
        """The loss of a batch; the arguments are those of `linear_lml_loss`."""
        settings: dict[str, Any] = {name: getattr(self, name) for name in self._names}
        layer: dict[str, Any] = {"linear_bias": self.linear.bias, "weight": self.weight}
        return linear_lml_loss(input, self.linear.weight, target, self.k, **layer, **settings)


def check_linear(input: Tensor, weight: Tensor, bias: Tensor | None, memory: int) -> None:
    """Refuse what is no linear layer, or no input for it."""
    given = {"input": input, "linear_weight": weight} | ({} if bias is None else {"linear_bias": bias})
    for name, t in given.items():
        check_tensor(t, name)
        if not t.is_floating_point():
            raise TypeError(f"`{name}` must be a floating tensor, but it is {t.dtype}.")
        if t.dtype != input.dtype and not autocasts(t.device.type):
            raise TypeError(f"`{name}` must have the dtype of `input`, {input.dtype}, but it is {t.dtype}.")
        if t.device != input.device:
            raise ValueError(f"`{name}` must be on the device of `input`, {input.device}, not {t.device}.")
    if input.dim() == 0 or weight.dim() != 2 or input.shape[-1] != weight.shape[1]:
        raise ValueError(
            "`input` must have shape (..., d) and `linear_weight` (n, d), but they have shapes "
            f"{tuple(input.shape)} and {tuple(weight.shape)}."
        )
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(
            f"`linear_bias` must have shape {tuple(weight.shape[:1])}, one number per label, "
            f"but it has shape {tuple(bias.shape)}."
        )
    check_memory(memory)


def check_memory(memory: int) -> None:
    """A number of bytes, or an error."""
    if isinstance(memory, bool) or not isinstance(memory, int) or memory <= 0:
        raise ValueError(f"`memory` must be a positive number of bytes, an int, but it is {memory!r}.")


def target_rows(
    target: Tensor, input: Tensor, n: int, weight: Tensor | None, ignore_index: int
) -> tuple[Tensor, Tensor]:
    """The target with all rows in its first dimension, and which of them have a label."""
    shape = input.shape[:-1]
    c = stand_in(input, n)
    multi_hot = isinstance(target, Tensor) and (target.dtype == torch.bool or target.is_floating_point())
    if multi_hot and target.shape == (*shape, n) and n > 0:
        # The reader would copy a multi-hot, which is as large as all logits: only the chunks are read whole.
        check_tensor(target, "target", input, "`input`")
        if weight is not None:
            check_weight(c, weight)
        target = target.reshape(shape.numel(), n)
        return target, target.any(-1) if target.dtype == torch.bool else target.detach().amax(-1) != 0
    labels = read_labels(c, target, weight, ignore_index)
    return target.reshape(shape.numel(), *target.shape[len(shape) :]), labels.has_label


def stand_in(input: Tensor, n: int) -> Canonical:
    """Stands for the logits where only their shape, dtype and device are looked at; takes no memory."""
    shape = input.shape[:-1]
    logits = input.detach().new_zeros(()).expand(shape.numel(), n)
    return Canonical(logits, logits.new_zeros(()), None, None, torch.Size([*shape, n]))
