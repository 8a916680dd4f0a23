"""Models exported by `torch.onnx.export` consist of standard operators and run in onnxruntime."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.export import Dim
from torch.fx.experimental.proxy_tensor import make_fx

import torchlml
from tests.support import truth
from tests.support.problems import SHORT, Problem
from torchlml._torch import careful

onnxruntime = pytest.importorskip("onnxruntime", reason="onnxruntime is not installed")
pytest.importorskip("onnxscript", reason="onnxscript is not installed")
INF, NAN = math.inf, math.nan
# Warnings from PyTorch's exporter about its own internals.
pytestmark = pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning")
Session = Callable[..., list[NDArray[Any]]]


class Everything(nn.Module):
    """A model that calls several exportable functions, with k and the mask as inputs."""

    def forward(self, x: Tensor, k: Tensor, mask: Tensor) -> tuple[Tensor, ...]:
        return (
            torchlml.lml(x, k, mask=mask),
            torchlml.log_lml(x, k, mask=mask),
            torchlml.topk_mask(x, k.floor(), mask=mask),
            torchlml.lml(x, k, mask=mask, bound="at_most"),
        )


def exported(model: nn.Module, inputs: tuple[Any, ...], **settings: Any) -> Any:
    program = torch.onnx.export(model.eval(), inputs, dynamo=True, verbose=False, **settings)
    assert program is not None
    return program.model_proto


def session(model: Any) -> Session:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    running = onnxruntime.InferenceSession(model.SerializeToString(), options)
    names = [given.name for given in running.get_inputs()]
    return lambda *inputs: running.run(None, dict(zip(names, (t.numpy() for t in inputs), strict=True)))


@pytest.fixture(scope="module")
def everything() -> Any:
    rows, both = {0: Dim.DYNAMIC}, {0: Dim.DYNAMIC, 1: Dim.DYNAMIC}
    example = (torch.randn(3, 5), torch.ones(3), torch.ones(3, 5, dtype=torch.bool))
    return exported(Everything(), example, dynamic_shapes=(both, rows, both))


@pytest.fixture(scope="module")
def run(everything: Any) -> Session:
    return session(everything)


def nodes(graph: Any) -> Iterable[Any]:
    for node in graph.node:
        yield node
        for attribute in node.attribute:
            yield from nodes(attribute.g)


def test_only_standard_operators(everything: Any) -> None:
    assert {node.domain for node in nodes(everything.graph)} == {""}
    assert not everything.functions
    assert any(node.op_type == "Loop" for node in nodes(everything.graph))  # so loop bodies are also checked
    shapes = [
        [size.dim_param for size in given.type.tensor_type.shape.dim] for given in everything.graph.input
    ]
    assert all(all(names) for names in shapes)


@pytest.mark.parametrize("problem", SHORT, ids=lambda problem: problem.name)
def test_rows(run: Session, problem: Problem) -> None:
    x = problem.row(torch.float32)
    k = torch.tensor([problem.k], dtype=torch.float32)
    y, log_y, *_ = run(x[None], k, torch.ones(1, len(x), dtype=torch.bool))
    expected = truth.solve(x.double().tolist(), float(k))
    assert np.abs(y[0] - expected.y).max() <= 1e-6
    assert abs(y.astype(float).sum() - float(k)) <= 2e-6 * max(1, float(k))
    with np.errstate(over="ignore"):  # log y exceeds the range of float32 in two problems
        log_truth = expected.log_y.astype(np.float32)
    np.testing.assert_allclose(log_y[0], log_truth, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("scale", [1, 3, 12])
def test_every_k(run: Session, scale: float) -> None:
    n = 40
    x = torch.randn(n + 1, n) * scale
    x[:, 7] = x[:, 8]
    x[::3, 5] = -INF
    mask = torch.rand(n + 1, n) > 0.1
    k = torch.arange(n + 1).float()
    y, _, hard, at_most = run(x, k, mask)
    for i in range(n + 1):
        expected = truth.projection(x[i].double().tolist(), i, mask[i].tolist())
        np.testing.assert_allclose(y[i], expected, atol=1e-6, rtol=0)
        alive = np.where(mask[i], x[i], -INF)
        order = sorted(range(n), key=lambda j: (-alive[j], j))[:i]
        assert hard[i].nonzero()[0].tolist() == sorted(j for j in order if alive[j] > -INF)
        sigmoids = 1 / (1 + np.exp(-alive.astype(float)))
        np.testing.assert_allclose(
            at_most[i], sigmoids if sigmoids.sum() <= i else expected, atol=1e-6, rtol=0
        )


def test_special_rows(run: Session) -> None:
    x = torch.tensor(
        [
            [1.0, 2, 3],  # k = 0
            [1, 2, 3],  # k = n
            [-INF, 2, 3],  # exactly k entries are not -inf
            [INF, 1, 1],
            [INF, INF, 1],  # more than k entries are +inf
            [NAN, 1, 2],
            [-INF, -INF, -INF],
        ]
    )
    k = torch.tensor([0.0, 3, 2, 2, 1, 1, 1])
    y, log_y, hard, _ = run(x, k, torch.ones(7, 3, dtype=torch.bool))
    expected = np.array([[0, 0, 0], [1, 1, 1], [0, 1, 1], [1, 0.5, 0.5], [0.5, 0.5, 0], [NAN] * 3, [0, 0, 0]])
    np.testing.assert_allclose(y, expected, atol=1e-6)
    with np.errstate(divide="ignore"):
        np.testing.assert_allclose(log_y, np.log(expected), atol=1e-6)
    assert hard[4].tolist() == [1, 0, 0]
    assert np.isnan(hard[5]).all()


def test_exported_program_at_a_lower_opset() -> None:
    """A program from `torch.export`, in which k is a number, can be converted to opset 17."""
    model = nn.Sequential(nn.Linear(3, 6), torchlml.LML(k=2, temperature=0.5)).eval()
    with torch.no_grad():
        program = torch.export.export(model, (torch.randn(4, 3),), dynamic_shapes=({0: Dim.DYNAMIC},))
    found = torch.onnx.export(program, dynamo=True, verbose=False, opset_version=17)
    assert found is not None
    assert found.model_proto.opset_import[0].version == 17
    x = torch.randn(7, 3)
    (y,) = session(found.model_proto)(x)
    logits = model[0](x).detach().double() * 2
    np.testing.assert_allclose(y, [truth.solve(row.tolist(), 2).y for row in logits], atol=1e-6)


@pytest.mark.parametrize("problem", SHORT, ids=lambda problem: problem.name)
def test_the_exported_solver_takes_the_same_steps(problem: Problem) -> None:
    """The exported computation of nu, run in PyTorch, is bitwise identical to the careful solver."""
    x, k = problem.row(torch.float32).repeat(2, 1), torch.tensor(float(problem.k), dtype=torch.float64)
    translate = torch._decomp.decomposition_table[torch.ops.torchlml.solve.default]
    assert torch.equal(translate(x, k, None, None), careful.solve(x, k, None, None))


def test_jagged_batches_are_rejected() -> None:
    translate = torch._decomp.decomposition_table[torch.ops.torchlml.forward.default]
    with pytest.raises(NotImplementedError, match=r"cannot be exported to ONNX\. Pad the rows"):
        translate(torch.randn(5), torch.tensor(1.0), None, torch.tensor([0, 2, 5]))


def test_the_compiler_does_not_use_the_decomposition(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: Any) -> None:
        raise AssertionError("The compiler used the decomposition that is meant for exporters.")

    monkeypatch.setitem(torch._decomp.decomposition_table, torch.ops.torchlml.forward.default, fail)
    x = torch.randn(4, 6)
    traced = make_fx(lambda x: torchlml.lml(x, 2), tracing_mode="symbolic")(x)
    torch.testing.assert_close(traced(x), torchlml.lml(x, 2))


class PerRow(nn.Module):
    def forward(self, x: Tensor, k: Tensor) -> Tensor:
        return torchlml.lml(x, k)


def test_k_per_row_with_any_number_of_rows() -> None:
    dynamic = {0: Dim.DYNAMIC}
    run = session(exported(PerRow(), (torch.randn(3, 5), torch.ones(3)), dynamic_shapes=(dynamic, dynamic)))
    for rows in (0, 1, 4):
        x, k = torch.randn(rows, 5), torch.rand(rows) * 4
        (y,) = run(x, k)
        assert y.shape == (rows, 5)
        np.testing.assert_allclose(y.sum(1), k.numpy(), rtol=0, atol=1e-5)
        np.testing.assert_allclose(y, torchlml.lml(x, k).numpy(), rtol=0, atol=1e-6)
