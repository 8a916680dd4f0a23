"""How results are shown: tables of ratios on the screen, and a plot drawn from the CSV."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from rich.table import Table

from torchlml_lab.bench.cases import BASELINE, MODES
from torchlml_lab.bench.records import Key, Record, latest
from torchlml_lab.files import replacing

_CASE = ("n", "k", "batch", "scale", "dtype", "threads")
# A ratio that moved by less than this is noise, and is not coloured.
_NOTABLE = 0.05

# Okabe and Ito's palette, which people with any colour vision can tell apart, and a marker each.
_LOOK = {
    "lml-native": ("#0072B2", "o"),
    "lml-torch": ("#56B4E9", "s"),
    "lml-bracketing": ("#CC79A7", "D"),
    "softmax": ("#222222", ""),
    "sigmoid": ("#999999", "v"),
    "topk": ("#E69F00", "^"),
    "sort": ("#D55E00", "X"),
    "entmax": ("#009E73", "P"),
}


def tables(records: Sequence[Record], earlier: Mapping[Key, Record]) -> list[Table]:
    """One table for each metric and mode: a line per case, softmax in its unit, the others as ratios to it.

    Args:
        records: What was measured.
        earlier: What an earlier run measured; a ratio that is in both is shown with the earlier one.

    Returns:
        The tables; what is the same in all cases stands in their titles.
    """
    groups: dict[tuple[str, str, str], list[Record]] = defaultdict(list)
    for record in records:
        groups[record.metric, record.mode, record.unit].append(record)
    values = {name: {getattr(record, name) for record in records} for name in _CASE}
    fixed = {name: value for name, (value, *others) in values.items() if not others}
    return [_table(group, title, fixed, earlier) for title, group in groups.items()]


def _table(
    records: Sequence[Record],
    title: tuple[str, str, str],
    fixed: Mapping[str, object],
    earlier: Mapping[Key, Record],
) -> Table:
    metric, mode, unit = title
    same = ", ".join(f"{name} {value}" for name, value in fixed.items())
    table = Table(title=f"{mode}: {metric}" + (f" ({same})" if same else ""), title_justify="left")
    varying = [name for name in _CASE if name not in fixed]
    providers = list(dict.fromkeys(record.provider for record in records))
    for name in (*varying, f"{BASELINE}, {unit}", *(name for name in providers if name != BASELINE)):
        table.add_column(name, justify="right")
    by_case: dict[object, dict[str, Record]] = defaultdict(dict)
    for record in records:
        by_case[record.case][record.provider] = record
    for by_provider in by_case.values():
        base = by_provider[BASELINE]
        cells = [_ratio(by_provider[name], earlier) for name in providers if name != BASELINE]
        table.add_row(*(f"{getattr(base, name)}" for name in varying), f"{base.p50:,.4g}", *cells)
    return table


def _ratio(record: Record, earlier: Mapping[Key, Record]) -> str:
    now = _three_digits(record.ratio_p50)
    if record.key not in earlier:
        return now
    then = earlier[record.key].ratio_p50
    colour = "default"
    if record.ratio_p50 < then * (1 - _NOTABLE):
        colour = "green"
    elif record.ratio_p50 > then * (1 + _NOTABLE):
        colour = "red"
    return f"[{colour}]{now}[/] [dim](was {_three_digits(then)})[/]"


def _three_digits(ratio: float) -> str:
    return f"{ratio:.2f}" if ratio < 10 else f"{ratio:.1f}" if ratio < 100 else f"{ratio:,.0f}"


def draw(records: Sequence[Record], plot: Path) -> None:
    """Draws time as a ratio to softmax over the length of a row: one panel per mode, one line per provider.

    A line is the median over all else that was varied (k, scale, batch, dtype, threads), its band the range.

    Args:
        records: Those of a CSV, times among them; the last of each measurement counts, on the last machine.
        plot: The PNG to write; its folder must exist.
    """
    times = [record for record in records if record.metric == "time"]
    here = [record for record in latest(times).values() if record.machine == times[-1].machine]
    modes = [mode for mode in MODES if any(record.mode == mode for record in here)]
    figure = Figure(figsize=(1.8 + 3.9 * len(modes), 4.2), dpi=150, layout="constrained")
    panels = figure.subplots(1, len(modes), sharey=True, squeeze=False)[0]
    for panel, mode in zip(panels, modes, strict=True):
        _draw_panel(panel, mode, [record for record in here if record.mode == mode])
    panels[0].set_ylabel("time / time of softmax")
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside right center", frameon=False)
    figure.suptitle(f"{times[-1].machine}, torch {times[-1].torch}", fontsize=9, color="#555555")
    with replacing(plot) as temporary:
        figure.savefig(temporary, format="png")


def _draw_panel(panel: Axes, mode: str, records: Sequence[Record]) -> None:
    panel.axhline(1, color=_LOOK[BASELINE][0], linewidth=1.2, label=BASELINE)
    for name, (colour, marker) in _LOOK.items():
        ratios: dict[int, list[float]] = defaultdict(list)
        for record in records:
            if record.provider == name != BASELINE:
                ratios[record.n].append(record.ratio_p50)
        if ratios:
            sizes = sorted(ratios)
            middle = [median(ratios[n]) for n in sizes]
            low, high = [min(ratios[n]) for n in sizes], [max(ratios[n]) for n in sizes]
            panel.fill_between(sizes, low, high, color=colour, alpha=0.15, linewidth=0)
            panel.plot(sizes, middle, color=colour, marker=marker, markersize=5, linewidth=1.8, label=name)
    panel.set_xscale("log")
    panel.set_yscale("log")
    panel.yaxis.set_major_formatter(lambda ratio, _: f"{ratio:g}x")
    panel.grid(which="major", color="#E5E5E5", linewidth=0.8)
    panel.spines[["top", "right"]].set_visible(False)
    panel.set_axisbelow(True)
    panel.set_xlabel("n, the length of a row")
    panel.set_title(mode, loc="left", fontweight="bold")
