"""`torchlml sweep scene-graph`: the runs of the study and of its tuning, into one CSV."""

import dataclasses
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from rich.console import Console, Group

from torchlml_lab.cli import parse_settings
from torchlml_lab.engine.folder import RunFolder
from torchlml_lab.engine.grid import Grid, GridSettings, check_grid, check_places, resuming, run_grid
from torchlml_lab.engine.run import train
from torchlml_lab.engine.table import plain_table, spread
from torchlml_lab.errors import BadInput
from torchlml_lab.tasks.scene_graph import recall_rows
from torchlml_lab.tasks.scene_graph.graphs import Splits
from torchlml_lab.tasks.scene_graph.methods import method_of, parse_method
from torchlml_lab.tasks.scene_graph.predicate_classification import (
    EXPERIMENT,
    SceneGraphSettings,
    check,
    read,
    task,
    vision,
)
from torchlml_lab.tasks.scene_graph.recall_rows import FREQUENCY, Record, column, columns
from torchlml_lab.tasks.scene_graph.recalls import KS, MODES, RECALLS, frequency_recall

METHODS = ("softmax", *(f"{one}-{k}" for one in ("lml", "truncated-entropy") for k in (20, 50, 100)), "bce")
# These settings of a run are the sweep's to choose.
_CHOSEN = ("out", "resume", "objective", "k", "seed")


@dataclass(frozen=True)
class SweepSettings(GridSettings):
    """Run all combinations of methods, seeds and learning rates that are not done, on VG or on VRD."""

    out: Path = Path("runs/scene-graph-sweep")
    """The folder for the runs, one folder each; the same command continues what was stopped."""
    methods: tuple[str, ...] = METHODS
    """What is minimised: softmax, bce, and lml-K or truncated-entropy-K with any k."""
    once: tuple[str, ...] = ()
    """Those of the methods that are run with the first seed only."""
    seeds: tuple[int, ...] = (0, 1, 2)
    """The seeds of each method."""
    tuned: Path | None = None
    """The CSV of an earlier sweep: each method gets the learning rate that was best on validation, and a k
    that was not tuned that of its objective's nearest k."""
    run: SceneGraphSettings = field(default_factory=SceneGraphSettings)
    """All that the runs have in common, as for `torchlml train scene-graph`."""


def main(arguments: Sequence[str]) -> None:
    """Read the options and run what is not done yet."""
    settings = parse_settings(SweepSettings, f"sweep {EXPERIMENT}", arguments, SweepSettings())
    runs = grid(settings)
    check_places(settings)
    baseline = frequencies(settings.run, read(settings.run))

    def write(path: Path, rows: Iterable[Record]) -> None:
        recall_rows.TABLE.write(path, [*baseline, *rows])

    study = Grid(EXPERIMENT, runs, _run_one, rows_of, write, lambda rows: _tables([*baseline, *rows]))
    run_grid(study, settings, Console())


def grid(settings: SweepSettings) -> list[SceneGraphSettings]:
    """The settings of every run; those that cannot be run raise `BadInput`."""
    check_grid(settings, settings.run, _CHOSEN, ("methods", "seeds"))
    parsed = {method: parse_method(method) for method in settings.methods}
    for method in settings.once:
        if method not in parsed:
            raise BadInput(f"`--once` names `{method}`, which is none of the `--methods`.")
    rates = dict.fromkeys(parsed, settings.learning_rates or (settings.run.learning_rate,))
    if settings.tuned is not None:
        if settings.learning_rates:
            raise BadInput("`--tuned` chooses the learning rates: do not give them too.")
        rows = recall_rows.TABLE.read(settings.tuned, "--tuned")
        best = recall_rows.best_rates(rows, settings.methods, settings.tuned)
        rates = {method: (rate,) for method, rate in best.items()}
    runs = []
    # The seed varies slowest: a sweep that is stopped early still has every method.
    for seed in settings.seeds:
        for method, (objective, k) in parsed.items():
            if method in settings.once and seed != settings.seeds[0]:
                continue
            for rate in rates[method]:
                one = dataclasses.replace(
                    settings.run,
                    out=settings.out / f"{method}_lr{rate:g}_seed{seed}",
                    objective=objective,
                    k=settings.run.k if k is None else k,
                    seed=seed,
                    learning_rate=rate,
                )
                check(one)
                runs.append(one)
    return list({one.out: one for one in runs}.values())


