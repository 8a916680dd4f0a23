"""Benchmark timing: ratios of interleaved calls are reliable, and memory is measured during a call."""

import gc

import numpy
import pytest
import torch

from tests.support.processes import fork
from torchlml_lab.bench import timing
from torchlml_lab.bench.timing import Quantiles, Stopped


@pytest.fixture(autouse=True)
def _short_samples(monkeypatch):
    monkeypatch.setattr(timing, "_SAMPLE_SECONDS", 1e-6)
    monkeypatch.setattr(timing, "_WARM_UP_SECONDS", 0.0)


class _NoisyMachine:
    """A simulated clock, and calls of known duration on a machine whose speed keeps changing."""

    def __init__(self):
        self.now = 0.0
        self.calls = dict.fromkeys(("base", "triple", "slow"), 0)

    def call(self, name, seconds):
        def run():
            # Simulate a shared machine: after every 20 calls, the speed drops to a tenth or recovers.
            slowdown = 10 if sum(self.calls.values()) // 20 % 2 else 1
            self.calls[name] += 1
            self.now += seconds * slowdown

        return run


def test_ratios_survive_a_noisy_machine(monkeypatch):
    machine = _NoisyMachine()
    monkeypatch.setattr(timing, "perf_counter", lambda: machine.now)
    calls = {"base": machine.call("base", 1e-4), "triple": machine.call("triple", 3e-4)}
    result = timing.race(calls, "base", repetitions=200, seconds=10)
    assert result["triple"].ratio.p50 == pytest.approx(3)
    assert result["triple"].ratio.p20 == pytest.approx(3)
    assert result["base"].ratio == Quantiles(1, 1, 1)
    # The absolute times of the same run are not reliable, which is why ratios are reported.
    assert result["base"].seconds.p80 > 5 * result["base"].seconds.p20
    assert result["base"].rounds == result["triple"].rounds == 200


def test_a_slow_competitor_does_not_starve_the_others(monkeypatch):
    machine = _NoisyMachine()
    monkeypatch.setattr(timing, "perf_counter", lambda: machine.now)
    calls = {"base": machine.call("base", 1e-4), "slow": machine.call("slow", 1.0)}
    result = timing.race(calls, "base", repetitions=50, seconds=1)
    assert result["base"].rounds == 50
    assert result["slow"].rounds == 1
    assert machine.calls["slow"] == 2  # including one warm-up call


def test_garbage_collection_is_paused_only_during_timing():
    states = []
    timing.race({"base": lambda: states.append(gc.isenabled())}, "base", 2, 1)
    assert states[-1] is False
    assert gc.isenabled()


@pytest.mark.parametrize("samples", [[3.0], [2.0, 1.0], [5.0, 1.0, 2.0, 9.0, 4.0, 4.5, 0.5]])
def test_quantiles(samples):
    found = Quantiles.of(samples)
    assert [found.p20, found.p50, found.p80] == pytest.approx(list(numpy.percentile(samples, [20, 50, 80])))


@pytest.mark.skipif(not timing.measurable(), reason="measuring memory requires Linux with the GNU C library")
@pytest.mark.parametrize(
    ("call", "mebibytes"),
    [
        ("x + 1", 4),  # only the result
        ("(x + 1).double()", 12),  # a temporary, and a result twice its size
        ("x.add_(1)", 0),  # in place
        ("[x + 1, x + 2, x + 3]", 12),  # all three results are alive at the peak
    ],
)
def test_memory_is_the_increase_during_the_call(call, mebibytes, tmp_path):
    # Measure in a new process, because the allocator of this process keeps memory from earlier tests.
    process = fork(write_added_bytes, call, tmp_path / "bytes")
    process.join(60)
    assert process.exitcode == 0
    assert int((tmp_path / "bytes").read_text()) / 2**20 == pytest.approx(mebibytes, abs=0.3)


def write_added_bytes(call, path):
    torch.set_num_threads(1)
    names = {"x": torch.zeros(1024, 1024)}
    path.write_text(str(timing.added_bytes(lambda: eval(call, names))))


def test_an_interrupted_race_reports_its_finished_rounds():
    turns: list[None] = []

    def call():
        turns.append(None)
        if len(turns) == 5:
            raise KeyboardInterrupt

    with pytest.raises(Stopped) as stopped:
        timing.race({"base": call}, "base", 100, 10)
    assert stopped.value.timings["base"].rounds == 3  # without the warm-up call
