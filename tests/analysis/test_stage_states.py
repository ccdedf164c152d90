from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sarathi_pp.analysis.bubbles import measure_bubbles
from sarathi_pp.analysis.intervals import intersect, length, merge
from sarathi_pp.analysis.stage_states import Idle, gap_before, idle_spans
from sarathi_pp.analysis.timeline import Timeline
from sarathi_pp.trace.events import Compute, Event, Head, Issued, Returned, SendWait
from tests.analysis.schedules import Schedule, constant, start
from tests.analysis.strategies import schedules

STATES = ("send_wait", "no_work", "recv_wait", "host")


def by_hand(*events: Event) -> Timeline:
    """Make a trace of one stage, with one microbatch issued at 0 that comes back at 10."""
    issued = Issued(0, 0.0, "m0[s0:0+1]", 1, 0, 0, 0.5, 1, 1)
    return Timeline.read([[start(0, 1), issued, *events, Returned(0, 10.0)]])


def spans(timeline: Timeline) -> list[Idle]:
    return list(idle_spans(timeline.stages[0], timeline.window))


def test_states_of_one_gap_in_order() -> None:
    assert spans(by_hand(SendWait(1.5, 2.0), Compute(0, 1.0, 3.0, 5.0, 9.0))) == [
        ("no_work", 0.0, 1.0, 0),
        ("recv_wait", 1.0, 1.5, 0),
        ("send_wait", 1.5, 2.0, 0),
        ("recv_wait", 2.0, 3.0, 0),
        ("host", 3.0, 5.0, 0),
        ("no_work", 9.0, 10.0, None),
    ]


def test_a_send_wait_that_a_compute_cuts_in_two() -> None:
    waits = [SendWait(-5.0, -1.0), SendWait(1.0, 3.0), SendWait(8.5, 9.5)]
    assert spans(by_hand(*waits, Compute(0, 0.0, 0.0, 2.0, 9.0))) == [
        ("host", 0.0, 1.0, 0),
        ("send_wait", 1.0, 2.0, 0),
        ("send_wait", 9.0, 9.5, None),
        ("no_work", 9.5, 10.0, None),
    ]


def test_a_head_is_compute_and_what_lies_before_it_no_work_until_its_rows_are_here() -> None:
    timeline = by_hand(Compute(0, 0.0, 0.0, 1.0, 4.0), Head(0, 6.0, 6.5, 8.0), SendWait(4.5, 5.0))
    assert spans(timeline) == [
        ("host", 0.0, 1.0, 0),
        ("no_work", 4.0, 4.5, None),
        ("send_wait", 4.5, 5.0, None),
        ("no_work", 5.0, 6.0, None),
        ("host", 6.0, 6.5, None),
        ("no_work", 8.0, 10.0, None),
    ]


def test_the_gap_before_a_microbatch_is_less_by_the_heads_in_it() -> None:
    first, second = Compute(0, 0.0, 0.0, 0.0, 2.0), Compute(1, 5.0, 5.0, 6.0, 7.0)
    timeline = by_hand(first, second, Head(0, 3.0, 3.5, 4.0), Head(1, 7.0, 7.5, 8.0))
    assert gap_before(timeline.stages[0], 1) == 3.5
    assert [idle for idle in spans(timeline) if idle.position == 1] == [
        ("no_work", 2.0, 3.0, 1),
        ("host", 3.0, 3.5, 1),
        ("no_work", 4.0, 5.0, 1),
        ("host", 5.0, 6.0, 1),
    ]


def test_nothing_came_back() -> None:
    timeline = Timeline.read([[start(0, 1), SendWait(0.0, 1.0)]])
    assert spans(timeline) == []


instants = st.integers(-12, 60).map(lambda quarters: quarters / 4)
pairs = st.lists(st.tuples(instants, instants).map(sorted), max_size=5)


@given(pairs, pairs, pairs, st.lists(instants, min_size=10, max_size=10))
def test_records_that_contradict_each_other(
    spans: list[list[float]], waits: list[list[float]], heads: list[list[float]], at: list[float]
) -> None:
    """Clocks differ, spans overlap or are outside the window: the states are still those of `bubbles`."""
    computes = [Compute(m, at[2 * m], at[2 * m + 1], begin, end) for m, (begin, end) in enumerate(spans)]
    left = [Head(m, at[-1 - m], begin, end) for m, (begin, end) in enumerate(heads)]
    check_states(by_hand(*(SendWait(begin, end) for begin, end in waits), *computes, *left))


@given(schedules())
def test_spans_are_the_states_that_bubbles_measure(schedule: Schedule) -> None:
    check_states(Timeline.read(schedule.events()))


def check_states(timeline: Timeline) -> None:
    for stage, measured in zip(timeline.stages, measure_bubbles(timeline).stages, strict=True):
        idles = list(idle_spans(stage, timeline.window))
        for state in STATES:
            seconds = sum(idle.end_s - idle.begin_s for idle in idles if idle.state == state)
            assert seconds == pytest.approx(getattr(measured, f"{state}_s"), abs=1e-9)
        spans = [*zip(stage.starts, stage.ends, strict=True), *stage.heads.spans()]
        whole, computing = [timeline.window], merge(spans)
        stretches = [(idle.begin_s, idle.end_s) for idle in idles]
        assert not intersect(stretches, computing) and intersect(stretches, whole) == stretches
        assert length(stretches) + length(intersect(computing, whole)) == pytest.approx(length(whole), abs=1e-9)
        assert all(idle.begin_s < idle.end_s for idle in idles)
        assert all(left.end_s <= right.begin_s for left, right in zip(idles, idles[1:], strict=False))
        positions = [len(stage.starts) if idle.position is None else idle.position for idle in idles]
        assert positions == sorted(positions)


def test_the_first_compute_has_no_gap_before_it() -> None:
    stage = Timeline.read(Schedule(2, 2, constant(1.0), host=constant(0.25)).events()).stages[1]
    assert (gap_before(stage, 0), gap_before(stage, 1)) == (None, 0.25)
