"""DTensors, device meshes over rows and labels, and PyTorch's wrappers for parallel training."""

from __future__ import annotations

import os
import re
import signal
import tempfile
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import FileStore  # type: ignore[attr-defined]
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import torchlml
import torchlml._distributed.group as group_module
from tests.support.distributed import in_processes
from tests.support.processes import fork, output, script, start_two
from torchlml.metrics import TopKNDCG, TopKPrecision, TopKRecall, topk_recall

Group = dist.ProcessGroup
PLACEMENTS = [(Shard(0),), (Shard(1),), (Replicate(),)]


@in_processes(4)
def test_dtensors(group: Group) -> None:
    """The functions accept DTensors that are sharded over labels or rows, or replicated."""
    mesh = init_device_mesh("cpu", (4,))
    for placements in PLACEMENTS:
        _dtensors(mesh, placements)


@in_processes(4)
def test_a_single_row(group: Group) -> None:
    """A batch of one sample can be sharded over rows, although all processes but one have no rows."""
    mesh = init_device_mesh("cpu", (4,))
    x, weight = torch.randn(1, 11, dtype=torch.float64), torch.randn(11, 3, dtype=torch.float64)
    hidden = torch.randn(1, 3, dtype=torch.float64)
    for target in (torch.tensor([4]), torch.tensor([[4, 2, -100]]), torch.arange(11)[None] == 4):
        k = torch.tensor([3.0], dtype=torch.float64)
        parts = [distribute_tensor(t, mesh, [Shard(0)]) for t in (x, target, hidden, k)]
        loss: Any = torchlml.lml_loss(parts[0], parts[1], parts[3])
        torch.testing.assert_close(loss.to_local(), torchlml.lml_loss(x, target, k))
        layer = distribute_tensor(weight, mesh, [Replicate()])
        linear: Any = torchlml.linear_lml_loss(parts[2], layer, parts[1], parts[3])
        torch.testing.assert_close(linear.to_local(), torchlml.linear_lml_loss(hidden, weight, target, k))


