"""Timing functions in turns, and the memory that a call takes at its peak."""

import ctypes
import gc
import mmap
import random
import re
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any, TypeVar

Name = TypeVar("Name", bound=Hashable)

# A sample lasts about this long, by repeating short calls: the clock then costs less than a percent.
_SAMPLE_SECONDS = 0.5e-3
_WARM_UP_SECONDS = 20e-3


@dataclass(frozen=True)
class Quantiles:
    """The 20th, 50th and 80th percentile."""

    p20: float
    p50: float
    p80: float

    @classmethod
    def of(cls, samples: list[float]) -> "Quantiles":
        """Compute those of the samples, by linear interpolation."""
        ordered = sorted(samples)

        def at(q: float) -> float:
            place = q * (len(ordered) - 1)
            low = int(place)
            high = min(low + 1, len(ordered) - 1)
            return ordered[low] + (place - low) * (ordered[high] - ordered[low])

        return cls(at(0.2), at(0.5), at(0.8))

    def times(self, factor: float) -> "Quantiles":
        """Give those of the samples in another unit."""
        return Quantiles(factor * self.p20, factor * self.p50, factor * self.p80)


@dataclass(frozen=True)
class Timing:
    """Seconds per call, the ratio to the baseline in the same round, and how many rounds they come from."""

    seconds: Quantiles
    ratio: Quantiles
    rounds: int


class Stopped(KeyboardInterrupt):
    """Ctrl-C during a race; `timings` are those of the rounds that were finished."""

    def __init__(self, timings: Mapping[Any, Timing]) -> None:
        super().__init__()
        self.timings = timings


def race(
    calls: Mapping[Name, Callable[[], object]],
    baseline: Name,
    repetitions: int,
    seconds: float,
    after_round: Callable[[], object] = lambda: None,
    sample_seconds: float | None = None,
) -> dict[Name, Timing]:
    """Time every call in turn, in a new order each round.

    A slow competitor runs in the first round, and sits out the later ones when it has used its share of the
    time, so that it cannot starve the others. The baseline never does: every ratio needs it.

    Args:
        calls: The competitors by name, the baseline among them.
        baseline: The competitor that ratios are taken to.
        repetitions: The number of rounds.
        seconds: The time that the competitors share; when all have used theirs, no further round begins.
        after_round: Called between the rounds, while no clock runs.
        sample_seconds: How long a sample lasts at least; longer forgets the cold caches of a call before.

    Returns:
        For each name its timing. `Stopped` is raised by Ctrl-C when a round was finished before it.
    """
    lasting = _SAMPLE_SECONDS if sample_seconds is None else sample_seconds
    repeats = {name: _repeats(call, lasting) for name, call in calls.items()}
    samples: dict[Name, list[float]] = {name: [] for name in calls}
    ratios: dict[Name, list[float]] = {name: [] for name in calls}
    spent = dict.fromkeys(calls, 0.0)
    share = seconds / len(calls)
    shuffler = random.Random(0)
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        for _ in range(repetitions):
            runners = [name for name in calls if spent[name] <= share]
            if not runners:
                break
            if baseline not in runners:
                runners.append(baseline)
            shuffler.shuffle(runners)
            sample = {name: _sample(calls[name], repeats[name]) for name in runners}
            for name, time in sample.items():
                samples[name].append(time)
                ratios[name].append(time / sample[baseline])
                spent[name] += time * repeats[name]
            after_round()
    except KeyboardInterrupt:
        if not samples[baseline]:
            raise
        raise Stopped(_timings(samples, ratios)) from None
    finally:
        if was_enabled:
            gc.enable()
    return _timings(samples, ratios)


def _timings(samples: Mapping[Name, list[float]], ratios: Mapping[Name, list[float]]) -> dict[Name, Timing]:
    return {
        name: Timing(Quantiles.of(taken), Quantiles.of(ratios[name]), len(taken))
        for name, taken in samples.items()
    }


def _repeats(call: Callable[[], object], sample_seconds: float) -> int:
    """Find how many calls make a sample long enough, while the call warms up."""
    fastest = spent = _sample(call, 1)
    while spent < _WARM_UP_SECONDS:
        once = _sample(call, 1)
        spent += once
        fastest = min(fastest, once)
    return max(1, round(sample_seconds / fastest))


def _sample(call: Callable[[], object], repeats: int) -> float:
    begin = perf_counter()
    for _ in range(repeats):
        call()
    return (perf_counter() - begin) / repeats


PAGE_BYTES = mmap.PAGESIZE
_STATUS = Path("/proc/self/status")
_RESET = Path("/proc/self/clear_refs")
_RESET_HIGHEST = "5"


def measurable() -> bool:
    """Can this system tell? Not outside Linux with the GNU C library."""
    try:
        _RESET.write_text(_RESET_HIGHEST)
        return hasattr(ctypes.CDLL(None), "malloc_trim") and _resident("VmHWM") > 0
    except (OSError, AttributeError):
        return False


def added_bytes(call: Callable[[], object]) -> int:
    """Measure the bytes that a call adds at its highest point, result included.

        x = torch.zeros(1000, 1000)
        added_bytes(lambda: x + 1)  # 4001792

    Args:
        call: What to measure; it runs once before, so that what is allocated only once does not count.

    Returns:
        A multiple of the page size.
    """
    call()
    ctypes.CDLL(None).malloc_trim(0)
    _RESET.write_text(_RESET_HIGHEST)
    before = _resident("VmRSS")
    result = call()
    highest = _resident("VmHWM")
    del result
    return max(0, highest - before)


def _resident(field: str) -> int:
    found = re.search(rf"{field}:\s+(\d+) kB", _STATUS.read_text())
    if found is None:
        raise OSError(f"{_STATUS} does not say `{field}`.")
    return int(found[1]) * 1024
