"""`torchlml bench scale`: very large label spaces, on one machine and sharded across two processes."""

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence

import torch
from rich.console import Console
from torch import Tensor, nn
from torch.nn import functional as F

import torchlml
from torchlml_lab.bench.cases import Case
from torchlml_lab.bench.measurements import Measurement, RowFile, measured
from torchlml_lab.bench.settings import ScaleSettings, check_numbers, check_timing
from torchlml_lab.bench.timing import Quantiles, added_bytes, measurable, race
from torchlml_lab.engine.output import ProgressBar, new_console, plain_table
from torchlml_lab.engine.settings import cores, use_threads

_K = 5
_BOTH = "forward+backward"
_SCALES = (1.0, 3.0, 12.0, 100.0)
_TORCH = "linear_cross_entropy"  # available since torch 2.13
_WAYS = ("linear_lml_loss", "lml_loss of linear", "cross_entropy of linear", _TORCH)


def main(settings: ScaleSettings) -> None:
    """Run the benchmark."""
    run(settings, new_console())


def run(settings: ScaleSettings, console: Console) -> None:
    """Run all measurements, append their rows to the CSV, and print one table."""
    check_numbers("--threads", (settings.threads,), 1, cores())
    check_timing(settings)
    for name in ("batch", "labels", "features", "most_labels", "longest_row"):
        check_numbers(f"--{name.replace('_', '-')}", (getattr(settings, name),), 1)
    file = RowFile(settings.csv)
    parts: list[Callable[[ScaleSettings], Iterator[Measurement]]] = [times, long_row, rounds]
    parts += [memory, peak] if measurable() else []
    heads = ("measurement", "provider", "batch", "n", "value", "unit", "ratio")
    table = plain_table("large label spaces", heads)
    with ProgressBar(console) as progress, use_threads(settings.threads):
        task = progress.add_task("scale", total=len(parts))
        for part in parts:
            for row in part(settings):
                file.add([row])
                shown = (f"{row.operator}, {row.mode}", row.provider, f"{row.batch}", f"{row.n}")
                table.add_row(*shown, f"{row.p50:.4g}", row.unit, f"{row.ratio_p50:.2f}")
            table.add_section()
            progress.advance(task)
    console.print(table)
    if lacks := file.lacks():
        raise RuntimeError(lacks)
    console.print(f"Results written to {settings.csv}.", soft_wrap=True)


def steps(batch: int, labels: int, features: int) -> dict[str, Callable[[], tuple[Tensor, ...]]]:
    """Return a training step of each implementation of a linear layer with a loss, ours first."""
    generator = torch.Generator().manual_seed(0)
    h = torch.randn(batch, features, generator=generator).requires_grad_()
    w = (torch.randn(labels, features, generator=generator) / features**0.5).requires_grad_()
    target = torch.randint(labels, (batch,), generator=generator)
    # This uses about as much memory as ours. With the default options it is twenty times slower.
    chunks = nn.LinearCrossEntropyOptions(batch_chunk_size=64) if hasattr(F, _TORCH) else None
    losses = (
        lambda: torchlml.linear_lml_loss(h, w, target, _K),
        lambda: torchlml.lml_loss(F.linear(h, w), target, _K),
        lambda: F.cross_entropy(F.linear(h, w), target),
        lambda: F.linear_cross_entropy(h, w, target, options=chunks),
    )
    ways = [way for way in _WAYS if way != _TORCH or hasattr(F, way)]
    return {way: _step(loss, h, w) for way, loss in zip(ways, losses, strict=False)}


def _step(loss: Callable[[], Tensor], *inputs: Tensor) -> Callable[[], tuple[Tensor, ...]]:
    return lambda: torch.autograd.grad(loss(), inputs)


def times(settings: ScaleSettings) -> Iterator[Measurement]:
    """Measure the time of a step, relative to the loss on the full logit matrix."""
    case = Case(settings.labels, _K, settings.batch, 1.0, "float32", settings.threads)
    calls = steps(case.batch, case.n, settings.features)
    for name, timing in race(calls, _WAYS[1], settings.repetitions, settings.seconds).items():
        value = timing.seconds.times(1e6)
        yield measured("linear loss", name, _BOTH, case, value, timing.ratio, timing.rounds)


