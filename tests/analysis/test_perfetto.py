"""The Chrome trace against a schema of our own: required fields of each phase, pairs and nesting."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import replace
from io import StringIO
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sarathi_pp.analysis.perfetto import chrome_events, write_chrome_trace
from sarathi_pp.analysis.stage_states import idle_spans
from sarathi_pp.analysis.timeline import Timeline
from sarathi_pp.core.request_index import NEXT_CHOICE
from sarathi_pp.trace.events import (
    Compute,
    Event,
    Head,
    Issued,
    RequestArrived,
    RequestFinished,
    Returned,
    Starved,
    TraceStart,
)
from tests.analysis.schedules import Schedule, constant, start
from tests.analysis.strategies import schedules

TraceEvent = dict[str, Any]

Keys = dict[str, type]
COMMON: Keys = {"ph": str, "name": str, "pid": int}
THREAD: Keys = COMMON | {"tid": int}
FLOW: Keys = THREAD | {"cat": str, "ts": float, "id": int, "bp": str}
ASYNC: Keys = THREAD | {"cat": str, "ts": float, "id": int, "args": dict}
KEYS: dict[str, Keys] = {
    "M": THREAD | {"args": dict},
    "X": THREAD | {"cat": str, "ts": float, "dur": float, "args": dict},
    "b": ASYNC,
    "e": ASYNC,
    "C": COMMON | {"ts": float, "args": dict},
    "s": FLOW,
    "t": FLOW,
    "f": FLOW,
}


def events_of(traces: list[list[Event]]) -> list[TraceEvent]:
    return list(chrome_events(Timeline.read(traces)))


def check(events: list[TraceEvent]) -> None:
    """Raise AssertionError for anything that a viewer would drop or draw wrongly."""
    for event in events:
        keys = KEYS[event["ph"]]
        assert event.keys() == keys.keys(), event
        assert all(type(event[key]) is kind for key, kind in keys.items()), event
        assert event.get("ts", 0) >= 0 and event.get("dur", 0) >= 0, event
    assert json.loads(json.dumps(events, allow_nan=False)) == events
    check_slices(events)
    check_flows(events)
    check_async(events)
    check_counters(events)


def phase(events: list[TraceEvent], phases: str) -> Iterator[TraceEvent]:
    return (event for event in events if event["ph"] in phases)


def row_of(event: TraceEvent) -> tuple[int, int]:
    return event["pid"], event["tid"]


def row_names(events: list[TraceEvent]) -> dict[tuple[int, int], tuple[str, str]]:
    named = {(row_of(event), event["name"]): event["args"].get("name") for event in phase(events, "M")}
    return {row: (named[row, "process_name"], named[row, "thread_name"]) for row, _ in named}


def check_slices(events: list[TraceEvent]) -> None:
    """Check that every row has its name and no overlapping slices: Perfetto drops slices that overlap."""
    rows: dict[tuple[int, int], list[TraceEvent]] = defaultdict(list)
    for event in phase(events, "X"):
        rows[row_of(event)].append(event)
    assert rows.keys() <= row_names(events).keys()
    for slices in rows.values():
        for left, right in zip(slices, slices[1:], strict=False):
            # Exact: times are eighths of a microsecond.
            assert left["ts"] + left["dur"] <= right["ts"], (left, right)


def check_flows(events: list[TraceEvent]) -> None:
    """Check that each flow starts and ends once and moves forward.

    Each step must be inside a slice of its microbatch.
    """
    spans = (event for event in phase(events, "X") if not event["name"].startswith("head"))
    slices = {(row_of(event), event["name"].split()[-1]): event for event in spans}
    flows: dict[int, list[TraceEvent]] = defaultdict(list)
    for event in phase(events, "stf"):
        flows[event["id"]].append(event)
    computing = [row for row, (_, thread) in row_names(events).items() if thread == "compute"]
    whole_way = ["issued", *["compute"] * len(computing), "returned"]
    for number, steps in flows.items():
        assert "".join(step["ph"] for step in steps) == "s" + "t" * len(computing) + "f"
        assert [row_names(events)[row_of(step)][1] for step in steps] == whole_way
        assert [row_of(step) for step in steps[1:-1]] == computing
        assert len({(step["name"], step["cat"], step["bp"]) for step in steps}) == 1
        assert [step["ts"] for step in steps] == sorted(step["ts"] for step in steps)
        for step in steps:
            around = slices[row_of(step), f"m{number}"]
            assert around["ts"] <= step["ts"] < around["ts"] + around["dur"]


def check_async(events: list[TraceEvent]) -> None:
    """Check that starts and ends of one id pair like brackets, in order of time."""
    opened: dict[int, list[str]] = defaultdict(list)
    last: dict[int, float] = defaultdict(float)
    for event in phase(events, "be"):
        assert event["ts"] >= last[event["id"]]
        last[event["id"]] = event["ts"]
        if event["ph"] == "b":
            opened[event["id"]].append(event["name"])
        else:
            assert opened[event["id"]].pop() == event["name"]
    assert not any(opened.values())


def check_counters(events: list[TraceEvent]) -> None:
    last: dict[str, float] = {}
    for event in phase(events, "C"):
        assert event["ts"] >= last.get(event["name"], 0.0)
        last[event["name"]] = event["ts"]
        assert event["args"] and all(type(value) is int and value >= 0 for value in event["args"].values())


@given(schedules())
def test_any_run_keeps_the_schema_and_every_microbatch_is_followed(schedule: Schedule) -> None:
    events = events_of(schedule.events())
    check(events)
    assert {event["id"] for event in phase(events, "s")} == set(range(schedule.microbatches))
    assert len(list(phase(events, "stf"))) == schedule.microbatches * (schedule.stages + 2)


@given(schedules())
def test_slices_are_the_spans_and_states_of_the_timeline(schedule: Schedule) -> None:
    timeline = Timeline.read(schedule.events())
    events = list(chrome_events(timeline))
    rows = {names: row for row, names in row_names(events).items()}
    for number, stage in enumerate(timeline.stages):
        process = f"stage {number} [{4 * number}, {4 * number + 4}) here"
        spans = zip(stage.microbatches, stage.starts, stage.ends, strict=True)
        expected = [(f"prefill m{m}", s, e) for m, s, e in spans]
        assert seconds_on(events, rows[process, "compute"], timeline) == expected
        idles = idle_spans(stage, timeline.window)
        assert seconds_on(events, rows[process, "idle"], timeline) == [
            (i.state.replace("_", " "), i.begin_s, i.end_s) for i in idles
        ]


def seconds_on(events: list[TraceEvent], row: tuple[int, int], timeline: Timeline) -> list[tuple[str, float, float]]:
    """Return the slices of one row in seconds of rank 0's clock. Times are exact: whole eighths."""
    begin = timeline.window[0]
    slices = [event for event in phase(events, "X") if row_of(event) == row]
    return [(e["name"], begin + e["ts"] / 1e6, begin + (e["ts"] + e["dur"]) / 1e6) for e in slices]


