"""The tables on the Benchmarks page match the CSV files, and every picture was drawn from current data."""

from __future__ import annotations

import hashlib
import json
import re
import struct
from collections.abc import Callable
from pathlib import Path
from statistics import median

import pytest

from tests.docs.test_results_tables import Row, Table, of_section, rows, tables
from torchlml_lab import plots
from torchlml_lab.bench import measurements, speed_report

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "results"
PAGE = ROOT / "docs" / "benchmarks.md"
FILES = [RESULTS / f"{name}.csv" for name in ("benchmarks", "plain-torch", "short-rows")]

PICTURES = sorted(RESULTS.rglob("*.png"))


def texts(png: Path) -> dict[str, str]:
    """Return the text chunks of a PNG file."""
    data, found, place = png.read_bytes(), {}, 8
    while place < len(data):
        (length,) = struct.unpack(">I", data[place : place + 4])
        kind, body = data[place + 4 : place + 8], data[place + 8 : place + 8 + length]
        if kind == b"tEXt":
            name, _, text = body.partition(b"\0")
            found[name.decode("latin-1")] = text.decode("latin-1")
        place += length + 12
    return found


@pytest.mark.parametrize("picture", PICTURES, ids=lambda path: path.relative_to(RESULTS).as_posix())
def test_a_picture_is_not_older_than_its_data(picture: Path) -> None:
    sources = [source.split(" ") for source in texts(picture).get("Source", "").split(", ")]
    assert sources != [[""]], "the picture does not record its source files, so it must be redrawn"
    for name, digest in sources:
        assert hashlib.sha256((picture.parent / name).read_bytes()).hexdigest() == digest, name


def test_the_pictures_on_this_page_name_all_their_data() -> None:
    names = {"benchmarks.png": [file.name for file in FILES], "bandwidth.png": ["benchmarks.csv"]}
    names["alternatives.png"] = ["alternatives.csv"]
    for picture, files in names.items():
        found = texts(RESULTS / picture)["Source"].split(", ")
        assert [source.split(" ")[0] for source in found] == files


@pytest.mark.parametrize("kind", ["png", "svg"])
def test_a_picture_names_its_data(tmp_path: Path, kind: str) -> None:
    source, picture = tmp_path / "a.csv", tmp_path / f"a.{kind}"
    source.write_text("x\n1\n")
    with plots.new_figure(picture, 2, 2, [source]):
        pass
    digest = f"a.csv {hashlib.sha256(source.read_bytes()).hexdigest()}"
    assert digest in (texts(picture)["Source"] if kind == "png" else picture.read_text(encoding="utf-8"))


def of_page(page: Path, heading: str) -> str:
    """Return the text under a heading."""
    return page.read_text(encoding="utf-8").partition(f"{heading}\n")[2].partition("\n#")[0]


def everything() -> list[Row]:
    """Return the last row for each measurement in the CSV files."""
    found = [row for path in FILES for row in rows(path)]
    names = ("operator", "provider", "mode", "metric", "n", "k", "batch", "scale", "dtype", "threads")
    return list({tuple(row[name] for name in names): row for row in found}.values())


ROWS = everything()


def matching(**wanted: str | tuple[str, ...]) -> list[Row]:
    """Return all measurements that match `wanted`."""
    listed = {name: (value,) if isinstance(value, str) else value for name, value in wanted.items()}
    found = [row for row in ROWS if all(row[name] in values for name, values in listed.items())]
    assert found, wanted
    return found


def ratios(**wanted: str | tuple[str, ...]) -> list[float]:
    """Return the median ratios of all measurements that match `wanted`."""
    return [float(row["ratio_p50"]) for row in matching(**wanted)]


def shape(text: str) -> tuple[str, str]:
    """Return the number of rows and the row length from a cell such as `256 × 1,000`."""
    batch, n = text.replace(",", "").split("\u00a0×\u00a0")
    return batch, n


def digits(ratio: float) -> str:
    return f"{ratio:.2f}" if ratio < 10 else f"{ratio:.1f}" if ratio < 100 else f"{ratio:,.0f}"


def spread(row: Row, name: str = "ratio_p") -> float:
    """Return the 80th percentile divided by the 20th. A measurement with a value above 2 is unreliable."""
    return float(row[f"{name}80"]) / float(row[f"{name}20"])


