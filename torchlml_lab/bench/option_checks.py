"""Checks of options that several benchmarks have; each refuses in one sentence, before anything is timed."""

import math
from collections.abc import Collection, Sequence

from torchlml_lab.errors import BadInput, did_you_mean


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
