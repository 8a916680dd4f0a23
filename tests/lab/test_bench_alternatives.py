"""`torchlml bench alternatives` measures the properties of each method correctly and writes them to a CSV."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import mpmath
import pytest
import torch
from torch import Tensor

import torchlml
from tests.support.command_lines import each_rejection, rejected, rejections
from torchlml_lab import cli
from torchlml_lab.bench import alternatives, measurements, timing
from torchlml_lab.bench.alternative_operators import (
    ABILITIES,
    ALTERNATIVES,
    EXACTNESS,
    Alternative,
    abilities,
    bisection,
    exactness,
    laplace_sum,
    midpoint_sigmoid,
    scaled_softmax,
)
from torchlml_lab.bench.cases import Case

ROOT = Path(__file__).parents[2]
CASE = Case(n=12, k=3, batch=4, scale=1.0, dtype="float32", threads=1)
TINY = ["--sizes", "8", "24", "--k", "3", "--batch", "3", "--repetitions", "2", "--seconds", "0"]
TINY += ["--equal", "40", "--methods", "lml-torch", "softmax-times-k"]
# A row without ties, a row with ties, a row of equal entries, and a row with large gaps.
ROWS = {
    "spread": [2.5, 1.0, 0.7, 0.1, -0.4, -1.1, -3.0],
    "ties": [1.0, 1.0, 1.0, 0.0, 0.0, -2.0, -2.0],
    "equal": [4.0] * 7,
    "gaps": [900.0, 300.0, 299.0, 0.0, -1.0, -500.0, -501.0],
}


def _raises(x: Tensor, k: int) -> Tensor:
    raise TypeError("an error from another package")


class _SlopeOff(torch.autograd.Function):
    """The identity function with a gradient that is 1% too large in float32."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad * 1.01 if grad.dtype == torch.float32 else grad


def _solved(row: list[float], k: int, share: Callable[[mpmath.mpf], mpmath.mpf]) -> list[float]:
    """Return share(x - b) for all entries x, with b such that the sum is k, by bisection with 60 digits."""
    with mpmath.workdps(60):
        x = [mpmath.mpf(value) for value in row]
        low, high = min(x) - 50, max(x) + 50
        for _ in range(250):
            middle = (low + high) / 2
            large = sum(share(value - middle) for value in x) > k
            low, high = (middle, high) if large else (low, middle)
        return [float(share(value - middle)) for value in x]


def _laplace(x: mpmath.mpf) -> mpmath.mpf:
    return mpmath.exp(x) / 2 if x < 0 else 1 - mpmath.exp(-x) / 2


@pytest.mark.parametrize("k", range(1, 7))
@pytest.mark.parametrize("name", ROWS)
def test_lapsum_solves_its_equation(name: str, k: int) -> None:
    x = torch.tensor([ROWS[name], ROWS[name][::-1]], dtype=torch.float64)
    right = torch.tensor(_solved(ROWS[name], k, _laplace), dtype=torch.float64)
    torch.testing.assert_close(laplace_sum(x, k), torch.stack([right, right.flip(0)]), atol=1e-12, rtol=0)


@pytest.mark.parametrize("halvings", [50, 64])
def test_bisection_solves_the_equation_of_lml(halvings: int) -> None:
    x = torch.tensor([ROWS["spread"]], dtype=torch.float64)
    right = _solved(ROWS["spread"], 3, lambda x: 1 / (1 + mpmath.exp(-x)))
    assert bisection(x, 3, halvings)[0].tolist() == pytest.approx(right, abs=1e-12)


def test_the_bisection_interval_ends_10_beyond_the_logits() -> None:
    x = torch.zeros(1, 2_700_000)
    assert bisection(x, 5, 50).double().sum().item() == pytest.approx(2.7e6 / (1 + math.exp(10)), rel=1e-4)
    assert torchlml.lml(x, 5).double().sum().item() == pytest.approx(5, rel=1e-6)


def test_dftopk_is_a_sigmoid_around_the_midpoint() -> None:
    x = torch.tensor([[0.0, 3.0, -2.0, 1.0]], dtype=torch.float64, requires_grad=True)
    y = midpoint_sigmoid(x, 2)
    right = [1 / (1 + math.exp(-(value - 0.5))) for value in (0.0, 3.0, -2.0, 1.0)]
    assert y[0].tolist() == pytest.approx(right, abs=1e-15)
    slopes = [p * (1 - p) for p in right]
    # The second and third largest entries, at indices 3 and 0, share the derivative of the threshold.
    (gradient,) = torch.autograd.grad(y[0, 1], x)
    assert gradient[0].tolist() == pytest.approx([-slopes[1] / 2, slopes[1], 0, -slopes[1] / 2], abs=1e-15)


