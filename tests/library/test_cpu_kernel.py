"""The compiled kernel agrees with pure PyTorch for every operator."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest
import torch

import torchlml
from tests.support.cpu_kernel import FORMS, SOURCES, TOLERANCE, assert_close, needs_kernel, problem
from tests.support.fresh import ROOT, run
from torchlml._torch import careful


def test_every_kernel_runs_under_the_sanitizers() -> None:
    table = re.findall(r"^  KERNEL\((\w+), ", (ROOT / SOURCES / "kernels.h").read_text(), re.MULTILINE)
    called = (ROOT / "tools" / "sanitize.cpp").read_text()
    assert len(table) > 5
    assert [name for name in table if f"kernels.{name}[dtype]" not in called] == []


def test_import_keeps_subnormals() -> None:
    code = "import torchlml, torch, ctypes; x = torch.tensor([1e-310, 5e-324], dtype=torch.float64); "
    code += "y = torch.tensor(1e-40); print(bool((x * 1.0 > 0).all()), bool(y * 0.5 > 0), 5e-324 * 1.0 > 0)"
    assert run(code).stdout.split() == ["True"] * 3


def test_coefficients_match_the_script() -> None:
    script = ROOT / "tools" / "fit_vmath.py"
    if not script.exists():
        pytest.skip("not running from a source checkout")
    result = subprocess.run([sys.executable, script], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr


@needs_kernel
def test_schemas() -> None:
    """The operator schemas in the compiled kernel match those in Python."""
    names = ["solve", "forward", "log_forward", "bounded_forward", "value", "topk_mask"]
    names += ["constrained_softmax_forward", "constrained_sparsemax_forward"]
    code = "import torch, torchlml\nfor name in %s: print(getattr(torch.ops.torchlml, name).default._schema)"
    in_python = run(code % names, TORCHLML_KERNEL="torch").stdout.splitlines()
    assert in_python == [str(getattr(torch.ops.torchlml, name).default._schema) for name in names]
    source = (ROOT / SOURCES / "bindings.cpp").read_text(encoding="utf-8")
    assert source.count("m.def(") == len(names)


# ---------------------------------------------------------------------------------------- agreement


@needs_kernel
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_agrees_with_pure_pytorch(dtype: torch.dtype, form: str) -> None:
    x, k, mask, offsets = problem(dtype, form)
    y, nu = torch.ops.torchlml.forward(x, k, mask, offsets)
    y0, nu0 = careful.forward(x, k, mask, offsets)
    assert_close(y, y0, dtype)
    log_y, _ = torch.ops.torchlml.log_forward(x, k, mask, offsets)
    log_y0, _ = careful.log_forward(x, k, mask, offsets)
    assert_close(log_y, log_y0, dtype)
    assert torch.equal(torch.ops.torchlml.solve(x, k, mask, offsets).nan_to_num(7), nu.nan_to_num(7))
    assert nu.dtype == nu0.dtype
    assert torch.equal(nu[0].isinf(), nu0[0].isinf())
    g = torch.randn(x.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(dtype)
    # All backward passes start from the same y and nu, so that errors in them do not affect the comparison.
    for name, arguments in {
        "backward": (g, x, y0, nu0),
        "log_backward": (g, x, log_y0, nu0),
        "dual_backward": (nu0[1] + 2.0, x, nu0),
    }.items():
        dx, dk = getattr(torch.ops.torchlml, name)(*arguments, mask, offsets)
        dx0, dk0 = getattr(careful, name)(*arguments, mask, offsets)
        assert dx.dtype == x.dtype
        assert dk.dtype == torch.float64
        assert_close(dx, dx0, dtype, 10)
        close = (dk0.abs() < 1e6) | dk0.isnan()
        assert_close(dk[close], dk0[close], torch.float64 if dtype == torch.float64 else torch.float32, 100)


@needs_kernel
@pytest.mark.parametrize("level", ["baseline", "v3", "v4"])
def test_instruction_sets(level: str) -> None:
    # If the processor lacks the requested instruction set, the kernel uses the best available one.
    code = """
