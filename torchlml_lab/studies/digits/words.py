"""What the numbers say, in sentences: each is chosen by comparing measurements, none is known beforehand.

Two methods are compared seed by seed, since both saw the same images and batches in each. Only when one is
ahead in every seed is it called higher; the difference is always given as its mean and standard deviation.
"""

from torchlml_lab.studies.digits.measures import Results, spread, values

SCALED = "cross-entropy x k"


def sentences(results: Results, condition: str, k: int) -> list[str]:
    """The findings of one condition.

    Args:
        results: All measurements.
        condition: "uniform" or "skewed".
        k: How many digits an image shows.

    Returns:
        Whole sentences; every number in them is in `results`.
    """

    def average(method: str, measure: str) -> float:
        return spread(values(results, condition, method, measure))[0]

    collapsed = average("sigmoid likelihood", "count")
    softmax, lml = average("cross-entropy", "count"), average("LML", "count")
    return [
        f"Ranking the digits nobody named: {_compare(results, condition, 'LML', 'cross-entropy')}; "
        f"{_compare(results, condition, 'LML', 'sigmoid BCE')}; "
        f"{_compare(results, condition, 'LML', 'truncated entropy')}.",
        f"The sigmoid likelihood of the named label {_collapse(collapsed)}: it says p > 0.5 for "
        f"{collapsed:.1f} of 10 digits, where {k} are there, and recalls "
        f"{average('sigmoid likelihood', 'hidden_recall'):.2f} of the hidden ones "
        f"(ranking at random would recall {k / 10:.2f}).",
        f"What p means: of {k} digits in an image cross-entropy says p > 0.5 for {softmax:.2f} on average, "
        f"LML for {lml:.2f}; the set is exactly right in {average('cross-entropy', 'exact'):.0%} and "
        f"{average('LML', 'exact'):.0%} of the images.",
        f"Calibration: {_calibration(results, condition)}",
        f"Whoever knows k can also multiply the softmax by k: then the set is exactly right in "
        f"{average(SCALED, 'exact'):.0%} of the images, against {average('LML', 'exact'):.0%} for LML "
        f"({_verdict(results, condition, 'exact', 'LML', SCALED)}), and the calibration error is "
        f"{average(SCALED, 'calibration_error'):.3f} against {average('LML', 'calibration_error'):.3f} "
        f"({_verdict(results, condition, 'calibration_error', 'LML', SCALED)}).",
    ]


def limits(seeds: int, k: int) -> str:
    """What the demo did not show."""
    return (
        f"What this does not show: these are small images and one small network, {seeds} seeds, one "
        f"setting of the optimizer for every loss that was not tuned for any, and every image shows exactly "
        f"k = {k} digits, which LML and truncated entropy were told. What it costs when k is wrong or the "
        "number of labels varies, `torchlml which-k` measures."
    )


def _compare(results: Results, condition: str, first: str, second: str) -> str:
    measure = "hidden_recall"
    one, other = (spread(values(results, condition, name, measure))[0] for name in (first, second))
    verdict = _verdict(results, condition, measure, first, second)
    return f"{first} recalls {one:.3f}, {second} {other:.3f} ({verdict})"


def _verdict(results: Results, condition: str, measure: str, first: str, second: str) -> str:
    pairs = zip(
        values(results, condition, first, measure), values(results, condition, second, measure), strict=True
    )
    differences = [one - other for one, other in pairs]
    middle, deviation = spread(differences)
    by = f"by {abs(middle):.3f} ± {deviation:.3f}"
    if all(difference > 0 for difference in differences):
        return f"{first} is higher in every seed, {by}"
    if all(difference < 0 for difference in differences):
        return f"{first} is lower in every seed, {by}"
    return f"no consistent difference: {middle:+.3f} ± {deviation:.3f}"


def _collapse(count: float) -> str:
    return "collapses, as the paper says it must" if count > 9.5 else "does not collapse here"


def _calibration(results: Results, condition: str) -> str:
    methods = [name for where, name in results if where == condition and name != SCALED]
    errors = {name: spread(values(results, condition, name, "calibration_error"))[0] for name in methods}
    order = sorted(errors, key=lambda name: errors[name])
    ranked = ", ".join(f"{name} {errors[name]:.3f}" for name in order)
    best, second = order[0], order[1]
    verdict = _verdict(results, condition, "calibration_error", best, second)
    return f"the mean distance between p and the truth is {ranked}; of the two smallest, {verdict}."
