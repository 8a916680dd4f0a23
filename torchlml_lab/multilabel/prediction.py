"""`torchlml predict RUN` for multi-label runs: predict the labels of new samples with their probabilities."""

import csv
import json
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from rich.table import Table

from torchlml_lab.cli_errors import BadInput
from torchlml_lab.data.labeled_rows import Matrix
from torchlml_lab.engine.output import new_console, plain_table
from torchlml_lab.engine.run import say
from torchlml_lab.files import check_file, replacing, shown, writing
from torchlml_lab.multilabel.model import TrainedLabels, load, origin_of_k, prepared_rows, read_rows
from torchlml_lab.multilabel.samples import in_words
from torchlml_lab.multilabel.settings import PredictSettings, RuleName

ON_SCREEN = 20


class RankedLabels(NamedTuple):
    """The predicted labels of one sample, best first."""

    labels: list[str]
    probabilities: list[float]


def main(settings: PredictSettings) -> None:
    """Predict the labels of all samples, write them to `--out`, and print those of the first samples."""
    if settings.data is None:
        raise BadInput("`--data` is missing. Pass a file of samples.")
    if settings.out is not None:
        check_file("--out", settings.out)
        if settings.out.suffix not in (".csv", ".jsonl"):
            raise BadInput(f"`--out` must end in `.csv` or `.jsonl`, but it is `{settings.out}`.")
        if not settings.out.parent.is_dir():
            raise BadInput(f"`--out` must be in an existing directory, but it is `{settings.out}`.")
    if settings.top is not None and settings.rule is not None:
        raise BadInput(
            "`--top` and `--rule` cannot be combined, because a rule chooses the number of labels."
        )
    trained = load(settings.run)
    known = len(trained.preparation.labels)
    top = min(5, known) if settings.top is None else settings.top
    if not 1 <= top <= known:
        raise BadInput(f"`--top` must be from 1 to {known} (the number of labels), but it is {top}.")
    rows = read_rows(trained, settings.data, labeled=False)
    inputs, notes = prepared_rows(trained, rows, in_words(settings.data))
    console = new_console()
    say(notes, console)
    rule = trained.decisions.rule if settings.rule == "auto" else settings.rule
    ranked = best_labels(trained, inputs, top) if rule is None else decided_labels(trained, inputs, rule)
    try:
        if settings.out is not None:
            with writing("The labels", settings.out, "the table above shows the first samples"):
                _write(settings.out, ranked)
    finally:
        console.print(_table(ranked[:ON_SCREEN], rows.texts, _meaning(trained)))
    if len(ranked) > ON_SCREEN:
        rest = "" if settings.out else ". Use `--out FILE` to write the labels of all samples"
        console.print(f"The table shows {ON_SCREEN} of {len(ranked)} samples{rest}.", highlight=False)
    if rule is not None:
        say([f"Rule `{rule}`: {trained.decisions.in_words(rule, trained.preparation.k)}."], console)
    if trained.uses_k:
        say([origin_of_k(trained.settings.k, trained.preparation.k, trained.preparation.mean_count)], console)
    if settings.out is not None:
        console.print(f"The labels of all samples are in {settings.out}.", soft_wrap=True)


def best_labels(trained: TrainedLabels, inputs: Matrix, top: int) -> list[RankedLabels]:
    """Return the top labels of each prepared sample."""
    names, found = trained.preparation.labels, []
    for logits, _ in trained.scores(inputs):
        best = trained.probabilities(logits).gather(-1, order := logits.topk(top, dim=-1).indices)
        for places, values in zip(order.tolist(), best.tolist(), strict=True):
            found.append(RankedLabels([names[place] for place in places], values))
    return found


def decided_labels(trained: TrainedLabels, inputs: Matrix, rule: RuleName) -> list[RankedLabels]:
    """Return the labels that a rule chooses for each prepared sample. A rule may choose no labels."""
    names, found = trained.preparation.labels, []
    for logits, _ in trained.scores(inputs):
        values = trained.probabilities(logits)
        chosen = trained.decisions.decide(logits, values, trained.preparation.k, rule)
        sizes = chosen.sum(-1)
        order = logits.masked_fill(~chosen, -torch.inf).topk(int(sizes.max()), dim=-1).indices
        best = values.gather(-1, order)
        for places, row, size in zip(order.tolist(), best.tolist(), sizes.tolist(), strict=True):
            found.append(RankedLabels([names[place] for place in places[:size]], row[:size]))
    return found


def _meaning(trained: TrainedLabels) -> str:
    """Return the meaning of the predicted probabilities, for the heading of the table."""
    return f"P(label in top k), k = {trained.preparation.k}" if trained.uses_k else "P(label)"


def _table(ranked: Sequence[RankedLabels], texts: Sequence[str] | None, meaning: str) -> Table:
    heads = ("row", *(["text"] if texts else []), f"labels with {meaning}, in %")
    table = plain_table("Predicted labels, best first", heads, left=len(heads))
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
