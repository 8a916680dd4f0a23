"""A linear layer fused with a loss on its logits, computed for a few rows at a time.

The full logit matrix is never materialized. A chunk contains whole rows, so any loss that returns one number
per row can be used. Each chunk needs the same three matrix products as the unfused computation: for the
logits, for the gradient of the input, and for the gradient of the weight, which is accumulated over the
chunks. With the reduction "none" and in float16, the backward pass computes the logits a second time.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.nn.functional import linear

from torchlml._arguments import Canonical, autocasts, check_k, check_tensor, is_plain, readable
from torchlml._autograd.loss import (
    LossSettings,
    Reduction,
    check_labeled_k,
    label_divisor,
    lml_loss,
    mean_divisor,
)
from torchlml._autograd.rule import differentiate_again, needs_no_graph, wants_graph
from torchlml._cpu import loader
from torchlml._rows import work_dtype
from torchlml._targets import read_target_rows

RowLoss = Callable[[Tensor, Tensor, slice, bool], Tensor]
"""A function that computes one loss for each row of a chunk. Its arguments are the logits of these rows,
their k, the slice of the batch that they come from, and whether the backward pass may overwrite the logits
with their gradient."""


_Function = TypeVar("_Function", bound=Callable[..., Any])


def not_compiled(function: _Function) -> _Function:
    """Exclude a function from compilation, preserving its type."""
    # `torch.compiler.disable` imports the whole compiler immediately; `_disable_dynamo` imports it on the
    # first call.
    disable: Any = torch._disable_dynamo  # type: ignore[attr-defined]
    return disable(function)


@dataclass(frozen=True)
class ChunkedLoss:
    """A loss on the outputs of a linear layer, computed in chunks of rows that fit into a memory limit.

    Call it with (input, weight, bias, k). The result is a scalar, or one number per row, in the dtype of the
    logits (float32 under autocast).

    Args:
        loss: a function that returns one loss for each row of the logits it is given, in their dtype.
        has_label: bool (R,), True for the rows that a mean includes.
        reduction: "mean", "sum" or "none".
        memory_limit: the number of bytes that the logits and their gradient may occupy.
        labels: the number of labels per row from which the chunk size is computed; by default, the number of
            rows in the weight matrix.
        sum_over_group: a function that sums the gradient of the input over all processes, or None.
        in_place: whether `loss` overwrites the logits with their gradient if its last argument is True.
        at_once: whether all logits are computed at once instead of in chunks.
    """

    loss: RowLoss
    has_label: Tensor
    reduction: Reduction
    memory_limit: int
    labels: int | None = None
    sum_over_group: Callable[[Tensor], Tensor] | None = None
    in_place: bool = False
    at_once: bool = False

    def __call__(self, input: Tensor, weight: Tensor, bias: Tensor | None, k: Tensor) -> Tensor:
        device = input.device.type
        autocast = autocasts(device) and input.dtype != torch.float64
        dtype = torch.get_autocast_dtype(device) if autocast else input.dtype
        shape = input.shape[:-1]
        seed = None
        if self.reduction != "none":
            seed = torch.ones(shape.numel(), dtype=work_dtype(dtype), device=input.device)
            seed = seed / mean_divisor(self.has_label.sum()) if self.reduction == "mean" else seed
        labels = weight.shape[0] if self.labels is None else self.labels
        chunk = rows_within(self.memory_limit, labels, dtype, self.in_place)
        # Apply autocast's casts explicitly, so that chunked and unchunked computations round identically.
        with torch.autocast(device, enabled=False) if autocast else contextlib.nullcontext():
            work = _Work(self.loss, seed, chunk, dtype, self.sum_over_group)
            arguments = (input.reshape(shape.numel(), input.shape[-1]), weight, bias, k)
            result = work.at_once(*arguments) if self.at_once else work(*arguments)
        result = result.reshape(shape) if self.reduction == "none" else result
        return result if autocast else result.to(dtype)


class _Work(NamedTuple):
    """The chunked computation for a matrix of inputs.

    The result is the sum of the losses of all rows, each multiplied by its factor in `seed`. If `seed` is
    None, the result contains the loss of each row instead.
    """

    loss: RowLoss
    seed: Tensor | None
    chunk: int
    linear_dtype: torch.dtype  # the dtype of the logits, which autocast may narrow
    sum_over_group: Callable[[Tensor], Tensor] | None

    def __call__(self, input: Tensor, weight: Tensor, bias: Tensor | None, k: Tensor) -> Tensor:
        """Compute the losses (R,) or their weighted sum.

        The logits are computed in chunks. Without a group, however, they are computed all at once in
        `torch.func` transforms and in forward-mode differentiation.
        """
        if is_plain() and needs_no_graph(*(t for t in (input, weight, bias, k) if t is not None)):
            return _losses(self, input, weight, bias, k)
        if is_plain() or self.sum_over_group is not None:
            return _Chunked.apply(self, input, weight, bias, k)
        return self.at_once(input, weight, bias, k)

    def at_once(self, input: Tensor, weight: Tensor, bias: Tensor | None, k: Tensor) -> Tensor:
        """Compute the result from all logits at once, with differentiable operations."""
        dtype = self.linear_dtype
        logits = linear(input.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype))
        losses = self.loss(logits.to(work_dtype(logits.dtype)), k, slice(0, input.shape[0]), False)
        return losses if self.seed is None else (losses * self.seed).sum()


def check_linear(input: Tensor, weight: Tensor, bias: Tensor | None, memory_limit: int) -> None:
    """Check that weight and bias form a linear layer that accepts the input, and check `memory_limit`."""
    given = {"input": input, "linear_weight": weight} | ({} if bias is None else {"linear_bias": bias})
    for name, t in given.items():
        check_tensor(t, name)
        if not t.is_floating_point():
            raise TypeError(f"`{name}` must be a floating-point tensor, but its dtype is {t.dtype}.")
        if t.dtype != input.dtype and not autocasts(t.device.type):
            raise TypeError(
                f"`{name}` must have the dtype of `input`, {input.dtype}, but its dtype is {t.dtype}."
            )
        if t.device != input.device:
            raise ValueError(
                f"`{name}` must be on the device of `input`, {input.device}, but it is on {t.device}."
            )
    if input.dim() == 0 or weight.dim() != 2 or input.shape[-1] != weight.shape[1]:
        raise ValueError(
            "`input` must have shape (..., d) and `linear_weight` (n, d), but they have shapes "
            f"{tuple(input.shape)} and {tuple(weight.shape)}."
        )
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(
            f"`linear_bias` must have shape {tuple(weight.shape[:1])}, with one number per label, "
            f"but it has shape {tuple(bias.shape)}."
        )
    check_memory_limit(memory_limit)


def check_memory_limit(limit: int) -> None:
    """Raise unless `memory_limit` is a positive number of bytes."""
    if isinstance(limit, bool) or not isinstance(limit, int) or limit <= 0:
        raise ValueError(f"`memory_limit` must be a positive int (a number of bytes), but it is {limit!r}.")


def logits_like(input: Tensor, n: int) -> Canonical:
    """Return a placeholder for the logits that takes no memory; only its shape, dtype and device matter."""
    shape = input.shape[:-1]
    logits = input.detach().new_zeros(()).expand(shape.numel(), n)
    return Canonical(logits, logits.new_zeros(()), None, None, torch.Size([*shape, n]))


def rows_within(memory: int, labels: int, dtype: torch.dtype, in_place: bool) -> int:
    """Return the number of rows (at least 1) whose logits and gradient fit into `memory` bytes plus 5%.

    With `in_place`, the gradient overwrites the logits, and each thread needs one temporary row.
    """
    work = work_dtype(dtype)
    copies = 1 if in_place else 2
    per_label = copies * work.itemsize + (dtype.itemsize if dtype != work else 0)
    rows = int(1.05 * memory) // max(1, per_label * labels)
    return max(1, rows - min(torch.get_num_threads(), rows // 2) if in_place else rows)


# Gradients of the input, the weight, the bias and k; None if not requested.
_Gradients = tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]


class LinearLMLArguments(NamedTuple):
    """The arguments of `linear_lml_loss`, except for `group`."""

    input: Tensor
    linear_weight: Tensor
    linear_bias: Tensor | None
    target: Tensor
    k: float | Tensor
    weight: Tensor | None
    settings: LossSettings
    memory_limit: int


def linear_lml_loss(given: LinearLMLArguments) -> Tensor:
    """Check the arguments of `linear_lml_loss`, and compute the loss in chunks."""
    input, linear_weight, linear_bias, target, k, weight, settings, memory_limit = given
    settings.check()
    check_linear(input, linear_weight, linear_bias, memory_limit)
    n = linear_weight.shape[0]
    k = check_k(k, input.shape[:-1], None if settings.bound == "at_most" else n, input.device, "input")
    rows = read_target_rows(logits_like(input, n), target, weight, settings.ignore_index)
    check_labeled_k(k, settings.bound, lambda: rows.has_label)
    in_place = settings.bound == "exactly" and input.device.type == "cpu" and loader.loaded()

    def loss(logits: Tensor, k: Tensor, some: slice, overwrite: bool) -> Tensor:
        c, labels = Canonical(logits, k, None, None, None), rows[some]
        divisor = label_divisor(labels, settings.label_reduction)
        return lml_loss(c, labels, divisor, "none", settings.bound, overwrite=overwrite and in_place)

    at_once = rows.weights_need_gradient
    chunked = ChunkedLoss(
        loss, rows.has_label, settings.reduction, memory_limit, in_place=in_place, at_once=at_once
    )
    return chunked(input, linear_weight, linear_bias, k)


class _Chunked(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, work: _Work, input: Tensor, weight: Tensor, bias: Tensor | None, k: Tensor
    ) -> Tensor:
        ctx.work, ctx.early = work, None
        ctx.save_for_backward(input, weight, bias, k)
        wanted = ctx.needs_input_grad[1:]
        # A float16 gradient would underflow if it were rounded before it is multiplied by the loss scale,
        # which is known only in the backward pass.
        narrow = torch.float16 in (work.linear_dtype, input.dtype, weight.dtype)
        if work.seed is None or narrow:
            return _losses(work, input, weight, bias, k)
        # Compute the gradient of the sum while the logits are available. The backward pass only has to
        # multiply it by the incoming gradient.
        loss, ctx.early = _with_gradients(work, input, weight, bias, k, work.seed, wanted)
        return loss

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        work, (input, weight, bias, k) = ctx.work, ctx.saved_tensors
        if wants_graph() or _is_batched(grad):
            if work.sum_over_group is not None:
                raise NotImplementedError("With `group`, second derivatives are not supported.")
            inputs = [t for t in (input, weight, bias, k) if t is not None]

            def at_once(*given: Tensor) -> Tensor:
                rest = iter(given)
                return work.at_once(*(None if t is None else next(rest) for t in (input, weight, bias, k)))

            found = iter(differentiate_again(at_once, grad, *inputs))
            return (None, *(None if t is None else next(found) for t in (input, weight, bias, k)))
        wanted = ctx.needs_input_grad[1:]
        if ctx.early is None:
            seed = grad if work.seed is None else work.seed * grad
            _, gradients = _with_gradients(work, input, weight, bias, k, seed, wanted)
            return (None, *gradients)
        # Scale in place, because a copy of the weight's gradient might not fit in memory. A second backward
        # pass over the same graph recomputes the gradients.
        gradients, ctx.early = ctx.early, None
        if not readable(grad) or float(grad) != 1:
            for gradient in gradients:
                if gradient is not None:
                    gradient.mul_(grad)
        return (None, *gradients)


def _losses(work: _Work, input: Tensor, weight: Tensor, bias: Tensor | None, k: Tensor) -> Tensor:
    """Compute the losses (R,) or their weighted sum in chunks, without gradients."""
    logits = _Logits(work, input, weight, bias)
    parts = []
    for rows in _chunks(input.shape[0], work.chunk):
        parts.append(work.loss(logits[rows], k if k.dim() == 0 else k[rows], rows, False))
    losses = torch.cat(parts) if parts else input.new_zeros(0, dtype=work_dtype(input.dtype))
    return losses if work.seed is None else (losses * work.seed).sum()


def _with_gradients(
    work: _Work,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    k: Tensor,
    seed: Tensor,
    wanted: tuple[bool, bool, bool, bool],
) -> tuple[Tensor, _Gradients]:
    """Compute the sum of the losses, each multiplied by its factor in `seed`, and its gradients."""
    logits = _Logits(work, input, weight, bias)
    # Accumulate over chunks in the work dtype; in bfloat16, the contributions of later chunks would be lost.
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
    if d_input is not None and work.sum_over_group is not None:
        d_input = work.sum_over_group(d_input)
    return total, (d_input, _as(d_weight, weight), _as(d_bias, bias), d_k)


def _is_batched(grad: Tensor) -> bool:
    """Whether the gradient is a batch for several backward passes at once (`is_grads_batched`)."""
    return torch._C._functorch.is_legacy_batchedtensor(grad)


def _chunks(rows: int, most: int) -> list[slice]:
    """Split the rows into as few chunks of at most `most` rows as possible, all of nearly equal size.

    A small matrix product takes nearly as long as a large one, so a small last chunk would waste time.
    """
    size = _even(rows, most)
    return [slice(i, min(i + size, rows)) for i in range(0, rows, size)]


def _even(rows: int, most: int) -> int:
    return -(-rows // max(1, -(-rows // most))) or 1


class _Logits:
    """Compute the logits of one chunk at a time, in one buffer, because freed memory is not always reused."""

    def __init__(self, work: _Work, input: Tensor, weight: Tensor, bias: Tensor | None) -> None:
        # Cast the weight as autocast would, but only once instead of for every chunk.
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
