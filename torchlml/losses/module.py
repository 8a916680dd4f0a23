"""The `nn.Module` that all losses share: it remembers the arguments of its function."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

from torch import Tensor, nn

from torchlml._core.arguments import check_limit, check_tensor
from torchlml.losses.reduction import check_reduction

# Settings that are shown only where they are not these.
_USUAL = {"ignore_index": -100, "bound": "exactly", "label_reduction": "sum"}


class TopKLoss(nn.Module):
    """A loss as a module: `function` with all but its tensors remembered.

    Args:
        k: how many are predicted.
        weight: one weight per class. It is a buffer, so that it follows `.to()`.
        settings: the other arguments of `function`, by name. Each becomes an attribute.
    """

    function: ClassVar[Callable[..., Tensor]]
    weight: Tensor | None

    def __init__(self, k: float | Tensor, weight: Tensor | None, **settings: Any) -> None:
        super().__init__()
        check_reduction(settings["reduction"], settings.get("label_reduction", "sum"))
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
