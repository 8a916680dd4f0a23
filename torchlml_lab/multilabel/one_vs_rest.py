"""The baseline for the multi-label study: one-vs-rest logistic regression with scikit-learn.

    torchlml bench one-vs-rest --train FILE --test FILE --csv one-vs-rest.csv

It uses the same inputs and the same split as `torchlml train multilabel --model network`. C is selected on
the validation samples, like the learning rate of the networks.
"""

import math
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from sklearn.linear_model import LogisticRegression

from torchlml_lab.cli_errors import BadInput
from torchlml_lab.data.labeled_rows import Matrix
from torchlml_lab.engine.output import ProgressBar, new_console
from torchlml_lab.files import check_file
from torchlml_lab.multilabel import preparation as prepare
from torchlml_lab.multilabel import sweep
from torchlml_lab.multilabel.model import Measures
from torchlml_lab.multilabel.preparation import Preparation
from torchlml_lab.multilabel.samples import label_lists, read_files, split
from torchlml_lab.multilabel.settings import MultilabelSettings, OneVsRestSettings
from torchlml_lab.multilabel.sweep import LabelRecord


def main(settings: OneVsRestSettings) -> None:
    """Fit the models and write their metrics to the CSV file."""
    assert settings.train is not None  # required on the command line
    check_file("--csv", settings.csv)
    for keep in settings.keeps:
        if keep != "one" and not 0 < keep <= 1:
            raise BadInput(f"`--keeps` must contain `one` or values in (0, 1], but it contains {keep:g}.")
    if not all(strength > 0 and math.isfinite(strength) for strength in settings.strengths):
        raise BadInput(f"`--strengths` must be finite and positive, but it is {settings.strengths}.")
    rows = sweep.TABLE.read(settings.csv, "--csv") if settings.csv.exists() else []
    for keep in settings.keeps:
        one = MultilabelSettings(train=settings.train, test=settings.test, keep=keep, seed=settings.seed)
        data = settings.train.name.partition(".")[0]
        if any((row.data, row.keep, row.seed) == (data, str(keep), one.seed) for row in rows):
            continue
        rows.append(_best(data, one, settings.strengths))
        sweep.TABLE.write(settings.csv, rows)


def _best(name: str, settings: MultilabelSettings, strengths: Sequence[float]) -> LabelRecord:
    started = time.monotonic()
    data = split(settings, read_files(settings))
    assert data.test is not None
    prepared = prepare.fit(data.training, data.columns, 1)
    training, validation, test = (
        prepared.apply(part).inputs for part in (data.training, data.validation, data.test)
    )
    tried = []
    for strength in strengths:
        weights, bias = _fit(training, data.training.labels, strength)
        ndcg = _measures(prepared, validation @ weights + bias, data.validation.labels)["ndcg@5"]
        tried.append((ndcg, strength, weights, bias))
    ndcg, strength, weights, bias = max(tried, key=lambda one: one[0])
    found = _measures(prepared, test @ weights + bias, data.test.labels)
    return LabelRecord(
        data=name,
        loss="one-vs-rest",
        keep=str(settings.keep),
        seed=settings.seed,
        learning_rate=strength,
        best_epoch=0,
        validation_ndcg5=round(ndcg, 6),
        **sweep.tested(found),
        seconds=time.monotonic() - started,
    )


def _fit(inputs: Matrix, labels: Matrix, strength: float) -> tuple[Any, Any]:
    """Fit one classifier per label, and return the weights (inputs, labels) and the biases (labels,)."""
    weights = np.zeros((inputs.shape[1], labels.shape[1]))
    bias = np.full(labels.shape[1], -20.0)  # for labels that no training sample has
    columns = labels.tocsc()
    inputs.indices, inputs.indptr = (
        inputs.indices.astype(np.int32),
        inputs.indptr.astype(np.int32),
    )  # liblinear requires 32-bit indices
    with ProgressBar(new_console()) as progress:
        bar = progress.add_task(f"labels, C = {strength:g}", total=labels.shape[1])
        for label in range(labels.shape[1]):
            target = np.zeros(labels.shape[0])
            target[columns.indices[columns.indptr[label] : columns.indptr[label + 1]]] = 1
            if target.any():
                model = LogisticRegression(C=strength, solver="liblinear").fit(inputs, target)
                weights[:, label], bias[label] = model.coef_[0], model.intercept_[0]
            progress.advance(bar)
    return weights, bias


def _measures(prepared: Preparation, scores: Any, labels: Matrix) -> dict[str, float]:
    found = Measures(prepared, labels.shape[1])
    found.update(torch.from_numpy(np.asarray(scores)), label_lists(labels))
    return found.result()
