"""In a browser, the playground shows the library's numbers and works with mouse, touch and keyboard."""

from __future__ import annotations

import itertools
import json
import re
import struct
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
    """The page on a desktop with reduced motion. Errors and network requests make the test fail."""
    page = browser.new_page(viewport={"width": 1366, "height": 860}, reduced_motion="reduce")
    trouble: list[str] = []
    page.on("pageerror", lambda error: trouble.append(str(error)))
    page.on("console", lambda message: trouble.append(message.text) if message.type == "error" else None)
    page.on("request", lambda request: trouble.append(request.url) if "http" in request.url[:4] else None)
    page.goto(PLAYGROUND.as_uri())
    yield page
    page.close()
    assert trouble == []


def opened(browser: Any, width: int, height: int, **options: Any) -> Any:
    """Open the page in a new window, by default on a touch device."""
    options = {"has_touch": True, "reduced_motion": "reduce", **options}
    page = browser.new_page(viewport={"width": width, "height": height}, **options)
    page.goto(PLAYGROUND.as_uri())
    return page


def show(page: Any, entry: int = 0, **state: Any) -> dict[str, Any]:
    """Set the page's state and selected entry, and return all numbers shown on the page."""
    return page.evaluate(
        "([state, entry]) => { playground.set(state, entry); return playground.read(); }", [state, entry]
    )


def layers(k: float, bound: Any) -> dict[str, Callable[[Tensor], Tensor]]:
    """Return the page's layers as torchlml and torch functions."""
    return {
        "lml": lambda x: torchlml.lml(x, k, bound=bound),
        "sigmoid": torch.sigmoid,
        "softmax": lambda x: k * torch.softmax(x, -1),
        "csoftmax": lambda x: torchlml.constrained_softmax(x, k),
        "csparsemax": lambda x: torchlml.constrained_sparsemax(x, k),
    }


def check(shown: dict[str, Any], gradients: bool = True) -> None:
    """Compare all numbers on the page with those that the library computes in float64."""
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
    """Return random logits with many combinations of k, temperature, gap and bound."""
    generator = torch.Generator().manual_seed(0)
    ks = (0.05, 0.7, 1, 2.5, 3, 5, 7.3, 9, 9.95)
    kinds = itertools.product(ks, (0.05, 0.3, 1, 10), ("exactly", "at_most", "at_least"))
    found = []
    for i, (k, temperature, bound) in enumerate(kinds):
        scale = (0.3, 2.0, 5.0)[i % 3]
        # The logits are multiples of 0.01, the page's resolution. None of these rows is at a sparsemax kink.
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
    ids=["equal", "two levels", "alternating", "an outlier"],
)
def test_ties_and_extreme_k_give_the_numbers_of_the_library(page: Any, logits: list[float], k: float) -> None:
    for temperature in (0.05, 1):
        shown = show(page, logits=logits, k=k, temperature=temperature, gap=0, bound="exactly")
        # With alternating logits, the constrained layers are at a kink and have no derivative.
        check(shown, gradients=logits[1] != 1.0)


def test_a_gap_raises_the_k_largest(page: Any) -> None:
    logits = [3.0, 2.0, 1.0, 0.0, -1.0, -2.0, -3.0, 2.5, 2.0, -4.0]
    shown = show(page, logits=logits, k=3, temperature=0.5, gap=2, bound="exactly")
    raised = [5.0, 4.0, 1.0, 0.0, -1.0, -2.0, -3.0, 4.5, 2.0, -4.0]  # only the first 2.0 is raised
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


def test_drawings_and_captions_show_the_computed_values(page: Any) -> None:
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


def test_dragging_a_bar_leaves_the_others_unchanged(page: Any) -> None:
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
    for key in ("Tab", "ArrowRight", "Tab", "Tab", "ArrowLeft", "Tab", "ArrowRight", "Tab", "ArrowRight"):
        page.keyboard.press(key)
    state = page.evaluate("playground.read().state")
    assert (state["k"], state["gap"], state["bound"]) == (3.1, 0.1, "at_most")
    assert 0.9 < state["temperature"] < 1
    page.keyboard.press("Tab")  # moves to the examples
    page.keyboard.press("Tab")
    page.keyboard.press("Enter")
    page.wait_for_function("playground.read().state.logits[0] === 4.2")
    page.wait_for_selector('[role="slider"][aria-label="logit boat"]')  # drawn in the next frame
    assert "beach photo" in page.inner_text("#look")
    assert page.get_attribute('[role="slider"] >> nth=3', "aria-label") == "logit boat"
    check(page.evaluate("playground.read()"))


