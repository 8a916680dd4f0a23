"""Sweeps: resumable grids of training runs that use all cores, with one thread per run."""

import contextlib
import dataclasses
import gc
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from multiprocessing import active_children, connection, get_context, parent_process
from multiprocessing.context import BaseContext
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch
from rich.console import Console, RenderableType

from torchlml_lab.cli_errors import BadInput
from torchlml_lab.engine.output import ProgressBar, StudyTable
from torchlml_lab.engine.run_directory import RunFolder, locked
from torchlml_lab.engine.settings import FREE, SETTINGS_FILE, GridSettings, TrainSettings, to_json
from torchlml_lab.files import check_file, check_folder, read_json, writing

Settings = TypeVar("Settings", bound=TrainSettings)
Row = TypeVar("Row")


@dataclass(frozen=True)
class Grid(Generic[Settings, Row]):
    """The runs of a sweep, and the functions that execute them and that collect and show their results."""

    experiment: str
    runs: Sequence[Settings]
    run_one: Callable[[Settings], dict[str, Any]]
    """Starts or resumes one run. It is called in a worker process, so it must be a module-level function."""
    rows: Callable[[Settings, dict[str, Any]], list[Row]]
    """Returns the CSV rows for a finished run."""
    write: Callable[[Path, Iterable[Row]], None]
    """Writes the CSV."""
    show: Callable[[Sequence[Row]], RenderableType]
    """Formats the rows as one or more tables."""

    def finished_rows(self, done: dict[Path, dict[str, Any]]) -> list[Row]:
        """Return the CSV rows for all finished runs."""
        return [row for one in self.runs if one.out in done for row in self.rows(one, done[one.out])]


def read_tuned(
    settings: GridSettings, table: StudyTable[Row], chooses: Sequence[str] = ("learning_rates",)
) -> list[Row]:
    """Read the rows of the CSV given by `--tuned`.

    Args:
        settings: The settings of the sweep.
        table: The table that the sweeps of this task write.
        chooses: The settings that these rows determine. Setting one of them explicitly is an error.

    Returns:
        The rows. An invalid file raises `BadInput`.
    """
    assert settings.tuned is not None
    if any(getattr(settings, name) for name in chooses):
        *others, last = (name.replace("_", " ") for name in chooses)
        said = f"{', '.join(others)} and {last}" if others else f"the {last}"
        raise BadInput(f"`--tuned` determines {said}, so they cannot also be given.")
    return table.read(settings.tuned, "--tuned")


def check_grid(
    settings: GridSettings, run: TrainSettings, chosen: Sequence[str], lists: Sequence[str]
) -> None:
    """Raise `BadInput` if a sweep is invalid or its directory or CSV cannot be written.

    Args:
        settings: The settings of the sweep.
        run: The settings that all runs share.
        chosen: The run settings that the sweep determines.
        lists: The settings of the sweep that require at least one value.
    """
    for name in lists:
        if not getattr(settings, name):
            raise BadInput(f"`--{name}` needs at least one value.")
    for name in chosen:
        if getattr(run, name) != getattr(type(run)(), name):
            raise BadInput(f"`--run.{name}` cannot be given, because the sweep sets it for each run.")
    if settings.workers < 1:
        raise BadInput(f"`--workers` must be at least 1, but it is {settings.workers}.")
    check_folder("--out", settings.out)
    if settings.csv is not None:
        check_file("--csv", settings.csv)


def checked_runs(runs: Iterable[Settings], check: Callable[[Settings], None]) -> list[Settings]:
    """Check the settings of all runs, and return one run per directory. Invalid settings raise `BadInput`."""
    found = {}
    for one in runs:
        check(one)
        found[one.out] = one
    return list(found.values())


