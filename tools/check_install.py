"""Check the location, the compiled kernel and the results of an installed torchlml. Requires only torch.

    python -I tools/check_install.py

Run it with the Python interpreter of the environment to test. `-I` prevents an import from the source tree.
The reference is a bisection in float64 that uses no library code.
"""

from __future__ import annotations

import subprocess
import sys
import sysconfig
from pathlib import Path

import torch

import torchlml

ROWS, SIZES, KS = 12, (3, 10, 37, 257), (1.0, 2.5)
LIMITS = {torch.float64: 1e-12, torch.float32: 1e-6, torch.bfloat16: 2**-8, torch.float16: 2**-10}


def threshold(x: torch.Tensor, k: float) -> torch.Tensor:
    """Find the nu with sum(sigmoid(x + nu)) = k for each row of the float64 tensor `x`, by bisection."""
    low, high = -x.amax(1) - 50, -x.amin(1) + 50
    for _ in range(200):
        middle = (low + high) / 2
        below = torch.sigmoid(x + middle[:, None]).sum(1) < k
        low, high = torch.where(below, middle, low), torch.where(below, high, middle)
    return ((low + high) / 2)[:, None]


def gradient(y: torch.Tensor, g: torch.Tensor) -> torch.Tensor:
    """Return dL/dx for g = dL/dy: w * (g - mean of g weighted by w), where w = y * (1 - y)."""
    w = y * (1 - y)
    return w * (g - (w * g).sum(1, keepdim=True) / w.sum(1, keepdim=True))


def far(got: torch.Tensor, want: torch.Tensor) -> float:
    """Return the largest difference, relative to the larger of 1 and the expected magnitude."""
    return float(((got.double() - want).abs() / want.abs().clamp_min(1)).max())


def differences(dtype: torch.dtype, n: int, k: float) -> dict[str, float]:
    """Return the errors of the projection, the loss and their gradients, on `ROWS` rows."""
    generator = torch.Generator().manual_seed(n)
    x = (4 * torch.randn(ROWS, n, generator=generator, dtype=torch.float64)).to(dtype)
    g = torch.randn(ROWS, n, generator=generator, dtype=torch.float64).to(dtype)
    labels = torch.randint(n, (ROWS,), generator=generator)
    exact = x.double()
    y = torch.sigmoid(exact + threshold(exact, k))
    chosen = torch.nn.functional.one_hot(labels, n)
    x.requires_grad_()
    got = torchlml.lml(x, k)
    (got_gradient,) = torch.autograd.grad(got, x, g)
    loss = torchlml.lml_loss(x, labels, k, reduction="none")
    (loss_gradient,) = torch.autograd.grad(loss.sum(), x)
    return {
        "lml": far(got.detach(), y),
        "gradient of lml": far(got_gradient, gradient(y, g.double())),
        "lml_loss": far(loss.detach(), -(y * chosen).sum(1).log()),
        "gradient of lml_loss": far(loss_gradient, gradient(y, -chosen / y)),
    }


def check_numbers() -> int:
    """Compare the results in every dtype with the reference, and return the number of rows compared."""
    for dtype, limit in LIMITS.items():
        for n in SIZES:
            for k in KS:
                for what, difference in differences(dtype, n, k).items():
                    if not difference <= 4 * limit:
                        raise SystemExit(f"{what}, {dtype}, n = {n}, k = {k}: the error is {difference:.2g}.")
    return len(LIMITS) * len(SIZES) * len(KS) * ROWS


def kernel_line() -> str:
    """Return the line about the kernel that the installed command `torchlml info` prints."""
    command = Path(sysconfig.get_path("scripts")) / "torchlml"
    output = subprocess.run([command, "info"], capture_output=True, text=True, check=True).stdout
    return next(line for line in output.splitlines() if line.startswith("kernel"))


def main() -> None:
    """Run every check, and exit with a message at the first failure."""
    home = Path(torchlml.__file__).parent
    if home.parent != Path(sysconfig.get_path("platlib")):
        raise SystemExit(f"torchlml must be imported from the installation, but it came from {home}.")
    line = kernel_line()
    if "C++ (" not in line:
        raise SystemExit(f"`torchlml info` does not report a compiled kernel: {line}")
    rows = check_numbers()
    version = sys.version.split()[0]
    print(f"Python {version}, torch {torch.__version__}: {' '.join(line.split())}, {rows} rows correct")


if __name__ == "__main__":
    main()
