"""The truncated entropy of a linear layer's outputs, without ever holding the logits of the batch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from torchlml._arguments import check_whole_k
from torchlml._distributed import is_spread
from torchlml.losses.base import Reduction, TopKLoss, check_reduction
from torchlml.losses.linear import MEMORY, check_linear, check_memory, target_rows
from torchlml.losses.linear_chunks import linear_loss, not_compiled
from torchlml.losses.targets import LabelReduction
from torchlml.losses.truncated_entropy import truncated_entropy_loss


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
    memory: int = MEMORY,
) -> Tensor:
    """`truncated_entropy_loss` of a linear layer's outputs, a few rows at a time, for very many labels.

        >>> hidden, layer = torch.randn(32, 16), nn.Linear(16, 1000, bias=False)
        >>> target = torch.randint(1000, (32,))
        >>> torchlml.linear_truncated_entropy_loss(hidden, layer.weight, target, k=5).backward()

    Args:
        k: how many guesses are allowed, as for `truncated_entropy_loss`.

    The other arguments, and the derivatives, are those of `linear_lml_loss`; labels on several processes are
    not supported. Temporaries take up to twice as much as `memory` again.

    Returns:
        What `truncated_entropy_loss(F.linear(input, linear_weight, linear_bias), target, k, ...)` gives.
    """
    check_reduction(reduction, label_reduction)
    check_linear(input, linear_weight, linear_bias, memory)
    if is_spread(input, None) or is_spread(linear_weight, None):
        raise TypeError(
            "`input` and `linear_weight` must be plain tensors here, but a DTensor is among them."
        )
    n = linear_weight.shape[0]
    k = check_whole_k(k, n)
    target, labelled = target_rows(target, input, n, weight, ignore_index)
    settings: Any = {"ignore_index": ignore_index, "label_reduction": label_reduction}

    def loss(logits: Tensor, _: Tensor, rows: slice, overwrite: bool) -> Tensor:
        return truncated_entropy_loss(logits, target[rows], k, weight=weight, reduction="none", **settings)

    weighted = any(t is not None and t.requires_grad for t in (weight, target))
    no_k = input.detach().new_zeros((), dtype=torch.float64)
    arguments = (input, linear_weight, linear_bias, no_k, reduction, memory)
    return linear_loss(loss, labelled, *arguments, whole=weighted)


class LinearTruncatedEntropyLoss(TopKLoss):
    """The last linear layer, `self.linear`, and `linear_truncated_entropy_loss` in one.

        >>> loss = torchlml.LinearTruncatedEntropyLoss(16, 1000, k=5)
        >>> loss(torch.randn(32, 16), torch.randint(1000, (32,))).backward()

    The arguments are those of `LinearLMLLoss`, without `bound`.
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
        memory: int = MEMORY,
    ) -> None:
        check_memory(memory)
        settings = {"label_reduction": label_reduction, "memory": memory}
        super().__init__(check_whole_k(k), weight, ignore_index, reduction, **settings)
        self.linear = nn.Linear(in_features, num_classes, bias, device, dtype)

    def forward(self, input: Tensor, target: Tensor) -> Tensor:  # type: ignore[override]
        """The loss of a batch; the arguments are those of `linear_truncated_entropy_loss`."""
        settings: dict[str, Any] = {name: getattr(self, name) for name in self._names}
        layer: dict[str, Any] = {"linear_bias": self.linear.bias, "weight": self.weight}
        k: Any = self.k
        return linear_truncated_entropy_loss(input, self.linear.weight, target, k, **layer, **settings)
