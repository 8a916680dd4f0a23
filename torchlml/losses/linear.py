"""Losses that include the last linear layer and compute its logits in chunks of rows."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from torchlml._arguments import Bound, Canonical, check_bound, check_integer_k, is_sharded
from torchlml._autograd import chunked_linear
from torchlml._autograd.chunked_linear import (
    ChunkedLoss,
    LinearLMLArguments,
    check_linear,
    check_memory_limit,
    logits_like,
    not_compiled,
)
from torchlml._autograd.loss import (
    LabelReduction,
    LossSettings,
    Reduction,
    check_reduction,
    label_divisor,
    reduce_losses,
)
from torchlml._targets import read_target_rows
from torchlml.losses.base import TopKLoss
from torchlml.losses.truncated_entropy import dense_entropy

MEMORY_LIMIT = 64 * 2**20


# Compilation cannot improve the loop over chunks: each matrix product and each loss is a single operator.
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
    memory_limit: int = MEMORY_LIMIT,
    group: Any = None,
) -> Tensor:
    """Compute `lml_loss` on the outputs of a linear layer in chunks of rows, for very large label spaces.

        >>> hidden, layer = torch.randn(32, 16), nn.Linear(16, 1000)
        >>> target = torch.randint(1000, (32,))
        >>> loss = torchlml.linear_lml_loss(hidden, layer.weight, target, k=5, linear_bias=layer.bias)
        >>> loss.backward()

    Args:
        input: the input of the linear layer, of shape (..., d).
        linear_weight: the weight of the linear layer, of shape (n, d), with one row per label.
        target, k, weight, ignore_index, reduction, label_reduction, bound: as for `lml_loss`.
        linear_bias: the bias of the linear layer, of shape (n,).
        memory_limit: the number of bytes that the logits and their gradient may occupy at once, plus up to
            5%. A chunk has at least one row, even if that row exceeds the limit. The gradients of `input` and
            `linear_weight` are not counted.
        group: the processes across which the labels are sharded, as for `lml_loss`. `linear_weight`,
            `linear_bias` and `weight` cover only the labels of this process, and `input` is the same on all
            processes. If `linear_weight` is a DTensor that is sharded over the labels, no group is needed. If
            `input` is also a DTensor, its rows may be sharded over another dimension of the mesh. The loss is
            then a DTensor, reduced over all rows.

    Returns:
        The result of `lml_loss(F.linear(input, linear_weight, linear_bias), target, k, ...)`.

    With the reductions "mean" and "sum", the gradients are computed together with the loss, while the logits
    are in memory. The backward pass recomputes the logits in three cases: with the reduction "none", in
    float16 (because of loss scaling), and if it runs twice on the same graph. All logits are computed at once
    for second derivatives, `torch.func` transforms, forward-mode differentiation, and gradients with respect
    to `weight` or a float `target`.
    """
    settings = LossSettings(ignore_index, reduction, label_reduction, bound)
    given = LinearLMLArguments(input, linear_weight, linear_bias, target, k, weight, settings, memory_limit)
    if is_sharded(linear_weight, group) or is_sharded(input):
        from torchlml._distributed import loss as sharded

        return sharded.linear_lml_loss(given, group)
    return chunked_linear.linear_lml_loss(given)


class LinearLMLLoss(TopKLoss):
    """The last linear layer and `linear_lml_loss` in one module, like `nn.LinearCrossEntropyLoss`.

        >>> loss = torchlml.LinearLMLLoss(16, 1000, k=5)
        >>> loss(torch.randn(32, 16), torch.randint(1000, (32,))).backward()
        >>> loss.linear(torch.randn(1, 16)).topk(5).indices.shape  # a prediction
        torch.Size([1, 5])

    Args:
        in_features: the number of input features.
        num_classes: the number of labels, or with a `group`, the number of labels on this process.
        k: the number of labels to predict.
        bias: whether the linear layer has a bias.
        device, dtype: the device and dtype of the linear layer.
        weight, ignore_index, reduction, label_reduction, bound, memory_limit, group: as for
            `linear_lml_loss`.

    The layer is `self.linear`. To use an existing layer, call `linear_lml_loss` with its weight.
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
        memory_limit: int = MEMORY_LIMIT,
        group: Any = None,
    ) -> None:
        check_bound(bound)
        check_memory_limit(memory_limit)
        settings: dict[str, Any] = {"bound": bound, "memory_limit": memory_limit, "group": group}
        settings["label_reduction"] = label_reduction
        super().__init__(k, weight, ignore_index, reduction, **settings)
        self.linear = nn.Linear(in_features, num_classes, bias, device, dtype)

    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        """Compute the loss for a batch. The arguments are those of `linear_lml_loss`."""
        layer = self.linear
        return linear_lml_loss(input, layer.weight, target, self.k, linear_bias=layer.bias, **self.settings)


