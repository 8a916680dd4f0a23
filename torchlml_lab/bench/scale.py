"""`torchlml bench scale` and `torchlml bench training`: time and memory for many labels and samples."""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from torch import Tensor, nn
from torch.nn import functional as F

import torchlml
from torchlml_lab.bench.cases import Case
from torchlml_lab.bench.measurements import Measurement, RowFile, measured
from torchlml_lab.bench.settings import ScaleSettings, TrainingSettings, check_numbers, check_timing
from torchlml_lab.bench.timing import Quantiles, added_bytes, measurable, race
from torchlml_lab.cli_errors import BadInput
from torchlml_lab.engine.output import ProgressBar, StudyTable, markdown_table, new_console, plain_table
from torchlml_lab.engine.settings import cores, use_threads
from torchlml_lab.files import check_file

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
    """Return a training step for each implementation of a linear layer with a loss, in `_WAYS` order."""
    generator = torch.Generator().manual_seed(0)
    h = torch.randn(batch, features, generator=generator).requires_grad_()
    w = (torch.randn(labels, features, generator=generator) / features**0.5).requires_grad_()
    target = torch.randint(labels, (batch,), generator=generator)
    # With this chunk size, torch's loss uses about as much memory as `linear_lml_loss`. With the default
    # options, torch's loss takes twenty times as long.
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
    """Measure the time of a step, relative to `lml_loss` on the full logit matrix."""
    case = Case(settings.labels, _K, settings.batch, 1.0, "float32", settings.threads)
    calls = steps(case.batch, case.n, settings.features)
    for name, timing in race(calls, _WAYS[1], settings.repetitions, settings.seconds).items():
        value = timing.seconds.times(1e6)
        yield measured("linear loss", name, _BOTH, case, value, timing.ratio, timing.rounds)


