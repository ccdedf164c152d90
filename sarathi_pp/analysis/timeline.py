"""The traces of one run, read once, with all times converted to rank 0's clock. All figures are computed from it."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from itertools import chain, pairwise, zip_longest
from math import inf
from operator import sub

from sarathi_pp.analysis.event_columns import Log
from sarathi_pp.analysis.intervals import Interval, merge
from sarathi_pp.errors import InputError
from sarathi_pp.trace.events import (
    Compute,
    Cut,
    CutReason,
    Event,
    Head,
    Issued,
    RequestArrived,
    RequestFinished,
    Returned,
    RowRefused,
    SendWait,
    Starved,
    Totals,
    TraceEnd,
    TraceStart,
)

_COPY_AGAIN = "if they were copied, copy them again"


@dataclass(frozen=True, slots=True)
class Alignment:
    """The conversion of one rank's times to rank 0's clock.

    Attributes:
        anchor_s: a time on the rank's own clock.
        offset_s: seconds to add at that time.
        drift: change of the offset, in seconds per second.
    """

    anchor_s: float
    offset_s: float
    drift: float

    @classmethod
    def of(cls, start: TraceStart, end: TraceEnd | None) -> Alignment:
        """Return the conversion from the offsets that both ends of a trace hold.

        If the trace has no end, the offset at its start counts for all times.
        """
        if end is None or end.at_s <= start.at_s:
            return cls(start.at_s, start.clock_offset_s, 0.0)
        drift = (end.clock_offset_s - start.clock_offset_s) / (end.at_s - start.at_s)
        return cls(start.at_s, start.clock_offset_s, drift)

    def to_rank0(self, local_s: float) -> float:
        return local_s + self.offset_s + self.drift * (local_s - self.anchor_s)


def _seconds() -> array[float]:
    return array("d")


@dataclass(slots=True)
class Heads:
    """The LM heads that the first stage has computed for the last one. Parallel arrays in the order of `starts`.

    Attributes:
        microbatches: index of each microbatch.
        arrived: seconds at which the head's input, the rows of the last stage, was complete.
        starts, ends: seconds at which the computation started and ended.
    """

    microbatches: array[int] = field(default_factory=lambda: array("q"))
    arrived: array[float] = field(default_factory=_seconds)
    starts: array[float] = field(default_factory=_seconds)
    ends: array[float] = field(default_factory=_seconds)

    def add(self, head: Head) -> None:
        self.microbatches.append(head.microbatch)
        self.arrived.append(head.arrived_s)
        self.starts.append(head.start_s)
        self.ends.append(head.end_s)

    def align(self, clock: Alignment) -> None:
        """Convert all times to rank 0's clock, and sort by start."""
        order = sorted(range(len(self.starts)), key=self.starts.__getitem__)
        self.microbatches = array("q", [self.microbatches[i] for i in order])
        for name in ("arrived", "starts", "ends"):
            local = getattr(self, name)
            setattr(self, name, array("d", [clock.to_rank0(local[i]) for i in order]))

    def cut(self, count: int) -> None:
        """Keep only the LM heads of the first `count` microbatches."""
        kept = [place for place, microbatch in enumerate(self.microbatches) if microbatch < count]
        for name in ("microbatches", "arrived", "starts", "ends"):
            column = getattr(self, name)
            setattr(self, name, array(column.typecode, [column[place] for place in kept]))

    def spans(self) -> Iterator[Interval]:
        return zip(self.starts, self.ends, strict=True)

    def seconds(self) -> dict[int, float]:
        """Return the seconds of the LM heads, by index of the microbatch."""
        lengths = map(sub, self.ends, self.starts)
        return dict(zip(self.microbatches, lengths, strict=True))


