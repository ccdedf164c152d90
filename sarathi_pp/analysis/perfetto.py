r"""A run as a Chrome trace, the JSON that ui.perfetto.dev and chrome://tracing open.

    coordinator host            issued    |m0| |m1|                     marks of a microsecond
                                starved   :   | full |                  why no microbatch can be issued
                                returned  :   \               |m0|
    stage 0 [0, 8) host         compute   :    |=== m0 ===|  /          and: KV pages, microbatches in flight,
                                idle      |host|        |   /           requests waiting and running (counters),
    stage 1 [8, 16) host        compute                 |=== m0 ===|    each request (asynchronous slices)
                                idle      |- recv wait -|

A flow arrow follows each microbatch from its issue through every stage and back. A microbatch without a result (in a
killed run) has no arrow. The clocks of stages are not aligned exactly. If they put a microbatch's steps out of order by
more than a span, it has no arrow either.

Times are microseconds from the start of the run window. Earlier times (requests that arrived during the set-up) become
0, because Perfetto drops everything before 0. The arguments of an event hold the true times.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from heapq import merge
from itertools import chain, pairwise
from typing import Any, NamedTuple, TextIO

from sarathi_pp.analysis.csv_rows import run_begin
from sarathi_pp.analysis.stage_states import Idle, gap_before, idle_spans
from sarathi_pp.analysis.timeline import StageTimeline, Timeline
from sarathi_pp.core.request_index import index_name
from sarathi_pp.trace.events import Issued, RequestArrived, RequestFinished, Returned

TraceEvent = dict[str, Any]

# A tick is an eighth of a microsecond. Perfetto multiplies times by 1000 and drops fractions of a nanosecond. An eighth
# of a microsecond is a whole number of nanoseconds, so neighbouring slices touch in Perfetto too, and never overlap.
_TICKS_PER_US = 8
_TICKS_PER_S = _TICKS_PER_US * 1_000_000
_MARK_TICKS = _TICKS_PER_US


class _Row(NamedTuple):
    """The row in which Perfetto draws an event. Perfetto calls it a thread of a process."""

    pid: int
    tid: int

    def names(self, process: str, thread: str) -> Iterator[TraceEvent]:
        """Yield the metadata events that give the row its names and its position."""
        for name, args in (
            ("process_name", {"name": process}),
            ("process_sort_index", {"sort_index": self.pid}),
            ("thread_name", {"name": thread}),
            ("thread_sort_index", {"sort_index": self.tid}),
        ):
            yield {"ph": "M", "name": name, **self._asdict(), "args": args}


_ISSUED = _Row(1, 1)
_STARVED = _Row(1, 2)
_RETURNED = _Row(1, 3)


def _compute_row(stage: StageTimeline) -> _Row:
    return _Row(stage.start.stage + 2, 2 * stage.start.stage + 4)


def _idle_row(stage: StageTimeline) -> _Row:
    return _Row(stage.start.stage + 2, 2 * stage.start.stage + 5)


class _Slice(NamedTuple):
    """The time of one microbatch on one row: [begin, end) in ticks from the start of the run window."""

    microbatch: int
    begin: int
    end: int

    def event(self, name: str, row: _Row, args: Mapping[str, object]) -> TraceEvent:
        return _complete(f"{name} m{self.microbatch}", "microbatch", row, self.begin, self.end, args)


def write_chrome_trace(timeline: Timeline, file: TextIO) -> None:
    """Write the whole JSON document, one event per line. Only one event is in memory at a time."""
    to_json = json.JSONEncoder(separators=(",", ":"), allow_nan=False).encode
    separator = '{"traceEvents":[\n'
    for event in chrome_events(timeline):
        file.write(separator + to_json(event))
        separator = ",\n"
    file.write(f'\n],"displayTimeUnit":"ms","otherData":{to_json(_settings(timeline))}}}\n')


def chrome_events(timeline: Timeline) -> Iterator[TraceEvent]:
    """Yield the members of `traceEvents`, row after row.

    A slice of compute has the microbatch's printed form, its counts, and the gap before it in seconds as arguments.
    `gap_before_s` is the whole gap. The first slice of a stage does not have it. `gap` holds the part of the gap within
    the run window, by state.
    """
    ruler = _Ruler(run_begin(timeline))
    flows = _Flows((event.microbatch for event in timeline.issued), _rows(timeline, ruler))
    issue_marks, *computes, return_marks = _rows(timeline, ruler)
    issued = {event.microbatch: event for event in timeline.issued}
    yield from _names(timeline)
    for mark in issue_marks:
        yield mark.event("issue", _ISSUED, {"text": issued[mark.microbatch].text})
        yield from flows.step("s", _ISSUED, mark)
    for stage, spans in zip(timeline.stages, computes, strict=True):
        idles = idle_spans(stage, timeline.window)
        yield from _stage_events(stage, spans, idles, ruler, flows, issued)
    for mark in return_marks:
        yield mark.event("return", _RETURNED, {})
        yield from flows.step("f", _RETURNED, mark)
    yield from _starved_events(timeline, ruler)
    yield from _request_events(timeline, ruler)
    yield from _counters(timeline, ruler)


@dataclass(frozen=True, slots=True)
class _Ruler:
    """The conversion of seconds on rank 0's clock into ticks, and into seconds from the origin.

    Args:
        origin_s: start of the run window, on rank 0's clock.
    """

    origin_s: float

    def ticks(self, at_s: float) -> int:
        return max(0, round((at_s - self.origin_s) * _TICKS_PER_S))

    def seconds(self, at_s: float) -> float:
        return round(at_s - self.origin_s, 9)

    def marks(self, events: Iterable[Issued | Returned]) -> Iterator[_Slice]:
        """Yield a slice of a microsecond for each event. Slices that would overlap are moved or shortened a little."""
        last: _Slice | None = None
        for event in events:
            begin = self.ticks(event.at_s)
            if last is not None:
                begin = max(begin, last.begin + 1)
                yield last._replace(end=min(last.end, begin))
            last = _Slice(event.microbatch, begin, begin + _MARK_TICKS)
        if last is not None:
            yield last

    def computes(self, stage: StageTimeline) -> Iterator[_Slice]:
        for microbatch, start_s, end_s in zip(stage.microbatches, stage.starts, stage.ends, strict=True):
            yield _Slice(microbatch, self.ticks(start_s), self.ticks(end_s))


def _rows(timeline: Timeline, ruler: _Ruler) -> Iterator[Iterator[_Slice]]:
    """Yield the slices of each row, in the order in which a microbatch passes the rows: issued, stages, returned."""
    yield ruler.marks(timeline.issued)
    for stage in timeline.stages:
        yield ruler.computes(stage)
    yield ruler.marks(timeline.returned)


class _Flows:
    """Arrows from row to row, for the microbatches that pass all rows in order of time.

    An arrow has a step in each row, at the start of the microbatch's slice. If the clocks of two rows differ, a step is
    moved within its slice, so that it is not earlier than the previous step.
    """

    def __init__(self, microbatches: Iterable[int], rows: Iterable[Iterable[_Slice]]) -> None:
        reached = dict.fromkeys(microbatches, 0)
        for row in rows:
            reached = {
                span.microbatch: max(reached[span.microbatch], span.begin)
                for span in row
                if max(reached.get(span.microbatch, span.end), span.begin) < span.end
            }
        self._reached = dict.fromkeys(reached, 0)

    def step(self, phase: str, row: _Row, span: _Slice) -> Iterator[TraceEvent]:
        """Yield the step of an arrow in this slice, if its microbatch has an arrow. Call it row after row, in order.

        Args:
            phase: `s` starts an arrow, `t` continues it, and `f` ends it.
        """
        if span.microbatch not in self._reached:
            return
        at = self._reached[span.microbatch] = max(self._reached[span.microbatch], span.begin)
        names = {"name": "microbatch", "cat": "microbatch", "id": span.microbatch}
        yield {"ph": phase, **names, **row._asdict(), "ts": at / _TICKS_PER_US, "bp": "e"}


def _complete(name: str, category: str, row: _Row, begin: int, end: int, args: Mapping[str, object]) -> TraceEvent:
    times = {"ts": begin / _TICKS_PER_US, "dur": (end - begin) / _TICKS_PER_US}
    return {"ph": "X", "name": name, "cat": category, **row._asdict(), **times, "args": args}


def _names(timeline: Timeline) -> Iterator[TraceEvent]:
    coordinator = f"coordinator {timeline.stages[0].start.host}"
    yield from _ISSUED.names(coordinator, "issued")
    yield from _STARVED.names(coordinator, "starved")
    yield from _RETURNED.names(coordinator, "returned")
    for stage in timeline.stages:
        first, end = stage.start.layers
        name = f"stage {stage.start.stage} [{first}, {end}) {stage.start.host}"
        yield from _compute_row(stage).names(name, "compute")
        yield from _idle_row(stage).names(name, "idle")


def _settings(timeline: Timeline) -> dict[str, object]:
    start = timeline.stages[0].start
    return {
        "policy": start.policy,
        "stages": start.num_stages,
        "chunk_size": start.chunk_size,
        "inflight": start.most_inflight,
        "device": start.device,
        "kv_pages": start.num_pages,
        "page_size": start.page_size,
        "begin_unix_s": start.unix_s + run_begin(timeline) - start.at_s,
    }


def _stage_events(
    stage: StageTimeline,
    spans: Iterator[_Slice],
    idles: Iterator[Idle],
    ruler: _Ruler,
    flows: _Flows,
    issued: Mapping[int, Issued],
) -> Iterator[TraceEvent]:
    row = _compute_row(stage)
    idle = next(idles, None)
    heads = deque(_heads(stage, ruler))
    for position, span in enumerate(spans):
        while heads and heads[0].begin < span.begin:
            yield heads.popleft().event("head", row, {})
        gap: dict[str, float] = {}
        while idle is not None and idle.position == position:
            state = f"{idle.state}_s"
            gap[state] = round(gap.get(state, 0.0) + idle.end_s - idle.begin_s, 9)
            yield _idle_event(idle, stage, ruler, {"before": f"m{span.microbatch}"})
            idle = next(idles, None)
        event = issued.get(span.microbatch)
        args = _counts(event) | {
            "issued_s": ruler.seconds(stage.issued[position]),
            "arrived_s": ruler.seconds(stage.arrived[position]),
            "gap": gap,
        }
        gap_s = gap_before(stage, position)
        if gap_s is not None:
            args["gap_before_s"] = round(gap_s, 9)
        yield span.event(_mix(event), row, args)
        yield from flows.step("t", row, span)
    for head in heads:
        yield head.event("head", row, {})
    while idle is not None:
        yield _idle_event(idle, stage, ruler, {})
        idle = next(idles, None)


def _heads(stage: StageTimeline, ruler: _Ruler) -> Iterator[_Slice]:
    heads = stage.heads
    for microbatch, start_s, end_s in zip(heads.microbatches, heads.starts, heads.ends, strict=True):
        yield _Slice(microbatch, ruler.ticks(start_s), ruler.ticks(end_s))


def _mix(issued: Issued | None) -> str:
    """Return one word for the content of a microbatch. Perfetto colours slices by their name, without its numbers."""
    if issued is None:
        return "compute"
    if issued.prefill_tokens and issued.decodes:
        return "mixed"
    return "prefill" if issued.prefill_tokens else "decode"


def _counts(issued: Issued | None) -> dict[str, object]:
    if issued is None:
        return {}
    return {
        "text": issued.text,
        "prefill_tokens": issued.prefill_tokens,
        "decodes": issued.decodes,
        "decode_context": issued.decode_context,
    }


def _idle_event(idle: Idle, stage: StageTimeline, ruler: _Ruler, args: Mapping[str, object]) -> TraceEvent:
    name = idle.state.replace("_", " ")
    return _complete(name, "idle", _idle_row(stage), ruler.ticks(idle.begin_s), ruler.ticks(idle.end_s), args)


def _starved_events(timeline: Timeline, ruler: _Ruler) -> Iterator[TraceEvent]:
    """Yield the reasons why no microbatch could be issued, each up to the next reason or the next issue."""
    reasons = ((event.at_s, event.reason) for event in timeline.starved)
    changes = merge(reasons, ((event.at_s, "") for event in timeline.issued))
    for (since, reason), (until, _) in pairwise(chain(changes, [(timeline.window[1], "")])):
        begin, end = ruler.ticks(since), ruler.ticks(until)
        if reason and begin < end:
            yield _complete(reason, "starved", _STARVED, begin, end, {})


def _request_events(timeline: Timeline, ruler: _Ruler) -> Iterator[TraceEvent]:
    """Yield each request from arrival to end, with its phases: waiting, prompt and output.

    An unfinished request ends at the time of the last recorded event.
    """
    finished = {request.index: request for request in timeline.finished}
    recorded = [stage.ends[-1] for stage in timeline.stages if stage.ends]
    recorded += [events[-1].at_s for events in (timeline.issued, timeline.returned, timeline.arrived) if events]
    last_s = max(recorded, default=ruler.origin_s)
    for arrival in timeline.arrived:
        request = finished.get(arrival.index)
        end_s = request.finished_s if request else max(arrival.at_s, last_s)
        moments = [arrival.at_s]
        if request is not None:
            begun = (request.first_issue_s, request.first_token_s)
            moments += [*(at_s for at_s in begun if at_s is not None), end_s]
        # All have one name, because Perfetto then draws the asynchronous slices in as few lanes as possible.
        yield _async("b", "request", arrival.index, ruler.ticks(arrival.at_s), _facts(arrival, request, ruler))
        for phase, (since, until) in zip(("waiting", "prompt", "output"), pairwise(moments), strict=False):
            yield _async("b", phase, arrival.index, ruler.ticks(since), {"request": index_name(arrival.index)})
            yield _async("e", phase, arrival.index, ruler.ticks(until), {})
        yield _async("e", "request", arrival.index, ruler.ticks(end_s), {})


def _facts(arrival: RequestArrived, request: RequestFinished | None, ruler: _Ruler) -> dict[str, object]:
    facts: dict[str, object] = {
        "request": index_name(arrival.index),
        "arrived_s": ruler.seconds(arrival.at_s),
        "prompt_tokens": arrival.prompt_tokens,
    }
    if request is None:
        return facts | {"finish_reason": "unfinished"}
    return facts | {
        "output_tokens": request.output_tokens,
        "finish_reason": request.finish_reason,
        "preemptions": request.preemptions,
        "cached_tokens": request.cached_tokens,
    }


def _async(ph: str, name: str, index: int, at: int, args: Mapping[str, object]) -> TraceEvent:
    row = _ISSUED._asdict()
    return {"ph": ph, "name": name, "cat": "request", "id": index, **row, "ts": at / _TICKS_PER_US, "args": args}


def _counters(timeline: Timeline, ruler: _Ruler) -> Iterator[TraceEvent]:
    for event in timeline.issued:
        yield _counter("KV pages", ruler.ticks(event.at_s), used=event.pages_used)
    inflight = 0
    back = ((event.at_s, -1) for event in timeline.returned)
    for at_s, change in merge(back, ((event.at_s, 1) for event in timeline.issued)):
        inflight += change
        yield _counter("in flight", ruler.ticks(at_s), microbatches=inflight)
    waiting = running = 0
    for at_s, more_waiting, more_running in _request_changes(timeline):
        waiting += more_waiting
        running += more_running
        yield _counter("requests", ruler.ticks(at_s), waiting=waiting, running=running)


def _counter(name: str, at: int, **values: int) -> TraceEvent:
    return {"ph": "C", "name": name, "pid": _ISSUED.pid, "ts": at / _TICKS_PER_US, "args": values}


def _request_changes(timeline: Timeline) -> list[tuple[float, int, int]]:
    """Return (seconds, change of waiting requests, change of running requests) in order of time.

    A request runs from its first chunk to its end.
    """
    started: dict[int, float] = {}
    for event in timeline.issued:
        for sequence in event.sequences:
            started.setdefault(sequence, event.at_s)
    changes = [(arrival.at_s, 1, 0) for arrival in timeline.arrived]
    changes += [(at_s, -1, 1) for at_s in started.values()]
    changes += [(r.finished_s, 0, -1) if r.index in started else (r.finished_s, -1, 0) for r in timeline.finished]
    return sorted(changes, key=lambda change: change[0])
