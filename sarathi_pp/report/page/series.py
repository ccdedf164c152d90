"""Series that the charts of a page draw: every span of the timelines, and distributions in bins.

The spans become one JSON document that page.js reads. Long series are blocks: little-endian arrays, deflated, in
base64. A stage's spans are integers in ticks, each measured from the end of the previous span:

    gaps       |--3--|        |0|       |-1-|           start minus previous end (the first: minus first issue)
    lengths          |===5====| |===5===|   |==4==|
    issue                 0         1          2        index in the run's issued microbatches. -1: not known.
                                                        -2, -3 ...: LM head of index 0, 1 ... on the first stage

Idle spans have gaps and lengths too, and `states` instead of `issue`: indices into IDLE_STATES.

Only the charts are drawn from these series. Printed figures come from the report.
"""

from __future__ import annotations

import sys
import zlib
from array import array
from base64 import b64encode
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from heapq import merge
from math import exp, log
from typing import Any, get_args

from sarathi_pp.analysis.bubbles import Bubbles
from sarathi_pp.analysis.intervals import Interval
from sarathi_pp.analysis.stage_states import IdleState, idle_spans
from sarathi_pp.analysis.timeline import StageTimeline, Timeline
from sarathi_pp.errors import InputError
from sarathi_pp.trace.latency import latency_series

_TICK_S = 1e-6
_NO_ISSUE = -1
_INT32_MAX = 2**31 - 1
_NUM_BINS = 40
_MAX_CDF_POINTS = 400
IDLE_STATES: tuple[IdleState, ...] = get_args(IdleState)


def spans(timeline: Timeline, bubbles: Bubbles) -> dict[str, Any]:
    """Return the spans of one run. Times count from its first issue.

    A tick is a microsecond. It is longer if a gap or a length would not fit into 32 bits.
    """
    origin_s = _origin(timeline)
    tick_s = max(_TICK_S, _longest(timeline.stages, origin_s) / _INT32_MAX)
    position = {event.microbatch: i for i, event in enumerate(timeline.issued)}
    return {
        "tick_s": tick_s,
        "wall_s": bubbles.wall_s,
        "steady": [[begin - origin_s, end - origin_s] for begin, end in bubbles.steady],
        "stages": [
            _stage_spans(stage, origin_s, tick_s, position)
            | {"idle": _idle_spans(stage, timeline.window, origin_s, tick_s)}
            for stage in timeline.stages
        ],
        "prefill_tokens": _block(event.prefill_tokens for event in timeline.issued),
        "decodes": _block(event.decodes for event in timeline.issued),
        "texts": _deflated("\n".join(" ".join(event.text.splitlines()) for event in timeline.issued).encode()),
    }


def _origin(timeline: Timeline) -> float:
    if timeline.issued:
        return timeline.issued[0].at_s
    return min((stage.starts[0] for stage in timeline.stages if stage.starts), default=0.0)


def _longest(stages: Iterable[StageTimeline], origin_s: float) -> float:
    """Return an upper bound of all gaps and lengths in seconds: twice the largest distance of a time from origin_s."""
    edges = [edge for stage in stages if stage.starts for edge in (stage.starts[0], max(stage.ends))]
    return 2 * max((abs(edge - origin_s) for edge in edges), default=0.0)


def _stage_spans(stage: StageTimeline, origin_s: float, tick_s: float, position: dict[int, int]) -> dict[str, Any]:
    issue = [position.get(microbatch, _NO_ISSUE) for microbatch in stage.microbatches]
    of_heads = (_NO_ISSUE - 1 - position[m] if m in position else _NO_ISSUE for m in stage.heads.microbatches)
    heads = zip(stage.heads.starts, stage.heads.ends, of_heads, strict=True)
    spans = merge(zip(stage.starts, stage.ends, issue, strict=True), heads)
    # Times are rounded before the subtraction, so that errors do not add up along the run.
    ticks = [(round((start - origin_s) / tick_s), round((end - origin_s) / tick_s), of) for start, end, of in spans]
    ends = [0, *(end for _, end, _ in ticks)]
    return {
        "gaps": _block(start - end for (start, _, _), end in zip(ticks, ends, strict=False)),
        "lengths": _block(end - start for start, end, _ in ticks),
        "issue": _block(of for _, _, of in ticks),
    }