def by_hand() -> list[list[Event]]:
    """Make a trace of two stages, with a prompt of two chunks and one decode.

    The second request never finishes, and the third never runs.
    """
    issued = [
        Issued(0, 1.0, "m0[s0:0+8]", 8, 0, 0, 32.0, 1, 8),
        Issued(1, 1.5, "m1[s1:0+4 | d s0:8]", 4, 1, 9, 8.0, 2, 13),
    ]
    rank0: list[Event] = [start(0, 2), *(RequestArrived(index, 0.75, 8) for index in range(3)), *issued]
    rank0 += [Compute(0, 1.0, 1.0, 1.25, 2.0), Compute(1, 1.5, 1.5, 2.5, 3.0)]
    rank0 += [Returned(0, 3.0), RequestFinished(0, 0.75, 1.0, 3.0, 4.0, 8, 2, "length"), Returned(1, 4.0)]
    return [rank0, [start(1, 2), Compute(0, 1.0, 2.0, 2.25, 3.0), Compute(1, 1.5, 3.0, 3.25, 4.0)]]


def test_a_slice_tells_what_is_in_it_and_what_came_before() -> None:
    slices = [event for event in phase(events_of(by_hand()), "X") if event["cat"] == "microbatch"]
    compute = {(event["pid"], event["name"]): event["args"] for event in slices}
    assert compute[2, "prefill m0"] == {
        "text": "m0[s0:0+8]",
        "prefill_tokens": 8,
        "decodes": 0,
        "decode_context": 0,
        "issued_s": 0.0,
        "arrived_s": 0.0,
        "gap": {"host_s": 0.25},
    }
    assert compute[2, "mixed m1"]["gap_before_s"] == 0.5
    assert compute[2, "mixed m1"]["gap"] == {"host_s": 0.5}
    assert compute[3, "prefill m0"]["gap"] == {"recv_wait_s": 1.0, "host_s": 0.25}
    assert compute[3, "mixed m1"]["decode_context"] == 9
    idle = [event for event in phase(events_of(by_hand()), "X") if event["cat"] == "idle"]
    assert [event["args"] for event in idle if event["pid"] == 2] == [{"before": "m0"}, {"before": "m1"}, {}]