def run_grid(grid: Grid[Any, Any], settings: GridSettings, console: Console) -> None:
    """Execute the unfinished runs, keep the CSV up to date, print the table, and raise if any run failed."""
    settings.out.mkdir(parents=True, exist_ok=True)
    path = settings.csv or settings.out / "results.csv"
    path.parent.mkdir(parents=True, exist_ok=True)
    with locked(settings.out):
        done = {one.out: found for one in grid.runs if (found := finished(grid.experiment, one)) is not None}
        console.print(f"{len(grid.runs)} runs, {len(done)} of them already finished.", highlight=False)
        _write(grid, path, done)
        failed = _run_all(grid, done, path, settings.workers, console)
        rows = grid.finished_rows(done)
        if rows:
            console.print(grid.show(rows))
        _write(grid, path, done)
    console.print(f"Results written to {path}.", soft_wrap=True)
    if failed:
        name, said = next(iter(failed.items()))
        raise RuntimeError(
            f"{len(failed)} of {len(grid.runs)} runs failed. The first run to fail was `{name}`: {said}"
        )


def _write(grid: Grid[Any, Any], path: Path, done: dict[Path, dict[str, Any]]) -> None:
    with writing("The CSV", path, "the finished runs are saved. Repeat the command to write the CSV again"):
        grid.write(path, grid.finished_rows(done))


def finished(experiment: str, settings: TrainSettings) -> dict[str, Any] | None:
    """Return the result of a run, or None if it is unfinished. Raise `BadInput` if its settings differ."""
    stored = settings.out / SETTINGS_FILE
    if not (settings.out / "run.json").exists():
        return None
    expected, found = to_json(settings), read_json(stored, dict)
    different = [name for name in expected if name not in FREE and expected[name] != found.get(name)]
    if different:
        name = different[0]
        raise BadInput(
            f"`{settings.out}` contains a run in which `{name}` is {found.get(name)} instead of "
            f"{expected[name]}. Choose another `--out`."
        )
    folder = RunFolder(settings.out, experiment)
    return folder.result() if (settings.out / "result.json").exists() else None


def resuming(settings: Settings) -> Settings:
    """Return the settings, with `resume` set if the run has already started."""
    if (settings.out / "run.json").exists():
        return dataclasses.replace(settings, resume=settings.out)
    return settings


def _run_all(
    grid: Grid[Any, Any], done: dict[Path, dict[str, Any]], path: Path, workers: int, console: Console
) -> dict[str, str]:
    """Execute the unfinished runs, add them to `done` and the CSV, and return the reason for each failure."""
    failed: dict[str, str] = {}
    pool = ProcessPoolExecutor(workers, _fresh_processes(grid), _prepare_worker)
    with ProgressBar(console) as progress:
        bar = progress.add_task("runs", total=len(grid.runs), completed=len(done))
        futures = {pool.submit(grid.run_one, one): one for one in grid.runs if one.out not in done}
        try:
            for future in as_completed(futures):
                one = futures[future]
                try:
                    done[one.out] = future.result()
                except Exception as error:
                    failed[one.out.name] = " ".join(str(error).split()) or type(error).__name__
                # Errors are ignored here: the CSV is written again at the end, and errors are reported then.
                with contextlib.suppress(OSError):
                    grid.write(path, grid.finished_rows(done))
                progress.advance(bar)
        except KeyboardInterrupt:
            # Runs can be resumed after being killed, so the workers are terminated immediately.
            for worker in active_children():
                worker.terminate()
            said = f"{len(done)} of {len(grid.runs)} runs are finished. Repeat the command to resume."
            raise KeyboardInterrupt(f"Interrupted. {said}") from None
        finally:
            pool.shutdown(cancel_futures=True)
    return failed


def _fresh_processes(grid: Grid[Any, Any]) -> BaseContext:
    """Return a context that does not fork this process, because a fork would copy locks held by threads."""
    if sys.platform != "linux":
        return get_context("spawn")
    # Workers are forked from a single-threaded server that has already imported the task, to save time.
    context = get_context("forkserver")
    context.set_forkserver_preload([grid.run_one.__module__, "torch._dynamo"])  # optimizers import it
    return context


def _prepare_worker() -> None:
    # Exclude the imported modules from the garbage collection at the end of every run, which would otherwise
    # copy the memory that they share with other processes.
    gc.freeze()
    torch.set_num_threads(1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles interrupts
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """Exit when the parent is killed. Otherwise the worker would finish its run and then wait forever."""
    parent = parent_process()
    assert parent is not None
    connection.wait([parent.sentinel])
    os._exit(1)
