"""A fast path for the most common call of `lml`, with minimal overhead before the kernel.

It covers eager calls with a float32 or float64 matrix on the CPU, a plain number k, and no other arguments.
At 256 x 100, general argument handling and the general autograd Function cost as much as the backward pass of
the projection itself.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from torchlml._arguments import cached_scalar, is_eager
from torchlml._autograd import implicit, operators
from torchlml._autograd.rule import differentiate_again, wants_graph


def fast_lml(x: Any, k: Any, dim: Any) -> Tensor | None:
    """Compute lml(x, k, dim), or return None if the fast path does not apply.

    Type checks are exact, because subclasses of tensors and numbers may override anything.
    """
    if not (
        is_eager()
        and type(x) is Tensor
        and (type(k) is int or type(k) is float)
        and (type(dim) is int and dim == -1)
        and (x.dtype is torch.float32 or x.dtype is torch.float64)
        and x.is_cpu
        and x.layout is torch.strided
        and not x.is_nested
        and x.dim() == 2
        and 0 <= k <= x.shape[1]
        and x.is_contiguous()
        and forward_ad._current_level < 0
    ):
        return None
    number = cached_scalar(k, torch.float64)
    if x.requires_grad and torch.is_grad_enabled():
        return _apply(x, number)
    y: Tensor = operators.forward(x, number, None, None)[0]
    return y


class _Apply(torch.autograd.Function):
    """The autograd rule of `rule.lml`, for x only."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, k: Tensor) -> Tensor:
        y: Tensor
        y, nu = operators.forward(x, k, None, None)
        ctx.save_for_backward(x, k, y, nu)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, None]:
        x, k, y, nu = ctx.saved_tensors
        if wants_graph():
            dx = differentiate_again(lambda x: implicit.lml(x, k, None, None), grad, x)[0]
        else:
            dx = operators.backward(grad.contiguous(), x, y, nu, None, None)[0]
        return dx, None


# `Function.apply` first checks for transforms of torch.func, which are not active here.
_apply = super(torch.autograd.Function, _Apply).apply
