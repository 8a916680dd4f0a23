"""`torchlml demo`: compare five losses on images of k digits with one observed label, in about a minute."""

from collections.abc import Sequence

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from torchlml_lab.cli_errors import BadInput
from torchlml_lab.engine.output import ProgressBar, new_console, plain_table
from torchlml_lab.engine.settings import check_threads, use_threads
from torchlml_lab.files import check_folder, writing
from torchlml_lab.studies.digits import report
from torchlml_lab.studies.digits.model import (
    CLASSES,
    COLUMNS,
    CONDITIONS,
    METHODS,
    SCALED,
    SKEW,
    Images,
    Measured,
    Results,
    make,
    measure,
    spread,
    train,
    values,
)
from torchlml_lab.studies.settings import DemoSettings

SHOWN = 4


def main(settings: DemoSettings) -> None:
    """Run the demo."""
    _check(settings)
    console = new_console()
    with use_threads(settings.threads):
        results, examples, answers = run(settings, console)
    meanings = {method.name: method.meaning for method in METHODS}
    meanings[SCALED] = "the network trained with cross-entropy; p is k times the softmax, clipped at 1"
    findings = {condition: report.sentences(results, condition, settings.k) for condition in CONDITIONS}
    limits = report.limits(settings.seeds, settings.k)
    for condition in CONDITIONS:
        console.print(_table(results, condition, settings, list(meanings)))
        for said in findings[condition]:
            console.print(f"- {said}", highlight=False)
        console.print()
    console.print(limits, highlight=False)
    scores, calibration = settings.out / "scores.png", settings.out / "calibration.png"
    with writing("The report", settings.out, "the tables above contain all results"):
        settings.out.mkdir(parents=True, exist_ok=True)
        report.draw_scores(results, settings.k, scores)
        report.draw_calibration(results, calibration)
        report.write(
            settings.out / "report.html",
            setting=_setting(settings),
            results=results,
            findings=findings,
            limits=limits,
            meanings=meanings,
            plots=(scores, calibration),
            examples=examples,
            answers=answers,
        )
    console.print(
        f"\nThe report is {settings.out / 'report.html'}, and the plots are {scores} and {calibration}.",
        soft_wrap=True,
    )


def run(settings: DemoSettings, console: Console) -> tuple[Results, Images, dict[str, Tensor]]:
    """Train and evaluate every method for every seed and condition.

    Args:
        settings: The settings of the demo.
        console: The console for the progress bar.

    Returns:
        All measurements, a few test images, and the probabilities that each method predicts for them.
    """
    pairs = [(condition, seed) for condition in CONDITIONS for seed in range(settings.seeds)]
    data = [make(settings.k, settings.images, 2000, condition, seed) for condition, seed in pairs]
    training, tests = [pair[0] for pair in data], [pair[1] for pair in data]
    inputs = torch.stack([test.pixels.flatten(1) for test in tests])
    results: dict[tuple[str, str], list[Measured]] = {}
    answers = {}
    with ProgressBar(console) as progress:
        task = progress.add_task("", total=len(METHODS) * settings.epochs)
        for method in METHODS:
            progress.update(task, description=f"{method.name:<18}")
            seeds = [seed for _, seed in pairs]
            networks = train(
                method, training, seeds, settings.k, settings.epochs, lambda: progress.advance(task)
            )
            with torch.no_grad():
                logits = networks(inputs)
            p = method.probability(logits, settings.k)
            named = [(method.name, p)]
            if method.name == "cross-entropy":
                named.append((SCALED, (settings.k * p).clamp(max=1)))
            for name, probability in named:
                answers[name] = probability[0, :SHOWN]
                for (condition, _), one, ranking, test in zip(pairs, probability, logits, tests, strict=True):
                    new = measure(one, ranking, test)
                    results.setdefault((condition, name), []).append(new)
    shown = Images(tests[0].pixels[:SHOWN], tests[0].present[:SHOWN], tests[0].named[:SHOWN])
    return results, shown, answers


def _check(settings: DemoSettings) -> None:
    if not 2 <= settings.k < CLASSES:
        raise BadInput(f"`--k` must be from 2 to {CLASSES - 1}, but it is {settings.k}.")
    for name, least in (("seeds", 2), ("images", 100), ("epochs", 1)):
        if getattr(settings, name) < least:
            raise BadInput(f"`--{name}` must be at least {least}, but it is {getattr(settings, name)}.")
    check_threads(settings.threads)
    check_folder("--out", settings.out)


def _setting(settings: DemoSettings) -> str:
    return (
        f"Each image shows {settings.k} different handwritten digits side by side, and one of them is the "
        f"observed label. The same small network is trained with each loss on {settings.images} images for "
        f"{settings.epochs} epochs, with the same initial weights and batches. It is tested on 2000 images "
        f"of other handwritten digits, with {settings.seeds} seeds. In the uniform condition, each digit in "
        f"an image is equally likely to be observed. In the skewed condition, a 0 is {SKEW:g} times as "
        "likely to be observed as a 9."
    )


def _table(results: Results, condition: str, settings: DemoSettings, names: Sequence[str]) -> Table:
    title = f"observed label: {condition}; k = {settings.k}; mean ± std over {settings.seeds} seeds"
    # The cells are short, so that the table fits in 80 characters.
    table = plain_table(title, ("method", *(heading for _, heading, _, _ in COLUMNS)))
    for name in names:
        cells = []
        for column, _, _, digits in COLUMNS:
            middle, deviation = spread(values(results, condition, name, column))
            cells.append(f"{middle:.{digits}f}±" + f"{deviation:.{digits}f}".removeprefix("0"))
        table.add_row(name, *cells, style="bold" if name == "LML" else None)
    return table