def test_the_entry_under_the_mouse_shows_its_gradient(page: Any) -> None:
    show(page, logits=settings()[1]["logits"], k=3, temperature=1, gap=0, bound="exactly")
    for entry in (7, 2):
        page.locator(f'[data-layer="csoftmax"] [data-entry="{entry}"]').hover()
        page.wait_for_function(f"playground.read().selected === {entry}")
        check(page.evaluate("playground.read()"))


def test_a_link_restores_a_setting_and_invalid_values_are_ignored(browser: Any) -> None:
    for address, expected in (
        (
            "x=1,2,3,4,5,-1,-2,-3,-4,-5&k=2.5&t=0.5&gap=1&bound=at_least&labels=photo",
            [2.5, 0.5, 1, "at_least", "photo", 1],
        ),
        ("x=1,2&k=cat&t=&gap=-3&bound=never&labels=toString", [3, 1, 0, "exactly", "letters", 2.9]),
        ("x=99,a,,4,5,6,7,8,9,10&k=99&t=1e9", [10, 10, 0, "exactly", "letters", 6]),
    ):
        page = browser.new_page()
        page.goto(f"{PLAYGROUND.as_uri()}#{address}")
        state = page.evaluate("playground.read().state")
        page.close()
        assert [
            *(state[name] for name in ("k", "temperature", "gap", "bound", "labels")),
            state["logits"][0],
        ] == expected


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_has_enough_contrast(browser: Any, scheme: str) -> None:
    """As WCAG requires, the contrast is at least 4.5 to 1, and at least 3 to 1 for large text."""
    page = browser.new_page(color_scheme=scheme)
    page.goto(PLAYGROUND.as_uri())
    names = ["ink", "soft", "lml", "sigmoid", "softmax", "csoftmax", "csparsemax", "shift", "card", "column"]
    colors = page.evaluate(
        "names => { const style = getComputedStyle(document.documentElement);"
        " return names.map(name => style.getPropertyValue(`--${name}`).trim()); }",
        names,
    )
    page.close()
    light = {name: luminance(color) for name, color in zip(names, colors, strict=True)}
    large = {"sigmoid", "softmax"}  # bold titles
    for name in names[:8]:
        high, low = sorted([light[name], light["card"]], reverse=True)
        assert (high + 0.05) / (low + 0.05) > (3 if name in large else 4.5), name


def luminance(color: str) -> float:
    """Return the relative luminance of #rrggbb, as WCAG defines it."""
    parts = [int(part, 16) / 255 for part in re.findall("..", color.lstrip("#"))]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def touch(page: Any, x: float, y: float, dy: float) -> None:
    """Drag a finger vertically. The browser treats this as real input, so the page may scroll."""
    session = page.context.new_cdp_session(page)
    for step in range(9):
        kind = "touchStart" if step == 0 else "touchMove"
        points = [{"x": x, "y": y + dy * step / 8}]
        session.send("Input.dispatchTouchEvent", {"type": kind, "touchPoints": points})
    session.send("Input.dispatchTouchEvent", {"type": "touchEnd", "touchPoints": []})


def grip(page: Any, entry: int) -> tuple[float, float]:
    """Return the coordinates of the center of a bar's grip."""
    box = page.locator(f'[role="slider"][data-entry="{entry}"] .grip').bounding_box()
    return box["x"] + box["width"] / 2, box["y"] + box["height"] / 2


def logits(page: Any) -> list[float]:
    return page.evaluate("playground.read().state.logits")


