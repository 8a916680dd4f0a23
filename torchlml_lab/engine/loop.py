"""The training loop (tasks, steps and epochs), and functions that estimate and measure its duration."""

import copy
import inspect
import math
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from accelerate import Accelerator
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.adam import adam
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import Dataset, Sampler

from torchlml_lab.cli_errors import BadInput
from torchlml_lab.engine.output import ProgressBar, new_console, plain_table
from torchlml_lab.engine.settings import StepTimeSettings, TrainSettings, check_threads, use_threads

Loss = Callable[[nn.Module, Any], Tensor]
"""A function that returns the mean loss of a model on a batch."""


@dataclass(frozen=True)
class Task:
    """A training task: the model, the data, the loss and the metrics."""

    model: nn.Module
    optimizer: Optimizer
    scheduler: LRScheduler
    """Stepped once after every epoch."""
    training: Dataset[Any]
    """The training samples. `__getitems__(indices)` returns a whole batch. Random choices, such as data
    augmentation, use torch's global generator."""
    held_out: Mapping[str, Dataset[Any]]
    """The data for evaluation, by split. `validation` is evaluated after every epoch. `test`, if present, is
    evaluated once with the best model. `train`, if present, is a subset of the training data that is also
    evaluated after every epoch."""
    loss: Loss
    measure: Callable[[nn.Module, Iterable[Any], Accelerator], dict[str, float]]
    """Returns the metrics of a model on batches, aggregated over all processes, as fractions from 0 to 1."""
    chosen_by: str
    """The metric whose highest value on `validation` determines the best epoch."""
    printed: tuple[str, ...]
    """The metrics that are printed after every epoch. All metrics are recorded."""
    most_gradient: float | None = None
    """The maximum gradient norm for clipping. None disables clipping."""
    evaluated: int = 8
    """The evaluation batch size as a multiple of the training batch size. Evaluation needs less memory per
    sample, so its batches can be larger."""
    threads: int | None = None
    """The number of CPU threads that suits the task's operators. None means all available threads."""
    patience: int | None = None
    """Training stops after this many epochs without improvement. None trains all epochs."""
    stored: Mapping[str, dict[str, Any]] = field(default_factory=dict)
    """JSON files, by name, that are written to the run directory at the start, for use in prediction."""
    start_margin: float | None = None
    """The margin by which a later epoch must exceed the score of epoch 0 to become the best epoch. It is set
    only if the model is already trained. In this case, epoch 0 is an evaluation before training."""
    settings: TrainSettings | None = None
    """The settings to write to the run directory. None means that the task did not change the settings."""
    combine: Callable[[nn.Module], None] | None = None
    """Called after training with the model of the best epoch, which it may modify. The validation metrics are
    then measured again."""
    refit: Callable[[nn.Module, Path | None], None] | None = None
    """Called after `combine` to fit parts of the model on all samples, before the test metrics are measured.
    The second argument is the run directory in the first process, and None in all other processes."""
    fitted: float | None = None
    """The duration of a closed-form fit in seconds. If this is set, the fit replaces training, and the model
    is only evaluated and saved."""
    instead: str = ""
    """A sentence that recommends a faster alternative if training would take more than an hour."""