def shown(row: Row, show: Callable[[float], str] = digits, name: str = "ratio_p", unit: float = 1) -> str:
    """Return the cell for a measurement: the median, followed by a range if it is unreliable."""
    low, middle, high = (show(float(row[f"{name}{percentile}"]) / unit) for percentile in (20, 50, 80))
    return f"{middle} ({low}–{high})" if spread(row, name) > 2 else middle


LINES: dict[str, dict[str, str | tuple[str, ...]]] = {
    "forward, n = 1000, scale 1 and 3": {"n": "1000", "mode": "forward", "scale": ("1", "3")},
    "forward, n = 1000, scale 12": {"n": "1000", "mode": "forward", "scale": "12"},
    "forward, n = 10,000": {"n": "10000", "mode": "forward"},
    "forward, 4 × 1,000,000": {"n": "1000000", "mode": "forward"},
    "forward + backward, n = 1000, one thread": {"n": "1000", "mode": "forward+backward", "threads": "1"},
    "forward + backward, n = 1000, two threads": {"n": "1000", "mode": "forward+backward", "threads": "2"},
    "forward + backward, n = 10,000": {"n": "10000", "mode": "forward+backward"},
    "forward + backward, 4 × 1,000,000": {"n": "1000000", "mode": "forward+backward"},
    "bfloat16, forward, n = 1000": {"n": "1000", "mode": "forward", "dtype": "bfloat16"},
    "bfloat16, forward, n = 10,000": {"n": "10000", "mode": "forward", "dtype": "bfloat16"},
    "memory, forward + backward": {"mode": "forward+backward", "metric": "memory"},
}


def check_targets(table: Table, provider: str, lines: dict[str, dict[str, str | tuple[str, ...]]]) -> None:
    assert [line[0] for line in table.lines] == list(lines)
    for says, target, measured, met in table.lines:
        covered = matching(
            **{
                "operator": "projection",
                "provider": provider,
                "metric": "time",
                "dtype": "float32",
                **lines[says],
            }
        )
        found = [float(row["ratio_p50"]) for row in covered]
        ends = dict.fromkeys(digits(end) for end in (min(found), max(found)))
        assert measured == "–".join(ends), says
        above = sum(ratio > float(target) for ratio in found)
        unreliable = sum(spread(row) > 2 for row in covered)
        expected = "yes"
        if above:
            exceed = "exceeds" if above == 1 else "exceed"
            expected = f"no ({above} of {len(found)} configurations {exceed} the target)"
        elif unreliable:
            expected = f"unreliable ({unreliable} of {len(found)} configurations)"
        assert met == expected, says


def test_the_targets_of_the_compiled_kernel() -> None:
    check_targets(of_section(PAGE, "Targets")[0], "lml-native", LINES)


def test_the_targets_of_pure_pytorch() -> None:
    names = ["forward, n = 1000", "forward, n = 10,000"]
    names += ["forward + backward, n = 1000", "forward + backward, n = 10,000"]
    lines = {
        name: {"n": "10000" if "10," in name else "1000", "mode": name.split(",")[0].replace(" ", "")}
        for name in names
    }
    check_targets(of_section(PAGE, "Targets")[1], "lml-torch", lines)  # type: ignore[arg-type]


def test_time_against_row_length() -> None:
    (table,) = of_section(PAGE, "Time versus row length")
    same = {
        "operator": "projection",
        "metric": "time",
        "k": "5",
        "scale": "3",
        "dtype": "float32",
        "threads": "1",
    }
    measured = {row["n"] for row in ROWS if row["provider"] == "lml-native" and same.items() <= row.items()}
    assert len(table.lines) == len(measured) >= 8
    for rows_and_n, softmax, *cells in table.lines:
        _, n = shape(rows_and_n)
        (base,) = (
            row
            for row in ROWS
            if {**same, "n": n, "provider": "softmax", "mode": "forward"}.items() <= row.items()
        )
        assert softmax == shown(base, "{:,.0f}".format, "p")
        expected = [
            shown(*matching(**same, n=n, provider=provider, mode=mode))
            for provider in ("lml-native", "lml-torch")
            for mode in ("forward", "forward+backward")
        ]
        assert cells == expected