def test_a_press_selects_a_bar_and_does_not_move_it(page: Any) -> None:
    show(page, logits=[0.0] * 10, k=3, temperature=1, gap=0, bound="exactly")
    box = page.locator("#logits").bounding_box()
    page.mouse.click(box["x"] + box["width"] * 0.75, box["y"] + box["height"] * 0.1)
    assert page.evaluate("playground.read().selected") == 7
    assert logits(page) == [0.0] * 10


@pytest.mark.parametrize("width", [320, 390])
def test_fingers_move_grips_and_scroll_elsewhere(browser: Any, width: int) -> None:
    page = opened(browser, width, 760)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    before = logits(page)
    x, y = grip(page, 9)
    page.touchscreen.tap(x, page.locator("#logits").bounding_box()["y"] + 10)
    page.wait_for_function("playground.read().selected === 9")
    assert logits(page) == before
    # If a touch starts next to the grip but within its handle, the bar follows the finger without jumping.
    touch(page, x, y + 15, -60)
    page.wait_for_function("playground.read().state.logits[9] > 2")
    unit = page.locator("#logits").bounding_box()["height"] / 180 * 126 / 12
    assert logits(page)[9] == pytest.approx(before[9] + 60 / unit, abs=0.06)
    assert logits(page)[:9] == before[:9]
    assert page.evaluate("scrollY") == 0
    moved = logits(page)
    touch(page, grip(page, 2)[0], grip(page, 2)[1] + 110, -90)
    page.wait_for_function("scrollY > 20")
    assert logits(page) == moved
    page.close()


def test_logits_and_k_stay_in_view_on_a_phone_held_upright(browser: Any) -> None:
    page = opened(browser, 390, 760)
    page.evaluate("scrollTo(0, 900)")
    page.wait_for_function("scrollY > 500")
    for name in ("#logits", "#k", "#sweep"):
        box = page.locator(f".stage {name}").bounding_box()
        assert 0 <= box["y"] < box["y"] + box["height"] < 300, name
    page.close()


@pytest.mark.parametrize("size", [(844, 390), (932, 430), (667, 375), (568, 320), (1280, 500), (390, 560)])
def test_the_logits_cover_nothing_in_a_low_window(browser: Any, size: tuple[int, int]) -> None:
    page = opened(browser, *size)
    for place in (0, 300, 800):
        page.evaluate("place => scrollTo(0, place)", place)
        stage, *others = page.evaluate(
            "['.stage', '.card:not(.stage)'].flatMap(name => [...document.querySelectorAll(name)])"
            ".map(each => each.getBoundingClientRect().toJSON())"
        )
        assert len(others) == 10
        for other in others:
            apart = min(other["right"], stage["right"]) - max(other["left"], stage["left"]) <= 0
            apart |= min(other["bottom"], stage["bottom"]) - max(other["top"], stage["top"]) <= 0
            assert apart, (size, place)
        if size[0] >= 640:  # in wide windows, the logits are next to the results and fully visible
            assert 0 <= stage["top"] < stage["bottom"] <= size[1]
    assert page.evaluate("document.documentElement.scrollWidth") <= size[0]
    page.close()


@pytest.mark.parametrize("size", [(320, 640), (390, 844), (844, 390)])
def test_touch_targets_are_large(browser: Any, size: tuple[int, int]) -> None:
    """Touch targets are at least 44 by 44 px. Only the ten bars, which share the width, are narrower."""
    page = opened(browser, *size)
    boxes = page.evaluate(
        "[...document.querySelectorAll("
        "'button, header a, input[type=range], .segments label, summary, .handle')]"
        ".map(each => [each.id || each.textContent || 'handle', each.getBoundingClientRect().toJSON()])"
    )
    page.close()
    assert len(boxes) == 32
    for name, box in boxes:
        assert box["height"] >= 44, name
        assert box["width"] >= (44 if name != "handle" else 29), name


