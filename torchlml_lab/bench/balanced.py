"""`torchlml bench balanced`: the two-sided projection as a ratio to `lml` on the same matrix."""

from collections.abc import Callable

import torch
from rich.console import Console
from torch import Tensor

import torchlml
from torchlml_lab.bench.cases import Case
from torchlml_lab.bench.measurements import RowFile, measured
from torchlml_lab.bench.settings import BalancedSettings, check_choices, check_numbers, check_timing
from torchlml_lab.bench.timing import race
from torchlml_lab.engine.output import ProgressBar, new_console, plain_table
from torchlml_lab.engine.settings import cores, use_threads

_SHAPES = ((4096, 64, 4), (16_384, 256, 8))  # tokens, experts, k
# Mode, competitor and the largest ratio to the baseline that is the target.
_TARGETS = {
    ("forward", "cold start"): 15.0,
    ("forward", "warm start"): 6.0,
    ("backward", "balanced_lml"): 4.0,
}


def main(settings: BalancedSettings) -> None:
    """Run the benchmark."""
    run(settings, new_console())


def run(settings: BalancedSettings, console: Console) -> None:
    """Time every shape and skew, append the rows to the CSV and print one table."""
    check_numbers("--threads", (settings.threads,), 1, cores())
    check_numbers("--skews", settings.skews, 0)
    check_timing(settings)
    check_choices("--dtype", (settings.dtype,), ("float32", "float64", "bfloat16"))
    file = RowFile(settings.csv)
    jobs = [(shape, skew) for shape in _SHAPES for skew in settings.skews]
    file.announce(f"{len(jobs)} matrices of about {settings.seconds:g} s each", console)
    heads = ("balanced_lml", "tokens", "experts", "k", "skew", "ms", "ratio", "target", "met")
    table = plain_table(f"{settings.dtype}: time of a call, and its ratio to lml", heads)
    # Until a process has freed one large block, glibc gives every freed megabyte back to the system, and page
    # faults dominate these times. A training process has done that long ago.
    torch.empty(7 * 2**20)
    with ProgressBar(console) as progress, use_threads(settings.threads):
        task = progress.add_task("matrices", total=len(jobs))
        for (tokens, experts, k), skew in jobs:
            case = Case(experts, k, tokens, skew, settings.dtype, settings.threads)
            for mode, calls in _competitors(case).items():
                timings = race(calls, "lml", settings.repetitions, settings.seconds / 2)
                for name, timing in timings.items():
                    value = timing.seconds.times(1e6)
                    file.add([measured("balanced", name, mode, case, value, timing.ratio, timing.rounds)])
                    target = _TARGETS.get((mode, name))
                    if target is not None:
                        label = name if mode == "forward" else mode
                        numbers = (
                            f"{timing.seconds.p50 * 1e3:.3g}",
                            f"{timing.ratio.p50:.1f}",
                            f"{target:g}",
                        )
                        met = "yes" if timing.ratio.p50 <= target else "no"
                        table.add_row(label, f"{tokens}", f"{experts}", f"{k}", f"{skew:g}", *numbers, met)
            progress.advance(task)
    console.print(table)
    console.print(
        "Forward: the ratio to lml's forward. Backward: balanced_lml's backward alone, as a ratio to lml's "
        "forward and backward. Warm start: from the multipliers of another batch with the same preferences.",
        soft_wrap=True,
    )
    if lacks := file.lacks():
        raise RuntimeError(lacks)
    console.print(f"The rows are in {settings.csv}.", soft_wrap=True)


def _competitors(case: Case) -> dict[str, dict[str, Callable[[], object]]]:
    """The calls to time in each mode; the name of the baseline is lml."""
    generator = torch.Generator().manual_seed(case.n)
    preference = case.scale * torch.randn(case.n, generator=generator)

    def batch() -> Tensor:
        logits = torch.randn(case.batch, case.n, generator=generator) + preference
        return logits.to(getattr(torch, case.dtype))

    x, grad = batch(), batch()
    start = torchlml.balanced_lml_dual(batch(), case.k)[1]
    leaf = x.clone().requires_grad_()
    y = torchlml.balanced_lml(leaf, case.k)
    forward: dict[str, Callable[[], object]] = {
        "lml": lambda: torchlml.lml(x, case.k),
        "cold start": lambda: torchlml.balanced_lml(x, case.k),
        "warm start": lambda: torchlml.balanced_lml(x, case.k, start=start),
    }
    backward: dict[str, Callable[[], object]] = {
        "lml": lambda: torch.autograd.grad(torchlml.lml(leaf, case.k), leaf, grad),
        "balanced_lml": lambda: torch.autograd.grad(y, leaf, grad, retain_graph=True),
    }
    return {"forward": forward, "backward": backward}
