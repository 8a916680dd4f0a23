"""A drop-in replacement for the `LML` class released with the LML paper (`from lml import LML`)."""

import operator
from typing import Any

import torch
from torch import Tensor, nn

from torchlml.projection import lml


class LML(nn.Module):
    """The LML layer with the constructor arguments of the class released with the LML paper.

        >>> from torchlml.compat import LML
        >>> LML(N=2)(torch.tensor([2.0, 1.0, 0.0, -1.0]))
        tensor([0.8176, 0.6225, 0.3775, 0.1824])

    Args:
        N: the number of entries to choose (k in the paper). An int, a NumPy integer or a 0-d integer tensor.
        eps, n_iter, branch, verbose: settings of the original solver, accepted for compatibility and ignored.
            The result is exact, and nothing is printed.

    `forward` takes logits of shape (n,) or (batch, n). If n <= N, every entry of the result is 1 (the
    original returned 1 - 1e-5) and the gradient is 0. `torch.jit.script` leaves the call in Python, so the
    scripted module runs but cannot be saved. To save a model, use `torch.jit.trace` or `torch.export`.
    """

    def __init__(
        self, N: int, eps: float = 1e-4, n_iter: int = 100, branch: int | None = None, verbose: int = 0
    ) -> None:
        super().__init__()
        self.N = _whole(N)
        self.eps = eps
        self.n_iter = n_iter
        self.branch = branch
        self.verbose = verbose

    def forward(self, x: Tensor) -> Tensor:
        return self._project(x)

    @torch.jit.ignore  # type: ignore[untyped-decorator]
    def _project(self, x: Tensor) -> Tensor:
        if x.dim() not in (1, 2):
            raise ValueError(f"`x` must have one or two dimensions, but it has {x.dim()}.")
        return lml(x, min(self.N, x.shape[-1]))

    def extra_repr(self) -> str:
        return f"N={self.N}"


def _whole(N: Any) -> int:
    try:
        number = operator.index(N)
    except TypeError:
        number = -1
    if number < 0 or isinstance(N, bool) or (isinstance(N, Tensor) and N.dtype == torch.bool):
        raise ValueError(f"`N` must be a nonnegative integer, but it is {N!r}.")
    return number
