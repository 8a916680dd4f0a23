"""The operators in operations that exporters know: what `torch.onnx.export` puts in their place.

Each is the operator of `reference.py` without a look at a number: Newton's method runs in a loop of the
graph, which ends when every row has settled, and the k-th largest entry comes from a sort. The arguments are
those of `reference.py`; `operator` in `_core/operators.py` enters them where the exporter finds them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from torchlml._rows import DenseRows, Rows
from torchlml._solve import newton as steps
from torchlml._solve.newton import State
from torchlml._torch import careful as reference
from torchlml._torch.careful import Pair


class ExportedRows(DenseRows):
    """The rows of a matrix in a graph, whose number is not known."""

    def sum(self, t: Tensor) -> Tensor:
        """The sum over each row; of a bool, how many are True."""
        # A product, because onnxruntime's sum over the entries of no rows has the wrong shape.
        ones = torch.ones(t.shape[-1], 1, dtype=self.wide, device=t.device)
        return (t.to(self.wide) @ ones).squeeze(-1)

    def largest(self, x: Tensor, rank: int | Tensor) -> Tensor:
        """The `rank`-th largest entry of each row, past its end the last."""
        return super().largest(x, torch.as_tensor(rank).expand(self.count))


def solve(x: Tensor, k: Tensor, mask: Tensor | None, offsets: Tensor | None) -> Tensor:
    """nu of every row."""
    values, rows = _prepare(x, mask, offsets)
    return reference.solve_rows(values, k, rows, _newton)


def forward(x: Tensor, k: Tensor, mask: Tensor | None, offsets: Tensor | None) -> Pair:
    """(y, nu)."""
    return reference.project(x, k, *_prepare(x, mask, offsets), _newton)


def log_forward(x: Tensor, k: Tensor, mask: Tensor | None, offsets: Tensor | None) -> Pair:
    """(log y, nu)."""
    return reference.project(x, k, *_prepare(x, mask, offsets), _newton, _logsigmoid)


def _logsigmoid(z: Tensor) -> Tensor:
    """The logarithm of the logistic function; what the exporter makes of torch's own is -inf at z = -104."""
    e = torch.exp(-z.abs())
    # log(1 + e): ONNX has no log1p, and the quotient takes back how 1 + e was rounded.
    more = 1 + e
    log = torch.where(more == 1, e, more.log() * (e / (more - 1)))
    return z.clamp(max=0) - log


def _prepare(x: Tensor, mask: Tensor | None, offsets: Tensor | None) -> tuple[Tensor, Rows]:
    if offsets is not None:
        raise NotImplementedError(
            "Packed rows (`offsets`) cannot be exported to ONNX: pad the rows to one length, with a `mask`."
        )
    values, _ = reference.prepare(x, mask, None)
    return values, ExportedRows(values)


def _newton(x: Tensor, k: Tensor, m: Tensor, ordinary: Tensor, rows: Rows) -> Tensor:
    """`newton` as a loop of the graph; the same steps, and the same nu."""
    half_gap, first = steps.begin(x, k, m, ordinary, rows)

    def goes_on(number: Tensor, *rest: Tensor) -> Tensor:
        unsettled = ~_joined(rest[:-3]).settled
        # Not `all`: the exporter's conversion to opset 17 makes an invalid model of it.
        return (number < steps.MAX_STEPS) & (unsettled.sum() > 0)

    def step(number: Tensor, *rest: Tensor) -> tuple[Tensor, ...]:
        *carried, x, k, half_gap = rest
        state, r = steps.look(_joined(carried), x, k, half_gap, ExportedRows(x))

        def limit(step: Tensor, below: Tensor, above: Tensor) -> Tensor:
            free = (number < steps.FREE_STEPS) | (number % 2 == 1)
            later = torch.where(free, steps.keep_inside(step, below, above), steps.halve(step, below, above))
            return torch.where(number < steps.CUT_STEPS, steps.cut(step, below, above), later)

        return (number + 1, *_parts(steps.move(state, r, limit)))

    # The loop may not carry one tensor twice.
    carried = (torch.zeros((), dtype=torch.int64), *_parts(first._replace(best=first.best.clone())))
    beside = (x, k.expand(rows.count).contiguous(), half_gap)
    found = torch.ops.higher_order.while_loop(goes_on, step, carried, beside)
    return _joined(found[1:]).best


# The loop carries vectors: the stride of a pair (2, R) would be an input of its body, which ONNX does not have.
def _parts(s: State) -> tuple[Tensor, ...]:
    return (s.nu[0].clone(), s.nu[1].clone(), *s[1:4], s.best[0].clone(), s.best[1].clone(), *s[5:])


def _joined(parts: Sequence[Tensor]) -> State:
    hi, lo, moved, below, above, best_hi, best_lo, best_error, settled = parts
    nu, best = torch.stack([hi, lo]), torch.stack([best_hi, best_lo])
    return State(nu, moved, below, above, best, best_error, settled)
