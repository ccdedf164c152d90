from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given

from sarathi_pp.analysis.bubbles import Bubbles, busy_strip, measure_bubbles
from sarathi_pp.analysis.summary import summarise
from sarathi_pp.analysis.timeline import Timeline
from sarathi_pp.trace.events import Compute, Event, Issued, Returned, SendWait, TraceEnd, TraceStart
from tests.analysis.schedules import Schedule, added, constant, once, start, table
from tests.analysis.strategies import schedules

STATES = ("compute_s", "recv_wait_s", "send_wait_s", "host_s", "no_work_s")


def measure(traces: list[list[Event]]) -> Bubbles:
    return measure_bubbles(Timeline.read(traces))


@pytest.mark.parametrize("stages", [1, 2, 4, 7])
@pytest.mark.parametrize("microbatches", [1, 2, 5, 20])
def test_equal_microbatches_leave_exactly_the_ramp(microbatches: int, stages: int) -> None:
    bubbles = measure(Schedule(microbatches, stages, constant(1.0)).events())
    assert bubbles.wall_s == microbatches + stages - 1
    assert bubbles.bubble_ratio == pytest.approx((stages - 1) / (microbatches + stages - 1), abs=1e-12)
    assert all(stage.compute_s == microbatches for stage in bubbles.stages)
    assert all(stage.closing_error == 0 for stage in bubbles.stages)


def test_ramp_is_receive_wait_at_the_front_and_no_work_at_the_back() -> None:
    first, second, third = measure(Schedule(4, 3, constant(1.0)).events()).stages
    assert (first.recv_wait_s, first.no_work_s) == (0, 2)
    assert (second.recv_wait_s, second.no_work_s) == (1, 1)
    assert (third.recv_wait_s, third.no_work_s) == (2, 0)


# On the last stage, in the middle of a run in which every stage always has its next input waiting.
ASLEEP = once(0.02, 2, 1)
PLACES = {
    "compute_s": Schedule(5, 2, added(constant(0.1), ASLEEP)),
    "recv_wait_s": Schedule(5, 2, constant(0.1), transfer=ASLEEP),
    "host_s": Schedule(5, 2, constant(0.1), host=ASLEEP),
    "send_wait_s": Schedule(5, 2, constant(0.1), send_wait=ASLEEP),
}


@pytest.mark.parametrize("state", PLACES)
def test_sleep_on_a_stage_shows_in_its_figure_and_no_other(state: str) -> None:
    assert_only_change(Schedule(5, 2, constant(0.1)), PLACES[state], stage=1, state=state)


def test_sleep_before_issue_shows_as_no_work_and_no_other() -> None:
    plain = Schedule(5, 2, constant(0.1), issue=lambda m, s: 0.1 if m else 0.0)
    late = replace(plain, issue=added(plain.issue, once(0.02, 2, 0)))
    assert_only_change(plain, late, stage=0, state="no_work_s")


def assert_only_change(plain: Schedule, delayed: Schedule, *, stage: int, state: str) -> None:
    before, after = measure(plain.events()).stages[stage], measure(delayed.events()).stages[stage]
    for name in STATES:
        change = getattr(after, name) - getattr(before, name)
        assert change == pytest.approx(0.02 if name == state else 0.0, abs=1e-9), name


def by_hand(*events: Event) -> Bubbles:
    """Make a trace of one stage, with one microbatch issued at 0 that comes back at 10."""
    issued = Issued(0, 0.0, "m0[s0:0+1]", 1, 0, 0, 0.5, 1, 1)
    return measure([[start(0, 1), issued, *events, Returned(0, 10.0)]])


def test_states_of_one_gap() -> None:
    stage = by_hand(SendWait(1.5, 2.0), Compute(0, 1.0, 3.0, 5.0, 9.0)).stages[0]
    assert (stage.no_work_s, stage.send_wait_s, stage.recv_wait_s, stage.host_s) == (2.0, 0.5, 1.5, 2.0)


def test_send_waits_win_cross_gaps_and_merge() -> None:
    waits = [SendWait(8.5, 9.5), SendWait(1.0, 2.0), SendWait(1.5, 3.0), SendWait(-5.0, -1.0)]
    stage = by_hand(*waits, Compute(0, 0.0, 0.0, 4.0, 9.0)).stages[0]
    assert (stage.send_wait_s, stage.host_s, stage.no_work_s) == (2.5, 2.0, 0.5)
    assert stage.compute_s == 5.0


def test_one_send_wait_may_touch_several_gaps() -> None:
    spans = [Compute(0, 0.0, 0.0, 1.0, 1.5), Compute(1, 0.0, 0.0, 3.0, 4.0)]
    stage = by_hand(*spans, SendWait(0.5, 2.0)).stages[0]
    assert (stage.send_wait_s, stage.host_s) == (1.0, 1.5)


