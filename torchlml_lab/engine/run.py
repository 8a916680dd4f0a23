"""Training runs, which save a checkpoint after each epoch and finally test the best epoch."""

import importlib.util
import math
import os
import random
import re
import shutil
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, TypeVar

import torch
from accelerate import Accelerator, PartialState
from accelerate.utils import DataLoaderConfiguration, load, set_seed
from rich.console import Console
from safetensors.torch import load_model
from torch.utils.data import DataLoader, Dataset

from torchlml_lab.cli_errors import BadInput, reason
from torchlml_lab.engine.loop import EpochBatches, Task, forecast, train_epoch
from torchlml_lab.engine.output import ProgressBar
from torchlml_lab.engine.run_directory import RunFolder, State, locked
from torchlml_lab.engine.settings import TrainSettings, use_threads
from torchlml_lab.files import check_folder


def train(
    experiment: str, settings: TrainSettings, build: Callable[[], Task], console: Console
) -> dict[str, Any]:
    """Start or resume a training run.

    Args:
        experiment: The name of the task.
        settings: The settings of the run. If `resume` is set, the run in that directory is resumed.
        build: Reads the data and builds the task. It is called after the seed is set.
        console: The console for progress and results.

    Returns:
        The content of `result.json`: the best epoch, its validation and test metrics, and elapsed seconds.
    """
    accelerator = _accelerator(settings)
    if settings.batch_size % accelerator.num_processes:
        raise BadInput(
            f"`--batch-size` must be a multiple of the number of processes ({accelerator.num_processes}), "
            f"but it is {settings.batch_size}."
        )
    folder = RunFolder(settings.resume or settings.out, experiment)
    main, resumed = accelerator.is_main_process, settings.resume is not None
    with ExitStack() as held:
        if resumed:
            folder.check()
            if (folder.path / "result.json").exists():
                return folder.result()
            folder.check_sound()
            if main:
                held.enter_context(locked(folder.path))
        elif main:
            check_folder("--out", folder.path)
            folder.check_free(settings.overwrite)
        set_seed(settings.seed)
        task = build()
        if main and not resumed:
            folder.path.mkdir(parents=True, exist_ok=True)
            held.enter_context(locked(folder.path))
            folder.create(task.settings or settings, task.stored)
        elif main:
            folder.write_settings(settings)  # the data may have moved
        accelerator.wait_for_everyone()
        # Without `--threads`, never use more threads than the process was given (OMP_NUM_THREADS).
        threads = min(task.threads or torch.get_num_threads(), torch.get_num_threads())
        held.enter_context(use_threads(settings.threads or threads))
        again = f"torchlml train {experiment} --resume {folder.path}"
        try:
            return _Run(task, settings, folder, accelerator, console, again).to_the_end()
        except KeyboardInterrupt:
            state = folder.state()
            done = f"{state.epoch} of {settings.epochs} epochs are saved" if state else "No epoch is saved"
            raise KeyboardInterrupt(f"Interrupted. {done}. Resume the run with `{again}`.") from None
        finally:
            accelerator.end_training()
            accelerator.free_memory()


def say_test(console: Console, settings: TrainSettings, result: dict[str, Any], words: str) -> None:
    """Print the test results of a finished run, in its first process only.

    Args:
        console: The console to print to.
        settings: The settings of the run.
        result: The return value of `train`.
        words: The formatted metrics, as returned by `in_percent`.
    """
    if Accelerator(cpu=settings.cpu).is_main_process:
        console.print(
            f"Test results for epoch {result['best_epoch']}, the best on validation: {words}. "
            f"The run is saved in {settings.resume or settings.out}.",
            soft_wrap=True,
            highlight=False,
        )


def in_percent(measures: Mapping[str, float], names: Sequence[str]) -> str:
    """Format fractions as percentages: `top1 41.20%, top5 71.30%`."""
    return ", ".join(f"{name} {100 * measures[name]:.2f}%" for name in names)