def memory(settings: ScaleSettings) -> Iterator[Measurement]:
    """Measure the memory that a step uses beyond the weight gradient, relative to a budget of 64 MiB."""
    for batch in (settings.batch // 4 or 1, settings.batch, 4 * settings.batch):
        calls = steps(batch, settings.labels, settings.features)
        # For the largest batch, two copies of all logits (1.6 GB by default) could exceed the memory of a
        # small machine.
        ways = _WAYS[:1] if batch > settings.batch else _WAYS[:3]
        for name in ways:
            added = (added_bytes(calls[name]) - 4 * settings.labels * settings.features) / 2**20
            case = Case(settings.labels, _K, batch, 1.0, "float32", settings.threads)
            yield _number("linear loss", name, "beyond the gradient", case, added, "MiB", added / 64)


def peak(settings: ScaleSettings) -> Iterator[Measurement]:
    """Measure the peak memory of a new process that runs one step, relative to a budget of 3 GiB."""
    case = Case(settings.most_labels, _K, 512, 1.0, "float32", settings.threads)
    arguments = [str(number) for number in (case.batch, case.n, settings.features, case.threads)]
    command = [sys.executable, "-m", "torchlml_lab.bench.scale", "step", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    highest = json.loads(done.stdout)["bytes"] / 2**20
    yield _number("linear loss", _WAYS[0], "whole process", case, highest, "MiB", highest / 3072)


def long_row(settings: ScaleSettings) -> Iterator[Measurement]:
    """Measure the time of lml on one long row, relative to softmax."""
    case = Case(settings.longest_row, _K, 1, 3.0, "float32", settings.threads)
    x = case.logits()
    calls = {"softmax": lambda: torch.softmax(x, -1), "lml": lambda: torchlml.lml(x, _K)}
    for name, timing in race(calls, "softmax", settings.repetitions, settings.seconds).items():
        value = timing.seconds.times(1e6)
        yield measured("long row", name, "forward", case, value, timing.ratio, timing.rounds)


def rounds(settings: ScaleSettings) -> Iterator[Measurement]:
    """Count `lml`'s communication rounds between two processes, relative to the two rounds of softmax."""
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
    """Run one training step, and print its peak memory.

    The arguments are the numbers of rows, labels, features and threads.
    """
    import resource  # not available on Windows

    rows, labels, features, threads = map(int, arguments)
    torch.set_num_threads(threads)
    steps(rows, labels, features)["linear_lml_loss"]()
    highest = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    sys.stdout.write(json.dumps({"bytes": highest}))


def count_rounds(arguments: Sequence[str]) -> None:
    """Count and print the communication rounds for each logit scale.

    The arguments are a rendezvous directory, the number of labels, the rank and the scales.
    """
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


@dataclass(frozen=True)
class TrainingRecord:
    """The speed and memory of `torchlml train multilabel` on one file."""

    samples: int
    labels: int
    processes: int
    threads: int
    """The number of threads per process."""
    file_mb: float
    prepare_seconds: float
    """Seconds to read the file, prepare the inputs, and fit the model's linear part if it has one."""
    samples_per_second: float
    epoch_seconds: float
    """The time for one pass over the training samples at this speed, without validation."""
    forecast_seconds: float
    """The time that `train` forecasts for this pass, or 0 with several processes."""
    memory_mb: float
    """The peak memory of the first process."""
    forecast_mb: float
    seconds: float
    """The duration of the whole measurement."""


TRAINING = StudyTable(TrainingRecord, lambda row: (-row.threads, row.processes, row.samples, row.labels))
_PER_SAMPLE = 3  # labels per sample, or more if needed for every label to occur
_MOST_PER_SAMPLE = 10
_TOGETHER = (100_000, 10_000)  # maximum samples and labels in the runs with one thread per process


def training(settings: TrainingSettings) -> None:
    """Measure all sizes that are not in the CSV yet, each in a new process, and print the tables."""
    check_numbers("--samples", settings.samples, 100)
    check_numbers("--labels", settings.labels, 2)
    check_numbers("--features", (settings.features,), 1)
    check_numbers("--processes", settings.processes, 1, cores())
    check_numbers("--threads", (settings.threads,), 1, cores())
    if not settings.seconds > 0:
        raise BadInput(f"`--seconds` must be positive, but it is {settings.seconds}.")
    check_file("--csv", settings.csv)
    console = new_console()
    rows = TRAINING.read(settings.csv, "--csv") if settings.csv.exists() else []
    done = {(row.samples, row.labels, row.processes, row.threads) for row in rows}
    sizes = [(s, n) for s in settings.samples for n in settings.labels if n <= _MOST_PER_SAMPLE * s]
    cells = [(*size, 1, settings.threads) for size in sizes]
    together = [(s, n) for s, n in sizes if s <= _TOGETHER[0] and n <= _TOGETHER[1]]
    cells += [(*max(together), processes, 1) for processes in settings.processes if together]
    for cell in dict.fromkeys(cells):
        if cell not in done:
            said = "{} samples, {} labels, processes: {}, threads: {}".format(*cell)
            console.print(said, highlight=False)
            rows.append(_trained(settings, *cell))
            TRAINING.write(settings.csv, rows)
    sizes_of = ("samples", "labels", "processes", "threads")
    heads = (*sizes_of, "samples/s", "epoch, s", "forecast, s", "MB", "forecast, MB")
    table = plain_table("torchlml train multilabel", heads, left=0)
    for row in sorted(rows, key=TRAINING.order):
        numbers = (row.samples_per_second, row.epoch_seconds, row.forecast_seconds, row.memory_mb)
        shown = (f"{number:.0f}" for number in (*numbers, row.forecast_mb))
        table.add_row(*(str(getattr(row, name)) for name in sizes_of), *shown)
    console.print(table)
    console.print(training_table(rows), soft_wrap=True, highlight=False, markup=False)
    console.print(f"Results written to {settings.csv}.", soft_wrap=True)


def training_table(rows: Sequence[TrainingRecord]) -> str:
    """Format the speeds and the forecasts as two Markdown tables.

    Only the single-process runs with the largest number of threads are included.
    """

    def speed(row: TrainingRecord) -> str:
        return f"{row.samples_per_second:,.0f}/s, {row.memory_mb / 1000:.1f} GB"

    def forecasts(row: TrainingRecord) -> str:
        return (
            f"{row.epoch_seconds:,.0f} s ({row.forecast_seconds:,.0f}), "
            f"{row.memory_mb / 1000:.1f} GB ({row.forecast_mb / 1000:.1f})"
        )

    threads = max((row.threads for row in rows), default=1)
    alone = {(row.samples, row.labels): row for row in rows if (row.processes, row.threads) == (1, threads)}
    labels = sorted({n for _, n in alone})
    heads = ("samples", *(f"{n:,} labels" for n in labels))
    tables = []
    for title, shown in (
        ("Training speed in samples per second, and peak memory:", speed),
        ("Time per epoch at this speed and peak memory, with forecasts in parentheses:", forecasts),
    ):
        lines = []
        for samples in sorted({samples for samples, _ in alone}):
            cells = (alone.get((samples, n)) for n in labels)
            lines.append((f"{samples:,}", *(shown(row) if row else "–" for row in cells)))
        tables.append(markdown_table(title, heads, lines))
    return "\n\n".join(tables)


def _trained(
    settings: TrainingSettings, samples: int, labels: int, processes: int, threads: int
) -> TrainingRecord:
    """Measure one size in new processes."""
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "samples.svm"
        write_samples(file, samples, labels, settings.features)
        size = file.stat().st_size / 1e6
        worker = ["-m", "torchlml_lab.bench.scale", "train", str(file), str(settings.seconds), str(threads)]
        launcher = ["-m", "torch.distributed.run", "--nproc-per-node", str(processes)]
        command = [sys.executable, *(launcher if processes > 1 else []), *worker]
        found = json.loads(_output(command, {"OMP_NUM_THREADS": str(threads)}))
    return TrainingRecord(
        samples=samples,
        labels=labels,
        processes=processes,
        threads=threads,
        file_mb=round(size, 1),
        seconds=time.perf_counter() - start,
        **{name: round(value, 1) for name, value in found.items()},
    )


def _output(command: Sequence[str], variables: dict[str, str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | variables)
    if done.returncode:
        raise RuntimeError(f"The measurement failed: {done.stderr.strip()[-500:]}")
    return done.stdout


def _highest_mb() -> float:
    """Return the peak memory in MB of this process."""
    import resource  # not available on Windows

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6


def write_samples(path: Path, samples: int, labels: int, features: int) -> None:
    """Write a random svmlight file in which every label occurs and some features are frequent.

    Args:
        path: The file.
        samples: The number of samples. Each has 10 to 21 features before duplicates are removed.
        labels: The number of labels.
        features: The number of features.
    """
    random = np.random.default_rng(0)
    each = max(_PER_SAMPLE, -(-labels // samples))
    names = [str(label) for label in range(labels)]
    pairs = [f"{feature}:{value:.4f}" for feature, value in enumerate(random.random(features) + 0.01)]
    with path.open("w", encoding="ascii") as file:
        for start in range(0, samples, 10_000):
            count = min(10_000, samples - start)
            lengths = random.integers(10, 22, count)
            drawn = (features * random.random((count, 21)) ** 3).astype(np.int64)
            for row in range(count):
                first = each * (start + row)
                heads = ",".join(names[(first + place) % labels] for place in range(min(each, labels)))
                tails = " ".join(
                    pairs[feature] for feature in sorted(set(drawn[row, : lengths[row]].tolist()))
                )
                file.write(f"{heads} {tails}\n")


def train_some(arguments: Sequence[str]) -> None:
    """Train for a given time. The arguments are a sample file, the time in seconds and the number of threads.

    With torchrun, the samples of each batch are divided among the processes, and the first process prints the
    results.
    """
    from accelerate import Accelerator

    from torchlml_lab.engine.loop import EpochBatches, needs, train_step
    from torchlml_lab.multilabel.samples import read
    from torchlml_lab.multilabel.settings import MultilabelSettings
    from torchlml_lab.multilabel.training import build_task

    file, seconds, threads = arguments
    accelerator = Accelerator(cpu=True)
    rank, processes = accelerator.process_index, accelerator.num_processes
    torch.set_num_threads(int(threads))
    torch.manual_seed(0)
    settings = MultilabelSettings(train=Path(file), cpu=True)
    start = time.perf_counter()
    task = build_task(settings, read(settings)).task
    prepared = time.perf_counter() - start
    torch.set_num_threads(min(task.threads or int(threads), int(threads)))
    samples: Any = task.training
    expected = needs(task, settings.batch_size) if processes == 1 else None
    model, optimizer = accelerator.prepare(task.model, task.optimizer)
    order = EpochBatches(len(samples), settings.batch_size, 0, shuffle=True)
    steps, start, rate = 0, 0.0, 0.0
    for step, rows in enumerate(order):
        batch = samples.__getitems__(rows[rank::processes])
        train_step(model.train(), optimizer, task.loss, batch, accelerator)
        if step == 0:  # not timed, because it allocates the optimizer state
            start = time.perf_counter()
            continue
        steps += 1
        elapsed = torch.tensor(time.perf_counter() - start)
        taken = float(accelerator.reduce(elapsed, "mean"))  # so that all processes stop at the same step
        rate = steps * settings.batch_size / taken
        if taken > float(seconds):
            break
    held_out: Any = task.held_out["validation"]
    with torch.no_grad():
        some = held_out.__getitems__(range(min(len(held_out), task.evaluated * settings.batch_size)))
        task.measure(task.model.eval(), [some], accelerator)
    found = {
        "samples_per_second": rate,
        "epoch_seconds": len(samples) / rate,
        "prepare_seconds": prepared,
        "forecast_seconds": len(order) * expected.step if expected else 0.0,
        "memory_mb": _highest_mb(),
        "forecast_mb": expected.memory / 1e6 if expected else 0.0,
    }
    if rank == 0:
        sys.stdout.write(json.dumps(found))
    accelerator.end_training()


if __name__ == "__main__":  # in the processes that the benchmarks start
    {"step": take_step, "rounds": count_rounds, "train": train_some}[sys.argv[1]](sys.argv[2:])
