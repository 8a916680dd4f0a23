"""The methods of `torchlml bench own-data`: torchlml and other packages for tagging."""

import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from torchlml_lab.data.labeled_rows import Columns, LabeledRows, Matrix
from torchlml_lab.engine.output import new_console
from torchlml_lab.files import counted
from torchlml_lab.multilabel import linear
from torchlml_lab.multilabel.report import calibrate
from torchlml_lab.multilabel.samples import Files, set_aside, split
from torchlml_lab.multilabel.settings import MultilabelSettings
from torchlml_lab.multilabel.training import run as train

Array = npt.NDArray[Any]

CS = (0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1000.0)
"""The values of the regularization parameter C that tuned methods choose from."""


class Problem(NamedTuple):
    """The data for a comparison. The label columns of `test` start with those of `training`."""

    training: LabeledRows
    test: LabeledRows
    columns: Columns | None
    seed: int


class Prediction(NamedTuple):
    """The output of a method on the test samples."""

    scores: Array
    """float32 (rows, labels): a higher score means a more likely label."""
    sets: Array
    """bool (rows, labels): the labels that the method predicts."""
    setting: str
    fitted: float
    """The CPU time of the process at the end of training."""


def _torchlml(problem: Problem) -> Prediction:
    """Run `torchlml train multilabel` with default settings."""
    with tempfile.TemporaryDirectory() as folder:
        settings = MultilabelSettings(
            train=Path("samples"), out=Path(folder) / "run", cpu=True, seed=problem.seed
        )
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
    """A linear multi-label method, given by functions that fit a model and compute its scores."""

    fit: Callable[[Matrix, Matrix, float], Any]
    """Fits a model to inputs and labels, with regularization parameter C."""
    scores: Callable[[Any, Matrix], Array]
    """Returns the model's score for each label of each input."""
    threshold: float
    """The score above which a label is predicted, unless the method is tuned."""


def _with(solver: Solver, c: float | None) -> Callable[[Problem], Prediction]:
    """Return a method that uses a solver with regularization parameter `c`, or tunes `c` if it is None.

    Without tuning, texts become TF-IDF vectors of words with the defaults of scikit-learn, and other features
    are not scaled. With tuning, texts become sublinear TF-IDF vectors of words and word pairs, and samples
    without texts are scaled to norm 1. C is the value in `CS` with the best nDCG@5 on validation samples, and
    the decision rule is chosen on the same samples. The model is then fitted again on all training samples.
    """

    def tune(problem: Problem, prepare: Callable[[LabeledRows], Matrix]) -> tuple[float, Rule]:
        training, validation = set_aside(problem.training)
        x, held_out = prepare(training), prepare(validation)
        found = {one: solver.scores(solver.fit(x, training.labels, one), held_out) for one in CS}
        best = max(CS, key=lambda one: linear.ndcg(found[one], validation.labels))
        return best, best_rule(found[best], validation.labels.toarray().astype(bool))

    def predict(problem: Problem) -> Prediction:
        prepare = _features(problem.training, tuned=c is None)
        if c is None:
            chosen, rule = tune(problem, prepare)
            least = f"at least {counted(rule.least, 'label', 'labels')}"
            setting = f"C = {chosen:g}, threshold {rule.threshold:.2g}, {least}"
        else:
            chosen, rule, setting = c, Rule(solver.threshold, 0), "default"
        model = solver.fit(prepare(problem.training), problem.training.labels, chosen)
        end = time.process_time()
        scores = solver.scores(model, prepare(problem.test))
        return Prediction(scores, rule.sets(scores), setting, end)

    return predict


class Rule(NamedTuple):
    """A decision rule that predicts labels above a score threshold, and always the `least` best labels."""

    threshold: float
    least: int
    """The number of top-scoring labels that are predicted regardless of the threshold."""

    def sets(self, scores: Array) -> Array:
        """Return the predicted labels as a bool array with the same shape as the scores."""
        return (scores > self.threshold) | _best_labels(scores, self.least)


def _best_labels(scores: Array, count: int) -> Array:
    best = np.argsort(-scores, axis=1, kind="stable")[:, :count]
    chosen = np.zeros(scores.shape, dtype=bool)
    np.put_along_axis(chosen, best, True, axis=1)
    return chosen


def best_rule(scores: Array, labels: Array) -> Rule:
    """Choose the rule with the highest sum of micro-F1 and the fraction of exactly predicted label sets.

    torchlml chooses its own rules by the same criterion. The candidates are the best threshold, the best
    threshold with at least one label for each sample, and the k best labels, where k is the rounded mean
    number of labels.

    >>> scores = np.array([[0.9, 0.2], [0.6, 0.4]])
    >>> best_rule(scores, np.array([[True, False], [True, False]]))
    Rule(threshold=0.5, least=0)
    """
    k = max(1, round(float(labels.sum(axis=1).mean())))
    rules = [best_threshold(scores, labels, least) for least in (0, 1)] + [Rule(np.inf, k)]

    def quality(rule: Rule) -> float:
        sets = rule.sets(scores)
        f1 = 2 * (sets & labels).sum() / (sets.sum() + labels.sum())
        return float(f1 + (sets == labels).all(axis=1).mean())

    return max(rules, key=quality)


