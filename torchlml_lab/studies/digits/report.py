"""The report of the demo: findings as sentences, two plots, and an HTML page."""

import base64
import html
import io
from collections.abc import Mapping, Sequence
from pathlib import Path

import matplotlib
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.image import imsave
from torch import Tensor

from torchlml_lab.files import replacing
from torchlml_lab.plots import DARK_ORANGE, GREY, METHODS
from torchlml_lab.studies.digits.model import COLUMNS, CONDITIONS, SCALED, Images, Results, spread, values


def sentences(results: Results, condition: str, k: int) -> list[str]:
    """Return the findings for one condition, with the most important one first.

    Args:
        results: All measurements.
        condition: "uniform" or "skewed".
        k: The number of digits in an image.

    Returns:
        Complete sentences; all measurements in them are computed from `results`.
    """

    def average(method: str, measure: str) -> float:
        return spread(values(results, condition, method, measure))[0]

    collapsed = average("sigmoid likelihood", "count")
    softmax, lml = average("cross-entropy", "count"), average("LML", "count")
    return [
        f"Recall of the unobserved digits: LML reaches {average('LML', 'hidden_recall'):.3f}. "
        + " ".join(
            _compare(results, condition, "LML", other)
            for other in ("cross-entropy", "sigmoid BCE", "truncated entropy")
        ),
        f"The sigmoid likelihood of the observed label {_collapse(collapsed)}. It predicts p > 0.5 for "
        f"{collapsed:.1f} of 10 digits, although an image shows {k}. Its recall of the unobserved digits is "
        f"{average('sigmoid likelihood', 'hidden_recall'):.2f}; that of a random ranking is {k / 10:.2f}.",
        f"Predicted sets (p > 0.5): LML predicts exactly the digits in the image for "
        f"{average('LML', 'exact'):.0%} of the images, and cross-entropy does so for "
        f"{average('cross-entropy', 'exact'):.0%}. The mean size of the set is {lml:.2f} for LML and "
        f"{softmax:.2f} for cross-entropy; the correct size is {k}.",
        f"Top-{k} sets: if k is known, the set can also be the {k} digits with the largest p. It is exactly "
        f"right for {average('LML', 'top_set'):.0%} of the images with LML, "
        f"{average('cross-entropy', 'top_set'):.0%} with cross-entropy and "
        f"{average('sigmoid BCE', 'top_set'):.0%} with BCE.",
        f"Calibration: {_calibration(results, condition)}",
        f"Softmax scaled by k: if k is known, the softmax can also be multiplied by k. This predicts "
        f"{average(SCALED, 'exact'):.0%} of the sets exactly, and LML predicts {average('LML', 'exact'):.0%} "
        f"({_verdict(results, condition, 'exact', 'LML', SCALED)}). The calibration error of "
        f"the scaled softmax is {average(SCALED, 'calibration_error'):.3f}, and that of LML is "
        f"{average('LML', 'calibration_error'):.3f} "
        f"({_verdict(results, condition, 'calibration_error', 'LML', SCALED)}).",
    ]


def limits(seeds: int, k: int) -> str:
    """Return a paragraph about the limitations of the demo."""
    return (
        f"This demo is limited: the images are small, and only one small network is tested, with {seeds} "
        f"seeds. All losses use the same optimizer settings, which were not tuned for any of them. Every "
        f"image shows exactly k = {k} digits, and LML and truncated entropy use this k. `torchlml which-k` "
        "measures the effect of a wrong k and of a varying number of labels."
    )


def _compare(results: Results, condition: str, first: str, second: str) -> str:
    measure = "hidden_recall"
    other, _ = spread(values(results, condition, second, measure))
    verdict = _verdict(results, condition, measure, first, second)
    return f"Compared with {second} ({other:.3f}), {verdict}."


