"""Triton implementations of the operators: allocate the results, choose the layout, and launch the kernels.

The arguments are those of `_torch/careful.py`, with x in float32, bfloat16 or float16. Nothing here
synchronizes the device, so everything can be captured in a CUDA graph.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from torchlml._rows import empty_gradients, empty_nu
from torchlml._triton import Launch, Plan, plan
from torchlml._triton import layer as triton_layer
from torchlml._triton import loss as triton_loss
from torchlml._triton import split as triton_split
from torchlml._triton.loss import Labels

Pair = tuple[Tensor, Tensor]


def solve(x: Tensor, k: Tensor, mask: Tensor | None, offsets: Tensor | None) -> Tensor:
    """Compute nu for every row."""
    return _solve(x, k, mask, offsets, None, log=False)


def forward(x: Tensor, k: Tensor, mask: Tensor | None, offsets: Tensor | None) -> Pair:
    """Return (y, nu)."""
    y = torch.empty_like(x)
    return y, _solve(x, k, mask, offsets, y, log=False)


def log_forward(x: Tensor, k: Tensor, mask: Tensor | None, offsets: Tensor | None) -> Pair:
    """Return (log y, nu)."""
    log_y = torch.empty_like(x)
    return log_y, _solve(x, k, mask, offsets, log_y, log=True)


def backward(grad: Tensor, x: Tensor, y: Tensor, nu: Tensor, *rows: Tensor | None) -> Pair:
    """Return (dx, dk) for `forward`."""
    return _differentiate(triton_layer.OF_Y, grad, x, y, nu, *rows)


def log_backward(grad: Tensor, x: Tensor, log_y: Tensor, nu: Tensor, *rows: Tensor | None) -> Pair:
    """Return (dx, dk) for `log_forward`."""
    return _differentiate(triton_layer.OF_LOG_Y, grad, x, log_y, nu, *rows)


def dual_backward(grad: Tensor, x: Tensor, nu: Tensor, *rows: Tensor | None) -> Pair:
    """Return (dx, dk) for nu itself."""
    return _differentiate(triton_layer.OF_NU, grad, x, None, nu, *rows)


def loss_forward(x: Tensor, k: Tensor, mask: Tensor | None, offsets: Tensor | None, *labels: Any) -> Pair:
    """Return (losses, nu). `losses` (2, R) contains each row's loss and whether the row has a label."""
    loss, nu = empty_nu(x, offsets), empty_nu(x, offsets)
    if nu.shape[1] > 0:
        triton_loss.launch_forward(_launch(x, nu, mask, offsets), on_device_of(k, x), Labels(*labels), loss)
    return loss, nu


def loss_backward(
    grad: Tensor, x: Tensor, k: Tensor, nu: Tensor, mask: Tensor | None, offsets: Tensor | None, *labels: Any
) -> Pair:
    """Return (dx, dk) for `loss_forward`."""
    dx, dk = empty_gradients(x, nu)
    if nu.shape[1] > 0:
        to = _launch(x, nu, mask, offsets)
        triton_loss.launch_backward(to, grad, on_device_of(k, x), Labels(*labels), dx, dk)
    return dx, dk


def layout(x: Tensor, rows: int, offsets: Tensor | None) -> Plan:
    """Return the launch settings for `x`, which contains `rows` rows, on its device."""
    length = x.shape[-1] if offsets is None else -(-x.shape[-1] // max(rows, 1))
    return plan(rows, length, offsets is not None, *_device(x.device))


def on_device_of(k: Tensor, x: Tensor) -> Tensor:
    """Return k on the device of `x`. A 0-d k on the CPU becomes a fill value: a copy would synchronize."""
    return k if k.device == x.device else torch.full((), k.item(), dtype=torch.float64, device=x.device)


def _launch(x: Tensor, nu: Tensor, mask: Tensor | None, offsets: Tensor | None) -> Launch:
    return Launch(layout(x, nu.shape[1], offsets), x, mask, offsets, nu)


def _solve(
    x: Tensor, k: Tensor, mask: Tensor | None, offsets: Tensor | None, y: Tensor | None, *, log: bool
) -> Tensor:
    """Return nu. Unless `y` is None, also fill `y` with y or log y."""
    nu = empty_nu(x, offsets)
    if nu.shape[1] > 0:
        to = _launch(x, nu, mask, offsets)
        launch = (triton_split if to.plan.splits > 1 else triton_layer).launch_forward
        launch(to, on_device_of(k, x), y, log)
    return nu


def _differentiate(
    of: int, grad: Tensor, x: Tensor, y: Tensor | None, nu: Tensor, *rows: Tensor | None
) -> Pair:
    dx, dk = empty_gradients(x, nu)
    if nu.shape[1] > 0:
        to = _launch(x, nu, *rows)
        launch = (triton_split if to.plan.splits > 1 else triton_layer).launch_backward
        launch(to, grad, y, dx, dk, of)
    return dx, dk


@functools.cache
def _device(device: torch.device) -> tuple[int, int]:
    """Return the number of multiprocessors and the warp size. For a CPU, the numbers are arbitrary."""
    if device.type == "cpu":
        return 1, 32
    properties = torch.cuda.get_device_properties(device)
    return properties.multi_processor_count, properties.warp_size