def test_input_that_was_here_before_its_issue_by_skewed_clocks_was_issued() -> None:
    stage = by_hand(Compute(0, 6.0, 2.0, 7.0, 10.0)).stages[0]
    assert (stage.no_work_s, stage.recv_wait_s, stage.host_s) == (2.0, 0.0, 5.0)


def test_overlapping_spans_show_as_closing_error() -> None:
    overlapping = by_hand(Compute(0, 0.0, 0.0, 0.0, 6.0), Compute(1, 0.0, 0.0, 4.0, 10.0)).stages[0]
    assert overlapping.closing_error == pytest.approx(0.2)
    nested = by_hand(Compute(0, 0.0, 0.0, 0.0, 6.0), Compute(1, 0.0, 0.0, 2.0, 4.0)).stages[0]
    assert nested.closing_error == pytest.approx(0.2)
    assert nested.no_work_s == 4.0


def test_what_lies_outside_the_window_does_not_count() -> None:
    early, late = Compute(0, -3.0, -3.0, -2.0, 1.0), Compute(2, 6.0, 7.0, 12.0, 13.0)
    stage = by_hand(early, Compute(1, 1.0, 1.0, 1.0, 5.0), late).stages[0]
    assert (stage.compute_s, stage.no_work_s, stage.recv_wait_s, stage.host_s) == (5.0, 1.0, 1.0, 3.0)
    assert stage.closing_error == 0


def test_no_result_has_no_figures() -> None:
    bubbles = measure([[start(0, 2)], [start(1, 2)]])
    assert bubbles.wall_s == 0
    assert bubbles.bubble_ratio is bubbles.bubble_ratio_steady is bubbles.overlap is None
    assert all(getattr(stage, state) == 0 for stage in bubbles.stages for state in STATES)


def test_empty_window_does_not_divide() -> None:
    events: list[Event] = [Issued(0, 1.0, "m0[s0:0+1]", 1, 0, 0, 0.5, 1, 1), Compute(0, 1.0, 1.0, 1.0, 1.0, 0.0)]
    bubbles = measure([[start(0, 1), *events, Returned(0, 1.0)]])
    assert bubbles.bubble_ratio is None
    assert bubbles.stages[0].cpu_ratio is None


def test_steady_leaves_out_fill_and_drain() -> None:
    """12 microbatches of 1 s on 3 stages: the last stage starts at 2.

    Request m is done at m + 3. So fewer than 3 are left from 12 on, when stage 0 has just finished.
    """
    bubbles = measure(Schedule(12, 3, constant(1.0)).events())
    assert bubbles.steady == ((2.0, 12.0),)
    assert bubbles.bubble_ratio_steady == 0
    assert bubbles.overlap == 1
    assert [len(positions) for positions in bubbles.steady_positions] == [10, 10, 10]


def test_steady_sees_imbalance_that_the_ramp_would_hide() -> None:
    bubbles = measure(Schedule(20, 2, table([[1.0, 2.0]] * 20)).events())
    assert bubbles.stages[1].bubble_ratio_steady == 0
    assert bubbles.stages[0].bubble_ratio_steady is not None
    # Stage 0 is done at 20. The steady window is [1, 39): one request is left from 39 on.
    assert bubbles.stages[0].bubble_ratio_steady == pytest.approx(1 - 19 / 38)
    assert bubbles.overlap == pytest.approx(19 / 38)


def test_steady_is_null_below_two_microbatches_a_stage() -> None:
    enough = measure(Schedule(8, 3, constant(1.0)).events())
    short = measure(Schedule(7, 3, constant(1.0)).events())
    assert enough.bubble_ratio_steady == 0
    assert short.bubble_ratio_steady is short.overlap is None
    assert short.steady == ()


def test_request_bubbles_are_the_gaps_before_its_microbatches() -> None:
    """On stage 1 the request waits 1 s for each microbatch after the first, whose gap does not count."""
    traces = Schedule(3, 2, table([[2.0, 1.0]] * 3)).events()
    texts = iter(["m0[s0:0+9]", "m1[s0:9+9 | d s7.2:4]", "m2[s1:0+9 | d s7.2:5]"])
    traces[0] = [replace(e, text=next(texts)) if isinstance(e, Issued) else e for e in traces[0]]
    assert measure(traces).request_bubble_s == {0: 1.0, 7: 2.0, 1: 1.0}


def test_cpu_time_well_below_the_span_means_shared_cores() -> None:
    for share, shared in ((1.0, False), (0.91, False), (0.89, True)):
        stage = measure(Schedule(3, 1, constant(1.0), cpu_share=share).events()).stages[0]
        assert stage.cpu_ratio == pytest.approx(share)
        assert stage.cores_shared is shared
    assert measure(Schedule(3, 1, constant(1.0), cpu_share=None).events()).stages[0].cores_shared is False