class _Run:
    """A run in progress: the task, as prepared by accelerate, and the run directory."""

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
        size = task.evaluated * settings.batch_size
        self.held_out = {
            name: accelerator.prepare(_loader(data, EpochBatches(_length(data), size, 0, shuffle=False)))
            for name, data in task.held_out.items()
        }
        # From here on, each process draws different random numbers, for example for dropout.
        set_seed(settings.seed, device_specific=True)
        self.state = folder.state() if settings.resume is not None else None
        if self.state is not None:
            self._load(self.state)
        elif self.main:  # a run that was killed in its first epoch may have left metrics
            folder.drop_metrics()
        if settings.tensorboard:
            accelerator.init_trackers("tensorboard")

    def to_the_end(self) -> dict[str, Any]:
        """Train the remaining epochs, then test the best one and return the result."""
        started = time.monotonic() - (self.state.seconds if self.state else 0)
        first = self.state.epoch + 1 if self.state else 1
        if self.task.fitted is not None:
            if self.state is None:
                started -= self.task.fitted
                measures = {name: self._evaluate(name) for name in self.held_out if name != "test"}
                self._record(0, 0.0, measures, time.monotonic() - started)
            return self._finish(time.monotonic() - started)
        self._say_how_long(self.settings.epochs + 1 - first)
        if self.task.start_margin is not None and self.state is None:
            measures = {name: self._evaluate(name) for name in self.held_out if name != "test"}
            self._record(0, None, measures, time.monotonic() - started)
        with ProgressBar(self.console, hidden=not self.main) as progress:
            epochs = progress.add_task("epochs ", total=self.settings.epochs, completed=first - 1)
            steps = progress.add_task("batches", total=len(self.batches))
            for epoch in range(first, self.settings.epochs + 1):
                if self._waited_enough():
                    break
                progress.reset(steps)
                loss = self._epoch(epoch, lambda: progress.advance(steps))
                measures = {name: self._evaluate(name) for name in self.held_out if name != "test"}
                self._record(epoch, loss, measures, time.monotonic() - started)
                progress.advance(epochs)
        return self._finish(time.monotonic() - started)

    def _waited_enough(self) -> bool:
        """Whether early stopping applies: the best epoch is at least `patience` epochs old."""
        patience, state = self.task.patience, self.state
        return patience is not None and state is not None and state.epoch - state.best_epoch >= patience

    def _say_how_long(self, epochs: int) -> None:
        if self.main and epochs and self.accelerator.device.type == "cpu":
            size = self.settings.batch_size // self.accelerator.num_processes
            said = forecast(self.task, size, epochs, len(self.batches))
            if said is not None:
                self.console.print(said, highlight=False, soft_wrap=True)

    def _epoch(self, epoch: int, step: Callable[[], None]) -> float:
        self.order.epoch = epoch
        most = self.task.most_gradient
        total = train_epoch(
            self.model, self.optimizer, self.task.loss, self.batches, self.accelerator, most, step
        )
        self.scheduler.step()
        mean: float = self.accelerator.reduce(total, "mean").item() / len(self.batches)
        if not math.isfinite(mean):
            if self.main:
                self.folder.write("failed.json", {"epoch": epoch, "loss": str(mean)})
            raise RuntimeError(self.folder.failure(epoch, str(mean)))
        return mean

    def _evaluate(self, split: str) -> dict[str, float]:
        self.model.eval()
        with torch.no_grad(), self.accelerator.autocast():
            return self.task.measure(self.model, self.held_out[split], self.accelerator)

    def _record(
        self, epoch: int, loss: float | None, measures: dict[str, dict[str, float]], seconds: float
    ) -> None:
        score, name = measures["validation"][self.task.chosen_by], f"epoch-{epoch:04d}"
        kept = self.state
        margin = (self.task.start_margin or 0.0) if kept is not None and kept.best_epoch == 0 else 0.0
        better = kept is None or score > kept.best_score + margin
        state = State(
            epoch=epoch,
            last=name,
            best=name if better or kept is None else kept.best,
            best_epoch=epoch if better or kept is None else kept.best_epoch,
            best_score=score if better or kept is None else kept.best_score,
            processes=self.accelerator.num_processes,
            seconds=seconds,
        )
        trained = {} if loss is None else {"train_loss": loss}
        lines: list[dict[str, Any]] = [
            {"epoch": epoch, "split": split, **trained, **values} for split, values in measures.items()
        ]
        self._save(state, lines)
        self.state = state
        for line in lines:
            prefix = "" if line["split"] == "validation" else f"{line['split']}/"
            values = {f"{prefix}{key}": value for key, value in line.items() if key != "split"}
            self.accelerator.log(values, step=epoch)
        if self.main:
            said = in_percent(measures["validation"], self.task.printed)
            shown = "" if loss is None else f"loss {loss:.4f}, "
            start = "fitted: " if self.task.fitted is not None else f"epoch {epoch}: {shown}"
            self.console.print(f"{start}validation {said}", highlight=False)

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
            why = _why_not_written(error, partial)
            if self.main:
                shutil.rmtree(partial, ignore_errors=True)
            raise RuntimeError(
                f"The checkpoint of epoch {state.epoch} could not be written to `{self.folder.path}`: "
                f"{why}. Earlier epochs are intact. Resume the run with `{self.again}`."
            ) from error

    def _load(self, state: State) -> None:
        if state.processes != self.accelerator.num_processes:
            raise BadInput(
                f"The number of processes must be {state.processes}, as when the run `{self.folder.path}` "
                f"was started, but it is {self.accelerator.num_processes}."
            )
        path = self.folder.checkpoint(state.last)
        try:
            drawn = path / f"random_states_{self.accelerator.process_index}.pkl"
            states = _random_states(drawn)
            self.accelerator.load_state(str(path))
            # accelerate silently ignores random states that it cannot use.
            if (
                not torch.equal(torch.get_rng_state(), states["torch_manual_seed"])
                or random.getstate() != states["random_state"]
            ):
                raise ValueError(f"`{drawn.name}` cannot be used")
        except Exception as error:
            said = " ".join(str(error).split())[:200].rstrip(".")
            raise BadInput(
                f"The checkpoint `{path}` is damaged or belongs to another model: {said}."
            ) from error
        if self.main:  # remove files that a killed run wrote after its last saved state
            self.folder.drop_metrics_after(state.epoch)
            self.folder.drop_checkpoints_beside(state)

    def _finish(self, seconds: float) -> dict[str, Any]:
        assert self.state is not None
        best = self.folder.checkpoint(self.state.best)
        model = self.accelerator.unwrap_model(self.model)
        # Free the gradients and the optimizer state, because fitting parts of the model may need the memory.
        model.zero_grad()
        self.task.optimizer.state.clear()
        load_model(model, str(best / "model.safetensors"))
        best_line = (self.state.best_epoch, "validation")
        lines = self.folder.metrics()
        chosen = next((old for old in lines if (old["epoch"], old["split"]) == best_line), None)
        if chosen is None:
            path = self.folder.path / "metrics.jsonl"
            raise BadInput(f"`{path}` is damaged: the validation line for epoch {best_line[0]} is missing.")
        validation = {key: chosen[key] for key in chosen if key not in ("epoch", "split", "train_loss")}
        if self.task.combine is not None:
            self.task.combine(model)
            validation = self._evaluate("validation")
        if self.task.refit is not None:
            self.task.refit(model, self.folder.path if self.main else None)
        measures = self._evaluate("test") if "test" in self.held_out else {}
        result = {
            "best_epoch": self.state.best_epoch,
            "validation": validation,
            "test": measures,
            "seconds": seconds,
        }
        if self.main:
            if measures:
                self.folder.add_metrics([{"epoch": self.state.best_epoch, "split": "test", **measures}])
            self.folder.write("result.json", result)
        self.accelerator.wait_for_everyone()
        return result


