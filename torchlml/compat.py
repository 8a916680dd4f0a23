"""A drop-in for the class of the paper's own release, for code that says `from lml import LML`."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from torchlml.projection import lml


class LML(nn.Module):
    """The layer with the arguments of the paper's release.

        >>> from torchlml.compat import LML
        >>> y = LML(N=5)(x)

    Args:
        N: how many to choose, the paper's k.
        eps, n_iter, branch, verbose: settings of the original's search. They are accepted, so that no call
            has to change, and not needed: the answer is exact, and nothing is printed.

    `forward` takes logits of shape (n,) or (batch, n). Where n <= N every entry is 1 (the original gave
    1 - 1e-5) and the gradient is 0.
    """

    def __init__(
        self, N: int, eps: float = 1e-4, n_iter: int = 100, branch: int | None = None, verbose: int = 0
    ) -> None:
        super().__init__()
        if isinstance(N, bool) or not isinstance(N, int) or N < 0:
            raise ValueError(f"`N` must be a whole number from 0 on, but it is {N!r}.")
        self.N = N
        self.eps = eps
        self.n_iter = n_iter
        self.branch = branch
        self.verbose = verbose

    def forward(self, x: Tensor) -> Tensor:
        if x.dim() not in (1, 2):
            raise ValueError(f"`x` must have one or two dimensions, but it has {x.dim()}.")
        # With a mask, even one that hides nothing, lml takes N > n and returns the closest point, all ones.
        everything = torch.ones((), dtype=torch.bool, device=x.device) if x.shape[-1] < self.N else None
        return lml(x, self.N, mask=everything)

    def extra_repr(self) -> str:
        return f"N={self.N}"