@in_processes(4)
def test_rows_and_labels(group: Group) -> None:
    """The functions accept a two-dimensional mesh over rows and labels, in either order."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("rows", "labels"))
    for placements in ((Shard(0), Shard(1)), (Shard(1), Shard(0)), (Replicate(), Shard(1))):
        _dtensors(mesh, placements)


def _dtensors(mesh: DeviceMesh, placements: Any) -> None:
    x, k = torch.randn(6, 11, dtype=torch.float64), torch.rand(6, dtype=torch.float64) * 4 + 1
    mask = torch.rand(1, 11) < 0.8
    mask[0, :3] = True
    grad = torch.randn(6, 11, dtype=torch.float64)
    for function in (torchlml.lml, torchlml.log_lml, torchlml.lml_dual):
        x_whole = x.clone().requires_grad_()
        wanted = function(x_whole, k, mask=mask)
        g = torch.where(wanted.isinf(), 0, grad[..., 0] if wanted.dim() == 1 else grad)
        (dx,) = torch.autograd.grad(wanted, x_whole, g)
        leaf: Any = distribute_tensor(x, mesh, placements).requires_grad_()
        given_k = distribute_tensor(k, mesh, [Replicate()] * mesh.ndim)
        given_mask = distribute_tensor(mask, mesh, [Replicate()] * mesh.ndim)
        found: Any = function(leaf, given_k, mask=given_mask)
        torch.testing.assert_close(found.full_tensor(), wanted)
        own_dx: Any
        (own_dx,) = torch.autograd.grad(found, leaf, distribute_tensor(g, mesh, found.placements))
        assert own_dx.placements == leaf.placements
        torch.testing.assert_close(own_dx.full_tensor(), dx)
    one_k = torch.tensor(3.0, dtype=torch.float64, requires_grad=True)
    (dk,) = torch.autograd.grad(torchlml.lml(x, one_k).square().sum(), one_k)
    own_k: Any = distribute_tensor(one_k.detach(), mesh, [Replicate()] * mesh.ndim).requires_grad_()
    y: Any = torchlml.lml(distribute_tensor(x, mesh, placements), own_k)
    (own_dk,) = torch.autograd.grad(y.square().sum(), own_k)
    torch.testing.assert_close(own_dk.full_tensor(), dk)
    target = torch.tensor([[0, 10], [3, -100], [-100, -100], [1, 2], [2, 1], [0, 0]])
    for form in (target, target[:, 0], torch.rand(6, 11) < 0.3):
        for reduction in ("mean", "sum", "none"):
            x_whole = x.clone().requires_grad_()
            wanted = torchlml.lml_loss(x_whole, form, 3, reduction=reduction)
            (dx,) = torch.autograd.grad(wanted.sum(), x_whole)
            leaf = distribute_tensor(x, mesh, placements).requires_grad_()
            loss: Any = torchlml.lml_loss(
                leaf, distribute_tensor(form, mesh, [Replicate()] * mesh.ndim), 3, reduction=reduction
            )
            torch.testing.assert_close(loss.full_tensor(), wanted)
            (own_dx,) = torch.autograd.grad(loss.sum(), leaf)
            torch.testing.assert_close(own_dx.full_tensor(), dx)


@in_processes(4)
def test_metrics_of_dtensors(group: Group) -> None:
    """Every row has the same weight, whether scores are sharded over labels, rows or both, or replicated."""
    line, square = init_device_mesh("cpu", (4,)), init_device_mesh("cpu", (2, 2))
    layouts = [(line, one) for one in PLACEMENTS] + [
        (square, (Shard(0), Shard(1))),
        (square, (Shard(1), Shard(0))),
    ]
    preds = torch.randint(-3, 3, (7, 11)).float()  # with ties
    mask = torch.rand(1, 11) < 0.8
    lists = torch.randint(11, (7, 2))
    for mesh, placements in layouts:
        everywhere = [Replicate()] * mesh.ndim
        for target in (lists, lists[:, 0], torch.rand(7, 11) < 0.3):
            for metric in (TopKRecall((1, 5)), TopKPrecision((1, 5)), TopKNDCG((1, 5))):
                own_target, own_mask = (distribute_tensor(one, mesh, everywhere) for one in (target, mask))
                metric.update(distribute_tensor(preds, mesh, placements), own_target, mask=own_mask)
                alone = type(metric)((1, 5), sync_on_compute=False)
                alone.update(preds, target, mask=mask)
                torch.testing.assert_close(metric.compute(), alone.compute())
    with pytest.raises(ValueError, match="must be None with a DTensor"):
        topk_recall(distribute_tensor(preds, line, [Shard(1)]), lists, 1, group=group)


@in_processes(4)
def test_linear_dtensors(group: Group) -> None:
    """The linear loss accepts DTensors with rows sharded, labels sharded, both or neither."""
    line, square = init_device_mesh("cpu", (4,)), init_device_mesh("cpu", (2, 2))
    none, labels = Replicate(), Shard(0)
    for mesh, of_input, of_weight in (
        (line, [none], [labels]),
        (line, [Shard(0)], [none]),
        (line, [Shard(0)], [labels]),  # gathered: one mesh dimension cannot shard both rows and labels
        (line, [none], [none]),
        (square, [Shard(0), none], [none, labels]),
        (square, [none, Shard(0)], [labels, none]),
    ):
        for form in FORMS:
            for reduction in ("mean", "sum", "none"):
                own_k = (form.dim() == 1) == (reduction == "mean")
                _linear_dtensors(mesh, of_input, of_weight, form, reduction, own_k)


FORMS = (
    torch.tensor([[0, 10], [3, -100], [-100, -100], [1, 2], [2, 1], [0, 0]]),
    torch.tensor([0, 3, -100, 1, 2, 0]),
    torch.arange(66).reshape(6, 11) % 7 == 0,
)


def _linear_dtensors(
    mesh: DeviceMesh, of_input: Any, of_weight: Any, form: Tensor, reduction: str, own_k: bool
) -> None:
    shapes: list[tuple[int, ...]] = [(6, 5), (11, 5), (11,), (6,) if own_k else ()]
    tensors = [(torch.rand(shape, dtype=torch.float64) + 1).requires_grad_() for shape in shapes]
    class_weight, everywhere = torch.rand(11, dtype=torch.float64), [Replicate()] * mesh.ndim
    logits = nn.functional.linear(*tensors[:3])
    wanted = torchlml.lml_loss(logits, form, tensors[3], weight=class_weight, reduction=reduction)
    right = torch.autograd.grad(wanted.sum(), tensors)
    places = (of_input, of_weight, of_weight, everywhere)
    own: Any = [
        distribute_tensor(t.detach(), mesh, place).requires_grad_()
        for t, place in zip(tensors, places, strict=True)
    ]
    target, weight = (distribute_tensor(t, mesh, everywhere) for t in (form, class_weight))
    loss: Any = torchlml.linear_lml_loss(
        own[0], own[1], target, own[3], linear_bias=own[2], weight=weight, reduction=reduction
    )
    torch.testing.assert_close(loss.full_tensor(), wanted)
    for mine, theirs in zip(torch.autograd.grad(loss.sum(), own), right, strict=True):
        torch.testing.assert_close(mine.full_tensor(), theirs)


@in_processes(4)
def test_an_input_in_parts(group: Group) -> None:
    """A DTensor with partial sums is reduced before it is used as the input."""
    mesh = init_device_mesh("cpu", (4,))
    h, w, target = torch.randn(3, 5), torch.randn(12, 5), torch.tensor([0, 7, 11])
    in_parts = DTensor.from_local(h / 4, mesh, [Partial()])
    loss: Any = torchlml.linear_lml_loss(in_parts, distribute_tensor(w, mesh, [Shard(0)]), target, 3)
    torch.testing.assert_close(loss.full_tensor(), torchlml.lml_loss(h @ w.T, target, 3))


@in_processes(4)
def test_bad_dtensors(group: Group) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("rows", "labels"))
    twice = distribute_tensor(torch.randn(4, 8), mesh, [Shard(1), Shard(1)])
    with pytest.raises(ValueError, match="at most one mesh dimension"):
        torchlml.lml(twice, 2)
    with pytest.raises(ValueError, match="because its mesh defines"):
        torchlml.lml(twice, 2, group=mesh["labels"])
    rows = distribute_tensor(torch.randn(4, 8), mesh, [Shard(0), Replicate()])
    with pytest.raises(TypeError, match="`linear_weight` must be a DTensor"):
        torchlml.linear_lml_loss(rows, torch.randn(3, 8), torch.zeros(4).long(), 2)
    other = distribute_tensor(torch.randn(3, 8), init_device_mesh("cpu", (4,)), [Replicate()])
    with pytest.raises(ValueError, match="on the same mesh"):
        torchlml.linear_lml_loss(rows, other, torch.zeros(4).long(), 2)
    nothing: Any = None
    with pytest.raises(TypeError, match="`target` must be a torch"):
        torchlml.lml_loss(rows, nothing, 2)
    with pytest.raises(ValueError, match="one-dimensional DeviceMesh"):
        torchlml.lml(torch.randn(4, 8), 2, group=mesh)


@in_processes(4)
def test_mesh_as_group(group: Group) -> None:
    """A one-dimensional DeviceMesh can be the group. The rows are split manually over the other dimension."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("rows", "labels"))
    x = torch.randn(4, 8, dtype=torch.float64)
    row, label = mesh.get_local_rank("rows"), mesh.get_local_rank("labels")
    own = x[2 * row : 2 * row + 2, 4 * label : 4 * label + 4]
    y = torchlml.lml(own, 3, group=mesh["labels"])
    torch.testing.assert_close(y, torchlml.lml(x, 3)[2 * row : 2 * row + 2, 4 * label : 4 * label + 4])


