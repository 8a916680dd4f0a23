"""The HTML report of the demo, a single file without external resources."""

import base64
import html
import io
from collections.abc import Mapping, Sequence
from pathlib import Path

from matplotlib.image import imsave
from torch import Tensor

from torchlml_lab.files import replacing
from torchlml_lab.studies.digits.images import CONDITIONS, Images
from torchlml_lab.studies.digits.measures import COLUMNS, Results, spread, values

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
/* Phones: plots scroll inside their frame, and each row of a table of results becomes a list. */
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
    "scores": "Bar charts of the recall of hidden digits and of the share of exact sets, by method",
    "calibration": "Reliability curves of all methods",
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
        findings: The sentences of each condition.
        limits: The limits of the demo.
        meanings: A description of each method, by name.
        plots: The PNG files to put in.
        examples: A few test images of the uniform condition.
        answers: The probabilities (images, 10) of each method for them.
    """
    parts = [
        "<h1>Learning k labels from one label per image</h1>",
        f"<p>{html.escape(setting)}</p>",
        "<h2>Test images</h2><p>The probability p that each method gives to each digit, from the networks of "
        "the first seed with uniformly named labels. Orange frames mark the digits in the image. A darker "
        "cell means a larger p.</p>",
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
        parts += [f"<h2>Label named: {condition}</h2>", _table(results, condition, meanings)]
        parts.append(
            "<ul>" + "".join(f"<li>{html.escape(said)}</li>" for said in findings[condition]) + "</ul>"
        )
    columns = "; ".join(f"<b>{html.escape(h)}</b>: {html.escape(m)}" for _, h, m, _ in COLUMNS)
    parts.append(f'<p class="small">Mean ± standard deviation over the seeds. {columns}.</p>')
    parts.append(
        "<h2>Methods</h2><ul>"
        + "".join(f"<li><b>{html.escape(n)}</b>: {html.escape(m)}</li>" for n, m in meanings.items())
        + f"</ul><h2>Limits</h2><p>{html.escape(limits)}</p>"
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
    ink = "#fff" if p > 0.85 else "#222"  # the color with more contrast
    kind = ' class="present"' if present else ""
    return f'<td{kind} style="background: rgba(0, 114, 178, {p:.3f}); color: {ink}">{p:.2f}</td>'


def _embedded(png: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(png).decode()}"