def test_a_head_is_a_slice_of_the_first_stage_s_compute() -> None:
    traces = by_hand()
    traces[0].append(Head(0, 3.0, 3.125, 3.5))
    events = events_of(traces)
    check(events)
    slices = [event for event in phase(events, "X") if event["cat"] == "microbatch" and event["pid"] == 2]
    assert [(event["name"], event["ts"], event["dur"]) for event in slices if "head" in event["name"]] == [
        ("head m0", 2.125e6, 0.375e6)
    ]
    assert {event["tid"] for event in slices} == {slices[0]["tid"]}


def test_reasons_last_until_the_next_one_or_the_next_issue() -> None:
    traces = by_hand()
    traces[0] += [Starved(0.5, "no_arrivals"), Starved(1.125, "full"), Starved(1.25, "no_kv"), Starved(3.5, "full")]
    events = events_of(traces)
    check(events)
    starved = [event for event in phase(events, "X") if event["cat"] == "starved"]
    assert {row_names(events)[row_of(event)][1] for event in starved} == {"starved"}
    assert [(event["name"], event["ts"] / 1e6, event["dur"] / 1e6) for event in starved] == [
        ("full", 0.125, 0.125),
        ("no_kv", 0.25, 0.25),
        ("full", 2.5, 0.5),
    ]


def test_requests_and_their_phases() -> None:
    events = events_of(by_hand())
    begins = {(e["name"], e["id"]): e["ts"] for e in phase(events, "b")}
    ends = {(e["name"], e["id"]): e["ts"] for e in phase(events, "e")}
    # It arrived before the window started, so it is put at 0.
    assert (begins["request", 0], ends["request", 0]) == (0.0, 3e6)
    assert (begins["prompt", 0], ends["prompt", 0]) == (0.0, 2e6)
    assert (begins["output", 0], ends["output", 0]) == (2e6, 3e6)
    assert (begins["request", 1], ends["request", 1]) == (0.0, 3e6)
    assert ("waiting", 1) not in begins
    facts = [e["args"] for e in phase(events, "b") if e["name"] == "request"]
    assert [(fact["arrived_s"], fact["finish_reason"]) for fact in facts] == [
        (-0.25, "length"),
        (-0.25, "unfinished"),
        (-0.25, "unfinished"),
    ]


def test_each_choice_of_a_request_has_its_name_and_its_own_slices() -> None:
    second = 3 + NEXT_CHOICE
    issued = [
        Issued(0, 1.0, "m0[s3:0+8]", 8, 0, 0, 32.0, 1, 8),
        Issued(1, 1.5, "m1[s3/1.2:0+8 | d s3:8]", 8, 1, 9, 32.0, 2, 16),
    ]
    trace: list[Event] = [start(0, 1), RequestArrived(3, 0.75, 8), RequestArrived(second, 0.75, 8), *issued]
    trace += [Compute(0, 1.0, 1.0, 1.25, 1.5), Compute(1, 1.5, 1.5, 1.75, 2.0), Returned(0, 1.5), Returned(1, 2.0)]
    trace += [
        RequestFinished(index, 0.75, at_s, at_s + 0.5, 2.5, 8, 1, "length") for index, at_s in ((3, 1.0), (second, 1.5))
    ]
    events = events_of([trace])
    names = [(e["name"], e["id"], e["args"]["request"]) for e in phase(events, "b")]
    phases = ("request", "waiting", "prompt", "output")
    assert names == [(name, index, shown) for index, shown in ((3, "3"), (second, "3/1")) for name in phases]
    texts = [event["args"]["text"] for event in phase(events, "X") if event["cat"] == "microbatch" and event["args"]]
    assert texts == ["m0[s3:0+8]", "m1[s3/1.2:0+8 | d s3:8]"] * 2  # issued, computed
    counted = [(e["ts"] / 1e6, *e["args"].values()) for e in phase(events, "C") if e["name"] == "requests"]
    assert counted == [(0.0, 1, 0), (0.0, 2, 0), (0.0, 1, 1), (0.5, 0, 2), (1.5, 0, 1), (1.5, 0, 0)]


