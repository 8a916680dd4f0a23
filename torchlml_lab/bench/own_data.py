"""`torchlml bench own-data`: compare `torchlml train multilabel` with other packages for tagging."""

import importlib.util
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from rich.console import Console
from rich.table import Table

from torchlml_lab.bench.settings import OwnDataSettings, check_choices, check_numbers
from torchlml_lab.cli_errors import BadInput
from torchlml_lab.data.labeled_rows import Columns, LabeledRows, Matrix
from torchlml_lab.engine.output import StudyTable, markdown_table, new_console, plain_table
from torchlml_lab.files import check_file
from torchlml_lab.multilabel import linear
from torchlml_lab.multilabel.report import calibrate
from torchlml_lab.multilabel.samples import Files, read_files, set_aside, split
from torchlml_lab.multilabel.settings import MultilabelSettings
from torchlml_lab.multilabel.training import run as train

Array = npt.NDArray[Any]

SETS = {
    "bibtex": ("multilabel/bibtex.train.svm.gz", "multilabel/bibtex.test.svm.gz"),
    "corel5k": ("multilabel/corel5k.train.svm.gz", "multilabel/corel5k.test.svm.gz"),
    "delicious": ("multilabel/delicious.train.svm.gz", "multilabel/delicious.test.svm.gz"),
    "goemotions": ("goemotions/train.csv.gz", "goemotions/test.csv.gz"),
}
LABELS = {"goemotions": ("emotions",)}
STRENGTHS = (0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0)


@dataclass(frozen=True)
class OwnDataRecord:
    """The results of one method on one data set with a given number of training samples."""

    data: str
    samples: int
    """The number of training samples."""
    method: str
    setting: str
    """`default`, or the strength C that was selected on validation samples."""
    ndcg5: float
    p1: float
    micro_f1: float
    exact: float
    """The share of samples whose set of labels is exactly right by the method's own decision rule."""
    predict_seconds: float
    """CPU seconds to predict the test samples."""
    seconds: float
    """CPU seconds of training, including the selection of the strength C."""


TABLE = StudyTable(OwnDataRecord, lambda row: (row.data, row.samples, row.method))


class Problem(NamedTuple):
    """The samples of a comparison. The first label columns of the test samples are those of training."""

    training: LabeledRows
    test: LabeledRows
    columns: Columns | None


class Prediction(NamedTuple):
    """The output of a method on the test samples."""

    scores: Array
    """float32 (rows, labels): a higher score means a more likely label."""
    sets: Array
    """bool (rows, labels): the labels that the method predicts."""
    setting: str
    fitted: float
    """The CPU time of the process at the end of training."""


def main(settings: OwnDataSettings) -> None:
    """Run all comparisons that are not in the CSV yet, and print the table."""
    check_choices("--sets", settings.sets, SETS)
    check_choices("--methods", settings.methods, METHODS)
    check_numbers("--sizes", settings.sizes, 0)
    for method in settings.methods:
        package = METHODS[method].package
        if importlib.util.find_spec(package) is None:
            raise BadInput(
                f"`--methods` contains `{method}`, which needs the package `{package}`: run "
                "`pip install 'torchlml[competitors]'`, or leave the method out."
            )
    folder = settings.data or (Path(os.environ["TORCHLML_DATA"]) if "TORCHLML_DATA" in os.environ else None)
    if folder is None:
        raise BadInput("`--data` is missing: pass the data directory, or set TORCHLML_DATA.")
    check_file("--csv", settings.csv)
    settings.csv.parent.mkdir(parents=True, exist_ok=True)
    console = new_console()
    rows = TABLE.read(settings.csv, "--csv") if settings.csv.exists() else []
    for row in _missing(settings, folder, rows, console):
        rows.append(row)
        TABLE.write(settings.csv, rows)
    console.print(table(rows))
    console.print(f"The results are in {settings.csv}.", soft_wrap=True)