import itertools
import torch
from tests.support.cpu_kernel import FORMS, TOLERANCE, assert_close, problem
from torchlml._cpu import loader
from torchlml._torch import careful, fast
print(loader.instruction_set())
for dtype, form in itertools.product(TOLERANCE, FORMS):
    arguments = problem(dtype, form)
    assert_close(torch.ops.torchlml.forward(*arguments)[0], careful.forward(*arguments)[0], dtype)
    assert_close(torch.ops.torchlml.log_forward(*arguments)[0], careful.log_forward(*arguments)[0], dtype)
    x, k, mask, offsets = arguments
    labels = (torch.arange(x.numel()).view(x.shape) % 7 == 0, None, None)
    loss, nu = fast.loss_forward(*arguments, *labels)
    assert_close(torch.ops.torchlml.loss_forward(*arguments, *labels)[0], loss, nu.dtype, 10)
    grad = (torch.ones((), dtype=nu.dtype), x, k, nu, mask, offsets, *labels)
    dx, dx0 = torch.ops.torchlml.loss_backward(*grad)[0], fast.loss_backward(*grad)[0]
    assert_close(dx, dx0, dtype, 10)
"""
    result = run(code, TORCHLML_ISA=level)
    assert result.returncode == 0, result.stderr
    used = result.stdout.strip()
    assert used in ("baseline", "v3", "v4")
    assert level != "baseline" or used == "baseline"


@needs_kernel
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_a_row_alone_has_the_same_bits(dtype: torch.dtype) -> None:
    x, k, _, _ = problem(dtype, "dense")
    y, nu = torch.ops.torchlml.forward(x, k, None, None)
    for i in range(x.shape[0]):
        alone, nu_alone = torch.ops.torchlml.forward(x[i : i + 1].contiguous(), k[i : i + 1], None, None)
        assert torch.equal(alone[0].nan_to_num(7), y[i].nan_to_num(7))
        assert torch.equal(nu_alone[:, 0].nan_to_num(7), nu[:, i].nan_to_num(7))


@needs_kernel
@pytest.mark.parametrize("n", [13, 100, 1000])
@pytest.mark.parametrize("few", [True, False], ids=["few near one", "most near one"])
def test_weights_near_one_keep_their_digits(n: int, few: bool) -> None:
    # If y * (1 - y) were computed from a rounded y, its relative error would reach 0.7% to 100%, depending on
    # the case. The kernel has one path for few entries near 1 and another for many.
    near = max(3, n // 90) if few else n - 4
    x = torch.cat([torch.linspace(5, 22, near), torch.linspace(-6, 3, n - near)])[None]
    k = torch.tensor(near + 1.0, dtype=torch.float64)
    y, nu = careful.forward(x.double(), k, None, None)
    g = 1 / torch.special.expit(-(x.double() + nu[0, 0] + nu[1, 0]))  # gradient of -log(1 - y)
    want, _ = careful.backward(g, x.double(), y, nu, None, None)
    y32, nu32 = torch.ops.torchlml.forward(x, k, None, None)
    got, _ = torch.ops.torchlml.backward(g.float(), x, y32, nu32, None, None)
    torch.testing.assert_close(got.double(), want, rtol=3e-5, atol=1e-5)


@needs_kernel
@pytest.mark.parametrize("offsets", [[0, 9, 4, 3], [-5, 2, 99, 3], [0, 0, 0, 1 << 60]])
def test_bad_offsets_stay_in_bounds(offsets: list[int]) -> None:
    # The Python code rejects these offsets, but even a direct call to the kernel must stay in bounds.
    x, k = torch.randn(4), torch.ones(3, dtype=torch.float64)
    y, nu = torch.ops.torchlml.forward(x, k, None, torch.tensor(offsets))
    assert y.shape == x.shape
    assert nu.shape == (2, 3)


@needs_kernel
def test_canonical_form_is_checked() -> None:
    x, k = torch.randn(3, 8), torch.tensor(2.0, dtype=torch.float64)
    with pytest.raises(RuntimeError, match="`x`"):
        torch.ops.torchlml.forward(x.t(), k, None, None)
    with pytest.raises(RuntimeError, match="`k`"):
        torch.ops.torchlml.forward(x, k.float(), None, None)
    with pytest.raises(RuntimeError, match="`mask`"):
        torch.ops.torchlml.forward(x, k, torch.ones(3, 7, dtype=torch.bool), None)


@needs_kernel
@pytest.mark.parametrize("n", [2, 4, 8, 64, 1000])
def test_ties_are_exact(n: int) -> None:
    # With a biased reciprocal, every entry would be 0.49999997.
    assert torchlml.lml(torch.full((n,), 0.3), n / 2).tolist() == [0.5] * n
