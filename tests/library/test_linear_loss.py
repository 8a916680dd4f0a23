"""`linear_lml_loss` compared with `lml_loss(F.linear(...))`: all arguments, derivatives, and memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint

import torchlml
from tests.support import fresh
from torchlml._autograd import chunked_linear
from torchlml._autograd.chunked_linear import rows_within
from torchlml._cpu import loader
from torchlml_lab.bench.timing import measurable

ROWS, LABELS, FEATURES = 11, 30, 7
FORMS = ("index", "list", "bool", "float")
TOLERANCE = {torch.float64: 1e-10, torch.float32: 2e-5, torch.bfloat16: 4e-2}
each_form = pytest.mark.parametrize("form", FORMS)
each_reduction = pytest.mark.parametrize("reduction", ["mean", "sum", "none"])


def _target(form: str) -> Tensor:
    if form in ("index", "list"):
        target = torch.randint(LABELS, (ROWS,) if form == "index" else (ROWS, 4))
        target[2] = -100
        return target
    hot = torch.rand(ROWS, LABELS) < 0.1
    return hot if form == "bool" else hot.float() * 2


def _tensors(dtype: torch.dtype = torch.float64, bias: bool = True) -> list[Tensor]:
    shapes: list[tuple[int, ...]] = [(ROWS, FEATURES), (LABELS, FEATURES), *([(LABELS,)] if bias else [])]
    return [torch.randn(shape, dtype=dtype).requires_grad_() for shape in shapes]


def _plain(tensors: list[Tensor], target: Tensor, k: Any, **settings: Any) -> Tensor:
    return torchlml.lml_loss(F.linear(*tensors), target, k, **settings)


def _chunked(tensors: list[Tensor], target: Tensor, k: Any, *, rows: int = 3, **settings: Any) -> Tensor:
    size = LABELS * 2 * max(4, tensors[0].dtype.itemsize) * rows
    bias = tensors[2] if len(tensors) > 2 else None
    return torchlml.linear_lml_loss(
        tensors[0], tensors[1], target, k, linear_bias=bias, memory_limit=size, **settings
    )


def _compare(dtype: torch.dtype, target: Tensor, k: Any, bias: bool = True, **settings: Any) -> None:
    tensors = _tensors(dtype, bias)
    inputs = [*tensors, *([k] if isinstance(k, Tensor) and k.requires_grad else [])]
    wanted, found = _plain(tensors, target, k, **settings), _chunked(tensors, target, k, **settings)
    assert found.dtype == wanted.dtype
    assert found.shape == wanted.shape
    seed = torch.rand(wanted.shape).to(wanted.dtype) + 0.5
    pairs = zip(
        (found, *torch.autograd.grad(found, inputs, seed)),
        (wanted, *torch.autograd.grad(wanted, inputs, seed)),
        strict=True,
    )
    for mine, right in pairs:
        assert mine.dtype == right.dtype
        limit = TOLERANCE[dtype]
        size = max(1.0, float(right.detach().abs().max()))
        torch.testing.assert_close(mine, right, rtol=limit, atol=limit * size)


@each_form
@each_reduction
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_every_target(form: str, reduction: str, dtype: torch.dtype) -> None:
    _compare(dtype, _target(form), 3, reduction=reduction, weight=torch.rand(LABELS))


@each_form
@pytest.mark.parametrize("bound", ["exactly", "at_most", "at_least"])
@pytest.mark.parametrize("k", [2.5, torch.tensor(4.0), torch.arange(1, 12) / 2], ids=["2.5", "0-d", "row"])
def test_every_k_and_bound(form: str, bound: str, k: Any) -> None:
    k = k.clone().requires_grad_() if isinstance(k, Tensor) else k
    _compare(torch.float64, _target(form), k, bias=False, bound=bound, label_reduction="mean")


def test_more_dimensions() -> None:
    h, w = torch.randn(2, 3, 4, FEATURES), torch.randn(LABELS, FEATURES)
    target = torch.randint(LABELS, (2, 3, 4))
    found = torchlml.linear_lml_loss(h, w, target, 3, reduction="none", memory_limit=1)
    torch.testing.assert_close(found, torchlml.lml_loss(h @ w.T, target, 3, reduction="none"))
    one = torchlml.linear_lml_loss(h[0, 0, 0], w, target[0, 0, 0], 3, reduction="none")
    torch.testing.assert_close(one, found[0, 0, 0])


def test_no_rows_or_no_labels() -> None:
    tensors = _tensors()
    assert float(_chunked(tensors, torch.full((ROWS,), -100), 3).detach()) == 0
    empty = torchlml.linear_lml_loss(tensors[0][:0], tensors[1], torch.zeros(0, dtype=torch.int64), 3)
    empty.backward()
    assert torch.equal(tensors[1].grad, torch.zeros_like(tensors[1]))


def test_only_some_gradients() -> None:
    h, w, b = _tensors()
    target = _target("index")
    for needed in ([h], [w], [b], [h, b]):
        fixed = [t if any(t is n for n in needed) else t.detach() for t in (h, w, b)]
        wanted = torch.autograd.grad(_plain(fixed, target, 3), needed)
        found = torch.autograd.grad(_chunked(fixed, target, 3), needed)
        torch.testing.assert_close(found, wanted)
    with torch.no_grad():
        torch.testing.assert_close(_chunked([h, w, b], target, 3), _plain([h, w, b], target, 3))


def test_gradients_are_computed_only_if_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunked_linear, "_with_gradients", lambda *a: pytest.fail("gradients were computed"))
    with torch.no_grad():
        _chunked(_tensors(), _target("index"), 3)


def test_accumulation_and_a_second_backward() -> None:
    tensors, target = _tensors(), _target("index")
    wanted = [2 * g for g in torch.autograd.grad(_plain(tensors, target, 3), tensors)]
    loss = _chunked(tensors, target, 3)
    loss.backward(retain_graph=True)
    loss.backward()
    for t, right in zip(tensors, wanted, strict=True):
        torch.testing.assert_close(t.grad, right)
        t.grad = None
    for rows in (slice(0, 4), slice(4, ROWS)):
        loss = torchlml.linear_lml_loss(tensors[0][rows], tensors[1], target[rows], 3, reduction="sum")
        (2 * loss).backward()
    whole = torchlml.lml_loss(F.linear(*tensors[:2]), target, 3, reduction="sum")
    both = torch.autograd.grad(2 * whole, tensors[:2])
    torch.testing.assert_close([t.grad for t in tensors[:2]], list(both))


@each_reduction
def test_double_backward(reduction: str) -> None:
    h, w, b = _tensors()
    k = torch.tensor(3.0, dtype=torch.float64, requires_grad=True)
    target = _target("list")

    def loss(h: Tensor, w: Tensor, b: Tensor, k: Tensor) -> Tensor:
        return _chunked([h, w, b], target, k, reduction=reduction)

    assert torch.autograd.gradcheck(loss, (h, w, b, k), fast_mode=True)
    assert torch.autograd.gradgradcheck(loss, (h, w, b, k), fast_mode=True)


def test_transforms_take_the_unchunked_path() -> None:
    h, w, b = (t.detach() for t in _tensors())
    target = _target("index")

    def plain(w: Tensor) -> Tensor:
        return _plain([h, w, b], target, 3)

    def chunked(w: Tensor) -> Tensor:
        return _chunked([h, w, b], target, 3)

    close = torch.testing.assert_close
    close(torch.func.grad(chunked)(w), torch.func.grad(plain)(w))
    tangent = torch.randn_like(w)
    close(torch.func.jvp(chunked, (w,), (tangent,)), torch.func.jvp(plain, (w,), (tangent,)))
    several = torch.stack([w, 2 * w])
    close(torch.func.vmap(chunked)(several), torch.func.vmap(plain)(several))
    mapped = [torch.func.vmap(torch.func.grad(function))(several) for function in (chunked, plain)]
    close(*mapped)


@each_reduction
def test_several_backward_passes_at_once(reduction: str) -> None:
    """Gradients are correct with `is_grads_batched=True`, which `jacobian(..., vectorize=True)` also uses."""
    (h, w, b), target = _tensors(), _target("index")
    rows = ROWS if reduction == "none" else 1
    seeds = torch.randn(4, rows, dtype=torch.float64).reshape(4, *([rows] if reduction == "none" else []))
    batched = {"grad_outputs": seeds, "is_grads_batched": True}
    wanted = torch.autograd.grad(_plain([h, w, b], target, 3, reduction=reduction), (h, w, b), **batched)
    found = torch.autograd.grad(_chunked([h, w, b], target, 3, reduction=reduction), (h, w, b), **batched)
    torch.testing.assert_close(found, wanted)


def test_gradients_of_label_weights() -> None:
    tensors, weight = _tensors(), torch.rand(LABELS, dtype=torch.float64, requires_grad=True)
    target = _target("index")
    (wanted,) = torch.autograd.grad(_plain(tensors, target, 3, weight=weight), weight)
    (found,) = torch.autograd.grad(_chunked(tensors, target, 3, weight=weight), weight)
    torch.testing.assert_close(found, wanted)


@each_reduction
def test_autocast(reduction: str) -> None:
    tensors, target = _tensors(torch.float32), _target("index")
    with torch.autocast("cpu", torch.bfloat16):
        wanted = _plain(tensors, target, 3, reduction=reduction)
        found = _chunked(tensors, target, 3, reduction=reduction)
    assert found.dtype == wanted.dtype == torch.float32
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
    grads = zip(
        torch.autograd.grad(found.sum(), tensors), torch.autograd.grad(wanted.sum(), tensors), strict=True
    )
    for mine, right in grads:
        assert mine.dtype == torch.float32
        torch.testing.assert_close(mine, right, rtol=2e-2, atol=2e-2 * float(right.abs().max()))


@each_reduction
@pytest.mark.parametrize("autocast", [True, False])
def test_float16_with_a_scaled_loss(reduction: str, autocast: bool) -> None:
    """Small gradients are accurate if the loss is scaled. Without scaling, float16 would round them to 0."""
    rows, labels, scale = 64, 20_000, 2.0**12
    h, w = torch.randn(rows, 4), torch.randn(labels, 4) * 0.1 + 1  # all labels have similar logits
    target = torch.randint(labels, (rows,))
    seed = torch.full((rows,) if reduction == "none" else (), scale / (1 if reduction == "mean" else rows))
    exact = [t.half().double().requires_grad_() for t in (h, w)]
    loss = torchlml.lml_loss(F.linear(*exact), target, 5, reduction=reduction)
    wanted = torch.autograd.grad(loss, exact, seed.double())
    half = [(t if autocast else t.half()).requires_grad_() for t in (h, w)]
    with torch.autocast("cpu", torch.float16, enabled=autocast):
        loss = torchlml.linear_lml_loss(half[0], half[1], target, 5, reduction=reduction, memory_limit=2**22)
    found = torch.autograd.grad(loss, half, seed.to(loss.dtype))
    for mine, right in zip(found, wanted, strict=True):
        assert float((mine.double() - right).norm() / right.norm()) < 2e-3


def test_many_bfloat16_chunks_lose_no_accuracy() -> None:
    """The weight's gradient is accurate, because it is accumulated over the chunks in float32."""
    h, w = torch.rand(400, 4).bfloat16().requires_grad_(), torch.zeros(6, 4).bfloat16().requires_grad_()
    target = torch.zeros(400, dtype=torch.int64)
    torchlml.linear_lml_loss(h, w, target, 1, reduction="sum", memory_limit=1).backward()
    exact = h.detach().double(), w.detach().double().requires_grad_()
    torchlml.lml_loss(exact[0] @ exact[1].T, target, 1, reduction="sum").backward()
    assert w.grad is not None
    torch.testing.assert_close(w.grad.double(), exact[1].grad, rtol=2**-8, atol=2e-2)


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # from torch, at a graph break
def test_compile_and_checkpoint() -> None:
    tensors, target = _tensors(torch.float32), _target("index")
    wanted = torch.autograd.grad(_plain(tensors, target, 3), tensors)

    def loss(h: Tensor, w: Tensor, b: Tensor) -> Tensor:
        return 2 * torchlml.linear_lml_loss(h + 0, w, target, 3, linear_bias=b, memory_limit=1000) / 2

    found = torch.autograd.grad(torch.compile(loss, backend="aot_eager")(*tensors), tensors)
    torch.testing.assert_close(found, wanted)
    found = torch.autograd.grad(checkpoint(loss, *tensors, use_reentrant=False), tensors)
    torch.testing.assert_close(found, wanted)


