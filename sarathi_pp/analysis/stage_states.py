"""Each span in which a stage computed nothing, with its state: what the stage waited for. `bubbles` adds them up.

    end of the compute before m                                        start of m
    |-- send_wait --|---- no_work ----|---- recv_wait ----|---- host ----|
      no free send    until m is        until m's input     until m
      buffer          issued (rank 0)   is complete here    starts

A recorded send wait wins at any place in a gap. After a stage's last compute, all time is no_work. An LM head that the
first stage computes for the last one is compute too. The time before it is no_work until its input rows are complete on
the first stage, then host.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from heapq import merge
from itertools import pairwise
from operator import itemgetter
from typing import Literal, NamedTuple

from sarathi_pp.analysis.intervals import Interval
from sarathi_pp.analysis.timeline import StageTimeline

IdleState = Literal["send_wait", "no_work", "recv_wait", "host"]

_NEVER = float("inf")
_wait_end = itemgetter(1)


class Idle(NamedTuple):
    """A span in which a stage computed nothing, in seconds on rank 0's clock.

    Attributes:
        position: index of the compute that ends the gap, in the arrays of StageTimeline; None after the last compute.
    """

    state: IdleState
    begin_s: float
    end_s: float
    position: int | None


def idle_spans(stage: StageTimeline, window: Interval) -> Iterator[Idle]:
    """Yield the spans of the window outside the stage's compute: disjoint, not empty, in order of time."""
    cursor, end = window
    positions = range(len(stage.starts))
    heads, count = stage.heads, len(stage.starts)
    # The gap before an LM head is part of the gap that the next compute ends.
    behind = (bisect_left(stage.starts, start) for start in heads.starts)
    of_heads = zip(heads.starts, heads.ends, heads.arrived, heads.arrived, behind, strict=True)
    spans = zip(stage.starts, stage.ends, stage.issued, stage.arrived, positions, strict=True)
    for started, ended, issued, arrived, position in merge(spans, of_heads):
        told = position if position < count else None
        yield from _gap((cursor, min(started, end)), issued, arrived, stage.send_waits, told)
        cursor = max(cursor, ended)
    yield from _gap((cursor, end), _NEVER, _NEVER, stage.send_waits, None)


def gap_before(stage: StageTimeline, position: int) -> float | None:
    """Return the seconds from the end of a stage's previous compute to the start of a compute.

    LM heads in between are subtracted. Return None for the first compute, which has no gap.

    Args:
        position: index of the compute in the arrays of StageTimeline.
    """
    if not position:
        return None
    begin, end, heads = stage.ends[position - 1], stage.starts[position], stage.heads
    between = range(bisect_left(heads.starts, begin), bisect_left(heads.starts, end))
    return end - begin - sum(heads.ends[head] - heads.starts[head] for head in between)


def _gap(
    gap: Interval, issued: float, arrived: float, send_waits: list[Interval], position: int | None
) -> Iterator[Idle]:
    """Yield the idle spans of one gap: the send waits in it, and the other states between them."""
    begin, end = gap
    for index in range(bisect_right(send_waits, begin, key=_wait_end), len(send_waits)):
        wait_begin, wait_end = send_waits[index]
        if begin >= end or wait_begin >= end:
            break
        yield from _split(begin, wait_begin, issued, arrived, position)
        yield Idle("send_wait", max(begin, wait_begin), min(wait_end, end), position)
        begin = min(wait_end, end)
    yield from _split(begin, end, issued, arrived, position)


def _split(begin: float, end: float, issued: float, arrived: float, position: int | None) -> Iterator[Idle]:
    """Yield no_work until the issue, recv_wait until the arrival of the input, and host until `end`."""
    if begin >= end:
        return
    # Clocks are not aligned exactly. An input cannot arrive before its microbatch is issued. If it seems so, the issue
    # is moved to the arrival.
    issued = min(max(min(issued, arrived), begin), end)
    arrived = min(max(arrived, begin), end)
    states: tuple[IdleState, ...] = ("no_work", "recv_wait", "host")
    for state, (since, until) in zip(states, pairwise((begin, issued, arrived, end)), strict=True):
        if since < until:
            yield Idle(state, since, until, position)