def test_trace_cut_off_ends_the_window_at_what_all_stages_wrote() -> None:
    traces = Schedule(10, 2, constant(1.0)).events(complete=False)
    traces[1] = traces[1][:6]  # its start and microbatches 0 to 4; rank 0 has all ten results
    bubbles = measure(traces)
    assert bubbles.wall_s == 6
    assert [stage.compute_s for stage in bubbles.stages] == [6, 5]
    assert sorted(bubbles.request_bubble_s) == [0, 1, 2, 3, 4]
    assert all(stage.closing_error == 0 for stage in bubbles.stages)


@pytest.mark.parametrize("short", range(6))
def test_a_trace_that_stops_early_makes_no_stage_idle_and_counts_no_token_too_many(short: int) -> None:
    """Microbatches take one second on six stages. The file of one stage ends with its twelfth."""
    traces = Schedule(20, 6, constant(1.0)).events(complete=False)
    computes = [event for event in traces[short] if isinstance(event, Compute)]
    traces[short] = [event for event in traces[short] if event not in computes[12:]]
    bubbles = measure(traces)
    assert bubbles.wall_s == 12 + short, "the last result by then"
    assert [stage.compute_s for stage in bubbles.stages] == [12 + short - stage for stage in range(6)]
    report = summarise(traces)
    assert report["completed"] == report["microbatches"] == 12 + short - 5


def shifted(trace: list[Event], seconds: float, drift: float) -> list[Event]:
    """Shift a trace to a local clock that reads `seconds` more at 0 and gains `drift` seconds per second."""

    def local(t: float) -> float:
        return t + seconds + drift * t

    events: list[Event] = []
    for event in trace:
        match event:
            case TraceStart():
                event = replace(event, at_s=local(0.0), clock_offset_s=-seconds)
            case Compute():
                event = replace(
                    event,
                    arrived_s=local(event.arrived_s),
                    start_s=local(event.start_s),
                    end_s=local(event.end_s),
                )
            case SendWait():
                event = SendWait(local(event.start_s), local(event.end_s))
            case TraceEnd():
                event = replace(event, at_s=local(event.at_s), clock_offset_s=event.at_s - local(event.at_s))
        events.append(event)
    return events


@pytest.mark.parametrize("drift", [0.0, 1e-3])
def test_clock_offsets_are_applied_and_interpolated(drift: float) -> None:
    schedule = Schedule(6, 3, table([[0.1, 0.3, 0.2]] * 6), transfer=constant(0.01), send_wait=once(0.05, 3, 1))
    straight = schedule.events()
    skewed = [straight[0], shifted(straight[1], 1000.0, drift), shifted(straight[2], -77.0, -drift)]
    for expected, stage in zip(measure(straight).stages, measure(skewed).stages, strict=True):
        for state in STATES:
            assert getattr(stage, state) == pytest.approx(getattr(expected, state), abs=1e-9), state


@given(schedules(microbatches=12, least_compute=0, most=50, fraction=16))
def test_states_partition_the_window(schedule: Schedule) -> None:
    traces = schedule.events()
    bubbles = measure(traces)
    for index, stage in enumerate(bubbles.stages):
        assert sum(getattr(stage, state) for state in STATES) == stage.wall_s == bubbles.wall_s
        every = [(m, index) for m in range(schedule.microbatches)]
        assert stage.compute_s == sum(schedule.compute(*key) for key in every)
        assert stage.send_wait_s == sum(schedule.send_wait(*key) for key in every)
        assert min(getattr(stage, state) for state in STATES) >= 0
    if bubbles.bubble_ratio_steady is not None:
        assert -1e-9 <= bubbles.bubble_ratio_steady <= 1
        # All stages compute at once for at most the time of the least busy stage.
        assert bubbles.overlap is not None
        least = min(1 - (stage.bubble_ratio_steady or 0.0) for stage in bubbles.stages)
        assert bubbles.overlap <= least + 1e-9


def test_the_strip_holds_all_of_the_compute_and_nothing_else() -> None:
    timeline = Timeline.read(Schedule(7, 2, constant(1.0), host=constant(0.3)).events())
    begin, end = timeline.window
    for stage, measured in zip(timeline.stages, measure_bubbles(timeline).stages, strict=True):
        for cells in (1, 5, 64, 1000):
            strip = busy_strip(stage, timeline.window, cells)
            assert len(strip) == cells and all(0 <= share <= 1 for share in strip)
            assert sum(strip) * (end - begin) / cells == pytest.approx(measured.compute_s)


def test_an_empty_window_has_no_strip() -> None:
    timeline = Timeline.read(Schedule(2, 1, constant(1.0)).events())
    assert busy_strip(timeline.stages[0], (3.0, 3.0), 8) == []
