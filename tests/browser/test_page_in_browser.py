"""The page in headless Chromium: checks that need a browser. Skipped if there is none, except in CI."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Locator, Page, sync_playwright

from sarathi_pp.analysis.bubbles import measure_bubbles
from sarathi_pp.analysis.summary import summarise_timeline
from sarathi_pp.analysis.timeline import Timeline
from sarathi_pp.report.comparison import compare
from sarathi_pp.report.page.comparison_page import render_comparison_page
from sarathi_pp.report.page.part import PagePart
from sarathi_pp.report.page.run_page import render_page
from sarathi_pp.trace.events import Event, Issued
from tests.analysis.schedules import Schedule, constant
from tests.missing import missing

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
# From the timeline in page.js: its left and right margin, the top of the rows, their height, and that of a lane.
LEFT, RIGHT, TOP, ROW, LANE = 62, 14, 10, 58, 40
# From page.css, in the light theme.
IDLE, NO_WORK, RECV_WAIT = (0xD0, 0xD7, 0xDF), (0xB3, 0xBB, 0xC6), (0x56, 0xB4, 0xE9)
# The longest time that a slow machine may take to open a page; none should need it.
OPENS_MS = 90_000
CAUSES = {
    "ramp_s": 1.0,
    "prefill_variance_s": 0.25,
    "prefill_decode_s": 0.5,
    "decode_context_s": 0.5,
    "stage_imbalance_s": 0.5,
    "communication_s": 0.5,
    "host_s": 0.5,
    "starvation_s": 0.5,
    "unexplained_s": -0.5,
}


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    path = next(filter(None, map(shutil.which, NAMES)), None)
    if path is None:
        missing(f"none of {', '.join(NAMES)} is on PATH; try  apt-get install chromium")
    # Chromium's own sandbox refuses to start for root.
    arguments = ["--no-sandbox"] if os.geteuid() == 0 else []
    with sync_playwright() as playwright:
        launched = playwright.chromium.launch(executable_path=path, args=arguments)
        yield launched
        launched.close()


Opener = Callable[..., Page]


@pytest.fixture
def opened(browser: Browser, tmp_path: Path) -> Iterator[Opener]:
    """Open a page of runs and wait until it is drawn. At the end it must have no messages and no requests.

    Several runs are a comparison.
    """
    context = complaints = None
    fetched: list[str] = []

    def open_page(*runs: PagePart, width: int = 1280, scheme: Any = "light") -> Page:
        nonlocal context, complaints
        file = tmp_path / "page.html"
        file.write_text(page_of(runs), encoding="utf-8")
        context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme, offline=True)
        page = context.new_page()
        complaints = []
        page.on("console", lambda message: complaints.append(message.text))
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("dialog", lambda dialog: complaints.append(dialog.message))
        page.on("request", lambda request: fetched.append(request.url))
        page.goto(file.as_uri(), timeout=OPENS_MS)
        page.wait_for_selector("html[data-drawn]", timeout=OPENS_MS)
        return page

    yield open_page
    if context is not None:
        context.close()
    assert complaints == []
    assert [url for url in fetched if not url.startswith(("data:", "blob:"))] == [(tmp_path / "page.html").as_uri()]


def page_of(runs: tuple[PagePart, ...]) -> str:
    if len(runs) == 1:
        return render_page(runs[0].title, runs[0].report, runs)
    comparison = compare([(run.title, dict(run.report)) for run in runs]) | {"advice": []}
    return render_comparison_page(comparison, runs)


def run_of(traces: list[list[Event]], title: str = "a run", **further: Any) -> PagePart:
    timeline = Timeline.read(traces)
    bubbles = measure_bubbles(timeline)
    return PagePart(title, timeline, bubbles, summarise_timeline(timeline, bubbles) | further)


def staircase(title: str = "a run", microbatches: int = 8, **further: Any) -> PagePart:
    """Make two stages of one second per microbatch.

    Stage 1 is idle in the first second, stage 0 in the last. m3 only decodes.
    """
    traces = Schedule(microbatches, 2, constant(1.0)).events()

    def decoding(event: Event) -> Event:
        if isinstance(event, Issued) and event.microbatch == 3:
            return replace(event, text="m3[d s1:300 s2:17]", prefill_tokens=0, decodes=2)
        return event

    return run_of([[decoding(event) for event in trace] for trace in traces], title, **further)


RANGE = "const [begin, end] = ['begin', 'end'].map((at) => +document.getElementById('timeline-view').dataset[at]);"


def shown(page: Page) -> tuple[float, float]:
    settled(page)
    begin, end = page.evaluate(f"() => {{ {RANGE} return [begin, end]; }}")
    return begin, end


def place(page: Page, at_s: float, row: int, top: int = TOP, down: float = LANE / 2) -> tuple[float, float]:
    """Return the place of a time on a stage, in pixels of the window. down: below the upper edge of its lane."""
    page.locator("#timeline-view").scroll_into_view_if_needed()
    box = page.locator("#timeline-view").bounding_box() or pytest.fail("the timeline has no box")
    begin, end = shown(page)
    across = (at_s - begin) / (end - begin) * (box["width"] - LEFT - RIGHT)
    return box["x"] + LEFT + across, box["y"] + top + row * ROW + down


def color(page: Page, at_s: float, row: int, down: float = LANE / 2) -> tuple[int, ...]:
    """Return the color of the canvas: red, green, blue and opacity."""
    x, y = place(page, at_s, row, down=down)
    found = page.evaluate(
        """([x, y]) => {
            const canvas = document.getElementById("timeline-canvas"), box = canvas.getBoundingClientRect();
            const scale = canvas.width / box.width, pixel = new OffscreenCanvas(1, 1).getContext("2d");
            pixel.drawImage(canvas, Math.round((box.x - x) * scale), Math.round((box.y - y) * scale));
            return [...pixel.getImageData(0, 0, 1, 1).data];
        }""",
        [x, y],
    )
    return tuple(found)


def hover(page: Page, at_s: float, row: int, top: int = TOP) -> Locator:
    page.mouse.move(*place(page, at_s, row, top))
    return page.locator("#timeline-tip")


def settled(page: Page) -> None:
    """Wait for two frames: every effect of a change is then drawn."""
    page.evaluate("() => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")


def until_shown(page: Page, condition: str) -> None:
    """Wait until `condition`, of the range [begin, end], holds."""
    page.wait_for_function(f"() => {{ {RANGE} return {condition}; }}")
    settled(page)


@pytest.mark.parametrize(
    ("width", "scheme"),
    [
        *((1280, "light"), (390, "dark")),
        pytest.param(1280, "dark", marks=pytest.mark.full),
        pytest.param(390, "light", marks=pytest.mark.full),
    ],
)
def test_it_is_drawn_in_full_at_any_width_and_scheme(opened: Opener, width: int, scheme: str) -> None:
    note = "a note without any place to break it: " + "x" * 200
    page = opened(staircase("run" * 60, causes=CAUSES, notes=[note]), width=width, scheme=scheme)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert page.locator("#distributions figure").count() == 7
    assert page.locator("#distributions svg.plot").count() == 5, "all but tpot and itl, of one token per output"
    boxes = [bar.bounding_box() or pytest.fail("a bar has no box") for bar in page.locator(".causes .bar").all()]
    assert len(boxes) == len(CAUSES) and all(0 < box["x"] and box["x"] + box["width"] < width for box in boxes)
    assert page.locator(".stages .stack").count() == 2
    idle, prefill, decode = color(page, 0.3, 1), color(page, 1.3, 1), color(page, 4.3, 1)
    assert scheme == "dark" or idle[:3] == IDLE
    assert len({idle, prefill, decode}) == 3 and all(opacity == 255 for *_, opacity in (idle, prefill, decode))
    assert color(page, 3.3, 0) == decode and color(page, 8.5, 0) == idle
    if scheme == "light":
        assert color(page, 0.3, 1, down=LANE + 5)[:3] == RECV_WAIT and color(page, 8.5, 0, down=LANE + 5)[:3] == NO_WORK
    darkness = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert darkness == {"light": "rgb(255, 255, 255)", "dark": "rgb(20, 23, 27)"}[scheme]
    assert (sum(idle[:3]) < 300) == (scheme == "dark")


WINDOWS = pytest.mark.parametrize(("width", "scheme"), [(1280, "light"), (390, "dark")])


@WINDOWS
def test_it_zooms_and_pans_with_wheel_drag_and_double_click(opened: Opener, width: int, scheme: str) -> None:
    page = opened(staircase(), width=width, scheme=scheme)
    assert shown(page) == (0, 9)
    x, y = place(page, 4.5, 0)
    page.mouse.move(x, y)
    page.mouse.wheel(0, -300)
    until_shown(page, "end - begin < 7")
    begin, end = shown(page)
    assert begin < 4.5 < end
    # The drawing is of this range: the first instant shown is in a microbatch of stage 0, like all in [0, 8].
    assert color(page, 3.5, 0) != color(page, 4.5, 0)
    page.mouse.down()
    page.mouse.move(x - (150 if width > 600 else 50), y, steps=5)
    page.mouse.up()
    until_shown(page, f"begin > {begin} + 0.1")
    dragged = shown(page)
    assert dragged[1] - dragged[0] == pytest.approx(end - begin)
    page.mouse.dblclick(x, y, delay=100)
    until_shown(page, "begin === 0 && end === 9")


def test_it_zooms_and_pans_with_buttons_and_keys(opened: Opener) -> None:
    page = opened(staircase())
    for by_hand in (
        lambda move: page.locator(f"[data-move={move}]").click(),
        lambda move: page.locator("#timeline-view").press(
            {"in": "+", "out": "-", "left": "ArrowLeft", "right": "ArrowRight", "all": "0"}[move]
        ),
    ):
        by_hand("in")
        until_shown(page, "end - begin < 6")
        begin, end = shown(page)
        by_hand("right")
        until_shown(page, f"begin > {begin} && Math.abs(end - begin - {end - begin}) < 1e-6")
        by_hand("left")
        until_shown(page, f"Math.abs(begin - {begin}) < 1e-6")
        by_hand("out")
        until_shown(page, "end - begin > 8.9")
        by_hand("in")
        by_hand("all")
        until_shown(page, "begin === 0 && end === 9")


@WINDOWS
def test_hovering_says_what_is_in_a_microbatch_and_how_long_a_gap_is(opened: Opener, width: int, scheme: str) -> None:
    page = opened(staircase(), width=width, scheme=scheme)
    assert hover(page, 3.5, 0).inner_text().split("\n") == [
        "m3[d s1:300 s2:17]",
        "stage 0: 2 tokens, 0 of prompts, 2 decodes",
        "start 3.000 s, duration 1.000 s, gap before 0 \N{MICRO SIGN}s",
    ]
    assert hover(page, 2.5, 1).inner_text().startswith("m1[s1:0+10]\nstage 1: 10 tokens, 10 of prompts, 0 decodes")
    assert hover(page, 1.5, 1).inner_text().endswith("gap before none")
    waiting = hover(page, 0.5, 1)
    assert waiting.inner_text() == "stage 1: recv wait 1.000 s, idle 1.000 s in all\nbefore m0[s0:0+10]"
    assert hover(page, 8.5, 0).inner_text() == "stage 0: no work 1.000 s, idle 1.000 s in all"
    box = page.locator("#timeline-tip").bounding_box() or pytest.fail("the tip has no box")
    assert 0 <= box["x"] and box["x"] + box["width"] <= width
    assert box["y"] + box["height"] < place(page, 8.5, 0, down=0)[1], "it hides a lane"
    page.mouse.move(5, 5)
    assert page.locator("#timeline-tip").is_hidden()


@pytest.mark.parametrize("width", [1280, 390])
def test_several_runs_lie_below_each_other_on_one_time_scale(opened: Opener, width: int) -> None:
    page = opened(
        staircase("one", 8, causes=CAUSES), staircase("two", 18, causes=CAUSES), staircase("three"), width=width
    )
    assert shown(page) == (0, 19)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    # Each run has a line of text and its stages; see the rows of page.js.
    tops = [4 + 26 + i * (26 + 2 * ROW) for i in range(3)]
    for top in tops:
        assert hover(page, 3.5, 0, top).inner_text().startswith("m3[d s1:300 s2:17]\nstage 0")
    assert hover(page, 17.5, 0, tops[1]).inner_text().startswith("m17[")
    assert hover(page, 12.0, 0, tops[0]).is_hidden(), "the first run is over by then"
    assert page.locator("#distributions .legend span").count() == 3
    assert page.locator("#distributions svg").first.locator("path[stroke='var(--run-2)']").count() > 0


def test_it_follows_the_scheme_while_it_is_open(opened: Opener) -> None:
    page = opened(staircase())
    light = color(page, 0.3, 1)
    page.emulate_media(color_scheme="dark")
    settled(page)
    assert color(page, 0.3, 1) != light


def test_markup_from_a_run_stays_text(opened: Opener) -> None:
    hostile = "<b>x</b></script><script>alert(1)</script><img src=x onerror=alert(2)>"
    runs = [
        staircase(hostile, policy=hostile, notes=[hostile], causes=CAUSES, advice=[{"text": hostile}]),
        staircase("other", causes=CAUSES),
    ]
    page = opened(*runs)
    assert page.locator("img").count() == 0
    assert hostile in page.locator("h1").inner_text() and hostile in page.locator(".note").inner_text()
    assert page.locator(".advice li").first.inner_text() == hostile


def test_a_command_is_copied(opened: Opener) -> None:
    advice = [{"text": "Use it.", "option": "--inflight 5", "gain_s": 1.0}]
    page = opened(staircase(causes=CAUSES, advice=advice))
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    button = page.locator("header [data-copy]")
    button.click()
    page.wait_for_function("() => document.querySelector('header [data-copy]').textContent === 'copied'")
    assert page.evaluate("navigator.clipboard.readText()") == "--inflight 5"


def test_a_run_that_has_no_result_yet_has_a_page(opened: Opener) -> None:
    traces = Schedule(1, 2, constant(1.0)).events()
    page = opened(run_of([trace[:1] for trace in traces]))
    assert "no end in the trace of stage 0, 1" in page.locator(".note").first.inner_text()
    assert page.locator("#timeline-canvas").is_visible()


# The number of rectangles in the next frame, after a turn of the wheel that changes nothing.
_RECTANGLES = """() => new Promise((done) => {
    const canvas = CanvasRenderingContext2D.prototype, fillRect = canvas.fillRect;
    let count = 0;
    canvas.fillRect = function (...box) { count += 1; return fillRect.apply(this, box); };
    const finish = () => { canvas.fillRect = fillRect; done(count); };
    document.getElementById("timeline-view").dispatchEvent(new WheelEvent("wheel", { deltaY: 0, cancelable: true }));
    requestAnimationFrame(() => requestAnimationFrame(finish));
})"""

_FRAMES = """() => new Promise((done) => {
    const taken = [];
    let last = performance.now();
    const next = (now) => {
        taken.push(now - last);
        last = now;
        if (window.enough) done(taken.slice(1)); else requestAnimationFrame(next);
    };
    requestAnimationFrame(next);
})"""


def test_two_hundred_thousand_spans_open_and_zoom(opened: Opener) -> None:
    """The drawing time follows the pixels, not the spans; the time limits are far above the measurements."""
    traces = Schedule(25_000, 8, lambda m, s: 0.002 + 0.001 * ((m + s) % 3) + 0.03 * (m % 7 == 0)).events()
    page = opened(run_of(traces))
    whole = shown(page)
    assert "microbatches" in hover(page, 60.0, 3).inner_text()
    assert 8 < page.evaluate(_RECTANGLES) <= 2 * 8 * 1280
    assert color(page, 60.0, 3)[:3] != IDLE
    page.evaluate(f"() => {{ window.enough = false; window.frames = ({_FRAMES})(); }}")
    for _ in range(20):
        page.mouse.wheel(0, -120)
        settled(page)
    until_shown(page, "end - begin < 2")
    begin, end = shown(page)
    assert begin < 60 < end < whole[1]
    page.evaluate("() => { window.enough = true; }")
    frames = sorted(page.evaluate("() => window.frames"))
    assert frames[len(frames) // 2] < 250
    assert 8 < page.evaluate(_RECTANGLES) <= 2 * 8 * 1280
    text = hover(page, 60.0, 3).inner_text()
    assert "stage 3" in text and "duration" in text or "idle" in text