def _why_not_written(error: Exception, folder: Path) -> str:
    """Describe why a checkpoint could not be written, as a clause that ends a sentence."""
    said = " ".join(str(error).split()).rstrip(".")
    if isinstance(error, OSError) and error.strerror:
        return reason(error)
    if found := re.search(r"os error (\d+)", said):  # safetensors includes the error number
        number = int(found[1])
        return reason(OSError(number, os.strerror(number)))
    if "inline_container" in said:  # torch's archive writer discards the system's error
        free = shutil.disk_usage(folder.parent).free / 1e9
        return f"a file is incomplete (free disk space: {free:,.1f} GB)"
    return said


def _random_states(path: Path) -> dict[str, Any]:
    """Read the random states that accelerate saved for a process. An invalid file raises `ValueError`."""
    try:
        states: dict[str, Any] = load(path)
        return {name: states[name] for name in ("torch_manual_seed", "random_state")}
    except Exception as error:  # a damaged pickle can raise anything
        raise ValueError(f"`{path.name}` cannot be read") from error


def _accelerator(settings: TrainSettings) -> Accelerator:
    if settings.tensorboard and importlib.util.find_spec("tensorboard") is None:
        raise BadInput("`--tensorboard` needs the package `tensorboard`. Run `pip install tensorboard`.")
    # With split_batches, `--batch-size` is the total over all processes, regardless of their number.
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
        raise BadInput(
            f"`--mixed-precision {settings.mixed_precision}` is not supported: {error}."
        ) from error


def _loader(data: Dataset[Any], order: EpochBatches) -> DataLoader[Any]:
    return DataLoader(data, batch_sampler=order, collate_fn=_whole_batch)


def _whole_batch(batch: Any) -> Any:
    """Return the batch unchanged, because the datasets already return whole batches."""
    return batch


def _length(data: Dataset[Any]) -> int:
    return len(data)  # type: ignore[arg-type]


Settings = TypeVar("Settings", bound=TrainSettings)
Data = TypeVar("Data")


def train_on_files(
    experiment: str,
    settings: Settings,
    read: Callable[[Settings], Data],
    task: Callable[[Settings, Data], Task],
    introduction: Callable[[Settings, Data], Iterable[str]],
    console: Console,
) -> dict[str, Any]:
    """Train on files that the user provides, and print a summary of the data before the first epoch.

    Args:
        experiment: The name of the task.
        settings: The settings of the run.
        read: Reads the files given in the settings.
        task: Builds the task from the data.
        introduction: Returns sentences that describe the data and the settings that depend on it.
        console: The console for the introduction, progress and results.

    Returns:
        The content of `result.json`.
    """

    def build() -> Task:
        data = read(settings)
        built = task(settings, data)  # first, so that invalid input raises before anything is printed
        if PartialState().is_main_process:
            say(introduction(settings, data), console)
        return built

    return train(experiment, settings, build, console)


def say(sentences: Iterable[str], console: Console) -> None:
    """Print sentences verbatim, because names from files may contain text that Rich would treat as markup."""
    for sentence in sentences:
        console.print(sentence, soft_wrap=True, highlight=False, markup=False)