def long_rows() -> dict[str, list[Row]]:
    """Return all times of the compiled `lml` relative to softmax for n >= 1000, by instruction set."""
    measured = [row for row in ROWS if row["operator"] in ("projection", "family")]
    measured += [row for row in rows(RESULTS / "short-rows.csv") if row["operator"].endswith("lml / softmax")]
    measured += rows(RESULTS / "alternatives.csv")
    found: dict[str, list[Row]] = {"AVX-512": [], "AVX2": []}
    for row in measured:
        if row["provider"] in ("lml-native", "lml") and row["metric"] == "time" and int(row["n"]) >= 1000:
            kernel = json.loads(row["config"])["kernel"].removeprefix("C++ (").removesuffix(")")
            found[kernel].append(row)
    assert {len({row["n"] for row in each}) for each in found.values()} == {6, 3}
    assert len(found["AVX-512"]) > 250
    return found


def test_the_summary() -> None:
    text = " ".join(PAGE.read_text(encoding="utf-8").partition("\n## ")[0].split())
    long = long_rows()
    (forward, both) = (
        f"{digits(min(found))}–{digits(max(found))}"
        for mode in ("forward", "forward+backward")
        for found in [[float(row["ratio_p50"]) for row in long["AVX-512"] if row["mode"] == mode]]
    )
    largest = max(float(row["ratio_p50"]) for row in long["AVX2"])
    assert max(float(row["ratio_p50"]) for found in long.values() for row in found) == largest < 2
    assert f"the forward pass takes {forward} times as long as softmax" in text
    assert f"forward + backward takes {both} times." in text
    assert f"With AVX2, the largest ratio is {digits(largest)}." in text
    readme = (ROOT / "README.md").read_text(encoding="utf-8").replace("\n  ", " ")
    for claim in (
        f"takes {forward} times as long as softmax in the forward pass and {both} times with the backward",
        f"With AVX2, it takes up to {digits(largest)} times as long.",
    ):
        assert claim in readme
    wide, narrow = (
        [ratio for problem, ratio in short_rows(kernel).items() if problem[0] == "lml / softmax"]
        for kernel in ("AVX-512", "AVX2")
    )
    assert f"take {min(wide):.1f}–{max(wide):.1f} times as long as softmax with AVX-512" in text
    assert f"and {min(narrow):.1f}–{max(narrow):.1f} times with AVX2" in text


def test_share_of_the_bandwidth() -> None:
    (table,) = of_section(PAGE, "Share of memory bandwidth")
    assert len(table.lines) >= 6

    def values(column: str, provider: str, n: str, threads: str) -> dict[tuple[str, str], float]:
        """Return the values in a column, keyed by (k, scale)."""
        wanted = {"operator": "projection", "metric": "time", "mode": "forward", "dtype": "float32"}
        wanted |= {"provider": provider, "n": n, "threads": threads}
        return {(row["k"], row["scale"]): float(row[column]) for row in ROWS if wanted.items() <= row.items()}

    for threads, rows_and_n, speed, *reached in table.lines:
        batch, n = shape(rows_and_n)
        middle = median(values("p50", "copy", n, threads).values())
        assert speed == f"{8 * int(batch) * int(n) / middle / 1000:.1f}"
        copy = values("ratio_p50", "copy", n, threads)
        for name, cell in zip(("softmax", "lml-native"), reached, strict=True):
            found = values("ratio_p50", name, n, threads)
            assert cell == f"{100 * median(time / found[problem] for problem, time in copy.items()):.0f}%"


Problem = tuple[str, str, str, str, str, str]


def short_rows(kernel: str, dtype: str = "float32", threads: str = "1") -> dict[Problem, float]:
    """Return the ratios measured by `torchlml bench short`, keyed by name, mode, batch, n, k and scale."""
    measured = short_measurements(kernel, dtype, threads)
    return {problem: float(row["ratio_p50"]) for problem, row in measured.items()}


def short_measurements(kernel: str, dtype: str = "float32", threads: str = "1") -> dict[Problem, Row]:
    found = {}
    for row in rows(RESULTS / "short-rows.csv"):
        of = (json.loads(row["config"])["kernel"], row["dtype"], row["threads"])
        if of == (f"C++ ({kernel})", dtype, threads):
            operator = row["operator"].removeprefix("short rows, ")
            problem = (operator, row["mode"], row["batch"], row["n"], row["k"], row["scale"])
            found[problem] = row  # overwrites the baseline, whose row comes first
    assert len(found) == 22 * 3
    return found