def test_captions_of_the_examples_are_true(page: Any) -> None:
    captions = page.evaluate("PRESETS.map(([name, , caption]) => [name, caption])")
    shown = {}
    for place, (name, caption) in enumerate(captions):
        page.locator("#presets button").nth(place).click()
        page.wait_for_function(
            "caption => document.getElementById('look').innerText === caption", arg=caption
        )
        shown[name] = page.evaluate("playground.read()")
        check(shown[name], gradients=name not in ("Wide gap", "k = 2.5"))

    def y(name: str, layer: str = "lml") -> Tensor:
        return torch.tensor(shown[name]["y"][layer], dtype=torch.float64)

    def slopes(name: str, layer: str) -> Tensor:
        """Return the Jacobian of a torchlml layer at the page's logits."""
        x = torch.tensor(shown[name]["x"], dtype=torch.float64)
        function = layers(shown[name]["state"]["k"], "exactly")[layer]
        return torch.autograd.functional.jacobian(function, x)  # type: ignore[no-untyped-call]

    start = y("Start")
    assert start.topk(3).values.min() > 2 * start.topk(4).values.min()
    assert start.sum().item() == pytest.approx(3)
    assert slopes("Start", "lml").diagonal().min() > 0
    assert y("Tag a photo").sum().item() == pytest.approx(4)
    assert y("Tag a photo").max() < 1
    photo = page.evaluate("LABELS.photo")
    above = (y("Tag a photo", "softmax") > 1).tolist()
    assert [tag for tag, large in zip(photo, above, strict=True) if large] == ["sky", "sea"]
    assert y("Route a token").sum().item() == pytest.approx(2)
    assert slopes("Route a token", "lml").abs().min() > 1e-4
    assert int((y("Softmax above 1", "softmax") > 1).sum()) == 1
    assert set(y("Wide gap", "csparsemax").tolist()) == {0.0, 1.0}
    assert slopes("Wide gap", "csparsemax").abs().max() == 0
    assert 1e-4 < slopes("Wide gap", "lml").diagonal().min() < slopes("Wide gap", "lml").max() < 0.25
    assert y("Hard top-k").sort(descending=True).values.tolist() == pytest.approx([1] * 3 + [0] * 7, abs=1e-3)
    assert y("k = 2.5").unique().numel() == 2
    assert y("At most k").equal(y("At most k", "sigmoid"))
    assert y("At most k").sum() < 3
    assert shown["At most k"]["nu"] == 0


def test_k_sweeps_up_down_and_back(browser: Any) -> None:
    page = browser.new_page(reduced_motion="no-preference")
    page.clock.install()
    page.goto(PLAYGROUND.as_uri())
    page.clock.pause_at(page.evaluate("Date.now() + 60000"))
    before = page.evaluate("playground.read().state")
    page.click("#sweep")
    assert page.get_attribute("#sweep", "aria-label") == "Stop the sweep of k"
    seen = []
    for _ in range(24):
        page.clock.fast_forward(500)  # draws a single frame instead of 60 per second
        seen.append(page.evaluate("playground.read()"))
    ks = [each["state"]["k"] for each in seen]
    turns = [ks.index(max(ks)), ks.index(min(ks))]
    assert max(ks) > 9.4
    assert min(ks) < 0.6
    assert ks[: turns[0] + 1] == sorted(ks[: turns[0] + 1])
    assert ks[turns[0] : turns[1] + 1] == sorted(ks[turns[0] : turns[1] + 1], reverse=True)
    assert seen[-1]["state"] == before
    assert page.get_attribute("#sweep", "aria-label") == "Sweep k"
    for each in seen[:20:4]:
        check(each)
    # A second click on the button stops the sweep, and so does changing a logit.
    for stop in ("document.getElementById('sweep').click()", "setLogit(0, 1)"):
        page.click("#sweep")
        page.clock.fast_forward(1000)
        page.evaluate(stop)
        k = page.evaluate("playground.read().state.k")
        page.clock.fast_forward(1000)
        assert page.evaluate("playground.read().state.k") == k != before["k"]
        assert page.get_attribute("#sweep", "aria-label") == "Sweep k"
    page.close()


def test_reduced_motion_replaces_the_sweep_by_steps(page: Any) -> None:
    show(page, logits=[0.0] * 10, k=8.5, temperature=1, gap=0, bound="exactly")
    assert page.get_attribute("#sweep", "aria-label") == "Next integer k"
    ks = []
    for _ in range(4):
        page.click("#sweep")
        ks.append(page.evaluate("playground.read().state.k"))
    assert ks == [9, 10, 0, 1]


