"""`torchlml figures benchmarks` and `bandwidth`: the figures and tables on the Benchmarks page."""

import json
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from torchlml_lab.bench import grid_benchmark
from torchlml_lab.bench.cases import BASELINE
from torchlml_lab.bench.measurements import Measurement, conditions, latest, read, three_digits
from torchlml_lab.bench.targets import WORKS
from torchlml_lab.cli_errors import BadInput
from torchlml_lab.engine.output import markdown_table
from torchlml_lab.figures.settings import BandwidthFigureSettings, BenchmarksFigureSettings
from torchlml_lab.files import check_picture
from torchlml_lab.plots import (
    BLUE,
    GREY,
    INK,
    ORANGE,
    PAGE,
    SKY,
    find_csv,
    label_lines,
    new_figure,
    note,
    say_where,
    write_tables,
)

OWN = Path("torchlml-bench.csv")
STUDY = tuple(Path(f"results/{name}.csv") for name in ("benchmarks", "plain-torch", "short-rows"))

LML, TORCH, COPY = "lml-native", "lml-torch", "copy"
_BOTH = "forward+backward"
_CURVE = (5, 3.0, "float32", 1)  # k, scale, dtype and threads in the table of times against n
_MODES = {"forward": "forward", _BOTH: "forward + backward"}
# A measurement is unreliable if its 80th percentile exceeds its 20th percentile by more than this factor.
_RELIABLE = 2.0


def benchmarks(settings: BenchmarksFigureSettings) -> None:
    """Draw the times relative to softmax, write the tables, and print the paths."""
    check_picture(settings.out)
    paths = settings.csv or ((OWN,) if OWN.exists() else STUDY)
    rows = [row for path in paths for row in _read(path)]
    times = [row for row in rows if (row.operator, row.metric) == ("projection", "time")]
    if not times:
        raise BadInput(f"`{paths[0]}` (`--csv`) has no times from `torchlml bench layer`.")
    grid_benchmark.draw(times, settings.out, paths)
    write_tables("\n\n".join(tables(rows).values()) + "\n", settings.out)


def bandwidth(settings: BandwidthFigureSettings) -> None:
    """Draw the speed relative to a copy, and print the path."""
    check_picture(settings.out)
    path = find_csv(settings.csv, (OWN, STUDY[0]), "torchlml bench layer")
    rows = _read(path)
    if not shares(rows):
        raise BadInput(f"`{path}` (`--csv`) has no copy times from `torchlml bench layer`.")
    draw_bandwidth(rows, settings.out, [path])
    say_where(settings.out)


def _read(path: Path) -> list[Measurement]:
    return read(find_csv(path, (), "torchlml bench layer"), "--csv")


Shares = dict[int, dict[str, dict[int, float]]]  # by threads, provider and n


def shares(rows: Sequence[Measurement]) -> Shares:
    """Return the time of a copy divided by that of each function, as a median over k and scales.

    A copy reads every logit once and writes every output once, so the share is 1 for a function that is
    limited only by memory bandwidth. The shares are computed from ratios to softmax in the same round, which
    are more reliable than times.
    """
    times = {
        (row.provider, row.case): row.ratio_p50
        for row in rows
        if (row.operator, row.mode, row.metric, row.dtype) == ("projection", "forward", "time", _CURVE[2])
    }
    ratios: dict[tuple[int, str, int], list[float]] = defaultdict(list)
    for (provider, case), time in times.items():
        if (COPY, case) in times and provider in (BASELINE, "sigmoid", LML, TORCH):
            n, *_, threads = case
            ratios[threads, provider, n].append(times[COPY, case] / time)
    found: Shares = defaultdict(lambda: defaultdict(dict))
    for (threads, provider, n), group in sorted(ratios.items()):
        found[threads][provider][n] = median(group)
    return found


_LOOKS = {
    BASELINE: (BASELINE, ORANGE, "o"),
    "sigmoid": ("sigmoid", GREY, "v"),
    LML: ("lml, compiled", BLUE, "P"),
    TORCH: ("lml, pure PyTorch", SKY, "s"),
}


