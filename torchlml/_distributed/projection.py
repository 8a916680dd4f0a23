"""The projection of rows whose labels are sharded across processes, and its derivatives.

Every process has its own columns of the same rows. `project` unwraps the local parts of DTensors, checks that
all processes pass matching arguments, computes the result and wraps it. A DTensor whose labels are not
sharded needs no group: its rows are computed locally.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn.functional import logsigmoid

from torchlml._arguments import Bound, canonical, check_bound
from torchlml._autograd import rule
from torchlml._autograd.chunked_linear import not_compiled
from torchlml._autograd.rule import gradient_of_k, wants_graph
from torchlml._distributed.dtensor import Layout, read_layout
from torchlml._distributed.group import Group, LabelGroup, LabelSplit, agreement, label_group
from torchlml._distributed.solve import Solution, prepare, solve
from torchlml._rows import DenseRows, shifted
from torchlml._torch import careful


@not_compiled
def project(
    name: str,
    x: Tensor,
    k: float | Tensor,
    dim: int,
    mask: Tensor | None,
    offsets: Tensor | None,
    bound: Bound,
    group: Group | None,
) -> Tensor:
    """Compute `lml`, `log_lml` or `lml_dual`, as selected by `name`."""
    layout: Layout | None = None
    if isinstance(x, DTensor):
        layout = read_layout(x, dim, group)
        x, k, mask, processes = x.to_local(), layout.rows.local(k), layout.entries.local(mask), layout.group
    else:
        processes = label_group(group)
    if processes is None:
        any_k = bound != "exactly" and check_bound(bound) == "at_most"
        c = canonical(x, k, dim, mask, offsets, any_k=any_k, sharded=True)
        result = _LOCAL[name][bound](c.x, c.k, c.mask, None)
    else:
        with agreement(processes, x) as agreed:
            if bound != "exactly":
                check_bound(bound)
            c = canonical(x, k, dim, mask, offsets, any_k=True, sharded=True)
            rows = list(x.shape)
            labels = rows.pop(dim)
            agreed.tell(name, c.x, k, bound, rows=rows, labels=labels, masked=mask is not None)
        result = _Project.apply(name, c.x, c.k, c.mask, agreed.split(k, bound))
    if name == "lml_dual":
        result = c.restore_rows(result)
        return result if layout is None else layout.rows.wrap(result)
    result = c.restore(result, dim)
    return result if layout is None else layout.entries.wrap(result)


_LOCAL = {"lml": rule.LML, "log_lml": rule.LOG_LML, "lml_dual": rule.LML_DUAL}


class SolvedPart:
    """The entries of this process and the solution for their rows, in the form that backward passes need."""

    def __init__(self, x: Tensor, mask: Tensor | None, solution: Solution) -> None:
        self.values, self.rows = prepare(x, mask), DenseRows(x)
        self.solution = solution
        self.z = shifted(self.values, solution.nu, self.rows)
        self.live = careful.moving(self.values, solution.nu, self.rows)
        # If a row has p > k entries of +inf, each gets k/p. They depend on k as tied entries do, but not on
        # any finite x.
        tied = (solution.share > 0) & (solution.share < 1)
        self.tied = (self.values == torch.inf) & tied.unsqueeze(-1)

    def shares_of_slope(self) -> Tensor:
        """Return w / sum(w) for each entry, accurate even if every w underflows."""
        log_w = logsigmoid(self.z) + logsigmoid(-self.z)
        share = torch.exp(log_w.double() - self.solution.log_slope.unsqueeze(-1))
        return torch.where(self.live & ~self.solution.free.unsqueeze(-1), share.to(self.values.dtype), 0)

    def finish(self, dx: Tensor, dk: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        """Set dk to 0 in free rows and both gradients to NaN in undefined rows; cast both to their dtypes."""
        dk = torch.where(self.solution.free, 0, dk)
        return careful.finish(dx, dk, x, self.solution.nu, self.rows)


def check_first_derivative() -> None:
    """Raise an error if create_graph=True; `once_differentiable` would silently drop the graph instead."""
    if wants_graph():
        raise NotImplementedError("With `group`, second derivatives are not supported.")


class _Project(torch.autograd.Function):
    """The result of `lml`, `log_lml` or `lml_dual` for the entries of this process."""

    @staticmethod
    def forward(ctx: Any, name: str, x: Tensor, k: Tensor, mask: Tensor | None, split: LabelSplit) -> Tensor:
        values = prepare(x, mask)
        s = solve(values, k, split)
        ctx.save_for_backward(x, k, mask, *s)
        ctx.name, ctx.group = name, split.group
        if name == "lml_dual":
            return s.nu.sum(0).to(x.dtype)
        hi, lo = s.nu.unsqueeze(-1)
        z = (values + hi) + lo
        if name == "lml":
            # Do not use torch.sigmoid, because its rounding depends on an entry's position in memory.
            e = torch.exp(-z.abs())
            y, absent, share = torch.where(z > 0, 1, e) / (1 + e), 0.0, s.share
        else:
            y, absent, share = logsigmoid(z), -torch.inf, s.share.log()
        # Set infinite and absent entries to their limits, and undefined rows to NaN.
        y = torch.where(values == torch.inf, share.unsqueeze(-1), y)
        y = torch.where(values == -torch.inf, absent, y)
        return torch.where(hi.isnan(), torch.nan, y).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        check_first_derivative()
        x, k, mask, *solution = ctx.saved_tensors
        local = SolvedPart(x, mask, Solution(*solution))
        dx, dk = _GRADIENTS[ctx.name](local, grad.to(local.values.dtype), k, ctx.group)
        dx, dk = local.finish(dx, dk, x)
        return None, dx, gradient_of_k(dk, k), None, None


def _gradient_of_y(local: SolvedPart, g: Tensor, k: Tensor, group: LabelGroup) -> tuple[Tensor, Tensor]:
    s = local.solution
    t = careful.sigmoid(-local.z.abs())
    w = torch.where(local.live, t * (1 - t), local.tied.to(t.dtype))
    pull = group.sum(local.rows.sum(torch.where(local.live | local.tied, w * g, 0)))
    total = torch.where(s.nu[0].isinf(), s.infinite, s.log_slope.exp())
    dk = torch.where((total > 0) & ~s.free & (pull != 0), pull / total, 0)
    return torch.where(local.live, w * (g - dk.to(g.dtype).unsqueeze(-1)), 0), dk


def _gradient_of_log_y(local: SolvedPart, g: Tensor, k: Tensor, group: LabelGroup) -> tuple[Tensor, Tensor]:
    s = local.solution
    a = torch.where(local.live, g * careful.sigmoid(-local.z), 0)
    of_tied = local.rows.sum(torch.where(local.tied, g, 0))
    total, of_tied = group.sum(torch.stack([local.rows.sum(a), of_tied]))
    dx = torch.where(local.live, a - local.shares_of_slope() * total.to(a.dtype).unsqueeze(-1), 0)
    # If a row has p > k entries of +inf, their log y is log(k/p), whose derivative with respect to k is 1/k.
    dk = torch.where(total == 0, 0, total / s.log_slope.exp())
    return dx, torch.where(s.nu[0].isinf(), torch.where(of_tied == 0, 0, of_tied / k), dk)


def _gradient_of_nu(local: SolvedPart, g: Tensor, k: Tensor, group: LabelGroup) -> tuple[Tensor, Tensor]:
    s = local.solution
    dx = torch.where(local.live, -local.shares_of_slope() * g.unsqueeze(-1), 0)
    return dx, torch.where(s.nu[0].isinf() | (g == 0), 0, g / s.log_slope.exp())


_GRADIENTS = {"lml": _gradient_of_y, "log_lml": _gradient_of_log_y, "lml_dual": _gradient_of_nu}
