"""The page in headless Chromium: what only a browser can tell. Skipped where there is none, except in CI."""

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
from sarathi_pp.report.page import PageRun, render_page
from sarathi_pp.trace.events import Event, Issued
from tests.analysis.schedules import Schedule, constant
from tests.missing import missing

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
# Of the timeline in page.js: the plot's left and right margin, and where rows begin.
LEFT, RIGHT, TOP, ROW = 62, 14, 10, 30
IDLE = (0xD0, 0xD7, 0xDF)  # of page.css, in the light
# As long as a slow machine may take to open a page; none is expected to.
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
    """Opens a page of runs and waits until it is drawn. At the end it must have said nothing and fetched nothing."""
    context = complaints = None
    fetched: list[str] = []

    def open_page(*runs: PageRun, width: int = 1280, scheme: Any = "light") -> Page:
        nonlocal context, complaints
        file = tmp_path / "page.html"
        file.write_text(render_page(runs), encoding="utf-8")
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


def run_of(traces: list[list[Event]], title: str = "a run", **further: Any) -> PageRun:
    timeline = Timeline.read(traces)
    bubbles = measure_bubbles(timeline)
    return PageRun(title, timeline, bubbles, summarise_timeline(timeline, bubbles) | further)


def staircase(title: str = "a run", microbatches: int = 8, **further: Any) -> PageRun:
    """Two stages, a second a microbatch: stage 1 is idle in the first second, stage 0 in the last. m3 only decodes."""
    traces = Schedule(microbatches, 2, constant(1.0)).events()

    def decoding(event: Event) -> Event:
        if isinstance(event, Issued) and event.microbatch == 3:
            return replace(event, text="m3[d s1:300 s2:17]", prefill_tokens=0, decodes=2)
        return event

    return run_of([[decoding(event) for event in trace] for trace in traces], title, **further)


def shown(page: Page) -> tuple[float, float]:
    begin, end = page.evaluate("document.getElementById('timeline-plot').layout.xaxis.range")
    return begin, end


def place(page: Page, at_s: float, row: int, top: int = TOP) -> tuple[float, float]:
    """Of an instant on a stage, in pixels of the window."""
    page.locator("#timeline-plot").scroll_into_view_if_needed()
    box = page.locator("#timeline-plot").bounding_box() or pytest.fail("the timeline has no box")
    begin, end = shown(page)
    across = (at_s - begin) / (end - begin) * (box["width"] - LEFT - RIGHT)
    return box["x"] + LEFT + across, box["y"] + top + row * ROW + ROW / 2


def color(page: Page, at_s: float, row: int) -> tuple[int, ...]:
    """Of the canvas, red, green, blue and opacity."""
    x, y = place(page, at_s, row)
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
    """Two frames: whatever a change set off has been drawn."""
    page.evaluate("() => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")


def until_shown(page: Page, condition: str) -> None:
    """Waits until `condition`, of the range [begin, end], holds."""
    page.wait_for_function(
        f"() => {{ const [begin, end] = document.getElementById('timeline-plot').layout.xaxis.range; "
        f"return {condition}; }}"
    )
    settled(page)


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 390])
def test_it_is_drawn_in_full_at_any_width_and_scheme(opened: Opener, width: int, scheme: str) -> None:
    note = "a note without any place to break it: " + "x" * 200
    page = opened(staircase("run" * 60, causes=CAUSES, notes=[note]), width=width, scheme=scheme)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    charts = page.locator("[data-chart] .plot-container")
    assert charts.count() == 7
    assert page.locator("#causes-plot .bars .point").count() == len(CAUSES)
    drawn = page.locator("[data-chart=ttft_s] .scatterlayer path.js-line, [data-chart=request_bubble_s] path.js-line")
    assert drawn.count() == 2
    idle, prefill, decode = color(page, 0.3, 1), color(page, 1.3, 1), color(page, 4.3, 1)
    assert scheme == "dark" or idle[:3] == IDLE
    assert len({idle, prefill, decode}) == 3 and all(opacity == 255 for *_, opacity in (idle, prefill, decode))
    assert color(page, 3.3, 0) == decode and color(page, 8.5, 0) == idle
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
    # What is drawn is of this range: the first instant shown lies in a microbatch of stage 0, as all in [0, 8] do.
    assert color(page, 3.5, 0) != color(page, 4.5, 0)
    page.mouse.down()
    page.mouse.move(x - (150 if width > 600 else 50), y, steps=5)
    page.mouse.up()
    until_shown(page, f"begin > {begin} + 0.1")
    dragged = shown(page)
    assert dragged[1] - dragged[0] == pytest.approx(end - begin)
    page.mouse.dblclick(x, y, delay=400)  # slower than what plotly takes for one
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
    assert hover(page, 0.5, 1).inner_text() == "stage 1: idle 1.000 s\nbefore m0[s0:0+10]"
    assert hover(page, 8.5, 0).inner_text() == "stage 0: idle 1.000 s"
    box = page.locator("#timeline-tip").bounding_box() or pytest.fail("the tip has no box")
    assert 0 <= box["x"] and box["x"] + box["width"] <= width
    page.mouse.move(5, 5)
    assert page.locator("#timeline-tip").is_hidden()


