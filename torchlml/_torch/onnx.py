"""The operators decomposed into operations that `torch.onnx.export` supports.

Each function takes the same arguments and returns the same result as its namesake in `careful.py`, but reads
no values on the host. Newton's method becomes a loop in the graph, which ends when every row has converged,
and the k-th largest entry comes from a sort. `operator` in `_autograd/operators.py` registers these
decompositions.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from torchlml._rows import DenseRows, Rows
from torchlml._solve import newton
from torchlml._solve.newton import State
from torchlml._torch import careful
from torchlml._torch.careful import Pair


class OnnxRows(DenseRows):
    """The rows of a matrix in an exported graph. Their number may be unknown at export time."""

    def sum(self, t: Tensor) -> Tensor:
        """Sum over each row; for a bool tensor, count the True entries."""
        # Use a matrix product, because onnxruntime's sum over an empty batch has the wrong shape.
        ones = torch.ones(t.shape[-1], 1, dtype=self.wide, device=t.device)
        return (t.to(self.wide) @ ones).squeeze(-1)

    def largest(self, x: Tensor, rank: int | Tensor) -> Tensor:
        """Return the `rank`-th largest entry of each row, or the smallest if the row has fewer entries."""
        return super().largest(x, torch.as_tensor(rank).expand(self.count))


def solve(x: Tensor, k: Tensor, mask: Tensor | None, offsets: Tensor | None) -> Tensor:
    """Compute nu for every row."""
    values, rows = _prepare(x, mask, offsets)
    return careful.solve_rows(values, k, rows, _newton)


def forward(x: Tensor, k: Tensor, mask: Tensor | None, offsets: Tensor | None) -> Pair:
    """Return (y, nu)."""
    return careful.project(x, k, *_prepare(x, mask, offsets), _newton)


def log_forward(x: Tensor, k: Tensor, mask: Tensor | None, offsets: Tensor | None) -> Pair:
    """Return (log y, nu)."""
    return careful.project(x, k, *_prepare(x, mask, offsets), _newton, _logsigmoid)


def _logsigmoid(z: Tensor) -> Tensor:
    """Compute log(sigmoid(z)). The exporter's version of torch's `logsigmoid` is -inf at z = -104."""
    e = torch.exp(-z.abs())
    # Compute log(1 + e). ONNX has no log1p; the quotient compensates for the rounding of 1 + e.
    more = 1 + e
    log = torch.where(more == 1, e, more.log() * (e / (more - 1)))
    return z.clamp(max=0) - log


def _prepare(x: Tensor, mask: Tensor | None, offsets: Tensor | None) -> tuple[Tensor, Rows]:
    if offsets is not None:
        raise NotImplementedError(
            "Ragged rows (`offsets`) cannot be exported to ONNX. Pad the rows to the same length and pass a "
            "`mask`."
        )
    values, _ = careful.prepare(x, mask, None)
    return values, OnnxRows(values)


def _newton(x: Tensor, k: Tensor, m: Tensor, ordinary: Tensor, rows: Rows) -> Tensor:
    """Run `newton` as a loop in the graph, with the same steps and the same result."""
    half_gap, first = newton.begin(x, k, m, ordinary, rows)

    def goes_on(number: Tensor, *rest: Tensor) -> Tensor:
        unsettled = ~_joined(rest[:-3]).settled
        # Do not use `all`: the exporter's conversion to opset 17 would produce an invalid model.
        return (number < newton.MAX_STEPS) & (unsettled.sum() > 0)

    def step(number: Tensor, *rest: Tensor) -> tuple[Tensor, ...]:
        *carried, x, k, half_gap = rest
        state, r = newton.evaluate(_joined(carried), x, k, half_gap, OnnxRows(x))

        def limit(step: Tensor, below: Tensor, above: Tensor) -> Tensor:
            free = (number < newton.FREE_STEPS) | (number % 2 == 1)
            later = torch.where(
                free, newton.keep_inside(step, below, above), newton.halve(step, below, above)
            )
            return torch.where(number < newton.CUT_STEPS, newton.cut(step, below, above), later)

        return (number + 1, *_parts(newton.move(state, r, limit)))

    # The loop must not carry the same tensor twice.
    carried = (torch.zeros((), dtype=torch.int64), *_parts(first._replace(best=first.best.clone())))
    constants = (x, k.expand(rows.count).contiguous(), half_gap)
    found = torch.ops.higher_order.while_loop(goes_on, step, carried, constants)
    return _joined(found[1:]).best


# The loop carries vectors instead of pairs (2, R): torch would pass the stride of a pair to the loop body as
# an additional input, which an ONNX loop does not support.
def _parts(s: State) -> tuple[Tensor, ...]:
    return (s.nu[0].clone(), s.nu[1].clone(), *s[1:4], s.best[0].clone(), s.best[1].clone(), *s[5:])


def _joined(parts: Sequence[Tensor]) -> State:
    hi, lo, moved, below, above, best_hi, best_lo, best_error, settled = parts
    nu, best = torch.stack([hi, lo]), torch.stack([best_hi, best_lo])
    return State(nu, moved, below, above, best, best_error, settled)