@pytest.mark.parametrize("choose", [laplace_sum, midpoint_sigmoid, bisection])
def test_the_gradients_match_finite_differences(choose: Callable[[Tensor, int], Tensor]) -> None:
    x = torch.randn(3, 9, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: choose(x, 4), x)


def test_exactness_reports_known_errors() -> None:
    k_softmax = exactness(scaled_softmax, CASE)
    right = 3 * torch.softmax(CASE.logits(), -1)
    assert k_softmax["sum error"] < 1e-5
    assert k_softmax["outside [0, 1]"] == (right > 1).sum() > 0
    assert 0 < k_softmax["bfloat16 error"] < 0.02
    assert 0 < k_softmax["gradient error"] < 1e-5
    more = exactness(lambda x, k: scaled_softmax(x, k) + 0.25 / x.shape[-1], CASE)
    assert more["sum error"] == pytest.approx(0.25, abs=1e-5)
    below = exactness(lambda x, k: scaled_softmax(x, k) - 9, CASE)
    assert below["outside [0, 1]"] == right.numel()
    coarse = exactness(lambda x, k: scaled_softmax(x, k) + (x.dtype == torch.bfloat16), CASE)
    assert coarse["bfloat16 error"] == pytest.approx(1, abs=0.05)
    steep = exactness(lambda x, k: scaled_softmax(_SlopeOff.apply(x), k), CASE)
    assert steep["gradient error"] == pytest.approx(0.01, rel=1e-3)
    assert exactness(lambda x, k: 0 * x, CASE)["gradient error"] == math.inf
    assert all(math.isnan(value) for value in exactness(_raises, CASE).values())


def test_lml_has_every_ability_and_a_raising_method_has_none() -> None:
    assert abilities(lambda x, k: torchlml.lml(x, k)) == dict.fromkeys(ABILITIES, True)
    assert abilities(_raises) == dict.fromkeys(ABILITIES, False)


# Each function lacks one ability. If that ability is tested, the function returns a wrong result.
LOSES = {
    "-inf": lambda x, k: scaled_softmax(x, k) + 0 * x.amin(-1, keepdim=True),
    "vmap": lambda x, k: scaled_softmax(x, k) * (0.5 if torch._C._are_functorch_transforms_active() else 1.0),
    "compile": lambda x, k: scaled_softmax(x, k) * (0.5 if torch.compiler.is_compiling() else 1.0),
    "per-row k": lambda x, k: scaled_softmax(x, k if isinstance(k, int) else 2),
}


@pytest.mark.parametrize("ability", LOSES)
def test_a_missing_ability_is_reported(ability: str) -> None:
    assert abilities(LOSES[ability]) == {name: name != ability for name in ABILITIES}


@pytest.fixture
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "_SAMPLE_SECONDS", 1e-6)
    monkeypatch.setattr(timing, "_WARM_UP_SECONDS", 0.0)
    uses = dict.fromkeys(ABILITIES, True)
    monkeypatch.setattr(alternatives, "abilities", lambda function: uses)
    monkeypatch.setattr(alternatives, "abilities_in_plain_torch", lambda: uses | {"vmap": False})


@pytest.mark.usefixtures("_short")
def test_the_command_writes_every_measurement_the_tables_and_the_picture(capsys, tmp_path: Path) -> None:
    path = tmp_path / "made" / "rows.csv"
    assert cli.main(["bench", "alternatives", *TINY, "--csv", str(path)]) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    rows = measurements.read(path, "--csv")
    assert {(row.n, row.batch, row.scale) for row in rows if row.metric == "time"} == {
        (8, 3, 3.0),
        (24, 3, 3.0),
        (40, 1, 0.0),
    }
    for n in (8, 24, 40):
        for name in ("lml-torch", "softmax-times-k"):
            found = {(row.mode, row.metric) for row in rows if (row.provider, row.n) == (name, n)}
            assert found >= {("forward", "time"), ("forward+backward", "time")}
            assert found >= {("behavior", metric) for metric in EXACTNESS}
    assert alternatives.markdown(rows) in captured.out
    assert "n = 24: 3 rows, scale 3, k = 3, float32, threads: 1; " in captured.out
    assert "n = 40: one row of equal logits, k = 3, float32, threads: 1; " in captured.out
    lines = captured.out.splitlines()
    uses = next(line for line in lines if line.startswith("| lml-torch "))
    assert [cell.strip() for cell in uses.split("|")[2:-1]] == ["yes", "no", "yes", "yes"]
    assert sum("is not installed" in line for line in lines) <= 1
    assert sorted(file.name for file in path.parent.iterdir()) == ["rows.csv", "rows.png"]


