"""A linear layer and a loss of its logits together, a few rows at a time: a batch's logits never exist.

A chunk holds whole rows, so every loss that gives one number per row can be used as it is, and no logit is
computed twice. Three matrix products per chunk, as many as the plain way has: the logits, the gradient of the
input and that of the weight, which is added up over the chunks.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.nn.functional import linear

from torchlml._arguments import autocasts, readable
from torchlml._autograd.rule import differentiate_again, is_plain, needs_no_graph, wants_graph
from torchlml._rows import work_dtype

RowLoss = Callable[[Tensor, Tensor, slice, bool], Tensor]
"""(logits of some rows, their k, which rows of the batch they are, whether the backward pass may put the
gradient in the place of these logits) -> one loss for each of these rows."""


_Function = TypeVar("_Function", bound=Callable[..., Any])


def not_compiled(function: _Function) -> _Function:
    """Leave a function as it is when the compiler comes to it, keeping its type for those who call it."""
    # `torch.compiler.disable` imports the whole compiler now, this one when the function is called.
    disable: Any = torch._disable_dynamo  # type: ignore[attr-defined]
    return disable(function)


class LinearRows(NamedTuple):
    """The work to do: a loss for every row of `linear(input, weight, bias)`, `chunk` rows at a time.

    `seed` is what each row counts in the sum that comes back; None stands for the losses of the rows.
    """

    loss: RowLoss
    seed: Tensor | None
    chunk: int
    linear_dtype: torch.dtype  # of the logits, which autocast may narrow
    # What makes the input's gradient from this process's part of it.
    complete: Callable[[Tensor], Tensor] | None = None

    def __call__(self, input: Tensor, weight: Tensor, bias: Tensor | None, k: Tensor) -> Tensor:
        """The losses (R,) or their sum, by the plain way under the transforms that chunks cannot serve."""
        if is_plain() and needs_no_graph(*(t for t in (input, weight, bias, k) if t is not None)):
            return _losses(self, input, weight, bias, k)
        if is_plain() or self.complete is not None:
            return _Chunked.apply(self, input, weight, bias, k)
        return self.plain(input, weight, bias, k)

    def plain(self, input: Tensor, weight: Tensor, bias: Tensor | None, k: Tensor) -> Tensor:
        """The same from all logits at once, in ordinary differentiable operations."""
        dtype = self.linear_dtype
        logits = linear(input.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype))
        losses = self.loss(logits.to(work_dtype(logits.dtype)), k, slice(0, input.shape[0]), False)
        return losses if self.seed is None else (losses * self.seed).sum()


def linear_loss(
    loss: RowLoss,
    labelled: Tensor,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    k: Tensor,
    reduction: str,
    memory: int,
    *,
    longest: int | None = None,
    complete: Callable[[Tensor], Tensor] | None = None,
    in_place: bool = False,
    whole: bool = False,
) -> Tensor:
    """The reduced loss of `linear(input, weight, bias)`, in chunks of rows that fit into a memory budget.

    Args:
        loss: gives one loss per row of some logits, in their dtype.
        labelled: (R,), which rows a mean is over.
        input: (..., d).
        weight, bias: (n, d) and (n,).
        k: 0-d or (R,), handed to `loss` with the logits.
        reduction: "mean", "sum" or "none".
        memory: how many bytes the logits and their gradient may take.
        longest: how many labels decide about the chunks, where it is not n.
        complete: makes the input's gradient from this process's part of it.
        in_place: `loss` puts the gradient in the place of the logits where it may.
        whole: take the plain way in any case.

    Returns:
        A scalar, or one number per row, in the dtype of the logits (float32 under autocast).
    """
    device = input.device.type
    autocast = autocasts(device) and input.dtype != torch.float64
    dtype = torch.get_autocast_dtype(device) if autocast else input.dtype
    shape = input.shape[:-1]
    seed = None
    if reduction != "none":
        seed = torch.ones(shape.numel(), dtype=work_dtype(dtype), device=input.device)
        seed = seed / labelled.sum().clamp(min=1) if reduction == "mean" else seed
    chunk = rows_within(memory, weight.shape[0] if longest is None else longest, dtype, in_place)
    # The casts are done here, in the same way for the chunks and for the plain way.
    with torch.autocast(device, enabled=False) if autocast else contextlib.nullcontext():
        rows = LinearRows(loss, seed, chunk, dtype, complete)
        flat = input.reshape(shape.numel(), input.shape[-1])
        result = rows.plain(flat, weight, bias, k) if whole else rows(flat, weight, bias, k)
    result = result.reshape(shape) if reduction == "none" else result
    return result if autocast else result.to(dtype)


def rows_within(memory: int, labels: int, dtype: torch.dtype, in_place: bool) -> int:
    """How many rows of logits, with their gradient, fit into a budget of bytes and 5%, one at least.

    With `in_place` the gradient takes the place of the logits, by way of one row for each thread.
    """
    work = work_dtype(dtype)
    copies = 1 if in_place else 2
    per_label = copies * work.itemsize + (dtype.itemsize if dtype != work else 0)
    rows = int(1.05 * memory) // max(1, per_label * labels)
    return max(1, rows - min(torch.get_num_threads(), rows // 2) if in_place else rows)


# Of the input, the weight, the bias and k; None where nobody asks.
_Gradients = tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]


class _Chunked(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, work: LinearRows, input: Tensor, weight: Tensor, bias: Tensor | None, k: Tensor
    ) -> Tensor:
        ctx.work, ctx.early = work, None
        ctx.save_for_backward(input, weight, bias, k)
        wanted = ctx.needs_input_grad[1:]
        # In float16 a gradient must meet its factor first: scaling a loss keeps it from rounding to 0.
        narrow = torch.float16 in (work.linear_dtype, input.dtype, weight.dtype)
        if work.seed is None or narrow:
            return _losses(work, input, weight, bias, k)
        # What the sum's gradient needs is at hand while the logits are: only its factor is still unknown.
        loss, ctx.early = _with_gradients(work, input, weight, bias, k, work.seed, wanted)
        return loss

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        work, (input, weight, bias, k) = ctx.work, ctx.saved_tensors
        if wants_graph() or _is_batched(grad):
            if work.complete is not None:
                raise NotImplementedError("With `group`, a derivative of the derivative is not supported.")
            inputs = [t for t in (input, weight, bias, k) if t is not None]

            def plain(*given: Tensor) -> Tensor:
                rest = iter(given)
                return work.plain(*(None if t is None else next(rest) for t in (input, weight, bias, k)))

            found = iter(differentiate_again(plain, grad, *inputs))
            return (None, *(None if t is None else next(found) for t in (input, weight, bias, k)))
        wanted = ctx.needs_input_grad[1:]
        if ctx.early is None:
            seed = grad if work.seed is None else work.seed * grad
            _, gradients = _with_gradients(work, input, weight, bias, k, seed, wanted)
            return (None, *gradients)
        # They are given away, scaled in place: a copy of the weight's gradient is what there is no room for.
        # A second backward pass over the same graph computes them again.
        gradients, ctx.early = ctx.early, None
        if not readable(grad) or float(grad) != 1:
            for gradient in gradients:
                if gradient is not None:
                    gradient.mul_(grad)
        return (None, *gradients)


def _losses(work: LinearRows, input: Tensor, weight: Tensor, bias: Tensor | None, k: Tensor) -> Tensor:
    """Without gradients."""
    logits = _Logits(work, input, weight, bias)
    parts = []
    for rows in _chunks(input.shape[0], work.chunk):
        parts.append(work.loss(logits[rows], k if k.dim() == 0 else k[rows], rows, False))
    losses = torch.cat(parts) if parts else input.new_zeros(0, dtype=work_dtype(input.dtype))
    return losses if work.seed is None else (losses * work.seed).sum()


def _with_gradients(
    work: LinearRows,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    k: Tensor,
    seed: Tensor,
    wanted: tuple[bool, bool, bool, bool],
) -> tuple[Tensor, _Gradients]:
    """The sum of `seed` times the losses, and its gradients."""
    logits = _Logits(work, input, weight, bias)
    # A sum over many chunks is kept in the work dtype, or bfloat16 would lose the later ones.
    work_type = work_dtype(input.dtype)
    d_input = torch.empty_like(input) if wanted[0] else None
    d_weight = torch.zeros_like(weight, dtype=work_type) if wanted[1] else None
    d_bias = None if bias is None or not wanted[2] else torch.zeros_like(bias, dtype=work_type)
    d_k = torch.zeros_like(k) if wanted[3] else None
    total = input.new_zeros((), dtype=work_type)
    for rows in _chunks(input.shape[0], work.chunk):
        z = logits[rows].requires_grad_()
        k_rows = (k if k.dim() == 0 else k[rows]).detach().requires_grad_(wanted[3])
        with torch.enable_grad():
            losses = work.loss(z, k_rows, rows, True)
        total += (losses.detach() * seed[rows]).sum()
        inputs = [z, k_rows] if wanted[3] else [z]
        dz, *dk = torch.autograd.grad(losses, inputs, seed[rows].to(losses.dtype))
        del z, losses, inputs
        if d_k is not None and k.dim() == 0:
            d_k += dk[0]
        elif d_k is not None:
            d_k[rows] = dk[0]
        if d_input is not None:
            d_input[rows] = (dz.to(logits.weight.dtype) @ logits.weight).to(input.dtype)
        if d_weight is not None:
            d_weight.addmm_(dz.mT, input[rows].detach().to(work_type))
        if d_bias is not None:
            d_bias += dz.sum(0)
        del dz
    if d_input is not None and work.complete is not None:
        d_input = work.complete(d_input)
    return total, (d_input, _as(d_weight, weight), _as(d_bias, bias), d_k)


def _is_batched(grad: Tensor) -> bool:
    """Are these the gradients of several backward passes at once, as `is_grads_batched` makes them?"""
    return torch._C._functorch.is_legacy_batchedtensor(grad)


def _chunks(rows: int, most: int) -> list[slice]:
    """As few as can be, of even size: a product with few rows takes nearly as long as one with many."""
    size = _even(rows, most)
    return [slice(i, min(i + size, rows)) for i in range(0, rows, size)]


def _even(rows: int, most: int) -> int:
    return -(-rows // max(1, -(-rows // most))) or 1


class _Logits:
    """The logits of one chunk after another, in the same memory: what is freed is not always reused."""

    def __init__(self, work: LinearRows, input: Tensor, weight: Tensor, bias: Tensor | None) -> None:
        # What autocast would do to the weight is done once, and not with every chunk.
        dtype = work.linear_dtype
        self.weight = weight.detach().to(dtype)
        self._bias = None if bias is None else bias.detach().to(dtype)
        self._input = input.detach().to(dtype)
        self._buffer = self._input.new_empty(_even(input.shape[0], work.chunk), weight.shape[0])

    def __getitem__(self, rows: slice) -> Tensor:
        h = self._input[rows]
        z = self._buffer[: h.shape[0]]
        if self._bias is None:
            torch.mm(h, self.weight.mT, out=z)
        else:
            torch.addmm(self._bias, h, self.weight.mT, out=z)
        return z.to(work_dtype(z.dtype)).detach()


def _as(gradient: Tensor | None, of: Tensor | None) -> Tensor | None:
    return gradient if gradient is None or of is None else gradient.to(of.dtype)
