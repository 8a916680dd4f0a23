"""All operators of the library pass PyTorch's checks for schemas, shapes and compilation."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import Tensor

import torchlml  # noqa: F401  defines the operators

OFFSETS = torch.tensor([0, 3, 3, 8, 12])
Arguments = tuple[Tensor | float | bool | None, ...]


@functools.cache
def _inputs(ragged: bool, dtype: torch.dtype) -> dict[str, Arguments]:
    torch.manual_seed(0)  # no fixture seeds the first call, which happens during collection
    offsets = OFFSETS if ragged else None
    x = torch.randn(12, dtype=dtype) if ragged else torch.randn(4, 6, dtype=dtype)
    mask = torch.arange(x.numel()).view(x.shape) % 5 > 0
    k = torch.tensor([1.0, 0.5, 2.5, 2.0], dtype=torch.float64)
    y, nu = torch.ops.torchlml.forward(x, k, mask, offsets)
    log_y, _ = torch.ops.torchlml.log_forward(x, k, mask, offsets)
    g = torch.randn_like(x)
    row_grad = torch.randn(4, dtype=nu.dtype)
    labels = (
        (torch.tensor([1, 4, -1, 9]), torch.tensor([0, 1, 1, 3, 4]))
        if ragged
        else (torch.arange(4)[:, None], None)
    )
    weight = torch.rand(labels[0].shape, dtype=nu.dtype)
    return {
        "solve": (x, k, mask, offsets),
        "solve_bracketing": (x, k, mask, offsets, None, None, 100),
        "forward": (x, k, mask, offsets),
        "log_forward": (x, k, mask, offsets),
        "backward": (g, x, y, nu, mask, offsets),
        "log_backward": (g, x, log_y, nu, mask, offsets),
        "dual_backward": (row_grad, x, nu, mask, offsets),
        "loss_forward": (x, k, mask, offsets, *labels, weight),
        "loss_backward": (row_grad, x, k, nu, mask, offsets, *labels, weight),
        "loss_backward_in_place": (row_grad, x.clone(), k, nu, mask, offsets, *labels, weight),
        "bounded_forward": (x, k, mask, offsets, True),
        "bounded_backward": (g, x, y, nu, mask, offsets),
        "value": (x, k, mask, offsets),
        **_capped(x, g, k, mask, offsets),
        **({} if ragged else _choices(x, k, y)),
    }


def _capped(x: Tensor, g: Tensor, k: Tensor, mask: Tensor, offsets: Tensor | None) -> dict[str, Arguments]:
    found: dict[str, Arguments] = {}
    upper = torch.rand_like(x, dtype=torch.float64) + 1
    for name in ("constrained_softmax", "constrained_sparsemax"):
        forward = getattr(torch.ops.torchlml, f"{name}_forward")
        nu = forward(x, k, upper, mask, offsets)[1]
        found[f"{name}_forward"] = (x, k, upper, mask, offsets)
        found[f"{name}_backward"] = (g, x, k, upper, nu, mask, offsets, True)
        if offsets is None:  # the operator takes dense float64 rows that have a solution within their bounds
            found[f"{name}_dual"] = (x.double(), k, upper, None)
    return found


def _choices(x: Tensor, k: Tensor, y: Tensor) -> dict[str, Arguments]:
    wide = y.to(torch.promote_types(y.dtype, torch.float32))
    keys = torch.randint(256, x.shape, dtype=torch.uint8)
    whole, mu = k.ceil(), torch.randn(x.shape[1], dtype=torch.float64)
    p = wide * (whole / wide.sum(-1)).unsqueeze(-1).clamp(max=1)
    return {
        "topk_mask": (x, whole, x > -1),
        "systematic_sample": (p.to(wide.dtype), whole, keys, torch.rand(4, dtype=k.dtype)),
        "balanced_forward": (x.to(wide.dtype), mu, k),
        "balanced_product": (wide, wide.sum(-1), mu),
    }


CASES = [(name, ragged) for ragged in (False, True) for name in _inputs(ragged, torch.float32)]


@pytest.mark.parametrize(("name", "ragged"), CASES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_operators_pass_opcheck(name: str, ragged: bool, dtype: torch.dtype) -> None:
    torch.library.opcheck(getattr(torch.ops.torchlml, name).default, _inputs(ragged, dtype)[name])


def test_every_operator_is_checked() -> None:
    everything = [name for name in torch._C._dispatch_get_all_op_names() if name.startswith("torchlml::")]
    assert {name.removeprefix("torchlml::").split(".")[0] for name in everything} == {
        name for name, _ in CASES
    }
