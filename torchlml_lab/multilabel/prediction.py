"""`torchlml predict RUN` of multi-label runs: the best labels of new rows, with their probabilities."""

import csv
import json
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from rich.table import Table

from torchlml_lab.cli_errors import BadInput
from torchlml_lab.data.labelled_rows import Matrix
from torchlml_lab.engine.output import new_console, plain_table
from torchlml_lab.engine.run import say
from torchlml_lab.files import check_file, replacing, shown, writing
from torchlml_lab.multilabel.model import TrainedLabels, load, prepared_rows, read_rows
from torchlml_lab.multilabel.settings import PredictSettings

ON_SCREEN = 20


class RankedLabels(NamedTuple):
    """The best labels of one row, the best first."""

    labels: list[str]
    probabilities: list[float]


def main(settings: PredictSettings) -> None:
    """Predict, write all rows, and print the first."""
    if settings.data is None:
        raise BadInput("`--data` is missing: give a file of rows to predict the labels of.")
    if settings.out is not None:
        check_file("--out", settings.out)
        if settings.out.suffix not in (".csv", ".jsonl"):
            raise BadInput(f"`--out` names `{settings.out}`, which must end in `.csv` or `.jsonl`.")
        if not settings.out.parent.is_dir():
            raise BadInput(f"`--out` names `{settings.out}`, whose folder does not exist.")
    trained = load(settings.run)
    known = len(trained.preparation.labels)
    top = min(5, known) if settings.top is None else settings.top
    if not 1 <= top <= known:
        raise BadInput(f"`--top` is {top}, and must be from 1 to {known}, the labels of the run.")
    rows = read_rows(trained, settings.data, labelled=False)
    inputs, notes = prepared_rows(trained, rows, settings.data)
    console = new_console()
    say(notes, console)
    ranked = best_labels(trained, inputs, top)
    try:
        if settings.out is not None:
            with writing("The labels", settings.out, "the table above shows the first rows"):
                _write(settings.out, ranked)
    finally:
        console.print(_table(ranked[:ON_SCREEN], rows.texts, trained.preparation.k))
    if len(ranked) > ON_SCREEN:
        rest = "" if settings.out else "; `--out` writes all to a file"
        console.print(f"These are {ON_SCREEN} of {len(ranked)} rows{rest}.", highlight=False)
    if settings.out is not None:
        console.print(f"The labels of all rows are in {settings.out}.", soft_wrap=True)


def best_labels(trained: TrainedLabels, inputs: Matrix, top: int) -> list[RankedLabels]:
    """The best labels of prepared rows."""
    names, found = trained.preparation.labels, []
    for logits, _ in trained.scores(inputs):
        best = trained.probabilities(logits).gather(-1, order := logits.topk(top, dim=-1).indices)
        for places, values in zip(order.tolist(), best.tolist(), strict=True):
            found.append(RankedLabels([names[place] for place in places], values))
    return found


def _table(ranked: Sequence[RankedLabels], texts: Sequence[str] | None, k: int) -> Table:
    title = f"the best labels, and the probability in percent of each to be among the {k} that the row has"
    heads = ("row", *(["text"] if texts else []), "labels")
    table = plain_table(title, heads, left=len(heads))
    for number, row in enumerate(ranked):
        cells = [
            f"{name} {100 * value:.0f}" for name, value in zip(row.labels, row.probabilities, strict=True)
        ]
        text = [shown(texts[number])] if texts else []
        table.add_row(str(number + 1), *text, ", ".join(cells))
    return table


def _write(path: Path, ranked: Sequence[RankedLabels]) -> None:
    with replacing(path) as temporary, temporary.open("w", newline="", encoding="utf-8") as file:
        if path.suffix == ".jsonl":
            for number, row in enumerate(ranked, 1):
                values = [round(value, 6) for value in row.probabilities]
                line = {"row": number, "labels": row.labels, "probabilities": values}
                file.write(json.dumps(line, ensure_ascii=False) + "\n")
            return
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(("row", "rank", "label", "probability"))
        for number, row in enumerate(ranked, 1):
            for rank, (name, value) in enumerate(zip(row.labels, row.probabilities, strict=True), 1):
                writer.writerow((number, rank, name, f"{value:.6f}"))
