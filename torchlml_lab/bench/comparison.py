"""`torchlml bench peers`: differentiable top-k by other means and by lml, side by side on the same rows."""

import gc
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from torchlml_lab.bench import comparison_tables, report
from torchlml_lab.bench.cases import Case, case_grid
from torchlml_lab.bench.comparison_tables import INSTALLED, OPERATOR
from torchlml_lab.bench.competitors import BASELINE, LAYER, Mode, Provider, call_of
from torchlml_lab.bench.measurements import Measurement, RowFile, measured
from torchlml_lab.bench.option_checks import TimingSettings, check_choices, check_numbers, check_timing
from torchlml_lab.bench.peak_memory import PAGE, added_bytes, measurable
from torchlml_lab.bench.peer_behaviour import EXACTNESS, TRIAL, abilities, abilities_in_plain_torch, exactness
from torchlml_lab.bench.peers import PEERS, Peer
from torchlml_lab.bench.race import Quantiles, race
from torchlml_lab.cli import parse_settings
from torchlml_lab.engine.progress import ProgressBar
from torchlml_lab.engine.threads import check_threads, use_threads
from torchlml_lab.errors import BadInput
from torchlml_lab.screen import new_console
from torchlml_lab.style import check_picture

_MODES: tuple[Mode, ...] = ("forward", "forward+backward")
_SOFTMAX = next(provider for provider in LAYER if provider.name == BASELINE)


def _here() -> tuple[str, ...]:
    return tuple(peer.name for peer in PEERS if peer.absent() is None)


@dataclass(frozen=True)
class ComparisonSettings(TimingSettings):
    """Compare ways to a differentiable top-k: time beside softmax, memory, exactness, what they work with.

    The tables are printed as Markdown.
    """

    csv: Path = Path("torchlml-peers.csv")
    methods: tuple[str, ...] = field(default_factory=_here)
    """Who is compared; by default all that can run here. Those for short rows sit out the long ones."""
    sizes: tuple[int, ...] = (32, 1000, 10_000)
    """Lengths n of a row."""
    k: int = 5
    """How many to choose."""
    batch: int = 64
    """The number of rows."""
    scale: float = 3.0
    """The standard deviation of the logits."""
    threads: int = 1
    """The number of threads torch may use."""
    plot: Path | None = None
    """The PNG or SVG of this run; by default a PNG beside the CSV, with its name."""
    quick: bool = False
    """Begin from a small selection that takes well under a minute; other options still change it."""


# What `--quick` begins from.
QUICK: dict[str, Any] = {"sizes": (1000,), "batch": 16, "seconds": 1.0}


def main(arguments: Sequence[str]) -> None:
    """Read the options and run the comparison."""
    usual = ComparisonSettings()
    settings = parse_settings(ComparisonSettings, "bench peers", arguments, usual)
    if settings.quick:
        settings = parse_settings(ComparisonSettings, "bench peers", arguments, replace(usual, **QUICK))
    run(settings, new_console())