class RowAdam(Optimizer):
    """Adam that, for a sparse gradient, updates only those rows of the weight that occur in the gradient.

    All other rows keep their weights and moments, so the cost of a step depends on the rows in the batch and
    not on the size of the weight. Dense gradients use torch's fused implementation.

    Args:
        parameters: The parameters.
        lr: The learning rate.
        betas: The decay rates of the moments.
        eps: Added to the square root of the second moment.
    """

    def __init__(
        self,
        parameters: Iterable[Tensor],
        lr: float = 0.001,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
    ) -> None:
        super().__init__(parameters, {"lr": lr, "betas": betas, "eps": eps})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update all parameters that have a gradient."""
        for group in self.param_groups:
            (beta, beta_square), lr, eps = group["betas"], group["lr"], group["eps"]
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["step"] = torch.zeros((), device=parameter.device)
                    state["mean"], state["square"] = (torch.zeros_like(parameter) for _ in range(2))
                mean, square, steps = state["mean"], state["square"], state["step"]
                if not parameter.grad.is_sparse:
                    adam(
                        [parameter],
                        [parameter.grad],
                        [mean],
                        [square],
                        [],
                        [steps],
                        fused=True,
                        amsgrad=False,
                        beta1=beta,
                        beta2=beta_square,
                        lr=lr,
                        weight_decay=0.0,
                        eps=eps,
                        maximize=False,
                    )
                    continue
                steps += 1
                gradient = parameter.grad.coalesce()
                (rows,), values = gradient.indices(), gradient.values()
                some = mean[rows].lerp_(values, 1 - beta)
                some_square = square[rows].mul_(beta_square).addcmul_(values, values, value=1 - beta_square)
                mean[rows], square[rows] = some, some_square
                scale = some_square.div_(1 - beta_square ** steps.item()).sqrt_().add_(eps)
                parameter.index_add_(0, rows, some.div_(scale), alpha=-lr / (1 - beta ** steps.item()))


class EpochBatches(Sampler[list[int]]):
    """Batches of indices in an order that depends only on the seed and the epoch."""

    def __init__(self, count: int, batch_size: int, seed: int, shuffle: bool) -> None:
        self.count, self.batch_size, self.seed, self.shuffle = count, batch_size, seed, shuffle
        self.drop_last = False
        self.epoch = 0

    def __len__(self) -> int:
        return math.ceil(self.count / self.batch_size)

    def __iter__(self) -> Iterator[list[int]]:
        order = torch.arange(self.count)
        if self.shuffle:
            generator = torch.Generator().manual_seed(self.seed * 2**20 + self.epoch)
            order = torch.randperm(self.count, generator=generator)
        for start in range(0, self.count, self.batch_size):
            yield order[start : start + self.batch_size].tolist()


def train_step(
    model: nn.Module,
    optimizer: Optimizer,
    loss: Loss,
    batch: Any,
    accelerator: Accelerator | None = None,
    most_gradient: float | None = None,
) -> Tensor:
    """Run one training step: forward, loss, backward, gradient clipping and update.

    Args:
        model: The network, in training mode.
        optimizer: The optimizer for its parameters.
        loss: Computes the mean loss of a batch.
        batch: The batch.
        accelerator: Controls the precision and synchronizes processes. None means a single process.
        most_gradient: The maximum gradient norm for clipping. None disables clipping.

    Returns:
        The loss before the update, detached.
    """
    with nullcontext() if accelerator is None else accelerator.autocast():
        value = loss(model, batch)
    optimizer.zero_grad()
    if accelerator is None:
        value.backward()
    else:
        accelerator.backward(value)
    if most_gradient is not None:
        clip = nn.utils.clip_grad_norm_ if accelerator is None else accelerator.clip_grad_norm_
        clip(model.parameters(), most_gradient)
    optimizer.step()
    return value.detach()


def train_epoch(
    model: nn.Module,
    optimizer: Optimizer,
    loss: Loss,
    batches: Iterable[Any],
    accelerator: Accelerator | None = None,
    most_gradient: float | None = None,
    step: Callable[[], None] = lambda: None,
) -> Tensor:
    """Train on every batch once. `step` is called after each batch. See `train_step` for the other arguments.

    Returns:
        The sum of the mean losses of all batches.
    """
    model.train()
    total = torch.zeros((), device=next(model.parameters()).device)
    for batch in batches:
        total += train_step(model, optimizer, loss, batch, accelerator, most_gradient)
        step()
    return total


# An estimate is printed for runs longer than `LONG` seconds. Above `VERY_LONG` seconds, a faster alternative
# is suggested.
LONG, VERY_LONG = 600.0, 3600.0
FEW, REPEATED = 8, 3  # samples and repetitions that suffice for an estimate
# If a batch takes longer than this many seconds, only some of its samples are timed. The estimate is then
# less accurate, because matrix products with few rows are less efficient.
LONGEST_PASS = 10.0
# An update is timed on at most this many entries. They do not fit in the CPU caches, as in training.
MOST_PROBED = 2**22


class Needs(NamedTuple):
    """The estimated time and memory that a training run needs."""

    step: float
    """Seconds per training step."""
    evaluation: float
    """Seconds per evaluation on the validation samples."""
    memory: float
    """The peak memory of this process in bytes, or 0 if the system does not report it."""


def needs(task: Task, batch_size: int) -> Needs:
    """Estimate the time and memory of training from a few timed steps, without changing the task.

    Args:
        task: The task to time.
        batch_size: Samples per batch.

    Returns:
        The estimates. If a batch takes very long, the time of the forward and backward passes is extrapolated
        from a few samples. The time of a dense update is extrapolated from a limited number of entries.
        The memory is the peak so far or, if larger, the memory of a training step or an evaluation, including
        the gradients and the optimizer state.
    """
    # With several processes, the model's hooks and the metrics would wait for the other processes. Therefore,
    # a copy of the model is timed, and the loss is evaluated instead of the metrics.
    together = dist.is_available() and dist.is_initialized()
    model = (copy.deepcopy(task.model) if together else task.model).train()
    named = dict(model.named_parameters())
    # Training mode changes buffers, for example those of batch normalization.
    buffers = {name: kept.clone() for name, kept in model.state_dict().items() if name not in named}
    training, held_out = task.training, task.held_out["validation"]
    length, held_out_length = len(training), len(held_out)  # type: ignore[arg-type]

    def passes(count: int) -> float:
        rows = torch.randint(length, (count,)).tolist()  # consecutive samples could already be cached
        start = time.perf_counter()
        model.zero_grad()
        task.loss(model, training.__getitems__(rows)).backward()  # type: ignore[attr-defined]
        return time.perf_counter() - start

    def evaluation(count: int) -> float:
        start = time.perf_counter()
        with torch.no_grad():
            batch = held_out.__getitems__(list(range(count)))  # type: ignore[attr-defined]
            if together:
                task.loss(model, batch)
            else:
                task.measure(model, [batch], Accelerator(cpu=True))
        return time.perf_counter() - start

    size = min(batch_size, length)
    few, some = min(FEW, size), min(task.evaluated * batch_size, held_out_length)
    highest = _memory_bytes("VmHWM")
    with torch.random.fork_rng(devices=[]):
        passes(few)  # the first pass includes allocation and lazy loading
        short = passes(few)
        more = size if short * size / few < LONGEST_PASS else min(4 * few, size)
        with _HighestMemory() as step_memory:
            seconds = passes(more)
        if seconds < 1:
            seconds = median(passes(more) for _ in range(REPEATED))
        # Extrapolate linearly. Part of the time does not depend on the number of samples, because the
        # gradient is computed for every weight.
        seconds += (size - more) * max(0.0, seconds - short) / max(1, more - few)
        gradients = [parameter.grad for parameter in named.values() if parameter.grad is not None]
        updates, states = _update_needs(task.optimizer, gradients)
        model.eval()
        with _HighestMemory() as evaluation_memory:
            evaluating = evaluation(some)
        if evaluating < 1:  # the first evaluation includes lazy loading
            evaluating = evaluation(some)
        evaluating *= held_out_length / some
        resident = _memory_bytes("VmRSS")  # including the gradients and everything that was loaded
    model.zero_grad()
    for name, kept in model.state_dict().items():
        if name in buffers:
            kept.copy_(buffers[name])
    temporary = max(step_memory.added * size / more, evaluation_memory.added)
    return Needs(seconds + updates, evaluating, resident and max(highest, resident + temporary + states))


def _update_needs(optimizer: Optimizer, gradients: Sequence[Tensor]) -> tuple[float, float]:
    """Estimate the seconds per update and the size of the optimizer state in bytes.

    A new optimizer of the same class updates a limited number of entries, first to create its state and then
    for timing. The gradients determine which entries an update reads: all entries of a weight with a dense
    gradient, and some rows of a weight with a sparse gradient.
    """
    seconds = states = 0.0
    accepted = inspect.signature(type(optimizer)).parameters.keys() & optimizer.defaults.keys()
    dense = [gradient for gradient in gradients if not gradient.is_sparse]
    for those in ([dense] if dense else []) + [[gradient] for gradient in gradients if gradient.is_sparse]:
        entries, first = sum(gradient.numel() for gradient in those), those[0]
        width = first.shape[-1] if first.is_sparse else 1
        count = max(1, min(entries, MOST_PROBED) // width)
        probe = torch.zeros(count, width).requires_grad_()
        probe.grad = torch.zeros(count, width)
        if first.is_sparse:
            # The same number of rows as in training, in the same order and with the same duplicates.
            rows, values = first._indices() % count, first._values()
            probe.grad = torch.sparse_coo_tensor(rows, values, probe.shape, check_invariants=False)
        same = type(optimizer)([probe], **{name: optimizer.defaults[name] for name in accepted})
        same.step()
        times = []
        for _ in range(REPEATED):
            start = time.perf_counter()
            same.step()
            times.append(time.perf_counter() - start)
        seconds += median(times) * (1 if first.is_sparse else entries / probe.numel())
        kept = sum(t.nbytes for t in same.state[probe].values() if isinstance(t, Tensor) and t.numel() > 1)
        states += kept / probe.numel() * entries
    return seconds, states


def _memory_bytes(name: str) -> float:
    """Return `VmRSS` (the memory of this process) or `VmHWM` (its peak) in bytes, or 0 if it is unknown."""
    try:
        text = Path("/proc/self/status").read_text(encoding="ascii", errors="replace")
        return float(text.split(f"{name}:")[1].split()[0]) * 1024
    except (OSError, ValueError, IndexError):
        return 0.0


class _HighestMemory:
    """A context manager that samples the memory of this process in a background thread.

    `VmHWM` cannot be used here: it includes any peak before the block, and resetting it would change the
    peak that the system reports for the process.
    """

    def __enter__(self) -> "_HighestMemory":
        self.highest = _memory_bytes("VmRSS")
        self.done = threading.Event()
        self.thread = threading.Thread(target=self._sample, daemon=True)
        self.thread.start()
        return self

    def _sample(self) -> None:
        while not self.done.wait(0.002):
            self.highest = max(self.highest, _memory_bytes("VmRSS"))

    def __exit__(self, *_: object) -> None:
        self.done.set()
        self.thread.join()
        self.added = max(0.0, self.highest - _memory_bytes("VmRSS"))
        """The peak memory within the block minus the memory after it, in bytes."""


def forecast(task: Task, batch_size: int, epochs: int, batches: int) -> str | None:
    """Return an estimate of time and memory to print before a long run, or None if the run is short.

    Args:
        task: The task to train.
        batch_size: Samples per batch of this process.
        epochs: The number of epochs left.
        batches: The number of batches per epoch.
    """
    found = needs(task, batch_size)
    each = batches * found.step + found.evaluation
    if epochs * each < LONG:
        return None
    most = "" if task.patience is None else "At most "
    memory = f" and use about {found.memory / 1e9:.1f} GB of memory" if found.memory else ""
    said = (
        f"{most}{epochs} epochs of {batches} batches will take about {in_words(epochs * each)} on this CPU "
        f"({in_words(each)} per epoch){memory}."
    )
    return f"{said} {task.instead}".rstrip() if epochs * each > VERY_LONG else said


def in_words(seconds: float) -> str:
    """Format a duration in words: `25 minutes`, `3 hours`, `9 days`."""
    for unit, size in (("day", 86400), ("hour", 3600), ("minute", 60)):
        if seconds >= 2 * size or (unit == "minute" and seconds >= size):
            count = round(seconds / size)
            return f"{count} {unit}{'s' * (count != 1)}"
    return f"{seconds:.0f} seconds"


Name = TypeVar("Name", bound=str)  # the name of one of a task's losses

MOST_SAMPLES = 1024  # the maximum per step, because a scene graph takes about 200 kB of memory


def checked_size(settings: StepTimeSettings, usual: int) -> int:
    """Validate the settings and return the number of samples per step, which is `usual` by default."""
    if settings.steps < 1:
        raise BadInput(f"`--steps` must be at least 1, but it is {settings.steps}.")
    check_threads(settings.threads)
    size = usual if settings.batch_size is None else settings.batch_size
    if not 1 <= size <= MOST_SAMPLES:
        raise BadInput(f"`--batch-size` must be from 1 to {MOST_SAMPLES}, but it is {size}.")
    return size


def compare_steps(
    names: Sequence[Name], build: Callable[[Name], Task], settings: StepTimeSettings, size: int, what: str
) -> None:
    """Time a training step of each task, and print a table of times relative to the first task.

    Args:
        names: The names of the tasks to time, the baseline first.
        build: Builds the task with a given name. The same seed is set before each call.
        settings: The number of steps and threads.
        size: Samples per step.
        what: A description of the samples, for the title of the table.
    """
    tasks: dict[str, Task] = {}
    for name in names:
        torch.manual_seed(0)
        tasks[name] = build(name)
    console = new_console()
    with use_threads(settings.threads):
        seconds = measure_steps(tasks, size, settings.steps, console)
    console.print(step_table(seconds, names[0], f"{settings.steps} steps of {size} {what}"))


def measure_steps(
    tasks: Mapping[str, Task], batch_size: int, steps: int, console: Console
) -> dict[str, list[float]]:
    """Measure the duration of training steps (data, forward, loss, backward, clipping, update) of each task.

    Args:
        tasks: The tasks to time. All of them use the same data.
        batch_size: Samples per step.
        steps: The number of timed steps, after one untimed warm-up step.
        console: The console for the progress bar.

    Returns:
        The seconds per step by task. The i-th values of all tasks refer to the same samples.
    """
    accelerator = Accelerator(cpu=True)
    count = len(next(iter(tasks.values())).training)  # type: ignore[arg-type]
    order = torch.randint(count, (steps + 1, batch_size))
    seconds: dict[str, list[float]] = {name: [] for name in tasks}
    with ProgressBar(console) as progress:
        bar = progress.add_task("steps", total=len(order) * len(tasks))
        for chosen in order.tolist():
            for name, task in tasks.items():
                task.model.train()
                start = time.perf_counter()
                batch = task.training.__getitems__(chosen)  # type: ignore[attr-defined]
                train_step(task.model, task.optimizer, task.loss, batch, accelerator, task.most_gradient)
                seconds[name].append(time.perf_counter() - start)
                progress.advance(bar)
    return {name: times[1:] for name, times in seconds.items()}


def step_table(seconds: Mapping[str, Sequence[float]], baseline: str, what: str) -> Table:
    """Tabulate the median time per step of each task, and its relative difference from the baseline."""
    shown = plain_table(f"Medians over {what}", ("loss", "ms per step", f"vs. {baseline}"))
    usual = median(seconds[baseline])
    for name, times in seconds.items():
        middle = median(times)
        shown.add_row(name, f"{1000 * middle:.1f}", f"{100 * (middle / usual - 1):+.1f}%")
    return shown
