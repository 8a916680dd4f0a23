"""The `nn.Module` that all losses share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

from torch import Tensor, nn

from torchlml._arguments import check_limit, check_tensor
from torchlml._reductions import Reduction, check_reduction

# Settings that `repr` shows only if they differ from these.
_USUAL = {"ignore_index": -100, "bound": "exactly", "label_reduction": "sum"}


class TopKLoss(nn.Module):
    """A loss as a module, which stores all arguments of `function` except the tensors of a batch.

    Args:
        k: number of labels to predict.
        weight: one weight per class, a buffer, so that it follows `.to()`.
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
