"""The loop: train an epoch, evaluate, write a line and a checkpoint, and at the end test the best epoch."""

import importlib.util
import math
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, set_seed
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from safetensors.torch import load_model
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader, Dataset, Sampler

from torchlml_lab.engine.folder import RunFolder, State
from torchlml_lab.engine.settings import TrainSettings
from torchlml_lab.errors import BadInput


@dataclass(frozen=True)
class Task:
    """What is trained, on what, and how it is judged."""

    model: nn.Module
    optimizer: Optimizer
    scheduler: LRScheduler
    """Stepped once after every epoch."""
    training: Dataset[Any]
    """Its `__getitems__(indices)` gives a whole batch; its random choices come from torch's generator."""
    held_out: Mapping[str, Dataset[Any]]
    """`validation`, evaluated after every epoch, and `test`, evaluated once with the best model. `train`, if
    it is there, is a part of the training data that is also evaluated after every epoch."""
    loss: Callable[[nn.Module, Any], Tensor]
    """The mean loss of a batch."""
    measure: Callable[[nn.Module, Iterable[Any], Accelerator], dict[str, float]]
    """The measures of a model on batches, over all processes."""
    chosen_by: str
    """The measure whose highest value on `validation` chooses the best epoch."""
    most_gradient: float | None = None
    """The norm to which a longer gradient is shortened; None leaves gradients as they are."""


class EpochBatches(Sampler[list[int]]):
    """Batches of indices in an order that follows from the seed and the epoch alone."""

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


def train(
    experiment: str, settings: TrainSettings, build: Callable[[], Task], console: Console
) -> dict[str, Any]:
    """Runs or continues a training run.

    Args:
        experiment: The experiment's name.
        settings: Its settings; with `resume`, the folder is taken from there.
        build: Makes the task; called after the seed is set.
        console: Where progress and results go.

    Returns:
        What `result.json` holds: the best epoch, its validation and test measures, and the seconds.
    """
    accelerator = _accelerator(settings)
    if settings.batch_size % accelerator.num_processes:
        raise BadInput(
            f"`--batch-size` is {settings.batch_size}, and must be a multiple of the "
            f"{accelerator.num_processes} processes."
        )
    folder = RunFolder(settings.resume or settings.out, experiment)
    main = accelerator.is_main_process
    if settings.resume is not None:
        folder.check()
        if (folder.path / "result.json").exists():
            return folder.read("result.json")
    set_seed(settings.seed)
    task = build()
    if settings.resume is None and main:
        folder.create(settings)
    accelerator.wait_for_everyone()
    again = f"torchlml train {experiment} --resume {folder.path}"
    try:
        return _Run(task, settings, folder, accelerator, console, again).to_the_end()
    except KeyboardInterrupt:
        state = folder.state()
        done = f"{state.epoch} of {settings.epochs} epochs are" if state else "no epoch is"
        raise KeyboardInterrupt(f"Interrupted; {done} kept, and `{again}` continues the run.") from None
    finally:
        accelerator.end_training()
        accelerator.free_memory()


