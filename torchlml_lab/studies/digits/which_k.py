"""`torchlml which-k`: measure how a wrong k affects LML, with a constant and a varying number of labels."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import mean

import torch
from rich.console import Group
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits

import torchlml
from torchlml_lab.cli_errors import BadInput
from torchlml_lab.engine.output import ProgressBar, StudyTable, new_console, plain_table
from torchlml_lab.engine.settings import use_threads
from torchlml_lab.files import check_file, writing
from torchlml_lab.studies.digits.model import CLASSES, SCALED, Images, Index, fit, make, measure
from torchlml_lab.studies.settings import WhichKSettings

KS = tuple(range(1, 9))
MOST = 5
EXACTLY, AT_MOST, TRUE_K, PREDICTED = "lml", "lml, at most k", "lml, true k", "lml, predicted k"
SOFTMAX, BCE = "cross-entropy", "bce"
FIXED, VARYING = "3 digits", "1 to 5 digits"
ONE, ALL = "one", "all"
SITUATIONS = ((FIXED, ONE), (VARYING, ONE), (VARYING, ALL))
# The methods with a per-row k are not used on images with 3 digits, because all rows have the same k there.
PLAN = tuple(
    (digits, named, method)
    for digits, named in SITUATIONS
    for method in (EXACTLY, AT_MOST, TRUE_K, PREDICTED, SOFTMAX, SCALED, BCE)
    if digits == VARYING or method not in (TRUE_K, PREDICTED)
)


@dataclass(frozen=True)
class WhichKRecord:
    """The results of one network on the test images."""

    digits: str
    """The number of digits in an image."""
    named: str
    """The number of observed digits in each training image: `one` or `all`."""
    method: str
    k: int
    """The k shared by all rows, or 0 for methods without a shared k."""
    seed: int
    recall: float
    """The fraction of the m digits in an image that are among the m digits with the largest logits."""
    top_set: float
    """The fraction of images whose m digits are exactly the m digits with the largest logits."""
    exact: float
    """The fraction of images where exactly the digits in the image have p > 0.5."""
    count: float
    """The mean number of digits per image with p > 0.5."""
    calibration_error: float
    seconds: float


TABLE = StudyTable(
    WhichKRecord, lambda row: (SITUATIONS.index((row.digits, row.named)), row.method, row.k, row.seed)
)


def main(settings: WhichKSettings) -> None:
    """Train all networks, write the CSV, and print a table for each combination of images and labels."""
    for name, least in (("seeds", 1), ("images", 100), ("epochs", 1)):
        if getattr(settings, name) < least:
            raise BadInput(f"`--{name}` must be at least {least}, but it is {getattr(settings, name)}.")
    check_file("--csv", settings.csv)
    console = new_console()
    with use_threads(1), ProgressBar(console) as progress:
        task = progress.add_task("methods", total=len(PLAN))
        rows = []
        for digits, named, method in PLAN:
            rows += run(digits, named, method, settings)
            progress.advance(task)
    console.print(_tables(rows))
    with writing("The CSV", settings.csv, "the tables above contain all results"):
        settings.csv.parent.mkdir(parents=True, exist_ok=True)
        TABLE.write(settings.csv, rows)
    console.print(f"The results are in {settings.csv}.", soft_wrap=True)


def run(digits: str, named: str, method: str, settings: WhichKSettings) -> list[WhichKRecord]:
    """Train and evaluate one method on one combination of images and labels, for each k and seed."""
    began = time.monotonic()
    width = MOST if digits == VARYING else 3
    data = [
        make(width, settings.images, 2000, "uniform", seed, varying=digits == VARYING)
        for seed in range(settings.seeds)
    ]
    # All networks are trained together, each with its own k. Networks with the same seed share images,
    # initial weights and batches.
    cells = [
        (k, seed) for k in (KS if method in (EXACTLY, AT_MOST) else (0,)) for seed in range(settings.seeds)
    ]
    sets, tests = [data[seed][0] for _, seed in cells], [data[seed][1] for _, seed in cells]
    k = torch.tensor([[float(k)] for k, _ in cells])
    observed = torch.stack([_observed(one, named) for one in sets])
    number = torch.stack([one.present.sum(-1).float() for one in sets])

    def loss(outputs: Tensor, where: Index) -> Tensor:
        return loss_of(method, outputs, observed[where], number[where], k)

    networks = fit(
        loss, sets, [seed for _, seed in cells], settings.epochs, outputs=CLASSES + (method == PREDICTED)
    )
    with torch.no_grad():
        found = networks(torch.stack([test.pixels.flatten(1) for test in tests]))
        p = probability(method, found, torch.stack([test.present.sum(-1).float() for test in tests]), k)
    seconds = (time.monotonic() - began) / len(cells)
    rows = []
    for (told, seed), test, said, output in zip(cells, tests, p, found, strict=True):
        measured = measure(said, output[:, :CLASSES], test)
        rows.append(
            WhichKRecord(
                *(digits, named, method, told, seed),
                *(measured.recall, measured.top_set, measured.exact, measured.count),
                *(measured.calibration_error, seconds),
            )
        )
    return rows


def _observed(shown: Images, named: str) -> Tensor:
    """Return a mask (N, 10) of the observed digits in the training images."""
    if named == ALL:
        return shown.present
    return torch.zeros_like(shown.present).scatter(1, shown.named.unsqueeze(1), True)


def loss_of(method: str, outputs: Tensor, observed: Tensor, number: Tensor, k: Tensor) -> Tensor:
    """Compute the loss of each row.

    Args:
        method: The name of the loss.
        outputs: (sets, rows, 10), the logits. If k is predicted, it is an additional last output.
        observed: (sets, rows, 10), bool, the observed digits.
        number: (sets, rows), the number of digits in each image. It affects the losses of the two methods
            with a per-row k.
        k: (sets, 1), the k shared by all rows, for the two methods that use it.

    Returns:
        (sets, rows): the loss of each row, summed over its labels.
    """
    logits = outputs[..., :CLASSES]
    if method in (SOFTMAX, SCALED):
        return -(observed * logits.log_softmax(-1)).sum(-1)
    if method == BCE:
        return binary_cross_entropy_with_logits(logits, observed.to(logits.dtype), reduction="none").sum(-1)
    if method == PREDICTED:
        # The LML loss uses the true number of digits. With the predicted k, it could be lowered simply by
        # increasing k.
        told = torchlml.lml_loss(logits, observed, number, reduction="none")
        return told + (outputs[..., CLASSES] - number).square()
    return torchlml.lml_loss(
        logits,
        observed,
        number if method == TRUE_K else k,
        reduction="none",
        bound="at_most" if method == AT_MOST else "exactly",
    )


def probability(method: str, outputs: Tensor, number: Tensor, k: Tensor) -> Tensor:
    """Return the probability of each digit, (sets, rows, 10). See `loss_of` for the arguments."""
    logits = outputs[..., :CLASSES]
    if method == SOFTMAX:
        return logits.softmax(-1)
    if method == SCALED:
        return (number.unsqueeze(-1) * logits.softmax(-1)).clamp(max=1)
    if method == BCE:
        return logits.sigmoid()
    if method == PREDICTED:
        return torchlml.lml(logits, outputs[..., CLASSES].clamp(0, CLASSES))
    if method == TRUE_K:
        return torchlml.lml(logits, number)
    return torchlml.lml(logits, k, bound="at_most" if method == AT_MOST else "exactly")


_HEADS = {
    "recall": "recall",
    "top_set": "top-m set",
    "exact": "set p > 0.5",
    "count": "size",
    "calibration_error": "calibration",
}


def _tables(rows: Sequence[WhichKRecord]) -> Group:
    tables = []
    for digits, named in SITUATIONS:
        title = f"\nimages with {digits}, {named} labeled; means over the seeds"
        table = plain_table(title, ("method", "k", *_HEADS.values()))
        for name, k in dict.fromkeys((row.method, row.k) for row in rows):
            group = [
                row for row in rows if (row.digits, row.named, row.method, row.k) == (digits, named, name, k)
            ]
            if group:
                cells = [mean(getattr(row, one) for row in group) for one in _HEADS]
                table.add_row(name, str(k or ""), *(f"{cell:.3f}" for cell in cells))
        tables.append(table)
    return Group(*tables)
