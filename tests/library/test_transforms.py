"""`torch.func` transforms, alone and composed, compared with pure PyTorch, eager calls and exact values."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.func import grad, hessian, jacfwd, jacrev, jvp, vjp, vmap

import torchlml
from tests.support import truth
from tests.support.problems import SHORT, Problem
from tests.support.related import each_problem_and_dtype
from tests.support.special_rows import DENSE, Special

NAMES = ["lml", "log_lml", "lml_dual"]
each_name = pytest.mark.parametrize("name", NAMES)
OFFSETS = torch.tensor([0, 3, 3, 8, 12])
RAGGED_K = torch.tensor([1.0, 0.5, 2.5, 2.0], dtype=torch.float64)


def plain(name: str, x: Tensor, k: Tensor) -> Callable[[Tensor, Tensor], Tensor]:
    """Return the named function, valid near (x, k), built from operations that autograd can differentiate."""
    pairs = zip(x.reshape(-1, x.shape[-1]).tolist(), k.expand(x.shape[:-1]).flatten().tolist(), strict=True)
    start = torch.tensor([truth.solve(*pair).nu for pair in pairs], dtype=torch.float64).view(x.shape[:-1])

    def function(x: Tensor, k: Tensor) -> Tensor:
        nu = truth.newton_from(x, k, start)
        z = x + nu.unsqueeze(-1)
        return {"lml": torch.sigmoid(z), "log_lml": torch.nn.functional.logsigmoid(z), "lml_dual": nu}[name]

    return function


def weigh(out: Tensor) -> Tensor:
    """Return a scalar that depends differently on each entry."""
    return (out * torch.arange(1, out.numel() + 1, dtype=out.dtype).view(out.shape).cos()).sum()


def rows(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def close(a: Tensor, b: Tensor) -> None:
    torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-10)


Function = Callable[..., Tensor]
# Each entry takes a function f(x, k), applies a transform to it and returns a tensor.
TRANSFORMS: dict[str, Callable[[Function, Tensor, Tensor], Tensor]] = {
    "grad of x": lambda f, x, k: grad(lambda x: weigh(f(x, k)))(x),
    "grad of k": lambda f, x, k: grad(lambda k: weigh(f(x, k)))(k),
    "vjp": lambda f, x, k: vjp(lambda x: f(x, k), x)[1](f(x, k).detach().cos())[0],
    "jvp": lambda f, x, k: jvp(lambda x: f(x, k), (x,), (x.sin(),))[1],
    "jvp of k": lambda f, x, k: jvp(f, (x, k), (x.sin(), k.cos()))[1],
    "jacrev": lambda f, x, k: jacrev(f)(x, k),
    "jacfwd": lambda f, x, k: jacfwd(f)(x, k),
    "jacrev of k": lambda f, x, k: jacrev(f, argnums=1)(x, k),
    "jacfwd of k": lambda f, x, k: jacfwd(f, argnums=1)(x, k),
    "hessian": lambda f, x, k: hessian(lambda x: weigh(f(x, k)))(x),
    "hessian of k": lambda f, x, k: hessian(lambda k: weigh(f(x, k)))(k),
    "jacrev of jacrev": lambda f, x, k: jacrev(jacrev(f))(x, k),
    "jacfwd of jacrev": lambda f, x, k: jacfwd(jacrev(f))(x, k),
    "jacrev of jacfwd": lambda f, x, k: jacrev(jacfwd(f))(x, k),
    "jvp of grad": lambda f, x, k: jvp(grad(lambda x: weigh(f(x, k))), (x,), (x.sin(),))[1],
    "third derivative": lambda f, x, k: jvp(jacrev(jacrev(lambda x: weigh(f(x, k)))), (x,), (x.sin(),))[1],
}


@each_name
@pytest.mark.parametrize("transform", TRANSFORMS)
def test_transforms_of_dense_rows(name: str, transform: str) -> None:
    x, k = rows(2, 5), torch.tensor([1.5, 3.0], dtype=torch.float64)
    apply = TRANSFORMS[transform]
    close(apply(getattr(torchlml, name), x, k), apply(plain(name, x, k), x, k))


@each_name
@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("form", ["masked", "ragged"])
def test_transforms_of_masked_and_ragged_rows(name: str, transform: str, form: str) -> None:
    # Rows with three and five entries, as a jagged batch or as a padded matrix with a mask.
    x, k = rows(8), torch.tensor([1.5, 3.0], dtype=torch.float64)
    function = getattr(torchlml, name)
    mask = torch.tensor([[True, True, True, False, False], [True] * 5])

    def padded(x: Tensor, k: Tensor) -> Tensor:
        wide = torch.stack([torch.cat([x[:3], x[:2].detach()]), x[3:]])
        out = function(wide, k, mask=mask)
        return out if name == "lml_dual" else torch.cat([out[0, :3], out[1]])

    def packed(x: Tensor, k: Tensor) -> Tensor:
        return function(x, k, offsets=torch.tensor([0, 3, 8]))

    first, second = plain(name, x[:3], k[0]), plain(name, x[3:], k[1])

    def expected(x: Tensor, k: Tensor) -> Tensor:
        return torch.cat([first(x[:3], k[0]).reshape(-1), second(x[3:], k[1]).reshape(-1)])

    apply = TRANSFORMS[transform]
    close(apply(padded if form == "masked" else packed, x, k), apply(expected, x, k))


MASKS = torch.tensor(
    [[True, True, False, True, True, True], [True] * 6, [False, True] * 3, [True, False] * 3]
)
Mapped = tuple[Callable[..., Tensor], tuple[Tensor, ...], tuple[int | None, ...]]
# f is the function under test. Each entry has a call, its inputs and the dims for vmap.
MAPPED: dict[str, Callable[[Function], Mapped]] = {
    "x": lambda f: (lambda x: f(x, 2), (rows(4, 6),), (0,)),
    "x of two dims": lambda f: (lambda x: f(x, 2.5), (rows(4, 3, 6),), (0,)),
    "x, another dim": lambda f: (lambda x: f(x, 2.5), (rows(3, 4, 6),), (1,)),
    "x, the last dim": lambda f: (lambda x: f(x, 2, dim=0), (rows(6, 3, 4),), (2,)),
    "x and dim = 0": lambda f: (lambda x: f(x, 2, dim=0), (rows(4, 6, 3),), (0,)),
    "k": lambda f: (lambda k: f(torch.arange(6.0).double(), k), (torch.rand(4).double() * 5 + 0.5,), (0,)),
    "x and k": lambda f: (f, (rows(4, 6), torch.rand(4).double() * 5 + 0.5), (0, 0)),
    "x and per-row k": lambda f: (f, (rows(4, 3, 6), torch.rand(3, 4).double() * 5 + 0.5), (0, 1)),
    "x, shared per-row k": lambda f: (f, (rows(4, 3, 6), torch.tensor([1.0, 2, 3.5])), (0, None)),
    "shared x, k": lambda f: (f, (rows(3, 6), torch.rand(4, 3).double() * 5 + 0.5), (None, 0)),
    "mask": lambda f: (lambda m: f(torch.arange(6.0).double(), 1.5, mask=m), (MASKS,), (0,)),
    "x and mask": lambda f: (lambda x, m: f(x, 1.5, mask=m), (rows(4, 6), MASKS), (0, 0)),
    "x, shared mask": lambda f: (lambda x, m: f(x, 1.5, mask=m), (rows(5, 4, 6), MASKS), (0, None)),
    "packed": lambda f: (lambda x: f(x, RAGGED_K, offsets=OFFSETS), (rows(4, 12),), (0,)),
    "packed and k": lambda f: (
        lambda x, k: f(x, k, offsets=OFFSETS),
        (rows(4, 12), torch.rand(4, 4).double() * 2 + 0.2),
        (0, 1),
    ),
    "packed and mask": lambda f: (
        lambda x, m: f(x, 1.5, mask=m, offsets=OFFSETS),
        (rows(4, 12), torch.rand(4, 12) > 0.2),
        (0, 0),
    ),
}


@each_name
@pytest.mark.parametrize("case", MAPPED)
def test_vmap(name: str, case: str) -> None:
    call, inputs, dims = MAPPED[case](getattr(torchlml, name))
    got = vmap(call, in_dims=dims)(*inputs)
    for i, out in enumerate(got):
        close(out, call(*[a if d is None else a.select(d, i) for a, d in zip(inputs, dims, strict=True)]))


def test_vmap_of_bracketing() -> None:
    x = rows(4, 3, 6)
    close(vmap(lambda x: torchlml.lml_bracketing(x, 2, samples=20))(x), torchlml.lml_dual(x, 2))
    gradient = vmap(grad(lambda x: weigh(torchlml.lml_bracketing(x, 2))))(x)
    close(gradient, vmap(grad(lambda x: weigh(torchlml.lml_dual(x, 2))))(x))


@each_name
@pytest.mark.parametrize("case", [case for case in MAPPED if case != "mask"])
def test_vmap_of_grad(name: str, case: str) -> None:
    call, inputs, dims = MAPPED[case](getattr(torchlml, name))

    def scalar(*inputs: Tensor) -> Tensor:
        out = call(*inputs)
        return weigh(torch.where(out.isinf(), 0, out))

    got = vmap(grad(scalar), in_dims=dims)(*inputs)
    for i, out in enumerate(got):
        one = [a if d is None else a.select(d, i) for a, d in zip(inputs, dims, strict=True)]
        leaf = one[0].clone().requires_grad_()
        (expected,) = torch.autograd.grad(scalar(leaf, *one[1:]), leaf)
        close(out, expected)


@each_name
def test_vmap_composed(name: str) -> None:
    x, k = rows(3, 4, 6), torch.tensor(2.5, dtype=torch.float64)
    function = getattr(torchlml, name)
    expected = function(x, 2.5)
    close(vmap(vmap(lambda x: function(x, k)))(x), expected)
    loss = lambda row: weigh(function(row, k))  # noqa: E731
    flat = torch.stack(
        [
            hessian(lambda r, i=i: weigh(plain(name, x.view(12, 6)[i], k)(r, k)))(x.view(12, 6)[i])
            for i in range(12)
        ]
    )
    close(vmap(vmap(hessian(loss)))(x), flat.view(3, 4, 6, 6))
    close(grad(lambda x: vmap(loss)(x).sum())(x[0]), torch.stack([grad(loss)(row) for row in x[0]]))
    tangent = vmap(lambda row: jvp(lambda r: function(r, k), (row,), (row.cos(),))[1])(x[0])
    close(tangent, torch.stack([jvp(lambda r: function(r, k), (row,), (row.cos(),))[1] for row in x[0]]))


def test_a_model_under_functional_call() -> None:
    torch.manual_seed(3)
    models = [torch.nn.Sequential(torch.nn.Linear(4, 9), torchlml.LML(k=3)).double() for _ in range(3)]
    parameters, _ = torch.func.stack_module_state(models)  # type: ignore[arg-type]
    inputs = rows(5, 4)
    out = vmap(lambda p: torch.func.functional_call(models[0], p, (inputs,)))(parameters)
    close(out, torch.stack([model(inputs) for model in models]))


def upstream(n: int) -> Tensor:
    return (torch.arange(n, dtype=torch.float64) * 0.7).cos() + 0.3


each_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)


@each_problem_and_dtype
def test_the_transformable_path_of_lml_is_accurate(problem: Problem, dtype: torch.dtype) -> None:
    unit = 1e-6 if dtype == torch.float32 else 1e-11
    x, row = problem.row(dtype), problem.truth(dtype)
    v = upstream(x.numel()).to(dtype)
    y, tangent = jvp(lambda x: torchlml.lml(x, problem.k), (x,), (v,))
    gradient = grad(lambda x: (torchlml.lml(x, problem.k) * v).sum())(x)
    expected = row.lml_gradient(v.double().numpy())[0]
    limit = unit * float(v.abs().max())
    assert np.abs(y.double().numpy() - row.y).max() <= unit
    assert abs(float(y.double().sum()) - problem.k) <= 2 * unit * max(1, problem.k)
    assert np.abs(tangent.double().numpy() - expected).max() <= limit
    assert np.abs(gradient.double().numpy() - expected).max() <= limit


@each_dtype
@pytest.mark.parametrize("problem", SHORT, ids=lambda problem: problem.name)
def test_the_transformable_path_of_log_lml_is_accurate(problem: Problem, dtype: torch.dtype) -> None:
    x, row = problem.row(dtype), problem.truth(dtype)
    if np.abs(row.z).min() > 1e6:  # nu is too coarsely rounded to distinguish logits 0 and 1
        return
    unit = (1e-6 if dtype == torch.float32 else 1e-11) * np.maximum(1.0, np.abs(row.z))
    v = upstream(x.numel()).to(dtype)
    log_y, tangent = jvp(lambda x: torchlml.log_lml(x, problem.k), (x,), (v,))
    gradient = grad(lambda x: (torchlml.log_lml(x, problem.k) * v).sum())(x)
    g = v.double().numpy()
    effect = np.abs(g) * (1 - row.y)
    logs = torch.from_numpy(row.log_y).to(dtype).double().numpy()  # -6e38 is -inf in float32
    got = log_y.double().numpy()
    with np.errstate(invalid="ignore"):  # -inf - -inf
        assert bool(((got == logs) | (np.abs(got - logs) <= unit * np.maximum(1, np.abs(logs)))).all())
    limit = unit * (effect + row.p * effect.sum()) + 1e-12
    assert bool((np.abs(gradient.double().numpy() - row.log_lml_gradient(g)[0]) <= limit).all())
    move = (1 - row.y) * (g - row.p @ g)
    assert bool((np.abs(tangent.double().numpy() - move) <= 4 * unit * np.abs(g).max()).all())


@each_name
@pytest.mark.parametrize("special", DENSE, ids=lambda row: row.name)
def test_special_rows(name: str, special: Special) -> None:
    # Transforms agree with eager calls, and all derivatives are finite unless the row contains NaN.
    x = torch.tensor(special.x, dtype=torch.float64)
    mask = torch.tensor(special.mask or [True] * len(special.x))
    k = torch.tensor(float(special.k), dtype=torch.float64)
    function = getattr(torchlml, name)

    def call(x: Tensor, k: Tensor) -> Tensor:
        return function(x, k, mask=mask)

    eager = call(x, k)
    torch.testing.assert_close(vmap(call)(x[None], k[None])[0], eager, equal_nan=True)
    leaf, target = x.clone().requires_grad_(), k.clone().requires_grad_()
    weights = torch.arange(1.0, eager.numel() + 1).double().view(eager.shape)
    expected = torch.autograd.grad(call(leaf, target), (leaf, target), weights)
    _, pull = vjp(call, x, k)
    for got, wanted in zip(pull(weights), expected, strict=True):
        torch.testing.assert_close(got, wanted, equal_nan=True)
    _, tangent = jvp(call, (x, k), (torch.ones_like(x), torch.ones_like(k)))
    if not math.isnan(special.nu):
        assert bool(tangent.isfinite().all())
        second = grad(lambda x: (vjp(lambda x: call(x, k), x)[1](weights)[0] * 1.5).sum())(x)
        assert bool(second.isfinite().all())
