"""Hash the library's results, to verify that a code change does not alter a single bit of them.

    python tools/bits.py --out before.json      # run before changing the code
    python tools/bits.py --compare before.json  # run after the change, to list the hashes that differ

The compiled kernel and pure PyTorch both compute the projection, its logarithm, the dual variable, the losses
(with and without a fused linear layer), their gradients and all related operators, on rows from the tests and
on random rows, in four dtypes. Hashes depend on the machine and on the torch version, so compare only hashes
from the same machine and version.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import torchlml
from tests.support.problems import SHORT
from torchlml._arguments import canonical
from torchlml._autograd import implicit
from torchlml.bracketing import solve_bracketing

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
KERNELS = ("native", "torch")
Call = Callable[..., torch.Tensor]

# Each function takes (x, k) and the keywords `mask` and `offsets`.
LAYER: dict[str, Call] = {
    "lml": torchlml.lml,
    "log_lml": torchlml.log_lml,
    "lml_dual": torchlml.lml_dual,
    "lml at_most": lambda x, k, **rows: torchlml.lml(x, k, bound="at_most", **rows),
    "lml at_least": lambda x, k, **rows: torchlml.lml(x, k, bound="at_least", **rows),
    "log_lml at_most": lambda x, k, **rows: torchlml.log_lml(x, k, bound="at_most", **rows),
    "lml bracketing": lambda x, k, **rows: _bracketing(x, k, **rows),
    "lml_bracketing": torchlml.lml_bracketing,
    "lml_value": torchlml.lml_value,
    "constrained_softmax": torchlml.constrained_softmax,
    "constrained_sparsemax": torchlml.constrained_sparsemax,
}
LOSSES: dict[str, Call] = {
    "lml_loss": torchlml.lml_loss,
    "lml_loss at_most": lambda x, y, k, **rows: torchlml.lml_loss(x, y, k, bound="at_most", **rows),
    "truncated_entropy_loss": lambda x, y, k, **rows: torchlml.truncated_entropy_loss(x, y, int(k), **rows),
}
SINGLE: dict[str, Call] = {
    "smooth_topk_svm_loss": torchlml.smooth_topk_svm_loss,
    "topk_svm_loss": torchlml.topk_svm_loss,
    "subset_loss": torchlml.subset_loss,
}
LINEAR: dict[str, Call] = {
    "linear_lml_loss": torchlml.linear_lml_loss,
    "linear_truncated_entropy_loss": torchlml.linear_truncated_entropy_loss,
}


def main() -> None:
    """Hash all results, and write or compare the hashes."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, help="write the hashes to this file")
    parser.add_argument("--compare", type=Path, help="compare with the hashes in this file")
    parser.add_argument("--one-kernel", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one_kernel:
        json.dump(dict(_hashes()), sys.stdout)
        return
    found = {f"{kernel}: {name}": value for kernel in KERNELS for name, value in _of_kernel(kernel).items()}
    if options.out is not None:
        options.out.write_text(json.dumps(found, indent=1))
    print(f"{len(found)} hashes; combined hash {_digest(json.dumps(found, sort_keys=True).encode())}")
    if options.compare is not None:
        before = json.loads(options.compare.read_text())
        moved = [name for name in sorted(before) if before[name] != found.get(name)]
        print("".join(f"new: {name}\n" for name in sorted(found) if name not in before), end="")
        print("\n".join(f"changed: {name}" for name in moved) or "no hash changed")
        sys.exit(bool(moved))


def _of_kernel(kernel: str) -> dict[str, str]:
    """Compute the hashes for one kernel in a new process, because importing torchlml selects the kernel."""
    command = [sys.executable, __file__, "--one-kernel"]
    environment = {**os.environ, "TORCHLML_KERNEL": kernel}
    return json.loads(subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE).stdout)


def _hashes() -> Iterator[tuple[str, str]]:
    torch.set_num_threads(1)
    for dtype in DTYPES:
        problems = [problem for problem in SHORT if dtype != torch.float16 or not problem.extreme]
        rows = [(problem.row(dtype), problem.k) for problem in problems]
        name = str(dtype).removeprefix("torch.")
        for call, function in LAYER.items():
            yield f"{call}, {name}", _digest(*_layer(function, rows))
        for call, function in LOSSES.items():
            yield f"{call}, {name}", _digest(*_loss(function, rows))
        for call, function in SINGLE.items():
            yield f"{call}, {name}", _digest(*_single(function, dtype))
        for call, function in LINEAR.items():
            yield f"{call}, {name}", _digest(*_linear(function, dtype))
        yield f"choices, {name}", _digest(*_choices(rows))
        yield f"balanced_lml, {name}", _digest(*_balanced(dtype))


def _balanced(dtype: torch.dtype) -> Iterator[bytes]:
    """Yield y, the multipliers, and the gradients for x and k. Capacities are equal, unequal or limits."""
    generator = torch.Generator().manual_seed(0)
    capacity = torch.tensor([20.0, 30.0, 10.0, 40.0, 20.0, 8.0])
    for scale in (0.3, 3.0):
        x = (scale * torch.randn(64, 6, generator=generator, dtype=torch.float64)).to(dtype).requires_grad_()
        for limits, options in ((None, {}), (capacity, {}), (capacity + 2, {"bound": "at_most"})):
            k = torch.full((64,), 2.0, dtype=torch.float64, requires_grad=True)
            y = torchlml.balanced_lml(x, k, limits, **options)
            grads = torch.autograd.grad(y.square().sum(), (x, k))
            yield from (_bytes(t) for t in (y, *torchlml.balanced_lml_dual(x, k, limits, **options), *grads))


