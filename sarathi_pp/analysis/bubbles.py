"""The use of each stage's time: every instant of the run window is in exactly one state.

    gap before microbatch m on a stage, from the end of the stage's previous microbatch (or the window's start):

    |-- send_wait --|---- no_work ----|---- recv_wait ----|---- host ----|== compute m ==
      no free send    until m is        until m's input     until m
      buffer          issued (rank 0)   is complete here    starts

A recorded send wait wins at any place in a gap. After a stage's last compute nothing is left to do: no_work. The
window, first issue to last result, is the same for every stage. So the states of each stage add up to it.
`closing_error` is the share by which they do not (spans that overlap).

Steady: every stage has started once, and at least P requests that have arrived are unfinished (P stages). So the
pipeline could be full. A steady window with fewer than 2P microbatches says nothing and has no figures.

A microbatch belongs to the steady window if its compute starts there. For the figures per request, the gap before a
microbatch is the time from the end of the compute before it on that stage to its start. LM heads in between are
subtracted. The first microbatch of a stage has no gap.

An LM head that the first stage computes for the last one is compute of the first stage. The time before it is no_work
until its rows are here, and then host.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain
from typing import get_args

from sarathi_pp.analysis.intervals import Interval, intersect, length, merge, positions_within
from sarathi_pp.analysis.stage_states import IdleState, gap_before, idle_spans
from sarathi_pp.analysis.timeline import StageTimeline, Timeline

# If the CPU time of a stage's computing thread is below this share of its compute spans, it had to wait for a core.
_SHARED_BELOW = 0.9


@dataclass(frozen=True, slots=True)
class StageBubbles:
    """Seconds of one stage in each state. Ratios are None if their window is empty.

    Attributes:
        wall_s: length of the run window, the same for all stages.
        bubble_ratio: share of the run window in which the stage computed nothing, from 0 to 1.
        bubble_ratio_steady: the same for the steady window.
        closing_error: difference between wall_s and the sum of the five states, as a share of wall_s.
        cpu_ratio: CPU time of the computing thread over its compute spans; None if it was not measured.
    """

    compute_s: float
    recv_wait_s: float
    send_wait_s: float
    host_s: float
    no_work_s: float
    wall_s: float
    bubble_ratio: float | None
    bubble_ratio_steady: float | None
    closing_error: float
    cpu_ratio: float | None

    @property
    def cores_shared(self) -> bool:
        """Return whether CPU time is more than 10 % short. Waiting for a core then counts as compute, not as bubble."""
        return self.cpu_ratio is not None and self.cpu_ratio < _SHARED_BELOW


@dataclass(frozen=True, slots=True)
class Bubbles:
    """The bubbles of a whole run. Ratios are means over stages.

    Attributes:
        steady: intervals of the steady window, in seconds on rank 0's clock. Empty if it is too short for figures.
        steady_positions: for each stage, indices of the computes that started in the steady window. They are indices
            into the arrays of its StageTimeline.
        overlap: share of the steady window in which all stages compute at once; None if it is empty.
        request_bubble_s: from the index of a sequence to the gaps before its microbatches, summed over stages, in
            seconds.
    """

    wall_s: float
    stages: tuple[StageBubbles, ...]
    bubble_ratio: float | None
    bubble_ratio_steady: float | None
    steady: tuple[Interval, ...]
    steady_positions: tuple[list[int], ...]
    overlap: float | None
    request_bubble_s: dict[int, float]

    @property
    def slowest_stage(self) -> int:
        """Index of the stage that computed longest. It limits the speed of the pipeline."""
        return max(range(len(self.stages)), key=lambda index: self.stages[index].compute_s)


def measure_bubbles(timeline: Timeline) -> Bubbles:
    """Return the bubbles of one run. For a run without a result, all seconds are 0 and all ratios None.

    The computation takes time linear in the number of spans.
    """
    window = timeline.window
    busy = [intersect(stage.busy(), [window]) for stage in timeline.stages]
    steady = _steady(timeline)
    positions = tuple(positions_within(stage.starts, steady) for stage in timeline.stages)
    if min(map(len, positions), default=0) < 2 * len(timeline.stages):
        steady, positions = [], tuple([] for _ in positions)
    steady_s = length(steady)
    ratios = [_bubble_ratio(length(intersect(spans, steady)), steady_s) for spans in busy]
    stages = tuple(_fold_stage(stage, window, ratio) for stage, ratio in zip(timeline.stages, ratios, strict=True))
    return Bubbles(
        wall_s=window[1] - window[0],
        stages=stages,
        bubble_ratio=_mean([stage.bubble_ratio for stage in stages]),
        bubble_ratio_steady=_mean(ratios),
        steady=tuple(steady),
        steady_positions=positions,
        overlap=_overlap(busy, steady),
        request_bubble_s=_request_bubbles(timeline),
    )


def busy_strip(stage: StageTimeline, window: Interval, num_cells: int) -> list[float]:
    """Divide a window into equal cells, and return the share of each cell in which the stage computed, from 0 to 1.

    Return an empty list for an empty window.
    """
    begin, end = window
    if end <= begin:
        return []
    cell_s = (end - begin) / num_cells
    busy_s = [0.0] * num_cells
    for span_begin, span_end in intersect(stage.busy(), [window]):
        first = min(int((span_begin - begin) / cell_s), num_cells - 1)
        last = min(int((span_end - begin) / cell_s), num_cells - 1)
        for cell in range(first, last + 1):
            cell_begin = begin + cell * cell_s
            busy_s[cell] += max(0.0, min(span_end, cell_begin + cell_s) - max(span_begin, cell_begin))
    return [min(1.0, seconds / cell_s) for seconds in busy_s]


def _bubble_ratio(compute_s: float, window_s: float) -> float | None:
    return 1 - compute_s / window_s if window_s > 0 else None


def _mean(ratios: list[float | None]) -> float | None:
    known = [ratio for ratio in ratios if ratio is not None]
    return sum(known) / len(known) if known else None


def _fold_stage(stage: StageTimeline, window: Interval, steady_ratio: float | None) -> StageBubbles:
    begin, end = window
    wall_s = end - begin
    idle_s = dict.fromkeys(get_args(IdleState), 0.0)
    for idle in idle_spans(stage, window):
        idle_s[idle.state] += idle.end_s - idle.begin_s
    # Overlapping spans count twice here, so the closing error reveals them.
    spans = chain(zip(stage.starts, stage.ends, strict=True), stage.heads.spans())
    compute_s = sum(max(0.0, min(ended, end) - max(started, begin)) for started, ended in spans)
    total_s = compute_s + sum(idle_s.values())
    return StageBubbles(
        compute_s=compute_s,
        recv_wait_s=idle_s["recv_wait"],
        send_wait_s=idle_s["send_wait"],
        host_s=idle_s["host"],
        no_work_s=idle_s["no_work"],
        wall_s=wall_s,
        bubble_ratio=_bubble_ratio(compute_s, wall_s),
        bubble_ratio_steady=steady_ratio,
        closing_error=abs(total_s - wall_s) / wall_s if wall_s > 0 else 0.0,
        cpu_ratio=stage.cpu_s / stage.spanned_s if stage.spanned_s > 0 else None,
    )


def _steady(timeline: Timeline) -> list[Interval]:
    """Return the intervals of the window in which every stage has started and at least P requests are unfinished."""
    if not all(stage.starts for stage in timeline.stages):
        return []
    all_started = max((stage.starts[0] for stage in timeline.stages), default=0.0)
    changes = [(request.at_s, 1) for request in timeline.arrived]
    changes += [(request.finished_s, -1) for request in timeline.finished]
    intervals: list[Interval] = []
    unfinished = 0
    since: float | None = None
    for at_s, change in sorted(changes):
        unfinished += change
        enough = unfinished >= len(timeline.stages)
        if enough and since is None:
            since = at_s
        elif not enough and since is not None:
            intervals.append((since, at_s))
            since = None
    if since is not None:
        intervals.append((since, float("inf")))
    begin, end = timeline.window
    return intersect(merge(intervals), [(max(begin, all_started), end)])


def _overlap(busy: list[list[Interval]], steady: list[Interval]) -> float | None:
    if not steady:
        return None
    common = steady
    for spans in busy:
        common = intersect(common, spans)
    return length(common) / length(steady)


def _request_bubbles(timeline: Timeline) -> dict[int, float]:
    gaps: dict[int, float] = {}
    for stage in timeline.stages:
        for position, microbatch in enumerate(stage.microbatches):
            gaps[microbatch] = gaps.get(microbatch, 0.0) + (gap_before(stage, position) or 0.0)
    by_sequence: dict[int, float] = {}
    for event in timeline.issued[: timeline.num_returned]:
        gap = gaps.get(event.microbatch, 0.0)
        for sequence in event.sequences:
            by_sequence[sequence] = by_sequence.get(sequence, 0.0) + gap
    return by_sequence
