"""The projection and its loss on rows whose labels are sharded across processes, with their derivatives.

The arguments are canonical (see `_torch/careful.py`); every process has its own columns of the same rows. A
result is the part for the labels of this process, or one number per row that is the same on all processes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from torchlml._autograd.rule import gradient_of_k, wants_graph
from torchlml._distributed.group import LabelGroup, LabelSplit
from torchlml._distributed.solve import LocalPart, Solution, solve
from torchlml._distributed.sums import FiniteLabels
from torchlml._rows import DenseRows
from torchlml._solve.newton import shifted
from torchlml._torch import careful


class SolvedPart:
    """The entries of this process, with the solution of their rows."""

    def __init__(self, values: Tensor, solution: Solution) -> None:
        self.values, self.rows, self.solution = values, DenseRows(values), solution
        self.z = shifted(self.values, solution.nu, self.rows)
        self.live = careful.moving(self.values, solution.nu, self.rows)
        # If k < p, the +inf entries get k/p each. They depend on k like tied entries, but on no finite x.
        tied = (solution.share > 0) & (solution.share < 1)
        self.tied = (self.values == torch.inf) & tied.unsqueeze(-1)

    def fill(self, y: Tensor, absent: float, infinite: Tensor) -> Tensor:
        """Replace the entries of y where x is infinite, and everything in rows that are NaN."""
        return careful.fill(y, self.values, self.solution.nu, self.rows, absent, infinite)

    def shares_of_slope(self) -> Tensor:
        """w / sum w, accurate even if every w underflows."""
        log_w = logsigmoid(self.z) + logsigmoid(-self.z)
        share = torch.exp(log_w.double() - self.solution.log_slope.unsqueeze(-1))
        return torch.where(self.live & ~self.solution.free.unsqueeze(-1), share.to(self.values.dtype), 0)

    def finish(self, dx: Tensor, dk: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        """Convert the gradients to the dtype of x and fill in those of rows without an ordinary solution."""
        dk = torch.where(self.solution.free, 0, dk)
        return careful.finish(dx, dk, x, self.solution.nu, self.rows)


def _solve(values: Tensor, k: Tensor, split: LabelSplit, *labels: Any) -> Solution:
    """Solve all rows; `labels` are the last two fields of `LocalPart`."""
    k = k.to(torch.float64).expand(values.shape[0])
    return solve(LocalPart(values.contiguous(), k, split.fraction, *labels), split.group, split.bound)


def _check_first_derivative() -> None:
    """Raise in a backward pass with create_graph; `once_differentiable` would silently drop the graph."""
    if wants_graph():
        raise NotImplementedError("With `group`, second derivatives are not supported.")


class _Formula(NamedTuple):
    """A result of solved rows, and (dx, dk) for a gradient of it."""

    result: Callable[[SolvedPart], Tensor]
    gradient: Callable[[SolvedPart, Tensor, Tensor, LabelGroup], tuple[Tensor, Tensor]]


class Project(torch.autograd.Function):
    """Apply one of `FORMULAS` to the labels of this process: (formula, x, k, mask, split)."""

    @staticmethod
    def forward(
        ctx: Any, formula: _Formula, x: Tensor, k: Tensor, mask: Tensor | None, split: LabelSplit
    ) -> Tensor:
        values, _ = careful.prepare(x, mask, None)
        solution = _solve(values, k, split)
        ctx.save_for_backward(x, k, mask, *solution)
        ctx.gradient, ctx.group = formula.gradient, split.group
        return formula.result(SolvedPart(values, solution)).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        _check_first_derivative()
        x, k, mask, *solution = ctx.saved_tensors
        local = SolvedPart(careful.prepare(x, mask, None)[0], Solution(*solution))
        dx, dk = ctx.gradient(local, grad.to(local.values.dtype), k, ctx.group)
        dx, dk = local.finish(dx, dk, x)
        return None, dx, gradient_of_k(dk, k), None, None


def _y(local: SolvedPart) -> Tensor:
    return local.fill(careful.sigmoid(local.z), 0.0, local.solution.share)


def _gradient_of_y(local: SolvedPart, g: Tensor, k: Tensor, group: LabelGroup) -> tuple[Tensor, Tensor]:
    s = local.solution
    t = careful.sigmoid(-local.z.abs())
    w = torch.where(local.live, t * (1 - t), local.tied.to(t.dtype))
    pull = group.sum(local.rows.sum(torch.where(local.live | local.tied, w * g, 0)))
    total = torch.where(s.nu[0].isinf(), s.infinite, s.log_slope.exp())
    dk = torch.where((total > 0) & ~s.free & (pull != 0), pull / total, 0)
    return torch.where(local.live, w * (g - dk.to(g.dtype).unsqueeze(-1)), 0), dk


def _log_y(local: SolvedPart) -> Tensor:
    return local.fill(logsigmoid(local.z), -torch.inf, local.solution.share.log())


def _gradient_of_log_y(local: SolvedPart, g: Tensor, k: Tensor, group: LabelGroup) -> tuple[Tensor, Tensor]:
    s = local.solution
    a = torch.where(local.live, g * careful.sigmoid(-local.z), 0)
    of_tied = local.rows.sum(torch.where(local.tied, g, 0))
    total, of_tied = group.sum(torch.stack([local.rows.sum(a), of_tied]))
    dx = torch.where(local.live, a - local.shares_of_slope() * total.to(a.dtype).unsqueeze(-1), 0)
    # The logarithm of k/p has the derivative 1/k.
    dk = torch.where(total == 0, 0, total / s.log_slope.exp())
    return dx, torch.where(s.nu[0].isinf(), torch.where(of_tied == 0, 0, of_tied / k), dk)


def _nu(local: SolvedPart) -> Tensor:
    return local.solution.nu.sum(0)


def _gradient_of_nu(local: SolvedPart, g: Tensor, k: Tensor, group: LabelGroup) -> tuple[Tensor, Tensor]:
    s = local.solution
    dx = torch.where(local.live, -local.shares_of_slope() * g.unsqueeze(-1), 0)
    return dx, torch.where(s.nu[0].isinf() | (g == 0), 0, g / s.log_slope.exp())


FORMULAS = {
    "lml": _Formula(_y, _gradient_of_y),
    "log_lml": _Formula(_log_y, _gradient_of_log_y),
    "lml_dual": _Formula(_nu, _gradient_of_nu),
}


class OwnLabels(NamedTuple):
    """The observed labels of this process: their rows, their columns in its logits, and their weights."""

    row: Tensor
    place: Tensor
    weight: Tensor


def row_losses(x: Tensor, k: Tensor, mask: Tensor | None, labels: OwnLabels, split: LabelSplit) -> Tensor:
    """(2, R) in the work dtype, the same on every process: the loss and the number of labels of each row."""
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
        split: LabelSplit,
    ) -> Tensor:
        values, _ = careful.prepare(x, mask, None)
        count = x.shape[0]
        entry = values[row, place].double()
        weight = weight.double()
        counts = weight != 0
        finite = counts & entry.isfinite()
        labels = FiniteLabels(row[finite], entry[finite], weight[finite])
        # The loss of labels at infinite entries depends only on the row: 0, infinite, or log k/p.
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
        solution = _solve(values, k, split, labels, marks)
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
        _check_first_derivative()
        x, k, mask, row, place, weight, of_infinite, change, counted, *solution = ctx.saved_tensors
        local = SolvedPart(careful.prepare(x, mask, None)[0], Solution(*solution))
        s, g = local.solution, grad[0].double()
        dx = local.shares_of_slope() * (g * change).to(local.values.dtype).unsqueeze(-1)
        own = torch.where(local.live[row, place], weight * torch.sigmoid(-local.z[row, place].double()), 0)
        dx.index_put_((row, place), -(g[row] * own).to(dx.dtype), accumulate=True)
        dk = torch.where(s.nu[0].isinf() | (change == 0), 0, -g * change / s.log_slope.exp())
        # If k < p, the +inf entries are k/p each, whose logarithm has the derivative 1/k.
        follows_k = (s.share > 0) & (s.share < 1) & (of_infinite != 0)
        dk = torch.where(follows_k, -g * of_infinite / k, dk)
        dx, dk = local.finish(dx, dk, x)
        # A row without a label of positive weight has no gradient, even if it contains a NaN.
        dx = torch.where(counted.unsqueeze(-1), dx, 0)
        dk = torch.where(counted, dk, 0)
        return (dx, gradient_of_k(dk, k), *(None,) * 5)
