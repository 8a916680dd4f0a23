"""Metrics are correct in models of any precision, and if one of several processes has no samples."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.support.processes import fork
from tests.support.scene_graph_example import EXAMPLE
from torchlml.metrics import SceneGraphRecall, TopKRecall, scene_graph_recall, topk_recall

MOVES = {
    "bfloat16": lambda model: model.to(torch.bfloat16),  # like Lightning's "bf16-true"
    "float16": lambda model: model.to(torch.float16),
    "half": lambda model: model.half(),
    "set_dtype": lambda model: [metric.set_dtype(torch.float16) for metric in list(model)[1:]],
}


@pytest.mark.parametrize("move", MOVES)
def test_recall_in_a_half_precision_model(move):
    recall, graphs = TopKRecall(1), SceneGraphRecall(2)
    model = nn.Sequential(nn.Linear(2, 2), recall, graphs)
    MOVES[move](model)
    scores, labels = torch.eye(10).repeat(400, 1), torch.arange(10).repeat(400)
    labels[::40] = 1  # makes 100 of 4000 predictions wrong
    for _ in range(10):
        recall.update(scores, labels)
    assert recall.compute().item() == pytest.approx(0.975, abs=1e-6)
    for _ in range(600):
        graphs.update([EXAMPLE[0]], [EXAMPLE[1]])
    assert graphs.compute().item() == pytest.approx(0.5, abs=1e-6)


def test_recall_with_half_precision_as_the_default():
    torch.set_default_dtype(torch.bfloat16)
    try:
        recall = TopKRecall(2)
        for _ in range(700):
            recall.update(torch.tensor([[1.0, 1.0, 1.0]]), torch.tensor([0]))
        assert recall.compute().item() == pytest.approx(2 / 3, abs=1e-6)
        assert recall.compute().dtype == torch.float32
    finally:
        torch.set_default_dtype(torch.float32)


def process(rank, folder):
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    recall = SceneGraphRecall(2, mean=True)
    if rank == 0:
        recall.update([EXAMPLE[0]], [EXAMPLE[1]])
        # The functional form does not communicate. If it did, it would block here.
        assert scene_graph_recall([EXAMPLE[0]], [EXAMPLE[1]], 2, mean=True) == 0.5
    recall._update_count = 1
    Path(folder, str(rank)).write_text(str(recall.compute().item()))
    torch.distributed.destroy_process_group()


def test_a_process_without_images():
    with tempfile.TemporaryDirectory() as folder:
        processes = [fork(process, rank, folder) for rank in range(2)]
        for each in processes:
            each.join(60)
        assert [each.exitcode for each in processes] == [0, 0]
        assert [Path(folder, str(rank)).read_text() for rank in range(2)] == ["0.5", "0.5"]


def test_functions_and_classes_agree():
    scores, labels = torch.randn(20, 9), torch.randint(9, (20,))
    recall = TopKRecall((1, 3))
    recall.update(preds=scores, target=labels)
    assert topk_recall(scores, labels, (1, 3)) == recall.compute()
    assert topk_recall(scores, labels, 3) == recall.compute()["recall@3"]
    images = SceneGraphRecall(2, constrained=False, mean=True)
    images.update(preds=[EXAMPLE[0]], target=[EXAMPLE[1]])
    assert scene_graph_recall([EXAMPLE[0]], [EXAMPLE[1]], 2, constrained=False, mean=True) == images.compute()
