"""Functions to use a trained multi-label run in Python (`load_run`) or to export it (`torchlml export`)."""

import importlib.util
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from scipy import sparse
from torch import Tensor, nn

from torchlml_lab.cli_errors import BadInput
from torchlml_lab.data.labeled_rows import LabeledRows, Matrix
from torchlml_lab.data.tables import rows_of_columns
from torchlml_lab.engine.output import new_console
from torchlml_lab.engine.run import say
from torchlml_lab.files import check_file, replacing
from torchlml_lab.multilabel.model import TrainedLabels, encoded_rows, load, probabilities, read_rows
from torchlml_lab.multilabel.prediction import decided_labels
from torchlml_lab.multilabel.settings import RULES, ExportSettings, RuleName

SUFFIXES = {"onnx": ".onnx", "torch": ".pt2"}


class LabelModel:
    """A trained multi-label model that predicts the labels of new samples. Create it with `load_run`.

        model = load_run("runs/tags")
        model.predict(["merge two dataframes by a column"])  # [["python", "pandas"]]

    Samples can be a list of texts, a table (a pandas DataFrame, a mapping from column names to values, or a
    list of mappings) or the `pathlib.Path` of a file. If the run was trained on sparse features, they can be
    a SciPy sparse matrix or a path. A table must have the text and number columns that the run uses.
    Invalid samples raise `ValueError`.

    Args:
        trained: The run.
    """

    def __init__(self, trained: TrainedLabels) -> None:
        self._trained = trained

    @property
    def labels(self) -> list[str]:
        """The names of the labels, in the order of the columns of `predict_proba`."""
        return list(self._trained.preparation.labels)

    @property
    def k(self) -> int:
        """The number of labels that the rule `top-k` chooses."""
        return self._trained.preparation.k

    @property
    def rule(self) -> RuleName:
        """The rule that chose the best label sets on the validation samples."""
        return self._trained.decisions.rule

    def predict(self, samples: Any, rule: RuleName | Literal["auto"] = "auto") -> list[list[str]]:
        """Predict the labels of each sample, best first.

        Args:
            samples: The samples.
            rule: The rule that chooses the labels: `top-k`, `half` (p > 0.5), `threshold` (p above a
                threshold fitted on the validation samples), `count` (the most probable labels, where their
                number is predicted for each sample), or `auto` (the rule of the run).

        Returns:
            A list of label names for each sample, which may be empty.
        """
        if rule not in ("auto", *RULES):
            raise ValueError(f"`rule` must be one of auto, {', '.join(RULES)}, but it is {rule!r}.")
        chosen = self.rule if rule == "auto" else rule
        return [row.labels for row in decided_labels(self._trained, self.inputs(samples), chosen)]

    def predict_proba(self, samples: Any) -> npt.NDArray[np.float32]:
        """Return the probability of each label, (samples, labels). Rows sum to `k` unless the loss is bce."""
        inputs = self.inputs(samples)
        found = np.empty((inputs.shape[0], len(self._trained.preparation.labels)), dtype=np.float32)
        for logits, part in self._trained.scores(inputs):
            found[part] = self._trained.probabilities(logits).numpy()
        return found

    def inputs(self, samples: Any) -> Matrix:
        """Compute the network inputs that an exported model expects: CSR float32 (samples, inputs)."""
        prepared = self._trained.preparation
        with _value_errors():
            rows = self._rows(samples)
            if not len(rows):
                return sparse.csr_array((0, prepared.inputs), dtype=np.float32)
            return prepared.apply(rows).inputs

    def _rows(self, samples: Any) -> LabeledRows:
        columns = self._trained.preparation.columns
        if isinstance(samples, os.PathLike):
            return read_rows(self._trained, Path(samples), labeled=False)
        if sparse.issparse(samples):
            if columns is not None:
                raise BadInput(f"`samples` must be {self._wanted}, but it is a sparse matrix.")
            features = sparse.csr_array(samples, dtype=np.float32)
            if not np.isfinite(features.data).all():
                raise BadInput("`samples` must contain only numbers that are finite in float32.")
            return LabeledRows(features, sparse.csr_array((features.shape[0], 0), dtype=np.int8), [])
        if columns is None:
            raise BadInput(f"`samples` must be {self._wanted}, but it is {_described(samples)}.")
        if isinstance(samples, str) or not (isinstance(samples, Sequence) or hasattr(samples, "keys")):
            raise BadInput(f"`samples` must be {self._wanted}, but it is {_described(samples)}.")
        if isinstance(samples, Sequence) and all(isinstance(one, str) for one in samples):
            if columns.numbers:
                raise BadInput(f"`samples` must be {self._wanted}, but it is a list of texts.")
            # The model joins all texts of a sample, so each given text can be assigned to the first column.
            samples = {
                name: [*samples] if place == 0 else [""] * len(samples)
                for place, name in enumerate(columns.texts)
            }
        elif isinstance(samples, Sequence):
            wrong = next((one for one in samples if not isinstance(one, Mapping)), None)
            if wrong is not None:
                raise BadInput(f"`samples` must be {self._wanted}, but it contains {_described(wrong)}.")
            names = dict.fromkeys(name for one in samples for name in one)
            samples = {name: [one.get(name) for one in samples] for name in names}
        table = {str(name): list(samples[name]) for name in samples.keys()}  # noqa: SIM118 - or a DataFrame
        return encoded_rows(self._trained, rows_of_columns(table, columns))

    @property
    def _wanted(self) -> str:
        """A description of the samples that this run accepts."""
        columns = self._trained.preparation.columns
        if columns is None:
            return "a sparse matrix or the path of a file"
        names = ", ".join(f"`{name}`" for name in (*columns.texts, *columns.numbers))
        return f"{'' if columns.numbers else 'a list of texts or '}a table with the columns {names}"