def draw_bandwidth(rows: Sequence[Measurement], picture: Path, csv: Sequence[Path] = ()) -> None:
    """Plot the speed relative to a copy as a function of n, with one panel per number of threads.

    Args:
        rows: The rows from `torchlml bench layer`.
        picture: The PNG or SVG file to write.
        csv: The CSV files with the rows. Their names are stored in the picture's metadata.
    """
    by_threads = {threads: lines for threads, lines in shares(rows).items() if any(map(len, lines.values()))}
    with new_figure(picture, PAGE, 2.7, csv) as figure:
        panels = figure.subplots(1, len(by_threads), sharey=True, squeeze=False)[0]
        for axes, (threads, lines) in zip(panels, by_threads.items(), strict=True):
            axes.axhline(100, color=INK, linewidth=1.2)
            ends = [(100.0, "copy", INK)]
            for provider, (name, color, marker) in _LOOKS.items():
                if points := lines.get(provider):
                    percent = [100 * share for share in points.values()]
                    axes.plot(list(points), percent, color=color, marker=marker)
                    ends.append((percent[-1], name, color))
            axes.set_xscale("log")
            axes.set_ylim(0, 108)
            axes.set_xlabel("row length n")
            axes.set_title(f"{threads} thread{'s' if threads > 1 else ''}")
            axes.grid()
            label_lines(axes, ends, 0.075)
        panels[0].set_ylabel("share of a copy's bandwidth (%)")
        here = [row for row in rows if row.provider == COPY and row.dtype == _CURVE[2]]
        note(figure, f"forward, medians over k and logit scales, {conditions(here)}")


@dataclass(frozen=True)
class Target:
    """A row of a target table: the measurements that it covers, and the largest acceptable ratio."""

    says: str
    provider: str
    limit: float
    mode: str = "forward"
    sizes: tuple[int, ...] = (1000,)
    scales: tuple[float, ...] = (1.0, 3.0, 12.0)
    threads: tuple[int, ...] = (1, 2)
    dtype: str = "float32"
    metric: str = "time"
    operator: str = "projection"

    def covers(self, row: Measurement) -> bool:
        """Whether a measurement belongs to this row."""
        return (
            (row.operator, row.provider, row.mode, row.dtype, row.metric)
            == (self.operator, self.provider, self.mode, self.dtype, self.metric)
            and row.n in self.sizes
            and row.scale in self.scales
            and row.threads in self.threads
        )


_LONG, _LONGEST = (10_000,), (1_000_000,)
PROJECTION = (
    Target("forward, n = 1000, scale 1 and 3", LML, 1.5, scales=(1.0, 3.0)),
    Target("forward, n = 1000, scale 12", LML, 1.5, scales=(12.0,)),
    Target("forward, n = 10,000", LML, 1.5, sizes=_LONG),
    Target("forward, 4 × 1,000,000", LML, 1.5, sizes=_LONGEST),
    Target("forward + backward, n = 1000, one thread", LML, 1.3, _BOTH, threads=(1,)),
    Target("forward + backward, n = 1000, two threads", LML, 1.3, _BOTH, threads=(2,)),
    Target("forward + backward, n = 10,000", LML, 1.3, _BOTH, _LONG),
    Target("forward + backward, 4 × 1,000,000", LML, 1.3, _BOTH, _LONGEST),
    Target("bfloat16, forward, n = 1000", LML, 1.5, dtype="bfloat16"),
    Target("bfloat16, forward, n = 10,000", LML, 1.5, sizes=_LONG, dtype="bfloat16"),
    Target("memory, forward + backward", LML, 1.1, _BOTH, (1000, *_LONG, *_LONGEST), metric="memory"),
)
PURE_PYTORCH = (
    Target("forward, n = 1000", TORCH, 15),
    Target("forward, n = 10,000", TORCH, 15, sizes=_LONG),
    Target("forward + backward, n = 1000", TORCH, 12, _BOTH),
    Target("forward + backward, n = 10,000", TORCH, 12, _BOTH, _LONG),
)
LOSS_LIMITS = {"lml_loss": 1.5, "lml_loss, ragged": 2.0}
RELATED = {
    "lml": "lml",
    "lml-at-most": "at most k",
    "lml-value": "value",
    "constrained-softmax": "constrained softmax",
    "constrained-sparsemax": "constrained sparsemax",
    "topk-mask": "top-k mask",
    "sample-subset": "sample",
    "sort": "`torch.sort`, for comparison",
}


def tables(rows: Sequence[Measurement]) -> dict[str, str]:
    """Format the tables on the Benchmarks page in Markdown, by name. Empty tables are omitted."""
    last = list(latest(rows).values())
    found = {"against n": _curve(last), "bandwidth": _bandwidth(last)}
    titles = {
        "projection": ("`lml` with the compiled kernel: time relative to softmax", PROJECTION),
        "pure PyTorch": ("`lml` in pure PyTorch: time relative to softmax", PURE_PYTORCH),
    }
    for name, (title, targets) in titles.items():
        lines = [line for target in targets for line in _target_line(target, last)]
        found[name] = (
            markdown_table(title, ("operation", "target", "measured", "met"), lines) if lines else ""
        )
    found |= {"losses": _losses(last), "short rows": _short(rows), "related": _related(last)}
    return {name: table for name, table in found.items() if table}