def _verdict(results: Results, condition: str, measure: str, first: str, second: str) -> str:
    pairs = zip(
        values(results, condition, first, measure), values(results, condition, second, measure), strict=True
    )
    differences = [one - other for one, other in pairs]
    middle, deviation = spread(differences)
    by = f"by {abs(middle):.3f} ± {deviation:.3f}"
    if all(difference > 0 for difference in differences):
        return f"{first} is higher for every seed, {by}"
    if all(difference < 0 for difference in differences):
        return f"{first} is lower for every seed, {by}"
    return f"there is no consistent difference: {middle:+.3f} ± {deviation:.3f}"


def _collapse(count: float) -> str:
    return "collapses, as the paper predicts" if count > 9.5 else "does not collapse in this condition"


def _calibration(results: Results, condition: str) -> str:
    methods = [name for where, name in results if where == condition and name != SCALED]
    errors = {name: spread(values(results, condition, name, "calibration_error"))[0] for name in methods}
    order = sorted(errors, key=lambda name: errors[name])
    ranked = ", ".join(f"{name} {errors[name]:.3f}" for name in order)
    best, second = order[0], order[1]
    verdict = _verdict(results, condition, "calibration_error", best, second)
    return (
        f"among the five losses, {best} has the smallest error. Compared with the second-best, {second}, "
        f"{verdict}. Errors: {ranked}."
    )


# A method has the same color and marker in every figure of the project. Of the two methods that occur
# only in the demo, one has a darker shade of the related method's color, and the other is gray.
LOOK = {
    "cross-entropy": METHODS["cross-entropy"],
    SCALED: (DARK_ORANGE, "s"),
    "sigmoid likelihood": (GREY, "v"),
    "sigmoid BCE": METHODS["bce"],
    "truncated entropy": METHODS["truncated-entropy"],
    "LML": METHODS["lml"],
}


def draw_scores(results: Results, k: int, picture: Path) -> None:
    """Plot the recall of unobserved digits and the fraction of exact top-k sets, with standard deviations.

    Args:
        results: All measurements.
        k: The number of digits in an image.
        picture: The PNG to write.
    """
    panels = (
        ("hidden_recall", f"recall@{k} of unobserved digits", k / 10),
        ("top_set", f"images whose top-{k} set is exact", None),
    )
    with matplotlib.rc_context({"axes.spines.top": False, "axes.spines.right": False}):
        figure = Figure(figsize=(10.5, 6.4), dpi=130, layout="constrained")
        grid = figure.subplots(len(panels), len(CONDITIONS), sharey=True, sharex=True)
        for axes_row, (measure, title, chance) in zip(grid, panels, strict=True):
            for axes, condition in zip(axes_row, CONDITIONS, strict=True):
                _bars(axes, results, condition, measure)
                axes.set_title(f"{title}\nobserved label: {condition}", loc="left", fontsize=10)
                if chance is not None:
                    axes.axvline(chance, color=GREY, linewidth=1, linestyle=(0, (4, 4)))
                    axes.text(chance + 0.01, 5.42, "chance", color=GREY, fontsize=8, va="center")
        _save(figure, picture)


def draw_calibration(results: Results, picture: Path) -> None:
    """Plot reliability curves: the fraction of digits that are in the image against their predicted p.

    Args:
        results: All measurements; the seeds are pooled.
        picture: The PNG to write.
    """
    with matplotlib.rc_context({"axes.spines.top": False, "axes.spines.right": False}):
        figure = Figure(figsize=(10.5, 4.9), dpi=130, layout="constrained")
        panels = figure.subplots(1, len(CONDITIONS), sharey=True)
        for axes, condition in zip(panels, CONDITIONS, strict=True):
            axes.plot((0, 1), (0, 1), color=GREY, linewidth=1.2, linestyle=(0, (4, 4)))
            for name, (color, marker) in LOOK.items():
                said, present = _pooled(results, condition, name)
                axes.plot(said, present, color=color, marker=marker, markersize=5, linewidth=1.6, label=name)
            axes.set_xlabel("predicted p")
            axes.set_xlim(-0.03, 1.03)
            axes.set_ylim(-0.03, 1.03)
            axes.set_title(f"observed label: {condition}", loc="left", fontsize=10)
        panels[0].set_ylabel("fraction of digits that are in the image")
        handles, labels = panels[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=len(LOOK), frameon=False, fontsize=9)
        _save(figure, picture)


