"""`torchlml bench subsets`: measure `KSubset`, and compare it with targets and other methods."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from time import process_time

import numpy as np
import numpy.typing as npt
import torch
from rich.console import Console
from torch import Tensor
from torch.nn.functional import softplus

import torchlml
from torchlml.distributions import KSubset
from torchlml_lab.bench.cases import Case
from torchlml_lab.bench.measurements import Measurement, RowFile, measured
from torchlml_lab.bench.settings import SubsetSettings, check_numbers, check_timing
from torchlml_lab.bench.timing import Quantiles, added_bytes, measurable
from torchlml_lab.engine.output import new_console, plain_table
from torchlml_lab.engine.settings import use_threads

Wide = npt.NDArray[np.longdouble]
# The log normalizer and the inclusion probabilities of a row.
Quantities = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Method:
    """A method that computes the log normalizer and the inclusion probabilities of a row."""

    name: str
    compute: Callable[[Tensor, int], Quantities]
    most_work: float
    """The method is skipped if its estimated cost, `work(n, k)`, exceeds this limit."""
    work: Callable[[int, int], float]


def exact(x: Tensor, k: int) -> Quantities:
    """Compute the log normalizer and the inclusion probabilities with `torchlml.KSubset`."""
    d = KSubset(k, logits=x, validate_args=False)
    return d.log_normalizer, d.mean


def recursion(x: Tensor, k: int) -> Quantities:
    """Compute the log normalizer and the inclusion probabilities by the O(nk) recursion of SIMPLE.

    The recursion (Ahmed et al., 2023) computes the log normalizer, whose gradient is the vector of
    inclusion probabilities.
    """
    x = x.detach().requires_grad_()
    log_e = torch.full((k + 1,), -1e300, dtype=x.dtype)
    log_e[0] = 0.0
    for value in x.unbind():
        log_e = torch.cat([log_e[:1], torch.logaddexp(log_e[1:], log_e[:-1] + value)])
    (inclusion,) = torch.autograd.grad(log_e[k], x)
    return log_e[k].detach(), inclusion


def untilted_fourier(x: Tensor, k: int) -> Quantities:
    """Compute the log normalizer by a Fourier transform, and the inclusion probabilities as its gradient.

    The transform computes the probability of exactly k heads if coin i comes up heads with probability
    sigmoid(x_i). It is computed in complex64, and its result is clamped to at least eps.
    """
    x = x.detach().requires_grad_()
    n, p = len(x), x.float().sigmoid()
    angle = torch.arange(n + 1) * (2 * torch.pi / (n + 1))
    root = torch.polar(torch.ones(n + 1), angle)
    log_terms = torch.log(1 + p * (root - 1).unsqueeze(1)).sum(1)
    chance = (torch.exp(log_terms) * torch.polar(torch.ones(n + 1), -k * angle)).mean().real
    log_normalizer = chance.clamp(min=torch.finfo(torch.float32).eps).log() + softplus(x.float()).sum()
    (inclusion,) = torch.autograd.grad(log_normalizer, x)
    return log_normalizer.detach(), inclusion


METHODS = (
    Method("KSubset", exact, float("inf"), lambda n, k: n),
    Method("recursion", recursion, 2e7, lambda n, k: n * (k + 1000)),
    Method("untilted Fourier", untilted_fourier, 2e7, lambda n, k: n * n),
)


def gumbel_top_k(x: Tensor, k: int) -> Tensor:
    """Draw k entries without replacement (Plackett–Luce) as the top k of the logits plus Gumbel noise."""
    noise = -torch.empty_like(x).exponential_().log()
    return torch.zeros_like(x).scatter(-1, (x + noise).topk(k).indices, 1.0)


SAMPLERS: dict[str, Callable[[Tensor, int], Tensor]] = {
    "KSubset": lambda x, k: KSubset(k, logits=x, validate_args=False).sample(),
    "Gumbel top-k": gumbel_top_k,
    "sample_subset": torchlml.sample_subset,
}


def truth(x: Tensor, k: int) -> tuple[float, float]:
    """Compute the log normalizer and the largest entry's inclusion probability in extended precision."""
    values = np.sort(x.double().numpy().astype(np.longdouble))
    # The largest entry comes last, so that both results share all steps but the last.
    before = _log_polynomials(values[:-1], k)
    total = np.logaddexp(before[k], before[k - 1] + values[-1])
    return float(total), float(np.exp(before[k - 1] + values[-1] - total))


