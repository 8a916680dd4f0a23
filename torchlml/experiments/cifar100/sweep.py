"""`torchlml sweep cifar100`: a grid of runs on all cores, one thread each, that can be stopped any time."""

import dataclasses
import json
import os
import signal
import threading
from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import product
from multiprocessing import active_children, connection, get_context, parent_process
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import torch
from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from torchlml.cli import BadInput, parse_settings
from torchlml.experiments.cifar100 import records
from torchlml.experiments.cifar100.command import (
    FEATURES,
    LOSSES,
    Cifar100Settings,
    Loss,
    check,
    read,
    task,
)
from torchlml.experiments.cifar100.records import Record
from torchlml.experiments.engine import RunFolder, train
from torchlml.experiments.engine.settings import SETTINGS_FILE, to_json

# These settings of a run are the sweep's to choose.
_CHOSEN = ("out", "resume", "loss", "noise", "seed")
NOISES = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)


@dataclass(frozen=True)
class SweepSettings:
    """Run all combinations of losses, noise levels, seeds, learning rates, temperatures that are not done."""

    out: Path = Path("runs/cifar100-sweep")
    """The folder for the runs, one folder each; the same command continues what was stopped."""
    csv: Path | None = None
    """The CSV with one row per finished run; by default `results.csv` in `--out`."""
    losses: tuple[Loss, ...] = LOSSES
    """The losses: cross-entropy, smooth-svm, truncated-entropy, lml, bce."""
    noises: tuple[float, ...] = NOISES
    """The probabilities that a training label is drawn anew within its coarse class."""
    seeds: tuple[int, ...] = (0, 1, 2, 3)
    """The seeds of each combination."""
    learning_rates: tuple[float, ...] = ()
    """The learning rates to try; by default the one of `--run.learning-rate`."""
    temperatures: tuple[float, ...] = ()
    """The temperatures to try; by default the one of `--run.temperature`."""
    tuned: Path | None = None
    """The CSV of an earlier sweep: each loss gets its learning rate and temperature best on validation."""
    workers: int = field(default_factory=lambda: os.cpu_count() or 1)
    """How many runs at a time, at least 1, each on one thread."""
    run: Cifar100Settings = field(default_factory=Cifar100Settings)
    """All that the runs have in common, as for `torchlml train cifar100`."""


def main(arguments: Sequence[str]) -> None:
    """Reads the options and runs what is not done yet."""
    features = any(word.startswith("--run.features") for word in arguments)
    default = SweepSettings(run=FEATURES) if features else SweepSettings()
    settings = parse_settings(SweepSettings, "sweep cifar100", arguments, default)
    console = Console()
    runs = grid(settings)
    read(settings.run.data, settings.run.features)  # so that a bad file is reported once, and at once
    settings.out.mkdir(parents=True, exist_ok=True)
    path = settings.csv or settings.out / "results.csv"
    path.parent.mkdir(parents=True, exist_ok=True)
    done = {one.out: result for one in runs if (result := finished(one)) is not None}
    console.print(f"{len(runs)} runs, {len(done)} of them finished before.", highlight=False)
    records.write(path, (record(one, done[one.out]) for one in runs if one.out in done))
    failed = _run_all(
        [one for one in runs if one.out not in done], done, runs, path, settings.workers, console
    )
    rows = [record(one, done[one.out]) for one in runs if one.out in done]
    if rows:
        console.print(_table(rows))
    console.print(f"The rows are in {path}.", soft_wrap=True)
    if failed:
        name, said = next(iter(failed.items()))
        raise RuntimeError(f"{len(failed)} of {len(runs)} runs failed, the first of them `{name}`: {said}")


def grid(settings: SweepSettings) -> list[Cifar100Settings]:
    """The settings of every run; those that cannot be run raise `BadInput`."""
    for name in ("losses", "noises", "seeds"):
        if not getattr(settings, name):
            raise BadInput(f"`--{name}` needs at least one value.")
    for name in _CHOSEN:
        if getattr(settings.run, name) != getattr(Cifar100Settings(), name):
            raise BadInput(f"`--run.{name}` is given, but the sweep itself chooses it for each run.")
    if settings.workers < 1:
        raise BadInput(f"`--workers` is {settings.workers}, and must be at least 1.")
    if settings.out.exists() and not settings.out.is_dir():
        raise BadInput(f"`--out` names `{settings.out}`, which is a file: give a folder.")
    rates = settings.learning_rates or (settings.run.learning_rate,)
    temperatures = settings.temperatures or (settings.run.temperature,)
    recipes = {loss: list(product(rates, temperatures)) for loss in settings.losses}
    if settings.tuned is not None:
        if settings.learning_rates or settings.temperatures:
            raise BadInput("`--tuned` chooses learning rates and temperatures: do not give them too.")
        rows = records.read(settings.tuned, "--tuned")
        chosen = records.best_recipes(rows, settings.losses, settings.tuned)
        recipes = {loss: [chosen[loss]] for loss in settings.losses}
    runs = []
    # The seed varies slowest: a sweep that is stopped early still has every loss at every noise level.
    for seed, noise, loss in product(settings.seeds, settings.noises, settings.losses):
        for rate, temperature in recipes[loss]:
            name = f"{loss}_noise{noise:g}_lr{rate:g}_t{temperature:g}_seed{seed}"
            one = dataclasses.replace(
                settings.run,
                out=settings.out / name,
                loss=loss,
                noise=noise,
                seed=seed,
                learning_rate=rate,
                temperature=temperature,
            )
            check(one)
            runs.append(one)
    return list({one.out: one for one in runs}.values())


