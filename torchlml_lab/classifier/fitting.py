"""Epochs for the estimator: without a folder, an Accelerator or other state that outlives the call."""

import copy
import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from torchlml.metrics import topk_ndcg
from torchlml_lab.engine.loop import EpochBatches, train_epoch
from torchlml_lab.multilabel.label_network import LabelNetwork
from torchlml_lab.multilabel.run_rows import Batch, Batches
from torchlml_lab.multilabel.trained_labels import scores
from torchlml_lab.tasks.label_losses import LabelLoss, unlike_logits

# As in `torchlml train multilabel`: the nDCG that chooses an epoch, and how many steps must bring nothing.
_AT = 5
_PATIENT_STEPS = 100


class Schedule(NamedTuple):
    """How long and how fast is learned."""

    epochs: int
    patience: int | None
    """The epochs that must bring nothing; None: as many as make 100 steps, and at least 5."""
    batch_size: int
    learning_rate: float
    seed: int


class Judged(NamedTuple):
    """How good a network is on rows that were set aside: more is better, the loss decides between equals."""

    ndcg: float
    minus_loss: float


def fit_network(
    network: LabelNetwork,
    loss: LabelLoss,
    training: Batches,
    validation: Batches | None,
    schedule: Schedule,
    say: Callable[[str], None],
) -> int:
    """Train a network in place; with validation rows it ends as it was after its best epoch.

    Args:
        network: What is trained.
        loss: What is minimised.
        training: The rows to learn from.
        validation: The rows that choose the epoch; None: all epochs are trained.
        schedule: How long and how fast.
        say: Gets a line after every epoch.

    Returns:
        How many epochs were trained.
    """
    optimizer = torch.optim.Adam(network.parameters(), lr=schedule.learning_rate, fused=True)
    batches = EpochBatches(len(training), schedule.batch_size, schedule.seed, shuffle=True)
    patience = schedule.patience or max(5, math.ceil(_PATIENT_STEPS / len(batches)))
    best, weights, best_epoch = Judged(-1.0, 0.0), network.state_dict(), 0

    def mean_loss(model: nn.Module, batch: Batch) -> Tensor:
        value: Tensor = model(batch.inputs, batch.labels, loss)
        return value

    for epoch in range(1, schedule.epochs + 1):
        batches.epoch = epoch
        total = train_epoch(network, optimizer, mean_loss, map(training.__getitems__, batches))
        line = f"epoch {epoch}: loss {total / len(batches):.4f}"
        if validation is None:
            say(line)
            continue
        judged = judge(network, loss, validation)
        say(f"{line}, validation loss {-judged.minus_loss:.4f}, nDCG@{_AT} {judged.ndcg:.4f}")
        if judged.ndcg > best.ndcg:
            best_epoch = epoch
        if judged > best:  # also where only the loss is better, but that alone does not go on for long
            best, weights = judged, copy.deepcopy(network.state_dict())
        if epoch - best_epoch >= patience:
            break
    if validation is not None:
        network.load_state_dict(weights)
    network.eval()
    return epoch


def judge(network: LabelNetwork, loss: LabelLoss, rows: Batches) -> Judged:
    """The nDCG and the loss of rows."""
    network.eval()
    logits = torch.cat([found for found, _ in scores(network, rows.inputs)])
    labels = unlike_logits(rows.__getitems__(range(len(rows))).labels, logits.shape[1])
    ndcg = topk_ndcg(logits, labels, _AT)
    assert isinstance(ndcg, Tensor)  # of one k
    return Judged(ndcg.item(), -loss(logits, labels).item())
