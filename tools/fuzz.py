"""Compare the operators with an independent reference on random rows, and print the worst errors.

    python tools/fuzz.py --seconds 120

The tool tests the kernel that the environment selects (TORCHLML_KERNEL, TORCHLML_ISA) on all dtypes, on dense
and jagged batches, with and without masks, and with one k for all rows or one k per row. The reference uses
bisection in float64 around an anchor chosen for each row, and no library code. If an error exceeds its limit,
the tool prints the seed of the failing batch and exits with status 1.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections import defaultdict
from dataclasses import dataclass

import torch
from torch import Tensor

import torchlml
from torchlml._cpu import loader

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
INF = math.inf
# Error limits. VALUE is for y, and for log y relative to max(1, |log y|). SUM is for the sum of y, relative
# to max(1, k).
VALUE = {torch.float32: 1e-6, torch.float64: 1e-11}
SUM = {torch.float32: 2e-6, torch.float64: 2e-11}
# Error limits for gradients, relative to the largest |grad| in the row.
GRADIENT = {torch.float32: 5e-6, torch.float64: 1e-11}


@dataclass(frozen=True)
class Batch:
    """A batch of padded rows, with the settings that determine how the operators receive them."""

    x: Tensor  # (R, n) in the dtype under test
    k: Tensor  # (R,) float64
    valid: Tensor  # (R, n) bool: whether an entry is part of its row and not masked
    lengths: Tensor | None  # the lengths of jagged rows
    masked: bool


def draw(generator: torch.Generator, dtype: torch.dtype) -> Batch:
    """Draw a random batch. Each row has a random kind of difficulty, such as ties or outliers."""

    def rand(*size: int) -> Tensor:
        return torch.rand(*size, generator=generator, dtype=torch.float64)

    def pick(low: int, high: int) -> int:
        return int(torch.randint(low, high, (), generator=generator))

    top = (8, 40, 130, 1100, 9000)[min(pick(0, 14) // 3, 4)]
    n = pick(1, top + 1)
    rows = max(1, min(3000, 60_000 // n))
    kind = torch.randint(0, 9, (rows, 1), generator=generator)
    normal = torch.randn(rows, n, generator=generator, dtype=torch.float64)
    scale = 10 ** (rand(rows, 1) * 11 - 6)
    usual = rand(rows, 1) * 12 + 0.1
    x = normal * usual
    x = torch.where(kind == 1, normal * scale, x)
    x = torch.where(kind == 2, (normal * 2).round() * usual, x)  # ties
    x = torch.where(kind == 3, torch.arange(n) * usual * 4, x)  # a staircase
    x = torch.where(kind == 4, normal + usual * 4 * (normal > 1), x)  # two groups
    x = torch.where(kind == 5, torch.where(rand(rows, n) < 1 / n, 1e4 * normal.sign(), normal), x)  # outliers
    x = torch.where(kind == 6, normal * usual + (rand(rows, 1) - 0.5) * 2e7, x)  # a shift
    x = torch.where(kind == 7, normal.sign() * torch.where(rand(rows, n) < 0.3, 3e38, 3.0), x)  # extremes
    x = torch.where(kind == 8, normal / normal.roll(1, 1), x)  # Cauchy
    limit = min(torch.finfo(dtype).max, 3.4e38)
    x = x.clamp(-limit, limit).to(dtype)
    if pick(0, 4) == 0:  # special values in some rows
        odd = rand(rows, n)
        x[odd < 0.03] = INF
        x[(odd > 0.03) & (odd < 0.08)] = -INF
        x[odd > 1 - 0.2 / n] = math.nan
    lengths, valid = None, torch.ones(rows, n, dtype=torch.bool)
    if pick(0, 3) == 0:
        lengths = torch.randint(0, n + 1, (rows,), generator=generator)
        valid = torch.arange(n) < lengths[:, None]
    masked = pick(0, 3) == 0
    if masked:
        valid = valid & (rand(rows, n) < rand(rows, 1))
    sizes = torch.full((rows,), n) if lengths is None else lengths
    k = (rand(rows) * (sizes + 1)).floor()
    style = torch.randint(0, 8, (rows,), generator=generator)
    k = torch.where(style == 0, rand(rows) * sizes, k)
    k = torch.where(style == 1, 10 ** (-6 * rand(rows)), k)
    k = torch.where(style == 2, sizes - 10 ** (-6 * rand(rows)), k)
    k = torch.where(style == 3, 1.0, k)
    k = torch.minimum(k.clamp(min=0), sizes.double())
    if lengths is None and pick(0, 2) == 0:
        k = k[:1].expand(rows).contiguous()
    return Batch(x, k, valid, lengths, masked)


@dataclass(frozen=True)
class Truth:
    """The exact y, log y and w for every row, and a mask of the rows with a finite nu."""

    y: Tensor
    log_y: Tensor
    w: Tensor  # y * (1 - y), or 0 in special rows
    share: Tensor  # w / sum(w)
    sigma_minus: Tensor  # 1 - y without cancellation
    regular: Tensor  # (R,) rows with a finite nu


def solve(batch: Batch) -> Truth:
    """Bisect nu = d - anchor in float64. With an anchor at the threshold, the root always has |d| <= 60."""
    x, k, valid = batch.x.double(), batch.k[:, None], batch.valid
    nan = (valid & x.isnan()).any(1, keepdim=True)
    up = valid & (x == INF)
    finite = valid & x.isfinite()
    p, m = up.sum(1, keepdim=True), (up | finite).sum(1, keepdim=True)
    rest = k - p
    regular = ~nan & (k > 0) & (k < m) & (rest > 0)
    rest = torch.where(regular, rest, 0.5)
    ordered = torch.where(finite, x, -INF).sort(1, descending=True).values
    ordered = torch.cat([ordered, ordered[:, :1]], 1)
    whole = rest.floor().long().clamp(max=x.shape[1])
    below = ordered.gather(1, whole)
    above = ordered.gather(1, (whole - 1).clamp(min=0))
    anchor = torch.where(rest == whole, above / 2 + below / 2, below).nan_to_num(0.0, 0.0, 0.0)
    z0 = torch.where(finite, x, 0.0) - anchor
    low, high = torch.full_like(rest, -60.0), torch.full_like(rest, 60.0)
    for _ in range(68):
        d = (low + high) / 2
        z = z0 + d
        t = torch.sigmoid(-z.abs()) * finite
        over = ((z > 0) & finite).sum(1, keepdim=True) - rest
        excess = over + torch.where(z > 0, -t, t).sum(1, keepdim=True) > 0
        high, low = torch.where(excess, d, high), torch.where(excess, low, d)
    z = z0 + (low + high) / 2
    t = torch.sigmoid(-z.abs()) * finite
    w = torch.where(regular, t * (1 - t), 0.0)
    log_w = torch.where(finite, -z.abs() - 2 * torch.log1p(torch.exp(-z.abs())), -INF)
    share = torch.where(regular & finite, torch.softmax(log_w, 1).nan_to_num(0.0), 0.0)
    y = torch.where(finite, torch.sigmoid(z), 0.0)
    log_y = torch.where(finite, z.clamp(max=0) - torch.log1p(torch.exp(-z.abs())), -INF)
    y, log_y = torch.where(up, 1.0, y), torch.where(up, 0.0, log_y)
    full, none = k >= m, k <= 0
    shared = torch.where(up, (k / p).nan_to_num(1.0), 0.0)
    special = torch.where(none, 0.0, torch.where(full, (up | finite).double(), shared))
    special = torch.where(nan, math.nan, special)
    y = torch.where(regular, y, special)
    log_y = torch.where(regular, log_y, special.log())
    return Truth(y, log_y, w, share, torch.sigmoid(-z) * finite * regular, regular[:, 0])


class Errors:
    """The worst error of each kind, and the errors that exceed their limits."""

    def __init__(self) -> None:
        self.worst: dict[tuple[str, torch.dtype], float] = defaultdict(float)
        self.broken: list[str] = []

    def note(
        self, what: str, error: Tensor, of: Tensor, limit: float, dtype: torch.dtype, where: str
    ) -> None:
        """Record the largest `error`, given per row or per entry, among the rows that `of` selects."""
        error = error if error.dim() == 1 else error.nan_to_num(INF).amax(1)
        error = torch.where(of, error.nan_to_num(INF), 0.0)
        worst = float(error.max())
        self.worst[what, dtype] = max(self.worst[what, dtype], worst)
        if not worst <= limit:
            row = int(error.argmax())
            self.broken.append(f"{what} {dtype}: {worst:.3g} > {limit:.3g} in row {row} of {where}")


def check(batch: Batch, generator: torch.Generator, errors: Errors, where: str) -> None:
    """Compare the eight operators of the projection and the loss with the reference."""
    dtype = batch.x.dtype
    half = dtype not in VALUE
    base = torch.float32 if half else dtype
    truth = solve(batch)
    rows, n = batch.x.shape
    packed = batch.lengths is not None
    exists = torch.ones(rows, n, dtype=torch.bool) if not packed else torch.arange(n) < batch.lengths[:, None]
    offsets = torch.cat([torch.zeros(1, dtype=torch.long), batch.lengths.cumsum(0)]) if packed else None
    flat = (lambda a: a[exists].contiguous()) if packed else (lambda a: a)
    mask = flat(batch.valid) if batch.masked else None
    k = batch.k[0] if bool((batch.k == batch.k[0]).all()) else batch.k

    def padded(a: Tensor, fill: Tensor) -> Tensor:
        if not packed:
            return a.double()
        out = fill.clone()
        out[exists] = a.double()
        return out

    x = flat(batch.x)
    y_flat, nu = torch.ops.torchlml.forward(x, k, mask, offsets)
    log_flat, nu_log = torch.ops.torchlml.log_forward(x, k, mask, offsets)
    nu_only = torch.ops.torchlml.solve(x, k, mask, offsets)
    same = all(torch.equal(nu.nan_to_num(7e30), other.nan_to_num(7e30)) for other in (nu_log, nu_only))
    if not same:
        errors.broken.append(f"solve, forward and log_forward disagree about nu in {where}")
    y, log_y = padded(y_flat, truth.y), padded(log_flat, truth.log_y)

    def gap(got: Tensor, want: Tensor, rounding: float, smallest: float) -> Tensor:
        """Return the error beyond rounding to half precision. NaN and infinities must match exactly."""
        distance = (got - want).abs()
        distance = torch.where((got == want) | (got.isnan() & want.isnan()), 0.0, distance)
        return (
            (distance - rounding * want.abs().nan_to_num(0, 0, 0) - smallest).clamp(min=0)
            if half
            else distance
        )

    eps, tiny = (torch.finfo(dtype).eps / 2, torch.finfo(dtype).smallest_normal) if half else (0.0, 0.0)

    def note(what: str, error: Tensor, of: Tensor, limit: float) -> None:
        errors.note(what, error, of, limit, dtype, where)

    live = truth.regular
    note("y", gap(y, truth.y, eps, tiny), torch.ones(rows, dtype=torch.bool), VALUE[base])
    if not half:
        note("sum", (y.sum(1) - batch.k).abs() / batch.k.clamp(min=1), live, SUM[dtype])
    # If a gap is so wide that no entry depends on the threshold, nu and log y are not uniquely determined.
    felt = truth.w.sum(1) > 1e-200
    scale = truth.log_y.abs().nan_to_num(0, 0, 0).clamp(min=1)
    beyond = truth.log_y < -torch.finfo(dtype).max * 0.999
    error = torch.where(beyond, 0.0, gap(log_y, truth.log_y, eps, tiny) / scale)
    note("log y", error, felt | ~live, VALUE[base])
    # The incoming gradient is NaN for unavailable entries and must be ignored there.
    g = torch.randn(rows, n, generator=generator, dtype=torch.float64).to(dtype)
    g = torch.where(batch.valid & (batch.x != -INF), g, math.nan)
    clean = torch.where(truth.share > 0, g.double(), 0.0)
    largest = clean.abs().amax(1, keepdim=True).clamp(min=1e-3)
    rounding = 2 * eps  # one rounding of y in the forward pass, and one of dx
    dx, dk = torch.ops.torchlml.backward(flat(g), x, y_flat, nu, mask, offsets)
    mean = (truth.share * clean).sum(1, keepdim=True)
    want = truth.w * (clean - mean)
    note("dx", gap(padded(dx, want), want, rounding, tiny) / largest, live, GRADIENT[base])
    held = truth.w.sum(1) > (1e-30 if base == torch.float32 else 1e-200)  # sum(w) does not underflow
    note("dk", (dk - mean[:, 0]).abs() / largest[:, 0], held, 20 * GRADIENT[base])
    a = torch.where(truth.sigma_minus > 0, g.double(), 0.0) * truth.sigma_minus
    want = a - truth.share * a.sum(1, keepdim=True)
    dx, _ = torch.ops.torchlml.log_backward(flat(g), x, log_flat, nu, mask, offsets)
    error = gap(padded(dx, want), want, rounding, tiny) / (a.abs().sum(1, keepdim=True) + largest)
    note("log dx", error, felt, 20 * GRADIENT[base])
    dx, _ = torch.ops.torchlml.dual_backward(torch.ones(rows, dtype=nu.dtype), x, nu, mask, offsets)
    note("dual dx", gap(padded(dx, -truth.share), -truth.share, rounding, tiny), felt, 20 * GRADIENT[base])
    # Check the loss with labels given as a bool for each entry. Some labels have zero weight.
    observed = (torch.rand(rows, n, generator=generator) < 3 / n) & batch.valid
    c = torch.where(observed, torch.randint(4, (rows, n), generator=generator) / 2, 0.0).double()
    weight = flat(c.to(nu.dtype))
    labels = (flat(observed), None, weight)
    loss, nu_loss = torch.ops.torchlml.loss_forward(x, k, mask, offsets, *labels)
    if not torch.equal(nu.nan_to_num(7e30), nu_loss.nan_to_num(7e30)):
        errors.broken.append(f"solve and loss_forward disagree about nu in {where}")
    parts = torch.where(c > 0, c * -truth.log_y, 0.0)
    want_loss, size = parts.sum(1), (c * scale).sum(1).clamp(min=1)
    beyond = want_loss > torch.finfo(nu.dtype).max * 0.49
    error = (loss[0].double() - want_loss).abs() / size
    error = torch.where((loss[0] == want_loss) | (loss[0].isnan() & want_loss.isnan()) | beyond, 0.0, error)
    note("loss", error, felt | ~live, 4 * VALUE[base])
    dx, _ = torch.ops.torchlml.loss_backward(torch.ones((), dtype=nu.dtype), x, k, nu, mask, offsets, *labels)
    a = c * truth.sigma_minus
    want = truth.share * a.sum(1, keepdim=True) - a
    error = gap(padded(dx, want), want, rounding, tiny) / a.sum(1, keepdim=True).clamp(min=1e-3)
    note("loss dx", error, felt, 20 * GRADIENT[base])


def solve_capped(batch: Batch, upper: Tensor, euclidean: bool) -> tuple[Tensor, Tensor]:
    """Return the projection onto {0 <= y <= upper, sum(y) = k}, and a mask of the regular rows."""
    x, k, valid = batch.x.double(), batch.k[:, None], batch.valid & batch.x.isfinite()
    odd = batch.valid & ~batch.x.isfinite()
    bound = torch.where(valid, upper, 0.0)
    total = bound.sum(1, keepdim=True)
    regular = ~odd.any(1, keepdim=True) & (k > 0) & (k < total * (1 - 1e-9))
    # The anchor is near the threshold: it is the entry at which the cumulative sum of the bounds reaches k.
    order = torch.where(valid, x, -INF).argsort(1, descending=True)
    reached = bound.gather(1, order).cumsum(1) >= k
    place = order.gather(1, reached.double().argmax(1, keepdim=True))
    anchor = x.gather(1, place).nan_to_num(0.0, 0.0, 0.0)
    z0 = torch.where(valid, x, 0.0) - anchor
    width = 800.0 if not euclidean else float(upper.max()) + 2.0
    low, high = torch.full_like(anchor, -width), torch.full_like(anchor, width)

    def values(d: Tensor) -> Tensor:
        z = z0 + d
        y = torch.minimum(z.clamp(min=0) if euclidean else z.clamp(max=700).exp(), bound)
        return torch.where(valid, y, 0.0)

    for _ in range(90):
        d = (low + high) / 2
        y = values(d)
        # Subtract the entries at their bounds from k first, because the other entries may be tiny.
        full = y == bound
        excess = torch.where(full, 0.0, y).sum(1, keepdim=True) > k - torch.where(full, y, 0.0).sum(
            1, keepdim=True
        )
        high, low = torch.where(excess, d, high), torch.where(excess, low, d)
    return values((low + high) / 2), regular[:, 0]


def check_related(batch: Batch, generator: torch.Generator, errors: Errors, where: str) -> None:
    """Compare the constrained projections and `topk_mask` with their definitions, on dense rows."""
    dtype = batch.x.dtype
    if batch.lengths is not None or dtype not in VALUE:
        return
    mask = batch.valid if batch.masked else None
    one = torch.ones((), dtype=torch.float64)
    each = torch.rand(batch.x.shape, generator=generator, dtype=torch.float64) * 2
    for upper in (one, each.to(dtype).double()):
        for name in ("constrained_softmax", "constrained_sparsemax"):
            truth, regular = solve_capped(batch, upper.expand(batch.x.shape), name.endswith("sparsemax"))
            y, _ = getattr(torch.ops.torchlml, f"{name}_forward")(batch.x, batch.k, upper, mask, None)
            error = (y.double() - truth).abs()
            errors.note(f"{name[12:]} y", error, regular, 2 * VALUE[dtype], dtype, where)
            off = (y.double().sum(1) - batch.k).abs() / batch.k.clamp(min=1)
            errors.note(f"{name[12:]} sum", off, regular, SUM[dtype], dtype, where)
    k = batch.k.floor()
    chosen = torch.ops.torchlml.topk_mask(batch.x, k, mask).double()
    values = torch.where(batch.valid, batch.x.double(), -INF)
    place = values.argsort(dim=1, descending=True, stable=True).argsort(1)
    want = ((place < k[:, None]) & (values > -INF)).double()
    defined = ~values.isnan().any(1)
    errors.note("top k", (chosen - want).abs(), defined, 0.0, dtype, where)


def main() -> int:
    """Run for a given time, and print the number of rows and the worst errors."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument(
        "--seed", type=int, default=0, help="seed of the first batch; it increases by 1 for each batch"
    )
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    kernel = f"native ({loader.instruction_set()})" if loader.loaded() else "torch"
    print(f"torchlml {torchlml.__version__}, kernel {kernel}, first seed {arguments.seed}")
    errors, rows, entries, seed = Errors(), 0, 0, arguments.seed
    end = time.monotonic() + arguments.seconds
    while time.monotonic() < end and len(errors.broken) < 20:
        generator = torch.Generator().manual_seed(seed)
        dtype = DTYPES[seed % len(DTYPES)]
        batch = draw(generator, dtype)
        where = f"seed {seed} ({tuple(batch.x.shape)})"
        check(batch, generator, errors, where)
        check_related(batch, generator, errors, where)
        rows, entries, seed = rows + batch.x.shape[0], entries + batch.x.numel(), seed + 1
    print(f"{rows:,} rows, {entries:,} entries; worst errors:")
    for (what, dtype), error in sorted(errors.worst.items(), key=lambda item: str(item[0])):
        print(f"  {what:13} {str(dtype).removeprefix('torch.'):9} {error:.2g}")
    for line in errors.broken:
        print("LIMIT EXCEEDED:", line)
    return 1 if errors.broken else 0


if __name__ == "__main__":
    sys.exit(main())
