"""The report on a multi-label run: ranking and set metrics, calibration, metrics per label, and plots."""

import csv
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from torchlml.metrics import TopKRecall
from torchlml_lab import plots
from torchlml_lab.cli_errors import BadInput
from torchlml_lab.data.labeled_rows import LabeledRows, Matrix
from torchlml_lab.engine import run_directory
from torchlml_lab.engine.output import new_console, plain_table
from torchlml_lab.engine.run import say
from torchlml_lab.files import check_folder, counted, replacing
from torchlml_lab.multilabel import decisions
from torchlml_lab.multilabel.decisions import Decisions, LabelResult, SetMeasures, SetResult, label_results
from torchlml_lab.multilabel.losses import unlike_logits
from torchlml_lab.multilabel.model import (
    NAMES,
    TEMPERATURE,
    Measures,
    TrainedLabels,
    load,
    popularity,
    prepared_rows,
    probabilities,
    read_rows,
    row_slices,
)
from torchlml_lab.multilabel.samples import (
    EMBEDDINGS,
    Data,
    aligned,
    in_words,
    keeps_unlabeled,
    label_lists,
    read,
)
from torchlml_lab.multilabel.settings import RULES, EvaluateSettings, LossName, MultilabelSettings, RuleName

ENTRIES = 2**21  # the maximum number of logits used for calibration, unless there are very many labels
TEMPERATURES = torch.logspace(-1, 1, 41).tolist()


def best_temperature(logits: Tensor, observed: Tensor, loss: LossName, k: int) -> float:
    """Choose the temperature that maximizes the likelihood of the observed labels.

    Args:
        logits: (R, n).
        observed: bool (R, n), the labels of each row.
        loss: The training loss.
        k: The number of labels to predict.

    Returns:
        The best of 41 temperatures from 0.1 to 10.
    """

    def surprise(temperature: float) -> float:
        found = probabilities(logits, loss, k, temperature).double().clamp(1e-9, 1 - 1e-9)
        return -torch.where(observed, found, 1 - found).log().mean().item()

    return min(TEMPERATURES, key=surprise)


