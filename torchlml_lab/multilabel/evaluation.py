"""`torchlml evaluate RUN` of multi-label runs: their measures on their own or other rows."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from torchlml_lab.cli import parse_settings
from torchlml_lab.data.labelled_rows import LabelledRows
from torchlml_lab.engine import best_epoch
from torchlml_lab.errors import BadInput
from torchlml_lab.files import check_folder
from torchlml_lab.multilabel.label_report import make, write
from torchlml_lab.multilabel.multilabel_settings import MultilabelSettings
from torchlml_lab.multilabel.run_rows import aligned, read
from torchlml_lab.multilabel.trained_labels import Trained, load, prepared_rows, read_rows
from torchlml_lab.screen import new_console
from torchlml_lab.tasks.own_files import say


@dataclass(frozen=True)
class EvaluateSettings:
    """Print P@, nDCG@, PSP@ and R@ of a multi-label run with its best weights, beside the popular labels'."""

    run: Annotated[Path, tyro.conf.Positional] = Path("runs/multilabel")
    """The folder of the run."""
    data: Path | None = None
    """Other rows with labels, in a file of any kind; by default the run's test or validation rows."""
    data_labels: Path | None = None
    """Their labels, where they are an .npz."""
    train: Path | None = None
    """The training file, where it has moved; the next two likewise."""
    valid: Path | None = None
    """The validation file."""
    test: Path | None = None
    """The test file."""
    out: Path | None = None
    """A folder for `report.md` and `report.png`; by default that of the run, and none for other rows."""


def main(arguments: Sequence[str]) -> None:
    """Read the options, measure, and print the table."""
    settings = parse_settings(EvaluateSettings, "evaluate", arguments, EvaluateSettings())
    out = settings.out or (settings.run if settings.data is None else None)
    trained = load(settings.run)
    if out is not None:
        check_folder("--out", out)
    rows, what, notes = _rows(settings, trained)
    inputs, more = prepared_rows(trained, rows, settings.data or Path(what))
    console = new_console()
    say([*notes, *more], console)
    report = make(trained, inputs, rows, what)
    console.print(report.table())
    if out is not None:
        write(report, trained, out, console)


def _rows(settings: EvaluateSettings, trained: Trained) -> tuple[LabelledRows, str, list[str]]:
    """The rows to measure on, what they are, and notes about them."""
    if settings.data is None:
        if settings.data_labels is not None:
            raise BadInput("`--data-labels` is given without `--data`.")
        moved = {name: getattr(settings, name) for name in ("train", "valid", "test")}
        data = read(best_epoch.read_moved(MultilabelSettings, settings.run, moved))
        known, found = trained.preparation, data.training
        if (len(found), found.names) != (known.rows, known.labels):
            raise BadInput(
                f"`{settings.train or trained.settings.train}` is not the file that the run was trained on: "
                f"it gives {len(found)} rows to train on with {len(found.names)} labels, and the run had "
                f"{known.rows} with {len(known.labels)}, or other ones."
            )
        rows, what = (data.validation, "validation rows") if data.test is None else (data.test, "test rows")
        return rows, what, []
    found, notes = read_rows(trained, settings.data, settings.data_labels), list[str]()
    labelled = found.take(found.counts > 0)
    if not len(labelled):
        raise BadInput(f"`--data` names `{settings.data}`, where no row has a label to be compared with.")
    if len(labelled) < len(found):
        notes.append(f"`{settings.data}`: {len(found) - len(labelled)} rows have no label and are left out.")
    return (
        aligned(labelled, trained.preparation.labels, settings.data, notes),
        f"rows of {settings.data.name}",
        notes,
    )
