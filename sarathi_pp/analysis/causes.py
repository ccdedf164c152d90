"""The causes of idle time. The run is replayed with modelled times, then made ideal one step at a time.

    measured bubble                      from the trace
      unexplained      - replay with modelled times and every recorded delay           B0
      communication    - inputs and results arrive at once, no send ever waits         B1
      host             - a stage starts as soon as it could, the coordinator issues
                         as soon as it could                                            B2
      starvation       - there is always something to issue: no wait for an arrival,
                         a page or a token                                              B3
      stage imbalance  - a microbatch takes its mean over the stages on each           B4
      decode context   - decodes read the same number of keys in every microbatch
                         that has decodes                                  (PB3)       B5
      prefill variance - all chunks cost the same                          (PB1)       B6
      prefill/decode   - all microbatches cost the same                    (PB2)       B7
      ramp             = B7: filling and draining the pipeline

A cause is the bubble's fall at its step, in seconds summed over stages. Falls are not clipped, since a step may
lengthen a wait elsewhere. The nine causes add up to the measured bubble, so `unexplained` is the figure to doubt.
PB1 to PB3 are the bubbles of SARATHI (arXiv 2308.16369, section 3.3).

The replay keeps what the coordinator did: the order of microbatches, and at most K of them in flight. The first stage
is on the coordinator's own rank, so a microbatch is issued when that stage is free. A policy may have kept fewer than K
microbatches in flight, but at least one per stage. All replays keep its waits, with no more in flight than the run had.

If the first stage computed LM heads for the last one, each takes its measured time on the first stage, between the same
two microbatches as in the run, and no time on the last stage. From B4 on, a microbatch's mean over the stages includes
its LM head, so the first stage computes no separate ones.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import NamedTuple

from sarathi_pp.analysis.timeline import StageTimeline, Timeline
from sarathi_pp.core.cost.model import CostModel, Load, Terms
from sarathi_pp.errors import InputError

Seconds = list[float]

# Share of microbatches that count as usual.
_USUAL = 0.98


@dataclass(frozen=True, slots=True)
class Causes:
    """Seconds of bubble by cause, summed over stages. They add up to the measured bubble. A cause may be negative."""

    ramp_s: float
    prefill_variance_s: float
    prefill_decode_s: float
    decode_context_s: float
    stage_imbalance_s: float
    communication_s: float
    host_s: float
    starvation_s: float
    unexplained_s: float

    @property
    def bubble_s(self) -> float:
        return float(sum(asdict(self).values()))


def explain(timeline: Timeline, model: CostModel) -> Causes:
    """Attribute the bubble of a run to causes, in time linear in its spans. A run without a result gets all zeros.

    The timeline must be in order (`check_order`).

    Raises:
        InputError: the model has another number of stages than the timeline.
    """
    if len(model.stages) != len(timeline.stages):
        raise InputError(f"the cost model has {len(model.stages)} stages, the run {len(timeline.stages)}")
    count = timeline.num_returned
    if count == 0:
        return Causes(*(0.0 for _ in fields(Causes)))
    loads = [event.load for event in timeline.issued[:count]]
    inflight = timeline.stages[0].start.most_inflight
    later_s = _later_compute_s(timeline, count)
    heads_s = timeline.stages[0].heads.seconds()
    steps = [
        _bubble_s(times, run, inflight) - later_s
        for times, run in _steps(model, loads, _Delays.of(timeline, count), heads_s)
    ]
    falls = [before - after for before, after in zip(steps, steps[1:], strict=False)]
    communication, host, starvation, imbalance, context, variance, decode = falls
    return Causes(
        ramp_s=steps[-1],
        prefill_variance_s=variance,
        prefill_decode_s=decode,
        decode_context_s=context,
        stage_imbalance_s=imbalance,
        communication_s=communication,
        host_s=host,
        starvation_s=starvation,
        unexplained_s=_measured_s(timeline, count) - steps[0],
    )


def host_seconds(timeline: Timeline) -> list[float]:
    """Return the host's mean time per microbatch on each stage, with the coordinator's own time on the first stage.

    The few longest delays have other reasons and are left out. The timeline must have a result.
    """
    delays = _Delays.of(timeline, timeline.num_returned)
    first, *others = delays.host
    on_first = [host + issue for host, issue in zip(first, delays.issue, strict=True)]
    usual = (sorted(seconds)[: max(1, int(_USUAL * len(seconds)))] for seconds in (on_first, *others))
    return [sum(seconds) / len(seconds) for seconds in usual]


def _measured_s(timeline: Timeline, count: int) -> float:
    begin, end = timeline.window
    compute_s = sum(sum(stage.ends[:count]) - sum(stage.starts[:count]) for stage in timeline.stages)
    compute_s += sum(head_s for head, head_s in timeline.stages[0].heads.seconds().items() if head < count)
    return len(timeline.stages) * (end - begin) - compute_s - _later_compute_s(timeline, count)


def _later_compute_s(timeline: Timeline, count: int) -> float:
    """Return the compute time in the window of microbatches without a result: the run continues or was killed."""
    _, end = timeline.window
    later = (zip(stage.starts[count:], stage.ends[count:], strict=True) for stage in timeline.stages)
    return sum(max(0.0, min(ended, end) - started) for stage in later for started, ended in stage)


class _Head(NamedTuple):
    """An LM head on the first stage.

    Attributes:
        before: the microbatch that this stage computed next.
        host_s: from the time when it could have started.
    """

    microbatch: int
    before: int
    seconds: float
    host_s: float


@dataclass(frozen=True, slots=True)
class _Delays:
    """The delays of microbatches apart from compute: seconds by stage and microbatch.

    Attributes:
        transfer: from the end on the stage before to the complete input here (0 on the first).
        back: from the end on the last stage to the result, or the rows of an LM head, on rank 0.
        blocked: no free send buffer after the compute.
        host: from the time when it could have started.
        issue: from the time when it could have been issued, on rank 0.
        awaited: per microbatch, the earlier one whose result the coordinator needed; None if it needed none.
        held: per microbatch, the earlier one whose result the policy awaited although it could have granted tokens.
        arrived: per microbatch, the arrival that it needed, in seconds after the first issue; 0 if none.
        heads: in the order of their starts.
    """

    transfer: list[Seconds]
    back: Seconds
    blocked: list[Seconds]
    host: list[Seconds]
    issue: Seconds
    awaited: list[int | None]
    held: list[int | None]
    arrived: Seconds
    heads: Sequence[_Head]

    @classmethod
    def of(cls, timeline: Timeline, count: int) -> _Delays:
        stages = timeline.stages
        blocked = [_blocked(stage, count) for stage in stages]
        transfer = [[0.0] * count]
        for before, stage in zip(stages, stages[1:], strict=False):
            pairs = zip(stage.arrived[:count], before.ends[:count], strict=True)
            transfer.append([max(0.0, arrived - end) for arrived, end in pairs])
        back = [
            max(0.0, back_s - end)
            for back_s, end in zip(timeline.back_s()[:count], stages[-1].ends[:count], strict=True)
        ]
        host = [_host(stage, waits, count) for stage, waits in zip(stages, blocked, strict=True)]
        heads = list(_heads(stages[0], blocked[0], count))
        return cls(transfer, back, blocked, host, *_issue(timeline, blocked[0], count), heads)

    def without_communication(self) -> _Delays:
        nothing = [[0.0] * len(self.back) for _ in self.host]
        return replace(self, transfer=nothing, blocked=nothing, back=[0.0] * len(self.back))

    def without_host(self) -> _Delays:
        heads = [head._replace(host_s=0.0) for head in self.heads]
        nothing = [[0.0] * len(self.back) for _ in self.host]
        return replace(self, host=nothing, issue=[0.0] * len(self.back), heads=heads)

    def without_starvation(self) -> _Delays:
        return replace(self, awaited=[None] * len(self.back), arrived=[0.0] * len(self.back))

    def without_heads(self) -> _Delays:
        return replace(self, heads=())


def _blocked(stage: StageTimeline, count: int) -> Seconds:
    """Return the time that the stage waited for a send buffer after each compute."""
    waits = [0.0] * count
    for begin, end in stage.send_waits:
        position = bisect_right(stage.ends, begin) - 1
        if 0 <= position < count:
            waits[position] += end - begin
    return waits


def _host(stage: StageTimeline, blocked: Seconds, count: int) -> Seconds:
    delays = []
    free = _free_before(stage, blocked, count)
    for position in range(count):
        could = max(stage.arrived[position], free[position])
        delays.append(max(0.0, stage.starts[position] - could))
    return delays


def _free_before(stage: StageTimeline, blocked: Seconds, count: int) -> Seconds:
    """Return the time from which the stage was free before each compute: after the compute and LM heads before it."""
    free = [float("-inf"), *(end + waited for end, waited in zip(stage.ends[:count], blocked, strict=True))]
    for start, end in stage.heads.spans():
        position = bisect_left(stage.starts, start, 0, count)
        free[position] = max(free[position], end)
    return free


def _heads(first: StageTimeline, blocked: Seconds, count: int) -> Iterator[_Head]:
    heads, before_s = first.heads, float("-inf")
    columns = zip(heads.microbatches, heads.arrived, heads.starts, heads.ends, strict=True)
    for microbatch, arrived, start, end in columns:
        if microbatch >= count:
            return
        before = bisect_left(first.starts, start, 0, count)
        free = first.ends[before - 1] + blocked[before - 1] if before else float("-inf")
        yield _Head(microbatch, before, end - start, max(0.0, start - max(arrived, free, before_s)))
        before_s = end


def _issue(
    timeline: Timeline, blocked: Seconds, count: int
) -> tuple[Seconds, list[int | None], list[int | None], Seconds]:
    """Return what delayed each microbatch's issue: the coordinator's own time, a result, the policy, an arrival."""
    first, inflight = timeline.stages[0], timeline.stages[0].start.most_inflight
    free = _free_before(first, blocked, count)
    begin = timeline.issued[0].at_s
    results, issues = timeline.returned.column("at_s")[:count], timeline.issued.column("at_s")
    arrivals = {request.index: request.at_s for request in timeline.arrived}
    waits = [event for event in timeline.starved if event.reason != "full"]
    since = [event.at_s for event in waits]
    lags: Seconds = []
    awaited: list[int | None] = []
    held: list[int | None] = []
    arrived: Seconds = []
    for index in range(count):
        issued = issues[index]
        could = max(begin, free[index])
        if index >= inflight:
            could = max(could, results[index - inflight])
        result: int | None = None
        holds = False
        arrival = begin
        last_wait = bisect_right(since, issued) - 1
        if bisect_left(since, could) <= last_wait:
            # The coordinator had found nothing to issue. The last event before the issue let it continue.
            holds = waits[last_wait].reason == "held"
            latest = bisect_right(results, issued) - 1
            if latest >= 0 and results[latest] > could:
                result, could = latest, results[latest]
            # Other requests arrive all the time. The awaited one is in the microbatch, and none in it is older.
            oldest = min((arrivals.get(s, begin) for s in timeline.issued[index].sequences), default=begin)
            if oldest > could and not holds:
                result, arrival, could = None, oldest, oldest
        lags.append(max(0.0, issued - could))
        awaited.append(None if holds else result)
        held.append(result if holds else None)
        arrived.append(arrival - begin)
    return lags, awaited, held, arrived


def _bubble_s(times: Sequence[Seconds], delays: _Delays, inflight: int) -> float:
    """Return the idle seconds of all stages in a replay: first issue to last result, minus compute."""
    num_stages, count = len(times), len(delays.back)
    free = [0.0] * num_stages
    results: Seconds = []
    heads = deque(delays.heads)

    def compute_heads(before: int) -> None:
        while heads and heads[0].before <= before:
            head = heads.popleft()
            if head.microbatch < len(results):
                free[0] = max(free[0], results[head.microbatch]) + head.host_s + head.seconds
                results[head.microbatch :] = [max(at_s, free[0]) for at_s in results[head.microbatch :]]

    for index in range(count):
        compute_heads(index)
        ready = max(free[0], delays.arrived[index])
        if index >= inflight:
            ready = max(ready, results[index - inflight])
        for needed in (delays.awaited[index], delays.held[index]):
            if needed is not None and needed < index:
                ready = max(ready, results[needed])
        ready += delays.issue[index]
        for stage in range(num_stages):
            start = max(free[stage], ready + delays.transfer[stage][index]) + delays.host[stage][index]
            ready = start + times[stage][index]
            free[stage] = ready + delays.blocked[stage][index]
        # Results are handled in their order.
        results.append(max(ready + delays.back[index], results[-1] if results else 0.0))
    compute_heads(count)
    first_issue = delays.issue[0]
    compute_s = sum(map(sum, times)) + sum(head.seconds for head in delays.heads)
    return num_stages * (max(results) - first_issue) - compute_s


def _steps(
    model: CostModel, loads: Sequence[Load], delays: _Delays, heads_s: Mapping[int, float]
) -> list[tuple[list[Seconds], _Delays]]:
    """Return times and delays of the eight replays, from the run as it was to the ideal one.

    Args:
        heads_s: seconds of the LM heads on the first stage, by microbatch.
    """
    stages = range(len(model.stages))
    terms = [[model.terms(stage, load) for load in loads] for stage in stages]
    times = [[one.total for one in stage] for stage in terms]
    times[-1] = [max(0.0, seconds - heads_s.get(index, 0.0)) for index, seconds in enumerate(times[-1])]
    quiet = delays.without_communication()
    prompt = quiet.without_host()
    fed = prompt.without_starvation()
    even = fed.without_heads()
    balanced = [_mean(column) for column in zip(*terms, strict=True)]
    same_context = _levelled(balanced, "context", [load.decodes > 0 for load in loads])
    same_prefill = _levelled(same_context, "prefill", [load.prefill_tokens > 0 for load in loads])
    equal = sum(one.total for one in same_prefill) / len(same_prefill)
    shared = ([one.total for one in level] for level in (balanced, same_context, same_prefill))
    return [
        (times, delays),
        (times, quiet),
        (times, prompt),
        (times, fed),
        *(([seconds for _ in stages], even) for seconds in shared),
        ([[equal] * len(loads) for _ in stages], even),
    ]


def _mean(column: Sequence[Terms]) -> Terms:
    return Terms(*(sum(getattr(one, field.name) for one in column) / len(column) for field in fields(Terms)))


def _levelled(terms: Sequence[Terms], name: str, chosen: Sequence[bool]) -> list[Terms]:
    """Return the terms after one term of the chosen microbatches is replaced by its mean over them."""
    values = [getattr(one, name) for one, yes in zip(terms, chosen, strict=True) if yes]
    mean = sum(values) / len(values) if values else 0.0
    return [replace(one, **{name: mean}) if yes else one for one, yes in zip(terms, chosen, strict=True)]
