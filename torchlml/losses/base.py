"""The base class of all loss modules."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from torchlml._arguments import check_limit, check_tensor
from torchlml._autograd.loss import Reduction, check_reduction

# Default values of some settings. `repr` omits these settings if they have their default values.
_USUAL = {"ignore_index": -100, "bound": "exactly", "label_reduction": "sum", "group": None}


class TopKLoss(nn.Module):
    """Base class of the loss modules. It stores the arguments that are the same for every batch.

    Args:
        k: the number of labels to predict.
        weight: one weight per class, stored as a buffer, so that `.to()` moves it.
        ignore_index, reduction, **settings: the other arguments of the loss function. Each becomes an
            attribute.
    """

    k: Any
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

    @property
    def settings(self) -> dict[str, Any]:
        """The stored arguments of the loss function, except `k`, by name."""
        return {"weight": self.weight, **{name: getattr(self, name) for name in self._names}}

    def extra_repr(self) -> str:
        shown = [f"k={self.k}"]
        if self.weight is not None:
            shown.append(f"weight=<{self.weight.numel()} classes>")
        for name in self._names:
            value = getattr(self, name)
            if _USUAL.get(name) != value:
                shown.append(f"{name}={value!r}")
        return ", ".join(shown)