def rows_of(settings: SceneGraphSettings, result: dict[str, Any]) -> list[Record]:
    """The rows of a finished run: train and validation after each epoch, and the test of the best one."""
    return [
        _record(
            settings,
            method_of(settings.objective, settings.k).name,
            line["split"],
            line,
            epoch=line["epoch"],
            chosen=int(line["epoch"] == result["best_epoch"]),
            seconds=result["seconds"],
        )
        for line in RunFolder(settings.out, EXPERIMENT).metrics()
    ]


def frequencies(settings: SceneGraphSettings, splits: Splits) -> list[Record]:
    """The rows of the frequencies alone, on validation and test."""
    accelerator = Accelerator(cpu=True)
    return [
        _record(settings, FREQUENCY, name, frequency_recall(splits, name, settings.counts, accelerator))
        for name in ("validation", "test")
    ]


def _record(
    settings: SceneGraphSettings,
    method: str,
    split: str,
    measures: dict[str, float],
    epoch: int = 0,
    chosen: int = 1,
    seconds: float = 0.0,
) -> Record:
    trained = method != FREQUENCY
    variant = {
        "one-per-edge": settings.one_per_edge and trained,
        "without-bias": settings.without_bias and trained,
        "glove": settings.glove is not None and trained,
        "counts": settings.counts is not None,
    }
    return Record(
        data="vg" if settings.vg is not None else "vrd",
        vision=vision(settings) if trained else "vision-free",
        method=method,
        variant="+".join(name for name, is_so in variant.items() if is_so),
        seed=settings.seed if trained else 0,
        learning_rate=settings.learning_rate if trained else 0.0,
        epochs=settings.epochs if trained else 0,
        epoch=epoch,
        split=split,
        chosen=chosen,
        seconds=seconds,
        **columns(measures),
    )


_read_once = lru_cache(maxsize=1)(read)


def _run_one(settings: SceneGraphSettings) -> dict[str, Any]:
    # The files are the same for all runs of a sweep, so their settings are left out of the cache's key.
    common = SceneGraphSettings(
        vg=settings.vg, vrd=settings.vrd, validation=settings.validation, split_seed=settings.split_seed
    )
    return train(
        EXPERIMENT, resuming(settings), lambda: task(settings, _read_once(common)), Console(quiet=True)
    )


def _tables(rows: Sequence[Record]) -> Group:
    """The test of every method, a table for each mode; the spread is the deviation over the seeds."""
    groups: dict[tuple[str, str, float], list[Record]] = defaultdict(list)
    validation: dict[tuple[str, str, float], list[float]] = defaultdict(list)
    for row in rows:
        key = (row.method, row.variant, row.learning_rate)
        if row.split == "test":
            groups[key].append(row)
        elif row.split == "validation" and row.chosen:
            validation[key].append(row.recall)
    shown = []
    for mode, names in zip(MODES, (RECALLS[: len(KS)], RECALLS[len(KS) :]), strict=True):
        title = f"\ntest recall in %, {mode}, mean±deviation over the seeds; {rows[-1].vision}"
        table = plain_table(title, ("method", "lr", "seeds", "val mean", *names))
        for key, group in sorted(groups.items()):
            cells = [spread([getattr(row, column(name)) for row in group], 1) for name in names]
            name = " ".join(filter(None, key[:2]))
            table.add_row(name, f"{key[2]:g}", str(len(group)), spread(validation[key], 1), *cells)
        shown.append(table)
    return Group(*shown)