def _log_polynomials(values: Wide, k: int) -> Wide:
    log_e = np.full(k + 1, -np.inf, dtype=np.longdouble)
    log_e[0] = 0
    for value in values:
        log_e[1:] = np.logaddexp(log_e[1:], log_e[:-1] + value)
    return log_e


_OPERATOR = "subsets"
_QUANTITIES = "normalizer+inclusion"
# n, k, and the target time in seconds for computing a log probability and the mean for one row.
LONG_ROWS = ((1_000_000, 10, 0.2), (1_000_000, 1000, 0.5), (1_000_000, 100_000, 2.0))
BATCHES = ((1000, 5), (1000, 50))
_BATCH, _RATIO = 256, 50.0
_SAMPLES, _SAMPLE_SECONDS = 1000, 0.5
# The largest n * k for which the extended-precision recursion finishes in seconds.
_MOST_TRUTH = 2e7


def main(settings: SubsetSettings) -> None:
    """Run the benchmark."""
    run(settings, new_console())


def run(settings: SubsetSettings, console: Console) -> None:
    """Take all measurements with one thread, append them to the CSV, and print two tables."""
    check_timing(settings)
    check_numbers("--sizes", settings.sizes, 2)
    check_numbers("--ks", settings.ks, 1)
    check_numbers("--scale", (settings.scale,), 0)
    file = RowFile(settings.csv)
    table = plain_table("targets, one thread", ("work", "n", "k", "time", "target", "met"))
    with use_threads(1):
        for row, text, target, met in targets(settings):
            file.add([row])
            table.add_row(row.mode, f"{row.n:,}", f"{row.k:,}", text, target, "yes" if met else "no")
        console.print(table)
        heads = ("n", "k", "method", "ms", "MiB", "error of log Z", "error of inclusion")
        table = plain_table(f"one row, scale {settings.scale:g}, one thread", heads)
        for n in settings.sizes:
            for k in (k for k in settings.ks if k < n):
                for rows in compare(n, k, settings):
                    file.add(rows)
                    table.add_row(f"{n:,}", f"{k:,}", rows[0].provider, *_cells(rows))
                table.add_section()
        console.print(table)
    if lacks := file.lacks():
        raise RuntimeError(lacks)
    console.print(f"Results written to {settings.csv}.", soft_wrap=True)


def targets(settings: SubsetSettings) -> Iterator[tuple[Measurement, str, str, bool]]:
    """Yield, for each target, the measurement, the measured and target values, and whether it is met."""
    for n, k, seconds in LONG_ROWS:
        case = Case(n, k, 1, 1.0, "float32", 1)
        x = case.logits()[0]
        members = x.topk(k).indices
        time = _times(partial(_log_prob_and_mean, x, k, members), settings)
        row = _row("KSubset", "log_prob+mean", case, time.times(1e3), "time", "ms")
        yield row, f"{time.p50:.3f} s", f"{seconds:g} s", time.p50 <= seconds
    for n, k in BATCHES:
        case = Case(n, k, _BATCH, 1.0, "float32", 1)
        x = case.logits().requires_grad_()
        members = torch.arange(k).expand(_BATCH, k)
        calls = (
            lambda x=x, k=k, members=members: torch.autograd.grad(
                KSubset(k, logits=x, validate_args=False).log_prob(members).sum(), x
            ),
            lambda x=x: torch.autograd.grad(x.log_softmax(-1)[:, 0].sum(), x),
        )
        pairs = [(_once(calls[0]), _once(calls[1])) for _ in range(4 * settings.repetitions + 1)][1:]
        time, ratio = (
            Quantiles.of(list(each)) for each in ((a for a, _ in pairs), (a / b for a, b in pairs))
        )
        mode = "log_prob+backward"
        row = measured(_OPERATOR, "KSubset", mode, case, time.times(1e3), ratio, len(pairs), unit="ms")
        yield row, f"{ratio.p50:.1f} × softmax", f"{_RATIO:g} × softmax", ratio.p50 <= _RATIO
    case = Case(1000, 50, 1, 1.0, "float32", 1)
    d = KSubset(50, logits=case.logits()[0])
    time = _times(lambda: d.sample((_SAMPLES,)), settings)
    row = _row("KSubset", f"{_SAMPLES} samples", case, time.times(1e3), "time", "ms")
    yield row, f"{time.p50:.3f} s", f"{_SAMPLE_SECONDS:g} s", time.p50 <= _SAMPLE_SECONDS