def test_counters() -> None:
    traces = by_hand()
    traces[0].append(RequestFinished(2, 0.75, None, None, 5.0, 8, 0, "error"))
    counted = defaultdict(list)
    for event in phase(events_of(traces), "C"):
        counted[event["name"]].append((event["ts"] / 1e6, *event["args"].values()))
    assert counted["KV pages"] == [(0.0, 1), (0.5, 2)]
    assert counted["in flight"] == [(0.0, 1), (0.5, 2), (2.0, 1), (3.0, 0)]
    assert counted["requests"] == [
        *((0.0, 1, 0), (0.0, 2, 0), (0.0, 3, 0)),  # three wait
        *((0.0, 2, 1), (0.5, 1, 2)),  # s0 and s1 run
        *((3.0, 1, 1), (4.0, 0, 1)),  # s0 is done; s2 fails without having run
    ]


@given(schedules(), st.data())
def test_a_run_cut_off_anywhere_has_no_dangling_flow(schedule: Schedule, data: st.DataObject) -> None:
    traces = [trace[: data.draw(st.integers(1, len(trace)))] for trace in schedule.events(complete=False)]
    events = events_of(traces)
    check(events)
    recorded = [{e.microbatch for e in trace if isinstance(e, Compute)} for trace in traces]
    returned = {e.microbatch for e in Timeline.read(traces).returned}  # as far as all traces reach
    assert {event["id"] for event in phase(events, "s")} == returned.intersection(*recorded)


def test_what_rank_0_lost_of_a_microbatch_is_not_made_up() -> None:
    traces = by_hand()
    traces[0] = [event for event in traces[0] if getattr(event, "microbatch", 0) != 1]
    events = events_of(traces)
    check(events)
    (lost,) = (event for event in phase(events, "X") if event["name"] == "compute m1" and event["pid"] == 3)
    assert "text" not in lost["args"] and lost["args"]["gap_before_s"] == 0.25
    assert {event["id"] for event in phase(events, "f")} == {0}


def test_clocks_that_are_a_little_apart_bend_no_arrow_backwards() -> None:
    """Stage 1's clock is late, so its start appears to be before stage 0's.

    Within the span an arrow still connects them.
    """
    little, far = (Schedule(3, 2, constant(1.0)).events() for _ in range(2))
    little[1][0] = start(1, 2, offset_s=-1.5)
    far[1][0] = start(1, 2, offset_s=-2.5)
    for traces, followed in ((little, 3), (far, 0)):
        traces[1].pop()  # its end would turn the offset into a drift
        check(events := events_of(traces))
        assert len(list(phase(events, "s"))) == followed


def test_nothing_ran() -> None:
    events = events_of([[start(0, 2)], [start(1, 2)]])
    check(events)
    assert set(row_names(events).values()) == {
        *(("coordinator here", thread) for thread in ("issued", "starved", "returned")),
        *((f"stage {layers} here", thread) for layers in ("0 [0, 4)", "1 [4, 8)") for thread in ("compute", "idle")),
    }
    assert all(event["ph"] == "M" for event in events)


class Lines(StringIO):
    """A writer that remembers the longest single write."""

    longest = 0

    def write(self, text: str) -> int:
        self.longest = max(self.longest, len(text))
        return super().write(text)


def test_the_document_is_written_event_by_event() -> None:
    timeline = Timeline.read(Schedule(100, 2, constant(0.125)).events())
    file = Lines()
    write_chrome_trace(timeline, file)
    document = json.loads(file.getvalue())
    assert document["traceEvents"] == list(chrome_events(timeline))
    assert document["otherData"]["policy"] == "sarathi" and document["displayTimeUnit"] == "ms"
    assert file.longest < 500 < len(file.getvalue()) / 100


def test_the_whole_clock_is_known() -> None:
    traces = by_hand()
    assert isinstance(traces[0][0], TraceStart)
    traces[0][0] = replace(traces[0][0], at_s=0.5, unix_s=1000.0)
    file = StringIO()
    write_chrome_trace(Timeline.read(traces), file)
    assert json.loads(file.getvalue())["otherData"]["begin_unix_s"] == 1000.5


@pytest.mark.parametrize(
    "spoil",
    [
        lambda events: events[0].pop("pid"),
        lambda events: first(events, "X").update(ts=-1.0),
        lambda events: first(events, "X").update(dur=1e9),
        lambda events: first(events, "s").update(ts=1e9),
        lambda events: events.remove(first(events, "f")),
        lambda events: events.remove(first(events, "e")),
        lambda events: first(events, "t").update(tid=5),
        lambda events: first(events, "C").update(args={"used": -1}),
    ],
)
def test_the_schema_catches(spoil: Callable[[list[TraceEvent]], object]) -> None:
    events = events_of(by_hand())
    check(events)
    spoil(events)
    with pytest.raises(AssertionError):
        check(events)


def first(events: list[TraceEvent], ph: str) -> TraceEvent:
    return next(phase(events, ph))