def _idle_spans(stage: StageTimeline, window: Interval, origin_s: float, tick_s: float) -> dict[str, Any]:
    """Return the idle spans of a stage, without those shorter than a tick."""
    spans = (
        (round((idle.begin_s - origin_s) / tick_s), round((idle.end_s - origin_s) / tick_s), idle.state)
        for idle in idle_spans(stage, window)
    )
    ticks = [span for span in spans if span[1] > span[0]]
    ends = [0, *(end for _, end, _ in ticks)]
    return {
        "gaps": _block(begin - end for (begin, _, _), end in zip(ticks, ends, strict=False)),
        "lengths": _block(end - begin for begin, end, _ in ticks),
        "states": _block(IDLE_STATES.index(state) for _, _, state in ticks),
    }


def _block(values: Iterable[int]) -> str:
    """Return integers as a block of text: 32 bits each, little-endian, deflated, in base64.

    Raises:
        InputError: a number does not fit into 32 bits. No run writes such a number.
    """
    try:
        numbers = array("i", values)
    except OverflowError:
        raise InputError("the traces are damaged: a microbatch has more than 2,147,483,647 tokens") from None
    if sys.byteorder == "big":
        numbers.byteswap()
    return _deflated(numbers.tobytes())


def _deflated(data: bytes) -> str:
    return b64encode(zlib.compress(data, level=6)).decode("ascii")


def _series(timeline: Timeline, bubbles: Bubbles) -> dict[str, list[float]]:
    """Return the values of each distribution, by name. The percentiles in the report are of the same latencies."""
    return {
        **latency_series(timeline.finished),
        "microbatch_tokens": [float(event.num_tokens) for event in timeline.issued[: timeline.num_returned]],
        "microbatch_s": timeline.microbatch_seconds(bubbles.slowest_stage),
    }


def distributions(runs: Sequence[tuple[Timeline, Bubbles]]) -> dict[str, Any]:
    """Return the bins of each distribution, by its name.

    log       True for seconds, whose bins grow with the value
    edges     edges of the bins, the same for all runs; empty if no run has a value
    shares    for each run, the share of its values in each bin; empty for a run without values
    """
    found = {}
    series = [_series(timeline, bubbles) for timeline, bubbles in runs]
    for key in series[0]:
        values = [one[key] for one in series]
        grows = key.endswith("_s")
        edges = _edges([value for one in values for value in one], grows)
        found[key] = {"log": grows, "edges": edges, "shares": [_shares(one, edges) for one in values]}
    return found


def _edges(values: list[float], grows: bool) -> list[float]:
    """Return the edges of bins for these values. If all values are equal, the bins are around them.

    Args:
        grows: True for bins whose upper edge is a fixed multiple of the lower one; False for bins of equal width.
    """
    if not values:
        return []
    high = max(values)
    if not grows:
        width = max(high, 1.0) / _NUM_BINS
        return [i * width for i in range(_NUM_BINS + 1)]
    low = min((value for value in values if value > 0), default=1.0)
    low, high = (low, high) if high > 1.5 * low else (low / 2, low * 2)
    ratio = log(high / low) / _NUM_BINS
    return [low * exp(i * ratio) for i in range(_NUM_BINS + 1)]


def _shares(values: list[float], edges: list[float]) -> list[float]:
    if not values:
        return []
    counts = [0] * (len(edges) - 1)
    for value in values:
        counts[min(max(bisect_right(edges, value) - 1, 0), len(counts) - 1)] += 1
    return [count / len(values) for count in counts]


def request_bubble_cdf(bubbles: Bubbles) -> dict[str, list[float]]:
    """Return the share of requests whose bubble is at most as long as each of some times.

    The keys are `seconds` and `shares`, lists of equal length with at most about 800 points.
    """
    ordered = sorted(bubbles.request_bubble_s.values())
    step = max(1, len(ordered) // _MAX_CDF_POINTS)
    kept = sorted({*range(0, len(ordered), step), len(ordered) - 1} - {-1})
    return {"seconds": [ordered[i] for i in kept], "shares": [(i + 1) / len(ordered) for i in kept]}