@pytest.mark.parametrize("width", [1280, 390])
def test_several_runs_lie_below_each_other_on_one_time_scale(opened: Opener, width: int) -> None:
    page = opened(
        staircase("one", 8, causes=CAUSES), staircase("two", 18, causes=CAUSES), staircase("three"), width=width
    )
    assert shown(page) == (0, 19)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    # Each run has a line of text, its stages and a little room; see the rows of page.js.
    tops = [4 + 26 + i * (26 + 2 * ROW + 4) for i in range(3)]
    for top in tops:
        assert hover(page, 3.5, 0, top).inner_text().startswith("m3[d s1:300 s2:17]\nstage 0")
    assert hover(page, 17.5, 0, tops[1]).inner_text().startswith("m17[")
    assert hover(page, 12.0, 0, tops[0]).is_hidden(), "the first run is over by then"
    assert page.locator("#causes-plot .bars .point").count() == 2 * len(CAUSES)
    assert page.locator("[data-run]").count() == 3


def test_it_follows_the_scheme_while_it_is_open(opened: Opener) -> None:
    page = opened(staircase())
    light = color(page, 0.3, 1)
    page.emulate_media(color_scheme="dark")
    page.wait_for_function(
        "() => document.querySelector('#timeline-plot .xtick text').style.fill === 'rgb(162, 171, 183)'"
    )
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
    assert page.locator("h1").inner_text() == f"{hostile} | other"
    assert page.locator(".advice li").inner_text() == hostile
    # Plotly, too, reads a little HTML in its texts, and would take the tags for bold type.
    assert "<b>x</b></scrip" in (page.locator("#causes-plot .ytick").first.text_content() or "")


def test_a_run_that_has_no_result_yet_has_a_page(opened: Opener) -> None:
    traces = Schedule(1, 2, constant(1.0)).events()
    page = opened(run_of([trace[:1] for trace in traces]))
    assert "no end in the trace of stage 0, 1" in page.locator(".note").first.inner_text()
    assert page.locator("#timeline-canvas").is_visible()


# How many rectangles the next frame takes; the change of range behind it is too small to see.
_RECTANGLES = """() => new Promise((done) => {
    const canvas = CanvasRenderingContext2D.prototype, fillRect = canvas.fillRect;
    let count = 0;
    canvas.fillRect = function (...box) { count += 1; return fillRect.apply(this, box); };
    const finish = () => { canvas.fillRect = fillRect; done(count); };
    const plot = document.getElementById("timeline-plot"), [begin, end] = plot.layout.xaxis.range;
    Plotly.relayout(plot, { "xaxis.range": [begin, end - 1e-9] })
        .then(() => requestAnimationFrame(() => requestAnimationFrame(finish)));
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
    """What is drawn follows the pixels, not the spans; the limits of time are far beyond what is measured."""
    traces = Schedule(25_000, 8, lambda m, s: 0.002 + 0.001 * ((m + s) % 3) + 0.03 * (m % 7 == 0)).events()
    page = opened(run_of(traces))
    whole = shown(page)
    assert "microbatches" in hover(page, 60.0, 3).inner_text()
    assert 8 < page.evaluate(_RECTANGLES) <= 8 * 1280
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
    assert 8 < page.evaluate(_RECTANGLES) <= 8 * 1280
    text = hover(page, 60.0, 3).inner_text()
    assert "stage 3" in text and "duration" in text or "idle" in text
