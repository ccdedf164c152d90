"""What the coordinator and the requests waited for: from it follows which option could have made a run shorter."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import zip_longest
from typing import get_args

from sarathi_pp.trace.events import Issued, RequestArrived, RequestFinished, Returned, Starved, StarvedReason
from sarathi_pp.trace.timeline import Timeline


@dataclass(frozen=True, slots=True)
class Waits:
    """Seconds are of the run window.

    issue_s: in which the coordinator had looked and found nothing to issue, by the reason. limited_s: those of them in
    which a sequence was ready, so that one more microbatch in flight could have held it. peak_running: most sequences
    that were started and not finished at a time. paced_until_s: the last arrival, from the window's begin, that found
    no request waiting. Until then the run kept up with its arrivals, and nothing could have made it shorter.
    """

    issue_s: dict[str, float]
    limited_s: float
    peak_running: int
    paced_until_s: float


@dataclass(frozen=True, slots=True)
class _Full:
    """A wait for the limit of those in flight. ready: a running sequence was in none of them."""

    seconds: float
    ready: bool
    num_waiting: int
    num_running: int


def measure_waits(timeline: Timeline) -> Waits:
    """Folds one run; linear in its tokens."""
    begin, end = timeline.window
    lengths = iter(_starved_s(timeline))
    issue_s = dict.fromkeys(get_args(StarvedReason), 0.0)
    full: list[_Full] = []
    waiting: set[int] = set()
    running: set[int] = set()
    microbatches: dict[int, list[int]] = {}  # in flight: their sequences
    inflight: Counter[int] = Counter()  # sequences: in how many of them
    peak_running, paced_until_s = 0, begin
    for event in _in_order(timeline):
        match event:
            case RequestArrived():
                if not waiting and event.at_s <= end:
                    paced_until_s = event.at_s
                waiting.add(event.index)
            case Issued():
                microbatches[event.microbatch] = sequences = event.sequences
                inflight.update(sequences)
                waiting.difference_update(sequences)
                running.update(sequences)
                peak_running = max(peak_running, len(running))
            case Returned():
                for sequence in microbatches.pop(event.microbatch, ()):
                    inflight[sequence] -= 1
            case RequestFinished():
                waiting.discard(event.index)
                running.discard(event.index)
            case Starved():
                seconds = next(lengths)
                issue_s[event.reason] += seconds
                if event.reason == "full":
                    ready = any(not inflight[sequence] for sequence in running)
                    full.append(_Full(seconds, ready, len(waiting), len(running)))
    # A seat was free where as many as ever ran did not.
    limited_s = sum(w.seconds for w in full if w.ready or (w.num_waiting and w.num_running < peak_running))
    return Waits(issue_s, issue_s["held"] + limited_s, peak_running, max(0.0, paced_until_s - begin))


_Told = RequestArrived | Issued | Returned | RequestFinished | Starved


def _in_order(timeline: Timeline) -> Iterable[_Told]:
    """As rank 0 told them. At the same instant a result comes before what it sets off."""
    ended = sorted(timeline.finished, key=lambda request: request.finished_s)
    told: list[tuple[float, int, _Told]] = [
        *((event.at_s, 0, event) for event in timeline.returned),
        *((event.finished_s, 1, event) for event in ended),
        *((event.at_s, 2, event) for event in timeline.arrived),
        *((event.at_s, 3, event) for event in timeline.issued),
        *((event.at_s, 4, event) for event in timeline.starved),
    ]
    return (event for _, _, event in sorted(told, key=lambda one: one[:2]))


def _starved_s(timeline: Timeline) -> Iterable[float]:
    """How long each of timeline.starved held within the window: until the next one, or the next issue."""
    begin, end = timeline.window
    issues = [event.at_s for event in timeline.issued]
    for event, following in zip_longest(timeline.starved, timeline.starved[1:]):
        issue = bisect_left(issues, event.at_s)
        over_s = min(
            end,
            issues[issue] if issue < len(issues) else end,
            following.at_s if following is not None else end,
        )
        yield max(0.0, over_s - max(begin, event.at_s))
