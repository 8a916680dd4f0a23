"""The playground in a browser: its numbers are the library's, and people reach all of it."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import torchlml

PLAYGROUND = Path(__file__).parents[2] / "docs" / "playground" / "index.html"
TOLERANCE = 1e-6


@pytest.fixture(scope="module")
def page(browser: Any) -> Iterator[Any]:
    """The page on a desktop, without motion, failing on anything that it fetches or complains about."""
    page = browser.new_page(viewport={"width": 1366, "height": 860}, reduced_motion="reduce")
    trouble: list[str] = []
    page.on("pageerror", lambda error: trouble.append(str(error)))
    page.on("console", lambda message: trouble.append(message.text) if message.type == "error" else None)
    page.on("request", lambda request: trouble.append(request.url) if "http" in request.url[:4] else None)
    page.goto(PLAYGROUND.as_uri())
    yield page
    page.close()
    assert trouble == []


def show(page: Any, entry: int = 0, **state: Any) -> dict[str, Any]:
    """Set the page to a state and a selected entry, and read all its numbers."""
    return page.evaluate(
        "([state, entry]) => { playground.set(state, entry); return playground.read(); }", [state, entry]
    )


def layers(k: float, bound: Any) -> dict[str, Callable[[Tensor], Tensor]]:
    """What the page shows, by the library and by torch."""
    return {
        "lml": lambda x: torchlml.lml(x, k, bound=bound),
        "sigmoid": torch.sigmoid,
        "softmax": lambda x: k * torch.softmax(x, -1),
        "csoftmax": lambda x: torchlml.constrained_softmax(x, k),
        "csparsemax": lambda x: torchlml.constrained_sparsemax(x, k),
    }


def check(shown: dict[str, Any], gradients: bool = True) -> None:
    """Compare everything on the page with the library, in float64."""
    state = shown["state"]
    x = torch.tensor(shown["x"], dtype=torch.float64, requires_grad=True)
    for name, layer in layers(state["k"], state["bound"]).items():
        y = layer(x)
        expected = [y.tolist(), torch.autograd.grad(y[shown["selected"]], x)[0].tolist()]
        found = [shown["y"][name], shown["gradients"][name]]
        for what, right, there in zip(("y", "gradient"), expected, found, strict=True):
            if what == "y" or gradients:
                assert there == pytest.approx(right, abs=TOLERANCE, rel=0), (name, what, state)
    nu = torchlml.lml_dual(x, state["k"], bound=state["bound"]).item()
    there = shown["nu"]
    assert there is not None
    assert there == pytest.approx(nu, abs=TOLERANCE, rel=TOLERANCE), state


def settings() -> list[dict[str, Any]]:
    """Random logits with every kind of k, temperature, gap and bound."""
    generator = torch.Generator().manual_seed(0)
    ks = (0.05, 0.7, 1, 2.5, 3, 5, 7.3, 9, 9.95)
    kinds = itertools.product(ks, (0.05, 0.3, 1, 10), ("exactly", "at_most", "at_least"))
    found = []
    for i, (k, temperature, bound) in enumerate(kinds):
        scale = (0.3, 2.0, 5.0)[i % 3]
        # Steps of a hundredth, as the page holds them, and far from a corner of sparsemax.
        logits = (scale * torch.randn(10, generator=generator, dtype=torch.float64)).clamp(-6, 6)
        gap = (0, 0.5, 3, 8)[i % 4]
        found.append(
            {
                "logits": logits.mul(100).round().div(100).tolist(),
                "k": k,
                "temperature": temperature,
                "gap": gap,
                "bound": bound,
                "entry": i % 10,
            }
        )
    return found


def test_a_hundred_settings_give_the_numbers_of_the_library(page: Any) -> None:
    assert len(settings()) > 100
    for each in settings():
        check(show(page, **each))


@pytest.mark.parametrize("k", [0, 1, 2.5, 5, 9, 10])
@pytest.mark.parametrize(
    "logits",
    [[0.0] * 10, [6.0] * 5 + [-6.0] * 5, [float(i % 2) for i in range(10)], [6.0] + [-6.0] * 9],
    ids=["equal", "two heights", "ties one apart", "an outlier"],
)
def test_ties_and_ends_give_the_numbers_of_the_library(page: Any, logits: list[float], k: float) -> None:
    for temperature in (0.05, 1):
        shown = show(page, logits=logits, k=k, temperature=temperature, gap=0, bound="exactly")
        # Ties that stand exactly on a corner of the constrained layers have no derivative there.
        check(shown, gradients=logits[1] != 1.0)


def test_a_gap_raises_the_k_largest(page: Any) -> None:
    logits = [3.0, 2.0, 1.0, 0.0, -1.0, -2.0, -3.0, 2.5, 2.0, -4.0]
    shown = show(page, logits=logits, k=3, temperature=0.5, gap=2, bound="exactly")
    raised = [5.0, 4.0, 1.0, 0.0, -1.0, -2.0, -3.0, 4.5, 2.0, -4.0]  # of the two 2.0, the left one
    assert shown["x"] == pytest.approx([2 * each for each in raised])


def test_the_code_on_the_page_gives_the_numbers_on_the_page(page: Any) -> None:
    for each in settings()[::9]:
        shown = show(page, **each)
        names: dict[str, Any] = {}
        exec(compile(page.inner_text("#code"), "playground", "exec"), names)
        for variable, layer in (
            ("y", "lml"),
            ("softmax", "softmax"),
            ("capped", "csoftmax"),
            ("sparse", "csparsemax"),
        ):
            assert shown["y"][layer] == pytest.approx(names[variable].tolist(), abs=TOLERANCE), each
        assert shown["nu"] == pytest.approx(names["nu"].item(), abs=TOLERANCE, rel=TOLERANCE)


def test_what_is_drawn_and_written_is_what_was_computed(page: Any) -> None:
    shown = show(page, entry=3, **{key: value for key, value in settings()[28].items() if key != "entry"})
    for name, values in shown["y"].items():
        cells = page.eval_on_selector_all(
            f'[data-column="{name}"]', "all => all.map(each => Number(each.dataset.value))"
        )
        assert cells == values
        sums = page.inner_text(f'[data-layer="{name}"] .sum')
        assert sums == f"sum {sum(values):.2f}"
        note = page.inner_text(f"#note-{name}")
        assert f"y = {values[3]:.4f}" in note
    bars = page.evaluate("cards.lml.entries.map(each => Number(each.bar.getAttribute('height')))")
    full = page.evaluate("CARD.zero - CARD.one")
    assert bars == pytest.approx([full * y for y in shown["y"]["lml"]], abs=1e-9)


def test_a_bar_can_be_dragged_and_the_others_stay(page: Any) -> None:
    before = show(page, logits=[0.0] * 10, k=3, temperature=1, gap=0, bound="exactly")
    box = page.locator("#logits").bounding_box()
    column = box["x"] + box["width"] * 0.45
    page.mouse.move(column, box["y"] + box["height"] * 0.5)
    page.mouse.down()
    page.mouse.move(column, box["y"] + box["height"] * 0.2, steps=4)
    page.mouse.up()
    after = page.evaluate("playground.read()")
    assert after["selected"] == 4
    assert after["state"]["logits"][4] > 4
    assert after["y"]["lml"][4] > before["y"]["lml"][4] + 0.3
    assert after["state"]["logits"][:4] + after["state"]["logits"][5:] == [0.0] * 9
    check(after)


def test_everything_works_from_the_keyboard(page: Any) -> None:
    show(page, logits=[0.0] * 10, k=3, temperature=1, gap=0, bound="exactly")
    page.focus("#theme")
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.getAttribute('aria-label')") == "logit a"
    for key in ("ArrowUp", "ArrowRight", "ArrowRight", "PageUp", "ArrowDown", "ArrowLeft", "End"):
        page.keyboard.press(key)
    page.wait_for_function("document.activeElement.getAttribute('aria-valuenow') === '6'")
    assert page.evaluate("playground.read().state.logits") == [0.1, 6, 0.9, 0, 0, 0, 0, 0, 0, 0]
    for key in ("Tab", "ArrowRight", "Tab", "ArrowLeft", "Tab", "ArrowRight", "Tab", "ArrowRight"):
        page.keyboard.press(key)
    state = page.evaluate("playground.read().state")
    assert (state["k"], state["gap"], state["bound"]) == (3.1, 0.1, "at_most")
    assert 0.9 < state["temperature"] < 1
    page.keyboard.press("Tab")  # the things to try
    page.keyboard.press("Tab")
    page.keyboard.press("Enter")
    page.wait_for_function("playground.read().state.logits[0] === 5.5")
    assert "hatched" in page.inner_text("#look")
    check(page.evaluate("playground.read()"))


def test_the_entry_under_the_mouse_shows_its_gradient(page: Any) -> None:
    show(page, logits=settings()[1]["logits"], k=3, temperature=1, gap=0, bound="exactly")
    for entry in (7, 2):
        page.locator(f'[data-layer="csoftmax"] [data-entry="{entry}"]').hover()
        page.wait_for_function(f"playground.read().selected === {entry}")
        check(page.evaluate("playground.read()"))


def test_a_link_brings_back_a_setting_and_bad_ones_are_ignored(browser: Any) -> None:
    for address, expected in (
        ("x=1,2,3,4,5,-1,-2,-3,-4,-5&k=2.5&t=0.5&gap=1&bound=at_least", [2.5, 0.5, 1, "at_least", 1]),
        ("x=1,2&k=cat&t=&gap=-3&bound=never", [3, 1, 0, "exactly", 2.9]),
        ("x=99,a,,4,5,6,7,8,9,10&k=99&t=1e9", [10, 10, 0, "exactly", 6]),
    ):
        page = browser.new_page()
        page.goto(f"{PLAYGROUND.as_uri()}#{address}")
        state = page.evaluate("playground.read().state")
        page.close()
        assert [
            *(state[name] for name in ("k", "temperature", "gap", "bound")),
            state["logits"][0],
        ] == expected


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_words_stand_out_from_their_ground(browser: Any, scheme: str) -> None:
    """Contrast of at least 4.5 to 1 for words, as WCAG asks, in both themes."""
    page = browser.new_page(color_scheme=scheme)
    page.goto(PLAYGROUND.as_uri())
    names = ["ink", "soft", "lml", "sigmoid", "softmax", "csoftmax", "csparsemax", "shift", "card", "column"]
    colours = page.evaluate(
        "names => { const style = getComputedStyle(document.documentElement);"
        " return names.map(name => style.getPropertyValue(`--${name}`).trim()); }",
        names,
    )
    page.close()
    light = {name: luminance(colour) for name, colour in zip(names, colours, strict=True)}
    large = {"sigmoid", "softmax"}  # bold titles
    for name in names[:8]:
        high, low = sorted([light[name], light["card"]], reverse=True)
        assert (high + 0.05) / (low + 0.05) > (3 if name in large else 4.5), name


def luminance(colour: str) -> float:
    """The relative luminance of #rrggbb, as WCAG defines it."""
    parts = [int(part, 16) / 255 for part in re.findall("..", colour.lstrip("#"))]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def test_a_phone_shows_it_without_scrolling_sideways(browser: Any) -> None:
    for width in (320, 390):
        page = browser.new_page(
            viewport={"width": width, "height": 760}, has_touch=True, reduced_motion="reduce"
        )
        page.goto(PLAYGROUND.as_uri())
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        page.mouse.wheel(0, 900)
        page.wait_for_function("scrollY > 500")
        # The logits stay in view, so that what they do can be seen further down.
        assert page.locator("#logits").bounding_box()["y"] < 60
        box = page.locator("#logits").bounding_box()
        page.touchscreen.tap(box["x"] + box["width"] * 0.95, box["y"] + box["height"] * 0.2)
        page.wait_for_function("playground.read().state.logits[9] > 4")
        page.close()


def test_the_page_needs_nothing_else() -> None:
    text = PLAYGROUND.read_text(encoding="utf-8")
    assert not re.search(r"(src|href)=[\"'](https?:)?//", text)
    assert "@import" not in text
    assert set(re.findall(r"https?://[^\s\"'<>]+", text)) == {"http://www.w3.org/2000/svg"}
