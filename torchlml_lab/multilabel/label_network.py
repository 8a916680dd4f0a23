"""The networks: a linear model, or one hidden layer, of sparse inputs."""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from torchlml_lab.tasks.label_losses import LabelLoss


class Inputs(NamedTuple):
    """Sparse rows: row i has `values[starts[i]:starts[i + 1]]` in the columns of the same places."""

    columns: Tensor
    values: Tensor
    starts: Tensor


class SparseLinear(nn.Module):
    """A linear layer of sparse rows.

    Args:
        inputs: How many columns a row has.
        outputs: How many numbers come out.
    """

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(inputs, outputs))
        self.bias = nn.Parameter(torch.zeros(outputs))
        # Rows have about length 1, however many columns there are.
        nn.init.normal_(self.weight, std=0.1)

    def forward(self, rows: Inputs) -> Tensor:
        """(R, outputs)."""
        total = nn.functional.embedding_bag(
            rows.columns,
            self.weight,
            rows.starts,
            mode="sum",
            per_sample_weights=rows.values.to(self.weight.dtype),
            include_last_offset=True,
        )
        return total + self.bias


class LabelNetwork(nn.Module):
    """A score for every label.

    Args:
        inputs: How many columns a row has.
        labels: How many labels there are.
        hidden: The size of the hidden layer; 0 for a linear model.
        dropout: The share of it that is left out in training.
    """

    def __init__(self, inputs: int, labels: int, hidden: int, dropout: float) -> None:
        super().__init__()
        self.first = SparseLinear(inputs, hidden or labels)
        if not hidden:
            nn.init.zeros_(self.first.weight)
        self.between = nn.Sequential(nn.ReLU(), nn.Dropout(dropout)) if hidden else None
        self.last = nn.Linear(hidden, labels) if hidden else None

    def forward(self, rows: Inputs, labels: Tensor | None = None, loss: LabelLoss | None = None) -> Tensor:
        """The logits (R, labels); or with labels and a loss their mean loss.

        The loss is computed here, and not from the logits, since that of `lml` never holds them all.
        """
        found = self.first(rows)
        if self.last is None or self.between is None:
            return found if loss is None or labels is None else loss(found.float(), labels)
        found = self.between(found)
        if loss is None or labels is None:
            return self.last(found)
        return loss.of_linear(found, self.last, labels)