def _bars(axes: Axes, results: Results, condition: str, measure: str) -> None:
    for place, (name, (color, _)) in enumerate(reversed(LOOK.items())):
        middle, deviation = spread(values(results, condition, name, measure))
        axes.barh(
            place, middle, xerr=deviation, color=color, height=0.7, error_kw={"capsize": 3, "linewidth": 1}
        )
        axes.text(middle + deviation + 0.015, place, f"{middle:.2f}", va="center", fontsize=9)
    axes.set_yticks(range(len(LOOK)), list(reversed(LOOK)))
    axes.tick_params(axis="y", length=0)
    axes.set_xlim(0, 1.08)


def _pooled(results: Results, condition: str, method: str) -> tuple[list[float], list[float]]:
    """Pool the bins of all seeds, and drop bins with fewer than 50 (image, digit) pairs as too noisy."""
    number, said, present = torch.stack([m.reliability for m in results[condition, method]]).unbind(1)
    total = number.sum(0)
    keep = total >= 50
    means = [torch.nan_to_num(number * part).sum(0) / total for part in (said, present)]
    return means[0][keep].tolist(), means[1][keep].tolist()


def _save(figure: Figure, picture: Path) -> None:
    with replacing(picture) as temporary:
        figure.savefig(temporary, format="png")


STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; color: #222; background: #fff; max-width: 62rem;
  margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.6rem; } h2 { font-size: 1.2rem; margin-top: 2.2rem; }
