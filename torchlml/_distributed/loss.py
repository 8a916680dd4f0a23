"""The LML loss of rows whose labels are spread over processes."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchlml._autograd.rule import gradient_of_k
from torchlml._distributed.projection import LocalRows, Split, refuse_second_derivatives, solve_shard
from torchlml._distributed.solve import Solution
from torchlml._distributed.sums import ShardLabels
from torchlml._torch import careful as reference


class OwnLabels(NamedTuple):
    """The observed labels that lie on this process: their rows, their places in these rows, their weights."""

    row: Tensor
    place: Tensor
    weight: Tensor


def row_losses(x: Tensor, k: Tensor, mask: Tensor | None, labels: OwnLabels, split: Split) -> Tensor:
    """(2, R) in the work dtype, the same on every process: the losses of the rows, and how many labels."""
    return _Loss.apply(x, k, mask, *labels, split)


class _Loss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        k: Tensor,
        mask: Tensor | None,
        row: Tensor,
        place: Tensor,
        weight: Tensor,
        split: Split,
    ) -> Tensor:
        values, _ = reference.prepare(x, mask, None)
        count = x.shape[0]
        entry = values[row, place].double()
        weight = weight.double()
        counts = weight != 0
        finite = counts & entry.isfinite()
        labels = ShardLabels(row[finite], entry[finite], weight[finite])
        # The labels at infinite entries, whose loss is known from the row: 0, infinite, or log k/p.
        behind_mask = torch.zeros_like(counts) if mask is None else ~mask[row, place]
        kinds = (
            torch.ones_like(counts),
            finite,
            counts & (entry == -torch.inf),
            entry.isnan() & counts,
            behind_mask,
        )
        numbers = [*kinds, torch.where(entry == torch.inf, weight, 0)]
        marks = torch.zeros(count, len(numbers), dtype=torch.float64, device=x.device)
        marks.index_add_(0, row, torch.stack([number.double() for number in numbers], -1))
        solution = solve_shard(x, k, mask, split, labels, marks)
        any_label, of_finite, of_absent, of_nan, hidden, of_infinite = solution.marks.unbind(-1)
        if bool(hidden.any()):
            raise ValueError(
                "`target` has a label where `mask` is False, but a label must be a class that may be chosen."
            )
        hi = solution.nu[0].double()
        share = solution.share.double()
        at_infinite = torch.where(of_infinite == 0, 0, -of_infinite * share.log())
        finite_part = torch.where(hi == -torch.inf, torch.inf, torch.where(hi == torch.inf, 0, solution.loss))
        loss = torch.where(of_finite > 0, finite_part, 0) + at_infinite
        loss = torch.where(of_absent > 0, torch.inf, loss)
        counted = of_finite + of_absent + (of_infinite != 0) + of_nan > 0
        loss = torch.where(counted, torch.where(hi.isnan(), torch.nan, loss), 0)
        change = torch.where(hi.isfinite() & counted, solution.change, 0)
        ctx.save_for_backward(x, k, mask, row, place, weight, of_infinite, change, counted, *solution)
        return torch.stack([loss, any_label]).to(values.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_derivatives()
        x, k, mask, row, place, weight, of_infinite, change, counted, *solution = ctx.saved_tensors
        local = LocalRows(x, mask, Solution(*solution))
        s, g = local.solution, grad[0].double()
        dx = local.shares_of_slope() * (g * change).to(local.values.dtype).unsqueeze(-1)
        own = torch.where(local.live[row, place], weight * torch.sigmoid(-local.z[row, place].double()), 0)
        dx.index_put_((row, place), -(g[row] * own).to(dx.dtype), accumulate=True)
        dk = torch.where(s.nu[0].isinf() | (change == 0), 0, -g * change / s.log_slope.exp())
        # Where k < p the +inf entries are k/p each, whose logarithm has the derivative 1/k.
        follows_k = (s.share > 0) & (s.share < 1) & (of_infinite != 0)
        dk = torch.where(follows_k, -g * of_infinite / k, dk)
        dx, dk = local.finish(dx, dk, x)
        # A row in which no label counts has no gradient, whatever stands in it.
        dx = torch.where(counted.unsqueeze(-1), dx, 0)
        dk = torch.where(counted, dk, 0)
        return (dx, gradient_of_k(dk, k), *(None,) * 5)
