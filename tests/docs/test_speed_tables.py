"""The tables on the pages about sets and balanced routing: every number matches its CSV."""

from __future__ import annotations

import re
from pathlib import Path
from statistics import mean, stdev

from tests.docs.test_results_tables import RESULTS, Row, rows, tables

DOCS = Path(__file__).parents[2] / "docs"


def only(found: list[Row]) -> Row | None:
    assert len(found) <= 1
    return found[0] if found else None


def p50(row: Row | None) -> float | None:
    return None if row is None else float(row["p50"])


def number(value: float | None) -> str:
    assert value is not None
    return f"{value:.3g}" if value < 1000 else f"{value:,.0f}"


def error(value: float | None) -> str:
    if value is None:
        return "–"
    return "< 1e-16" if value < 1e-16 else f"{value:.0e}"


def of_subsets(n: str, k: str, provider: str, metric: str, mode: str) -> float | None:
    wanted = {"n": n, "k": k, "provider": provider, "metric": metric, "mode": mode, "batch": "1"}
    found = [row for row in rows(RESULTS / "subsets.csv") if row | wanted == row]
    return p50(only(found))


def test_methods_for_the_normalizer():
    (table,) = (one for one in tables(DOCS / "sets.md") if one.heads[:3] == ["n", "k", "method"])
    shown = [line[:3] for line in table.lines]
    mode = "normalizer+inclusion"
    measured = [
        [f"{int(row['n']):,}", f"{int(row['k']):,}", row["provider"]]
        for row in rows(RESULTS / "subsets.csv")
        if row["mode"] == mode and row["metric"] == "time"
    ]
    assert sorted(shown) == sorted(measured)
    for n, k, name, *cells in table.lines:
        key = (n.replace(",", ""), k.replace(",", ""), name)
        memory = of_subsets(*key, "memory", mode)
        assert memory is not None
        assert cells == [
            number(of_subsets(*key, "time", mode)),
            f"{memory:.1f}",
            error(of_subsets(*key, "error of log Z", mode)),
            error(of_subsets(*key, "error of inclusion", mode)),
        ]


def test_methods_for_samples():
    (table,) = (one for one in tables(DOCS / "sets.md") if one.heads[:3] == ["n", "k", "KSubset"])
    assert len(table.lines) == 8
    methods = [f"{name}, one sample" for name in ("KSubset", "Gumbel top-k", "sample_subset")]
    for n, k, *cells in table.lines:
        key = (n.replace(",", ""), k.replace(",", ""))
        times = [number(of_subsets(*key, name, "time", "sample")) for name in methods]
        errors = [error(of_subsets(*key, name, "error of inclusion", "sample")) for name in methods[1:]]
        assert cells == times + errors


def test_numbers_in_the_text_about_sets():
    text = " ".join((DOCS / "sets.md").read_text(encoding="utf-8").split())
    million = [of_subsets("1000000", k, "KSubset", "time", "log_prob+mean") for k in ("10", "1000", "100000")]
    seconds = [
        f"{(value or 0) / 1e3:.1g}" if (value or 0) < 105 else f"{(value or 0) / 1e3:.2f}"
        for value in million
    ]
    assert (
        f"take {seconds[0]} s for k = 10, {seconds[1]} s for k = 1000 and {seconds[2]} s for k = 100,000"
        in text
    )
    samples = of_subsets("1000", "50", "KSubset", "time", "1000 samples")
    assert f"out of 1000 entries takes {(samples or 0) / 1e3:.2f} s" in text
    softmaxes = [
        f"{float(row['ratio_p50']):.0f}"
        for row in rows(RESULTS / "subsets.csv")
        if row["mode"] == "log_prob+backward"
    ]
    found = re.search(
        r"the time of (\d+) softmaxes on 256 rows of 1000 entries with k = 5, and of (\d+) with k = 50", text
    )
    assert found is not None
    assert list(found.groups()) == softmaxes


def test_speed_of_balanced_lml():
    (table,) = (one for one in tables(DOCS / "balanced.md") if one.heads[0] == "tokens × experts, k")
    calls = {
        "cold": ("forward", "cold start"),
        "warm": ("forward", "warm start"),
        "backward": ("backward", "balanced_lml"),
    }
    measured = rows(RESULTS / "balanced.csv")
    problems = {(row["batch"], row["n"], row["k"], row["scale"]) for row in measured}
    assert len(table.lines) == len(problems) == 8
    for problem, skew, *cells in table.lines:
        sizes = re.fullmatch(r"([\d,]+) × (\d+), (\d+)", problem)
        assert sizes is not None
        tokens, experts, k = (part.replace(",", "") for part in sizes.groups())
        assert (tokens, experts, k, skew) in problems
        for head, cell in zip(table.heads[2:], cells, strict=True):
            call, kernel = head.split(", ")
            wanted = {"batch": tokens, "n": experts, "k": k, "scale": skew}
            wanted |= dict(zip(("mode", "provider"), calls[call], strict=True))
            row = only([row for row in measured if row | wanted == row and f"({kernel})" in row["config"]])
            assert row is not None
            assert cell == f"{float(row['ratio_p50']):.1f}"


def test_the_routing_study():
    (table,) = (one for one in tables(RESULTS / "routing" / "README.md") if one.heads[0] == "router")
    found = rows(RESULTS / "routing" / "routing.csv")
    assert [line[0] for line in table.lines] == list(dict.fromkeys(row["router"] for row in found))
    last = max(int(row["step"]) for row in found)
    for router, seeds, *cells in table.lines:
        own = [row for row in found if row["router"] == router]
        losses = [float(row["validation_loss"]) for row in own if int(row["step"]) == last]
        late = [row for row in own if int(row["step"]) > last / 2]
        assert seeds == str(len(losses))
        assert cells == [
            f"{mean(losses):.3f} ±{stdev(losses):.3f}",
            f"{mean(float(row['load']) for row in late):.2f}",
            f"{max(float(row['worst_load']) for row in late):.2f}",
            f"{mean(float(row['validation_load']) for row in late):.2f}",
            f"{mean(float(row['milliseconds']) for row in own):.1f}",
        ]