def memory(settings: ScaleSettings) -> Iterator[Measurement]:
    """Measure the memory of a step in addition to the weight gradient, relative to the default budget."""
    for batch in (settings.batch // 4 or 1, settings.batch, 4 * settings.batch):
        calls = steps(batch, settings.labels, settings.features)
        # Two copies of all logits of the largest batch exceed the memory of many machines.
        ways = _WAYS[:1] if batch > settings.batch else _WAYS[:3]
        for name in ways:
            added = (added_bytes(calls[name]) - 4 * settings.labels * settings.features) / 2**20
            case = Case(settings.labels, _K, batch, 1.0, "float32", settings.threads)
            yield _number("linear loss", name, "beyond the gradient", case, added, "MiB", added / 64)


def peak(settings: ScaleSettings) -> Iterator[Measurement]:
    """Measure the peak memory of a new process that runs one step, relative to 3 GiB."""
    case = Case(settings.most_labels, _K, 512, 1.0, "float32", settings.threads)
    arguments = [str(number) for number in (case.batch, case.n, settings.features, case.threads)]
    command = [sys.executable, "-m", "torchlml_lab.bench.scale", "step", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    highest = json.loads(done.stdout)["bytes"] / 2**20
    yield _number("linear loss", _WAYS[0], "whole process", case, highest, "MiB", highest / 3072)


def long_row(settings: ScaleSettings) -> Iterator[Measurement]:
    """Measure the time of one long row, relative to softmax."""
    case = Case(settings.longest_row, _K, 1, 3.0, "float32", settings.threads)
    x = case.logits()
    calls = {"softmax": lambda: torch.softmax(x, -1), "lml": lambda: torchlml.lml(x, _K)}
    for name, timing in race(calls, "softmax", settings.repetitions, settings.seconds).items():
        value = timing.seconds.times(1e6)
        yield measured("long row", name, "forward", case, value, timing.ratio, timing.rounds)


def rounds(settings: ScaleSettings) -> Iterator[Measurement]:
    """Count the communication rounds of `lml` between two processes by logit scale (softmax needs two)."""
    with tempfile.TemporaryDirectory() as folder:
        worker = [sys.executable, "-m", "torchlml_lab.bench.scale", "rounds"]
        command = [*worker, folder, str(settings.labels)]
        workers = [
            subprocess.Popen([*command, str(rank), *map(str, _SCALES)], stdout=subprocess.PIPE, text=True)
            for rank in range(2)
        ]
        said = [worker.communicate()[0] for worker in workers]
    if any(worker.returncode for worker in workers):
        raise RuntimeError("The worker processes that count communication rounds failed.")
    for scale, number in zip(_SCALES, json.loads(said[0]), strict=True):
        case = Case(settings.labels, _K, 16, scale, "float32", 1)
        yield _number("two processes", "lml", "forward", case, number, "rounds", number / 2)


def _number(
    operator: str, name: str, mode: str, case: Case, value: float, unit: str, ratio: float
) -> Measurement:
    once, relative = Quantiles(value, value, value), Quantiles(ratio, ratio, ratio)
    metric = "memory" if unit == "MiB" else "rounds"
    return measured(operator, name, mode, case, once, relative, 1, metric=metric, unit=unit)


def take_step(arguments: Sequence[str]) -> None:
    """Run the step. The arguments are the numbers of rows, labels, features and threads."""
    import resource  # not available on Windows

    rows, labels, features, threads = map(int, arguments)
    torch.set_num_threads(threads)
    steps(rows, labels, features)["linear_lml_loss"]()
    highest = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    sys.stdout.write(json.dumps({"bytes": highest}))


def count_rounds(arguments: Sequence[str]) -> None:
    """Count the communication rounds. Arguments: rendezvous directory, number of labels, rank, scales."""
    # Imported here, because imports at module level would count toward the memory that `take_step` reports.
    import torch.distributed as dist
    from torch.distributed import FileStore  # type: ignore[attr-defined]
    from torch.distributed.tensor.debug import CommDebugMode

    folder, labels, rank, *scales = arguments
    torch.set_num_threads(1)
    store = FileStore(f"{folder}/store", 2)
    dist.init_process_group("gloo", store=store, rank=int(rank), world_size=2)
    found = []
    for scale in map(float, scales):
        generator = torch.Generator().manual_seed(int(rank))
        x = torch.randn(16, int(labels) // 2, generator=generator) * scale
        with CommDebugMode() as counted:
            torchlml.lml(x, 5, group=dist.group.WORLD)
        found.append(counted.get_total_counts())
    sys.stdout.write(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":  # the processes that `peak` and `rounds` start
    {"step": take_step, "rounds": count_rounds}[sys.argv[1]](sys.argv[2:])
