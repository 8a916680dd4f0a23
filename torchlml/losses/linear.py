"""The LML loss of a linear layer's outputs, without ever holding the logits of the batch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from torchlml._core.arguments import Bound, Canonical, check_bound, check_k
from torchlml._core.rows import work_dtype
from torchlml.losses.linear_chunks import LinearRows, rows_within
from torchlml.losses.lml import lml_loss
from torchlml.losses.module import TopKLoss
from torchlml.losses.reduction import Reduction, check_reduction
from torchlml.losses.targets import read_labels

MEMORY = 64 * 2**20


# The loop over chunks is nothing to compile: its matrix products and its loss are single operators already.
@torch.compiler.disable
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
    bound: Bound = "exactly",
    memory: int = MEMORY,
) -> Tensor:
    """`lml_loss` of a linear layer's outputs, a few rows at a time, for very many labels.

        >>> hidden, layer = torch.randn(32, 16), nn.Linear(16, 1000)
        >>> target = torch.randint(1000, (32,))
        >>> loss = torchlml.linear_lml_loss(hidden, layer.weight, target, k=5, linear_bias=layer.bias)
        >>> loss.backward()

    Args:
        input: (..., d), what the linear layer is given.
        linear_weight: (n, d), its weight: one row per label.
        target: as for `lml_loss`: class indices (...), padded lists of them (..., L), or a bool or floating
            multi-hot (..., n).
        k: how many labels are predicted, as in `torchlml.lml`: a number or one per row; differentiable.
        linear_bias: (n,), the layer's bias.
        weight: one weight per class, for the labels of that class.
        ignore_index: the class index that means "no label".
        reduction: "mean" over the rows that have a label (0 if there are none), "sum" or "none".
        bound: "exactly", or "at_most" or "at_least" k labels are predicted, as in `torchlml.lml`.
        memory: how many bytes the logits and their gradient may take at a time. A single row may exceed it;
            the gradients of the input and of the weight are not counted.

    Returns:
        What `lml_loss(F.linear(input, linear_weight, linear_bias), target, k, ...)` gives.

    For "mean" and "sum" the gradients are computed with the loss, while the logits are there; for "none", and
    in a second backward pass over the same graph, the logits are computed again. Derivatives of derivatives,
    `torch.func` and forward mode take the plain way, with all logits at once.
    """
    check_reduction(reduction)
    check_bound(bound)
    _check_linear(input, linear_weight, linear_bias, memory)
    shape, n = input.shape[:-1], linear_weight.shape[0]
    k = check_k(k, shape, None if bound == "at_most" else n, input.device)
    device = input.device.type
    autocast = device != "meta" and torch.is_autocast_enabled(device) and input.dtype != torch.float64
    dtype = torch.get_autocast_dtype(device) if autocast else input.dtype
    target, labelled = _read_target(target, input, n, weight, ignore_index)

    def loss(logits: Tensor, k: Tensor, rows: slice) -> Tensor:
        settings: dict[str, Any] = {"weight": weight, "ignore_index": ignore_index, "bound": bound}
        with torch.autocast(device, enabled=False):
            return lml_loss(logits, target[rows], k, reduction="none", **settings)

    seed = None
    if reduction != "none":
        seed = torch.ones(shape.numel(), dtype=work_dtype(dtype), device=input.device)
    if seed is not None and reduction == "mean":
        seed = seed / labelled.sum().clamp(min=1)
    rows = LinearRows(loss, seed, rows_within(memory, n, dtype), dtype)
    result = rows(input.reshape(shape.numel(), input.shape[-1]), linear_weight, linear_bias, k)
    result = result.reshape(shape) if reduction == "none" else result
    return result if autocast else result.to(dtype)


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
        weight, ignore_index, reduction, bound, memory: as for `linear_lml_loss`.

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
        bound: Bound = "exactly",
        memory: int = MEMORY,
    ) -> None:
        super().__init__(k, weight, ignore_index=ignore_index, reduction=reduction, bound=bound)
        check_bound(bound)
        _check_memory(memory)
        self.memory = memory
        self.linear = nn.Linear(in_features, num_classes, bias, device, dtype)

    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        """One loss; the arguments are those of `linear_lml_loss`."""
        return linear_lml_loss(
            input,
            self.linear.weight,
            target,
            self.k,
            linear_bias=self.linear.bias,
            weight=self.weight,
            ignore_index=self.ignore_index,
            reduction=self.reduction,
            bound=self.bound,
            memory=self.memory,
        )

    def extra_repr(self) -> str:
        settings = super().extra_repr()
        return settings if self.memory == MEMORY else f"{settings}, memory={self.memory}"


def _check_linear(input: Tensor, weight: Tensor, bias: Tensor | None, memory: int) -> None:
    """Refuse what is no linear layer, or no input for it."""
    for name, t in (("input", input), ("linear_weight", weight), ("linear_bias", bias)):
        if t is None and name == "linear_bias":
            continue
        if not isinstance(t, Tensor) or not t.is_floating_point():
            came = t.dtype if isinstance(t, Tensor) else type(t).__name__
            raise TypeError(f"`{name}` must be a floating tensor, but it is {came}.")
        autocast = t.device.type != "meta" and torch.is_autocast_enabled(t.device.type)
        if t.dtype != input.dtype and not autocast:
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
    _check_memory(memory)


def _check_memory(memory: int) -> None:
    if isinstance(memory, bool) or not isinstance(memory, int) or memory <= 0:
        raise ValueError(f"`memory` must be a positive number of bytes, an int, but it is {memory!r}.")


def _read_target(
    target: Tensor, input: Tensor, n: int, weight: Tensor | None, ignore_index: int
) -> tuple[Tensor, Tensor]:
    """The target with all rows in its first dimension, and which of them have a label."""
    shape = input.shape[:-1]
    # Stands for the logits, of which only the shape, the dtype and the device are looked at here.
    x, k = input.new_zeros(()).expand(shape.numel(), n), torch.tensor(0.0)
    rows = Canonical(x, k, None, None, torch.Size([*shape, n]))
    multi_hot = isinstance(target, Tensor) and target.dtype != torch.int64
    if multi_hot and target.shape == (*shape, n) and n > 0:
        # The reader would copy a multi-hot, which is as large as all logits: the chunks read it.
        target = target.reshape(shape.numel(), n)
        none = Canonical(x[:0], k, None, None, torch.Size([0, n]))
        read_labels(none, target[:0], weight, ignore_index)
        return target, target.any(-1) if target.dtype == torch.bool else target.amax(-1) != 0
    labels = read_labels(rows, target, weight, ignore_index)
    return target.reshape(shape.numel(), *target.shape[len(shape) :]), labels.has_label
