"""The cases of a benchmark (shape, k, dtype), and checks of the options that choose them."""

import math
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import torch
from torch import Tensor

from torchlml_lab.cli_errors import BadInput, did_you_mean


@dataclass(frozen=True)
class TimingSettings:
    """What every benchmark is told whose competitors are timed in rounds."""

    repetitions: int = 100
    """Rounds at most; in each one every competitor is timed once, and the ratios are formed."""
    seconds: float = 4.0
    """Time for one comparison, shared fairly by the competitors; the slowest may be timed only once."""
    csv: Path = Path("torchlml-bench.csv")
    """The CSV that the rows are appended to; it is made when it is missing."""


def check_timing(settings: TimingSettings) -> None:
    """Refuse numbers of rounds and seconds that nothing can be timed in."""
    check_numbers("--repetitions", (settings.repetitions,), 1)
    check_numbers("--seconds", (settings.seconds,), 0)


def check_choices(option: str, values: Sequence[str], known: Collection[str]) -> None:
    """Refuse values that are not among the known ones, and an option without a value."""
    if not values:
        raise BadInput(f"`{option}` needs at least one value.")
    for value in values:
        if value not in known:
            near = did_you_mean(value, known)
            said = f"`{option}` names `{value}`, which is none of {', '.join(known)}"
            raise BadInput(said + (near or "."))


def check_numbers(option: str, values: Sequence[float], least: float, most: float = math.inf) -> None:
    """Refuse numbers outside a range or not finite, and an option without a value."""
    if not values:
        raise BadInput(f"`{option}` needs at least one value.")
    for value in values:
        if not (least <= value <= most and math.isfinite(value)):
            limit = f"from {least:g} to {most:g}" if math.isfinite(most) else f"finite and at least {least:g}"
            raise BadInput(f"`{option}` has {value}, and must be {limit}.")


DTYPES = ("float32", "float64", "bfloat16", "float16")
MOST_ENTRIES = 4_000_000


@dataclass(frozen=True)
class Case:
    """One problem: `batch` rows of `n` normal logits times `scale`, of which `k` are to be chosen."""

    n: int
    k: int
    batch: int
    scale: float
    dtype: str
    threads: int

    def logits(self) -> Tensor:
        """The same logits whenever they are asked for."""
        generator = torch.Generator().manual_seed(self.n)
        logits = torch.randn(self.batch, self.n, generator=generator) * self.scale
        return logits.to(getattr(torch, self.dtype))


def case_grid(
    sizes: Sequence[int],
    ks: Sequence[str],
    batches: Sequence[int],
    scales: Sequence[float],
    dtypes: Sequence[str],
    threads: Sequence[int],
) -> list[Case]:
    """Every combination once; k as numbers, `n/NUMBER` or `n-NUMBER`.

        >>> [(case.n, case.k) for case in case_grid((4, 10), ("5", "n/2"), (3,), (1.0,), ("float32",), (1,))]
        [(4, 2), (10, 5)]

    Returns:
        The cases whose k is between 1 and n - 1, with fewer rows where a tensor would have more
        than 4,000,000 entries; `BadInput` when there are none.
    """
    found = dict.fromkeys(
        Case(n, k, min(batch, max(1, MOST_ENTRIES // n)), scale, dtype, number)
        for number, dtype, scale, batch, n, text in product(threads, dtypes, scales, batches, sizes, ks)
        if 0 < (k := _k(text, n)) < n
    )
    if not found:
        raise BadInput(
            f"`--ks` is {' '.join(ks)}, and none of it lies between 1 and n - 1 for any of `--sizes`."
        )
    return list(found)


def _k(text: str, n: int) -> int:
    """`5`, `n/2` or `n-1` for a row of n."""
    found = re.fullmatch(r"(?:n([/-]))?(\d{1,18})", text)
    if found is None:
        raise BadInput(f"`--ks` has `{text}`, which is neither a number nor `n/NUMBER` nor `n-NUMBER`.")
    sign, number = found[1], int(found[2])
    if sign == "/":
        return n // number if number else 0
    return n - number if sign == "-" else number