@dataclass(slots=True)
class StageTimeline:
    """The work of one stage, on rank 0's clock. The arrays are parallel, in the order of `starts`.

    Attributes:
        cut: the reason why the trace holds only the first part of the run; None if it holds the whole run.
        microbatches: index of each microbatch that the stage computed.
        issued: seconds at which the coordinator issued it.
        arrived: seconds at which its input was complete on this stage.
        starts, ends: seconds at which the stage started and ended its compute.
        send_waits: intervals in which no send buffer was free, sorted and disjoint.
        heads: LM heads that this stage computed for the last one. Only the first stage has some.
        cpu_s: CPU seconds of the computing thread, summed over the spans for which they are known.
        spanned_s: length of the same spans, summed, without collective_s and mask_s.
        collective_s: seconds of sums over the ranks of the stage; None if the stage has a single rank.
        mask_s: seconds in which drawing waited for masks of grammars; None if the stage drew no row with a grammar.
    """

    start: TraceStart
    end: TraceEnd | None = None
    cut: CutReason | None = None
    microbatches: array[int] = field(default_factory=lambda: array("q"))
    issued: array[float] = field(default_factory=_seconds)
    arrived: array[float] = field(default_factory=_seconds)
    starts: array[float] = field(default_factory=_seconds)
    ends: array[float] = field(default_factory=_seconds)
    send_waits: list[Interval] = field(default_factory=list)
    heads: Heads = field(default_factory=Heads)
    cpu_s: float = 0.0
    spanned_s: float = 0.0
    collective_s: float | None = None
    mask_s: float | None = None

    def add(self, span: Compute) -> None:
        self.microbatches.append(span.microbatch)
        self.issued.append(span.issued_s)
        self.arrived.append(span.arrived_s)
        self.starts.append(span.start_s)
        self.ends.append(span.end_s)
        if span.cpu_s is not None:
            self.cpu_s += span.cpu_s
            self.spanned_s += span.end_s - span.start_s - (span.collective_s or 0.0) - (span.mask_s or 0.0)
        if span.collective_s is not None:
            self.collective_s = (self.collective_s or 0.0) + span.collective_s
        self._add_masks(span)

    def add_head(self, head: Head) -> None:
        self.heads.add(head)
        if head.cpu_s is not None:
            self.cpu_s += head.cpu_s
            self.spanned_s += head.end_s - head.start_s - (head.mask_s or 0.0)
        self._add_masks(head)

    def _add_masks(self, span: Compute | Head) -> None:
        if span.mask_s is not None:
            self.mask_s = (self.mask_s or 0.0) + span.mask_s

    def busy(self) -> list[Interval]:
        """Return the intervals in which the stage computed layers or LM heads, sorted and disjoint."""
        return merge(chain(zip(self.starts, self.ends, strict=True), self.heads.spans()))

    def align(self) -> None:
        """Convert the local times to rank 0's clock, and sort by start. `issued` is on that clock already."""
        clock = Alignment.of(self.start, self.end)
        order = sorted(range(len(self.starts)), key=self.starts.__getitem__)
        self.microbatches = array("q", [self.microbatches[i] for i in order])
        self.issued = array("d", [self.issued[i] for i in order])
        self.arrived = array("d", [clock.to_rank0(self.arrived[i]) for i in order])
        self.starts = array("d", [clock.to_rank0(self.starts[i]) for i in order])
        self.ends = array("d", [clock.to_rank0(self.ends[i]) for i in order])
        self.send_waits = merge((clock.to_rank0(b), clock.to_rank0(e)) for b, e in self.send_waits)
        self.heads.align(clock)


