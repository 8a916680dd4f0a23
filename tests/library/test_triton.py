"""The GPU kernels, tested as far as possible without a GPU.

Triton's interpreter runs the kernels on CPU tensors, and its compiler generates code without a device. Both
run in separate processes, because the interpreter is chosen when the kernels are imported.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.support import fresh
from torchlml._triton import plan, self_test
from torchlml_lab import cli, info
from torchlml_lab.gpu_check import check_gpu

ROOT = Path(__file__).parents[2]
needs_triton = pytest.mark.skipif(not self_test.available(), reason="Triton cannot be imported")


def run(*words: str, **environment: str) -> str:
    """Run a Python process, which must succeed, and return its output."""
    done = subprocess.run(
        [sys.executable, *words],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout


@needs_triton
def test_interpreted_kernels_are_accurate_and_pass_opcheck() -> None:
    """Two test files pass if operators with a GPU kernel use the interpreted kernels on CPU tensors."""
    files = ["tests/support/triton_interpreted.py", "tests/library/test_operators.py"]
    related = "bounded or value or constrained or topk_mask or systematic"  # these have no GPU kernels
    chosen = f"triton_interpreted or opcheck and float32 and not ({related})"
    # The interpreter uses numpy, which warns about infinities that a GPU handles silently.
    plugins = ["-p", "tests.support.triton_on_cpu", "-p", "no:cacheprovider", "-W", "ignore::RuntimeWarning"]
    output = run(
        *("-m", "pytest", "-q", "-p", "no:xdist", *plugins, *files, "-k", chosen),
        TRITON_INTERPRET="1",
        TRITON_VARIANT="chip",
        TORCHLML_KERNEL="torch",
    )
    passed = re.search(r"^(\d+) passed", output, re.MULTILINE)
    assert passed is not None
    assert int(passed[1]) > 70
    assert " skipped" not in output


@needs_triton
def test_kernels_compile() -> None:
    output = run("-m", "tests.support.triton_compile", "sm_80", "sm_90", "sm_100", "gfx942")
    report = [json.loads(line) for line in output.splitlines()]
    print(output)  # noqa: T201  the report, shown by `pytest -rP`
    assert len(report) > 80
    for variant in report:
        assert variant["spilled"] == 0 or not variant["common"], variant
        assert variant["shared"] <= 48 * 1024, variant
        # Compiled code must round to nearest. The interpreter does not show this, as it rounds toward zero.
        rounds = variant["target"].startswith("sm_") and variant["rounds"]
        assert variant["rounding"] == (["rn"] if rounds else []), variant


def test_plans_cover_all_row_lengths_and_split_a_few_long_rows() -> None:
    for n in [*range(1, 300), 1000, 4096, 4097, 8192, 8193, 65_535]:
        how = plan(1000, n, False, 108)
        assert how.loop or n <= how.block
        assert how.splits == 1
    four = plan(4, 1_000_000, False, 108)
    assert 4 * four.splits > 108
    assert plan(10_000, 1_000_000, False, 108).splits == 1
    # The length of a row in a jagged batch is unknown until its offsets are read.
    assert all(plan(1000, n, True, 108).loop for n in (1, 100, 100_000))
    # A block has at most 1024 threads, including on AMD, where warps have 64 lanes.
    assert all(plan(1000, n, False, 108, lanes=64).warps * 64 <= 1024 for n in (100, 4096, 8192, 10**5))


def test_every_operator_has_an_implementation_for_cuda() -> None:
    assert len(self_test.OPERATORS) == 8
    for name in self_test.OPERATORS:
        assert torch._C._dispatch_has_kernel_for_dispatch_key(f"torchlml::{name}", "CUDA")


def test_without_triton_pure_pytorch_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(self_test, "available", lambda: False)
    x, k = torch.randn(3, 20), torch.tensor(2.0, dtype=torch.float64)
    y, _ = self_test.OPERATORS["forward"](x, k, None, None)
    torch.testing.assert_close(y, torch.ops.torchlml.forward(x, k, None, None)[0])
    assert info.report()["gpu kernel"] == ["Triton not installed; no GPU detected"]


@needs_triton
def test_a_scalar_k_is_moved_to_the_device() -> None:
    from torchlml._triton import operators as triton_operators

    x, k = torch.empty(2, 3, device="meta"), torch.tensor(2.5, dtype=torch.float64)
    moved = triton_operators.on_device_of(k, x)
    assert (moved.device, moved.dtype, moved.shape) == (x.device, torch.float64, ())
    assert triton_operators.on_device_of(k, torch.empty(1)) is k


def test_importing_the_package_does_not_import_triton() -> None:
    assert fresh.run("import torchlml, sys; print('triton' in sys.modules)").stdout == "False\n"


@pytest.mark.skipif(torch.cuda.is_available(), reason="gpu-check would use the GPU")
def test_gpu_check_without_a_gpu_prints_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["gpu-check"]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err == "torchlml: `torchlml gpu-check` needs a GPU, but PyTorch does not detect one.\n"


def test_gpu_check_finds_a_wrong_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """The check passes for correct results, here from the CPU, and fails for an error of 3e-6."""
    monkeypatch.setattr(check_gpu, "_COMPARED_DTYPES", (torch.float32,))
    few = [case for case in check_gpu.cases() if case.x.numel() < 10_000]
    monkeypatch.setattr(check_gpu, "cases", lambda: few)
    losses = [case for case in check_gpu.losses() if case.x.numel() < 100_000]
    monkeypatch.setattr(check_gpu, "losses", lambda: losses)
    assert all(check.passed for check in check_gpu.checks("cpu"))
    right = check_gpu._results

    def wrong(case, x, g):
        found = right(case, x, g)
        return found if x.dtype == torch.float64 else {**found, "y": found["y"] + 3e-6}

    monkeypatch.setattr(check_gpu, "_results", wrong)
    assert not any(
        check_gpu._compare(case, torch.float32, "cpu").passed for case in few if "special" not in case.name
    )


def test_gpu_check_prints_and_writes_its_results() -> None:
    found = [check_gpu.Check("good", 0.5, 1.0), check_gpu.Check("bad", 2.0, 1.0)]
    times = [check_gpu.GpuTiming("lml", "softmax", (256, 1000), "float32", "forward", 20.0, 10.0, 1.0)]
    table = check_gpu.accuracy_table(found)
    assert "WRONG  bad" in table
    assert "1 of 2" in table
    assert "2.00" in check_gpu.timing_table(times)
    written = json.loads(json.dumps(check_gpu.as_json(found, times)))
    assert [check["passed"] for check in written["accuracy"]] == [True, False]
    assert written["timings"][0]["ratio"] == 2.0