def _missing(
    settings: OwnDataSettings, folder: Path, rows: Sequence[OwnDataRecord], console: Console
) -> Iterator[OwnDataRecord]:
    """Run the comparisons that `rows` does not contain yet, and yield their records."""
    done = {(row.data, row.samples, row.method) for row in rows}
    for name in settings.sets:
        train_file, test_file = (folder / part for part in SETS[name])
        files = read_files(MultilabelSettings(train=train_file, test=test_file, labels=LABELS.get(name, ())))
        assert files.test is not None
        for size in settings.sizes:
            samples = min(size or len(files.train), len(files.train))
            order = np.random.default_rng(settings.seed).permutation(len(files.train))
            training = (
                files.train if samples == len(files.train) else files.train.take(np.sort(order[:samples]))
            )
            problem = Problem(training, files.test, files.columns)
            for method in settings.methods:
                if (name, samples, method) not in done:
                    done.add((name, samples, method))
                    console.print(f"{name}, {samples} samples: {method}", highlight=False)
                    yield _compared(name, method, problem)


def _compared(name: str, method: str, problem: Problem) -> OwnDataRecord:
    start = time.process_time()
    found = METHODS[method].predict(problem)
    end = time.process_time()
    true = problem.test.labels.toarray().astype(bool)
    labels = found.scores.shape[1]
    # Labels that no training sample has count as false negatives.
    sets = np.zeros_like(true)
    sets[:, :labels] = found.sets
    scores = np.full(true.shape, -np.inf, dtype=np.float32)
    scores[:, :labels] = found.scores
    best = found.scores.argmax(axis=1)
    return OwnDataRecord(
        data=name,
        samples=len(problem.training),
        method=method,
        setting=found.setting,
        ndcg5=round(linear.ndcg(np.nan_to_num(scores, neginf=-1e30), problem.test.labels), 5),
        p1=round(float(true[np.arange(len(true)), best].mean()), 5),
        micro_f1=round(float(2 * (sets & true).sum() / (sets.sum() + true.sum())), 5),
        exact=round(float((sets == true).all(axis=1).mean()), 5),
        predict_seconds=round(end - found.fitted, 3),
        seconds=found.fitted - start,
    )


def _torchlml(problem: Problem) -> Prediction:
    """Run `torchlml train multilabel` with default settings."""
    with tempfile.TemporaryDirectory() as folder:
        settings = MultilabelSettings(train=Path("samples"), out=Path(folder) / "run", cpu=True)
        files = Files(problem.training, None, None, problem.columns, [])
        trained, data = train(settings, new_console(quiet=True), lambda one: split(one, files))
        temperature, decisions = calibrate(trained.for_validation(), data.validation)
    trained = trained._replace(decisions=decisions, temperature=temperature)
    end = time.process_time()
    scores, sets = [], []
    for logits, _ in trained.scores(trained.preparation.apply(problem.test).inputs):
        values = trained.probabilities(logits)
        scores.append(logits)
        sets.append(decisions.decide(logits, values, trained.preparation.k, decisions.rule))
    return Prediction(torch.cat(scores).numpy(), torch.cat(sets).numpy(), f"rule {decisions.rule}", end)


class Solver(NamedTuple):
    """A linear one-vs-rest method for given features."""

    fit: Callable[[Matrix, Matrix, float], Any]
    """Fits a model to inputs and labels with strength C."""
    scores: Callable[[Any, Matrix], tuple[Array, Array]]
    """Returns the scores and the label sets that a model predicts for inputs."""


def _with(solver: Solver, strength: float | None) -> Callable[[Problem], Prediction]:
    """Return the method with strength C. If it is None, choose from `STRENGTHS` on validation samples.

    With a given strength, texts become TF-IDF vectors of words with the defaults of scikit-learn, and other
    features are not scaled. With tuning, texts become sublinear TF-IDF vectors of words and word pairs,
    other samples are scaled to norm 1, and the method is fitted again on all samples after the choice.
    """

    def predict(problem: Problem) -> Prediction:
        chosen = strength
        prepare = _features(problem.training, tuned=strength is None)
        if chosen is None:
            training, validation = set_aside(problem.training)
            x, held_out = prepare(training), prepare(validation)
            chosen = max(
                STRENGTHS,
                key=lambda one: linear.ndcg(
                    solver.scores(solver.fit(x, training.labels, one), held_out)[0], validation.labels
                ),
            )
        model = solver.fit(prepare(problem.training), problem.training.labels, chosen)
        end = time.process_time()
        scores, sets = solver.scores(model, prepare(problem.test))
        return Prediction(scores, sets, "default" if strength is not None else f"C = {chosen:g}", end)

    return predict


