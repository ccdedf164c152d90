from __future__ import annotations

import zlib
from array import array
from base64 import b64decode
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sarathi_pp.analysis.bubbles import Bubbles, measure_bubbles
from sarathi_pp.analysis.event_columns import Log
from sarathi_pp.analysis.stage_states import idle_spans
from sarathi_pp.analysis.timeline import Timeline
from sarathi_pp.errors import InputError
from sarathi_pp.report.page.series import IDLE_STATES, distributions, request_bubble_cdf, spans
from sarathi_pp.trace.events import Head, Issued, Returned
from tests.analysis.schedules import Schedule, constant, table


def timeline_of(schedule: Schedule) -> Timeline:
    return Timeline.read(schedule.events())


def integers(block: str) -> list[int]:
    return array("i", zlib.decompress(b64decode(block))).tolist()


def spans_in(data: dict[str, Any]) -> list[list[tuple[float, float]]]:
    """Decode the blocks as page.js does: start and end of every span, by stage."""
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


def test_idle_spans_come_with_their_state() -> None:
    timeline = timeline_of(Schedule(6, 2, constant(1.0), host=constant(0.25), transfer=constant(0.125)))
    data = spans(timeline, measure_bubbles(timeline))
    origin = timeline.issued[0].at_s
    for stage, written in zip(timeline.stages, data["stages"], strict=True):
        expected = list(idle_spans(stage, timeline.window))
        states = [IDLE_STATES[number] for number in integers(written["idle"]["states"])]
        assert states == [idle.state for idle in expected]
        read = spans_in({"stages": [written["idle"]], "tick_s": data["tick_s"]})[0]
        flat = [edge for idle in expected for edge in (idle.begin_s - origin, idle.end_s - origin)]
        assert [edge for span in read for edge in span] == pytest.approx(flat, abs=data["tick_s"])


def test_more_tokens_than_any_microbatch_has_are_damage() -> None:
    timeline = Timeline.read(Schedule(6, 2, constant(0.5)).events())
    issued = list(timeline.issued)
    issued[3] = replace(issued[3], prefill_tokens=2**40)
    timeline.issued = Log(Issued, issued)
    with pytest.raises(InputError, match="damaged: a microbatch has more than 2,147,483,647"):
        spans(timeline, measure_bubbles(timeline))


def test_spans_know_what_ran_in_them() -> None:
    traces = Schedule(6, 2, constant(0.5)).events()
    # The trace of an issue is lost: its span stays, and is marked as unknown.
    traces[0] = [event for event in traces[0] if getattr(event, "text", "") != "m2[s2:0+10]"]
    timeline = Timeline.read(traces)
    data = spans(timeline, measure_bubbles(timeline))
    assert integers(data["stages"][1]["issue"]) == [0, 1, -1, 2, 3, 4]
    assert integers(data["prefill_tokens"]) == [10] * 5 and integers(data["decodes"]) == [0] * 5
    assert zlib.decompress(b64decode(data["texts"])).decode().split("\n")[2] == "m3[s3:0+10]"


def test_distributions_have_the_same_bins_for_all_runs_and_lose_no_value() -> None:
    uneven = Schedule(6, 2, table([[m + 1.0, 0.5] for m in range(6)]))
    timelines = [timeline_of(schedule) for schedule in (Schedule(8, 2, constant(1.0)), uneven)]
    found = distributions([(timeline, measure_bubbles(timeline)) for timeline in timelines])
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


BUBBLES: Bubbles = measure_bubbles(timeline_of(Schedule(8, 2, constant(1.0))))


@given(st.lists(st.floats(min_value=-1, max_value=100), max_size=3000))
def test_the_cdf_of_the_request_bubble_ends_at_all_requests_and_stays_small(values: list[float]) -> None:
    bubbles = replace(BUBBLES, request_bubble_s=dict(enumerate(values)))
    found = request_bubble_cdf(bubbles)
    assert len(found["seconds"]) == len(found["shares"]) <= 1000
    assert found["seconds"] == sorted(found["seconds"]) and found["shares"] == sorted(set(found["shares"]))
    if values:
        assert (found["seconds"][-1], found["shares"][-1]) == (max(values), 1.0)
    for at, share in zip(found["seconds"], found["shares"], strict=True):
        assert share <= sum(value <= at for value in values) / len(values)
