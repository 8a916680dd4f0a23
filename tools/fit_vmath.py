"""Fit the polynomials in csrc/vmath.h, and compare every coefficient with the file.

    python tools/fit_vmath.py

Each polynomial is the Chebyshev interpolant of its function on the interval to which vmath.h reduces the
argument, computed by mpmath with 40 digits. In double precision, the coefficients of the lowest powers are
then set to their exact values (1 and 1 for exp, 2 for log1p), which makes the function exact at 0. The tool
prints the largest relative error of each polynomial in exact arithmetic.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import mpmath

VMATH = Path(__file__).resolve().parents[1] / "torchlml" / "_cpu" / "csrc" / "vmath.h"


class Polynomial(NamedTuple):
    """One polynomial in vmath.h: function, interval, number of coefficients, and digits per coefficient."""

    name: str
    function: Callable[[Any], Any]
    interval: tuple[Any, Any]
    terms: int
    digits: int
    fixed: tuple[int, ...] = ()  # the exact coefficients of the lowest powers, from the constant up


def atanh_series(q: Any) -> Any:
    """Return 2 * atanh(s) / s for q = s * s. With s = t / (2 + t), log(1 + t) is s times this value."""
    s = mpmath.sqrt(q)
    return 2 * mpmath.atanh(s) / s if q > 0 else mpmath.mpf(2)


def polynomials() -> list[Polynomial]:
    """Return all polynomials, in the same order as in vmath.h."""
    half = mpmath.log(2) / 2  # exp reduces its argument to at most this magnitude
    exponents, squares = (-half, half), (mpmath.mpf(0), mpmath.mpf(1) / 9)  # 0 <= t <= 1 implies s <= 1 / 3
    return [
        Polynomial("exp, float", mpmath.exp, exponents, 6, 17),
        Polynomial("exp, double", mpmath.exp, exponents, 12, 20, (1, 1)),
        Polynomial("log1p, float", atanh_series, squares, 5, 17),
        Polynomial("log1p, double", atanh_series, squares, 11, 20, (2,)),
    ]


def coefficients(p: Polynomial) -> list[Any]:
    """Return the coefficients, from the highest power down to the constant."""
    fitted = mpmath.chebyfit(p.function, list(p.interval), p.terms)
    return fitted[: p.terms - len(p.fixed)] + [mpmath.mpf(a) for a in reversed(p.fixed)]


def largest_error(p: Polynomial, values: list[Any]) -> float:
    """Return the largest relative error at 2001 points, which are denser near the ends of the interval."""
    low, high = p.interval
    points = [low + (high - low) * (1 - mpmath.cos(mpmath.pi * i / 2000)) / 2 for i in range(2001)]
    return max(float(abs(mpmath.polyval(values, x) / p.function(x) - 1)) for x in points)


def main() -> int:
    """Print every polynomial with its error. Return 1 if the coefficients in vmath.h differ."""
    mpmath.mp.dps = 40
    source = VMATH.read_text()
    missing = []
    for p in polynomials():
        values = coefficients(p)
        print(f"{p.name}: degree {p.terms - 1}, relative error {largest_error(p, values):.1e}")
        for value in values[: p.terms - len(p.fixed)]:
            digits = mpmath.nstr(value, p.digits)
            print(f"  {digits}")
            if not re.search(rf"(?<![\d.]){re.escape(digits)}f?\b", source):
                missing.append(f"{p.name}: {digits}")
    if missing:
        print(f"{VMATH.name} does not contain these coefficients:", *missing, sep="\n  ")
    return 1 if missing else 0


if __name__ == "__main__":
    sys.exit(main())