def load_run(path: str | os.PathLike[str]) -> LabelModel:
    """Load a run created with `torchlml train multilabel`, to make predictions in Python.

    Args:
        path: The run directory.

    Returns:
        The model. A directory without a run, or with a damaged one, raises `ValueError`.
    """
    with _value_errors():
        if not (Path(path) / "run.json").exists():
            raise BadInput(f"`{path}` is not a run directory. Create one with `torchlml train`.")
        return LabelModel(load(Path(path)))


@contextmanager
def _value_errors() -> Iterator[None]:
    """Raise `ValueError` for invalid input instead of `BadInput`, the exception of the command line."""
    try:
        yield
    except BadInput as error:
        raise ValueError(str(error)) from error


def _described(samples: Any) -> str:
    return "a string" if isinstance(samples, str) else f"a value of type `{type(samples).__name__}`"


class Program(nn.Module):
    """The module that is exported, which maps the inputs of the network to probabilities.

    Args:
        trained: The run.
    """

    def __init__(self, trained: TrainedLabels) -> None:
        super().__init__()
        self.network = trained.network
        self.loss, self.k, self.temperature = (
            trained.settings.loss,
            trained.preparation.k,
            trained.temperature,
        )

    def forward(self, inputs: Tensor) -> Tensor:
        """Return the probabilities (R, labels) of dense inputs (R, inputs)."""
        return probabilities(self.network(inputs), self.loss, self.k, self.temperature)


def main(settings: ExportSettings) -> None:
    """Export the model of a run to a file."""
    out = settings.out or settings.run / f"model{SUFFIXES[settings.format]}"
    check_file("--out", out)
    if not out.parent.is_dir():
        raise BadInput(f"`--out` must be in an existing directory, but it is `{out}`.")
    if settings.format == "onnx":
        for package in ("onnx", "onnxscript"):
            if importlib.util.find_spec(package) is None:
                raise BadInput(
                    f"`--format onnx` needs the package `{package}`. Run `pip install 'torchlml[onnx]'`."
                )
    trained = load(settings.run)
    export(trained, settings.format, out)
    prepared = trained.preparation
    said = (
        f"`{out}` computes the probabilities of {len(prepared.labels)} labels from {prepared.inputs} inputs."
    )
    how = (
        "`torchlml_lab.load_run(RUN).inputs(samples)` computes the inputs. The file contains the label names."
    )
    say([said, how], new_console())


def export(trained: TrainedLabels, kind: Literal["onnx", "torch"], path: Path) -> None:
    """Export the model of a run, with its calibration and its label names.

    Args:
        trained: The run.
        kind: `onnx` for a model with standard ONNX operators, or `torch` for a `torch.export` program.
        path: The file to write.
    """
    prepared, rules = trained.preparation, trained.decisions
    about = {
        "labels": json.dumps(prepared.labels),
        "k": str(prepared.k),
        "rule": rules.rule,
        "threshold": repr(rules.threshold),
        "least": str(rules.least),
    }
    dynamic = ({0: torch.export.Dim.DYNAMIC},)
    with torch.no_grad(), replacing(path) as temporary:
        program = torch.export.export(
            Program(trained).eval().requires_grad_(False),
            (torch.zeros(2, prepared.inputs),),
            dynamic_shapes=dynamic,
        )
        if kind == "torch":
            torch.export.save(program, temporary, extra_files={"about.json": json.dumps(about)})
            return
        import onnx

        found = torch.onnx.export(
            program, dynamo=True, verbose=False, input_names=["inputs"], output_names=["probabilities"]
        )
        assert found is not None
        model = found.model_proto
        onnx.helper.set_model_props(model, about)
        onnx.save(model, temporary)