def test_module() -> None:
    module = torchlml.LinearLMLLoss(FEATURES, LABELS, 3, bias=True, label_reduction="mean", memory_limit=5000)
    h, target = torch.randn(ROWS, FEATURES), _target("list")
    wanted = torchlml.LMLLoss(3, label_reduction="mean")(module.linear(h), target)
    torch.testing.assert_close(module(h, target), wanted)
    assert [name for name, _ in module.named_parameters()] == ["linear.weight", "linear.bias"]
    assert "k=3" in repr(module)
    assert isinstance(module.linear, nn.Linear)


@each_form
@each_reduction
def test_truncated_entropy(form: str, reduction: str) -> None:
    """`linear_truncated_entropy_loss`, computed in chunks of rows, matches the loss of the full logits."""
    tensors, target = _tensors(), _target(form)
    settings: Any = {"reduction": reduction, "weight": torch.rand(LABELS), "label_reduction": "mean"}
    wanted = torchlml.truncated_entropy_loss(F.linear(*tensors), target, 3, **settings)
    found = torchlml.linear_truncated_entropy_loss(
        tensors[0], tensors[1], target, 3, linear_bias=tensors[2], memory_limit=LABELS * 100, **settings
    )
    seed = torch.rand_like(wanted)
    torch.testing.assert_close(found, wanted)
    right = torch.autograd.grad(wanted, tensors, seed)
    torch.testing.assert_close(torch.autograd.grad(found, tensors, seed), right)