def _features(training: LabeledRows, tuned: bool) -> Callable[[LabeledRows], Matrix]:
    from scipy import sparse
    from sklearn.feature_extraction.text import TfidfVectorizer
    from sklearn.preprocessing import normalize

    if training.texts is not None:
        options = {"sublinear_tf": True, "ngram_range": (1, 2)} if tuned else {}
        vectorizer = TfidfVectorizer(dtype=np.float32, **options).fit(training.texts)
        return lambda rows: vectorizer.transform(rows.texts)
    width = training.features.shape[1]

    def prepare(rows: LabeledRows) -> Matrix:
        known = sparse.csr_matrix(rows.features[:, :width])
        known.resize((known.shape[0], width))
        known.indices, known.indptr = known.indices.astype(np.int32), known.indptr.astype(np.int32)
        return normalize(known) if tuned else known

    return prepare


def _one_vs_rest(model: Callable[[float], Any]) -> Solver:
    """Use a scikit-learn classifier for each label, except for labels of all or no training samples."""

    def fit(x: Matrix, labels: Matrix, strength: float) -> Any:
        y = labels.toarray()
        several = [j for j in range(y.shape[1]) if 0 < y[:, j].sum() < len(y)]
        return y.all(axis=0), {j: model(strength).fit(x, y[:, j]) for j in several}

    def scores(model: Any, x: Matrix) -> tuple[Array, Array]:
        always, models = model
        found = np.full((x.shape[0], len(always)), -1e9, dtype=np.float32)
        found[:, always] = 1e9
        for j, one in models.items():
            found[:, j] = one.decision_function(x)
        return found, found > 0

    return Solver(fit, scores)


def _linear_svc(strength: float) -> Any:
    from sklearn.svm import LinearSVC

    return LinearSVC(C=strength)


def _logistic(strength: float) -> Any:
    from sklearn.linear_model import LogisticRegression

    return LogisticRegression(C=strength, solver="liblinear")


def _fit_libmultilabel(x: Matrix, labels: Matrix, strength: float) -> Any:
    from libmultilabel.linear import train_1vsrest
    from scipy import sparse

    return train_1vsrest(sparse.csr_matrix(labels), sparse.csr_matrix(x), False, f"-c {strength}", False)


def _score_libmultilabel(model: Any, x: Matrix) -> tuple[Array, Array]:
    found = np.asarray(model.predict_values(x), dtype=np.float32)
    return np.maximum(found, -1e9), found > 0  # labels without samples have -inf


def _fit_napkinxc(x: Matrix, labels: Matrix, strength: float) -> Any:
    from napkinxc.models import PLT
    from scipy import sparse

    folder = tempfile.TemporaryDirectory()
    model = PLT(folder.name, liblinear_c=strength, threads=1, seed=0)
    lists = [part.tolist() for part in np.split(labels.indices, labels.indptr[1:-1])]
    model.fit(sparse.csr_matrix(x), lists)
    return folder, model, labels.shape[1]


def _score_napkinxc(fitted: Any, x: Matrix) -> tuple[Array, Array]:
    from scipy import sparse

    _, model, labels = fitted
    found = np.zeros((x.shape[0], labels), dtype=np.float32)
    for row, pairs in enumerate(model.predict_proba(sparse.csr_matrix(x), top_k=min(50, labels))):
        for label, probability in pairs:
            found[row, int(label)] = probability
    return found, found > 0.5


class Method(NamedTuple):
    """A method of the comparison, and the package that it needs."""

    predict: Callable[[Problem], Prediction]
    package: str


_SVC, _LOGISTIC = _one_vs_rest(_linear_svc), _one_vs_rest(_logistic)
_LIBMULTILABEL = Solver(_fit_libmultilabel, _score_libmultilabel)
_NAPKINXC = Solver(_fit_napkinxc, _score_napkinxc)
METHODS = {
    "torchlml": Method(_torchlml, "torch"),
    "LinearSVC": Method(_with(_SVC, 1.0), "sklearn"),
    "LinearSVC, tuned": Method(_with(_SVC, None), "sklearn"),
    "logistic": Method(_with(_LOGISTIC, 1.0), "sklearn"),
    "logistic, tuned": Method(_with(_LOGISTIC, None), "sklearn"),
    "LibMultiLabel": Method(_with(_LIBMULTILABEL, 1.0), "libmultilabel"),
    "LibMultiLabel, tuned": Method(_with(_LIBMULTILABEL, None), "libmultilabel"),
    "napkinXC": Method(_with(_NAPKINXC, 10.0), "napkinxc"),
    "napkinXC, tuned": Method(_with(_NAPKINXC, None), "napkinxc"),
}