def _target_line(target: Target, rows: Sequence[Measurement]) -> Iterator[tuple[str, ...]]:
    covered = [row for row in rows if target.covers(row)]
    if covered:
        met = _verdict(covered, target.limit)
        if met == "no":
            above = sum(row.ratio_p50 > target.limit for row in covered)
            exceed = "exceeds" if above == 1 else "exceed"
            met = f"no ({above} of {len(covered)} configurations {exceed} the target)"
        elif met == "unreliable":
            met = f"unreliable ({sum(map(_unreliable, covered))} of {len(covered)} configurations)"
        yield target.says, f"{target.limit:g}", span([row.ratio_p50 for row in covered]), met


def _unreliable(row: Measurement) -> bool:
    """Whether the percentiles of the ratio are too far apart to tell whether a target is met."""
    return row.ratio_p80 > _RELIABLE * row.ratio_p20


def _verdict(rows: Sequence[Measurement], limit: float) -> str:
    """Return "no" if any ratio exceeds the limit, "unreliable" if any ratio is unreliable, or else "yes"."""
    if any(row.ratio_p50 > limit for row in rows):
        return "no"
    return "unreliable" if any(map(_unreliable, rows)) else "yes"


def _cell(low: float, middle: float, high: float, show: Callable[[float], str]) -> str:
    """Format the median. If it is unreliable, add the 20th and 80th percentiles in parentheses."""
    spread = f" ({show(low)}–{show(high)})" if high > _RELIABLE * low else ""
    return f"{show(middle)}{spread}"


def _ratio(row: Measurement) -> str:
    return _cell(row.ratio_p20, row.ratio_p50, row.ratio_p80, three_digits)


def span(ratios: Sequence[float]) -> str:
    """Format a range of ratios, or one value if both ends are formatted the same."""
    return "–".join(dict.fromkeys(three_digits(end) for end in (min(ratios), max(ratios))))


def _shape(batch: int, n: int) -> str:
    """Format the shape of a batch with non-breaking spaces."""
    return f"{batch:,}\u00a0×\u00a0{n:,}"


def _curve(rows: Sequence[Measurement]) -> str:
    """Format the table of times against n: the time of softmax, and the ratios of lml to softmax."""
    found = {
        (row.mode, row.provider, row.n): row
        for row in rows
        if (row.operator, row.metric) == ("projection", "time")
        and (row.k, row.scale, row.dtype, row.threads) == _CURVE
    }
    sizes = sorted({n for mode, provider, n in found if (mode, provider) == ("forward", LML)})
    heads = ["rows × n", "softmax, forward (µs)"]
    heads += [f"{name}, {mode}" for name in ("compiled", "pure PyTorch") for mode in _MODES.values()]
    lines = []
    for n in sizes:
        softmax = found["forward", BASELINE, n]
        cells = [
            _ratio(found[mode, name, n]) if (mode, name, n) in found else "-"
            for name in (LML, TORCH)
            for mode in _MODES
        ]
        time = _cell(softmax.p20, softmax.p50, softmax.p80, "{:,.0f}".format)
        lines.append((_shape(softmax.batch, n), time, *cells))
    title = f"`lml` with k = {_CURVE[0]}, scale {_CURVE[1]:g}, one thread: time relative to softmax"
    return markdown_table(title, heads, lines) if lines else ""


def _bandwidth(rows: Sequence[Measurement]) -> str:
    """Format the bandwidth of a copy, and the shares of this bandwidth that softmax and lml reach."""
    copies: dict[tuple[int, int, int], list[float]] = defaultdict(list)
    for row in rows:
        kind = (row.operator, row.provider, row.mode, row.metric, row.dtype)
        if kind == ("projection", COPY, "forward", "time", _CURVE[2]) and row.n >= 1000:
            copies[row.threads, row.n, row.batch].append(row.p50)
    found = shares(rows)
    lines = []
    for (threads, n, batch), times in sorted(copies.items()):
        if LML in found[threads]:
            speed = 2 * 4 * batch * n / median(times) / 1e3  # GB/s, counting bytes read and written
            reached = [f"{100 * found[threads][name][n]:.0f}%" for name in (BASELINE, LML)]
            lines.append((f"{threads}", _shape(batch, n), f"{speed:.1f}", *reached))
    heads = ("threads", "rows × n", "copy (GB/s)", "softmax", "lml")
    title = "Forward pass in float32: bandwidth as a percentage of the bandwidth of a memory copy"
    return markdown_table(title, heads, lines) if lines else ""