def test_truncated_entropy_definition_module_and_errors() -> None:
    module = torchlml.LinearTruncatedEntropyLoss(FEATURES, LABELS, 3, bias=True, memory_limit=5000)
    h, target = torch.randn(ROWS, FEATURES), torch.randint(LABELS, (ROWS,))
    logits = module.linear(h).detach().double()
    label = logits.gather(1, target[:, None])
    others = logits.scatter(1, target[:, None], -torch.inf).sort(descending=True).values[:, 2:]
    exact = torch.log1p(torch.exp(others - label).sum(1)).mean()  # without the two largest other logits
    torch.testing.assert_close(module(h, target).detach().double(), exact, rtol=1e-6, atol=1e-6)
    assert "k=3" in repr(module)
    for wrong, words in ((LABELS + 1, "from 1 to 30"), (0, "at least 1|from 1"), (2.5, "must be an integer")):
        k: Any = wrong
        with pytest.raises((TypeError, ValueError), match=words):
            torchlml.linear_truncated_entropy_loss(h, module.linear.weight, target, k)
    with pytest.raises(ValueError, match="`memory_limit` must be"):
        torchlml.LinearTruncatedEntropyLoss(FEATURES, LABELS, 3, memory_limit=0)


REJECTED: dict[str, tuple[Any, str, dict[str, Any]]] = {
    "a list": (TypeError, "`input` must be", {"input": [1.0]}),
    "integers": (TypeError, "`input` must be a floating-point", {"input": torch.ones(ROWS, FEATURES).long()}),
    "another dtype": (TypeError, "dtype of `input`", {"linear_weight": torch.ones(LABELS, 7).double()}),
    "features": (ValueError, "`linear_weight` (n, d)", {"linear_weight": torch.ones(LABELS, FEATURES + 1)}),
    "bias": (ValueError, "`linear_bias` must have shape", {"linear_bias": torch.ones(3)}),
    "target": (ValueError, "`target` must contain class indices", {"target": torch.full((ROWS,), LABELS)}),
    "target's shape": (ValueError, "`target`", {"target": torch.zeros(3, dtype=torch.int64)}),
    "weight": (ValueError, "`weight` must be", {"weight": torch.ones(3)}),
    "k": (ValueError, "`k` must be from 0 to n", {"k": LABELS + 1}),
    "memory_limit": (ValueError, "`memory_limit` must be", {"memory_limit": 0}),
    "reduction": (ValueError, "`reduction` must be", {"reduction": "max"}),
    "bound": (ValueError, "`bound` must be", {"bound": "near"}),
}