class _Run:
    """A run under way: the task in accelerate's hands, and its record."""

    def __init__(
        self,
        task: Task,
        settings: TrainSettings,
        folder: RunFolder,
        accelerator: Accelerator,
        console: Console,
        again: str,
    ) -> None:
        self.task, self.settings, self.folder = task, settings, folder
        self.accelerator, self.console, self.again = accelerator, console, again
        self.main = accelerator.is_main_process
        self.order = EpochBatches(_length(task.training), settings.batch_size, settings.seed, shuffle=True)
        self.model, self.optimizer, self.scheduler, self.batches = accelerator.prepare(
            task.model, task.optimizer, task.scheduler, _loader(task.training, self.order)
        )
        # Evaluation keeps no gradients, so its batches can be larger.
        size = 8 * settings.batch_size
        self.held_out = {
            name: accelerator.prepare(_loader(data, EpochBatches(_length(data), size, 0, shuffle=False)))
            for name, data in task.held_out.items()
        }
        # From here on each process draws its own random numbers, for instance for dropout.
        set_seed(settings.seed, device_specific=True)
        self.state = folder.state() if settings.resume is not None else None
        if self.state is not None:
            self._load(self.state)
        if settings.tensorboard:
            accelerator.init_trackers("tensorboard")

    def to_the_end(self) -> dict[str, Any]:
        """The epochs that are left, then the test."""
        started = time.monotonic() - (self.state.seconds if self.state else 0)
        first = self.state.epoch + 1 if self.state else 1
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        hidden = not (self.main and self.console.is_terminal)
        with Progress(*columns, console=self.console, transient=True, disable=hidden) as progress:
            epochs = progress.add_task("epochs ", total=self.settings.epochs, completed=first - 1)
            steps = progress.add_task("batches", total=len(self.batches))
            for epoch in range(first, self.settings.epochs + 1):
                progress.reset(steps)
                loss = self._epoch(epoch, lambda: progress.advance(steps))
                measures = {name: self._evaluate(name) for name in self.held_out if name != "test"}
                self._record(epoch, loss, measures, time.monotonic() - started)
                progress.advance(epochs)
        return self._finish(time.monotonic() - started)

    def _epoch(self, epoch: int, step: Callable[[], None]) -> float:
        self.order.epoch = epoch
        self.model.train()
        total = torch.zeros((), device=self.accelerator.device)
        for batch in self.batches:
            with self.accelerator.autocast():
                loss = self.task.loss(self.model, batch)
            self.optimizer.zero_grad()
            self.accelerator.backward(loss)
            if self.task.most_gradient is not None:
                self.accelerator.clip_grad_norm_(self.model.parameters(), self.task.most_gradient)
            self.optimizer.step()
            total += loss.detach()
            step()
        self.scheduler.step()
        mean = self.accelerator.reduce(total, "mean").item() / len(self.batches)
        if not math.isfinite(mean):
            raise RuntimeError(f"The loss became {mean} in epoch {epoch}: try a smaller `--learning-rate`.")
        return mean

    def _evaluate(self, split: str) -> dict[str, float]:
        self.model.eval()
        with torch.no_grad(), self.accelerator.autocast():
            return self.task.measure(self.model, self.held_out[split], self.accelerator)

    def _record(self, epoch: int, loss: float, measures: dict[str, dict[str, float]], seconds: float) -> None:
        score, name = measures["validation"][self.task.chosen_by], f"epoch-{epoch:04d}"
        better = self.state is None or score > self.state.best_score
        kept = self.state
        state = State(
            epoch=epoch,
            last=name,
            best=name if better or kept is None else kept.best,
            best_epoch=epoch if better or kept is None else kept.best_epoch,
            best_score=score if better or kept is None else kept.best_score,
            processes=self.accelerator.num_processes,
            seconds=seconds,
        )
        lines = [
            {"epoch": epoch, "split": split, "train_loss": loss, **values}
            for split, values in measures.items()
        ]
        self._save(state, lines)
        self.state = state
        for line in lines:
            prefix = "" if line["split"] == "validation" else f"{line['split']}/"
            values = {f"{prefix}{key}": value for key, value in line.items() if key != "split"}
            self.accelerator.log(values, step=epoch)
        if self.main:
            said = ", ".join(f"{key} {value:.4f}" for key, value in measures["validation"].items())
            self.console.print(f"epoch {epoch}: loss {loss:.4f}, validation {said}", highlight=False)

    def _save(self, state: State, lines: list[dict[str, Any]]) -> None:
        partial = self.folder.partial
        try:
            if self.main:
                shutil.rmtree(partial, ignore_errors=True)
                partial.mkdir(parents=True)
            self.accelerator.wait_for_everyone()
            self.accelerator.save_state(str(partial))
            self.accelerator.wait_for_everyone()
            if self.main:
                self.folder.add_metrics(lines)
                self.folder.commit(state)
            self.accelerator.wait_for_everyone()
        except Exception as error:
            if self.main:
                shutil.rmtree(partial, ignore_errors=True)
            reason = getattr(error, "strerror", None) or " ".join(str(error).split()).rstrip(".")
            raise RuntimeError(
                f"The checkpoint of epoch {state.epoch} could not be written to `{self.folder.path}`: "
                f"{reason}; the epochs before it are whole, and `{self.again}` continues after them."
            ) from error

    def _load(self, state: State) -> None:
        if state.processes != self.accelerator.num_processes:
            raise BadInput(
                f"The run `{self.folder.path}` has {state.processes} processes, "
                f"and cannot be continued with {self.accelerator.num_processes}."
            )
        path = self.folder.checkpoint(state.last)
        try:
            self.accelerator.load_state(str(path))
        except Exception as error:
            said = " ".join(str(error).split())[:200].rstrip(".")
            raise BadInput(f"The checkpoint `{path}` is damaged or of another model: {said}.") from error
        if self.main:  # what a killed run left beyond its state
            self.folder.drop_metrics_after(state.epoch)
            self.folder.drop_checkpoints_beside(state)

    def _finish(self, seconds: float) -> dict[str, Any]:
        assert self.state is not None
        best = self.folder.checkpoint(self.state.best)
        load_model(self.accelerator.unwrap_model(self.model), str(best / "model.safetensors"))
        measures = self._evaluate("test")
        line = {"epoch": self.state.best_epoch, "split": "test", **measures}
        best_line = (self.state.best_epoch, "validation")
        chosen = next(
            (old for old in self.folder.metrics() if (old["epoch"], old["split"]) == best_line), {"epoch": 0}
        )
        validation = {key: chosen[key] for key in measures if key in chosen}
        result = {
            "best_epoch": self.state.best_epoch,
            "validation": validation,
            "test": measures,
            "seconds": seconds,
        }
        if self.main:
            self.folder.add_metrics([line])
            self.folder.write("result.json", result)
        self.accelerator.wait_for_everyone()
        return result


def _accelerator(settings: TrainSettings) -> Accelerator:
    if settings.tensorboard and importlib.util.find_spec("tensorboard") is None:
        raise BadInput("`--tensorboard` needs the package `tensorboard`: run `pip install tensorboard`.")
    # split_batches: the settings' batch is shared by the processes, so that their number does not change it.
    data = DataLoaderConfiguration(split_batches=True, dispatch_batches=False)
    try:
        return Accelerator(
            cpu=settings.cpu,
            mixed_precision=settings.mixed_precision,
            dataloader_config=data,
            step_scheduler_with_optimizer=False,
            log_with="tensorboard" if settings.tensorboard else None,
            project_dir=settings.resume or settings.out,
        )
    except ValueError as error:
        raise BadInput(f"`--mixed-precision` is {settings.mixed_precision}: {error}.") from error


def _loader(data: Dataset[Any], order: EpochBatches) -> DataLoader[Any]:
    return DataLoader(data, batch_sampler=order, collate_fn=_whole_batch)


def _whole_batch(batch: Any) -> Any:
    """The data sets give whole batches; there is nothing to put together."""
    return batch


def _length(data: Dataset[Any]) -> int:
    return len(data)  # type: ignore[arg-type]