def _losses(rows: Sequence[Measurement]) -> str:
    """Format the results of `torchlml bench losses`: times and ratios for each number of threads."""
    found: dict[tuple[str, int, int, int], dict[int, Measurement]] = defaultdict(dict)
    for row in rows:
        if row.operator in ("loss", "ragged loss"):
            found[row.provider, row.batch, row.n, row.k][row.threads] = row
    threads = sorted({number for by_threads in found.values() for number in by_threads})
    heads = ["loss", "rows × n", "k"]
    for number in threads:
        heads += [f"ms, {number} thread{'s' if number > 1 else ''}", "ratio"]
    lines = []
    for (name, batch, n, k), by_threads in found.items():
        cells = []
        for number in threads:
            cell = by_threads.get(number)
            cells += [_milliseconds(cell), _ratio(cell)] if cell else ["-", "-"]
        limit = LOSS_LIMITS.get(name)
        goal = (f"{limit:g}", _verdict(list(by_threads.values()), limit)) if limit else ("", "")
        lines.append((name, _shape(batch, n), f"{k}", *cells, *goal))
    title = "Losses, forward + backward: time, and its ratio to the time of the first loss on the same rows"
    return markdown_table(title, (*heads, "target", "met"), lines) if lines else ""


def _milliseconds(row: Measurement) -> str:
    return _cell(row.p20 / 1e3, row.p50 / 1e3, row.p80 / 1e3, "{:.3g}".format)


def _related(rows: Sequence[Measurement]) -> str:
    """Format the results of `torchlml bench constrained` as ranges over k, scales and threads."""
    found: dict[tuple[str, int, str], list[float]] = defaultdict(list)
    for row in rows:
        if (row.operator, row.metric) == ("family", "time"):
            found[row.provider, row.n, row.mode].append(row.ratio_p50)
    lines = []
    for name, shown in RELATED.items():
        cells = [found.get((name, n, mode)) for n in (1000, 10_000) for mode in _MODES]
        if all(cells):
            ends = ((min(cell), max(cell)) for cell in cells if cell)
            lines.append((shown, *("–".join(f"{end:.{int(end < 10)}f}" for end in both) for both in ends)))
    heads = ("operator", *(f"n = {n:,}, {mode}" for n in (1000, 10_000) for mode in _MODES.values()))
    return markdown_table("Related operators: time relative to softmax", heads, lines) if lines else ""


def _short(rows: Sequence[Measurement]) -> str:
    """Format the results of `torchlml bench short`, with columns for each instruction set."""
    found: dict[tuple[object, ...], dict[tuple[str, float], Measurement]] = defaultdict(dict)
    for row in rows:
        if (row.dtype, row.threads) == _CURVE[2:] and row.operator.startswith(prefix := "short rows, "):
            key = (row.operator.removeprefix(prefix), row.mode, row.batch, row.n, row.k)
            kernel = json.loads(row.config)["kernel"].removeprefix("C++ (").removesuffix(")")
            # The baseline's row comes first, so the competitor's row overwrites the baseline's.
            found[key][kernel, row.scale] = row
    columns = sorted({column for measured in found.values() for column in measured})
    names = dict.fromkeys(kernel for kernel, _ in columns)
    heads = ("ratio", "rows × n", "k", "mode", *(f"{kernel}, scale {scale:g}" for kernel, scale in columns))
    lines = []
    for work in WORKS:
        if measured := found.get((work.operator, work.mode, work.batch, work.n, work.k)):
            verdicts = {
                name: _verdict([row for (of, _), row in measured.items() if of == name], work.target)
                for name in names
            }
            met = [name for name, verdict in verdicts.items() if verdict == "yes"]
            otherwise = "unreliable" if "unreliable" in verdicts.values() else "no"
            verdict = "yes" if len(met) == len(names) else " and ".join(met) or otherwise
            shape = (work.operator, _shape(work.batch, work.n), f"{work.k}", _MODES[work.mode])
            cells = (
                _cell(row.ratio_p20, row.ratio_p50, row.ratio_p80, "{:.2f}".format)
                for row in map(measured.__getitem__, columns)
            )
            lines.append((*shape, *cells, f"{work.target:g}", verdict))
    title = "Short rows: time ratios, one thread, float32"
    return markdown_table(title, (*heads, "target", "met"), lines) if lines else ""
