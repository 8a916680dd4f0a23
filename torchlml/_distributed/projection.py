"""`lml`, `log_lml` and `lml_dual` of rows whose labels are spread over processes.

The arguments are in canonical form, see `_kernels.reference`; every process has its own columns of the same
rows. Every result is the part that belongs to this process's labels, or a number per row that is the same
on all of them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from torchlml._autograd.rule import gradient_of_k, is_plain, wants_graph
from torchlml._distributed.group import LabelGroup
from torchlml._distributed.solve import Shard, Solution, solve
from torchlml._distributed.sums import ShardLabels
from torchlml._rows import DenseRows
from torchlml._solve.residual import shifted
from torchlml._torch import careful as reference


class Split:
    """How the labels are split, and what the sum is bound by."""

    def __init__(self, group: LabelGroup, labels: list[int], bound: str = "exactly") -> None:
        self.group = group
        self.labels = labels
        self.bound = bound
        self.start = sum(labels[: group.rank])
        self.total = sum(labels)
        self.fraction = labels[group.rank] / max(1, self.total)


class LocalRows:
    """The entries of this process beside the numbers of their rows."""

    def __init__(self, x: Tensor, mask: Tensor | None, solution: Solution) -> None:
        self.values, _ = reference.prepare(x, mask, None)
        self.rows = DenseRows(x)
        self.solution = solution
        self.z = shifted(self.values, solution.nu, self.rows)
        self.live = reference.moving(self.values, solution.nu, self.rows)
        # Where k < p the +inf entries get k/p each: they follow k like tied entries, but no finite x.
        tied = (solution.share > 0) & (solution.share < 1)
        self.tied = (self.values == torch.inf) & tied.unsqueeze(-1)

    def fill(self, y: Tensor, absent: float, infinite: Tensor) -> Tensor:
        return reference.fill(y, self.values, self.solution.nu, self.rows, absent, infinite)

    def shares_of_slope(self) -> Tensor:
        """w / sum w, right even where every w underflows."""
        log_w = logsigmoid(self.z) + logsigmoid(-self.z)
        share = torch.exp(log_w.double() - self.solution.log_slope.unsqueeze(-1))
        return torch.where(self.live & ~self.solution.free.unsqueeze(-1), share.to(self.values.dtype), 0)

    def finish(self, dx: Tensor, dk: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        dk = torch.where(self.solution.free, 0, dk)
        return reference.finish(dx, dk, x, self.solution.nu, self.rows)


def solve_shard(
    x: Tensor,
    k: Tensor,
    mask: Tensor | None,
    split: Split,
    labels: ShardLabels | None = None,
    marks: Tensor | None = None,
) -> Solution:
    """Solve for the canonical arguments of this process."""
    values, _ = reference.prepare(x, mask, None)
    k = k.to(torch.float64).expand(x.shape[0])
    return solve(Shard(values.contiguous(), k, split.fraction, labels, marks), split.group, split.bound)


def refuse_transforms() -> None:
    """Say that there is no path for them, which would be silently wrong otherwise."""
    if not is_plain():
        raise NotImplementedError(
            "With `group`, only plain calls and their first derivatives are supported, but a transform of "
            "torch.func or forward-mode differentiation is at work."
        )


def refuse_second_derivatives() -> None:
    """In a backward pass: `once_differentiable` gives a loss a gradient without a graph, silently."""
    if wants_graph():
        raise NotImplementedError("With `group`, a derivative of the derivative is not supported.")


class _Apply(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, result: Any, gradient: Any, x: Tensor, k: Tensor, mask: Tensor | None, split: Split
    ) -> Tensor:
        solution = solve_shard(x, k, mask, split)
        ctx.save_for_backward(x, k, mask, *solution)
        ctx.gradient, ctx.group = gradient, split.group
        return result(LocalRows(x, mask, solution)).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_derivatives()
        x, k, mask, *solution = ctx.saved_tensors
        local = LocalRows(x, mask, Solution(*solution))
        dx, dk = ctx.gradient(local, grad.to(local.values.dtype), k, ctx.group)
        dx, dk = local.finish(dx, dk, x)
        return None, None, dx, gradient_of_k(dk, k), None, None


def _projection(
    result: Callable[[LocalRows], Tensor],
    gradient: Callable[[LocalRows, Tensor, Tensor, LabelGroup], tuple[Tensor, Tensor]],
) -> Callable[[Tensor, Tensor, Tensor | None, Split], Tensor]:
    """A function of canonical rows from its result and from (dx, dk) for a gradient of it."""

    def project(x: Tensor, k: Tensor, mask: Tensor | None, split: Split) -> Tensor:
        return _Apply.apply(result, gradient, x, k, mask, split)

    return project


def _y(local: LocalRows) -> Tensor:
    return local.fill(reference.sigmoid(local.z), 0.0, local.solution.share)


def _gradient_of_y(local: LocalRows, g: Tensor, k: Tensor, group: LabelGroup) -> tuple[Tensor, Tensor]:
    s = local.solution
    t = reference.sigmoid(-local.z.abs())
    w = torch.where(local.live, t * (1 - t), local.tied.to(t.dtype))
    pull = group.sum(local.rows.sum(torch.where(local.live | local.tied, w * g, 0)))
    total = torch.where(s.nu[0].isinf(), s.infinite, s.log_slope.exp())
    dk = torch.where((total > 0) & ~s.free & (pull != 0), pull / total, 0)
    return torch.where(local.live, w * (g - dk.to(g.dtype).unsqueeze(-1)), 0), dk


def _log_y(local: LocalRows) -> Tensor:
    return local.fill(logsigmoid(local.z), -torch.inf, local.solution.share.log())


def _gradient_of_log_y(local: LocalRows, g: Tensor, k: Tensor, group: LabelGroup) -> tuple[Tensor, Tensor]:
    s = local.solution
    a = torch.where(local.live, g * reference.sigmoid(-local.z), 0)
    of_tied = local.rows.sum(torch.where(local.tied, g, 0))
    total, of_tied = group.sum(torch.stack([local.rows.sum(a), of_tied]))
    dx = torch.where(local.live, a - local.shares_of_slope() * total.to(a.dtype).unsqueeze(-1), 0)
    # The logarithm of k/p has the derivative 1/k.
    dk = torch.where(total == 0, 0, total / s.log_slope.exp())
    return dx, torch.where(s.nu[0].isinf(), torch.where(of_tied == 0, 0, of_tied / k), dk)


def _nu(local: LocalRows) -> Tensor:
    return local.solution.nu.sum(0)


def _gradient_of_nu(local: LocalRows, g: Tensor, k: Tensor, group: LabelGroup) -> tuple[Tensor, Tensor]:
    s = local.solution
    dx = torch.where(local.live, -local.shares_of_slope() * g.unsqueeze(-1), 0)
    return dx, torch.where(s.nu[0].isinf() | (g == 0), 0, g / s.log_slope.exp())


# y and log y of this process's labels, and nu of each row.
lml = _projection(_y, _gradient_of_y)
log_lml = _projection(_log_y, _gradient_of_log_y)
lml_dual = _projection(_nu, _gradient_of_nu)