@dataclass(slots=True)
class Timeline:
    """One run of one pipeline: the work of its stages in order, and the events that only rank 0 records.

    Attributes:
        issued, returned, arrived, finished, starved: events of rank 0, in the order of recording.
        rows_refused: number of input lines that were refused before they became requests.
    """

    stages: list[StageTimeline] = field(default_factory=list)
    issued: Log[Issued] = field(default_factory=lambda: Log(Issued))
    returned: Log[Returned] = field(default_factory=lambda: Log(Returned))
    arrived: Log[RequestArrived] = field(default_factory=lambda: Log(RequestArrived))
    finished: list[RequestFinished] = field(default_factory=list)
    starved: list[Starved] = field(default_factory=list)
    rows_refused: int = 0
    totals: Totals | None = None  # of the whole run, also if the other fields cover only its first part

    @classmethod
    def read(cls, traces: Iterable[Iterable[Event]]) -> Timeline:
        """Read the traces of one run, one per stage, in any order.

        Traces end at different instants if they were cut, or if the run continues or was killed. Events of rank 0 after
        the end of the shortest trace are left out.

        Raises:
            InputError: a stage has no trace or several, or a trace does not begin with its stage.
        """
        timeline = cls()
        for events in traces:
            timeline._read_stage(events)
        timeline.stages.sort(key=lambda stage: stage.start.stage)
        found = [stage.start.stage for stage in timeline.stages]
        num_stages = timeline.stages[0].start.num_stages if timeline.stages else 1
        if len(found) != num_stages or found != list(range(num_stages)):
            raise InputError(f"the traces are of stages {found}; a report needs one per stage, 0 to {num_stages - 1}")
        timeline._cut()
        return timeline

    @property
    def is_cut(self) -> bool:
        return any(stage.cut for stage in self.stages)

    @property
    def num_returned(self) -> int:
        """Number of microbatches whose result is back and whose compute is in every stage's trace.

        If a stage's clock is ahead, a result may be in rank 0's trace before the compute is in that stage's trace.
        """
        reach = min((max(stage.microbatches, default=-1) for stage in self.stages), default=-1)
        return sum(microbatch <= reach for microbatch in self.returned.column("microbatch"))

    def back_s(self) -> array[float]:
        """Return, for each microbatch, the seconds at which the last stage's output was complete on rank 0.

        The output is tokens, or the input rows of an LM head. Rank 0 handles results in order. So tokens that arrive
        during an earlier LM head are recorded only after it. Their true arrival is not known. For them, return the time
        at which the last stage ended its compute.
        """
        returned, ends = self.returned.column("at_s"), self.stages[-1].ends
        back = array("d", returned)
        for index, (before, after) in enumerate(pairwise(returned), 1):
            if after <= before and index < len(ends):
                back[index] = min(after, ends[index])
        heads = self.stages[0].heads
        for microbatch, arrived_s in zip(heads.microbatches, heads.arrived, strict=True):
            if 0 <= microbatch < len(back):
                back[microbatch] = arrived_s
        return back

    def microbatch_seconds(self, stage: int) -> list[float]:
        """Return the seconds that a stage spent on each microbatch.

        On the last stage they include the LM head, even if the first stage computed it.

        Args:
            stage: index of the stage.
        """
        own = self.stages[stage]
        moved = self.stages[0].heads.seconds() if stage == len(self.stages) - 1 else {}
        spans = zip(own.microbatches, own.starts, own.ends, strict=True)
        return [end - begin + moved.get(microbatch, 0.0) for microbatch, begin, end in spans]

    @property
    def window(self) -> Interval:
        """The run window, from first issue to last result, on rank 0's clock. It is (0, 0) if there is no result."""
        results = self.returned[: self.num_returned]
        if not results or not self.issued:
            return (0.0, 0.0)
        return (self.issued[0].at_s, max(results[-1].at_s, self.issued[0].at_s))

    def check_order(self) -> None:
        """Check that all microbatches with a result were issued, computed and returned in the order 0, 1, 2, ...

        Raises:
            InputError: another order in the traces, or a span that ends before it starts.
        """
        for stage in self.stages:
            for index, (begin, end) in enumerate(zip(stage.starts, stage.ends, strict=True)):
                if end < begin:
                    raise InputError(
                        f"the traces are damaged: stage {stage.start.stage} ended microbatch "
                        f"{stage.microbatches[index]} {begin - end:g} s before its start; {_COPY_AGAIN}"
                    )
            self._check_heads(stage)
        count = self.num_returned
        told = {f"stage {stage.start.stage} computed": stage.microbatches for stage in self.stages}
        told["were issued"] = array("q", self.issued.column("microbatch"))
        told["came back"] = array("q", self.returned.column("microbatch"))
        for what, found in told.items():
            for expected, microbatch in zip_longest(range(count), found[:count]):
                if microbatch != expected:
                    instead = "nothing" if microbatch is None else f"microbatch {microbatch}"
                    raise InputError(
                        f"the traces are damaged: of the microbatches that {what}, {expected} must come next, but "
                        f"{instead} comes; {_COPY_AGAIN}"
                    )

    def _check_heads(self, stage: StageTimeline) -> None:
        """Check that only the first stage has LM heads, in order, each of a microbatch with a result."""
        heads = stage.heads
        in_order = all(before < after for before, after in pairwise((-1, *heads.microbatches)))
        if heads.microbatches and (stage.start.stage or not in_order or heads.microbatches[-1] >= len(self.returned)):
            raise InputError(
                f"the traces are damaged: LM heads of stage {stage.start.stage} are out of order; {_COPY_AGAIN}"
            )
        if any(end < begin for begin, end in heads.spans()):
            raise InputError(
                f"the traces are damaged: stage {stage.start.stage} ended an LM head before its start; {_COPY_AGAIN}"
            )

    def _cut(self) -> None:
        """Drop the results and finished requests after the last event of the shortest trace.

        Results may show that a stage continued after the last event of its trace. Without the cut, the stage would
        count as idle in that time, and tokens would count although their compute is in no trace.
        """
        newest = max(self.returned.column("microbatch"), default=-1)
        open_ended = [stage for stage in self.stages if stage.end is None or stage.cut]
        short = [stage for stage in open_ended if max(stage.microbatches, default=-1) < newest]
        told_s = min((stage.ends[-1] if stage.ends else -inf for stage in short), default=inf)
        self.returned = Log(Returned, (result for result in self.returned if result.at_s <= told_s))
        self.finished = [request for request in self.finished if request.finished_s <= told_s]
        for stage in self.stages:
            stage.heads.cut(len(self.returned))

    def add(self, stage: StageTimeline, event: Event) -> None:
        """Store one event from the trace of a stage. Call `stage.align()` after the last one."""
        if isinstance(event, Compute):
            stage.add(event)
        elif isinstance(event, Head):
            stage.add_head(event)
        elif isinstance(event, SendWait):
            stage.send_waits.append((event.start_s, event.end_s))
        elif isinstance(event, Cut):
            stage.cut = event.reason
        elif isinstance(event, TraceEnd):
            stage.end = event
        else:
            self._add(event)

    def _read_stage(self, events: Iterable[Event]) -> None:
        stage: StageTimeline | None = None
        for event in events:
            if stage is None:
                if not isinstance(event, TraceStart):
                    raise InputError(
                        f"a trace must begin with the event start; this one begins with {type(event).__name__}"
                    )
                _check_sizes(event)
                stage = StageTimeline(event)
            else:
                self.add(stage, event)
        if stage is None:
            raise InputError(
                "a trace is empty: its process ended before it wrote anything, or has just started; then try again"
            )
        stage.align()
        self.stages.append(stage)

    def _add(self, event: Event) -> None:
        match event:
            case Issued():
                self.issued.append(event)
            case Returned():
                self.returned.append(event)
            case RequestArrived():
                self.arrived.append(event)
            case RequestFinished():
                # A tuple of integers takes ten times the memory, and there is one integer per token.
                fits = 0 <= min(event.gaps_us, default=0) and max(event.gaps_us, default=0) < 2**32
                self.finished.append(replace(event, gaps_us=array("I" if fits else "q", event.gaps_us)))
            case Starved():
                self.starved.append(event)
            case RowRefused():
                self.rows_refused += 1
            case Totals():
                self.totals = event


def _check_sizes(start: TraceStart) -> None:
    """Raise InputError if the first event of a trace has a size below 1, which no run can have."""
    layers = start.layers[1] - start.layers[0]
    sizes = {"chunk size": start.chunk_size, "microbatches in flight": start.inflight, "page size": start.page_size}
    for name, size in {**sizes, "layers": layers}.items():
        if size < 1:
            raise InputError(f"the traces are damaged: {name} of stage {start.stage}: {size}; {_COPY_AGAIN}")