table { border-collapse: collapse; margin: .6rem 0 1rem; }
th, td { padding: .22rem .6rem; text-align: right; border-bottom: 1px solid #e5e5e5; white-space: nowrap; }
th:first-child, td:first-child { text-align: left; }
th { font-weight: 600; border-bottom: 2px solid #bbb; }
tr.lml td { font-weight: 600; }
.plot { overflow-x: auto; }
.plot img { width: 100%; height: auto; }
.example { display: flex; flex-wrap: wrap; gap: 1.2rem; align-items: center; margin: 1rem 0; }
.example img { height: 6rem; image-rendering: pixelated; border: 1px solid #ccc; }
.example table { margin: 0; font-size: .82rem; }
.example td, .example th { padding: .12rem .38rem; text-align: center; border: 0; }
.example th:first-child, .example td:first-child { text-align: left; padding-right: .8rem; }
.present { outline: 2px solid #D55E00; outline-offset: -2px; }
.small { color: #555; font-size: .88rem; }
/* On phones, plots scroll inside their frame, and each row of a results table becomes a list. */
@media (max-width: 40rem) {
  body { margin: 1rem auto; }
  .plot img { width: 44rem; }
  .results, .results tbody, .results tr, .results td { display: block; }
  .results tr:first-child { display: none; }
  .results tr { margin-bottom: .8rem; }
  .results td { display: flex; justify-content: space-between; padding: .22rem 0; }
  .results td:first-child { font-weight: 600; border-bottom: 2px solid #bbb; }
  .results td[data-label]::before { content: attr(data-label); color: #555; font-weight: 400; }
  .example table { table-layout: fixed; width: 100%; font-size: min(.66rem, 3vw); }
  .example td, .example th { padding: .12rem 0; }
  .example th:first-child, .example td:first-child { padding-right: .2rem; white-space: normal; }
  .example th:first-child { width: 4.1rem; }
}
"""
ALTERNATIVES = {
    "scores": "Bar charts of the recall of unobserved digits and the fraction of exact top-k sets, by method",
    "calibration": "Reliability curves for all methods",
}


def write(
    path: Path,
    *,
    setting: str,
    results: Results,
    findings: Mapping[str, Sequence[str]],
    limits: str,
    meanings: Mapping[str, str],
    plots: Sequence[Path],
    examples: Images,
    answers: Mapping[str, Tensor],
) -> None:
    """Write the report: test images and plots first, then the findings and tables.

    Args:
        path: The HTML file.
        setting: A description of the run.
        results: All measurements.
        findings: The sentences about each condition.
        limits: The limitations of the demo.
        meanings: A description of each method, by name.
        plots: The PNG files to embed.
        examples: A few test images from the uniform condition.
        answers: The probabilities (images, 10) that each method predicts for these images.
    """
    parts = [
        "<h1>Learning k labels from one label per image</h1>",
        f"<p>{html.escape(setting)}</p>",
        "<h2>Test images</h2><p>The tables show the probability p that each method assigns to each digit. "
        "The networks were trained with the first seed in the uniform condition. Orange frames mark the "
        "digits in the image. A darker cell means a larger p.</p>",
    ]
    parts += [_example(examples, answers, i) for i in range(len(examples.named))]
    parts.append("<h2>Plots</h2>")
    for plot in plots:
        alternative = html.escape(ALTERNATIVES.get(plot.stem, plot.stem))
        parts.append(
            f'<div class="plot" tabindex="0" role="region" aria-label="{alternative}">'
            f'<img alt="{alternative}" src="{_embedded(plot.read_bytes())}"></div>'
        )
    for condition in CONDITIONS:
        parts += [f"<h2>Observed label: {condition}</h2>", _table(results, condition, meanings)]
        parts.append(
            "<ul>" + "".join(f"<li>{html.escape(said)}</li>" for said in findings[condition]) + "</ul>"
        )
    columns = "; ".join(f"<b>{html.escape(h)}</b>: {html.escape(m)}" for _, h, m, _ in COLUMNS)
    parts.append(f'<p class="small">Mean ± standard deviation over the seeds. {columns}.</p>')
    parts.append(
        "<h2>Methods</h2><ul>"
        + "".join(f"<li><b>{html.escape(n)}</b>: {html.escape(m)}</li>" for n, m in meanings.items())
        + f"</ul><h2>Limitations</h2><p>{html.escape(limits)}</p>"
    )
    page = (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1"><title>torchlml demo</title>'
        f"<style>{STYLE}</style></head><body>{''.join(parts)}</body></html>\n"
    )
    with replacing(path) as temporary:
        temporary.write_text(page, encoding="utf-8")


def _table(results: Results, condition: str, meanings: Mapping[str, str]) -> str:
    head = "".join(f"<th>{html.escape(heading)}</th>" for _, heading, _, _ in COLUMNS)
    rows = []
    for name in meanings:
        cells = []
        for measure, heading, _, digits in COLUMNS:
            middle, deviation = spread(values(results, condition, name, measure))
            label = html.escape(heading)
            cells.append(f'<td data-label="{label}">{middle:.{digits}f} ± {deviation:.{digits}f}</td>')
        kind = ' class="lml"' if name == "LML" else ""
        rows.append(f"<tr{kind}><td>{html.escape(name)}</td>{''.join(cells)}</tr>")
    return f'<table class="results"><tr><th>method</th>{head}</tr>{"".join(rows)}</table>'


def _example(examples: Images, answers: Mapping[str, Tensor], i: int) -> str:
    buffer = io.BytesIO()
    imsave(buffer, examples.pixels[i].numpy(), cmap="gray_r", vmin=0, vmax=1, format="png")
    present = examples.present[i].tolist()
    shown = ", ".join(str(digit) for digit, there in enumerate(present) if there)
    rows = []
    for name, p in answers.items():
        cells = "".join(_cell(value, there) for value, there in zip(p[i].tolist(), present, strict=True))
        rows.append(f"<tr><td>{html.escape(name)}</td>{cells}</tr>")
    head = "".join(f"<th>{digit}</th>" for digit in range(len(present)))
    return (
        f'<div class="example"><img alt="the digits {shown}" src="{_embedded(buffer.getvalue())}">'
        f"<table><tr><th></th>{head}</tr>{''.join(rows)}</table></div>"
    )


def _cell(p: float, present: bool) -> str:
    ink = "#fff" if p > 0.85 else "#222"  # the text color with more contrast
    kind = ' class="present"' if present else ""
    return f'<td{kind} style="background: rgba(0, 114, 178, {p:.3f}); color: {ink}">{p:.2f}</td>'


def _embedded(png: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(png).decode()}"