def _layer(function: Call, rows: list[tuple[torch.Tensor, float]]) -> Iterator[bytes]:
    """Yield y and the gradients for x and k, for each row, each row with a mask, and a jagged batch."""
    for i, (x, k) in enumerate(rows):
        yield from _with_gradients(function, x.unsqueeze(0), torch.tensor([k], dtype=torch.float64))
        mask = torch.arange(x.shape[0]) % 7 != i % 7
        yield from _with_gradients(function, x, torch.tensor(k, dtype=torch.float64), mask=mask)
    lengths = torch.tensor([0] + [x.shape[0] for x, _ in rows])
    ks = torch.tensor([k for _, k in rows], dtype=torch.float64)
    yield from _with_gradients(function, torch.cat([x for x, _ in rows]), ks, offsets=lengths.cumsum(0))


def _with_gradients(
    function: Call, x: torch.Tensor, k: torch.Tensor, **rows: torch.Tensor
) -> Iterator[bytes]:
    x, k = x.clone().requires_grad_(), k.clone().requires_grad_()
    y = function(x, k, **rows)
    seed = torch.randn(y.shape, generator=torch.Generator().manual_seed(y.numel()), dtype=torch.float64)
    y.backward(seed.to(y.dtype))
    yield from (_bytes(t) for t in (y, x.grad, k.grad))


def _bracketing(
    x: torch.Tensor, k: torch.Tensor, mask: torch.Tensor | None = None, offsets: torch.Tensor | None = None
) -> torch.Tensor:
    """Compute y from the dual variable that Algorithm 1 finds, without rounding it to the dtype of x."""
    c = canonical(x, k, -1, mask, offsets)
    solve = functools.partial(solve_bracketing, samples=None, tolerance=None, max_iterations=100)
    return c.restore(implicit.lml(c.x, c.k, c.mask, c.offsets, solve), -1)


def _loss(function: Call, rows: list[tuple[torch.Tensor, float]]) -> Iterator[bytes]:
    for x, k in rows:
        if x.shape[0] < 3 or not 1 <= k < x.shape[0]:
            continue
        # A list of labels must not be as long as the row, because such a target is rejected as ambiguous.
        # Padding does not affect the result.
        padding = [-100] * (2 if x.shape[0] == 4 else 1)
        places = torch.tensor([[0, x.shape[0] // 2, x.shape[0] - 1, *padding]])
        hot = torch.zeros(1, x.shape[0]).scatter(1, places[:, :2], torch.tensor([[1.0, 0.5]]))
        for target in (places, hot, hot.bool(), places[:, 0]):
            x_ = x.unsqueeze(0).clone().requires_grad_()
            loss = function(x_, target, k)
            loss.backward()
            yield from (_bytes(t) for t in (loss, x_.grad))
    several = torch.cat([x for x, _ in rows]).requires_grad_()
    offsets = torch.tensor([0] + [x.shape[0] for x, _ in rows]).cumsum(0)
    loss = function(several, offsets[:-1], 2, offsets=offsets, reduction="none")
    loss.sum().backward()
    yield from (_bytes(t) for t in (loss, several.grad))


def _single(function: Call, dtype: torch.dtype) -> Iterator[bytes]:
    generator = torch.Generator().manual_seed(0)
    for n, k in ((20, 1), (100, 5), (257, 30)):
        x = torch.randn(8, n, generator=generator, dtype=torch.float64).mul(3).to(dtype).requires_grad_()
        loss = function(x, torch.arange(8), k, reduction="none")
        loss.sum().backward()
        yield from (_bytes(t) for t in (loss, x.grad))


def _linear(function: Call, dtype: torch.dtype) -> Iterator[bytes]:
    """Yield losses and the gradients of input, weight and bias, for one chunk and for one row per chunk."""
    generator = torch.Generator().manual_seed(0)
    shapes = ((6, 16), (1000, 16), (1000,))
    parts = [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]
    target = torch.randint(1000, (6, 3), generator=generator)
    for budget in (2**20, 1):
        for reduction in ("mean", "none"):
            hidden, weight, bias = (part.clone().requires_grad_() for part in parts)
            loss = function(
                *(hidden, weight, target, 5), linear_bias=bias, reduction=reduction, memory_limit=budget
            )
            loss.sum().backward()
            yield from (_bytes(t) for t in (loss, hidden.grad, weight.grad, bias.grad))


def _choices(rows: list[tuple[torch.Tensor, float]]) -> Iterator[bytes]:
    generator = torch.Generator().manual_seed(0)
    for x, k in rows:
        k = min(int(k), x.shape[0])
        x_ = x.clone().requires_grad_()
        hard = torchlml.topk_mask(x_, k)
        (hard * torch.arange(x.shape[0])).sum().backward()
        drawn = torchlml.sample_subset(x, k, generator=generator)
        yield from (_bytes(t) for t in (hard, x_.grad, drawn))


def _bytes(t: torch.Tensor | None) -> bytes:
    assert t is not None
    # The sign of a zero and the payload of a NaN may differ, so normalize both.
    t = torch.where(t.isnan(), torch.nan, t.detach()) + 0.0
    return t.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def _digest(*parts: bytes) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part)
    return digest.hexdigest()[:16]


if __name__ == "__main__":
    main()