def theme(page: Any) -> str:
    """Return the theme of the page, determined from its background color."""
    color = page.evaluate("getComputedStyle(document.body).backgroundColor")
    return {"rgb(246, 247, 249)": "light", "rgb(15, 19, 24)": "dark"}[color]


def test_the_theme_is_kept_and_follows_the_site(browser: Any) -> None:
    page = opened(browser, 1280, 900, color_scheme="light")
    assert theme(page) == "light"
    page.click("#theme")
    assert theme(page) == "dark"
    page.reload()
    assert theme(page) == "dark"
    key = PLAYGROUND.parents[1].as_posix() + "/.__palette"
    for stored, expected in (
        ({"index": 0, "color": {"scheme": "default"}}, "light"),
        ({"index": 1, "color": {"scheme": "slate"}}, "dark"),
        ({"index": 0}, "light"),
        ("nonsense", "light"),
        (None, "light"),
    ):
        text = "{" if stored == "nonsense" else json.dumps(stored)
        page.evaluate("([key, text]) => localStorage.setItem(key, text)", [key, text])
        page.reload()
        assert theme(page) == expected, stored
    page.close()


def test_the_first_button_shares_a_link_to_the_settings(browser: Any) -> None:
    page = opened(browser, 1280, 900)
    page.evaluate(
        "Object.defineProperty(navigator, 'clipboard', {configurable: true, value:"
        " {writeText: async text => { window.written = text; }}})"
    )
    show(page, logits=[1.5] * 10, k=4, temperature=1, gap=0, bound="at_most", labels="photo")
    first = page.locator("button").first
    assert first.inner_text() == "Share"
    first.click()
    page.wait_for_function("document.getElementById('shared').innerText === 'Link copied.'")
    link = page.evaluate("written")
    assert link == page.url
    state = page.evaluate("playground.read().state")
    other = browser.new_page()
    other.goto(link)
    assert other.evaluate("playground.read().state") == state
    other.close()
    # A phone opens its own share dialog, which the user may close. If the browser does not allow sharing, the
    # page tells the user that the link is in the address bar.
    for error, said in (("AbortError", ""), ("NotAllowedError", "The link is in the address bar.")):
        page.evaluate("document.getElementById('shared').textContent = ''")
        page.evaluate(
            "error => { window.shared = null;"
            " Object.defineProperty(navigator, 'share', {configurable: true, value:"
            " async data => { window.shared = data.url; throw new DOMException('', error); }}) }",
            error,
        )
        first.click()
        page.wait_for_function("window.shared !== null")
        page.evaluate("new Promise(resolve => setTimeout(resolve, 0))")
        assert page.evaluate("shared") == link
        assert page.inner_text("#shared") == said
    page.close()


def test_a_shared_link_has_a_preview(page: Any) -> None:
    text = PLAYGROUND.read_text(encoding="utf-8")
    tags = dict(re.findall(r'<meta (?:property|name)="((?:og|twitter):[^"]+)" content="([^"]+)">', text))
    assert {"og:title", "og:description", "og:type", "og:image:alt"} <= set(tags)
    assert tags["twitter:card"] == "summary_large_image"
    picture = (PLAYGROUND.parent / tags["og:image"]).read_bytes()
    assert len(picture) < 300_000
    assert struct.unpack(">2I", picture[16:24]) == (1200, 630)
    assert (tags["og:image:width"], tags["og:image:height"]) == ("1200", "630")
    # The picture shows the initial logits. If they change, run `python docs/images/social_card.py`.
    start = [float(value) for value in page.evaluate("START.logits")]
    assert f"LML of {start} with k = 3".encode() in picture


def test_the_page_loads_nothing_from_other_hosts() -> None:
    text = PLAYGROUND.read_text(encoding="utf-8")
    assert not re.search(r"(src|href)=[\"'](https?:)?//", text)
    assert "@import" not in text
    assert set(re.findall(r"https?://[^\s\"'<>]+", text)) == {"http://www.w3.org/2000/svg"}
