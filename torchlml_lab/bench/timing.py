"""Functions that time calls in random order and measure the peak memory of a call."""

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

# The approximate minimum duration of a sample. Short calls are repeated within a sample, so that reading the
# clock takes less than one percent of the time.
_SAMPLE_SECONDS = 0.5e-3
_WARM_UP_SECONDS = 20e-3


@dataclass(frozen=True)
class Quantiles:
    """The 20th, 50th and 80th percentiles."""

    p20: float
    p50: float
    p80: float

    @classmethod
    def of(cls, samples: list[float]) -> "Quantiles":
        """Compute the quantiles of samples by linear interpolation."""
        ordered = sorted(samples)

        def at(q: float) -> float:
            place = q * (len(ordered) - 1)
            low = int(place)
            high = min(low + 1, len(ordered) - 1)
            return ordered[low] + (place - low) * (ordered[high] - ordered[low])

        return cls(at(0.2), at(0.5), at(0.8))

    def times(self, factor: float) -> "Quantiles":
        """Return the quantiles multiplied by a factor, to convert units."""
        return Quantiles(factor * self.p20, factor * self.p50, factor * self.p80)


@dataclass(frozen=True)
class Timing:
    """The time of a call, its ratio to the baseline in the same round, and the number of rounds."""

    seconds: Quantiles
    ratio: Quantiles
    rounds: int


class Stopped(KeyboardInterrupt):
    """Raised on Ctrl-C during `race`. `timings` contains the timings from the completed rounds."""

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
    """Time all calls in rounds, in a new random order each round.

    Every call runs in the first round. A slow call skips later rounds once it has used its share of the time
    budget, so that it cannot starve the others. The baseline runs in every round, because all ratios need it.

    Args:
        calls: The calls by name, including the baseline.
        baseline: The name of the call that ratios are relative to.
        repetitions: The maximum number of rounds.
        seconds: The time budget that the calls share. Once it is used up, no further round starts.
        after_round: Called between rounds, outside the timed sections.
        sample_seconds: The approximate minimum duration of a sample. Longer samples reduce the effect of cold
            caches.

    Returns:
        The timing of each call by name. Ctrl-C raises `Stopped` if at least one round is complete.
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
    """Return the number of calls that makes a sample long enough. Finding it also serves as a warm-up."""
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
    """Whether this system can measure memory, which requires Linux and the GNU C library."""
    try:
        _RESET.write_text(_RESET_HIGHEST)
        return hasattr(ctypes.CDLL(None), "malloc_trim") and _resident("VmHWM") > 0
    except (OSError, AttributeError):
        return False


def added_bytes(call: Callable[[], object]) -> int:
    """Measure the peak memory in bytes that a call adds, including its result.

        x = torch.zeros(1000, 1000)
        added_bytes(lambda: x + 1)  # 4001792

    Args:
        call: The call to measure. It runs once beforehand, so that one-time allocations are not counted.

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
        raise OSError(f"{_STATUS} does not contain `{field}`.")
    return int(found[1]) * 1024
