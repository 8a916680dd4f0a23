"""`torchlml sweep scene-graph`: run all methods and seeds, and tabulate the results."""

import dataclasses
from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from rich.console import Group

from torchlml_lab.cli_errors import BadInput
from torchlml_lab.engine import output
from torchlml_lab.engine.output import StudyTable, Tried, new_console, plain_table, spread
from torchlml_lab.engine.run import train
from torchlml_lab.engine.run_directory import RunFolder
from torchlml_lab.engine.sweep import Grid, check_grid, checked_runs, read_tuned, resuming, run_grid
from torchlml_lab.studies.scene_graph.graphs import Splits
from torchlml_lab.studies.scene_graph.objectives import find_method, method_of, parse_method
from torchlml_lab.studies.scene_graph.settings import EXPERIMENT, SceneGraphSettings, SweepSettings
from torchlml_lab.studies.scene_graph.task import (
    KS,
    MEAN_RECALLS,
    MODES,
    RECALLS,
    check,
    frequency_recall,
    read,
    task,
    vision,
)

FREQUENCY = "frequency"
"""The name of the untrained baseline, which ranks relations only by their frequency."""


@dataclass(frozen=True)
class RecallRecord:
    """The recalls of one run after one epoch, on one split."""

    data: str
    """`vg` or `vrd`."""
    vision: str
    method: str
    """The objective and its k, if it has one, such as `lml-20`."""
    variant: str
    """The differences from the default run, such as `without-bias`."""
    seed: int
    learning_rate: float
    epochs: int
    epoch: int
    split: str
    """`train`, `validation` or `test`."""
    chosen: int
    """1 for the epoch that was best on validation, otherwise 0."""
    recall: float
    r20: float
    r50: float
    r100: float
    ng_r20: float
    ng_r50: float
    ng_r100: float
    mr20: float
    mr50: float
    mr100: float
    ng_mr20: float
    ng_mr50: float
    ng_mr100: float
    seconds: float
    """The duration of the whole run."""


def columns(measures: dict[str, float]) -> dict[str, float]:
    """Return the metrics, keyed by their column names in a record."""
    return {"recall": measures["recall"]} | {column(name): measures[name] for name in RECALLS + MEAN_RECALLS}


def column(measure: str) -> str:
    """Return the column name of a metric, such as `ng_r20` for `ng-R@20`."""
    return measure.lower().replace("@", "").replace("-", "_")


TABLE = StudyTable(
    RecallRecord,
    lambda row: (
        *(row.data, row.vision, row.method, row.variant),
        *(row.learning_rate, row.seed, row.epoch, row.split),
    ),
)


def best_rates(
    records: Sequence[RecallRecord], cells: Sequence[tuple[str, str]], path: Path
) -> dict[tuple[str, str], float]:
    """Find the learning rate with the best validation recall for each method and variant.

    Args:
        records: The records of a tuning sweep; test records are not used.
        cells: The (method, variant) pairs that need a learning rate.
        path: The file with the records, for error messages.

    Returns:
        The learning rate by method and variant. A k that was not tuned uses the rate of the nearest k that
        was tuned with the same objective, and a variant that was not tuned uses the rates of the default
        runs. `BadInput` is raised if a method is missing, or if its rates were tried with different seeds.
    """
    rates = {}
    for method, variant in cells:
        rows = [row for row in records if row.split == "validation" and row.chosen]
        of_variant = [row for row in rows if row.variant == variant]
        tried = [
            Tried(row.method, (row.learning_rate,), (row.data, row.seed), row.recall)
            for row in of_variant or [row for row in rows if not row.variant]
        ]
        model = _nearest(method, {one.method for one in tried})
        best = output.best_recipes(tried, [model], path, "method", "learning rate", "data and seeds")
        rates[method, variant] = best[model][0]
    return rates


def _nearest(method: str, tuned: Collection[str]) -> str:
    """Return the tuned method with the same objective and the nearest k, or `method` if there is none."""
    wanted = find_method(method)
    if method in tuned or wanted is None or wanted.k is None:
        return method
    k = wanted.k
    others = [one for name in tuned if (one := find_method(name)) and one.objective == wanted.objective]
    nearest = min(others, key=lambda one: (abs((one.k or 0) - k), one.name), default=wanted)
    return nearest.name


def title_of(rows: Sequence[RecallRecord], split: str) -> str:
    """Return the title of the recall table for a split."""
    about = next(row for row in rows if row.method != FREQUENCY)
    return (
        f"Recall in % (mean±standard deviation over the seeds) on {about.data} {split} images; predicate "
        f"classification, {about.vision}"
    )


# The options of a run that the sweep sets itself.
_CHOSEN = ("out", "resume", "objective", "k", "seed")


def main(settings: SweepSettings) -> None:
    """Run all unfinished combinations."""
    runs = grid(settings)
    baseline = frequencies(settings, read(settings.run))

    def write(path: Path, rows: Iterable[RecallRecord]) -> None:
        TABLE.write(path, [*baseline, *rows])

    study = Grid(EXPERIMENT, runs, _run_one, rows_of, write, lambda rows: _tables([*baseline, *rows]))
    run_grid(study, settings, new_console())


