"""Options that several benchmarks have, and checks that refuse in one sentence, before anything is timed."""

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from torchlml_lab.errors import BadInput, did_you_mean


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