def calibrate(trained: TrainedLabels, rows: LabeledRows) -> tuple[float, Decisions]:
    """Fit the temperature and the rules of a run on samples that it was not trained on."""
    labels, k = len(trained.preparation.labels), trained.preparation.k
    few = rows.take(torch.arange(min(len(rows), max(50, ENTRIES // labels))).numpy())
    logits = torch.cat([found for found, _ in trained.scores(trained.preparation.apply(few).inputs)])
    observed = torch.from_numpy(few.labels[:, :labels].toarray().astype(bool))
    temperature = best_temperature(logits, observed, trained.settings.loss, k)
    values = probabilities(logits, trained.settings.loss, k, temperature)
    return temperature, decisions.fit(logits, values, observed, k, empty=bool((few.counts == 0).any()))


VALIDATION = "validation samples"
CURVE = (1, 2, 3, 5, 10, 20, 50, 100)
BINS = 10
FEWEST = 20  # bins with fewer labels are not plotted, because they are too noisy
MOST_SCORES = 2**27  # the maximum number of scores stored for computing average precisions (512 MB)
IN_REPORT = 20  # the maximum number of labels in the report; the CSV file contains all labels


@dataclass(frozen=True)
class Report:
    """The metrics of a run on a set of samples."""

    rows: int
    what: str
    """A description of the samples, for example "validation samples"."""
    measures: dict[str, float]
    popular: dict[str, float]
    """The same metrics for a baseline that always predicts the most frequent labels."""
    recalls: dict[int, float]
    """Recall@k of the run for each k in `CURVE`, for the plot."""
    popular_recalls: dict[int, float]
    calibration: list[tuple[float, float, int]]
    """The mean probability, the share of correct labels and the label count of each bin. The bins divide the
    range from 0 to 1 into tenths."""
    calibration_error: float
    """The mean of |mean probability - share of correct labels| over the bins, weighted by label count."""
    top_calibration_error: float
    """The calibration error of the top k labels of each sample."""
    rule: RuleName
    """The rule of the run."""
    sets: dict[RuleName, SetResult]
    labels: list[LabelResult]
    """The metrics of each label under the rule of the run, most frequent first."""

    def tables(self) -> tuple[Table, Table]:
        """Return a table of the ranking metrics and a table of the set metrics."""
        return self._ranking_table(), self._set_table()

    def _set_table(self) -> Table:
        heads = ("rule", "labels per sample", "micro-F1", "macro-F1", "exact sets")
        table = plain_table(f"Label sets, metrics in percent (*: the rule of the run; {self._errors})", heads)
        for rule, found in self.sets.items():
            values = (f"{100 * value:.1f}" for value in (found.micro_f1, found.macro_f1, found.exact))
            table.add_row(f"{rule}{'*' * (rule == self.rule)}", f"{found.size:.2f}", *values)
        return table

    @property
    def _errors(self) -> str:
        return f"calibration error {100 * self.calibration_error:.2f}"

    def _ranking_table(self) -> Table:
        ks = sorted({int(name.partition("@")[2]) for name in self.measures})
        title = (
            f"{self.rows} {self.what}, metrics in percent (in parentheses: baseline of most frequent labels)"
        )
        table = plain_table(title, ("k", *(f"{name}@k" for name in NAMES.values())))
        for k in ks:
            cells = [
                f"{100 * self.measures[f'{name}@{k}']:.1f} ({100 * self.popular[f'{name}@{k}']:.1f})"
                for name in NAMES
            ]
            table.add_row(str(k), *cells)
        return table

    def page(self, trained: TrainedLabels) -> str:
        """Return the report as Markdown."""
        ks = sorted({int(name.partition("@")[2]) for name in self.measures})
        settings, prepared = trained.settings, trained.preparation
        lines = [
            "# Multi-label report",
            "",
            f"**P@1 is {100 * self.measures['precision@1']:.1f}% on {self.rows} {self.what}.** Always "
            f"predicting the most frequent labels reaches {100 * self.popular['precision@1']:.1f}%.",
            "",
            f"The model was trained on {prepared.rows} samples from `{in_words(settings.train)}` with "
            f"{len(prepared.labels)} labels and the loss `{settings.loss}`. Its weights are those of epoch "
            f"{trained.epoch}, the best epoch on the validation samples."
            + ("" if trained.network.linear is None else f" {trained.network.linear.mixture.in_words()}"),
            "",
            "All metrics are in percent. The values in parentheses are those of the baseline, which predicts "
            "the most frequent training labels for every sample.",
            "",
            "| k | " + " | ".join(f"{name}@k" for name in NAMES.values()) + " |",
            "| --- |" + " --- |" * len(NAMES),
        ]
        for k in ks:
            cells = [
                f"{100 * self.measures[f'{name}@{k}']:.2f} ({100 * self.popular[f'{name}@{k}']:.2f})"
                for name in NAMES
            ]
            lines.append(f"| {k} | " + " | ".join(cells) + " |")
        return "\n".join(
            [
                *lines,
                "",
                "- **P@k**: share of the top k labels that are correct.",
                "- **nDCG@k**: like P@k, but normalized and with more weight on the first ranks.",
                "- **PSP@k**: propensity-scored precision, in which rare labels have more weight.",
                "- **R@k**: share of a sample's labels that are among the top k.",
                "",
                *self._set_lines(trained),
                *self._label_lines(),
                "![Left: recall against k. Right: share of correct labels against predicted probability]"
                "(report.png)",
                "",
            ]
        )

    def _set_lines(self, trained: TrainedLabels) -> list[str]:
        """Return the section about sets and calibration."""
        own, k = self.sets[self.rule], trained.preparation.k
        lines = [
            "## Label sets",
            "",
            f"**The rule `{self.rule}` reaches a micro-F1 of {100 * own.micro_f1:.1f}%, and "
            f"{100 * own.exact:.1f}% of the sets are exactly right.** On the validation samples, this rule "
            "has the highest mean of the two values. `torchlml predict --rule auto` uses it.",
            "",
            "| rule | chosen labels | labels per sample | micro-F1 | macro-F1 | exact sets |",
            "| --- | --- | --- | --- | --- | --- |",
        ]
        for rule, found in self.sets.items():
            values = (f"{100 * value:.2f}" for value in (found.micro_f1, found.macro_f1, found.exact))
            cells = (f"`{rule}`", trained.decisions.in_words(rule, k), f"{found.size:.2f}", *values)
            lines.append(f"| {' | '.join(cells)} |")
        return [
            *lines,
            "",
            "Macro-F1 is the mean F1 over the labels that occur in the samples or in the chosen sets. "
            f"The calibration error is {100 * self.calibration_error:.2f}% over all labels and "
            f"{100 * self.top_calibration_error:.2f}% over the top k labels of each sample (k = {k}). It is "
            "the mean absolute difference between the mean predicted probability and the share of correct "
            f"labels over {BINS} bins, weighted by the number of predictions in each bin.",
            "",
        ]

    def _label_lines(self) -> list[str]:
        """Return the section about the most frequent labels."""
        lines = [
            "## Labels",
            "",
            f"Precision and recall are those of the rule `{self.rule}`. AP is the average precision when all "
            "samples are ranked by the probability of the label. These metrics are in percent. "
            f"The file `labels.csv` contains all {len(self.labels)} labels.",
            "",
            "| label | samples | chosen | precision | recall | AP |",
            "| --- | --- | --- | --- | --- | --- |",
        ]
        for one in self.labels[:IN_REPORT]:
            values = ("–" if value is None else f"{100 * value:.1f}" for value in one[3:])
            name = one.label.replace("|", "\\|")
            lines.append(f"| {name} | {one.support} | {one.predicted} | {' | '.join(values)} |")
        return [*lines, ""]


def report_run(run: Path, trained: TrainedLabels, data: Data, console: Console) -> None:
    """Calibrate a finished run and evaluate it, then print and write the report.

    The run is evaluated on its test samples or, if it has none, on its validation samples.
    """
    temperature, decided = calibrate(trained.for_validation(), data.validation)
    trained = trained._replace(temperature=temperature, decisions=decided)
    fitted = {"temperature": temperature, "decisions": asdict(decided)}
    with replacing(run / TEMPERATURE) as temporary:
        temporary.write_text(json.dumps(fitted) + "\n", encoding="utf-8")
    if data.encoder is not None:
        data.encoder.save(run / EMBEDDINGS)
    if data.test is None:
        trained, rows, what = trained.for_validation(), data.validation, VALIDATION
    else:
        rows, what = data.test, "test samples"
    inputs, _ = prepared_rows(trained, rows, "")
    report = make(trained, inputs, rows, what)
    console.print(*report.tables())
    write(report, trained, run, console)


def make(trained: TrainedLabels, inputs: Matrix, rows: LabeledRows, what: str) -> Report:
    """Evaluate a run on samples.

    Args:
        trained: The run.
        inputs: The network inputs of the samples.
        rows: The same samples. The first labels in `rows.names` must be those of the run, in the same order.
        what: A description of the samples, for titles.
    """
    prepared = trained.preparation
    labels = len(rows.names)
    found = Measures(prepared, labels)
    ks = [k for k in CURVE if k <= len(prepared.labels)]
    curves = [TopKRecall(ks, sync_on_compute=False) for _ in range(2)]
    popular = torch.tensor(prepared.counts, dtype=torch.float32)
    bins, top_bins = torch.zeros(2, 3, BINS, dtype=torch.float64)
    sets = {rule: SetMeasures(labels) for rule in RULES}
    kept = len(rows) * len(prepared.labels) <= MOST_SCORES
    stored = np.empty((len(rows), len(prepared.labels) if kept else 0), dtype=np.float32)
    for logits, part in trained.scores(inputs):
        lists = label_lists(rows.labels[part])
        observed = torch.from_numpy(rows.labels[part].toarray().astype(bool))
        found.update(logits, lists)
        listed = unlike_logits(lists, labels)
        for curve, scores in zip(curves, (logits, popular.expand_as(logits)), strict=True):
            curve.update(torch.nn.functional.pad(scores, (0, found.more)), listed, mask=found.may_be_found)
        values, right = trained.probabilities(logits), observed[:, : logits.shape[1]]
        for rule, one in sets.items():
            one.update(trained.decisions.decide(logits, values, prepared.k, rule), observed)
        if kept:
            stored[part] = values.numpy()
        top = logits.topk(prepared.k, dim=-1).indices
        bins += _binned(values, right)
        top_bins += _binned(values.gather(-1, top), right.gather(-1, top))
    chunks = row_slices(len(rows), labels)
    return Report(
        rows=len(rows),
        what=what,
        measures=found.result(),
        popular=popularity(prepared, (label_lists(rows.labels[part]) for part in chunks), labels),
        recalls=_by_k(curves[0].compute(), ks),
        popular_recalls=_by_k(curves[1].compute(), ks),
        calibration=[
            (float(total / count), float(right / count), int(count))
            for total, right, count in zip(*bins.tolist(), strict=True)
            if count
        ],
        calibration_error=_calibration_error(bins),
        top_calibration_error=_calibration_error(top_bins),
        rule=trained.decisions.rule,
        sets={rule: one.result() for rule, one in sets.items()},
        labels=label_results(rows, sets[trained.decisions.rule], stored),
    )


def _calibration_error(bins: Tensor) -> float:
    """Return the mean of |mean probability - share of correct labels| over bins, weighted by bin size."""
    total, right, count = bins
    return float((total - right).abs().sum() / count.sum())


def write(report: Report, trained: TrainedLabels, folder: Path, console: Console) -> None:
    """Write `report.md`, `report.png` and `labels.csv` to a directory."""
    folder.mkdir(parents=True, exist_ok=True)
    plots.draw_recall_and_calibration(
        {"this run": report.recalls, "most frequent labels": report.popular_recalls},
        [(probability, share) for probability, share, count in report.calibration if count >= FEWEST],
        folder / "report.png",
        title=f"Recall on {report.rows} {report.what}",
    )
    with (
        replacing(folder / "labels.csv") as temporary,
        temporary.open("w", newline="", encoding="utf-8") as file,
    ):
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(LabelResult._fields)
        for one in report.labels:
            writer.writerow((*one[:3], *("" if value is None else f"{value:.6f}" for value in one[3:])))
    with replacing(folder / "report.md") as temporary:
        temporary.write_text(report.page(trained), encoding="utf-8")
    console.print(
        f"The report is in {folder / 'report.md'}, its plots are in {folder / 'report.png'}, and the metrics "
        f"of each label are in {folder / 'labels.csv'}.",
        soft_wrap=True,
    )


def _by_k(recalls: dict[str, Tensor], ks: Sequence[int]) -> dict[int, float]:
    return {k: float(recalls[f"recall@{k}"]) for k in ks}


def _binned(probabilities: Tensor, right: Tensor) -> Tensor:
    """Return the sum of probabilities, the number of correct labels and the label count for each bin."""
    values = probabilities.flatten().double()
    place = (values * BINS).long().clamp(max=BINS - 1)
    return torch.stack(
        [
            torch.zeros(BINS, dtype=torch.float64).index_add_(0, place, each)
            for each in (values, right.flatten().double(), torch.ones_like(values))
        ]
    )


def main(settings: EvaluateSettings) -> None:
    """Evaluate a run, print the tables, and write the report."""
    out = settings.out or (settings.run if settings.data is None else None)
    trained = load(settings.run)
    if out is not None:
        check_folder("--out", out)
    rows, what, notes = _rows(settings, trained)
    if what == VALIDATION:
        trained = trained.for_validation()
    inputs, more = prepared_rows(trained, rows, in_words(settings.data) or what)
    console = new_console()
    say([*notes, *more], console)
    report = make(trained, inputs, rows, what)
    console.print(*report.tables())
    if out is not None:
        write(report, trained, out, console)


def _rows(settings: EvaluateSettings, trained: TrainedLabels) -> tuple[LabeledRows, str, list[str]]:
    """Return the samples to evaluate on, a description of them, and notes for the user."""
    if settings.data is None:
        if settings.data_labels is not None:
            raise BadInput("`--data-labels` requires `--data`.")
        moved = {name: getattr(settings, name) for name in ("train", "valid", "test")}
        stored = run_directory.read_moved(MultilabelSettings, settings.run, moved)
        data = read(replace(stored, out=settings.run))  # the run directory may also have moved
        known, found = trained.preparation, data.training
        if (len(found), found.names) != (known.rows, known.labels):
            renamed = found.names != known.labels and len(found.names) == len(known.labels)
            names = " with other names" if renamed else ""
            raise BadInput(
                f"`{in_words(stored.train)}` is not the file that the model was trained on: "
                f"it has {len(found)} training samples and {len(found.names)} labels, but the run had "
                f"{known.rows} samples and {len(known.labels)} labels{names}."
            )
        if data.test is None:
            return data.validation, VALIDATION, []
        return data.test, "test samples", []
    found, notes = read_rows(trained, settings.data, settings.data_labels), list[str]()
    source = in_words(settings.data)
    there = found.counts > 0
    if not there.any():
        raise BadInput(f"`--data` must have at least one sample with labels, but `{source}` has none.")
    if not keeps_unlabeled(trained.settings, trained.preparation.columns) and not there.all():
        skipped = counted(int((~there).sum()), "sample without labels was", "samples without labels were")
        notes.append(f"`{source}`: {skipped} skipped.")
        found = found.take(there)
    return (
        aligned(found, trained.preparation.labels, source, notes),
        f"samples from {Path(source).name}",
        notes,
    )
