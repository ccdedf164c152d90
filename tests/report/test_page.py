from __future__ import annotations

import json
import re
import zlib
from array import array
from base64 import b64decode
from collections.abc import Iterator
from dataclasses import replace
from html import unescape
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sarathi_pp.analysis.bubbles import Bubbles, measure_bubbles
from sarathi_pp.analysis.event_columns import Log
from sarathi_pp.analysis.summary import Report, summarise_timeline
from sarathi_pp.analysis.timeline import Timeline
from sarathi_pp.errors import InputError
from sarathi_pp.report.charts import distributions, request_bubble_cdf, spans
from sarathi_pp.report.page import PageRun, render_page
from sarathi_pp.trace.events import Event, Head, Issued, Returned
from tests.analysis.schedules import Schedule, constant, on_hosts, start, table

CAUSES = {
    "ramp_s": 0.125,
    "prefill_variance_s": 0.25,
    "prefill_decode_s": 1.5,
    "decode_context_s": 0.375,
    "stage_imbalance_s": 2.5,
    "communication_s": 3.5,
    "host_s": 4.5,
    "starvation_s": 5.5,
    "unexplained_s": -0.625,
}
SCRIPT = re.compile(r"<script[^>]*>(.*?)</script>", re.DOTALL)


def run_of(traces: list[list[Event]], title: str = "a run", **further: Any) -> PageRun:
    timeline = Timeline.read(traces)
    bubbles = measure_bubbles(timeline)
    return PageRun(title, timeline, bubbles, summarise_timeline(timeline, bubbles) | further)


def even_run(title: str = "a run", **further: Any) -> PageRun:
    return run_of(Schedule(8, 2, constant(1.0)).events(), title, **further)


def text_of(page: str) -> str:
    """What a reader without JavaScript sees: no scripts, no styles, no tags."""
    body = page[page.index("<body>") :]
    return unescape(re.sub(r"<[^>]*>", " ", SCRIPT.sub("", body)))


