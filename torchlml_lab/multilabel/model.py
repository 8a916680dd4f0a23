"""The network for multi-label classification, its metrics, and functions that load trained models."""

import copy
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from accelerate import Accelerator
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file
from torch import Tensor, nn
from torch.nn.functional import pad

import torchlml
from torchlml_lab.cli_errors import BadInput
from torchlml_lab.data.labeled_rows import Encoder, LabeledRows, Matrix
from torchlml_lab.engine import run_directory
from torchlml_lab.engine.settings import SETTINGS_FILE, from_json
from torchlml_lab.files import counted, read_json, replacing
from torchlml_lab.multilabel import decisions, linear
from torchlml_lab.multilabel import preparation as prepare
from torchlml_lab.multilabel.decisions import Decisions
from torchlml_lab.multilabel.linear import LinearPart, Mixture
from torchlml_lab.multilabel.losses import PADDING, LabelLoss, unlike_logits
from torchlml_lab.multilabel.preparation import Preparation
from torchlml_lab.multilabel.samples import Batch, Batches, Inputs, Paths, in_words, is_table_of, read_samples
from torchlml_lab.multilabel.settings import EXPERIMENT, LossName, MultilabelSettings, PerRow


class SparseLinear(nn.Module):
    """A linear layer for sparse inputs.

    Args:
        inputs: The number of input columns.
        outputs: The number of outputs.
    """

    row_sparse = False
    """Whether the gradient of the weight is sparse, with only the rows used in the batch (see `RowAdam`)."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(inputs, outputs))
        self.bias = nn.Parameter(torch.zeros(outputs))
        # The standard deviation does not depend on the number of inputs, because each input vector has a norm
        # of about 1.
        nn.init.normal_(self.weight, std=0.1)

    def forward(self, rows: Inputs | Tensor) -> Tensor:
        """Return the outputs, (R, outputs)."""
        if self.row_sparse and torch.is_grad_enabled() and isinstance(rows, Inputs):
            used, place = rows.columns.unique(return_inverse=True)
            weight = nn.functional.embedding(used, self.weight, sparse=True)
            return _sparse_product(rows._replace(columns=place), weight) + self.bias
        return _sparse_product(rows, self.weight) + self.bias


def _sparse_product(rows: Inputs | Tensor, weight: Tensor) -> Tensor:
    """Multiply sparse rows by a dense matrix. The rows are a dense tensor only when a model is exported."""
    if isinstance(rows, Tensor):
        return rows @ weight
    rows = rows._replace(values=rows.values.to(weight.dtype))
    if weight.requires_grad and torch.is_grad_enabled():
        found: Tensor = _SparseProduct.apply(*rows, weight)
        return found
    return _product(rows, weight)


def _product(rows: Inputs, weight: Tensor) -> Tensor:
    return nn.functional.embedding_bag(
        rows.columns,
        weight,
        rows.starts,
        mode="sum",
        per_sample_weights=rows.values,
        include_last_offset=True,
    )


class _SparseProduct(torch.autograd.Function):
    """The product of sparse rows and a dense weight matrix.

    The gradient of the weight is computed as the transposed rows times the output's gradient, in half the
    time of the backward pass of `embedding_bag`.
    """

    @staticmethod
    def forward(ctx: Any, columns: Tensor, values: Tensor, starts: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(columns, values, starts)
        ctx.count = len(weight)
        return _product(Inputs(columns, values, starts), weight)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        columns, values, starts = ctx.saved_tensors
        order = columns.argsort(stable=True)
        row = torch.repeat_interleave(torch.arange(len(gradient), device=columns.device), starts.diff())
        ends = columns.bincount(minlength=ctx.count).cumsum(0)
        transposed = Inputs(row[order], values[order], pad(ends, (1, 0)))
        return None, None, None, _product(transposed, gradient.contiguous())


class LinearLogits(nn.Module):
    """Adds the scores of a linear part, which is not trained by gradients, to the logits of the network.

    Args:
        part: The linear part.
        mixture: The coefficients of the two models.
    """

    weight: Tensor
    bias: Tensor

    def __init__(self, part: LinearPart, mixture: Mixture) -> None:
        super().__init__()
        self.mixture = mixture
        # The linear part is stored once per run, not in every checkpoint.
        self.register_buffer("weight", torch.from_numpy(part.weight), persistent=False)
        self.register_buffer("bias", torch.from_numpy(part.bias), persistent=False)

    def part(self, labels: int) -> LinearPart:
        """Return the linear part, extended to this number of labels. The scores of added labels are 0."""
        more = labels - len(self.bias)
        return LinearPart(pad(self.weight, (0, more)).numpy(), pad(self.bias, (0, more)).numpy())

    def forward(self, rows: Inputs | Tensor, network: Tensor) -> Tensor:
        """Return the weighted sum of the linear scores and the logits of the network."""
        scores = _sparse_product(rows, self.weight) + self.bias
        return self.mixture.linear * scores + self.mixture.network * network + self.mixture.shift


class LabelNetwork(nn.Module):
    """A network that computes a logit for every label. A linear part can be added to the logits.

    Args:
        inputs: The number of input columns.
        labels: The number of labels.
        hidden: The size of the hidden layer; 0 for a linear model.
        dropout: The dropout probability of the hidden layer.
        most: The maximum number of inputs that the network uses. If `inputs` is larger, the caller must set
            `place` to select the inputs to use.
    """

    place: Tensor | None

    def __init__(
        self, inputs: int, labels: int, hidden: int, dropout: float, most: int | None = None
    ) -> None:
        super().__init__()
        used = inputs if most is None else min(most, inputs)
        self.labels = labels
        self.first = SparseLinear(used, hidden or labels)
        # For each input, its row in the first layer, or -1 if the network does not use the input.
        self.register_buffer("place", None if used == inputs else torch.full((inputs,), -1))
        if not hidden:
            nn.init.zeros_(self.first.weight)
        self.between = nn.Sequential(nn.ReLU(), nn.Dropout(dropout)) if hidden else None
        self.last = nn.Linear(hidden, labels) if hidden else None
        self.linear: LinearLogits | None = None
        # The linear part is identical in all processes, so it does not have to be synchronized at every step.
        self._ddp_params_and_buffers_to_ignore = ["linear.weight", "linear.bias"]

    def rows_of_inputs(self) -> Tensor:
        """Return the row of each input in the first layer, or -1 if the network does not use the input."""
        return torch.arange(len(self.first.weight)) if self.place is None else self.place

    def forward(
        self, rows: Inputs | Tensor, labels: Tensor | None = None, loss: LabelLoss | None = None
    ) -> Tensor:
        """Return the logits (R, labels) or, given labels and a loss, the mean loss without the linear part.

        The loss is computed here because `lml` fuses it with the last layer, so that the full logit matrix is
        never materialized. The loss leaves out the linear part, because this part fits the training samples
        almost perfectly, so a network trained on its residual would learn nothing.
        """
        used = len(self.first.weight)
        found = self.first(rows if self.place is None else _renumbered(rows, self.place, used))
        if self.last is None or self.between is None:
            if loss is not None and labels is not None:
                return loss(found.float(), labels)
        else:
            found = self.between(found)
            if loss is not None and labels is not None:
                return loss.of_linear(found, self.last, labels)
            found = self.last(found)
        return found if self.linear is None else self.linear(rows, found.float())


def _renumbered(rows: Inputs | Tensor, place: Tensor, count: int) -> Inputs | Tensor:
    """Renumber each column i as `place[i]`, or drop it if `place[i]` is -1. `count` columns remain."""
    if isinstance(rows, Tensor):
        return rows.index_select(1, place.argsort()[-count:])
    columns = place[rows.columns]
    kept = columns >= 0
    starts = nn.functional.pad(kept.cumsum(0), (1, 0))[rows.starts]
    return Inputs(columns[kept], rows.values[kept], starts)


def copy_weights(network: LabelNetwork, earlier: LabelNetwork) -> None:
    """Copy the weights of an earlier network to a network with the same inputs and possibly more labels.

    The first labels of `network` must be those of `earlier`. If both networks use only some of the inputs,
    `network` is changed to use the same inputs as `earlier`. Otherwise, only the weights of inputs that both
    networks use are copied.
    """
    if network.place is not None and earlier.place is not None:
        network.place.copy_(earlier.place)
    here, there = network.rows_of_inputs(), earlier.rows_of_inputs()
    both = (here >= 0) & (there >= 0)
    with torch.no_grad():
        outputs = earlier.first.weight.shape[1]
        network.first.weight[here[both], :outputs] = earlier.first.weight[there[both]]
        for name, weights in earlier.state_dict().items():
            if name not in ("place", "first.weight"):
                network.state_dict()[name][tuple(map(slice, weights.shape))].copy_(weights)


TEMPERATURE = "calibration.json"
LINEAR = "linear.safetensors"
ROWS, LOGITS = 512, 2**24  # the maximum numbers of samples and logits per forward pass
MEASURED = 2**22  # the maximum number of scores that metrics process at once
MOST_DENSE = 2**24  # a first layer with more weights than this has a sparse gradient
# The maximum number of inputs of a network that is combined with a linear part. The most frequent inputs are
# sufficient, because the linear part uses all inputs.
MOST_INPUTS = 10_000


class TrainedLabels(NamedTuple):
    """A trained network, with everything that is needed for predictions."""

    settings: MultilabelSettings
    preparation: Preparation
    network: LabelNetwork
    epoch: int
    temperature: float
    """The logits are divided by the temperature before they are converted to probabilities."""
    held_out: LinearLogits | None = None
    """The linear part fitted without the validation samples. The linear part of `network` may have been
    fitted on all samples."""
    decisions: Decisions = Decisions()
    """The rules that choose sets of labels."""

    def for_validation(self) -> "TrainedLabels":
        """Return the run with the linear part that was fitted without the validation samples."""
        if self.held_out is None:
            return self
        network = copy.copy(self.network)
        network._modules = self.network._modules | {"linear": self.held_out}
        return self._replace(network=network, held_out=None)

    @property
    def uses_k(self) -> bool:
        """Whether the probabilities depend on k. With the loss `bce`, they do not."""
        return self.settings.loss != "bce"

    def scores(self, inputs: Matrix) -> Iterator[tuple[Tensor, slice]]:
        """Yield the logits of prepared samples in chunks, each with the slice of its samples."""
        return scores(self.network, inputs)

    def probabilities(self, logits: Tensor) -> Tensor:
        """Return the probability that each label is in the top k, with the k of the run."""
        return probabilities(logits, self.settings.loss, self.preparation.k, self.temperature)


def load(run: Path) -> TrainedLabels:
    """Load a run. A directory that contains no run or a damaged one raises `BadInput`."""
    best = run_directory.find_best_epoch(EXPERIMENT, run)
    settings = from_json(MultilabelSettings, run / SETTINGS_FILE)
    prepared = prepare.stored(run)
    network = new_network(settings, prepared)
    best.load(network)
    network.linear, held_out = stored_linear(run, prepared) if settings.model == "combined" else (None, None)
    decided = decisions.stored(run / TEMPERATURE, len(prepared.labels))
    return TrainedLabels(settings, prepared, network, best.epoch, _temperature(run), held_out, decided)


def new_network(settings: MultilabelSettings, prepared: Preparation) -> LabelNetwork:
    """Return a newly initialized network. With a linear part, it uses at most `MOST_INPUTS` inputs."""
    labels = len(prepared.labels)
    combined = settings.model == "combined" and linear.fits(prepared.rows, prepared.inputs, labels)
    most = MOST_INPUTS if combined else None
    return LabelNetwork(prepared.inputs, len(prepared.labels), settings.hidden, settings.dropout, most)


def store_linear(run: Path, final: LinearPart, held_out: LinearPart, mixture: Mixture) -> None:
    """Write the final linear part of a run, and the one that was fitted without the validation samples."""
    tensors = {
        f"{name}.{field}": np.ascontiguousarray(values)
        for name, part in (("final", final), ("held_out", held_out))
        for field, values in part._asdict().items()
    }
    with replacing(run / LINEAR) as temporary:
        save_file(tensors, temporary, {"mixture": json.dumps(mixture._asdict())})


def stored_linear(run: Path, prepared: Preparation) -> tuple[LinearLogits, LinearLogits] | tuple[None, None]:
    """Load the two linear parts of a run, if it has any. A damaged file raises `BadInput`."""
    path = run / LINEAR
    if not path.exists():
        return None, None
    try:
        with safe_open(path, "numpy") as file:
            mixture = Mixture(**json.loads(file.metadata()["mixture"]))
            parts = [
                LinearPart(file.get_tensor(f"{name}.weight"), file.get_tensor(f"{name}.bias"))
                for name in ("final", "held_out")
            ]
        labels = len(prepared.labels)
        for part in parts:
            if part.weight.shape != (prepared.inputs, labels) or part.bias.shape != (labels,):
                raise ValueError("wrong shape")
            if not (np.isfinite(part.weight).all() and np.isfinite(part.bias).all()):
                raise ValueError("not finite")
        final, held_out = (LinearLogits(part, mixture) for part in parts)
    except (OSError, SafetensorError, KeyError, TypeError, ValueError) as error:
        raise BadInput(f"`{path}` is damaged or belongs to another model.") from error
    return final, held_out


def row_slices(rows: int, labels: int) -> list[slice]:
    """Split samples into chunks whose logits fit in memory."""
    size = max(1, min(ROWS, LOGITS // labels))
    return [slice(start, min(start + size, rows)) for start in range(0, rows, size)]


def scores(network: LabelNetwork, inputs: Matrix) -> Iterator[tuple[Tensor, slice]]:
    """Yield the logits of prepared samples in chunks, each with the slice of its samples."""
    data = Batches(inputs, inputs[:, :0])
    device = next(network.parameters()).device
    with torch.inference_mode():
        for rows in row_slices(len(data), network.labels):
            found = data.__getitems__(range(rows.start, rows.stop)).inputs
            yield network(Inputs(*(part.to(device) for part in found))).cpu(), rows


def probabilities(logits: Tensor, loss: LossName, k: int, temperature: float = 1.0) -> Tensor:
    """Return the probability that each label is in the top k: the LML projection of the logits.

    With the loss `bce`, it is the sigmoid of each logit, which does not depend on k.
    """
    logits = logits / temperature
    return logits.sigmoid() if loss == "bce" else torchlml.lml(logits, k)


def _temperature(run: Path) -> float:
    """Return the temperature of a run, or 1 if it has not been calibrated."""
    path = run / TEMPERATURE
    if not path.exists():
        return 1.0
    temperature = read_json(path, dict).get("temperature")
    if not isinstance(temperature, float) or not 0 < temperature < float("inf"):
        raise BadInput(
            f"`{path}` is damaged: `temperature` must be a finite, positive float, but it is {temperature}."
        )
    return temperature


def origin_of_k(given: int | PerRow | None, k: int, mean: float) -> str:
    """Return one or two sentences about how the k of the predictions was chosen.

    Args:
        given: The value of `--k`.
        k: The k that predictions use.
        mean: The mean number of labels per training sample.
    """
    if isinstance(given, int):
        return f"Predictions use k = {k}, as set by `--k` in training."
    rounded = "" if mean == k else f" ({mean:.2f}) rounded to an integer"
    if abs(mean - k) > 0.5:
        rounded += " from 1 to n - 1, where n is the number of labels"
    return (
        f"Predictions use k = {k}, the mean number of labels per training sample{rounded}. "
        "To use a different k, train with `--k`."
    )


def read_rows(
    trained: TrainedLabels, data: Paths, labels: Paths | None = None, labeled: bool = True
) -> LabeledRows:
    """Read new samples for a trained model.

    Args:
        trained: The run.
        data: The value of `--data`: files in the format that the model was trained on.
        labels: The label files, if `data` are .npz files.
        labeled: Whether labels are required.

    Returns:
        The samples. A file that is unreadable or has a different format raises `BadInput`.
    """
    columns = trained.preparation.columns
    if columns is None and is_table_of(data, "--data"):
        raise BadInput(
            f"`--data` must contain sparse features, as in training, but `{in_words(data)}` is a table."
        )
    if columns is not None and not labeled:
        columns = replace(columns, labels=())
    names = trained.settings.label_names
    rows, _ = read_samples(data, "--data", columns=columns, labels=labels, label_names=names, labeled=labeled)
    return encoded_rows(trained, rows)


def encoded_rows(trained: TrainedLabels, rows: LabeledRows) -> LabeledRows:
    """Replace the texts of samples with embeddings, if the run has an encoder."""
    return rows if trained.settings.encoder is None else Encoder(trained.settings.encoder).encode(rows)


def prepared_rows(trained: TrainedLabels, rows: LabeledRows, source: str) -> tuple[Matrix, list[str]]:
    """Return the network inputs of samples, and notes about features that are unknown to the run."""
    prepared = trained.preparation.apply(rows)
    notes = []
    if prepared.unknown:
        notes.append(
            f"`{source}`: {counted(prepared.unknown, 'value was', 'values were')} skipped, because "
            f"{'its feature does' if prepared.unknown == 1 else 'their features do'} not occur in the "
            "training samples."
        )
    if prepared.empty:
        has = "has" if prepared.empty == 1 else "have"
        notes.append(
            f"`{source}`: {prepared.empty} of {len(rows)} samples {has} no known feature. "
            "The most frequent labels are predicted for such samples."
        )
    return prepared.inputs, notes


KS = (1, 3, 5)
NAMES = {"precision": "P", "ndcg": "nDCG", "psp": "PSP", "recall": "R"}
"""The names of the metrics in tables."""


class Measures:
    """Accumulates ranking metrics over batches. Labels that are unknown to the run count as false negatives.

    Args:
        preparation: The preparation of the run. Its label counts determine the propensities.
        labels: The number of distinct labels: those known to the run, followed by those that occur only in
            the evaluated samples.
        ks: The values of k.
    """

    def __init__(self, preparation: Preparation, labels: int, ks: Sequence[int] = KS) -> None:
        # Imported here, because torchmetrics takes seconds to load and predictions do not need it.
        from torchlml.metrics import (
            PropensityScoredPrecision,
            TopKNDCG,
            TopKPrecision,
            TopKRecall,
            label_propensities,
        )

        known = len(preparation.labels)
        self.more, self.ks = labels - known, tuple(k for k in ks if k <= known)
        counts = torch.tensor([*preparation.counts, *[0] * self.more])
        self.may_be_found = torch.arange(labels) < known
        self.metrics = [
            TopKPrecision(self.ks, sync_on_compute=False),
            TopKNDCG(self.ks, sync_on_compute=False),
            PropensityScoredPrecision(
                label_propensities(counts, preparation.rows), self.ks, sync_on_compute=False
            ),
            TopKRecall(self.ks, sync_on_compute=False),
        ]

    def update(self, scores: Tensor, labels: Tensor) -> None:
        """Add samples with scores (R, known labels) and padded label lists (R, L)."""
        scores = pad(scores, (0, self.more)) if self.more else scores
        labels = unlike_logits(labels, scores.shape[-1])
        mask = self.may_be_found.to(scores.device) if self.more else None
        for metric in self.metrics:
            metric.to(scores.device).update(scores, labels, mask=mask)

    def result(self) -> dict[str, float]:
        """Return all metrics, from 0 to 1, by names like `ndcg@5`."""
        return {name: float(value) for metric in self.metrics for name, value in metric.compute().items()}


def measure(
    network: nn.Module,
    batches: Iterable[Batch],
    accelerator: Accelerator,
    preparation: Preparation,
    labels: int,
) -> dict[str, float]:
    """Evaluate a network on the samples of all processes."""
    found = Measures(preparation, labels)
    for batch in batches:
        lists = accelerator.pad_across_processes(batch.labels, dim=1, pad_index=PADDING)
        scores, lists = accelerator.gather_for_metrics((network(batch.inputs).float(), lists))
        # Metrics allocate temporary tensors of the same size as the scores.
        size = max(1, MEASURED // scores.shape[1])
        for start in range(0, len(scores), size):
            found.update(scores[start : start + size], lists[start : start + size])
    return found.result()


def popularity(preparation: Preparation, rows: Iterable[Tensor], labels: int) -> dict[str, float]:
    """Return the metrics of a baseline that always predicts the most frequent training labels.

    Args:
        preparation: The preparation of the run.
        rows: Batches of padded label lists (R, L).
        labels: The number of distinct labels: those known to the run, followed by those that occur only in
            the evaluated samples.
    """
    found = Measures(preparation, labels)
    scores = torch.tensor(preparation.counts, dtype=torch.float32)
    for lists in rows:
        found.update(scores.expand(len(lists), -1), lists)
    return found.result()