def grid(settings: SweepSettings) -> list[SceneGraphSettings]:
    """Return the settings of every run; raise `BadInput` if one of them is invalid."""
    check_grid(settings, settings.run, _CHOSEN, ("methods", "seeds"))
    parsed = {method: parse_method(method) for method in settings.methods}
    for method in settings.once:
        if method not in parsed:
            raise BadInput(f"`--once` may contain only methods from `--methods`, but it contains `{method}`.")
    kinds = _kinds(settings)
    cells = [(method, variant(kind)) for kind in kinds for method in parsed]
    rates = dict.fromkeys(cells, settings.learning_rates or (settings.run.learning_rate,))
    if settings.tuned is not None:
        rows = read_tuned(settings, TABLE)
        best = best_rates(rows, cells, settings.tuned)
        rates = {cell: (rate,) for cell, rate in best.items()}
    runs = []
    # The seed varies slowest, followed by the index of the rate, so that a sweep stopped early still covers
    # every method with the first rates.
    tries = max(len(found) for found in rates.values())
    for seed, place, kind, method in product(settings.seeds, range(tries), kinds, parsed):
        if method in settings.once and seed != settings.seeds[0]:
            continue
        found = rates[method, variant(kind)]
        if place < len(found):
            objective, k = parsed[method]
            named = f"{variant(kind) or 'bias'}_" if settings.biases else ""
            one = dataclasses.replace(
                kind,
                out=settings.out / f"{named}{method}_lr{found[place]:g}_seed{seed}",
                objective=objective,
                k=settings.run.k if k is None else k,
                seed=seed,
                learning_rate=found[place],
            )
            runs.append(one)
    return checked_runs(runs, check)


def _kinds(settings: SweepSettings) -> list[SceneGraphSettings]:
    """Return one copy of the shared settings for each kind of bias."""
    if not settings.biases:
        return [settings.run]
    if settings.run.without_bias or settings.run.leave_one_out:
        given = "without-bias" if settings.run.without_bias else "leave-one-out"
        raise BadInput(f"`--run.{given}` cannot be combined with `--biases`, which sets it for each run.")
    if ("outside" in settings.biases) != (settings.run.counts is not None):
        raise BadInput("`--biases outside` and `--run.counts` must be used together.")
    return [
        dataclasses.replace(
            settings.run,
            counts=settings.run.counts if bias == "outside" else None,
            leave_one_out=bias == "leave-one-out",
            without_bias=bias == "none",
        )
        for bias in settings.biases
    ]


def rows_of(settings: SceneGraphSettings, result: dict[str, Any]) -> list[RecallRecord]:
    """Return a run's records: training and validation after each epoch, and test after the best epoch."""
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


def frequencies(settings: SweepSettings, splits: Splits) -> list[RecallRecord]:
    """Return the frequency baseline's validation and test records for each source of counts."""
    accelerator = Accelerator(cpu=True)
    sources = {kind.counts: kind for kind in _kinds(settings)}
    return [
        _record(kind, FREQUENCY, name, frequency_recall(splits, name, counts, accelerator))
        for counts, kind in sources.items()
        for name in ("validation", "test")
    ]


def variant(settings: SceneGraphSettings, trained: bool = True) -> str:
    """Return the value of the `variant` column. For the untrained baseline, only `counts` applies."""
    differs = {
        "one-per-edge": settings.one_per_edge and trained,
        "without-bias": settings.without_bias and trained,
        "leave-one-out": settings.leave_one_out and trained,
        "glove": settings.glove is not None and trained,
        "counts": settings.counts is not None,
    }
    return "+".join(name for name, is_so in differs.items() if is_so)


def _record(
    settings: SceneGraphSettings,
    method: str,
    split: str,
    measures: dict[str, float],
    epoch: int = 0,
    chosen: int = 1,
    seconds: float = 0.0,
) -> RecallRecord:
    trained = method != FREQUENCY
    return RecallRecord(
        data="vg" if settings.vg is not None else "vrd",
        vision=vision(settings) if trained else "vision-free",
        method=method,
        variant=variant(settings, trained),
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
    # All runs of a sweep use the same data, so only the settings that select the data are in the cache key.
    common = SceneGraphSettings(
        vg=settings.vg, vrd=settings.vrd, validation=settings.validation, split_seed=settings.split_seed
    )
    return train(
        EXPERIMENT, resuming(settings), lambda: task(settings, _read_once(common)), new_console(quiet=True)
    )


def _tables(rows: Sequence[RecallRecord]) -> Group:
    """Tabulate the mean and standard deviation of each method's test recalls, with one table per mode."""
    groups: dict[tuple[str, str, float], list[RecallRecord]] = defaultdict(list)
    validation: dict[tuple[str, str, float], list[float]] = defaultdict(list)
    for row in rows:
        key = (row.method, row.variant, row.learning_rate)
        if row.split == "test":
            groups[key].append(row)
        elif row.split == "validation" and row.chosen:
            validation[key].append(row.recall)
    shown = []
    for mode, names in zip(MODES, (RECALLS[: len(KS)], RECALLS[len(KS) :]), strict=True):
        title = f"\ntest recall in %, {mode}, mean±std over the seeds; {rows[-1].vision}"
        output = plain_table(title, ("method", "lr", "seeds", "val mean", *names))
        for key, group in sorted(groups.items()):
            cells = [spread([getattr(row, column(name)) for row in group], 1) for name in names]
            name = " ".join(filter(None, key[:2]))
            output.add_row(name, f"{key[2]:g}", str(len(group)), spread(validation[key], 1), *cells)
        shown.append(output)
    return Group(*shown)