@not_compiled
def linear_truncated_entropy_loss(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    k: int,
    *,
    linear_bias: Tensor | None = None,
    weight: Tensor | None = None,
    ignore_index: int = -100,
    reduction: Reduction = "mean",
    label_reduction: LabelReduction = "sum",
    memory_limit: int = MEMORY_LIMIT,
) -> Tensor:
    """Compute `truncated_entropy_loss` on the outputs of a linear layer in chunks of rows.

        >>> hidden, layer = torch.randn(32, 16), nn.Linear(16, 1000, bias=False)
        >>> target = torch.randint(1000, (32,))
        >>> torchlml.linear_truncated_entropy_loss(hidden, layer.weight, target, k=5).backward()

    Args:
        k: the number of allowed guesses, as for `truncated_entropy_loss`.
        input, linear_weight, target, linear_bias, weight, ignore_index, reduction, label_reduction: as for
            `linear_lml_loss`.
        memory_limit: as for `linear_lml_loss`. Temporary tensors take up to 2 * `memory_limit` additional
            bytes.

    Returns:
        The result of `truncated_entropy_loss(F.linear(input, linear_weight, linear_bias), target, k, ...)`.

    Gradients are computed as in `linear_lml_loss`. Labels that are sharded across processes are not
    supported.
    """
    check_reduction(reduction, label_reduction)
    check_linear(input, linear_weight, linear_bias, memory_limit)
    if is_sharded(input) or is_sharded(linear_weight):
        raise TypeError(
            "`input` and `linear_weight` must be plain tensors for linear_truncated_entropy_loss, but one of "
            "them is a DTensor."
        )
    n = linear_weight.shape[0]
    k = check_integer_k(k, n)
    rows = read_target_rows(logits_like(input, n), target, weight, ignore_index)

    def loss(logits: Tensor, _: Tensor, some: slice, overwrite: bool) -> Tensor:
        c, labels = Canonical(logits, logits, None, None, None), rows[some]
        divisor = label_divisor(labels, label_reduction)
        return reduce_losses(dense_entropy(c, labels, k), labels, divisor, "none", c)

    chunked = ChunkedLoss(loss, rows.has_label, reduction, memory_limit, at_once=rows.weights_need_gradient)
    no_k = input.detach().new_zeros((), dtype=torch.float64)  # a placeholder, because k has no gradient
    return chunked(input, linear_weight, linear_bias, no_k)


class LinearTruncatedEntropyLoss(TopKLoss):
    """The last linear layer (`self.linear`) and `linear_truncated_entropy_loss` in one module.

        >>> loss = torchlml.LinearTruncatedEntropyLoss(16, 1000, k=5)
        >>> loss(torch.randn(32, 16), torch.randint(1000, (32,))).backward()

    The arguments are those of `LinearLMLLoss`, except that `bound` and `group` are not supported.
    """

    def __init__(
        self,
        in_features: int,
        num_classes: int,
        k: int,
        *,
        bias: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        weight: Tensor | None = None,
        ignore_index: int = -100,
        reduction: Reduction = "mean",
        label_reduction: LabelReduction = "sum",
        memory_limit: int = MEMORY_LIMIT,
    ) -> None:
        check_memory_limit(memory_limit)
        settings = {"label_reduction": label_reduction, "memory_limit": memory_limit}
        super().__init__(check_integer_k(k), weight, ignore_index, reduction, **settings)
        self.linear = nn.Linear(in_features, num_classes, bias, device, dtype)

    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        """Compute the loss for a batch. The arguments are those of `linear_truncated_entropy_loss`."""
        weight, bias = self.linear.weight, self.linear.bias
        return linear_truncated_entropy_loss(input, weight, target, self.k, linear_bias=bias, **self.settings)