def test_short_rows() -> None:
    (table,) = of_section(PAGE, "Short rows")
    assert len(table.lines) == 22
    for ratio, rows_and_n, k, mode, *cells, target, met in table.lines:
        batch, n = shape(rows_and_n)
        of = {
            kernel: [
                short_measurements(kernel)[ratio, mode.replace(" ", ""), batch, n, k, scale]
                for scale in ("1", "3", "12")
            ]
            for kernel in ("AVX-512", "AVX2")
        }
        assert cells == [shown(row, "{:.2f}".format) for measured in of.values() for row in measured]
        within = {
            kernel: measured
            for kernel, measured in of.items()
            if max(float(row["ratio_p50"]) for row in measured) <= float(target)
        }
        good = [kernel for kernel, measured in within.items() if max(map(spread, measured)) <= 2]
        otherwise = "unreliable" if within else "no"
        assert met == ("yes" if len(good) == 2 else good[0] if good else otherwise)


def test_the_text_about_short_rows() -> None:
    text = " ".join(of_page(PAGE, "## Short rows").split())
    (table,) = of_section(PAGE, "Short rows")
    missed = {
        (ratio, shape(rows_and_n)[1], mode)
        for ratio, rows_and_n, _, mode, one, three, *_, target, _ in table.lines
        if max(float(cell.split(" ")[0]) for cell in (one, three)) > float(target) or "(" in one + three
    }
    both = "forward + backward"
    assert missed == {
        ("lml / softmax", "128", both),
        ("lml / softmax", "256", both),
        ("lml_loss / cross_entropy", "64", both),
        ("lml_loss / cross_entropy", "128", both),
    }
    losses = [line for line in table.lines if line[0] == "lml_loss / cross_entropy"]
    assert [("(" in "".join(line[4:7]), line[-1]) for line in losses] == [(False, "no"), (True, "unreliable")]
    assert sum("(" in cell for cell in losses[1]) == 3
    wanted = {"provider": "cross_entropy", "n": "128", "dtype": "float32", "threads": "1"}
    by_kernel: dict[str, list[float]] = {}
    for row in rows(RESULTS / "short-rows.csv"):
        if wanted.items() <= row.items():
            by_kernel.setdefault(row["config"], []).append(float(row["p50"]))
    assert [len(times) for times in by_kernel.values()] == [3, 3]
    factor = max(max(times) / min(times) for times in by_kernel.values())
    assert f"logits differ by a factor of up to {factor:.1f} between scales with one thread" in text

    def changes(kernel: str, dtype: str, threads: str) -> dict[Problem, float]:
        """Return the lml / softmax ratios, divided by those for float32 and one thread."""
        plain, other = short_rows(kernel), short_rows(kernel, dtype, threads)
        return {key: other[key] / plain[key] for key in plain if key[0] == "lml / softmax"}

    for dtype, threads, one, other in (
        ("float32", "2", "two threads", "one thread"),
        ("bfloat16", "1", "bfloat16", "float32"),
    ):
        wide, narrow = (median(changes(kernel, dtype, threads).values()) for kernel in ("AVX-512", "AVX2"))
        assert (
            f"With AVX-512, the median ratio for {one} is {wide:.2f} times that for {other}; "
            f"with AVX2, it is {narrow:.2f} times."
        ) in text
    above: dict[str, float] = {}
    for kernel in ("AVX-512", "AVX2"):
        for key, change in changes(kernel, "bfloat16", "1").items():
            if change > 1.205:
                above[key[3]] = max(change, above.get(key[3], 0))
    assert set(above) == {"8", "1000"}
    assert (
        f"rows of 8 entries (up to {above['8']:.1f}) and of 1000 entries (up to {above['1000']:.1f})" in text
    )