def best_threshold(scores: Array, labels: Array, least: int) -> Rule:
    """Return the rule with the best threshold, by the criterion of `best_rule`."""
    always = _best_labels(scores, least)
    values = np.unique(scores).astype(np.float64)
    thresholds = np.concatenate([values[:1] - 1, values[:-1] / 2 + values[1:] / 2])

    def above(numbers: Array) -> Array:
        return numbers.size - np.searchsorted(np.sort(numbers, axis=None), thresholds, side="right")

    right = (labels & always).sum() + above(scores[labels & ~always])
    f1 = 2 * right / (always.sum() + above(scores[~always]) + labels.sum())
    # A set is exact if the threshold is at least its highest false score and below its lowest true score.
    lowest = np.where(labels & ~always, scores, np.inf).min(axis=1)
    highest = np.where(labels | always, -np.inf, scores).max(axis=1)
    possible = (highest < lowest) & ~(always & ~labels).any(axis=1)
    exact = (above(lowest[possible]) - above(highest[possible])) / len(labels)
    return Rule(float(thresholds[(f1 + exact).argmax()]), least)


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
    """Build a solver with one scikit-learn classifier for each label that some but not all samples have."""

    def fit(x: Matrix, labels: Matrix, c: float) -> Any:
        y = labels.toarray()
        several = [j for j in range(y.shape[1]) if 0 < y[:, j].sum() < len(y)]
        return y.all(axis=0), {j: model(c).fit(x, y[:, j]) for j in several}

    def scores(model: Any, x: Matrix) -> Array:
        always, models = model
        found = np.full((x.shape[0], len(always)), -1e9, dtype=np.float32)
        found[:, always] = 1e9
        for j, one in models.items():
            found[:, j] = one.decision_function(x)
        return found

    return Solver(fit, scores, threshold=0)


def _linear_svc(c: float) -> Any:
    from sklearn.svm import LinearSVC

    return LinearSVC(C=c)


def _logistic(c: float) -> Any:
    from sklearn.linear_model import LogisticRegression

    return LogisticRegression(C=c, solver="liblinear")


def _libmultilabel(options: str) -> Solver:
    """Build a solver that uses LibMultiLabel's one-vs-rest method with these LIBLINEAR options."""

    def fit(x: Matrix, labels: Matrix, c: float) -> Any:
        from libmultilabel.linear import train_1vsrest
        from scipy import sparse

        return train_1vsrest(
            sparse.csr_matrix(labels), sparse.csr_matrix(x), False, f"-c {c} {options}", False
        )

    return Solver(fit, _score_libmultilabel, threshold=0)


def _score_libmultilabel(model: Any, x: Matrix) -> Array:
    found = np.asarray(model.predict_values(x), dtype=np.float32)
    return np.maximum(found, -1e9)  # labels without samples have a score of -inf


def _fit_napkinxc(x: Matrix, labels: Matrix, c: float) -> Any:
    from napkinxc.models import PLT
    from scipy import sparse

    folder = tempfile.TemporaryDirectory()
    model = PLT(folder.name, liblinear_c=c, threads=1, seed=0)
    lists = [part.tolist() for part in np.split(labels.indices, labels.indptr[1:-1])]
    model.fit(sparse.csr_matrix(x), lists)
    return folder, model, labels.shape[1]


def _score_napkinxc(fitted: Any, x: Matrix) -> Array:
    from scipy import sparse

    _, model, labels = fitted
    found = np.zeros((x.shape[0], labels), dtype=np.float32)
    for row, pairs in enumerate(model.predict_proba(sparse.csr_matrix(x), top_k=min(50, labels))):
        for label, probability in pairs:
            found[row, int(label)] = probability
    return found


class Method(NamedTuple):
    """A method in the comparison, and the package that it needs."""

    predict: Callable[[Problem], Prediction]
    package: str


_SVC, _LOGISTIC = _one_vs_rest(_linear_svc), _one_vs_rest(_logistic)
# LibMultiLabel fits no intercept by default, and without one, a single threshold for all labels works poorly.
_LIBMULTILABEL, _WITH_INTERCEPT = _libmultilabel(""), _libmultilabel("-B 1")
_NAPKINXC = Solver(_fit_napkinxc, _score_napkinxc, threshold=0.5)
METHODS = {
    "torchlml": Method(_torchlml, "torch"),
    "LinearSVC": Method(_with(_SVC, 1.0), "sklearn"),
    "LinearSVC, tuned": Method(_with(_SVC, None), "sklearn"),
    "logistic": Method(_with(_LOGISTIC, 1.0), "sklearn"),
    "logistic, tuned": Method(_with(_LOGISTIC, None), "sklearn"),
    "LibMultiLabel": Method(_with(_LIBMULTILABEL, 1.0), "libmultilabel"),
    "LibMultiLabel, tuned": Method(_with(_WITH_INTERCEPT, None), "libmultilabel"),
    "napkinXC": Method(_with(_NAPKINXC, 10.0), "napkinxc"),
    "napkinXC, tuned": Method(_with(_NAPKINXC, None), "napkinxc"),
}