@pytest.mark.parametrize("case", REJECTED)
def test_bad_input(case: str) -> None:
    kind, words, wrong = REJECTED[case]
    right: dict[str, Any] = {
        "input": torch.randn(ROWS, FEATURES),
        "linear_weight": torch.randn(LABELS, FEATURES),
        "k": 3,
    }
    with pytest.raises(kind) as caught:
        torchlml.linear_lml_loss(**{**right, "target": _target("index"), **wrong})
    assert words in str(caught.value)


def test_rows_within_a_budget() -> None:
    threads = torch.get_num_threads()
    for in_place, copies, extra in ((False, 2, 0), (True, 1, threads)):
        assert rows_within(1, 10**6, torch.float32, in_place) == 1
        for labels in (1000, 123_457, 200_000, 10**6):
            rows = rows_within(64 * 2**20, labels, torch.float32, in_place)
            taken = (rows + min(rows, extra)) * labels * 4 * copies
            assert 0.9 * 64 * 2**20 < taken <= 1.05 * 64 * 2**20


@pytest.mark.parametrize(("rows", "most", "sizes"), [(256, 86, [86, 86, 84]), (9, 4, [3, 3, 3]), (0, 4, [])])
def test_chunks_are_even(rows: int, most: int, sizes: list[int]) -> None:
    chunks = chunked_linear._chunks(rows, most)
    assert [len(range(rows)[chunk]) for chunk in chunks] == sizes
    assert [i for chunk in chunks for i in range(rows)[chunk]] == list(range(rows))