def finished(settings: Cifar100Settings) -> dict[str, Any] | None:
    """The result of a run that is done, None for one that is not; other settings there are refused."""
    stored = settings.out / SETTINGS_FILE
    if not (settings.out / "run.json").exists():
        return None
    expected, found = to_json(settings), json.loads(stored.read_text(encoding="utf-8"))
    different = [name for name in expected if name != "out" and expected[name] != found.get(name)]
    if different:
        name = different[0]
        raise BadInput(
            f"`{settings.out}` holds a run with `{name}` {found.get(name)} instead of {expected[name]}: "
            "give another `--out`."
        )
    folder = RunFolder(settings.out, "cifar100")
    return folder.read("result.json") if (settings.out / "result.json").exists() else None


def record(settings: Cifar100Settings, result: dict[str, Any]) -> Record:
    """The row of a finished run."""
    topk = f"top{settings.k}"
    return Record(
        source="features" if settings.features is not None else settings.network,
        loss=settings.loss,
        noise=settings.noise,
        seed=settings.seed,
        k=settings.k,
        learning_rate=settings.learning_rate,
        temperature=settings.temperature,
        epochs=settings.epochs,
        best_epoch=result["best_epoch"],
        validation_top1=result["validation"]["top1"],
        validation_topk=result["validation"][topk],
        test_top1=result["test"]["top1"],
        test_topk=result["test"][topk],
        seconds=result["seconds"],
    )


def _run_all(
    missing: list[Cifar100Settings],
    done: dict[Path, dict[str, Any]],
    runs: list[Cifar100Settings],
    path: Path,
    workers: int,
    console: Console,
) -> dict[str, str]:
    """Runs what is missing, adds it to `done` and to the CSV one by one, and returns what failed, and why."""
    failed: dict[str, str] = {}
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    # Processes that start afresh: a fork would copy the threads of torch in an unknown state.
    pool = ProcessPoolExecutor(workers, get_context("spawn"), _prepare_worker)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        bar = progress.add_task("runs", total=len(runs), completed=len(done))
        futures = {pool.submit(_run_one, one): one for one in missing}
        try:
            for future in as_completed(futures):
                one = futures[future]
                try:
                    done[one.out] = future.result()
                    records.write(path, (record(run, done[run.out]) for run in runs if run.out in done))
                except Exception as error:
                    failed[one.out.name] = " ".join(str(error).split()) or type(error).__name__
                progress.advance(bar)
        except KeyboardInterrupt:
            # Runs survive being killed, so the workers need not be asked.
            for worker in active_children():
                worker.terminate()
            said = (
                f"Interrupted; {len(done)} of {len(runs)} runs are finished, and the same command continues."
            )
            raise KeyboardInterrupt(said) from None
        finally:
            pool.shutdown(cancel_futures=True)
    return failed


def _prepare_worker() -> None:
    torch.set_num_threads(1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """A worker whose parent was killed would otherwise finish its run and then wait for ever."""
    parent = parent_process()
    assert parent is not None
    connection.wait([parent.sentinel])
    os._exit(1)


_read_once = lru_cache(maxsize=1)(read)


def _run_one(settings: Cifar100Settings) -> dict[str, Any]:
    training, test = _read_once(settings.data, settings.features)
    if (settings.out / "run.json").exists():
        settings = dataclasses.replace(settings, resume=settings.out)
    return train("cifar100", settings, lambda: task(settings, training, test), Console(quiet=True))


def _table(rows: Sequence[Record]) -> Table:
    """The mean accuracies over the seeds; the spread is their standard deviation."""
    groups: dict[tuple[str, float, float, float], list[Record]] = defaultdict(list)
    for row in rows:
        groups[(row.loss, row.noise, *row.recipe)].append(row)
    # Narrow enough for a terminal of 80 columns.
    title = "accuracy in %, mean±standard deviation over the seeds"
    table = Table(
        title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False
    )
    for name in ("loss", "noise", "lr", "temp", "seeds", "val top-k", "test top-1", "test top-k"):
        table.add_column(name, justify="left" if name == "loss" else "right")
    for (loss, *numbers), group in sorted(groups.items()):
        cells = [
            _spread([getattr(row, name) for row in group])
            for name in ("validation_topk", "test_top1", "test_topk")
        ]
        table.add_row(loss, *(f"{number:g}" for number in numbers), str(len(group)), *cells)
    return table


def _spread(values: list[float]) -> str:
    return f"{100 * mean(values):.2f}" + (f"±{100 * stdev(values):.2f}" if len(values) > 1 else "")