@pytest.mark.usefixtures("_short")
def test_missing_packages_are_reported_once_and_listed_in_the_table(
    capsys, monkeypatch, tmp_path: Path
) -> None:
    gone = Alternative("difftopk", _raises, lambda: "the package `difftopk` is not installed")
    monkeypatch.setattr(
        alternatives, "ALTERNATIVES", tuple(gone if p.name == gone.name else p for p in ALTERNATIVES)
    )
    assert cli.main(["bench", "alternatives", *TINY, "--csv", str(tmp_path / "rows.csv")]) == 0
    out = capsys.readouterr().out
    assert out.count("the package `difftopk` is not installed") == 1
    assert 'pip install "torchlml[alternatives]"' in out
    (line,) = (line for line in out.splitlines() if line.startswith("| difftopk"))
    assert line.count("not installed") == len(ABILITIES)
    words = ["bench", "alternatives", "--methods", "difftopk"]
    assert "`--methods` contains `difftopk`, which is not available: the package" in rejected(capsys, words)


def test_a_missing_dependency_of_a_package_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    (difftopk,) = (method for method in ALTERNATIVES if method.name == "difftopk")
    there = {"difftopk", "diffsort"}
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name in there or None)
    assert difftopk.absent() is None
    there.remove("diffsort")
    assert difftopk.absent() == "the package `diffsort` is not installed"


@pytest.mark.usefixtures("_short")
def test_a_method_that_fails_is_not_timed(capsys, monkeypatch, tmp_path: Path) -> None:
    broken = Alternative("softmax-times-k", _raises)
    monkeypatch.setattr(
        alternatives, "ALTERNATIVES", tuple(broken if p.name == broken.name else p for p in ALTERNATIVES)
    )
    assert cli.main(["bench", "alternatives", *TINY, "--csv", str(tmp_path / "rows.csv")]) == 0
    cells = [line for line in capsys.readouterr().out.splitlines() if line.startswith("| softmax-times-k")][
        -1
    ]
    assert [cell.strip() for cell in cells.split("|")[2:-1]] == ["-"] * 3 + ["fails"] * 4


@each_rejection(
    rejections("`{}` must be from 1 to 31, but it is {}", "--k 32", "--k 0"),
    rejections("`{}` must be finite and at least 2, but it is {}", "--sizes 1"),
    rejections("`{}` must be finite and at least 1, but it is {}", "--batch 0"),
    rejections(
        "`{}` must be finite and at least 0, but it is {}", "--scale -1", "--seconds -1", "--equal -1"
    ),
    {
        "--equal 5": "`--equal` must be 0 or greater than `--k` (5), but it is 5.",
        "--methods lml-nativ": "Did you mean `lml-native`?",
        "--plot x.pdf": "must end in `.png` or `.svg`",
        "--csv .": "is a directory",
        "--threads 0": "`--threads` must be from 1 to",
    },
)
def test_wrong_options_are_rejected(capsys, options, needle) -> None:
    assert needle in rejected(capsys, ["bench", "alternatives", *options])


def test_the_page_has_the_tables_and_numbers_of_the_committed_csv() -> None:
    rows = measurements.read(ROOT / "results" / "alternatives.csv", "--csv")
    page = (ROOT / "docs" / "alternatives.md").read_text(encoding="utf-8")
    assert alternatives.markdown(rows) in page
    equal = {(row.provider, row.mode, row.metric): row for row in rows if row.n == 2_700_000}
    total = 5 + equal["bisection-50", "behavior", "sum error"].p50
    copied, ours = (equal[name, "forward", "time"].ratio_p50 for name in ("bisection-50", "lml-native"))
    said = f"silently sum to {total:.1f} instead of 5, and its forward pass takes {copied / ours:.0f} times"
    assert said in " ".join(page.split())
    # Every method in the committed CSV still exists.
    assert {row.provider for row in rows} <= {"softmax", *(method.name for method in ALTERNATIVES)}