def test_losses() -> None:
    (table,) = of_section(PAGE, "Losses")
    assert len(table.lines) == len(
        {
            row["provider"] + row["n"] + row["k"]
            for row in ROWS
            if "loss" in row["operator"] and "short" not in row["operator"]
        }
    )
    verdicts: dict[tuple[str, str, str], str] = {}
    for name, rows_and_n, k, *cells, target, met in table.lines:
        _, n = shape(rows_and_n)
        operator = "ragged loss" if "," in name else "loss"
        measured = [
            *matching(operator=operator, provider=name, n=n, k=k, threads="1"),
            *matching(operator=operator, provider=name, n=n, k=k, threads="2"),
        ]
        assert cells == [
            cell for row in measured for cell in (shown(row, "{:.3g}".format, "p", 1e3), shown(row))
        ]
        if target:
            assert max(float(row["ratio_p50"]) for row in measured) <= float(target)
            assert met == ("unreliable" if max(map(spread, measured)) > 2 else "yes")
            verdicts[name, n, k] = met
        else:
            assert met == ""
    assert [key for key, met in verdicts.items() if met == "unreliable"] == [
        ("lml_loss", "1000", "5"),
        ("lml_loss", "10000", "5"),
        ("lml_loss", "10000", "100"),
    ]
    same = {"operator": "loss", "provider": "cross_entropy", "n": "1000", "threads": "1"}
    few, many = (float(matching(**same, k=k)[0]["p50"]) for k in ("5", "100"))
    text = " ".join(of_page(PAGE, "## Losses").split())
    assert f"their times differ by a factor of {few / many:.1f}" in text
    (first, *others) = matching(**(same | {"provider": tuple({row["provider"] for row in ROWS})}), k="5")
    assert first["provider"] == "cross_entropy"
    assert min(map(spread, others)) > 2


def test_related_operators() -> None:
    (table,) = of_section(ROOT / "docs" / "choosing-a-relaxation.md", "Cost")
    names = {shown: name for name, shown in speed_report.RELATED.items()}
    assert [line[0] for line in table.lines] == list(names)
    for shown, *cells in table.lines:
        expected = []
        for n in ("1000", "10000"):
            for mode in ("forward", "forward+backward"):
                found = ratios(operator="family", provider=names[shown], metric="time", n=n, mode=mode)
                expected.append("–".join(f"{end:.{int(end < 10)}f}" for end in (min(found), max(found))))
        assert cells == expected, shown


def test_related_operators_above_the_target() -> None:
    text = of_page(RESULTS / "README.md", "### Related operators")
    found = {
        name: max(ratios(operator="family", provider=name, metric="time"))
        for name in speed_report.RELATED
        if name != "sort"
    }
    above = {name.replace("-", "_"): ratio for name, ratio in found.items() if ratio > 4}
    named = {name: float(ratio) for name, ratio in re.findall(r"`(\w+)` \(up to ([\d.]+)\)", text)}
    assert named == {name: pytest.approx(ratio, rel=0.05) for name, ratio in above.items()}


def test_alternatives() -> None:
    (table,) = of_section(PAGE, "Alternatives")
    there = [
        one
        for one in tables(ROOT / "docs" / "alternatives.md")
        if one.heads[1] == "forward" and one.lines[0][1:3] == ["1.00", "1.00"]
    ]
    # tests/lab/test_bench_alternatives.py compares docs/alternatives.md with the CSV. The Benchmarks page
    # repeats the second table of times in docs/alternatives.md, which is for n = 1000.
    assert table == there[1]._replace(section=table.section)
    measured = rows(RESULTS / "alternatives.csv")
    row = next(row for row in measured if row["n"] == "1000")
    assert (row["batch"], row["k"], row["threads"]) == ("64", "5", "1")
    # The summary states that only softmax multiplied by k has a forward pass about as fast as that of LML.
    for n in ("1000", "10000"):
        wanted = {"metric": "time", "mode": "forward", "n": n}
        times = {
            row["provider"]: float(row["ratio_p50"]) for row in measured if wanted.items() <= row.items()
        }
        near = {name for name, ratio in times.items() if ratio < 2 * times["lml-native"]}
        assert near == {"softmax", "lml-native", "softmax-times-k"}


def test_the_page_has_all_tables_of_the_command() -> None:
    found = speed_report.tables([row for path in FILES for row in measurements.read(path, "--csv")])
    page = PAGE.read_text(encoding="utf-8")
    assert list(found) == [
        "against n", "bandwidth", "projection", "pure PyTorch", "losses", "short rows", "related",
    ]  # fmt: skip
    assert (RESULTS / "benchmarks.md").read_text(encoding="utf-8") == "\n\n".join(found.values()) + "\n"
    for name, text in found.items():
        if name != "related":
            assert f"<!-- {name} -->\n\n{text.partition(chr(10) * 2)[2]}\n" in page, name