def table(rows: Sequence[OwnDataRecord]) -> Table:
    """Tabulate the results of all methods by data set and number of samples."""
    heads = (
        "data",
        "samples",
        "method",
        "setting",
        "nDCG@5",
        "P@1",
        "micro-F1",
        "exact",
        "train s",
        "predict s",
    )
    shown = plain_table("Metrics on test samples in percent, and CPU time in seconds", heads, left=4)
    for row in sorted(rows, key=TABLE.order):
        percent = (f"{100 * value:.1f}" for value in (row.ndcg5, row.p1, row.micro_f1, row.exact))
        seconds = f"{row.seconds:.1f}", f"{row.predict_seconds:.2f}"
        shown.add_row(row.data, str(row.samples), row.method, row.setting, *percent, *seconds)
    return shown


METRICS = {"ndcg5": "nDCG@5", "p1": "P@1", "micro_f1": "micro-F1", "exact": "exact sets"}


def summary(rows: Sequence[OwnDataRecord], metric: str) -> str:
    """Format a Markdown table of torchlml and the best other method on each data set by one of `METRICS`."""
    lines = []
    for data, samples in sorted({(row.data, row.samples) for row in rows}):
        here = [row for row in rows if (row.data, row.samples) == (data, samples)]
        own = [row for row in here if row.method == "torchlml"]
        others = [row for row in here if row.method != "torchlml"]
        if own and others:
            best = max(others, key=lambda row: getattr(row, metric))
            values = 100 * getattr(own[0], metric), 100 * getattr(best, metric)
            cells = (f"{values[0]:.1f}", f"{values[1]:.1f}", best.method, f"{values[0] - values[1]:+.1f}")
            lines.append((data, str(samples), *cells))
    heads = ("data", "samples", "torchlml", "best other method", "its name", "difference")
    return markdown_table(f"{METRICS[metric]} on test samples, in percent:", heads, lines)


def details(rows: Sequence[OwnDataRecord], data: str) -> str:
    """Format a Markdown table of all methods on one data set."""
    heads = ("samples", "method", "setting", *METRICS.values(), "train s", "predict s")
    lines = []
    for row in sorted(rows, key=TABLE.order):
        if row.data == data:
            percent = (f"{100 * getattr(row, name):.1f}" for name in METRICS)
            seconds = f"{row.seconds:.1f}", f"{row.predict_seconds:.2f}"
            lines.append((str(row.samples), row.method, row.setting, *percent, *seconds))
    return markdown_table(f"Metrics on {data} test samples in percent, CPU time in seconds:", heads, lines)


TARGETS = {"ndcg5": 0.2, "micro_f1": 0.0, "exact": 0.0}
"""The metrics with a target, and by how many points torchlml may be below the best other method."""


def targets(rows: Sequence[OwnDataRecord]) -> str:
    """Return a Markdown table of how often each target is met, and of the smallest difference."""
    places = sorted({(row.data, row.samples) for row in rows})
    lines = []
    for metric, slack in TARGETS.items():
        found = []
        for place in places:
            here = [row for row in rows if (row.data, row.samples) == place]
            values = {row.method: 100 * getattr(row, metric) for row in here}
            own = values.pop("torchlml")
            found.append((own - max(values.values()), place))
        met = sum(value >= -slack - 1e-9 for value, _ in found)
        least, (data, samples) = min(found)
        wanted = "at least the best other method" + (f" minus {slack:g}" if slack else "")
        cells = (METRICS[metric], wanted, f"{met} of {len(found)}", f"{least:+.1f} ({data}, {samples})")
        lines.append(cells)
    heads = ("metric", "target", "met", "smallest difference")
    return markdown_table("Data sets and numbers of samples that meet each target:", heads, lines)