def run(settings: ComparisonSettings, console: Console) -> None:
    """Try out every method, measure it at every length, and show the tables.

    Args:
        settings: What to compare; wrong values raise `BadInput` before anything is measured.
        console: Where the progress, the tables and what was written go.
    """
    peers = _checked(settings)
    cases = case_grid(
        settings.sizes,
        (str(settings.k),),
        (settings.batch,),
        (settings.scale,),
        ("float32",),
        (settings.threads,),
    )
    file = RowFile(settings.csv)
    plot = settings.plot or settings.csv.with_suffix(".png")
    check_picture(plot, "--plot")
    if missing := [why for peer in PEERS if (why := peer.absent()) is not None]:
        said = f'Left out: {", ".join(missing)}. `pip install "torchlml[peers]"` installs the packages.'
        console.print(said, soft_wrap=True, markup=False, highlight=False)
    file.announce(f"{len(peers)} methods are compared on rows of {len(cases)} lengths", console)
    with ProgressBar(console) as progress, use_threads(settings.threads):
        task = progress.add_task("", total=len(peers) * (1 + len(cases)) + 2 * len(cases))
        try:
            file.add(_number(peer, INSTALLED, TRIAL, float(peer.absent() is None)) for peer in PEERS)
            for peer in peers:
                progress.update(task, description=f"uses of {peer.name}")
                file.add(_uses(peer))
                progress.advance(task)
            for case in cases:
                able = []
                for peer in peers:
                    progress.update(task, description=f"exactness of {peer.name}, n {case.n}")
                    found = _exactness(peer, case)
                    file.add(_number(peer, name, case, value) for name, value in found.items())
                    # A method without an answer cannot be timed; the table says that it fails.
                    able += [peer] if math.isfinite(found.get(EXACTNESS[0], math.nan)) else []
                    progress.advance(task)
                for mode in _MODES:
                    progress.update(task, description=f"{mode}, n {case.n}")
                    file.add(_costs(able, case, mode, settings))
                    progress.advance(task)
        except KeyboardInterrupt:
            raise KeyboardInterrupt(f"Interrupted: what was measured is in {settings.csv}.") from None
    console.print(comparison_tables.markdown(file.new), soft_wrap=True, markup=False, highlight=False)
    report.finish(file, plot, lambda: comparison_tables.draw(file.new, plot), console)


def _checked(settings: ComparisonSettings) -> list[Peer]:
    """The methods that were named, in their order here; wrong options are refused."""
    known = {peer.name: peer for peer in PEERS}
    check_choices("--methods", settings.methods, known)
    check_numbers("--sizes", settings.sizes, 2)
    check_numbers("--k", (settings.k,), 1, min(settings.sizes) - 1)
    check_numbers("--batch", (settings.batch,), 1)
    check_numbers("--scale", (settings.scale,), 0)
    check_threads(settings.threads)
    check_timing(settings)
    for name in settings.methods:
        if (why := known[name].absent()) is not None:
            raise BadInput(f"`--methods` names `{name}`, which cannot run here: {why}.")
    return [peer for peer in PEERS if peer.name in settings.methods]


def _uses(peer: Peer) -> Iterator[Measurement]:
    # The kernel of a process cannot be exchanged; and what lml works with depends on its operators' kernel.
    found = abilities_in_plain_torch() if peer.name == "lml-torch" else abilities(peer.function)
    for name, works in found.items():
        yield _number(peer, name, TRIAL, float(works))


def _exactness(peer: Peer, case: Case) -> Mapping[str, float]:
    if case.n > peer.longest:
        return {}
    found = exactness(peer.function, case)
    # It would be compared with itself.
    return dict(list(found.items())[:2]) if peer.float32_only else found


def _costs(
    peers: Sequence[Provider], case: Case, mode: Mode, settings: ComparisonSettings
) -> Iterator[Measurement]:
    calls = {peer.name: call_of(peer, case, mode) for peer in (_SOFTMAX, *peers)}
    for name, timing in race(calls, BASELINE, settings.repetitions, settings.seconds).items():
        micro = timing.seconds.times(1e6)
        yield measured(OPERATOR, name, mode, case, micro, timing.ratio, timing.rounds)
    if mode == "forward" or not measurable():
        return
    gc.collect()
    added = {name: added_bytes(call) / 2**20 for name, call in calls.items()}
    for name, size in added.items():
        ratio = size / max(added[BASELINE], PAGE / 2**20)
        value, beside = Quantiles(size, size, size), Quantiles(ratio, ratio, ratio)
        yield measured(OPERATOR, name, mode, case, value, beside, 1, metric="memory", unit="MiB")


def _number(peer: Peer, metric: str, case: Case, value: float) -> Measurement:
    """The row of something that has no ratio to softmax."""
    once, none = Quantiles(value, value, value), Quantiles(math.nan, math.nan, math.nan)
    return measured(OPERATOR, peer.name, "behaviour", case, once, none, 1, metric=metric, unit="1")