def data_of(page: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(SCRIPT.findall(page)[0])
    return found


def leaves(value: object) -> Iterator[object]:
    if isinstance(value, dict | list):
        for member in value.values() if isinstance(value, dict) else value:
            yield from leaves(member)
    else:
        yield value


def made_unique(report: Report) -> Report:
    """The same report with every figure another one, none equal to any that the timeline holds."""
    counter = iter(range(1, 10_000))

    def renumber(value: object) -> object:
        match value:
            case dict():
                return {key: renumber(member) for key, member in value.items()}
            case list():
                return [renumber(member) for member in value]
            case float():
                return 700 + next(counter) * 1.001
            case int() if not isinstance(value, bool):
                return 5000 + next(counter)
        return value

    renumbered = renumber(report)
    assert isinstance(renumbered, dict)
    return renumbered


def ways_to_print(value: object) -> set[str]:
    if not isinstance(value, int | float):
        return set()
    plain = {f"{value:,}", f"{value}", f"{value - 1}"}  # a stage's last layer is one before the end
    shown = {f"{value:.2f}", f"{value:.3f}", f"{value * 100:.1f}", f"{value:,.0f}", f"{value:.1f}"}
    return plain | shown | {f"{value / 2**30:.2f}", f"{value * 1e6:,.0f}"}


def test_every_number_in_the_text_is_one_of_the_report() -> None:
    run = run_of(Schedule(8, 2, constant(1.0), host=constant(0.25)).events(), causes=CAUSES)
    report = made_unique(dict(run.report))
    text = text_of(render_page([PageRun("a run", run.timeline, run.bubbles, report)]))
    text = re.sub(r"\bp(50|90|99)\b|E2EL|99th|and -, 0\b", "", text)
    printed = re.findall(r"-?\d[\d,]*(?:\.\d+)?", text.replace("-", " ")) or pytest.fail("no number at all")
    allowed = set().union(*map(ways_to_print, leaves(report)))
    assert len(printed) > 50
    assert not [number for number in printed if number not in allowed]


def test_the_text_takes_nothing_from_the_timeline() -> None:
    one, other = even_run(), run_of(Schedule(5, 2, constant(3.0), host=constant(0.5)).events())
    swapped = PageRun(one.title, other.timeline, other.bubbles, one.report)
    assert text_of(render_page([one])) == text_of(render_page([swapped]))
    assert data_of(render_page([one])) != data_of(render_page([swapped]))


def test_headline_and_stage_figures() -> None:
    run = run_of(Schedule(8, 2, constant(1.0), host=constant(0.25), transfer=constant(0.125)).events())
    words = text_of(render_page([run])).split()
    text = " ".join(words)
    report = run.report
    assert f"bubble {report['bubble_ratio']:.1%} bubble, steady {report['bubble_ratio_steady']:.1%}" in text
    assert "requests ok 8 of 8 policy sarathi stages 2 chunk size 256 microbatches 8" in text
    stage = report["per_stage"][1]
    states = ("compute_s", "recv_wait_s", "send_wait_s", "host_s", "no_work_s")
    row = ["1", "4-7", f"{stage['bubble_ratio']:.1%}", f"{stage['bubble_ratio_steady']:.1%}"]
    assert " ".join([*row, *(f"{stage[name]:.2f}" for name in states), "1.00"]) in text


def test_hosts_are_a_column_where_there_are_several_and_links_between_them_a_line() -> None:
    schedule = Schedule(8, 3, constant(1.0), transfer=constant(0.00231))
    page = render_page([run_of(on_hosts(schedule.events(), "host0", "host<0>", "host<0>"))])
    text = " ".join(text_of(page).split())
    assert "stage host layers bubble" in text and "1 host<0> 4-7" in text
    us = "\N{MICRO SIGN}s"
    assert f"Median transfer between hosts: 2,310 {us} from 0 to 1, 0 {us} from 2 to 0." in text
    assert "host<0>" not in page
    alone = text_of(render_page([run_of(on_hosts(schedule.events(), "host0", "host0", "host0"))]))
    assert "host0" not in alone and "between hosts" not in alone


def test_nothing_on_the_page_is_fetched_from_elsewhere() -> None:
    page = render_page([even_run()])
    own = SCRIPT.sub("", page)
    assert not re.findall(r"\b(?:src|href)\s*=|@import|url\(", own)
    assert "default-src 'none'" in own
    assert own.count("<script") == 0, "a script holds what ends a script"
    assert len(SCRIPT.findall(page)) == 3


HOSTILE = "</script><script>alert(1)</script><b onclick='x'>&amp;\""


def test_what_comes_from_a_run_is_escaped() -> None:
    run = even_run(HOSTILE, policy=HOSTILE, notes=[HOSTILE], causes=CAUSES, advice=[{"text": HOSTILE, "gain": 0.1}])
    for page in (render_page([run]), render_page([run, run])):
        assert len(SCRIPT.findall(page)) == 3
        assert "<b onclick" not in page and "alert(1)</script>" not in page
        assert data_of(page)["runs"][0]["title"] == HOSTILE
        assert text_of(page).count(HOSTILE) >= 4


def test_several_runs_share_a_page_in_their_order() -> None:
    page = render_page([even_run("under orca"), run_of(Schedule(4, 3, constant(1.0)).events(), "under sarathi")])
    runs = data_of(page)["runs"]
    assert [run["title"] for run in runs] == ["under orca", "under sarathi"]
    assert [len(run["stages"]) for run in runs] == [2, 3]
    assert runs[0]["caption"] == "under orca: bubble 11.1%, 9.8 tokens/s, 9.00 s"
    assert 0 < page.index("<h3>under orca</h3>") < page.index("<h3>under sarathi</h3>")
    with pytest.raises(ValueError, match="at least one run"):
        render_page([])


def test_causes_are_listed_where_they_are_known() -> None:
    def text(*runs: PageRun) -> str:
        return " ".join(text_of(render_page(runs)).split())

    known = even_run("known", causes=CAUSES, advice=[{"text": "raise --chunk-size", "gain": 0.1}])
    assert "stage imbalance stages take unequal time for the same microbatch 2.500" in text(known)
    assert "unexplained measured beyond what the model of the run accounts for -0.625" in text(known)
    assert "raise --chunk-size" in text(known)
    for unknown in (even_run("other"), even_run("other", causes=None, advice=[])):
        assert "The causes of this bubble were not computed." in text(unknown)
        assert "Not computed for other." in text(known, unknown)


def test_a_run_without_a_result_has_a_page_of_dashes() -> None:
    page = render_page([run_of([[start(0, 1)]])])
    text = " ".join(text_of(page).split())
    assert "bubble - bubble, steady - tokens/s - output tokens/s -" in text
    assert "no end in the trace of stage 0" in text
    assert "None" not in text
    assert data_of(page)["distributions"]["ttft_s"] == {"log": True, "edges": [], "shares": [[]]}


def integers(block: str) -> list[int]:
    return array("i", zlib.decompress(b64decode(block))).tolist()


def spans_in(data: dict[str, Any]) -> list[list[tuple[float, float]]]:
    """What page.js makes of the blocks: begin and end of every span, by stage."""
    found: list[list[tuple[float, float]]] = []
    for stage in data["stages"]:
        ticks, read = 0, []
        for gap, length in zip(integers(stage["gaps"]), integers(stage["lengths"]), strict=True):
            read.append(((ticks + gap) * data["tick_s"], (ticks + gap + length) * data["tick_s"]))
            ticks += gap + length
        found.append(read)
    return found


seconds = st.floats(min_value=0, max_value=1e5, allow_subnormal=False)


@given(
    times=st.lists(st.tuples(seconds, seconds), min_size=1, max_size=12),
    transfer=st.floats(min_value=0, max_value=2e4, allow_subnormal=False),
)
def test_every_span_survives_its_encoding_within_a_tick(times: list[tuple[float, float]], transfer: float) -> None:
    traces = Schedule(len(times), 2, table(times), transfer=constant(transfer)).events()
    timeline = Timeline.read(traces)
    data = spans(timeline, measure_bubbles(timeline))
    assert data["tick_s"] >= 1e-6
    for stage, read in zip(timeline.stages, spans_in(data), strict=True):
        written = list(zip(stage.starts, stage.ends, strict=True))
        flat = [edge for span in read for edge in span]
        assert flat == pytest.approx([edge for span in written for edge in span], abs=0.51 * data["tick_s"], rel=1e-9)


def test_heads_are_spans_of_their_own_kind() -> None:
    traces = Schedule(3, 2, constant(0.5)).events()
    returned = max(event.at_s for event in traces[0] if isinstance(event, Returned))
    traces[0].append(Head(1, returned, returned + 0.25, returned + 0.5))
    timeline = Timeline.read(traces)
    data = spans(timeline, measure_bubbles(timeline))
    assert integers(data["stages"][0]["issue"]) == [0, 1, 2, -3] and integers(data["stages"][1]["issue"]) == [0, 1, 2]
    origin = timeline.issued[0].at_s
    assert spans_in(data)[0][-1] == pytest.approx((returned + 0.25 - origin, returned + 0.5 - origin), abs=1e-6)


def test_more_tokens_than_any_microbatch_has_are_damage() -> None:
    timeline = Timeline.read(Schedule(6, 2, constant(0.5)).events())
    issued = list(timeline.issued)
    issued[3] = replace(issued[3], prefill_tokens=2**40)
    timeline.issued = Log(Issued, issued)
    with pytest.raises(InputError, match="damaged: a microbatch has more than 2,147,483,647"):
        spans(timeline, measure_bubbles(timeline))


def test_spans_know_what_ran_in_them() -> None:
    traces = Schedule(6, 2, constant(0.5)).events()
    # The trace of an issue is lost: its span stays, and says that it is not known.
    traces[0] = [event for event in traces[0] if getattr(event, "text", "") != "m2[s2:0+10]"]
    timeline = Timeline.read(traces)
    data = spans(timeline, measure_bubbles(timeline))
    assert integers(data["stages"][1]["issue"]) == [0, 1, -1, 2, 3, 4]
    assert integers(data["prefill_tokens"]) == [10] * 5 and integers(data["decodes"]) == [0] * 5
    assert zlib.decompress(b64decode(data["texts"])).decode().split("\n")[2] == "m3[s3:0+10]"


def test_distributions_have_the_same_bins_for_all_runs_and_lose_no_value() -> None:
    runs = [even_run(), run_of(Schedule(6, 2, table([[m + 1.0, 0.5] for m in range(6)])).events())]
    found = distributions([(run.timeline, run.bubbles) for run in runs])
    times = found["microbatch_s"]
    assert times["edges"][0] == pytest.approx(1.0) and times["edges"][-1] == pytest.approx(6.0)
    assert times["shares"][0][0] == 1.0
    for second in range(2, 6):
        within = [low <= second < high for low, high in pairwise(times["edges"])].index(True)
        assert times["shares"][1][within] == pytest.approx(1 / 6)
    assert times["shares"][1][-1] == pytest.approx(1 / 6), "the largest value belongs to the last bin"
    for key, distribution in found.items():
        if key in ("tpot_s", "itl_s"):  # one output token has neither
            assert distribution["shares"] == [[], []]
            continue
        assert [sum(shares) for shares in distribution["shares"]] == pytest.approx([1.0, 1.0])
        edges = distribution["edges"]
        assert len(edges) == len(distribution["shares"][0]) + 1 and edges == sorted(set(edges))


@given(st.lists(st.floats(min_value=-1, max_value=100), max_size=3000))
def test_the_cdf_of_the_request_bubble_ends_at_all_requests_and_stays_small(values: list[float]) -> None:
    run = even_run()
    bubbles = Bubbles(
        **{name: getattr(run.bubbles, name) for name in Bubbles.__slots__}
        | {"request_bubble_s": dict(enumerate(values))}
    )
    found = request_bubble_cdf(bubbles)
    assert len(found["seconds"]) == len(found["shares"]) <= 1000
    assert found["seconds"] == sorted(found["seconds"]) and found["shares"] == sorted(set(found["shares"]))
    if values:
        assert (found["seconds"][-1], found["shares"][-1]) == (max(values), 1.0)
    for at, share in zip(found["seconds"], found["shares"], strict=True):
        assert share <= sum(value <= at for value in values) / len(values)
