"""The operators of `ops.py` by Triton: allocate the results, lay out the rows, launch.

The arguments are those of `reference.py`, with x of float32, bfloat16 or float16. Nothing here waits for the
device, so that all of it can be captured in a CUDA graph.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from torchlml._kernels.cuda import triton_backward, triton_forward, triton_loss, triton_split
from torchlml._kernels.cuda.plan import Plan, plan
from torchlml._kernels.cuda.triton_labels import Labels

Pair = tuple[Tensor, Tensor]


def solve(x: Tensor, k: Tensor, mask: Tensor | None, offsets: Tensor | None) -> Tensor:
    """nu of every row."""
    nu = _new_nu(x, offsets)
    _solve(x, k, mask, offsets, None, nu, log=False)
    return nu


def forward(x: Tensor, k: Tensor, mask: Tensor | None, offsets: Tensor | None) -> Pair:
    """(y, nu)."""
    y, nu = torch.empty_like(x), _new_nu(x, offsets)
    _solve(x, k, mask, offsets, y, nu, log=False)
    return y, nu


def log_forward(x: Tensor, k: Tensor, mask: Tensor | None, offsets: Tensor | None) -> Pair:
    """(log y, nu)."""
    y, nu = torch.empty_like(x), _new_nu(x, offsets)
    _solve(x, k, mask, offsets, y, nu, log=True)
    return y, nu


def backward(
    grad: Tensor, x: Tensor, y: Tensor, nu: Tensor, mask: Tensor | None, offsets: Tensor | None
) -> Pair:
    """(dx, dk) of `forward`."""
    return _differentiate(grad, x, y, nu, mask, offsets, triton_backward.OF_Y)


def log_backward(
    grad: Tensor, x: Tensor, log_y: Tensor, nu: Tensor, mask: Tensor | None, offsets: Tensor | None
) -> Pair:
    """(dx, dk) of `log_forward`."""
    return _differentiate(grad, x, log_y, nu, mask, offsets, triton_backward.OF_LOG_Y)


def dual_backward(grad: Tensor, x: Tensor, nu: Tensor, mask: Tensor | None, offsets: Tensor | None) -> Pair:
    """(dx, dk) of nu itself."""
    return _differentiate(grad, x, None, nu, mask, offsets, triton_backward.OF_NU)


def loss_forward(
    x: Tensor,
    k: Tensor,
    mask: Tensor | None,
    offsets: Tensor | None,
    labels: Tensor,
    starts: Tensor | None,
    weight: Tensor | None,
) -> Pair:
    """(the losses and where there are labels, nu)."""
    loss, nu = _new_nu(x, offsets), _new_nu(x, offsets)
    if nu.shape[1] > 0:
        how = layout(x, nu.shape[1], offsets)
        given = Labels(labels, starts, weight)
        triton_loss.launch_forward(how, x, beside(k, x), mask, offsets, given, loss, nu)
    return loss, nu


def loss_backward(
    grad: Tensor,
    x: Tensor,
    k: Tensor,
    nu: Tensor,
    mask: Tensor | None,
    offsets: Tensor | None,
    labels: Tensor,
    starts: Tensor | None,
    weight: Tensor | None,
) -> Pair:
    """(dx, dk) of `loss_forward`."""
    dx, dk = torch.empty_like(x), nu.new_empty(nu.shape[1:], dtype=torch.float64)
    if nu.shape[1] > 0:
        how = layout(x, nu.shape[1], offsets)
        given = Labels(labels, starts, weight)
        triton_loss.launch_backward(how, grad, x, beside(k, x), nu, mask, offsets, given, dx, dk)
    return dx, dk


def layout(x: Tensor, rows: int, offsets: Tensor | None) -> Plan:
    """The plan for these rows on the device of `x`."""
    length = x.shape[-1] if offsets is None else -(-x.shape[-1] // max(rows, 1))
    return plan(rows, length, offsets is not None, *_device(x.device))


def beside(k: Tensor, x: Tensor) -> Tensor:
    """k on the device of `x`. A number comes on the CPU, from where a copy would wait for the device."""
    return k if k.device == x.device else torch.full((), k.item(), dtype=torch.float64, device=x.device)


def _solve(
    x: Tensor,
    k: Tensor,
    mask: Tensor | None,
    offsets: Tensor | None,
    y: Tensor | None,
    nu: Tensor,
    log: bool,
) -> None:
    if nu.shape[1] == 0:
        return
    how = layout(x, nu.shape[1], offsets)
    launch = triton_split.launch_forward if how.splits > 1 else triton_forward.launch
    launch(how, x, beside(k, x), mask, offsets, y, nu, log)


def _differentiate(
    grad: Tensor,
    x: Tensor,
    y: Tensor | None,
    nu: Tensor,
    mask: Tensor | None,
    offsets: Tensor | None,
    of: int,
) -> Pair:
    dx, dk = torch.empty_like(x), nu.new_empty(nu.shape[1:], dtype=torch.float64)
    if nu.shape[1] == 0:
        return dx, dk
    how = layout(x, nu.shape[1], offsets)
    launch = triton_split.launch_backward if how.splits > 1 else triton_backward.launch
    launch(how, grad, x, y, nu, mask, offsets, dx, dk, of)
    return dx, dk


def _new_nu(x: Tensor, offsets: Tensor | None) -> Tensor:
    rows = x.shape[0] if offsets is None else offsets.shape[0] - 1
    return x.new_empty((2, rows), dtype=torch.float32)


@functools.cache
def _device(device: torch.device) -> tuple[int, int]:
    """(multiprocessors, lanes of a warp); on a CPU, where kernels are interpreted, any will do."""
    if device.type == "cpu":
        return 1, 32
    properties = torch.cuda.get_device_properties(device)
    return properties.multi_processor_count, properties.warp_size