@in_processes(4)
def test_group_of_one(group: Group) -> None:
    alone = [dist.new_group([rank]) for rank in range(4)][dist.get_rank()]
    x = torch.randn(3, 9, dtype=torch.float64)
    torch.testing.assert_close(torchlml.lml(x, 2, group=alone), torchlml.lml(x, 2))


def _grad(parameter: Tensor) -> Any:
    return parameter.grad


def _batch() -> tuple[Tensor, Tensor]:
    return torch.randn(8, 6), torch.randint(12, (8,))


@in_processes(4)
def test_colwise_parallel(group: Group) -> None:
    """The weight of a layer sharded by `parallelize_module` can be passed directly to `linear_lml_loss`."""
    mesh = init_device_mesh("cpu", (4,))
    model = nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 12))
    inputs, target = _batch()
    wanted = torchlml.lml_loss(model(inputs), target, 3)
    wanted.backward()
    right = [_grad(p).clone() for p in model.parameters()]
    model.zero_grad()
    parallelize_module(model, mesh, {"2": ColwiseParallel()})
    last = model[2]
    loss = torchlml.linear_lml_loss(model[:2](inputs), last.weight, target, 3, linear_bias=last.bias)
    loss.backward()
    torch.testing.assert_close(loss, wanted)
    for p, grad in zip(model.parameters(), right, strict=True):
        found = _grad(p).full_tensor() if hasattr(p.grad, "full_tensor") else p.grad
        torch.testing.assert_close(found, grad, rtol=1e-4, atol=1e-6)


