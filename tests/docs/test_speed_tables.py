"""The numbers on the pages about sets and balanced routing match the CSV files."""

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
        r"On 256 rows of 1000 .* as long as (\d+) softmaxes for k = 5, and as long as (\d+) for k = 50",
        text,
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


def of_routing(router: str, name: str) -> list[float]:
    """Return a router's values in a column, from the second half of training."""
    found = [row for row in rows(RESULTS / "routing" / "routing.csv") if row["router"] == router]
    last = max(int(row["step"]) for row in found)
    return [float(row[name]) for row in found if int(row["step"]) > last / 2]


def final_losses(router: str) -> dict[str, float]:
    found = rows(RESULTS / "routing" / "routing.csv")
    last = max(found, key=lambda row: int(row["step"]))["step"]
    return {
        row["seed"]: float(row["validation_loss"])
        for row in found
        if row["router"] == router and row["step"] == last
    }


def test_the_routing_study():
    (table,) = (one for one in tables(RESULTS / "routing" / "README.md") if one.heads[0] == "router")
    found = rows(RESULTS / "routing" / "routing.csv")
    assert [line[0] for line in table.lines] == list(dict.fromkeys(row["router"] for row in found))
    for router, seeds, *cells in table.lines:
        losses = final_losses(router)
        times = [float(row["milliseconds"]) for row in found if row["router"] == router]
        assert seeds == str(len(losses)) == "3"
        assert cells == [
            f"{mean(losses.values()):.3f} ±{stdev(losses.values()):.3f}",
            f"{mean(of_routing(router, 'load')):.2f}",
            f"{max(of_routing(router, 'worst_load')):.2f}",
            f"{mean(of_routing(router, 'validation_load')):.2f}",
            f"{mean(times):.1f}",
        ]


def test_the_text_about_the_routing_study():
    page = (RESULTS / "routing" / "README.md").read_text(encoding="utf-8")
    text = " ".join(page.split())
    routers = list(dict.fromkeys(row["router"] for row in rows(RESULTS / "routing" / "routing.csv")))

    def load(router: str, name: str = "load") -> str:
        return f"{mean(of_routing(router, name)):.2f}"

    def worst(router: str) -> str:
        return f"{max(of_routing(router, 'worst_load')):.2f}"

    def differences(router: str) -> list[float]:
        """Return the final loss of each seed minus that without balancing, in ascending order."""
        without = final_losses("no balancing")
        return sorted(loss - without[seed] for seed, loss in final_losses(router).items())

    ours, hard, flat = (f"TopKRouter, T = {t}" for t in ("0.1", "0.01", "1"))
    others = [router for router in routers if not router.startswith("TopKRouter")]
    first, second = sorted(others, key=load)[:2]
    assert (first, second) == ("auxiliary loss, 1", "loss-free bias, 0.01")
    # The page recommends T = 0.1. Only T = 0.01 balances the load better.
    assert [router for router in routers if load(router) < load(ours)] == [hard]
    low, _, high = differences(ours)
    low_other, _, high_other = differences("auxiliary loss, 1")
    low_bias, _, high_bias = differences("loss-free bias, 0.01")
    inference = "validation_load"
    for sentence in (
        f"With T = 0.1, the busiest expert has {load(ours)} times its fair share on average and "
        f"{worst(ours)} times at worst. The best other method, the auxiliary loss with a "
        f"coefficient of 1, has {load(first)} on average and {worst(first)} at worst.",
        f"With T = 0.1, the loss is {low:.2f} to {high:.2f} higher than without balancing. It is "
        f"{low_bias:.2f} to {high_bias:.2f} higher with loss-free bias updates at a rate of 0.01, and "
        f"{low_other:.2f} to {high_other:.2f} higher with the auxiliary loss and a coefficient of 1.",
        f"With T = 0.01, the average load is {load(hard)}, but the loss is {differences(hard)[0]:.2f} to "
        f"{differences(hard)[2]:.2f} higher than without balancing.",
        f"the load of the busiest expert is {load(ours, inference)} with T = 0.1, compared with "
        f"{load(first, inference)} (auxiliary loss, 1), {load(second, inference)} (loss-free bias, 0.01) and "
        f"{load('auxiliary loss, 0.1', inference)} (auxiliary loss, 0.1). With T = 1 it is "
        f"{load(flat, inference)}.",
    ):
        assert sentence in text, sentence
    assert min(map(worst, others)) == worst(first)
    assert [difference < 0 for difference in differences("auxiliary loss, 0.1")] == [True, True, False]
    found = rows(RESULTS / "routing" / "routing.csv")
    times = {
        router: mean(float(row["milliseconds"]) for row in found if row["router"] == router)
        for router in routers
    }
    slow = times.pop(hard)
    assert f"{min(times.values()):.0f} to {max(times.values()):.0f} ms with every router except" in text
    assert 1.7 < slow / mean(times.values()) < 2.3
    assert all(difference < 0 for difference in differences(flat))