def _log_prob_and_mean(x: Tensor, k: int, members: Tensor) -> tuple[Tensor, Tensor]:
    d = KSubset(k, logits=x)
    return d.log_prob(members), d.mean


def compare(n: int, k: int, settings: SubsetSettings) -> Iterator[list[Measurement]]:
    """Yield the measurements for each method and sampler on one row: time, memory and errors."""
    case = Case(n, k, 1, settings.scale, "float64", 1)
    x = case.logits()[0]
    known = truth(x, k) if n * k <= _MOST_TRUTH and n <= 1e5 else None
    largest = int(x.argmax())
    for method in METHODS:
        if method.work(n, k) > method.most_work:
            continue

        def call(compute: Callable[[Tensor, int], object] = method.compute) -> object:
            return compute(x, k)

        rows = _cost(method.name, _QUANTITIES, case, call, settings)
        if known is not None:
            log_normalizer, inclusion = method.compute(x, k)
            errors = (float(log_normalizer) / known[0] - 1, float(inclusion[largest]) / known[1] - 1)
            for name, error in zip(("error of log Z", "error of inclusion"), errors, strict=True):
                rows.append(_row(method.name, _QUANTITIES, case, _constant(abs(error)), name, "relative"))
        yield rows
    exact = KSubset(k, logits=x).mean
    for name, draw in SAMPLERS.items():

        def sample(draw: Callable[[Tensor, int], Tensor] = draw) -> Tensor:
            return draw(x, k)

        rows = _cost(f"{name}, one sample", "sample", case, sample, settings)
        if name == "sample_subset":
            error = float((torchlml.lml(x, k) - exact).abs().max())
        elif name == "Gumbel top-k" and n <= 1000:
            error = float((_frequencies(sample, 4000) - exact).abs().max())
        else:
            yield rows
            continue
        rows.append(
            _row(
                f"{name}, one sample",
                "sample",
                case,
                _constant(error),
                "error of inclusion",
                "absolute",
            )
        )
        yield rows


def _frequencies(sample: Callable[[], Tensor], count: int) -> Tensor:
    total = sample()
    for _ in range(count - 1):
        total = total + sample()
    return total / count


def _cost(
    provider: str, mode: str, case: Case, call: Callable[[], object], settings: SubsetSettings
) -> list[Measurement]:
    """Return the time of a call, and its memory use if the system can measure it."""
    rows = [_row(provider, mode, case, _times(call, settings).times(1e3), "time", "ms")]
    if measurable():
        rows.append(_row(provider, mode, case, _constant(added_bytes(call) / 2**20), "memory", "MiB"))
    return rows


def _times(call: Callable[[], object], settings: SubsetSettings) -> Quantiles:
    """Measure CPU seconds per call after a warm-up call, up to the limits on calls and total time."""
    call()
    samples: list[float] = []
    while not samples or (len(samples) < settings.repetitions and sum(samples) < settings.seconds):
        samples.append(_once(call))
    return Quantiles.of(samples)


def _once(call: Callable[[], object]) -> float:
    """Measure the CPU time of a call, which is less affected by other programs than wall-clock time."""
    begin = process_time()
    call()
    return process_time() - begin


def _row(provider: str, mode: str, case: Case, value: Quantiles, metric: str, unit: str) -> Measurement:
    """Return the CSV row of a measurement without a ratio to a baseline."""
    return measured(_OPERATOR, provider, mode, case, value, _constant(1.0), 1, metric=metric, unit=unit)


def _constant(value: float) -> Quantiles:
    return Quantiles(value, value, value)


def _cells(rows: Sequence[Measurement]) -> Iterator[str]:
    """Yield time, memory and both errors as text, with a dash for values that were not measured."""
    found = {row.metric: row for row in rows}
    for metric, form in (
        ("time", ".3g"),
        ("memory", ".1f"),
        ("error of log Z", ".0e"),
        ("error of inclusion", ".0e"),
    ):
        yield format(found[metric].p50, form) if metric in found else "-"