@pytest.mark.skipif(not measurable(), reason="measuring memory requires Linux with the GNU C library")
@pytest.mark.skipif(not loader.loaded(), reason="pure PyTorch keeps temporaries in addition to the logits")
@pytest.mark.parametrize("rows", [64, 256])
def test_memory_beyond_the_weights_gradient(rows: int) -> None:
    """For either batch size, a step needs at most 64 MiB plus 10% in addition to the weight's gradient."""
    # Run in a new process, so that memory left in the heap by other tests is not counted.
    code = f"""
import torch, torchlml
from torchlml_lab.bench.timing import added_bytes
torch.set_num_threads(1)
h, w = torch.randn({rows}, 8, requires_grad=True), torch.randn(400_000, 8, requires_grad=True)
target = torch.randint(400_000, ({rows},))
step = lambda: torch.autograd.grad(torchlml.linear_lml_loss(h, w, target, 5), (h, w))
print(added_bytes(step) - w.numel() * 4)
"""
    assert 0 < int(fresh.run(code).stdout) <= 1.1 * 64 * 2**20


@pytest.mark.parametrize("loss", [torchlml.linear_lml_loss, torchlml.linear_truncated_entropy_loss])
def test_backward_of_fake_tensors(loss: Any) -> None:
    with FakeTensorMode():
        hidden = torch.randn(4, 3, requires_grad=True)
        weight = torch.randn(6, 3, requires_grad=True)
        loss(hidden, weight, torch.zeros(4, dtype=torch.int64), 2).backward()
    for t in (hidden, weight):
        assert t.grad is not None
        assert t.grad.shape == t.shape