@in_processes(4)
def test_data_parallel(group: Group) -> None:
    """DDP over rows works with a last layer that is sharded over labels."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("rows", "labels"))
    row, label = mesh.get_local_rank("rows"), mesh.get_local_rank("labels")
    body, head = nn.Linear(6, 5), torch.randn(12, 5)
    inputs, target = _batch()
    torchlml.lml_loss(body(inputs) @ head.T, target, 3).backward()
    right = _grad(body.weight).clone()
    body.zero_grad()
    wrapped = DistributedDataParallel(body, process_group=mesh.get_group("rows"))
    own, rows = head[6 * label : 6 * label + 6].clone().requires_grad_(), slice(4 * row, 4 * row + 4)
    torchlml.linear_lml_loss(wrapped(inputs[rows]), own, target[rows], 3, group=mesh["labels"]).backward()
    torch.testing.assert_close(body.weight.grad, right, rtol=1e-4, atol=1e-6)


@in_processes(4)
def test_fully_sharded(group: Group) -> None:
    """Gradients are correct under FSDP2, where every process has its own rows and gathers the weight."""
    mesh, rank = init_device_mesh("cpu", (4,)), dist.get_rank()
    model = nn.ModuleList([nn.Linear(6, 5), torchlml.LinearLMLLoss(5, 12, 3)])
    inputs, target = _batch()
    model[1](model[0](inputs), target).backward()
    right = [_grad(p).clone() for p in model.parameters()]
    model.zero_grad()
    for part in model:
        fully_shard(part, mesh=mesh)
    rows = slice(2 * rank, 2 * rank + 2)
    model[1](model[0](inputs[rows]), target[rows]).backward()
    for p, grad in zip(model.parameters(), right, strict=True):
        torch.testing.assert_close(_grad(p).full_tensor(), grad, rtol=1e-4, atol=1e-6)


def _dies(rank: int, folder: str) -> None:
    store = FileStore(f"{folder}/store", 2)
    limit = timedelta(seconds=5)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=limit)
    x = torch.randn(2, 50)
    torchlml.lml(x, 3, group=dist.group.WORLD)
    if rank == 1:
        gather, calls = group_module._all_gather, []

        def die(*arguments: Any, **more: Any) -> None:
            calls.append(1)
            if len(calls) == 3:  # in the middle of a solve
                os.kill(os.getpid(), signal.SIGKILL)
            gather(*arguments, **more)

        group_module._all_gather = die
    started = time.monotonic()
    try:
        torchlml.lml(x, 3, group=dist.group.WORLD)
    except RuntimeError as error:
        (Path(folder) / "error").write_text(f"{time.monotonic() - started} {error}")
    os._exit(0)


def test_a_process_that_is_killed_ends_the_others() -> None:
    with tempfile.TemporaryDirectory() as folder:
        left, killed = [fork(_dies, rank, folder) for rank in (0, 1)]
        for process in (killed, left):
            process.join(60)
        assert killed.exitcode == -signal.SIGKILL
        assert left.exitcode == 0, "the remaining process did not stop"
        seconds, _, words = (Path(folder) / "error").read_text().partition(" ")
    assert float(seconds) < 10, words


def test_the_example_trains() -> None:
    example = Path(__file__).parents[2] / "examples" / "sharded_labels.py"
    assert len(example.read_text(encoding="utf-8").splitlines()) < 60
    printed, _ = output(*start_two([str(example)], script))
    found = re.search(r"recall@5 ([0-9.]+)", printed)
    assert found is not None
    assert float(found[1]) > 0.9
